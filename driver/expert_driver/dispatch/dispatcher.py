"""One MoE layer's fan-out: rows to their owners' nodes, and the gathering of every reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from expert_driver.dispatch.fanout import Fanout, Row
from expert_driver.dispatch.gathering import Call, Gathering, Job, parts
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.routing import split
from expert_driver.dispatch.values import Floats, Outputs, Sums, Values
from expert_driver.figures import DispatchTimes
from expert_network.model.host import HostArray, evaluated
from expert_network.net.rows import encode
from expert_network.transfer import Fetch, Transfer
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode

Raw = npt.NDArray[Any]
Finish = Callable[[], mx.array]

#: What MLX casts to for a dtype; what is not here is rounded when it is in memory.
_CAST = {WireDType.BF16: mx.bfloat16, WireDType.F16: mx.float16}


class NetworkExperts:
    """Experts on the nodes of a network. Used by one thread.

    `begin_sum` and `begin_outputs` ask the nodes and return at once; what they return waits for the
    replies, and raises what the dispatch raised. Where `transfer` can promise values, one row's sum
    is waited for later: by what is asked next, or `settle`. A failure may end all dispatches that
    are under way. precise: see DISPATCH in docs/protocol.md. transfer: how rows leave and enter
    MLX.
    """

    def __init__(
        self, network: Network, precise: bool = False, transfer: Transfer | None = None
    ) -> None:
        self._network, self.precise = network, precise
        self._transfer = transfer or Transfer()
        #: Whether NumPy and native code read MLX's arrays where they are.
        self._plainly = type(self._transfer) is Transfer
        self._wire = network.wanted.wire
        self._fanout: Fanout | None = None
        self._fanned: object = None
        #: A sum that was given out before it came, and what waits for it; what is to be reported
        #: while the device works.
        self._promise: tuple[mx.array, Callable[[], None]] | None = None
        self._untold: Callable[[], None] | None = None

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """Every expert's own output, (N, k, D) in x's dtype.

        Rows travel in the dtype that each node computes in, whatever --wire says: single outputs
        are only given so. In exact mode this is the driver's dtype too, and nothing is rounded.
        """
        return self._at_once(self.begin_outputs, layer, x, ids)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k, float32) times outputs: (N, D) in float32.

        Partial sums are added in the order of the roster, so that neither the order of --nodes nor
        that of the replies is in the bits.
        """
        return self._at_once(self.begin_sum, layer, x, ids, weights)

    def begin_outputs(self, layer: int, x: mx.array, ids: mx.array) -> Finish:
        """Ask for `outputs`."""
        self.settle()
        entered = perf_counter()
        network = self._network
        network.ready()
        dtypes = [
            WireDType.for_compute(link.greeting.welcome.compute_dtype) for link in network.links
        ]
        cast = {dtype: _cast(x, dtype) for dtype in dtypes}
        experts, *values = self._transfer.fetch(ids, *cast.values())
        evaluated_at = perf_counter()
        rows = {dtype: _raw(value, dtype) for dtype, value in zip(cast, values, strict=True)}
        weights, made = np.ones(ids.shape, np.float32), Outputs(ids.size, x.shape[-1])
        asked = self._begin(layer, ReplyMode.EXACT, dtypes, rows, experts, weights, made)
        sent = perf_counter()

        def finish() -> mx.array:
            self.settle()
            outputs = asked.wait().reshape(*ids.shape, x.shape[-1])
            times = (entered, evaluated_at, sent, perf_counter())
            _report(network, asked, layer, len(experts), *times)
            return _array(outputs, x, self._transfer).astype(x.dtype)

        return finish

    def begin_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> Finish:
        """Ask for `weighted_sum`."""
        count, hidden = x.shape
        network = self._network
        if (
            type(x) is HostArray and x.dtype == mx.float32 and self._plainly
        ):  # there is nothing to wait for
            entered = perf_counter()
            network.ready()
            rows, experts, scores = evaluated(x, ids, weights)
        else:
            at_hand = self._at_hand(x, ids, weights)
            self._keep()
            entered = perf_counter()
            at_hand.start()
            self._tell()
            network.ready()
            rows, experts, scores = at_hand.wait()
        evaluated_at = perf_counter()
        asked: Row | _Asked | None = None
        if count == 1:
            fanout = self._fanout if self._fanned is network.links else self._fan_out()
            if fanout is not None:
                asked = fanout.begin(layer, hidden, rows, experts, scores)
        if asked is None:
            asked = self._begin_sum(layer, hidden, rows, experts, scores)
        sent = perf_counter()

        def finish() -> mx.array:
            self.settle()
            if count == 1 and self._transfer.promises:
                report = partial(_report, network, asked, layer, count, entered, evaluated_at, sent)
                return self._promised(hidden, asked, report)
            made = asked.wait()
            _report(network, asked, layer, count, entered, evaluated_at, sent, perf_counter())
            if self._plainly and type(x) is mx.array:
                return mx.array(made)
            return _array(made, x, self._transfer)

        return finish

    def settle(self) -> None:
        """Wait for the sum that was given out before it came: nothing may be evaluated until then.

        Raises what its dispatch raised.
        """
        if self._promise is not None or self._untold is not None:
            self._keep()
            self._tell()

    def _keep(self) -> None:
        """Write what was promised to where it is to be."""
        if self._promise is None:
            return
        (made, keep), self._promise = self._promise, None
        try:
            keep()
        except BaseException:
            mx.eval(made)  # nothing lazy may read its place later
            raise

    def _tell(self) -> None:
        """Report the last dispatch, if that was put off."""
        if self._untold is not None:
            tell, self._untold = self._untold, None
            tell()

    def _promised(
        self, hidden: int, asked: Row | _Asked, report: Callable[[float], None]
    ) -> mx.array:
        """A sum (1, D) that is to come: MLX's graph of the next layer is built meanwhile."""
        made, place = self._transfer.promise((1, hidden))

        def keep() -> None:
            place[...] = asked.wait()
            self._untold = partial(report, perf_counter())

        self._promise = made, keep
        return made

    def abandon(self) -> None:
        """Give up what has been asked and not been waited for; its links are closed."""
        if self._promise is not None:
            mx.eval(self._promise[0])
            self._promise = None
        self._network.exchange.abandon()

    def _at_once(self, begin: Callable[..., Finish], *asked: Any) -> mx.array:
        try:
            made = begin(*asked)()
            self.settle()
            return made
        except KeyboardInterrupt:
            self.abandon()
            raise

    def _at_hand(self, x: mx.array, ids: mx.array, weights: mx.array) -> Fetch:
        """Rows as float32 or raw, ids and weights, after one wait for MLX: arrays or buffers."""
        if not self._plainly or x.dtype != mx.float32:
            return self._transfer.fetching(_cast(x, self._wire), ids, weights)
        if type(x) is type(ids) is type(weights) is mx.array:
            return _Plain(x, ids, weights)
        return self._transfer.fetching(x, ids, weights)

    def _fan_out(self) -> Fanout | None:
        """What asks for one row natively, where that can be done; made anew for new links."""
        self._fanned = self._network.links
        self._fanout = Fanout.over(self._network, self._wire, self.precise)
        return self._fanout

    def _begin_sum(self, layer: int, hidden: int, rows: Any, experts: Any, scores: Any) -> _Asked:
        experts, raw = np.asarray(experts), _raw(np.asarray(rows), self._wire)
        places = len(self._network.links)
        values, dtypes = Sums(len(experts), hidden, places), [self._wire] * places
        weights = np.ascontiguousarray(scores, np.float32)
        return self._begin(
            layer, ReplyMode.SUM, dtypes, {self._wire: raw}, experts, weights, values
        )

    def _begin(
        self,
        layer: int,
        mode: ReplyMode,
        dtypes: Sequence[WireDType],
        rows: Mapping[WireDType, Raw],
        experts: Raw,
        weights: Floats,
        values: Values,
    ) -> _Asked:
        """Ask all nodes, each in its of `dtypes`."""
        network = self._network
        agreement, links = network.agreement, network.links
        call = Call(layer, agreement.roster.epoch, mode, rows, experts.shape[1], self.precise)
        shares = split(agreement.chosen[layer][experts], len(links), experts, weights)
        adopt = layer in agreement.adopted
        jobs = [
            Job(link, call, dtype, parts(share, link, call, dtype), figures, adopt)
            for link, dtype, figures, share in zip(
                links, dtypes, network.figures_of_links, shares, strict=True
            )
            if share is not None
        ]
        gathering = Gathering(jobs, values)
        network.exchange.ask(gathering)
        return _Asked(network, gathering)


class _Asked:
    """A dispatch that the exchange has sent; the same to its caller as a Row."""

    def __init__(self, network: Network, gathering: Gathering) -> None:
        self._exchange, self._gathering = network.exchange, gathering
        self.times = gathering.times

    def wait(self) -> Floats:
        """What was asked for. Raises NodeError."""
        return self._exchange.wait(self._gathering)

    @property
    def traffic(self) -> int:
        """Bytes that went and came, once all are there."""
        return self._gathering.traffic


class _Plain(Fetch):
    """Arrays themselves, which native code reads where they are."""

    def __init__(self, *arrays: mx.array) -> None:
        self._plain = arrays

    def wait(self) -> tuple[Any, ...]:
        """See Fetch."""
        mx.eval(*self._plain)
        return self._plain


def _report(
    network: Network,
    asked: Row | _Asked,
    layer: int,
    rows: int,
    entered: float,
    evaluated: float,
    sent: float,
    done: float,
) -> None:
    network.used(rows, done - evaluated, asked.traffic)
    if network.observer is not None:
        times = (entered, evaluated, sent, done)
        network.observer(DispatchTimes(layer, rows, *times, asked.times()))


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
