"""One MoE layer's fan-out: rows to their owners' nodes, and the gathering of every reply."""

from __future__ import annotations

from time import perf_counter

import mlx.core as mx
import numpy as np

from expert_driver.gathering import Call, Job, Raw, gather, parts
from expert_driver.network import Network
from expert_driver.routing import split
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import ReplyMode

_CAST = {WireDType.F32: mx.float32, WireDType.BF16: mx.bfloat16, WireDType.F16: mx.float16}


class NetworkExperts:
    """Experts on the nodes of a network. Used by one thread."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wire = network.wanted.wire

    def outputs(self, layer: int, x: mx.array, ids: mx.array) -> mx.array:
        """Every expert's own output, (N, k, D) in x's dtype."""
        rows = self._to_wire(x)
        mx.eval(rows, ids)
        weights = np.ones(ids.shape, np.float32)
        made = np.empty((ids.size, x.shape[-1]), self._wire.raw)
        for job in self._dispatch(layer, ReplyMode.EXACT, rows, np.asarray(ids), weights):
            for share, data in job.replies:
                made[share.pairs] = data
        return self._from_wire(made).reshape(*ids.shape, x.shape[-1]).astype(x.dtype)

    def weighted_sum(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The sum over k of weights (N, k, float32) times outputs: (N, D) in float32.

        Partial sums are added in the order of the roster, so that neither the order of --nodes nor
        that of the replies is in the bits.
        """
        rows = self._to_wire(x)
        mx.eval(rows, ids, weights)
        total = np.zeros(x.shape, np.float32)
        jobs = self._dispatch(layer, ReplyMode.SUM, rows, np.asarray(ids), np.asarray(weights))
        for job in jobs:
            for share, data in job.replies:
                total[share.rows] += self._wire.decode(data)
        return mx.array(total)

    def _to_wire(self, x: mx.array) -> mx.array:
        """x as it travels, lazily: bfloat16 as uint16, since numpy has no such type."""
        cast = x.astype(_CAST[self._wire])
        return cast.view(mx.uint16) if self._wire is WireDType.BF16 else cast

    def _from_wire(self, raw: Raw) -> mx.array:
        array = mx.array(raw)
        return array.view(mx.bfloat16) if self._wire is WireDType.BF16 else array

    def _dispatch(
        self, layer: int, mode: ReplyMode, rows: mx.array, ids: Raw, weights: Raw
    ) -> list[Job]:
        """Ask all nodes; the finished jobs, in the order of the roster.

        rows (N, D) are evaluated, as they travel; ids and weights (N, k).
        """
        network = self._network
        agreement = network.ready()
        started, before = perf_counter(), network.traffic
        call = Call(
            layer,
            agreement.roster.epoch,
            mode,
            self._wire,
            np.ascontiguousarray(rows),
            ids.astype(np.uint16).reshape(-1),
            np.ascontiguousarray(weights, np.float32).reshape(-1),
        )
        shares = split(agreement.chosen[layer][ids], len(network.links))
        jobs = [
            Job(link, call, parts(share, link, call, ids.shape[1]), figures)
            for link, figures, share in zip(
                network.links, network.figures.nodes, shares, strict=True
            )
            if share is not None
        ]
        gather(jobs)
        network.used()
        network.figures.count(len(ids), perf_counter() - started, network.traffic - before)
        return jobs
