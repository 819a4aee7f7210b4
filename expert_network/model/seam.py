"""The one place where a model's expert layers are found and replaced.

Whatever the family, mlx-lm calls its experts as `switch(x, ids)` on a SwitchGLU or SwitchMLP. A
Seam takes that module's place by type and asks an Experts instead. See docs/model-families.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

from expert_network.model.deferred import Deferred, Experts, overlapping

__all__ = ["Experts", "Mode", "Seam", "SwitchSite", "expert_tensors", "find_switches", "install"]

Mode = Literal["sum", "exact"]

# A seam's mode, and whether its sums may be pending.
Way = tuple[Mode, bool]
EXACT: Way = ("exact", False)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class SwitchSite:
    """One expert layer of a model: its layer number, dotted path, and switch module."""

    layer: int
    path: str
    module: Module


def find_switches(model: Module) -> list[SwitchSite]:
    """Every SwitchGLU and SwitchMLP below `model`, by type, in order of their layer numbers.

    The number is the one that follows "layers." in the path. Where that does not tell two expert
    layers apart, or one has none, all are numbered 0, 1, 2... in the order of their paths.
    """
    found = [(path, node) for path, node in _walk(model, "") if _is_switch(node)]
    found.sort(key=lambda item: _natural(item[0]))
    numbers = [int(match[1]) for path, _ in found if (match := _LAYER.search(path))]
    if len(set(numbers)) < len(found):
        numbers = list(range(len(found)))
    sites = [SwitchSite(n, *item) for n, item in zip(numbers, found, strict=True)]
    return sorted(sites, key=lambda site: site.layer)


def expert_tensors(switch: Module) -> dict[str, mx.array]:
    """The arrays of a switch module that have an expert axis, by name relative to it.

    They are those of its projections. Anything else in there (muse_spark keeps a norm) is trunk.
    """
    projections = {
        key: child.parameters() for key, child in switch.items() if _is_projection(child)
    }
    return cast(dict[str, mx.array], tree_flatten(projections, destination={}))


class Seam(Module):
    """Stands where a switch module stood, and asks `experts` in its place.

    overlap: whether its sums may be Pending.
    """

    def __init__(
        self, site: SwitchSite, experts: Experts, mode: Mode, overlap: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.experts, self.mode, self.overlap = site.layer, experts, mode, overlap
        for key, child in site.module.items():
            if not _is_projection(child):
                self[key] = child

    def __call__(self, x: mx.array, ids: mx.array) -> Any:
        """x (..., D) and ids (..., k) to (..., k, D): an array, or in sum mode a Deferred."""
        result = Deferred(self.experts, self.layer, x, ids, self.overlap)
        return result if self.mode == "sum" else result.__mlx_array__()


def install(model: Module, experts: Experts, mode: Mode) -> list[Seam]:
    """Put a seam in the place of every switch module of `model`; nothing is evaluated.

    In "exact" mode every seam asks for outputs. In "sum" mode those seams ask for weighted sums
    whose family lets them, which a trial run on a few tokens finds out; the others ask for outputs
    too, and have `mode` "exact". So with sums that are Pending, where `experts` overlap. Returns
    the seams in the order of find_switches.
    """
    sites = find_switches(model)
    ways = _ways(model, sites, overlapping(experts)) if mode == "sum" else {}
    seams = [Seam(site, experts, *ways.get(site.layer, EXACT)) for site in sites]
    _place(model, sites, seams)
    return seams


# --- the trial run


class _Trial:
    """Experts that return lazy zeros and remember what each layer asked for."""

    def __init__(self) -> None:
        self.last: SwitchSite | None = None
        self.plain: set[int] = set()
        self.summed: set[int] = set()

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self.plain.add(layer)
        return mx.zeros((*ids.shape, x.shape[-1]), x.dtype)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        self.summed.add(layer)
        return mx.zeros(x.shape, mx.float32)

    def begin_sum(
        self, layer: int, x: mx.array, ids: mx.array, weights: mx.array
    ) -> Callable[[], mx.array]:
        return partial(self.weighted_sum, layer, x, ids, weights)


class _TrialSeam(Seam):
    def __init__(self, site: SwitchSite, trial: _Trial, mode: Mode, overlap: bool) -> None:
        super().__init__(site, trial, mode, overlap)
        self.called: Callable[[], None] = lambda: setattr(trial, "last", site)

    def __call__(self, x: mx.array, ids: mx.array) -> Any:
        self.called()
        return super().__call__(x, ids)


def _ways(model: Module, sites: Sequence[SwitchSite], overlap: bool) -> dict[int, Way]:
    """How to ask those layers whose block does nothing with a Deferred but multiply and sum it.

    Functions of mx do not take a Deferred, nor a Pending: the block that passes one to them raises.
    Then all blocks of that type get less of that, and the trial starts again. A model that fails
    even so gets arrays everywhere. Leaves trial seams in the model.
    """
    parents = {site.path: _parent_type(model, site.path) for site in sites}
    known: list[Way] = [EXACT, ("sum", False), ("sum", True)]
    left = {parent: known[: 2 + overlap] for parent in parents.values()}
    while True:
        trial = _Trial()
        ways = [left[parents[site.path]][-1] for site in sites]
        seams = [_TrialSeam(s, trial, *way) for s, way in zip(sites, ways, strict=True)]
        _place(model, sites, seams)
        try:
            _run(model)
        except Exception:  # whatever a family's code raises on an unknown object
            if trial.last is None or len(left[parents[trial.last.path]]) == 1:
                return {}
            left[parents[trial.last.path]].pop()
        else:
            summing = trial.summed - trial.plain
            return {s.layer: w for s, w in zip(sites, ways, strict=True) if s.layer in summing}


def _run(model: Any) -> None:
    """Build, and do not evaluate, the graph of a short prefill and of one step after it."""
    cache = make_prompt_cache(model)
    for tokens in (3, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=cache)


# --- the module tree


def _is_switch(node: object) -> bool:
    return isinstance(node, SwitchGLU | SwitchMLP)


def _is_projection(node: object) -> bool:
    return isinstance(node, SwitchLinear | QuantizedSwitchLinear)


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every module, list and dict of the tree with its dotted path, parents first."""
    yield path, node
    children = enumerate(node) if isinstance(node, list | tuple) else node.items()
    for key, child in children:
        if isinstance(child, dict | list | tuple):
            yield from _walk(child, f"{path}.{key}" if path else str(key))


def _descend(model: Module, path: str) -> list[Any]:
    """The containers on the way to `path`, the model first, what stands at `path` last."""
    nodes: list[Any] = [model]
    for part in path.split("."):
        node = nodes[-1]
        nodes.append(node[int(part)] if isinstance(node, list | tuple) else node[part])
    return nodes


def _parent_type(model: Module, path: str) -> type:
    return next(type(n) for n in reversed(_descend(model, path)[:-1]) if isinstance(n, Module))


def _place(model: Module, sites: Sequence[SwitchSite], seams: Sequence[Seam]) -> None:
    for site, seam in zip(sites, seams, strict=True):
        container, key = _descend(model, site.path)[-2], site.path.rpartition(".")[2]
        container[int(key) if isinstance(container, list) else key] = seam


def _natural(path: str) -> list[tuple[int, str]]:
    """A sort key in which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
