"""In which order a model uses its cache's entries and its seams, and how that is found out.

A pass may use a layer's entry only when the pass before it is done with that entry. Families differ
in when they use which: masks are made before the first layer, from an entry of some other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from expert_network.model.seam import Seam

TRIAL = (3, 2, 1)  # tokens of the passes that a model is tried with, one after the other


@dataclass(frozen=True)
class Order:
    """What every pass of one model does.

    seams: how many it comes to. released: for each entry, how many it has come to once it is done
    with that entry; seams + 1 stands for the end of the pass.
    """

    seams: int
    released: tuple[int, ...]

    @property
    def complete_at(self) -> int:
        """The seam at which a pass has put into the cache what it puts there."""
        return max(self.released, default=0)


def find_order(model: Any) -> Order | None:
    """The order of `model`, from trial passes that evaluate nothing; None where it has none.

    That is so without seams, with cache entries that cannot be watched, and if the trial fails.
    """
    seams = [module for module in model.modules() if isinstance(module, Seam)]
    if not seams:
        return None
    trial, experts = _Trial(), [seam.experts for seam in seams]
    try:
        for seam in seams:
            seam.experts = trial
        return trial.order(model)
    except Exception:  # whatever a family's code raises on its own; real passes will show it
        return None
    finally:
        for seam, before in zip(seams, experts, strict=True):
            seam.experts = before


class _Trial:
    """Experts that return lazy zeros, and note what a pass does between two of their layers."""

    def __init__(self) -> None:
        self._seams = 0
        self._last: dict[int, int] = {}

    def order(self, model: Module) -> Order:
        cache, most = make_prompt_cache(model), 0
        for tokens in TRIAL:
            self._seams = 0
            with watched(cache, self._used):
                run: Any = model
                run(mx.zeros((1, tokens), mx.int32), cache=cache)
            most = max(most, self._seams)
        return Order(most, tuple(self._last.get(n, 0) + 1 for n in range(len(cache))))

    def _used(self, entry: int) -> None:
        self._last[entry] = max(self._last.get(entry, 0), self._seams)

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        self._seams += 1
        return mx.zeros((*ids.shape, x.shape[-1]), x.dtype)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        self._seams += 1
        return mx.zeros(x.shape, mx.float32)

    def begin_sum(
        self, layer: int, x: mx.array, ids: mx.array, weights: mx.array
    ) -> Callable[[], mx.array]:
        made = self.weighted_sum(layer, x, ids, weights)
        return lambda: made


# --- watching a cache


@contextmanager
def watched(cache: Sequence[Any], used: Callable[[int], None]) -> Iterator[None]:
    """Within, `used(n)` is called before each use of the n-th entry of `cache`, or of its parts.

    Raises TypeError for an entry whose class Python cannot change.
    """
    before: list[tuple[Any, type]] = []
    try:
        for number, entry in enumerate(cache):
            for part in _parts(entry):
                kind: Any = type(part)
                vars(part)["_used"] = partial(used, number)
                before.append((part, kind))
                part.__class__ = _watching(kind)
        yield
    finally:
        for part, kind in before:
            object.__setattr__(part, "__class__", kind)
            del vars(part)["_used"]


def _parts(entry: Any) -> Iterator[Any]:
    """An entry, and the entries that it may consist of."""
    if entry is not None:
        yield entry
        for part in getattr(entry, "caches", ()):
            yield from _parts(part)


# Python looks these up on the class, past __getattribute__.
_IMPLICIT = ("__getitem__", "__setitem__", "__len__", "__iter__", "__bool__")


@remembered
def _watching(kind: type) -> type:
    """A class like `kind` whose objects call their own `_used` first."""
    methods = {name: _noted(kind, name) for name in _IMPLICIT if hasattr(kind, name)}
    methods["__setattr__"] = _noted(kind, "__setattr__")
    methods["__getattribute__"] = _looked_up(kind)
    return type(kind.__name__, (kind,), methods)


def _noted(kind: Any, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        _dict(self)["_used"]()
        return getattr(kind, name)(self, *args)

    return call


def _looked_up(kind: Any) -> Callable[..., Any]:
    def call(self: Any, name: str) -> Any:
        # isinstance asks for the class, which is no use of what the entry holds.
        if name not in ("__class__", "__dict__"):
            _dict(self)["_used"]()
        return kind.__getattribute__(self, name)

    return call


def _dict(entry: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(entry, "__dict__")
    return found
