"""The cost of leaving MLX."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import seam
from tests.bench.shapes import SHAPES


def test_rows_leave_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token, and in the same way as over a network; the cost is what that takes more."""
    asked: list[int] = []
    begin = seam.Answered.begin_sum

    def noted(self: seam.Answered, layer: int, *rest: Any) -> Any:
        asked.append(layer)
        return begin(self, layer, *rest)

    monkeypatch.setattr(seam, "TOKENS", 4)
    monkeypatch.setattr(seam.Answered, "begin_sum", noted)
    shape = SHAPES["tiny"]
    result = seam.measure(shape, rounds=2)
    # The last round's tokens but the first, which the prompt gives.
    assert asked[-3 * shape.layers :] == [*range(shape.layers)] * 3
    assert result["without"]["median"] > 0 and result["seam"]["most"] >= result["seam"]["least"]
