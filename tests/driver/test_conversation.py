"""Turns of a conversation: what they read again, and what a stop or an error leaves."""

from __future__ import annotations

from typing import Any

import pytest

from expert_driver.config import Sampling
from expert_driver.conversation import Conversation
from expert_driver.engine import Engine
from expert_driver.text import Text
from expert_network.errors import Cancelled, InputError, NodeClosed
from tests.driver import tiny
from tests.driver.test_engine import make_flaky


def conversation(system: str | None = None, model: Any = tiny.qwen) -> Conversation:
    engine = Engine(model(), frozenset())
    return Conversation(engine, Text(tiny.Letters(), frozenset()), Sampling(max_tokens=5), system)


def say(conversation: Conversation, text: str) -> str:
    return "".join(conversation.ask(text))


@pytest.mark.parametrize("model", [tiny.qwen, tiny.lfm])
def test_a_turn_reads_only_what_is_new(model: Any) -> None:
    """The second turn reuses all that the first has read, and gives what a fresh reading gives."""
    talk = conversation(model=model)
    first = say(talk, "hello")
    second = say(talk, "go on")
    assert talk.last is not None
    assert talk.last.timing.reused == 1 + 5 + 1 + 1 + 4  # question, marks, reply but its last token
    fresh = conversation(model=model)
    fresh.messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]
    assert say(fresh, "go on") == second


def test_the_system_prompt_comes_first_and_survives_a_reset() -> None:
    """/reset forgets all but the system prompt."""
    talk = conversation("be kind")
    reply = say(talk, "hello")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.reset()
    assert say(talk, "hello") == reply


def test_a_stopped_reply_stays_as_far_as_it_went() -> None:
    """What was said before the stop is part of the conversation."""
    talk = conversation()
    said = []
    with pytest.raises(Cancelled):
        for piece in talk.ask("hello"):
            said.append(piece)
            if len(said) == 2:
                talk.engine.stop.request()
    assert len(said) == 2
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(said)}


def test_a_failed_turn_can_be_asked_again() -> None:
    """An error takes its question with it, and the conversation goes on as if never asked."""
    talk, other = conversation(), conversation()
    say(talk, "hello")
    say(other, "hello")
    broken = iter([False, False, True, False])

    def meet(call: int) -> None:
        if next(broken, False):
            raise NodeClosed("a", "closed", "start it again")

    make_flaky(talk.engine, meet)
    with pytest.raises(NodeClosed):
        say(talk, "go on")
    assert len(talk.messages) == 2
    assert say(talk, "go on") == say(other, "go on")


def test_a_template_that_refuses_is_a_sentence() -> None:
    """What a chat template raises becomes an error that names the system prompt."""
    talk = conversation()

    def refuse(messages: object, **_: object) -> list[int]:
        raise ValueError("System role not supported")

    talk.text._tokenizer.apply_chat_template = refuse
    with pytest.raises(InputError, match=r"System role not supported.*--system-prompt"):
        say(talk, "hello")


def test_a_model_without_a_template_gets_plain_text() -> None:
    """Without a chat template the messages are read as they are."""
    talk = conversation()
    talk.text._tokenizer.has_chat_template = False
    say(talk, "hello")
    assert talk.last is not None and talk.last.timing.prompt_tokens == len("hello")
