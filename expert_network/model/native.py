"""A trunk whose linear layers and attention the native kernels compute, on the stored bytes.

Layers are replaced by type (native_layers.py); of some, all that one token goes through up to the
experts is one call (one_token.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlx.nn.layers.base import Module

from expert_network import kernels
from expert_network.model import eager, fast, one_token
from expert_network.model.native_layers import Multiplying, mixin_for

# Matrices of fewer rows are always precise: gates, which cost nothing and decide a lot.
FEW_ROWS = 16


def install(model: Any, precise: bool, routers: Collection[int]) -> None:
    """Make `model`, whose arrays are evaluated, compute with the native kernels.

    `precise` is float32 activations, else int8 for quantized matrices; matrices with as many rows
    as `routers` says are always precise, since they choose experts. What the kernels do not know
    stays MLX's.
    """
    fast.install()
    eager.install()
    classes: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        mixin = mixin_for(kind)
        if mixin is None or not mixin.prepare(module):
            continue
        made = classes.setdefault(kind, type(f"Native{kind.__name__}", (mixin, kind), {}))
        module.__class__ = made
        if isinstance(module, Multiplying):
            few = module.matrix.rows < FEW_ROWS or module.matrix.rows in routers
            module.precision = kernels.F32 if precise or few else kernels.INT8
    one_token.install(model)
    kind = type(model)
    model.precise = precise
    model.__class__ = type(f"Native{kind.__name__}", (_NativeModel, kind), {})


class _NativeModel(Module):
    def __call__(self, *args: Any, **options: Any) -> Any:
        with fast.running(self.precise):
            return super().__call__(*args, **options)
