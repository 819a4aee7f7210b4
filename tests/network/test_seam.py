"""expert_network.model.seam and deferred"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP

from expert_network.backend import detect
from expert_network.model.deferred import Deferred
from expert_network.model.seam import Mode, Seam, expert_tensors, find_switches, install
from tests.network.family_runs import OneNode

HIDDEN, EXPERTS, TOP_K = 8, 6, 3

detect()


class Block(Module):
    """A block that adds its experts up as `combine` does."""

    def __init__(self, combine: Callable[[Any, mx.array], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.router = Linear(HIDDEN, EXPERTS)
        self.switch_mlp = SwitchGLU(HIDDEN, 16, EXPERTS)
        self.combine = combine

    def __call__(self, x: mx.array) -> mx.array:
        gates = self.router(x)
        ids = mx.argpartition(-gates, kth=TOP_K - 1, axis=-1)[..., :TOP_K]
        scores = mx.softmax(mx.take_along_axis(gates, ids, axis=-1), axis=-1)
        return x + cast(mx.array, self.combine(self.switch_mlp(x, ids), scores))


class Model(Module):
    """Blocks one after another, with the interface of mlx-lm's models."""

    def __init__(self, *blocks: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed = Embedding(32, HIDDEN)
        self.layers = list(blocks)

    def __call__(self, ids: mx.array, cache: list[KVCache] | None = None) -> mx.array:
        h = self.embed(ids)
        for block in self.layers:
            h = cast(Any, block)(h)
        return cast(mx.array, h)


class Counting(OneNode):
    """The switch modules themselves, and a record of what was asked for."""

    def __init__(self, model: Module) -> None:
        super().__init__(find_switches(model))
        self.asked: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self.asked.append(("outputs", x.shape, ids.shape))
        return super().outputs(layer, x, ids)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        made = super().weighted_sum(layer, x, ids, weights)
        self.asked[-1] = ("sum", x.shape, weights.shape)
        return made


def usual(y: Any, scores: mx.array) -> Any:
    return (y * scores[..., None]).sum(axis=-2)


IDS = mx.array([[1, 2, 3, 4], [9, 8, 7, 6]])


def both(*blocks: Module, mode: Mode) -> tuple[mx.array, mx.array, Counting, list[Seam]]:
    """The logits before and after seams were installed, and what the seams asked for."""
    model = Model(*blocks)
    before = model(IDS)
    mx.eval(before)
    experts = Counting(model)
    seams = install(model, experts, mode)
    return before, model(IDS), experts, seams


# --- what a block may do with a deferred result


OTHER_USES: dict[str, Callable[[Any, mx.array], Any]] = {
    "the sum by another name of the axis": lambda y, s: (y * s[..., None]).sum(axis=2),
    "the sum, positionally": lambda y, s: (y * s[..., None]).sum(-2),
    "cast back": lambda y, s: (y * s[..., None]).sum(axis=-2).astype(y.dtype),
    "weights from the left": lambda y, s: (s[..., None] * y).sum(axis=-2),
    "mx.sum": lambda y, s: mx.sum(y * s[..., None], axis=-2),
    "einsum": lambda y, s: mx.einsum("blkd,blk->bld", y, s),
    "matmul": lambda y, s: (s[..., None, :] @ y).squeeze(-2),
    "cast first": lambda y, s: (y.astype(mx.float32) * s[..., None]).sum(axis=-2),
    "weights twice": lambda y, s: (y * s[..., None] * s[..., None]).sum(axis=-2),
    "keepdims": lambda y, s: (y * s[..., None]).sum(axis=-2, keepdims=True).squeeze(-2),
    "over the wrong axis": lambda y, s: (y * s[..., None]).sum(axis=-1).max(-1, keepdims=True),
    "no weights": lambda y, s: y.sum(axis=-2),
    "weights of every channel": lambda y, s: (y * mx.broadcast_to(s[..., None], y.shape)).sum(-2),
    "one by one": lambda y, s: sum(y[..., k, :] * s[..., k, None] for k in range(TOP_K)),
    "arithmetic": lambda y, s: ((1 + y - 1) * s[..., None] / 2 * 2).sum(axis=-2),
    "more than the sum": lambda y, s: (y * s[..., None]).sum(axis=-2) + 0 * y[..., 0, :],
    "compiled": lambda y, s: mx.compile(usual)(y, s),
}


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES)
@pytest.mark.parametrize("mode", ["sum", "exact"])
def test_every_use_gives_what_the_switch_module_would(
    use: Callable[[Any, mx.array], Any], mode: Mode
) -> None:
    """However a block adds its experts up, the seam changes nothing."""
    before, after, _, _ = both(Block(use), Block(usual), mode=mode)
    assert after.dtype == before.dtype
    assert mx.allclose(before, after, rtol=1e-6, atol=1e-6)


