"""What a decoder is given, and how it may refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fuzz.mutation import Mutator, mutated_bytes


class Never(Exception):
    """What a decoder refuses with that takes everything."""


@dataclass(frozen=True)
class Target:
    """A decoder. `run` may raise nothing but `refused`; `mutate` makes its inputs of `seeds`."""

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refused: type[Exception] = Never
    mutate: Mutator = mutated_bytes
