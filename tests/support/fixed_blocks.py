"""What a made-up partition says to a node that would change what it holds."""

from __future__ import annotations

from typing import Any


class FixedBlocks:
    """Holds what it holds: a base of made-up Blocks."""

    def hold(self, spec: Any, blocks: Any) -> None:
        raise AssertionError("these blocks do not change")

    def keep(self, spec: Any, experts: Any) -> None:
        raise AssertionError("these blocks do not change")

    def scattered(self, layer: int) -> bool:
        return False
