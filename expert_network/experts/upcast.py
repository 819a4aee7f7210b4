"""Projections of experts for a CPU, where half-precision weights cannot be used as they lie.

MLX's GatherMM on CPU takes float32 only, and its GatherQMM casts the scales of *all* experts of the
layer at each call. These cast the weights or scales of the active experts only, in pieces. And it
knows no global scale of nvfp4 there: that multiplies the product.

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

# Bytes of float32 weights after which a call waits for what it has begun: MLX runs ahead of its
# worker, and takes the memory of what it has not begun to compute.
PENDING_BYTES = 16 << 20

# The largest value that nvfp4 gives a scale times the largest that it gives a number.
_NVFP4_RANGE = 448.0 * 6.0

# What one piece of a matrix makes of the rows.
Multiply = Callable[[slice], mx.array]


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
        if isinstance(child, QuantizedSwitchLinear) and child.get("global_scale") is not None:
            child.__class__ = _ScaledSwitchLinear
        elif _half_scales(child):
            child.__class__ = _Float32QuantizedSwitchLinear
        elif isinstance(child, SwitchLinear) and is_half(child.weight):
            child.__class__ = _Float32SwitchLinear


def _half_scales(child: Any) -> list[str]:
    if not isinstance(child, QuantizedSwitchLinear):
        return []
    return [name for name in ("scales", "biases") if is_half(child.get(name))]


class _Pending:
    """The products of one call that were begun and not waited for."""

    def __init__(self) -> None:
        self._products: list[mx.array] = []
        self._bytes = 0

    def in_pieces(self, multiply: Multiply, rows: int, columns: int) -> mx.array:
        """Join the products of a matrix's pieces; wait each time that casts reach the limit."""
        products = []
        for piece in pieces(rows, columns):
            products.append(multiply(piece))
            self._add(products[-1], 4 * columns * (piece.stop - piece.start))
        return mx.concatenate(products, axis=-1)

    def _add(self, product: mx.array, count: int) -> None:
        self._products.append(product)
        self._bytes += count
        if self._bytes >= PENDING_BYTES:
            mx.eval(self._products)
            self._products, self._bytes = [], 0


class _ByExpert(Module):
    """A projection that goes through the active experts, one after the other."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., 1, K), each row of which stands for an equal run of `indices`: (..., 1, O)."""
        slots = np.asarray(indices).reshape(-1)
        rows = x.reshape(-1, 1, x.shape[-1])
        order = np.argsort(slots, kind="stable")
        starts = np.flatnonzero(np.diff(slots[order], prepend=-1))
        run, pending = len(slots) // len(rows), _Pending()
        parts = [
            self._product(rows[mx.array(pairs // run)], int(slots[pairs[0]]), pending)
            for pairs in np.split(order, starts[1:])
        ]
        y = mx.concatenate(parts)[mx.array(np.argsort(order))]
        y = y.reshape(*indices.shape, 1, y.shape[-1])
        return mx.add(y, mx.expand_dims(self["bias"][indices], -2)) if "bias" in self else y

    def _product(self, rows: mx.array, slot: int, pending: _Pending) -> mx.array:
        """What the expert at `slot` makes of rows (m, 1, K): (m, 1, O)."""
        raise NotImplementedError


class _Float32SwitchLinear(_ByExpert, SwitchLinear):
    def _product(self, rows: mx.array, slot: int, pending: _Pending) -> mx.array:
        weight = self["weight"][slot]
        only = mx.zeros(len(rows), mx.uint32)

        def multiply(piece: slice) -> mx.array:
            part = weight[piece].astype(mx.float32).T[None]
            return mx.gather_mm(rows, part, rhs_indices=only)

        return pending.in_pieces(multiply, *weight.shape)


class _Float32QuantizedSwitchLinear(_ByExpert, QuantizedSwitchLinear):
    def _product(self, rows: mx.array, slot: int, pending: _Pending) -> mx.array:
        weight, scales = self["weight"][slot], self["scales"][slot]
        biases = self["biases"][slot] if self.get("biases") is not None else None
        only = mx.zeros(len(rows), mx.uint32)

        def multiply(piece: slice) -> mx.array:
            return mx.gather_qmm(
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

        return pending.in_pieces(multiply, *scales.shape)


class _ScaledSwitchLinear(QuantizedSwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        scale = self["global_scale"][indices] / _NVFP4_RANGE
        y = y * mx.expand_dims(scale, (-2, -1))
        return mx.add(y, mx.expand_dims(self["bias"][indices], -2)) if "bias" in self else y
