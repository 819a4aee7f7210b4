"""Build a store's mlx-lm model, all of it lazy, its experts as placeholders.

mlx-lm's own loader does the work, on what looks to it like a checkpoint that it saved itself. So
every family's quantization and tied weights come out as they do there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from expert_network.errors import ExpertNetworkError, StoreError
from expert_network.model.checkpoint import model_classes
from expert_network.model.config import Config
from expert_network.store.manifest import Manifest
from expert_network.store.reader import Store

Weights = Mapping[str, mx.array]


def build(store: Store, trunk: bool = True) -> Module:
    """The model of `store` with every array lazy: the trunk's are read when first evaluated.

    The experts' are zeros of the manifest's shapes, there to be replaced at the seam: evaluating
    one would take its memory and be of no use. Evaluate what is to stay on the thread that called
    this. With `trunk=False` the trunk's file is not looked at, and only the expert layers are of
    use. Raises StoreError if mlx-lm refuses the config, or trunk and manifest do not hold exactly
    the tensors of the model.
    """
    weights = (_read_trunk(store) if trunk else {}) | _placeholders(store.manifest)
    try:
        model, _ = mlx_lm_utils.load_model(
            store.path,
            lazy=True,
            strict=False,  # else it looks for model*.safetensors; Stored is strict instead
            get_model_classes=lambda config: _classes(config, store, weights, trunk),
        )
    except ExpertNetworkError:
        raise
    except Exception as error:  # mlx-lm raises whatever its code meets
        reason = " ".join(str(error).split())[:300]
        problem = f"mlx-lm cannot build this model ({type(error).__name__}: {reason})"
        raise StoreError(store.path, problem, "upgrade mlx-lm, or convert it again") from error
    model.__class__ = type(model).__bases__[0]  # Stored has done its part
    return cast(Module, model)


def _read_trunk(store: Store) -> dict[str, mx.array]:
    try:
        return cast(dict[str, mx.array], mx.load(str(store.trunk_path)))
    except (RuntimeError, ValueError) as error:
        advice = "convert the checkpoint again or fetch the store from a peer"
        raise StoreError(store.trunk_path, f"it cannot be read ({error})", advice) from error


def _placeholders(manifest: Manifest) -> dict[str, mx.array]:
    return {
        f"{spec.path}.{tensor.name}": mx.zeros(
            (spec.experts, *tensor.shape), getattr(mx, tensor.dtype)
        )
        for spec in manifest.layers
        for tensor in spec.tensors
    }


def _classes(
    config: Config, store: Store, weights: Weights, trunk: bool
) -> tuple[type[Module], type[Any]]:
    """mlx-lm's classes, with a Model that is given the store's weights whatever was found."""
    model_class, args_class = model_classes(config)

    class Stored(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, _: Weights) -> Weights:
            # They have been through the family's own before conversion, and not every family's
            # leaves its own result alone.
            return weights

        def load_weights(self, file_or_weights: Any, strict: bool = True) -> Module:
            wanted: Any = tree_flatten(self.parameters(), destination={})
            if not trunk:
                routed = tuple(f"{spec.path}." for spec in store.manifest.layers)
                wanted = {name: like for name, like in wanted.items() if name.startswith(routed)}
            _check(store, wanted, weights)
            return cast(Module, super().load_weights(list(weights.items()), strict=False))

    return Stored, args_class


def _check(store: Store, parameters: Any, weights: Weights) -> None:
    """Compare names and shapes of what the model wants with what the store has."""
    wrong = (n for n in parameters.keys() & weights if parameters[n].shape != weights[n].shape)
    problems = {
        "missing": parameters.keys() - weights.keys(),
        "left over": weights.keys() - parameters.keys(),
        "of another shape": wrong,
    }
    for problem, found in problems.items():
        if names := sorted(found):
            some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            advice = "convert the checkpoint again with the mlx-lm that is installed here"
            what = f"{len(names)} tensors are {problem}: {some}"
            raise StoreError(store.path, what, advice)
