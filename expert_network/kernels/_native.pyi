"""The compiled module. Its contracts are stated in expert_network.kernels."""

from collections.abc import Callable
from typing import Any, Literal

VERSION: int

class Matrix:
    """A weight (rows, cols), or a stack of `count`, in place on the memory of its arguments.

    `weight` (count, rows, ...) or (rows, ...) of any element type, rows of as many bytes as `cols`
    elements take; `scales` and `biases` likewise, one per group. `mode` "plain": `weight` is of
    `dtype`, alone. "affine": `bits` 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128; `dtype` is that
    of scales and biases. "mxfp4": scales of one byte per 32. `bias` float32 (count, rows) is added
    to products. All C-contiguous. Raises ValueError naming what does not fit.
    """

    count: int
    rows: int
    cols: int
    def __new__(
        cls,
        weight: Any,
        scales: Any = None,
        biases: Any = None,
        *,
        mode: Literal["plain", "affine", "mxfp4"],
        dtype: str = ...,
        bits: int = 0,
        group_size: int = 0,
        cols: int,
        bias: Any = None,
    ) -> Matrix: ...

class Turns:
    """A lock that is given in the order in which it was asked for."""

    def acquire(self, blocking: bool = True, /) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *error: object) -> None: ...

def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(n: int, /) -> None: ...
def read_bandwidth(memory: Any, streams: int, /) -> float: ...
def linear(matrix: Matrix, x: Any, out: Any, precision: int, /) -> None: ...
def ffn(
    gate: Matrix | None,
    up: Matrix,
    down: Matrix,
    activation: str,
    parameters: tuple[float, ...],
    rows: Any,
    offsets: Any,
    slots: Any,
    weights: Any,
    out: Any,
    precision: int,
    /,
) -> None: ...
def experts(
    gate: Matrix | None,
    up: Matrix,
    down: Matrix,
    activation: str,
    parameters: tuple[float, ...],
    slots: Any,
    /,
) -> object: ...
def no_experts(hidden: int, /) -> object: ...
def swap_experts(one: object, other: object, /) -> None: ...
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
def softmax(x: Any, out: Any, /) -> None: ...
def trunk_layer(
    before: Any,
    after: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    norms: Any,
    whole: bool,
    heads: int,
    key_heads: int,
    scale: float,
    dims: int,
    traditional: bool,
    base: float,
    turned: float,
    gate: Any,
    each: int,
    ascending: bool,
    /,
) -> object: ...
def step(
    layer: object,
    row: Any,
    keys: Any,
    values: Any,
    offset: int,
    residual: Any,
    normed: Any,
    experts: Any,
    shares: Any,
    /,
) -> bool: ...
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
def crc32(data: Any, start: int = 0, /) -> int: ...
def fan_layer(
    plan: Any, rooms: Any, head: bytes, due: bytes, owners: Any, form: int, hidden: int, /
) -> object: ...
def fan_out(layer: object, values: Any, ids: Any, weights: Any, /) -> int: ...
def fan_in(layer: object, total: Any, seconds: float, /) -> int: ...
def single(
    lane: Any,
    memory: Any,
    heads: Any,
    dues: Any,
    forms: Any,
    held: Any,
    row: Any,
    bounds: Any,
    experts: tuple[object, ...],
    turns: Turns,
    sending: Turns,
    /,
) -> object: ...
def serve_rows(
    single: object, descriptor: int, compute: Callable[[int, int], Any], once: bool, /
) -> int: ...
