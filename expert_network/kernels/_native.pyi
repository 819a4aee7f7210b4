"""The compiled module. Its contracts are stated in expert_network.kernels."""

from typing import Any

VERSION: int

def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(n: int, /) -> None: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    scale: float,
    causal: bool,
    mask: Any,
    sinks: Any,
    /,
) -> None: ...
def rms_norm(x: Any, weight: Any, eps: float, out: Any, /) -> None: ...
def rope(
    x: Any,
    out: Any,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    freqs: Any,
    /,
) -> None: ...
def encode(values: Any, label: str, out: Any, /) -> bool: ...
def decode(raw: Any, label: str, out: Any, /) -> bool: ...
def accumulate(total: Any, rows: Any, raw: Any, label: str, /) -> bool: ...
