"""One MoE layer's fan-out: rows to their owners' nodes, and the gathering of every reply."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx
import numpy as np

from expert_driver.dispatch.gathering import Call, Job, Raw, gather, parts
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.routing import split
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode

_CAST = {WireDType.F32: mx.float32, WireDType.BF16: mx.bfloat16, WireDType.F16: mx.float16}


class NetworkExperts:
    """Experts on the nodes of a network. Used by one thread."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wire = network.wanted.wire

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """Every expert's own output, (N, k, D) in x's dtype.

        Rows travel in the dtype that each node computes in, whatever --wire says: single outputs
        are only given so. In exact mode this is the driver's dtype too, and nothing is rounded.
        """
        self._network.ready()
        dtypes = [
            WireDType.for_compute(link.greeting.welcome.compute_dtype)
            for link in self._network.links
        ]
        weights = mx.ones(ids.shape, mx.float32)
        made = np.empty((ids.size, x.shape[-1]), np.float32)
        for job in self._dispatch(layer, ReplyMode.EXACT, dtypes, x, ids, weights):
            for share, data in job.replies:
                made[share.pairs] = job.dtype.decode(data)
        return mx.array(made).astype(x.dtype).reshape(*ids.shape, x.shape[-1])

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k, float32) times outputs: (N, D) in float32.

        Partial sums are added in the order of the roster, so that neither the order of --nodes nor
        that of the replies is in the bits.
        """
        self._network.ready()
        dtypes = [self._wire] * len(self._network.links)
        total = np.zeros(x.shape, np.float32)
        for job in self._dispatch(layer, ReplyMode.SUM, dtypes, x, ids, weights):
            for share, data in job.replies:
                total[share.rows] += job.dtype.decode(data)
        return mx.array(total)

    def _dispatch(
        self,
        layer: int,
        mode: ReplyMode,
        dtypes: Sequence[WireDType],
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
    ) -> list[Job]:
        """Ask all nodes, each in its of `dtypes`; the finished jobs, in the order of the roster."""
        network = self._network
        travelling = {dtype: _to_wire(x, dtype) for dtype in dtypes}
        mx.eval(ids, weights, *travelling.values())
        started, before = perf_counter(), network.traffic
        rows = {dtype: np.ascontiguousarray(raw) for dtype, raw in travelling.items()}
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
        gather(jobs)
        network.used()
        network.figures.count(len(experts), perf_counter() - started, network.traffic - before)
        return jobs


def _to_wire(x: mx.array, dtype: WireDType) -> mx.array:
    """x as it travels, lazily: bfloat16 as uint16, since numpy has no such type."""
    cast = x.astype(_CAST[dtype])
    return cast.view(mx.uint16) if dtype is WireDType.BF16 else cast


def _float32(weights: mx.array) -> Raw:
    return np.ascontiguousarray(weights, np.float32)
