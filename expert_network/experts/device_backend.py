"""One MoE layer's experts on a GPU: sums are made there too, and a dispatch waits once."""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from numpy.typing import NDArray

from expert_network.experts.layers import EXACT, SUM, Counts, MlxLayer, same
from expert_network.experts.mlx_backend import ResidentLayer, Run, pair_bytes
from expert_network.transfer import Transfer

#: Bytes of activations in one call of a switch module. A GPU needs many rows to be busy.
CALL_BYTES = 512 << 20
#: Pairs from which mlx-lm sorts them by expert, and MLX multiplies with other kernels.
SORTED = 64
#: Pairs for each expert from which casting all weights of a layer takes less than it saves.
WIDE_PAIRS = 12
#: Bytes of one projection's experts when they are cast, up to which they are.
WIDE_BYTES = 1 << 30
#: What mx.dequantize knows without more than scales and biases.
WIDE_MODES = ("affine", "mxfp4", "mxfp8")
_HALF_BYTES = 2


class DeviceLayer(MlxLayer):
    """A layer computed by the family's own switch module, which is taken over, in `dtype`.

    Precise outputs, and exact mode's, have the same bits whatever stands beside them. `transfer`
    may be shared by layers that take turns. wide: whether weights may be cast where that is faster.
    """

    def __init__(
        self, resident: ResidentLayer, dtype: mx.Dtype, transfer: Transfer, wide: bool = False
    ) -> None:
        super().__init__(resident, dtype)
        resident.most_pairs = max(SORTED, CALL_BYTES // pair_bytes(resident.spec))
        self._transfer = transfer
        may = wide and dtype in (mx.bfloat16, mx.float16)
        self._wide: Run | None = widened(resident.switch, resident.spec.experts) if may else None
        # Fewer kernels for the token loop's one row. Each number of its pairs is compiled once.
        self._sum_of_row = transfer.through(self._sum)

    def outputs(self, x: mx.array, ids: mx.array, precise: bool) -> mx.array:
        """See Layer. Lazy, unless experts are missing."""
        run = self._alike if precise else self._fast
        return self._resident.outputs(x.astype(self._dtype), ids, run).astype(x.dtype)

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, precise: bool
    ) -> mx.array:
        """See Layer; lazy where outputs is."""
        outputs = self._resident.outputs(x.astype(self._dtype), ids, self._fast)
        return _finish(SUM, outputs, weights.astype(mx.float32))

    def compute(
        self,
        mode: int,
        rows: NDArray[np.float32],
        offsets: NDArray[np.unsignedinteger],
        ids: NDArray[np.unsignedinteger],
        weights: NDArray[np.float32],
        precise: bool,
    ) -> NDArray[np.float32]:
        """See Layer."""
        slots = self._resident.slots(ids)
        if mode == SUM and len(rows) == 1:
            return self._sum_of_row(rows, slots[None], weights[None])
        made = self._many(mode, rows, np.diff(offsets), slots, weights)
        found: NDArray[np.float32] = self._transfer.fetch(made)[0]
        return found

    def _many(
        self,
        mode: int,
        rows: NDArray[np.float32],
        counts: Counts,
        slots: NDArray[np.uint32],
        weights: NDArray[np.float32],
    ) -> mx.array:
        each = same(counts)
        if not each:
            return self._ragged(mode, rows, counts, slots, weights)
        shape = (-1, each)
        x, s, w = self._transfer.put(rows, slots.reshape(shape), weights.reshape(shape))
        return _finish(mode, self._values(mode, x, s), w)

    def _ragged(
        self,
        mode: int,
        rows: NDArray[np.float32],
        counts: Counts,
        slots: NDArray[np.uint32],
        weights: NDArray[np.float32],
    ) -> mx.array:
        """The same for rows with unequal numbers of pairs."""
        row_of_pair = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        pairs, is_pair = _padded(counts)
        padded = np.where(is_pair, weights[pairs], np.float32(0))
        x, of_pair, s, p, w = self._transfer.put(rows, row_of_pair, slots[:, None], pairs, padded)
        values = self._values(mode, x[of_pair], s)
        return _finish(mode, values if mode == EXACT else values[:, 0][p], w)

    def _values(self, mode: int, x: mx.array, slots: mx.array) -> mx.array:
        """x (N, D) and slots (N, k) to (N, k, D), in calls that are not too long."""
        run = self._alike if mode == EXACT else self._fast
        return self._resident.in_parts(x.astype(self._dtype), slots, run)

    def _sum(self, x: mx.array, slots: mx.array, weights: mx.array) -> mx.array:
        return _finish(SUM, self._resident.run(x.astype(self._dtype), slots), weights)

    def _fast(self, x: mx.array, slots: mx.array) -> mx.array:
        """As fast as it goes: many pairs with other kernels than few."""
        if self._wide is None or slots.size < WIDE_PAIRS * len(self.ids):
            return self._resident.run(x, slots)
        return self._wide(x, slots)

    def _alike(self, x: mx.array, slots: mx.array) -> mx.array:
        """Every pair as among many: a short call is filled up with copies of its first row."""
        rows, each = slots.shape
        more = -(-(SORTED - rows * each) // each)
        if more <= 0:
            return self._resident.run(x, slots)
        x = mx.concatenate([x, mx.broadcast_to(x[:1], (more, x.shape[1]))])
        slots = mx.concatenate([slots, mx.broadcast_to(slots[:1], (more, each))])
        return self._resident.run(x, slots)[:rows]


def _finish(mode: int, values: mx.array, weights: mx.array) -> mx.array:
    """Values (N, k, D) to what a dispatch is answered with, in float32; weights (N, k)."""
    values = values.astype(mx.float32)
    if mode == EXACT:
        return values.reshape(-1, values.shape[-1])
    return (values * weights[..., None]).sum(axis=-2)


def _padded(counts: Counts) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """The pairs of each row, and where there is one: both (R, the most that a row has)."""
    column = np.arange(int(counts.max()), dtype=np.intp)
    starts = np.cumsum(counts, dtype=np.intp) - counts
    is_pair = column < counts[:, None]
    return np.where(is_pair, starts[:, None] + column, 0).astype(np.uint32), is_pair


def widened(switch: Any, experts: int) -> Any | None:
    """A module like `switch`, over the same arrays, that casts its weights for each call.

    None where they cannot be cast, or not within WIDE_BYTES for a layer of so many experts.
    """
    wide = copy(switch)
    for name, child in switch.items():
        if type(child) is QuantizedSwitchLinear:
            matrix = child.output_dims * child.input_dims
            if child.mode not in WIDE_MODES or experts * matrix * _HALF_BYTES > WIDE_BYTES:
                return None
            wide[name] = copy(child)
            wide[name].__class__ = WideSwitchLinear
        elif isinstance(child, QuantizedSwitchLinear | SwitchLinear):
            return None
    return wide


class WideSwitchLinear(QuantizedSwitchLinear):
    """A quantized projection that multiplies with its weights in the rows' dtype.

    MLX on CUDA multiplies many rows with quantized experts at a tenth of the speed that it has with
    half-precision ones, and casting them takes little: see docs/performance.md.
    """

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight = mx.dequantize(
            self["weight"],
            self["scales"],
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=x.dtype,
        )
        y = mx.gather_mm(
            x, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices
        )
        return mx.add(y, mx.expand_dims(self["bias"][indices], -2)) if "bias" in self else y
