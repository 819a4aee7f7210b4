"""How long work tells how far it is, without knowing who draws it."""

from __future__ import annotations

from collections.abc import Callable

# (done, total, what): bytes done, bytes in all, and the few words for what is being done now.
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""
