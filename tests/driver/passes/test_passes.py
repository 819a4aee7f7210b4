"""Passes at once: the bits of passes one after the other, and nothing left over when they break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from expert_driver import engine as engine_module
from expert_driver.config import Sampling
from expert_driver.context import Context
from expert_driver.engine import Engine
from expert_driver.passes.order import TRIAL
from expert_driver.passes.passes import DEPTH, Chunk, Passes
from expert_network.errors import Cancelled, NodeClosed
from expert_network.model.seam import Mode, find_switches, install
from tests.driver import tiny
from tests.driver.passes.far import Far, far
from tests.network import families
from tests.network.family_runs import OneNode
from tests.network.test_families import RUNNABLE
from tests.system.sessions import FULL

IDS = [(7 * n * n + 3) % tiny.VOCABULARY for n in range(30)]
CHUNKS = [Chunk(IDS[:12], True), Chunk(IDS[12:17]), Chunk(IDS[17:29], True), Chunk(IDS[29:], True)]

# A rotating cache, linear attention, convolutions, Mamba, chunks, an entry per sub-layer, shared
# experts; all families where there is time.
SOME = [
    "gpt_oss",
    "qwen3_next",
    "lfm2_moe",
    "nemotron_h",
    "llama4",
    "deepseek_v32",
    "longcat_flash",
]
MODES: tuple[Mode, ...] = ("sum", "exact")
FAMILIES = (
    [(family, mode) for family in RUNNABLE for mode in MODES]
    if FULL
    else [*((family, "sum") for family in SOME), ("gpt_oss", "exact"), ("qwen3_next", "exact")]
)


def read(engine: Engine) -> np.ndarray[Any, Any]:
    """The logits of CHUNKS where they are wanted, and of two tokens after them."""
    context = engine.context()
    found = [logits for logits in engine.passes.run(context, CHUNKS) if logits is not None]
    found += [engine.read(context, [token])[None] for token in (3, 5)]
    assert context.tokens == [*IDS, 3, 5]
    return np.concatenate([np.array(logits[0].astype(mx.float32)) for logits in found])


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_interleaved_passes_change_no_bit(family: str, mode: Mode) -> None:
    """Whatever caches a family has: two passes at once give the bits of one after the other."""
    engine, experts = far(families.build(family), mode)
    together = read(engine)
    assert engine.passes.interleaves and experts.most >= DEPTH
    engine.passes.interleaves = False
    experts.most = 0
    assert np.array_equal(read(engine), together)
    assert experts.most == 1


def test_one_pass_is_asked_for_while_the_other_waits() -> None:
    """At each layer the next chunk's experts are asked before the last chunk's are taken."""
    engine, experts = far(tiny.qwen())
    engine.read(engine.context(), IDS[:1] + IDS[1:2])
    # The first pass ends at the last layer's seam: nobody wants its logits.
    assert experts.events == ["ask 0", "ask 0", "take 0", "take 0", "ask 1", "take 1"]


def test_a_prompt_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: at most two dispatches of a chunk each are in flight, and memory is level."""
    monkeypatch.setattr(engine_module, "CHUNK", 8)
    engine, experts = far(tiny.qwen())
    peaks = []
    for length in (200, 400):
        context = engine.context()
        mx.reset_peak_memory()
        engine.prefill(context, [1] * length)
        held = sum(entry.nbytes for entry in context.cache)
        peaks.append(mx.get_peak_memory() - mx.get_active_memory() - held)
        assert len(context.tokens) == length
    assert experts.most == DEPTH and experts.most_rows == 8
    assert peaks[1] <= peaks[0] * 1.25 + 4096


