"""What a benchmark measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["decode", "prefill", "dispatch", "kernels"]
PARTS: tuple[Part, ...] = ("decode", "prefill", "dispatch", "kernels")


@dataclass(frozen=True)
class Settings:
    """`contexts` and `prompts` in tokens; `tokens` are decoded at each context in each round.

    `dispatches` of one row are timed in each round.
    """

    contexts: tuple[int, ...] = (128, 512, 2048)
    prompts: tuple[int, ...] = (128, 512, 2048)
    tokens: int = 32
    rounds: int = 5
    dispatches: int = 200
    parts: tuple[Part, ...] = PARTS

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every number of tokens that is read, ascending."""
        decoded = self.contexts if "decode" in self.parts else ()
        timed = self.prompts if "prefill" in self.parts else ()
        return tuple(sorted({*decoded, *timed}))


QUICK = Settings((128,), (128,), tokens=8, rounds=3, dispatches=50)

#: Before anything is timed each variant reads this many tokens and decodes as many as stand second.
WARM_UP = (64, 8)
