"""A driver's link for tests: opens, greets and asks, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert_network.net.auth import ClusterKey
from expert_network.net.stream import FrameStream, open_link
from expert_network.store.manifest import Manifest
from expert_protocol.connection import DriverConnection, DriverEvent
from expert_protocol.frames import Dispatch, Hello, ReplyMode, Welcome, WireDType, Working
from expert_protocol.header import VERSION, Buffer

#: Seconds for any answer; WORKING counts as one.
SILENCE = 20.0


def hello_for(model_digest: str, **changes: Any) -> Hello:
    """A HELLO that a node of that model accepts."""
    values: dict[str, Any] = {
        "protocol": VERSION,
        "model_digest": model_digest,
        "roster_digest": None,
        "epoch": 0,
        "dtypes": tuple(WireDType),
        "numerics": "made-up",
        "exact": False,
    }
    return Hello(**(values | changes))


def dispatch_of(
    layer: int,
    rows: NDArray[np.float32],
    experts: Sequence[Sequence[int]],
    mode: ReplyMode = ReplyMode.SUM,
    dtype: WireDType = WireDType.F32,
) -> Dispatch:
    """Row r of `rows` (R, D) goes to `experts[r]`, each with weight 1/4."""
    ids = [expert for some in experts for expert in some]
    return Dispatch(
        layer=layer,
        epoch=0,
        mode=mode,
        dtype=dtype,
        rows=dtype.encode(rows),
        offsets=np.cumsum([0, *map(len, experts)], dtype=np.uint32),
        ids=np.array(ids, np.uint16),
        weights=np.full(len(ids), 0.25, np.float32),
    )


class DriverLink:
    """One open link and its driver's end."""

    def __init__(self, stream: FrameStream[DriverEvent], connection: DriverConnection) -> None:
        self.stream, self.connection = stream, connection
        #: How often the node said WORKING.
        self.working = 0

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send the buffers of a frame."""
        self.stream.send(buffers)

    def receive(self, silence: float = SILENCE) -> DriverEvent:
        """The next event that is not a WORKING."""
        while isinstance(event := self.stream.receive(silence), Working):
            self.working += 1
        return event

    def greet(self, model_digest: str, **changes: Any) -> DriverEvent:
        """Say HELLO; the answer."""
        self.send(self.connection.hello(hello_for(model_digest, **changes)))
        return self.receive()

    def ask(self, dispatch: Dispatch) -> DriverEvent:
        """Send a dispatch; the answer."""
        self.send(self.connection.dispatch(dispatch))
        return self.receive()


@contextmanager
def raw_link(url: str, manifest: Manifest, key: ClusterKey | None = None) -> Iterator[DriverLink]:
    """A link on which nothing has been said."""
    connection = DriverConnection(lambda layer: manifest.layer(layer).hidden)
    stream = FrameStream[DriverEvent](open_link(url, key, SILENCE), connection, url)
    try:
        yield DriverLink(stream, connection)
    finally:
        stream.close()


@contextmanager
def linked(
    url: str, manifest: Manifest, key: ClusterKey | None = None, **changes: Any
) -> Iterator[DriverLink]:
    """A link after HELLO and WELCOME; `changes` are to the HELLO."""
    with raw_link(url, manifest, key) as link:
        answer = link.greet(manifest.digest, **changes)
        assert isinstance(answer, Welcome), answer
        yield link
