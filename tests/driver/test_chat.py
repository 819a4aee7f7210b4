"""The chat loop over plain lines: commands, interrupts and errors that do not end it."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator

import pytest

from expert_driver.chat import Chat, line_reader
from expert_driver.conversation import Conversation
from expert_network.errors import NodeClosed
from tests.driver.test_conversation import conversation, say
from tests.driver.test_engine import make_flaky


class Person:
    """Types lines; an exception among them is raised in its place."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def __call__(self) -> str:
        line = next(self._lines)
        if isinstance(line, str):
            return line
        raise line


def chat(talk: Conversation, *lines: str | type[BaseException]) -> tuple[str, str]:
    """What the chat writes on stdout and on stderr."""
    out, notes = io.StringIO(), io.StringIO()
    Chat(talk, Person(*lines), out, notes).run()
    return out.getvalue(), notes.getvalue()


def test_replies_are_streamed_to_stdout() -> None:
    """Each reply is written as it is, with a line end, and notes go elsewhere."""
    reply = say(conversation(), "hello")
    cut = "[cut at 5 tokens; --max-tokens allows more]\n"
    written = chat(conversation(), "hello", "/reset", "hello")
    assert written == (f"{reply}\n{reply}\n", f"{cut}forgotten\n{cut}")


@pytest.mark.parametrize("exit", ["/exit", "/quit", EOFError])
def test_leaving(exit: str | type[BaseException]) -> None:
    """/exit, /quit and Ctrl-D leave; nothing after them is read."""
    assert chat(conversation(), exit, "hello") == ("", "")


def test_help_lists_the_commands() -> None:
    """/help says what there is, and so does an unknown command."""
    _, notes = chat(conversation(), "/help", "/what")
    assert "/reset" in notes and "/what is not known" in notes


def test_ctrl_c_twice_leaves() -> None:
    """One Ctrl-C at the prompt says how to leave, a second one leaves."""
    out, notes = chat(conversation(), KeyboardInterrupt, KeyboardInterrupt, "hello")
    assert out == "" and notes.count("leaves") == 1


def test_a_line_between_two_ctrl_c_starts_anew() -> None:
    """Only two Ctrl-C in a row leave."""
    out, notes = chat(conversation(), KeyboardInterrupt, "hello", KeyboardInterrupt, "hello")
    assert out.count("\n") == 2 and notes.count("leaves") == 2


def test_an_error_keeps_the_chat() -> None:
    """A node's failure is one sentence; the next question is answered."""
    talk = conversation()
    whole = say(conversation(), "hello")

    def meet(call: int) -> None:
        if call == 4:
            raise NodeClosed("a", "closed the link", "start it again")

    make_flaky(talk.engine, meet)
    out, notes = chat(talk, "hello", "hello")
    assert notes.startswith("error: node a closed the link; start it again.\n")
    assert out.endswith(f"{whole}\n")


def test_ctrl_c_stops_a_reply_and_keeps_the_chat() -> None:
    """A SIGINT during a reply ends that reply; the next question is answered."""
    talk = conversation()

    def meet(call: int) -> None:
        if call == 4:
            os.kill(os.getpid(), signal.SIGINT)

    make_flaky(talk.engine, meet)
    out, notes = chat(talk, "hello", "hello")
    assert notes.startswith("stopped\n[cut")
    assert len(out.split("\n")[0].split()) < 5 + 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_ctrl_c_during_a_reply_leave() -> None:
    """A second SIGINT before the reply has stopped leaves the chat."""
    talk = conversation()

    def meet(call: int) -> None:
        if call == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    make_flaky(talk.engine, meet)
    out, _ = chat(talk, "hello", "hello")
    assert out.endswith(" \n") and out.count("\n") == 1


def test_an_overlong_conversation_is_said_to_be() -> None:
    """Past what the model was made for, each reply is followed by what to do about it."""
    talk = conversation()
    talk.longest = 20
    _, notes = chat(talk, "hello", "hello", "/reset", "hello")
    assert notes.count("longer than the 20 tokens") == 1


def test_lines_from_a_pipe_end_with_it() -> None:
    """A pipe's lines are read one by one, and its end is the end."""
    read = line_reader(io.StringIO("one\ntwo"))
    assert [read(), read()] == ["one\n", "two"]
    with pytest.raises(EOFError):
        read()
