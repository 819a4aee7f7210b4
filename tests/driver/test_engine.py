"""The token loop: what it yields, when it stops, and what an interruption leaves behind."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

from expert_driver import engine as engine_module
from expert_driver.config import Sampling
from expert_driver.engine import Engine, vocabulary_size
from expert_network.errors import Cancelled, InputError, NodeClosed
from expert_network.model.host import HostArray
from tests.driver import tiny

PROMPT = [5, 9, 2, 30, 7]


@pytest.fixture(params=[tiny.qwen, tiny.lfm], ids=["trimmable", "hybrid"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param(), frozenset())


class Flaky(Module):
    """A switch module that calls `meet(n)` before its n-th work."""

    def __init__(self, switch: Any, meet: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.switch, self._meet, self.calls = switch, meet, 0

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.calls += 1
        self._meet(self.calls)
        return cast(mx.array, self.switch(x, indices))


def make_flaky(engine: Engine, meet: Any) -> Flaky:
    """Let the last layer's experts call `meet`; other layers have advanced their caches by then."""
    model: Any = engine.model
    block = model.layers[-1]
    experts = block.mlp if hasattr(block, "mlp") else block.feed_forward
    experts.switch_mlp = flaky = Flaky(experts.switch_mlp, meet)
    return flaky


def reply(engine: Engine, count: int = 12, **sampling: Any) -> list[int]:
    return list(engine.generate(PROMPT, engine.context(), Sampling(max_tokens=count, **sampling)))


def test_greedy_tokens_are_mlx_lms(engine: Engine) -> None:
    """Greedy decoding gives the tokens that mlx-lm's own loop gives."""
    steps = generate_step(mx.array(PROMPT), engine.model, max_tokens=12)
    assert reply(engine) == [int(cast(int, token)) for token, _ in steps]


@pytest.mark.parametrize("logits", [[0.5, 2.0, 2.0, -1.0], [float("-inf"), -3.0, -3.0]])
def test_greedy_takes_the_first_of_the_largest(logits: list[float]) -> None:
    """Wherever the logits are: in memory already, or yet to be computed."""
    sampler = Engine(tiny.qwen(), frozenset()).sampler(Sampling())
    values = np.array([logits], np.float32)
    assert sampler(mx.array(values)).item() == sampler(HostArray.of(values)).item() == 1


