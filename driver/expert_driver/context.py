"""The KV cache and the token ids that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache


class Context:
    """What the model has read so far: `tokens`, and the cache that holds exactly these.

    The cache entries are mlx-lm's. Some families' entries cannot forget their last tokens; whatever
    would need that starts afresh instead.
    """

    def __init__(self, make_cache: Callable[[], list[Any]]) -> None:
        self._make_cache = make_cache
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.cache: list[Any] = self._make_cache()

    def extend(self, ids: Sequence[int]) -> None:
        """Say that a forward pass over `ids` has gone through."""
        self.tokens.extend(ids)

    def reuse(self, prompt: Sequence[int]) -> list[int]:
        """Keep what `prompt` has in common with the tokens; returns what is left to read of it.

        At least one token is left, since a forward pass over it gives the next token's logits.
        """
        common = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        if common < len(self.tokens):
            self._rewind(common)
        return list(prompt[len(self.tokens) :])

    def recover(self) -> None:
        """Make the cache stand for `tokens` again after a forward pass that broke off."""
        self._rewind(len(self.tokens))

    def evaluate(self) -> None:
        """Compute what the cache holds, so that no graph grows from chunk to chunk."""
        mx.eval([entry.state for entry in self.cache])

    def _rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        # A pass that broke off has advanced the entries of some layers and not of others.
        excess = [getattr(entry, "offset", -1) - length for entry in self.cache]
        if can_trim_prompt_cache(self.cache) and min(excess) >= 0:
            trimmed = [entry.trim(n) for entry, n in zip(self.cache, excess, strict=True)]
            if trimmed == excess:
                del self.tokens[length:]
                return
        self.reset()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids the two have in common from the start."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
