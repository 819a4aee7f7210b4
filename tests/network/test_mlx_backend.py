from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from expert_network.backend import detect
from expert_network.errors import NotOwned, StoreCorrupt
from expert_network.experts import upcast
from expert_network.experts.mlx_backend import ResidentLayer
from tests.support.switches import (
    EXPERTS,
    KINDS,
    Kind,
    array,
    as_float32,
    blocks_of,
    resident,
    rows,
    spec_of,
    switch_of,
)

HELD = [1, 2, 5, 6, 7, 11]

pytestmark = pytest.mark.skipif(detect().name != "mlx-cpu", reason="promised on CPU only")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(params=["kept", "cast"])
def keep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether float32 scales of small layers are kept, as they are, or cast at each call."""
    if request.param == "cast":
        monkeypatch.setattr(upcast, "KEEP_BYTES", 0)
    return str(request.param)


def adapted(layer: ResidentLayer) -> ResidentLayer:
    upcast.adapt([layer.switch])
    return layer


def routes(count: int, top: int = 3) -> Any:
    """Ids (count, top) of held experts, no two alike in a row."""
    rng = np.random.default_rng(2)
    return np.stack([rng.permutation(HELD)[:top] for _ in range(count)])


def assert_right(kind: Kind, outputs: mx.array, x: mx.array, ids: mx.array) -> None:
    expected = array(as_float32(kind)(x, ids))
    if kind.global_scale:  # ours multiplies the product, where MLX has nothing to compare with
        assert np.allclose(array(outputs), expected, rtol=1e-4, atol=1e-4)
    else:
        assert np.array_equal(array(outputs), expected)


@pytest.mark.parametrize("count", [1, 5, 40])  # 40 rows of 3: mlx-lm sorts from 64 pairs on
def test_slots_change_nothing(kind: Kind, keep: str, count: int) -> None:
    """Some experts at other slots give the bits that MLX gives for all at their own, in float32."""
    x, ids = rows(count), mx.array(routes(count))
    part = adapted(resident(kind, HELD)).outputs(x, ids)
    assert part.dtype == mx.float32
    assert_right(kind, part, x, ids)


def test_rows_are_alone(kind: Kind, keep: str) -> None:
    """A row gives the same bits alone, among few and among many, and for one expert at a time."""
    layer = adapted(resident(kind, HELD))
    x, ids = rows(40), mx.array(routes(40))
    many = array(layer.outputs(x, ids))
    few = [array(layer.outputs(x[n : n + 5], ids[n : n + 5])) for n in range(0, 40, 5)]
    assert np.array_equal(many, np.concatenate(few))
    alone = [array(layer.outputs(x[n : n + 1], ids[n : n + 1])) for n in range(40)]
    assert np.array_equal(many, np.concatenate(alone))
    single = [array(layer.outputs(x, ids[:, n : n + 1])) for n in range(3)]
    assert np.array_equal(many, np.concatenate(single, axis=1))


@pytest.mark.parametrize("width", [1, 7, 33])
def test_odd_widths(width: int) -> None:
    """Rows are alone too where the last numbers of a row do not fill a vector register."""
    for dtype in (mx.float32, mx.bfloat16):
        switch = switch_of(Kind("odd", dtype), width)
        upcast.adapt([switch])
        x, ids = rows(40), mx.array(routes(40))
        many = array(switch(x, ids))
        alone = [array(switch(x[n : n + 1], ids[n : n + 1])) for n in range(40)]
        assert np.array_equal(many, np.concatenate(alone))


def test_parts(kind: Kind) -> None:
    """A long dispatch computed in parts gives the same bits."""
    layer = adapted(resident(kind, HELD))
    x, ids = rows(40), mx.array(routes(40))
    whole = array(layer.outputs(x, ids))
    layer.most_pairs = 7
    assert np.array_equal(array(layer.outputs(x, ids)), whole)


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_holds_the_block(kind: Kind, in_place: bool) -> None:
    """The bytes of a block come back from memory as they were read, up-casting or not."""
    layer = adapted(resident(kind, HELD, in_place))
    blocks = blocks_of(switch_of(kind))
    assert [layer.block_bytes(expert) for expert in HELD] == [blocks[e] for e in HELD]
    assert layer.nbytes == len(HELD) * len(blocks[0])
    x, ids = rows(2), mx.array(routes(2))
    assert_right(kind, layer.outputs(x, ids), x, ids)


@pytest.mark.parametrize("expert", [0, 8, EXPERTS, EXPERTS + 70])
def test_absent_expert(expert: int) -> None:
    """An expert that is not resident is named, whether the model has it or not."""
    layer = resident(KINDS[0], HELD)
    for ask in (
        lambda: layer.slots(np.array([1, expert, 2])),
        lambda: layer.outputs(rows(1), mx.array([[2, expert]])),
        lambda: layer.block_bytes(expert),
    ):
        with pytest.raises(NotOwned) as caught:
            ask()
        assert (caught.value.layer, caught.value.expert) == (5, expert)
        assert str(caught.value).startswith(f"block (5, {expert}) is not held here; ")


def test_complete_layer_is_lazy() -> None:
    """With all experts resident, ids that are not there yet are not waited for."""
    layer = resident(Kind("affine", mx.bfloat16, ("affine", 4, 32)), range(EXPERTS))
    upcast.adapt([layer.switch])
    ids = mx.arange(1 << 20)[1:8:6][None].astype(mx.uint32)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    out = layer.outputs(rows(1), ids)
    assert mx.get_peak_memory() - before < 1 << 20
    assert np.array_equal(array(out), array(layer.outputs(rows(1), mx.array([[1, 7]]))))


@pytest.mark.parametrize("pairs", [4, 80])
def test_temporaries_stay_small(pairs: int) -> None:
    """A call that up-casts takes less than 64 MB, of a layer of 151 MB in bfloat16."""
    from mlx_lm.models.switch_layers import SwitchGLU

    switch = SwitchGLU(1024, 3072, 8)
    switch.set_dtype(mx.bfloat16)
    mx.eval(switch.parameters())
    upcast.adapt([switch])
    x = mx.array(np.ones((pairs // 4, 1024), np.float32))
    ids = mx.array(np.arange(pairs).reshape(-1, 4) % 8)
    mx.eval(x, ids)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(switch(x, ids))
    assert before > 150e6
    assert mx.get_peak_memory() - before < 64e6


def test_strange_bytes_are_refused() -> None:
    """A block with something between its tensors could not be given back, and is refused."""
    switch = switch_of(Kind("odd", mx.float32, bias=True), 7)
    spec = spec_of(switch)

    def read(expert: int, pieces: Any) -> None:
        for piece in pieces:
            piece[:] = bytes([1]) * len(piece)

    with pytest.raises(StoreCorrupt, match=r"block \(5, 3\) has bytes that belong to no tensor"):
        ResidentLayer(spec, switch, np.array([3]), read, True)