def test_chunks_do_not_change_the_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is read in several chunks continues as one that is read at once."""
    whole = reply(engine)
    monkeypatch.setattr(engine_module, "CHUNK", 2)
    assert reply(engine) == whole


def test_a_seed_repeats_a_sample() -> None:
    """The same seed gives the same sample, another one another."""
    engine = Engine(tiny.qwen(), frozenset())
    samples = [reply(engine, temp=1.0, top_p=0.99, top_k=40, seed=seed) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_top_k_may_exceed_the_vocabulary() -> None:
    """A top-k that leaves nothing out is no restriction."""
    engine = Engine(tiny.qwen(), frozenset())
    assert reply(engine, temp=1.0, top_k=10**6, seed=1) == reply(engine, temp=1.0, seed=1)


def test_an_end_of_text_token_ends_the_reply() -> None:
    """The reply stops before an end-of-text token, with no pass spent on it."""
    engine = Engine(tiny.qwen(), frozenset())
    tokens = reply(engine)
    end = tokens.index(tokens[3])
    engine.eos = frozenset({tokens[3]})
    flaky = make_flaky(engine, lambda n: None)
    generation = engine.generate(PROMPT, engine.context(), Sampling(max_tokens=12))
    assert list(generation) == tokens[:end]
    assert generation.finish == "stop"
    assert flaky.calls == 2 + end  # the prompt but its last token, that token, then one for each


def test_ignore_eos_goes_on() -> None:
    """--ignore-eos gives out the end-of-text token and what follows it."""
    engine = Engine(tiny.qwen(), frozenset())
    tokens = reply(engine)
    engine.eos = frozenset(tokens)
    assert reply(engine) == []
    assert reply(engine, ignore_eos=True) == tokens


def test_max_tokens_spends_no_pass_too_many() -> None:
    """The last token that is asked for is given out without a pass after it."""
    engine = Engine(tiny.qwen(), frozenset())
    flaky = make_flaky(engine, lambda n: None)
    context = engine.context()
    generation = engine.generate(PROMPT, context, Sampling(max_tokens=3))
    tokens = list(generation)
    assert generation.finish == "length"
    assert flaky.calls == 2 + 2
    assert context.tokens == [*PROMPT, *tokens[:2]]


def test_a_token_is_given_out_before_the_next_pass() -> None:
    """Each token is yielded as soon as it is sampled."""
    engine = Engine(tiny.qwen(), frozenset())
    flaky = make_flaky(engine, lambda n: None)
    tokens = iter(engine.generate(PROMPT, engine.context(), Sampling(max_tokens=3)))
    next(tokens)
    assert flaky.calls == 2


def test_a_second_turn_reads_only_what_is_new(engine: Engine) -> None:
    """A conversation's next prompt reuses the cache of the last one."""
    context = engine.context()
    first = list(engine.generate(PROMPT, context, Sampling(max_tokens=4)))
    longer = [*PROMPT, *first, 11, 3]
    generation = engine.generate(longer, context, Sampling(max_tokens=4))
    assert list(generation) == list(
        engine.generate(longer, engine.context(), Sampling(max_tokens=4))
    )
    assert generation.timing.reused == len(PROMPT) + 3


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_failed_pass_leaves_the_context_usable(engine: Engine, broken: int) -> None:
    """After an error in the middle of a pass the same context gives the tokens of a fresh one."""
    whole = reply(engine)

    def meet(call: int) -> None:
        if call == broken:
            raise NodeClosed("a", "closed", "start it again")

    make_flaky(engine, meet)
    context = engine.context()
    with pytest.raises(NodeClosed):
        list(engine.generate(PROMPT, context, Sampling(max_tokens=12)))
    assert list(engine.generate(PROMPT, context, Sampling(max_tokens=12))) == whole


def test_stopping_keeps_what_was_read(engine: Engine) -> None:
    """A reply that is stopped raises Cancelled, and can be asked for again afterwards."""
    whole = reply(engine)
    context = engine.context()
    seen: list[int] = []
    with pytest.raises(Cancelled):
        for token in engine.generate(PROMPT, context, Sampling(max_tokens=12)):
            seen.append(token)
            if len(seen) == 5:
                engine.stop.request()
    assert seen == whole[:5]
    assert context.tokens == [*PROMPT, *whole[:4]]
    engine.stop.requested = False
    assert list(engine.generate(PROMPT, context, Sampling(max_tokens=12))) == whole


def test_logits_are_the_models(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are float32, one row for each id, the same from one chunk or several."""
    model: Any = engine.model
    logits = engine.logits(PROMPT)
    assert logits.dtype == np.float32 and logits.shape == (5, tiny.VOCABULARY)
    np.testing.assert_allclose(logits, np.array(model(mx.array([PROMPT])))[0], atol=1e-5)
    monkeypatch.setattr(engine_module, "CHUNK", 2)
    np.testing.assert_allclose(engine.logits(PROMPT), logits, atol=1e-5)


@pytest.mark.parametrize("ids", [[], [tiny.VOCABULARY], [-1]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    """An id that the model does not know is refused before anything is computed."""
    engine = Engine(tiny.qwen(), frozenset())
    with pytest.raises(InputError):
        engine.logits(ids)
    with pytest.raises(InputError):
        engine.generate(ids, engine.context(), Sampling())


def test_the_vocabulary_is_found_without_a_config() -> None:
    """Where the config does not say how many tokens there are, the embedding does."""
    model: Any = tiny.qwen()
    del model.args.vocab_size
    assert vocabulary_size(model) == tiny.VOCABULARY
