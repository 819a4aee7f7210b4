"""Load a store's trunk: the model that is ready to call, its experts behind the seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from expert_network.backend import Backend
from expert_network.model import native, seam, structure, upcast
from expert_network.model.deferred import Experts
from expert_network.store.manifest import TRUNK
from expert_network.store.reader import Store


def load_trunk(
    store: Store, backend: Backend, experts: Experts, mode: seam.Mode, precise: bool = True
) -> Module:
    """The model of `store`, whose expert layers ask `experts` in `mode` "sum" or "exact".

    Every array of the trunk is in memory afterwards, evaluated on the calling thread: any thread
    may call the model. On "mlx-cpu" activations, caches and logits are float32 and the matrices
    keep their stored bytes; there native kernels, if `backend` has them, round activations to int8
    and cached keys and values to float16 unless `precise`. Raises StoreCorrupt if the trunk file is
    not the manifest's, StoreError if mlx-lm cannot build the model from it.
    """
    store.check_file(TRUNK)
    model = structure.build(store)
    seam.install(model, experts, mode)
    if backend.name == "mlx-cpu":
        upcast.to_float32(model)
    mx.eval(list(arrays(model)))
    if backend.native:
        native.install(model, precise, {layer.experts for layer in store.manifest.layers})
    return model


def arrays(model: Module) -> Iterator[mx.array]:
    """Every array that `model` can reach, those included that are no parameters.

    RoPE layers keep their frequencies out of sight of parameters(); left lazy, the first thread
    to call the model would be asked to evaluate what another made.
    """
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, mx.array):
            yield node
        else:
            waiting.extend(_children(node))


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list | tuple):
        yield from node
    # Modules and what a family's code keeps beside them; a seam's experts see to themselves.
    ours = isinstance(node, Module) and not isinstance(node, seam.Seam)
    if ours or type(node).__module__.startswith("mlx_lm."):
        yield from getattr(node, "__dict__", {}).values()
