"""One MoE layer's fan-out: rows to their owners' nodes, and the gathering of every reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx
import numpy as np

from expert_driver.dispatch.gathering import Call, Gathering, Job, Raw, parts
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.routing import split
from expert_driver.figures import DispatchTimes
from expert_network.errors import NodeError
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode

_CAST = {
    WireDType.F32: mx.float32,
    WireDType.BF16: mx.bfloat16,
    WireDType.F16: mx.float16,
    WireDType.INT8: mx.float32,
}

Finish = Callable[[], mx.array]


class NetworkExperts:
    """Experts on the nodes of a network. Used by one thread.

    `begin_sum` and `begin_outputs` ask the nodes and return at once; what they return waits for the
    replies, and raises what the dispatch raised. precise: see DISPATCH in docs/protocol.md.
    """

    def __init__(self, network: Network, precise: bool = False) -> None:
        self._network, self.precise = network, precise
        self._wire = network.wanted.wire
        self._outstanding: _Dispatched | None = None

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """Every expert's own output, (N, k, D) in x's dtype.

        Rows travel in the dtype that each node computes in, whatever --wire says: single outputs
        are only given so. In exact mode this is the driver's dtype too, and nothing is rounded.
        """
        return self.begin_outputs(layer, x, ids)()

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k, float32) times outputs: (N, D) in float32.

        Partial sums are added in the order of the roster, so that neither the order of --nodes nor
        that of the replies is in the bits.
        """
        return self.begin_sum(layer, x, ids, weights)()

    def begin_outputs(self, layer: int, x: mx.array, ids: mx.array) -> Finish:
        """Ask for `outputs`."""
        self._ready()
        dtypes = [
            WireDType.for_compute(link.greeting.welcome.compute_dtype)
            for link in self._network.links
        ]
        weights = mx.ones(ids.shape, mx.float32)
        asked = self._dispatch(layer, ReplyMode.EXACT, dtypes, x, ids, weights)

        def finish() -> mx.array:
            made = np.empty((ids.size, x.shape[-1]), np.float32)
            for job in asked.jobs():
                for share, data in job.replies:
                    made[share.pairs] = job.dtype.decode(data)
            return mx.array(made).astype(x.dtype).reshape(*ids.shape, x.shape[-1])

        return finish

    def begin_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> Finish:
        """Ask for `weighted_sum`."""
        self._ready()
        dtypes = [self._wire] * len(self._network.links)
        asked = self._dispatch(layer, ReplyMode.SUM, dtypes, x, ids, weights)

        def finish() -> mx.array:
            total = np.zeros(x.shape, np.float32)
            for job in asked.jobs():
                for share, data in job.replies:
                    total[share.rows] += job.dtype.decode(data)
            return mx.array(total)

        return finish

    def abandon(self) -> None:
        """Give up what has been asked and not been waited for; its links are closed."""
        if self._outstanding is not None:
            self._outstanding.gathering.abandon()
            self._outstanding = None

    def _ready(self) -> None:
        if self._outstanding is not None:
            self._outstanding.complete()
            self._outstanding = None
        self._network.ready()

    def _dispatch(
        self,
        layer: int,
        mode: ReplyMode,
        dtypes: Sequence[WireDType],
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
    ) -> _Dispatched:
        """Ask all nodes, each in its of `dtypes`."""
        network, entered = self._network, perf_counter()
        travelling = {dtype: _to_wire(x, dtype) for dtype in dtypes}
        mx.eval(ids, weights, *travelling.values())
        evaluated = perf_counter()
        rows = {dtype: _raw(x, dtype) for dtype, x in travelling.items()}
        experts = np.asarray(ids)
        epoch = network.agreement.roster.epoch
        call = Call(layer, epoch, mode, rows, experts.astype(np.uint16), _float32(weights))
        shares = split(network.agreement.chosen[layer][experts], len(network.links))
        jobs = [
            Job(link, call, dtype, parts(share, link, call, dtype), figures)
            for link, dtype, figures, share in zip(
                network.links, dtypes, network.figures.nodes, shares, strict=True
            )
            if share is not None
        ]
        gathering = Gathering(jobs)
        self._outstanding = _Dispatched(network, jobs, gathering, entered, evaluated)
        return self._outstanding


class _Dispatched:
    """A dispatch that has been sent: its jobs, in the order of the roster."""

    def __init__(
        self,
        network: Network,
        jobs: list[Job],
        gathering: Gathering,
        entered: float,
        evaluated: float,
    ) -> None:
        self.gathering = gathering
        self._network, self._jobs = network, jobs
        self._entered, self._evaluated, self._sent = entered, evaluated, perf_counter()
        self._complete = False
        self._failed: BaseException | None = None

    def jobs(self) -> list[Job]:
        """Its finished jobs. Raises NodeError."""
        self.complete()
        if self._failed is not None:
            raise self._failed
        return self._jobs

    def complete(self) -> None:
        """Take all replies; what that raises is kept for `jobs`."""
        if self._complete:
            return
        self._complete = True
        try:
            self.gathering.finish()
        except NodeError as error:
            self._failed = error
            return
        self._network.used()
        self._report()

    def _report(self) -> None:
        network, done = self._network, perf_counter()
        rows, nodes = len(self._jobs[0].call.ids), tuple(job.times for job in self._jobs)
        traffic = sum(node.out_bytes + node.in_bytes for node in nodes)
        network.figures.count(rows, done - self._evaluated, traffic)
        if network.observer is not None:
            times = self._entered, self._evaluated, self._sent, done
            network.observer(DispatchTimes(self._jobs[0].call.layer, rows, *times, nodes))


def _to_wire(x: mx.array, dtype: WireDType) -> mx.array:
    """x as it travels, lazily: bfloat16 as uint16, since numpy has no such type. int8: not yet."""
    cast = x.astype(_CAST[dtype])
    return cast.view(mx.uint16) if dtype is WireDType.BF16 else cast


def _raw(travelling: mx.array, dtype: WireDType) -> Raw:
    """What `_to_wire` made, evaluated, as the bytes that travel."""
    values = np.ascontiguousarray(travelling)
    return dtype.encode(values) if dtype is WireDType.INT8 else values


def _float32(weights: mx.array) -> Raw:
    return np.ascontiguousarray(weights, np.float32)
