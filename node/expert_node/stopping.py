"""Being told to stop: SIGTERM, SIGINT, the end of standard input; and a second time, at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from expert_network.commandline import INTERRUPTED

T = TypeVar("T")


class Stop:
    """`asked` is set by the first request to stop, `forced` by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        #: What to exit with: 0 when told to stop, 130 when interrupted from the keyboard.
        self.code = 0

    def listen(self, at_eof: bool) -> None:
        """Take signals, and with `at_eof` the end of standard input, from here on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.request, 0)
        loop.add_signal_handler(signal.SIGINT, self.request, INTERRUPTED)
        if at_eof:
            # Not a reader of the loop: standard input may be a file, which cannot be polled.
            Thread(target=self._await_eof, args=(loop,), name="stdin", daemon=True).start()

    def request(self, code: int) -> None:
        """Ask to stop and exit with `code`; the second time, to stop waiting for anything."""
        if self.asked.is_set():
            self.forced.set()
            return
        self.code = code
        self.asked.set()

    def _await_eof(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self.request, 0)


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as problem:
            error = problem
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=work, name=getattr(function, "__name__", "work"), daemon=True).start()
    return await future
