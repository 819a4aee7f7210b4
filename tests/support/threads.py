"""Work on another thread than the test's own: MLX's streams belong to threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, on a thread of its own."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]
