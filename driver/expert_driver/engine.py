"""The token loop: prefill in chunks, then a token at a time, each given out as it is sampled.

mlx-lm's own loop runs a step ahead of the tokens that it gives out. With experts on a network that
step is a round trip per layer, which would delay each token and be wasted after the last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from expert_driver.config import Sampling
from expert_driver.context import Context
from expert_driver.figures import Finish, Timing
from expert_driver.passes.passes import Chunk, Passes, cut
from expert_driver.times import Watch
from expert_network.errors import InputError
from expert_network.model.host import HostArray

CHUNK = 512  # tokens of a prompt in one pass: bounds the graph, the dispatches and the mask
# Tokens from which on a prompt is worth two passes, which read weights twice. A GPU needs more rows
# at once, here and on nodes, which are taken to be like the driver.
HALVED, HALVED_GPU = 64, 512
LOGITS = 1 << 24  # logits of one pass that are all kept: 64 MB in float32
CLEAR_EVERY = 256  # tokens between two returns of MLX's spare buffers, as mlx-lm does

Sampler = Callable[[mx.array], Any]


class Engine:
    """A model whose experts answer wherever they are. Use it on the thread that loaded it.

    `eos` are the ids that end a reply; `vocabulary` is how many ids there are. `passes` are those
    that attend to the experts behind the model's seams. `watch` is told when tokens are chosen.
    """

    def __init__(self, model: Module, eos: frozenset[int], passes: Passes | None = None) -> None:
        self.model, self.eos = model, eos
        self.passes = Passes() if passes is None else passes
        self.passes.learn(model)
        self.stop = self.passes.stop
        self.watch: Watch | None = None
        self.vocabulary = vocabulary_size(model)

    def context(self) -> Context:
        """A new, empty context."""
        return Context(lambda: make_prompt_cache(self.model))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InputError unless there are ids and each is in the vocabulary."""
        if not ids:
            raise InputError("there are no token ids; give at least one.")
        wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise InputError(
                f"token id {wrong} is not in this model's vocabulary of {self.vocabulary} tokens; "
                f"ids go from 0 to {self.vocabulary - 1}."
            )

    def logit_chunks(self, ids: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        """The logits after each of `ids`, as float32 arrays (at most CHUNK, vocabulary)."""
        self.check_ids(ids)
        step = max(1, min(CHUNK, LOGITS // self.vocabulary))
        chunks = [Chunk(chunk.ids, wanted=True) for chunk in cut(ids, step)]
        for logits in self.passes.run(self.context(), chunks):
            assert logits is not None
            yield np.array(logits[0].astype(mx.float32))

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """The logits after each of `ids`: float32 (len(ids), vocabulary)."""
        return np.concatenate(list(self.logit_chunks(ids)))

    def generate(self, prompt: Sequence[int], context: Context, sampling: Sampling) -> Generation:
        """A reply to `prompt`, of which `context` may hold a prefix already; iterate over it."""
        self.check_ids(prompt)
        return Generation(self, prompt, context, sampling)

    def sampler(self, sampling: Sampling) -> Sampler:
        """mlx-lm's sampler: logits (1, vocabulary) to what holds one id."""
        if sampling.temp == 0:
            return _greedy
        # mlx-lm refuses a top_k that leaves nothing out.
        top_k = sampling.top_k if sampling.top_k < self.vocabulary else 0
        sampler: Sampler = make_sampler(
            sampling.temp, top_p=sampling.top_p, min_p=sampling.min_p, top_k=top_k
        )
        return lambda logits: sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def prefill(self, context: Context, ids: Sequence[int]) -> None:
        """Read `ids` into the context, whose logits nobody needs."""
        deque(self.passes.run(context, self._chunks(ids)), maxlen=0)

    def read(self, context: Context, ids: Sequence[int]) -> mx.array:
        """Read `ids` into the context; logits (1, vocabulary) after the last of them.

        Whatever breaks this off leaves the context with the chunks that were read, or empty.
        """
        # The last token is a pass of its own, which has logits for one row and not for a chunk.
        chunks = [*self._chunks(ids[:-1]), Chunk(ids[-1:], wanted=True)]
        (logits,) = deque(self.passes.run(context, chunks), maxlen=1)
        assert logits is not None
        return logits.reshape(1, -1)

    def _chunks(self, ids: Sequence[int]) -> list[Chunk]:
        """`ids` in chunks of at most CHUNK: of one size and an even number, for passes in pairs."""
        halved = HALVED if mx.default_device().type == mx.DeviceType.cpu else HALVED_GPU
        if not self.passes.in_pairs or len(ids) < halved:
            return cut(ids, CHUNK)
        count = 2 * ceil(len(ids) / (2 * CHUNK))
        return cut(ids, ceil(len(ids) / count))

    def step(self, context: Context, ids: Sequence[int], sampler: Sampler) -> int:
        """Read some tokens and choose the next."""
        watch, began = self.watch, time.perf_counter()
        logits = self.read(context, ids)
        if watch is None:
            return cast(int, sampler(logits).item())
        mx.eval(logits)  # so that choosing can be told from computing
        computed = time.perf_counter()
        chosen = cast(int, sampler(logits).item())
        watch.chose(len(ids), began, computed, time.perf_counter())
        return chosen


class Generation:
    """One reply, as an iterator over its token ids; an end-of-text token is not among them.

    `finish` says afterwards why it ended: "stop" at an end-of-text token, "length" at max_tokens.
    Raises what the experts raise, or Cancelled; the context then holds what was read until there.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], context: Context, sampling: Sampling
    ) -> None:
        self._engine, self._prompt, self._context = engine, prompt, context
        self._sampling = sampling
        self.finish: Finish | None = None
        self.timing = Timing(prompt_tokens=len(prompt))

    def __iter__(self) -> Iterator[int]:
        engine, context, timing = self._engine, self._context, self.timing
        sampler = engine.sampler(self._sampling)
        if self._sampling.seed is not None:
            mx.random.seed(self._sampling.seed)
        started = time.perf_counter()
        rest = context.reuse(self._prompt)
        timing.reused = len(context.tokens)
        token = engine.step(context, rest, sampler)
        timing.prefill_s = timing.first_token_s = time.perf_counter() - started
        if engine.watch is not None:
            engine.watch.restart()
        while not self._is_end(token):
            timing.tokens += 1
            yield token
            if timing.tokens == self._sampling.max_tokens:
                self.finish = "length"
                return
            before = time.perf_counter()
            token = engine.step(context, [token], sampler)
            timing.decode_s += time.perf_counter() - before
            if timing.tokens % CLEAR_EVERY == 0:
                mx.clear_cache()
        self.finish = "stop"

    def _is_end(self, token: int) -> bool:
        return token in self._engine.eos and not self._sampling.ignore_eos


def _greedy(logits: mx.array) -> Any:
    """The id of the largest logit, found by whoever has them at hand."""
    values = logits.host if isinstance(logits, HostArray) else None
    return mx.argmax(logits, axis=-1) if values is None else np.argmax(values)


def vocabulary_size(model: Any) -> int:
    """How many token ids `model` knows: what its config says, else its largest embedding."""
    stated = getattr(getattr(model, "args", None), "vocab_size", None)
    if isinstance(stated, int):
        return stated
    tables = (Embedding, QuantizedEmbedding)
    return max(int(m.weight.shape[0]) for m in model.modules() if isinstance(m, tables))
