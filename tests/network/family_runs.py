"""Run a tiny family with its experts behind the seam, and measure it against mlx-lm alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, save_model

from expert_network.model import structure
from expert_network.model.seam import (
    Mode,
    Seam,
    SwitchSite,
    expert_tensors,
    find_switches,
    install,
)
from expert_network.store.manifest import LayerSpec, Manifest, lay_out
from expert_network.store.reader import Store
from tests.network import families

Logits = npt.NDArray[np.float32]

SHORT = [3, 14, 15, 92, 65]
STEPS = [35, 89]
LONG = [(7 * n * n + 3) % families.VOCAB for n in range(70)]  # at least 64 pairs, whatever top-k


class OneNode:
    """Experts that are the family's own switch modules, untouched."""

    def __init__(self, sites: Sequence[SwitchSite]) -> None:
        self.modules: dict[int, Any] = {site.layer: site.module for site in sites}
        self.routes: list[npt.NDArray[np.uint32]] = []

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self.routes.append(np.sort(np.array(ids)))
        return cast(mx.array, self.modules[layer](x, ids))

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        return _sum(self.outputs(layer, x, ids), weights)


class TwoNodes(OneNode):
    """Even experts on one node, odd ones on the other; rows and partial sums travel as `wire`."""

    def __init__(self, sites: Sequence[SwitchSite], wire: mx.Dtype) -> None:
        super().__init__(sites)
        self.wire = wire

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        outputs = self.outputs(layer, self._travel(x), ids)
        parts = [_sum(outputs, weights * (ids % 2 == node)) for node in (0, 1)]
        return self._travel(parts[0]) + self._travel(parts[1])

    def _travel(self, array: mx.array) -> mx.array:
        return array.astype(self.wire).astype(array.dtype)


def _sum(outputs: mx.array, weights: mx.array) -> mx.array:
    return (outputs.astype(mx.float32) * weights[..., None]).sum(axis=-2)


def logits(model: Any) -> Logits:
    """All logits of a short prefill, two steps after it, and a long prefill, one below another."""
    cache = make_prompt_cache(model)
    runs = [model(mx.array([part]), cache=cache) for part in (SHORT, *([s] for s in STEPS))]
    runs.append(model(mx.array([LONG]), cache=make_prompt_cache(model)))
    return np.concatenate([np.array(run[0].astype(mx.float32)) for run in runs])


def error(found: Logits, reference: Logits) -> float:
    """The L2 norm of the difference, relative to that of the reference."""
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


@dataclass(frozen=True)
class Measured:
    """What one family showed: its expert layers, how many of them sum, and errors of the logits.

    `rerouted` counts the rows, of all layers, that bf16 sent to other experts than the reference.
    """

    family: str
    layers: int
    summing: int
    exact: float
    sum_f32: float
    sum_bf16: float
    rerouted: int

    @property
    def seam(self) -> str:
        """What the seams of this family ask for in sum mode."""
        return {self.layers: "sum", 0: "outputs"}.get(self.summing, "mixed")


@dataclass(frozen=True)
class _Run:
    logits: Logits
    seams: list[Seam]
    experts: OneNode


def measure(family: str) -> Measured:
    """Run `family` in every mode against the untouched mlx-lm model."""
    reference = logits(families.build(family))
    assert np.isfinite(reference).all()
    exact = _run(family, OneNode, "exact")
    f32 = _run(family, lambda sites: TwoNodes(sites, mx.float32), "sum")
    bf16 = _run(family, lambda sites: TwoNodes(sites, mx.bfloat16), "sum")
    routes = zip(exact.experts.routes, bf16.experts.routes, strict=True)
    return Measured(
        family,
        layers=len(exact.seams),
        summing=sum(seam.mode == "sum" for seam in f32.seams),
        exact=error(exact.logits, reference),
        sum_f32=error(f32.logits, reference),
        sum_bf16=error(bf16.logits, reference),
        rerouted=sum(int((a != b).any(axis=-1).sum()) for a, b in routes),
    )


def _run(family: str, make: Callable[[list[SwitchSite]], OneNode], mode: Mode) -> _Run:
    model = families.build(family)
    experts = make(find_switches(model))
    seams = install(model, experts, mode)
    return _Run(logits(model), seams, experts)


def save(family: str, folder: Path) -> None:
    """Write a tiny family as mlx-lm would."""
    save_model(folder, families.build(family))
    (folder / "config.json").write_text(json.dumps(families.config(family)))


def reload(folder: Path) -> Logits:
    """The logits of what mlx-lm makes of a folder that it saved."""
    return logits(load_model(folder)[0])


def save_trunk(family: str, folder: Path) -> tuple[Store, dict[str, mx.array]]:
    """The trunk of a tiny family as a store without blocks, and the experts by full name."""
    model = families.build(family)
    sites = find_switches(model)
    tree: Any = model.parameters()  # type: ignore[no-untyped-call]
    parameters = cast(dict[str, mx.array], tree_flatten(tree, destination={}))
    experts = {
        f"{site.path}.{name}": array
        for site in sites
        for name, array in expert_tensors(site.module).items()
    }
    trunk = {name: array for name, array in parameters.items() if name not in experts}
    mx.save_safetensors(str(folder / "trunk.safetensors"), trunk)
    (folder / "config.json").write_text(json.dumps(families.config(family)))
    manifest = Manifest(family, "float32", tuple(_layer(site) for site in sites), {})
    return Store(folder, manifest, families.config(family), has_blocks=False), experts


def _layer(site: SwitchSite) -> LayerSpec:
    tensors = [
        (name, str(array.dtype).rpartition(".")[2], array.shape[1:])
        for name, array in expert_tensors(site.module).items()
    ]
    specs, block_bytes = lay_out(tensors)
    hidden = next(shape[-1] for name, _, shape in tensors if not name.startswith(("down", "fc2")))
    return LayerSpec(
        site.layer, site.path, families.EXPERTS, hidden, specs, block_bytes, block_bytes, ()
    )


def rebuild(store: Store, experts: dict[str, mx.array]) -> Logits:
    """The logits of a store's model, with its experts put where the placeholders are."""
    model = structure.build(store)
    model.load_weights(list(experts.items()), strict=False)
    return logits(model)