BY_METHODS = [
    use
    for name, use in OTHER_USES.items()
    if name not in ("mx.sum", "einsum", "compiled", "weights from the left", "matmul")
]


@pytest.mark.parametrize("use", [usual, *BY_METHODS])
def test_a_deferred_result_behaves_like_the_array(use: Callable[[Any, mx.array], Any]) -> None:
    """Without any trial: methods, operators and indexing give what they give on the array."""
    model = Model(Block(usual))
    experts = Counting(model)
    x, scores = mx.random.normal((2, 4, HIDDEN)), mx.random.uniform(shape=(2, 4, TOP_K))
    ids = mx.random.randint(0, EXPERTS, (2, 4, TOP_K))
    expected = use(experts.modules[0](x, ids), scores)
    found = use(Deferred(experts, 0, x, ids), scores)
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_outputs_are_asked_for_once_however_often_they_are_used() -> None:
    """A block that uses its result in several ways costs one dispatch."""
    model = Model(Block(usual))
    experts = Counting(model)
    y: Any = Deferred(experts, 0, mx.ones((1, 1, HIDDEN)), mx.zeros((1, 1, TOP_K), mx.uint32))
    assert y.ndim == 4 and y.shape == (1, 1, TOP_K, HIDDEN)
    assert mx.array_equal(y + 1, 1 + y) and mx.array_equal(y[..., 0, :], y[..., 1, :])
    assert [kind for kind, _, _ in experts.asked] == ["outputs"]


def test_the_usual_use_asks_for_one_sum_a_row() -> None:
    """In sum mode a block that multiplies and sums gets (rows, hidden) and never outputs."""
    _, _, experts, seams = both(Block(usual), mode="sum")
    assert [seam.mode for seam in seams] == ["sum"]
    assert experts.asked == [("sum", (8, HIDDEN), (8, TOP_K))]


def test_exact_mode_asks_for_outputs_and_changes_no_bit() -> None:
    """Exact mode never asks for a sum."""
    before, after, experts, seams = both(Block(usual), mode="exact")
    assert [seam.mode for seam in seams] == ["exact"]
    assert experts.asked == [("outputs", (8, HIDDEN), (8, TOP_K))]
    assert mx.array_equal(before, after)


@pytest.mark.parametrize(
    "name", ["mx.sum", "einsum", "compiled", "one by one", "no weights", "more than the sum"]
)
def test_a_block_that_sums_otherwise_gets_arrays(name: str) -> None:
    """Its seams ask for outputs, once a layer; blocks of other types still sum."""

    class Other(Block):
        pass

    _, _, experts, seams = both(Block(usual), Other(OTHER_USES[name]), mode="sum")
    assert [seam.mode for seam in seams] == ["sum", "exact"]
    assert [kind for kind, _, _ in experts.asked] == ["sum", "outputs"]


def test_a_path_taken_only_at_one_token_is_found() -> None:
    """The trial runs a prefill and a step: a block that differs there gets arrays."""

    def combine(y: Any, scores: mx.array) -> Any:
        return OTHER_USES["mx.sum" if scores.shape[1] == 1 else "cast back"](y, scores)

    _, _, _, seams = both(Block(combine), mode="sum")
    assert [seam.mode for seam in seams] == ["exact"]


def test_a_model_that_cannot_be_tried_gets_arrays() -> None:
    """Where the trial fails for a reason of its own, outputs are asked for everywhere."""

    class Picky(Model):
        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            if ids.shape[0] == 1:
                raise RuntimeError("two at a time, please")
            return super().__call__(ids, cache)

    model = Picky(Block(usual))
    before = model(IDS)
    experts = Counting(model)
    assert [seam.mode for seam in install(model, experts, "sum")] == ["exact"]
    assert mx.array_equal(model(IDS), before)


