"""Frames and links for tests: an exchange without sockets, and events that compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from expert_protocol.connection import DriverConnection, DriverEvent, NodeConnection, NodeEvent
from expert_protocol.frames import Dispatch, Hello, Reply, ReplyMode, Welcome, WireDType
from expert_protocol.header import VERSION, Buffer

HIDDEN = 8
DIGEST = "d1" * 32
ROSTER_DIGEST = "a7" * 32
ROSTER: dict[str, Any] = {"nodes": [["a", 1.0], ["b", 2.5]], "replicas": 1, "epoch": 3}
ALL_DTYPES = tuple(WireDType)
#: Reply modes and the dtypes that rows may have in them.
KINDS_OF_ROWS = [
    (mode, dtype)
    for mode in ReplyMode
    for dtype in WireDType
    if mode < ReplyMode.EXACT or dtype < WireDType.INT8
]

E = TypeVar("E", DriverEvent, NodeEvent)


def hidden(layer: int) -> int:
    """A model with experts in layers 0 to 3."""
    return {0: HIDDEN, 1: HIDDEN, 2: HIDDEN, 3: HIDDEN}[layer]


def hello(**changes: Any) -> Hello:
    values: dict[str, Any] = {
        "protocol": VERSION,
        "model_digest": DIGEST,
        "roster_digest": ROSTER_DIGEST,
        "epoch": 3,
        "dtypes": ALL_DTYPES,
        "numerics": "mlx-cpu/switch-0.32.4/float32/avx2",
        "exact": False,
    }
    return Hello(**(values | changes))


def welcome(**changes: Any) -> Welcome:
    values: dict[str, Any] = {
        "protocol": VERSION,
        "node": "a",
        "model_digest": DIGEST,
        "roster": ROSTER,
        "roster_digest": ROSTER_DIGEST,
        "epoch": 3,
        "numerics": "mlx-cpu/switch-0.32.4/float32/avx2",
        "compute_dtype": "float32",
        "dtypes": ALL_DTYPES,
        "software": "expert-network 0.1.0",
    }
    return Welcome(**(values | changes))


def dispatch(
    counts: Sequence[int] = (2,),
    *,
    layer: int = 1,
    epoch: int = 3,
    mode: ReplyMode = ReplyMode.SUM,
    dtype: WireDType = WireDType.BF16,
    width: int = HIDDEN,
    precise: bool = False,
    adopt: bool = False,
) -> Dispatch:
    """Rows 0.5, 1.5, ... with `counts` experts each: ids 0, 1, ... and weights 1/2, 1/3, ..."""
    pairs = sum(counts)
    rows = np.arange(len(counts) * width, dtype=np.float32).reshape(len(counts), width) + 0.5
    return Dispatch(
        layer=layer,
        epoch=epoch,
        mode=mode,
        dtype=dtype,
        rows=dtype.encode(rows),
        offsets=np.cumsum([0, *counts], dtype=np.uint32),
        ids=np.arange(pairs, dtype=np.uint16),
        weights=(1 / np.arange(2, pairs + 2)).astype(np.float32),
        precise=precise,
        adopt=adopt,
    )


def reply_to(asked: Dispatch, queue_us: int = 7, compute_us: int = 300) -> Reply:
    """A reply of the shape that `asked` is owed, all 0.25."""
    count = len(asked.ids) if asked.mode is ReplyMode.EXACT else len(asked.rows)
    width = asked.dtype.hidden(asked.rows.shape[1])
    data = np.full((count, width), 0.25, np.float32)
    return Reply(asked.mode, asked.dtype, queue_us, compute_us, asked.dtype.encode(data))


def feed(connection: DriverConnection | NodeConnection, pending: bytearray) -> list[Any]:
    """Every event in `pending`, taking from its front the bytes that are used."""
    events: list[Any] = []
    while connection.needs and len(pending) >= connection.needs:
        taken = bytes(pending[: connection.needs])
        del pending[: len(taken)]
        event = connection.feed(taken)
        if event is not None:
            events.append(event)
    return events


def events(connection: DriverConnection | NodeConnection, buffers: Iterable[Buffer]) -> list[Any]:
    """The events of whole frames."""
    pending = bytearray(b"".join(buffers))
    found = feed(connection, pending)
    assert not pending
    return found


def greeted(
    hidden: Callable[[int], int] = hidden, *, node_says: Welcome | None = None, **changes: Any
) -> tuple[DriverConnection, NodeConnection]:
    """Two ends of a link after HELLO and WELCOME; `changes` are to the HELLO."""
    driver, node = DriverConnection(hidden), NodeConnection(hidden)
    events(node, driver.hello(hello(**changes)))
    events(driver, node.welcome(node_says or welcome()))
    return driver, node


def facts(event: object) -> object:
    """An event as values that compare: arrays as dtype, shape and bytes."""
    if not isinstance(event, (Dispatch, Reply)):
        return event
    values = [getattr(event, name) for name in type(event).__dataclass_fields__]
    return type(event), [
        (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values
    ]
