"""One MoE layer's resident experts, computed by the native kernels on MLX's memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from numpy.typing import NDArray

from expert_network import kernels
from expert_network.experts.activations import Activation, activation_of
from expert_network.experts.layers import SUM
from expert_network.experts.mlx_backend import ResidentLayer
from expert_network.model.host import HostArray, evaluated, floats
from expert_network.model.matrices import matrix_of

# The projections of a switch module in the order of kernels.ffn, by its type.
_PROJECTIONS = {
    SwitchGLU: ("gate_proj", "up_proj", "down_proj"),
    SwitchMLP: (None, "fc1", "fc2"),
}


class NativeLayer:
    """A layer whose blocks `resident` holds. Implements Layer; made by `over`.

    Precise is float32 activations, else they are rounded to int8 where weights are quantized.
    Results are there when a call returns.
    """

    def __init__(
        self,
        resident: ResidentLayer,
        matrices: tuple[kernels.Matrix | None, kernels.Matrix, kernels.Matrix],
        activation: Activation,
    ) -> None:
        self._resident, self._matrices, self._activation = resident, matrices, activation
        self.spec, self.ids, self.nbytes = resident.spec, resident.ids, resident.nbytes
        self.block_bytes = resident.block_bytes
        slots = np.full(self.spec.experts, np.iinfo(np.uint32).max, np.uint32)
        slots[self.ids] = self._slots(self.ids)
        #: For native code that computes one row at a time: see kernels.experts.
        self.native = kernels.experts(*matrices, *activation, slots)

    @classmethod
    def over(cls, resident: ResidentLayer) -> Self | None:
        """None where the kernels do not know the layer's activation or how it is stored."""
        switch: Any = resident.switch
        names, activation = _PROJECTIONS.get(type(switch)), activation_of(switch)
        if names is None or activation is None:
            return None
        gate, up, down = (None if name is None else matrix_of(switch[name]) for name in names)
        if up is None or down is None or (gate is None and names[0]):
            return None
        return cls(resident, (gate, up, down), activation)

    def outputs(self, x: mx.array, ids: mx.array, precise: bool) -> mx.array:
        """See Layer."""
        rows, experts = evaluated(_floats(x), ids)
        made = self._run(rows, _offsets(experts), self._slots(experts), None, precise)
        return HostArray.of(made.reshape(*experts.shape, -1)).astype(x.dtype)

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, precise: bool
    ) -> mx.array:
        """See Layer."""
        rows, experts, scores = evaluated(_floats(x), ids, weights)
        slots = self._slots(experts)
        return HostArray.of(self._run(rows, _offsets(experts), slots, floats(scores), precise))

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
        scores = weights if mode == SUM else None
        return self._run(rows, offsets.astype(np.uint32), self._slots(ids), scores, precise)

    def _slots(self, ids: NDArray[Any]) -> NDArray[np.uint32]:
        """Where experts `ids` stand in the matrices. Raises NotOwned."""
        if len(self.ids) == self.spec.experts and ids.max() < self.spec.experts:
            return ids.astype(np.uint32, copy=False)
        return self._resident.slots(ids)

    def _run(
        self,
        rows: NDArray[Any],
        offsets: NDArray[np.uint32],
        slots: NDArray[np.uint32],
        weights: NDArray[np.float32] | None,
        precise: bool,
    ) -> NDArray[np.float32]:
        """Sums (R, D) with weights, else each pair's output (P, D)."""
        count = slots.size if weights is None else len(rows)
        out = np.empty((count, self.spec.hidden), np.float32)
        name, parameters = self._activation
        kernels.ffn(
            *self._matrices,
            name,
            parameters,
            floats(rows),
            offsets,
            # One column of a router's order has a stride, which reshape would keep.
            np.ascontiguousarray(slots).reshape(-1),
            None if weights is None else weights.reshape(-1),
            out,
            kernels.F32 if precise else kernels.INT8,
        )
        return out


def _floats(x: mx.array) -> mx.array:
    return x if x.dtype == mx.float32 else x.astype(mx.float32)


def _offsets(ids: NDArray[Any]) -> NDArray[np.uint32]:
    return _equal_offsets(*ids.shape)


@lru_cache(64)
def _equal_offsets(rows: int, each: int) -> NDArray[np.uint32]:
    return np.arange(0, rows * each + 1, each, dtype=np.uint32)
