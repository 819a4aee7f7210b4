"""A program at a terminal: what a person would see, and type."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

PATIENCE_S = 60.0  # two cores may be shared by several test runs

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>78]|\r")


class Terminal:
    """A process whose standard streams are one terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            # No terminal here answers the question where the cursor stands.
            env={**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        """Type `text`; "\\r" is Enter, "\\x03" Ctrl-C and "\\x04" Ctrl-D."""
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C while the program runs: the terminal makes it a SIGINT."""
        self.process.send_signal(signal.SIGINT)

    def expect(self, pattern: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until `pattern` is seen; what was seen since the last call, up to its end."""
        deadline = monotonic() + patience_s
        while (match := re.search(pattern, self._seen)) is None:
            if not self._read(deadline):
                raise AssertionError(f"{pattern!r} was not seen in:\n{self._seen}")
        before, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return before

    def wait(self) -> int:
        """Read all that comes until the program ends; its exit code."""
        deadline = monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    @property
    def rest(self) -> str:
        """What was seen and not expected."""
        return self._seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # Linux's way to say that the other end is closed
            data = b""
        self._seen = _ESCAPES.sub("", self._seen + data.decode(errors="replace"))
        return bool(data)


@contextmanager
def at_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """`command` at a terminal, ended at the end."""
    terminal = Terminal(command, environment)
    try:
        yield terminal
    finally:
        terminal.close()
