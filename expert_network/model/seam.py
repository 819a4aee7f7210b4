"""The one place where a model's expert layers are found and replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

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


def _is_switch(node: object) -> bool:
    return isinstance(node, SwitchGLU | SwitchMLP)


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every module, list and dict of the tree with its dotted path, parents first."""
    yield path, node
    children = enumerate(node) if isinstance(node, list | tuple) else node.items()
    for key, child in children:
        if isinstance(child, dict | list | tuple):
            yield from _walk(child, f"{path}.{key}" if path else str(key))


def _natural(path: str) -> list[tuple[int, str]]:
    """A sort key in which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
