"""The chat at a terminal, or over plain lines: reading, streaming replies, surviving errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from expert_driver.conversation import Conversation
from expert_driver.figures import cut_short
from expert_driver.stopping import stopped_by_interrupt
from expert_network.errors import Cancelled, ExpertNetworkError

HELP = """\
/help   show this
/reset  forget the conversation
/exit   leave (Ctrl-D and Ctrl-C twice do too)
Ctrl-C stops a reply."""

OVERLONG = (
    "This conversation is longer than the {} tokens the model was made for; /reset starts anew."
)
_EXITS = ("/exit", "/quit")


class Reader(Protocol):
    """Where the person's lines come from."""

    def __call__(self) -> str:
        """The next line. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""


class Chat:
    """A conversation with a person. `after` is called when a reply has ended, for -v."""

    def __init__(
        self,
        conversation: Conversation,
        read: Reader,
        out: TextIO,
        notes: TextIO,
        after: Callable[[Conversation], None] = lambda conversation: None,
    ) -> None:
        self._conversation, self._read = conversation, read
        self._out, self._notes, self._after = out, notes, after

    def run(self) -> None:
        """Talk until the person leaves."""
        for line in self._lines():
            if line in _EXITS:
                return
            if line == "/reset":
                self._conversation.reset()
                self._note("forgotten")
            elif line == "/help":
                self._note(HELP)
            elif line.startswith("/") and line[1:].isalpha():
                self._note(f"{line} is not known; /help lists what is.")
            elif line and not self._reply(line):
                return

    def _lines(self) -> Iterator[str]:
        interrupted = False
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self._note("Ctrl-C again, or Ctrl-D, leaves.")
                continue
            interrupted = False
            yield line

    def _reply(self, question: str) -> bool:
        """Stream one reply; False when the person wants to leave."""
        stop = self._conversation.engine.stop
        stop.requested = False
        try:
            with stopped_by_interrupt(stop):
                stream(self._conversation, question, self._out, self._notes)
            self._after(self._conversation)
            if self._conversation.overlong:
                self._note(OVERLONG.format(self._conversation.longest))
        except Cancelled:
            self._note("stopped")
        except KeyboardInterrupt:
            return False
        except ExpertNetworkError as error:
            self._note(f"error: {error}")
        return True

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def stream(conversation: Conversation, question: str, out: TextIO, notes: TextIO) -> None:
    """Write the reply to `question` as it comes, and a line end after it, broken off or not.

    A reply that was cut at its greatest length is said to be, on `notes`.
    """
    try:
        for piece in conversation.ask(question):
            out.write(piece)
            out.flush()
    finally:
        out.write("\n")
        out.flush()
    generation = conversation.last
    if generation and (note := cut_short(generation.finish, generation.timing)):
        print(note, file=notes, flush=True)


def terminal_reader(prompt: str = "> ") -> Reader:
    """Lines from a person at a terminal, with editing and a history."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    return lambda: session.prompt(prompt)


def line_reader(stream: TextIO) -> Reader:
    """Lines from a file or a pipe."""

    def read() -> str:
        line = stream.readline()
        if not line:
            raise EOFError
        return line

    return read


def reader_for(stream: TextIO) -> Reader:
    """The reader that suits `stream`: with editing if both it and stdout are a terminal."""
    at_terminal = stream.isatty() and sys.stdout.isatty()
    return terminal_reader() if at_terminal else line_reader(stream)
