"""Projections of experts for a CPU, where half-precision weights cannot be used as they lie.

MLX's GatherMM on CPU takes float32 only, and its GatherQMM casts the scales of *all* experts of the
layer at each call. These cast the weights or scales of the active experts only, in pieces.

Every row is multiplied on its own, as a matrix of one row, and the pieces depend on nothing but the
shape of the weights: so a row gives the same bits whatever stands beside it and however many
experts are resident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from expert_network.model.upcast import is_half, pieces

# Of a partition's float32 scales, up to which they are kept: a small layer's time goes into calls.
KEEP_BYTES = 32 << 20

# (rows (m, 1, K), expert's slot) -> (m, 1, O)
Product = Callable[[mx.array, int], mx.array]


def adapt(switches: Sequence[Module]) -> None:
    """Make all switch modules of a partition work on float32 rows, on the calling thread.

    Scales are cast for good where all of them together are small. Calls of a projection that casts
    what it needs evaluate their ids; the others stay lazy.
    """
    projections = [child for switch in switches for child in switch.values()]
    scales = [(child, name) for child in projections for name in _half_scales(child)]
    if sum(2 * child[name].nbytes for child, name in scales) <= KEEP_BYTES:
        for child, name in scales:
            child[name] = child[name].astype(mx.float32)
            mx.eval(child[name])
    for child in projections:
        if _half_scales(child):
            child.__class__ = _Float32QuantizedSwitchLinear
        elif isinstance(child, SwitchLinear) and is_half(child.weight):
            child.__class__ = _Float32SwitchLinear


def _half_scales(child: Any) -> list[str]:
    if not isinstance(child, QuantizedSwitchLinear):
        return []
    return [name for name in ("scales", "biases") if is_half(child.get(name))]


class _ByExpert(Module):
    """A projection that goes through the active experts, one after the other."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = _by_expert(self._product, x, indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    def _product(self, rows: mx.array, slot: int) -> mx.array:
        raise NotImplementedError


def _by_expert(product: Product, x: mx.array, indices: mx.array) -> mx.array:
    """x (..., 1, K), of which each row stands for an equal run of `indices`, to (..., 1, O)."""
    slots = np.asarray(indices).reshape(-1)
    rows = x.reshape(-1, 1, x.shape[-1])
    order = np.argsort(slots, kind="stable")
    starts = np.flatnonzero(np.diff(slots[order], prepend=-1))
    groups = np.split(order, starts[1:])
    run = len(slots) // len(rows)
    parts = [product(rows[mx.array(group // run)], int(slots[group[0]])) for group in groups]
    y = mx.concatenate(parts)[mx.array(np.argsort(order))]
    return y.reshape(*indices.shape, 1, y.shape[-1])


class _Float32SwitchLinear(_ByExpert, SwitchLinear):
    def _product(self, rows: mx.array, slot: int) -> mx.array:
        weight = self["weight"][slot]
        only = mx.zeros(len(rows), mx.uint32)
        products = [
            mx.gather_mm(rows, weight[piece].astype(mx.float32).T[None], rhs_indices=only)
            for piece in pieces(*weight.shape)
        ]
        return mx.concatenate(products, axis=-1)


class _Float32QuantizedSwitchLinear(_ByExpert, QuantizedSwitchLinear):
    def _product(self, rows: mx.array, slot: int) -> mx.array:
        weight, scales = self["weight"][slot], self["scales"][slot]
        biases = self["biases"][slot] if self.get("biases") is not None else None
        only = mx.zeros(len(rows), mx.uint32)
        products = [
            mx.gather_qmm(
                rows,
                weight[piece][None],
                scales[piece].astype(mx.float32)[None],
                None if biases is None else biases[piece].astype(mx.float32)[None],
                rhs_indices=only,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
            for piece in pieces(*scales.shape)
        ]
        return mx.concatenate(products, axis=-1)