@pytest.mark.parametrize(
    ("length", "rows"), [(63, {63}), (64, {32}), (513, {257, 256}), (1025, {257, 254})]
)
def test_a_prompt_is_cut_for_pairs(
    length: int, rows: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are of one size, at most 512 tokens and even in number; short prompts are not cut.

    In exact mode it is so wherever the experts are, since where chunks begin is in the bits.
    """
    monkeypatch.setattr(engine_module, "HALVED_GPU", engine_module.HALVED)
    seen: list[int] = []
    monkeypatch.setattr(Context, "extend", lambda self, ids: seen.append(len(ids)))
    model = tiny.qwen()
    for engine, _ in (far(tiny.qwen()), far(tiny.qwen(), "exact"), here(model, "exact")):
        engine.prefill(engine.context(), [1] * length)
        assert set(seen) == rows and sum(seen) == length
        assert len(seen) == 1 or len(seen) % 2 == 0
        seen.clear()


def here(model: Module, mode: Mode) -> tuple[Engine, OneNode]:
    """An engine whose experts are in this process, and these."""
    experts, passes = OneNode(find_switches(model)), Passes()
    install(model, passes.attend(experts), mode)
    return Engine(model, frozenset(), passes), experts


def breaking_at(moment: int, act: Callable[[], None]) -> Callable[[list[str]], None]:
    """Call `act` once, before the moment-th event."""
    left = [moment]

    def meet(events: list[str]) -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return meet


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("model", [tiny.qwen, tiny.lfm], ids=["trimmable", "hybrid"])
@pytest.mark.parametrize("error", [NodeClosed("a", "closed", "start it"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", (1, 3, 6, 11))
def test_what_breaks_one_pass_off_ends_the_other(
    model: Callable[[], Module], error: BaseException, moment: int
) -> None:
    """Nothing stays asked for, and the same context gives the tokens of a fresh one afterwards."""
    engine, experts = far(model(), meet=breaking_at(moment, raising(error)))
    context = engine.context()
    with pytest.raises(type(error)):
        list(engine.passes.run(context, CHUNKS))
    check_recovered(engine, experts, context)


@pytest.mark.parametrize("moment", [1, 6, 9])
def test_a_stop_ends_both_passes(moment: int) -> None:
    """A prompt that is stopped in the middle raises Cancelled, and can be read again."""
    engine, experts = far(tiny.qwen())
    experts.meet = breaking_at(moment, engine.stop.request)
    context = engine.context()
    with pytest.raises(Cancelled):
        list(engine.passes.run(context, CHUNKS))
    engine.stop.requested = False
    check_recovered(engine, experts, context)


def test_a_reader_who_leaves_ends_both_passes() -> None:
    """Logits that are not read to their end leave nothing behind."""
    engine, experts = far(tiny.lfm())
    context = engine.context()
    chunks: Any = engine.passes.run(context, [Chunk(chunk.ids, True) for chunk in CHUNKS])
    next(chunks)
    assert experts.rows
    chunks.close()
    check_recovered(engine, experts, context)


def check_recovered(engine: Engine, experts: Far, context: Context) -> None:
    """Nothing is in flight, no entry is watched, and the context is a prefix that can be used."""
    assert not experts.rows
    assert {type(entry) for entry in context.cache} == {type(e) for e in engine.context().cache}
    assert context.tokens in ([], IDS[:12], IDS[:17], IDS[:29])
    again = list(engine.generate(IDS, context, Sampling(max_tokens=4)))
    assert again == list(engine.generate(IDS, engine.context(), Sampling(max_tokens=4)))


class LooksBack(Module):
    """A last layer that, for more tokens than a trial has, uses the first layer's entry as well."""

    def __init__(self, layer: Any, first: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self._first = layer, first
        self.is_attention_layer = getattr(layer, "is_attention_layer", True)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if x.shape[1] > max(TRIAL):
            entry = self._first()
            seen = entry[0] if isinstance(entry, ArraysCache) else entry.keys_and_values()[0]
            x = x + seen.sum()
        return self.layer(x, mask, cache)


@pytest.mark.parametrize("build", [tiny.qwen, tiny.lfm], ids=["trimmable", "hybrid"])
def test_a_model_that_comes_back_is_read_one_pass_after_the_other(build: Any) -> None:
    """What no trial could see is noticed when it happens, and the bits are right all the same."""
    model, contexts = build(), list[Context]()
    layers = model.model.layers
    layers[-1] = LooksBack(layers[-1], lambda: contexts[-1].cache[0])
    engine, experts = far(model)
    make = engine.context
    engine.context = lambda: contexts.append(make()) or contexts[-1]  # type: ignore
    assert engine.passes.interleaves
    found = read(engine)
    assert not engine.passes.interleaves and not experts.rows
    assert np.array_equal(found, read(engine))


def test_experts_in_this_process_are_not_interleaved() -> None:
    """There is nothing to wait for; but the last layer's experts are left out here too."""
    model = tiny.qwen()
    engine, experts = here(model, "sum")
    assert not engine.passes.interleaves
    engine.prefill(engine.context(), IDS * 3)
    assert len(experts.routes) == len(cast(Any, model).layers) - 1
