"""A conversation: its messages, and the context that lets each turn read only what is new."""

from __future__ import annotations

from collections.abc import Iterator

from expert_driver.config import Sampling
from expert_driver.engine import Engine, Generation
from expert_driver.text import Message, Text
from expert_network.errors import Cancelled


class Conversation:
    """What was said so far. `last` is the latest reply's Generation, with its figures.

    `longest` is the number of tokens that the model was made for, None where it is not known.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text,
        sampling: Sampling,
        system: str | None = None,
        longest: int | None = None,
    ) -> None:
        self.engine, self.text, self.sampling, self.longest = engine, text, sampling, longest
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)
        self._context = engine.context()
        self.last: Generation | None = None

    def reset(self) -> None:
        """Forget what was said, but for the system prompt."""
        self.messages = list(self._opening)
        self._context.reset()

    @property
    def overlong(self) -> bool:
        """Whether it is longer than the model was made for: replies get worse from there."""
        return self.longest is not None and len(self._context.tokens) > self.longest

    def ask(self, question: str) -> Iterator[str]:
        """The reply's text, piece by piece.

        A reply that is stopped stays in the conversation as far as it went, and Cancelled is
        raised. One that fails takes its question with it, so that it can be asked again.
        """
        messages = [*self.messages, Message(role="user", content=question)]
        prompt = self.text.encode_chat(messages)
        self.last = generation = self.engine.generate(prompt, self._context, self.sampling)
        said: list[str] = []
        try:
            for piece in self.text.pieces(generation):
                said.append(piece)
                yield piece
        except Cancelled:
            self._keep(messages, said)
            raise
        self._keep(messages, said)

    def _keep(self, messages: list[Message], said: list[str]) -> None:
        self.messages = [*messages, Message(role="assistant", content="".join(said))]
