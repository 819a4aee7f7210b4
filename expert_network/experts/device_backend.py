"""One MoE layer's experts on a GPU: sums are made there too, and a dispatch waits once."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from numpy.typing import NDArray

from expert_network.experts.layers import EXACT, SUM, Counts, MlxLayer, same
from expert_network.experts.mlx_backend import ResidentLayer, pair_bytes
from expert_network.model.upcast import is_half
from expert_network.transfer import Transfer

#: Bytes of activations in one call of a switch module. A GPU needs many rows to be busy.
CALL_BYTES = 512 << 20
#: Pairs from which mlx-lm sorts them by expert, and MLX multiplies with other kernels.
SORTED = 64
#: Bytes of one projection's experts, cast, up to which they are cast for a call with many pairs.
WIDE_BYTES = 1 << 30


class DeviceLayer(MlxLayer):
    """A layer computed by the family's own switch module, which is taken over, in `dtype`.

    Precise outputs, and exact mode's, have the same bits whatever stands beside them. `transfer`
    may be shared by layers that take turns.
    """

    def __init__(self, resident: ResidentLayer, dtype: mx.Dtype, transfer: Transfer) -> None:
        super().__init__(resident, dtype)
        resident.most_pairs = max(SORTED, CALL_BYTES // pair_bytes(resident.spec))
        self._transfer = transfer
        # Fewer kernels for the token loop's one row. Each number of its pairs is compiled once.
        self._sum_of_row = mx.compile(self._sum)

    def outputs(self, x: mx.array, ids: mx.array, precise: bool) -> mx.array:
        """See Layer. Lazy, unless experts are missing."""
        run = self._alike if precise else self._resident.run
        return self._resident.outputs(x.astype(self._dtype), ids, run).astype(x.dtype)

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
        slots, counts = self._resident.slots(ids), np.diff(offsets)
        if mode == SUM and len(rows) == 1:
            made = self._sum_of_row(*self._transfer.put(rows, slots[None], weights[None]))
        elif each := same(counts):
            shape = (-1, each)
            x, s, w = self._transfer.put(rows, slots.reshape(shape), weights.reshape(shape))
            made = _finish(mode, self._values(mode, x, s), w)
        else:
            made = self._ragged(mode, rows, counts, slots, weights)
        found: NDArray[np.float32] = self._transfer.fetch(made)[0]
        return found

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
        run = self._alike if mode == EXACT else self._resident.run
        return self._resident.in_parts(x.astype(self._dtype), slots, run)

    def _sum(self, x: mx.array, slots: mx.array, weights: mx.array) -> mx.array:
        return _finish(SUM, self._resident.run(x.astype(self._dtype), slots), weights)

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


def widen(switch: Any, experts: int) -> None:
    """Make quantized projections of `switch` a WideSwitchLinear, where their weights allow it.

    The number of the layer's experts counts, not how many are held: all nodes do the same.
    """
    for child in switch.values():
        if type(child) is QuantizedSwitchLinear and child.mode in ("affine", "mxfp4", "mxfp8"):
            matrix = child.output_dims * child.input_dims
            if experts * matrix * mx.bfloat16.size <= WIDE_BYTES:
                child.__class__ = WideSwitchLinear


# mlx-lm's classes have no types.
_narrow: Any = QuantizedSwitchLinear.__call__


class WideSwitchLinear(QuantizedSwitchLinear):
    """A quantized projection that multiplies sorted rows with its weights in the rows' dtype.

    MLX on CUDA multiplies many rows with quantized experts at a tenth of the speed that it has with
    half-precision ones, and casting them takes little: see docs/performance.md.
    """

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if not (sorted_indices and is_half(x)):
            return cast(mx.array, _narrow(self, x, indices, sorted_indices))
        weight = mx.dequantize(
            self["weight"],
            self["scales"],
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=x.dtype,
        )
        y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
        return mx.add(y, mx.expand_dims(self["bias"][indices], -2)) if "bias" in self else y
