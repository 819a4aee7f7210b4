"""One MoE layer's fan-out: rows to their owners' nodes, and the gathering of every reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from expert_driver.dispatch.gathering import Call, Gathering, Job, parts
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.routing import split
from expert_driver.dispatch.values import Outputs, Sums, Values
from expert_driver.figures import DispatchTimes
from expert_network.model.host import HostArray
from expert_network.net.rows import encode
from expert_network.transfer import Transfer
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode

Raw = npt.NDArray[Any]
Finish = Callable[[], mx.array]

#: What MLX casts to for a dtype; what is not here is rounded when it is in memory.
_CAST = {WireDType.BF16: mx.bfloat16, WireDType.F16: mx.float16}


class NetworkExperts:
    """Experts on the nodes of a network. Used by one thread.

    `begin_sum` and `begin_outputs` ask the nodes and return at once; what they return waits for the
    replies, and raises what the dispatch raised. A failure may end all dispatches that are under
    way. precise: see DISPATCH in docs/protocol.md. transfer: how rows leave and enter MLX.
    """

    def __init__(
        self, network: Network, precise: bool = False, transfer: Transfer | None = None
    ) -> None:
        self._network, self.precise = network, precise
        self._transfer = transfer or Transfer()
        self._wire = network.wanted.wire

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
        entered = perf_counter()
        self._network.ready()
        dtypes = [
            WireDType.for_compute(link.greeting.welcome.compute_dtype)
            for link in self._network.links
        ]
        values = Outputs(ids.size, x.shape[-1])
        weights = np.ones(ids.shape, np.float32)
        wait = self._ask(entered, layer, ReplyMode.EXACT, dtypes, x, ids, weights, values)

        def finish() -> mx.array:
            wait()
            made = values.made.reshape(*ids.shape, x.shape[-1])
            return _array(made, x, self._transfer).astype(x.dtype)

        return finish

    def begin_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> Finish:
        """Ask for `weighted_sum`."""
        entered = perf_counter()
        self._network.ready()
        places = len(self._network.links)
        values = Sums(x.shape[0], x.shape[1], places)
        dtypes = [self._wire] * places
        wait = self._ask(entered, layer, ReplyMode.SUM, dtypes, x, ids, weights, values)

        def finish() -> mx.array:
            wait()
            return _array(values.made, x, self._transfer)

        return finish

    def abandon(self) -> None:
        """Give up what has been asked and not been waited for; its links are closed."""
        self._network.exchange.abandon()

    def _ask(
        self,
        entered: float,
        layer: int,
        mode: ReplyMode,
        dtypes: Sequence[WireDType],
        x: mx.array,
        ids: mx.array,
        weights: mx.array | Raw,
        values: Values,
    ) -> Callable[[], None]:
        """Ask all nodes, each in its of `dtypes`; what to call to wait for `values`."""
        network = self._network
        rows, experts, scores = _evaluated(self._transfer, x, set(dtypes), ids, weights)
        evaluated_at = perf_counter()
        agreement, links = network.agreement, network.links
        epoch, k = agreement.roster.epoch, experts.shape[1]
        call = Call(layer, epoch, mode, rows, k, self.precise)
        shares = split(agreement.chosen[layer][experts], len(links), experts, scores)
        jobs = [
            Job(link, call, dtype, parts(share, link, call, dtype), figures)
            for link, dtype, figures, share in zip(
                links, dtypes, network.figures.nodes, shares, strict=True
            )
            if share is not None
        ]
        gathering = Gathering(jobs, values)
        network.exchange.ask(gathering)
        sent = perf_counter()

        def wait() -> None:
            network.exchange.wait(gathering)
            network.used()
            _report(network, gathering, len(experts), entered, evaluated_at, sent)
            for job in jobs:  # or every dispatch leaves a circle to the garbage collector
                del job.gathering

        return wait


def _report(
    network: Network,
    gathering: Gathering,
    count: int,
    entered: float,
    evaluated_at: float,
    sent: float,
) -> None:
    done = perf_counter()
    jobs = gathering.jobs
    traffic = sum(job.out_bytes + job.in_bytes for job in jobs)
    network.figures.count(count, done - evaluated_at, traffic)
    if network.observer is not None:
        nodes = tuple(job.times for job in jobs)
        times = (entered, evaluated_at, sent, done)
        network.observer(DispatchTimes(jobs[0].call.layer, count, *times, nodes))


def _evaluated(
    transfer: Transfer,
    x: mx.array,
    dtypes: set[WireDType],
    ids: mx.array,
    weights: mx.array | Raw,
) -> tuple[dict[WireDType, Raw], Raw, Raw]:
    """Rows as they travel in each of `dtypes`, ids and float32 weights, after one wait for MLX."""
    cast = {dtype: _cast(x, dtype) for dtype in dtypes}
    asked = [ids, *cast.values(), *([weights] if isinstance(weights, mx.array) else [])]
    experts, *others = transfer.fetch(*asked)
    scores = others.pop() if isinstance(weights, mx.array) else weights
    rows = {dtype: _raw(values, dtype) for dtype, values in zip(cast, others, strict=True)}
    return rows, experts, np.ascontiguousarray(scores, np.float32)


def _cast(x: mx.array, dtype: WireDType) -> mx.array:
    """x in the dtype that `_raw` makes its form of: float32 is rounded there, where it is cheap.

    bfloat16 as uint16, since numpy has no such type.
    """
    if x.dtype == mx.float32:
        return x
    cast = x.astype(_CAST.get(dtype, mx.float32))
    return cast.view(mx.uint16) if dtype is WireDType.BF16 else cast


def _raw(values: Raw, dtype: WireDType) -> Raw:
    values = np.ascontiguousarray(values)
    return encode(values, dtype)[0] if values.dtype == np.float32 else values


def _array(made: Raw, like: mx.array, transfer: Transfer) -> mx.array:
    """An array whose values are at hand, if those of `like` are: the trunk reads them then."""
    return HostArray.of(made) if isinstance(like, HostArray) else transfer.put(made)[0]