def test_the_trial_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing builds graphs and throws them away: no expert, and nothing of the trunk."""

    def forbidden(*_: Any) -> None:
        raise AssertionError("something was evaluated")

    model = Model(Block(usual), Block(OTHER_USES["mx.sum"]))
    experts = Counting(model)
    mx.synchronize()
    active = mx.get_active_memory()
    monkeypatch.setattr(mx, "eval", forbidden)
    install(model, experts, "sum")
    assert mx.get_active_memory() == active
    assert experts.asked == []


@pytest.mark.parametrize("scores", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [mx.float32, mx.bfloat16, mx.float16])
def test_a_sum_has_the_dtype_that_the_product_would(rows: mx.Dtype, scores: mx.Dtype) -> None:
    """bfloat16 outputs times float32 scores is float32, and so on, though sums are float32."""

    class Ones:
        def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
            raise AssertionError

        def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, w: mx.array) -> mx.array:
            assert w.dtype == mx.float32
            return mx.ones(x.shape, mx.float32)

    y = Deferred(Ones(), 0, mx.zeros((1, 2, HIDDEN), rows), mx.zeros((1, 2, TOP_K), mx.uint32))
    weights = mx.zeros((1, 2, TOP_K, 1), scores)
    assert y.dtype == rows
    expected = mx.zeros((1,), rows) * mx.zeros((1,), scores)
    assert (y * weights).sum(axis=-2).dtype == expected.dtype


def test_rows_may_come_without_the_tokens_dimension() -> None:
    """olmoe flattens its rows first: any leading shape works, and comes back."""
    model = Model(Block(usual))
    switch = cast(Any, model.layers[0]).switch_mlp
    x, ids = mx.random.normal((5, HIDDEN)), mx.random.randint(0, EXPERTS, (5, TOP_K))
    expected = switch(x, ids)
    install(model, Counting(model), "exact")
    assert mx.array_equal(cast(Any, model.layers[0]).switch_mlp(x, ids), expected)


# --- finding them


class Holder(Module):
    """A module with any children."""

    def __init__(self, **children: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, child in children.items():
            self[name] = child


def _glu() -> Module:
    return SwitchGLU(HIDDEN, 16, 2)


def test_switches_are_found_by_type_whatever_they_are_called() -> None:
    """Subclasses and SwitchMLP count, inside lists and dicts too; a bare SwitchLinear does not."""

    class Sparse(SwitchGLU):
        pass

    model = Holder(
        layers=[
            Holder(a=_glu(), o_proj=SwitchLinear(HIDDEN, HIDDEN, 2)),
            Holder(mlp=Linear(2, 2)),
            Holder(b={"deep": [Sparse(HIDDEN, 16, 2)]}),
            Holder(c=SwitchMLP(HIDDEN, 16, 2)),
        ]
    )
    assert [(site.layer, site.path) for site in find_switches(model)] == [
        (0, "layers.0.a"),
        (2, "layers.2.b.deep.0"),
        (3, "layers.3.c"),
    ]
    seams = install(model, Counting(model), "exact")
    assert model["layers"][2]["b"]["deep"][0] is seams[1]
    assert find_switches(model) == []


def test_layers_are_numbered_as_the_model_does() -> None:
    """Layer 10 comes after layer 9, and a number is the first one after "layers."."""
    model = Holder(model=Holder(layers=[Holder(mtp=Holder(layers=[_glu()])) for _ in range(11)]))
    assert [site.layer for site in find_switches(model)] == list(range(11))


@pytest.mark.parametrize(
    "model",
    [
        Holder(h=[Holder(moe=_glu()), Holder(moe=_glu())]),
        Holder(layers=[Holder(a=_glu(), b=_glu())]),
        Holder(layers=[Holder(a=_glu())], head=_glu()),
    ],
    ids=["not called layers", "two in one layer", "one outside"],
)
def test_where_numbers_do_not_tell_layers_apart_all_are_counted(model: Module) -> None:
    """Then the expert layers are 0, 1, 2… in the order of their paths."""
    sites = find_switches(model)
    assert [site.layer for site in sites] == [0, 1]
    assert [site.path for site in sites] == sorted(site.path for site in sites)


def test_only_projections_are_expert_tensors() -> None:
    """A norm inside the switch module (muse_spark) has no expert axis: it stays in the model."""
    switch = SwitchGLU(HIDDEN, 16, 2)
    switch.post_expert_norm = RMSNorm(HIDDEN)
    assert set(expert_tensors(switch)) == {
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    }
    model = Holder(layers=[Holder(experts=switch)])
    install(model, Counting(model), "exact")
    assert model["layers"][0]["experts"].post_expert_norm.weight.shape == (HIDDEN,)


def test_quantized_experts_keep_all_their_tensors() -> None:
    """Scales, biases and bias vectors have an expert axis as well."""
    switch = SwitchGLU(64, 64, 2, bias=True)
    quantize(switch, group_size=32, bits=4)
    names = {name.partition(".")[2] for name in expert_tensors(switch)}
    assert names == {"weight", "scales", "biases", "bias"}
    assert all(array.shape[0] == 2 for array in expert_tensors(switch).values())


def test_a_seam_has_no_parameters_of_the_experts() -> None:
    """Once seams are installed, evaluating the model's parameters loads no expert."""
    model = Model(Block(usual))
    install(model, Counting(model), "sum")
    assert "switch_mlp" not in str(cast(Any, model).parameters()["layers"][0]["switch_mlp"])
    assert cast(Any, model).parameters()["layers"][0]["switch_mlp"].keys() <= {"activation"}
