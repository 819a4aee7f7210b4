"""What the parts of a running node know of each other: the phase it is in, and what it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import psutil

from expert_network import __version__
from expert_network.experts.partition import Partition
from expert_network.memory import peak_rss
from expert_node.links import Links
from expert_node.membership import Membership, blocks_of
from expert_node.metrics import Counters
from expert_node.startup import Startup
from expert_protocol.header import VERSION
from expert_roster.roster import Roster

SOFTWARE = f"expert-network {__version__}"


class Phase(Enum):
    """What /health says."""

    FETCHING = "fetching"
    LOADING = "loading"
    OK = "ok"
    DRAINING = "draining"


@dataclass(frozen=True)
class Serving:
    """A node with its blocks in memory."""

    partition: Partition
    links: Links
    membership: Membership
    ready_at: float = field(default_factory=time.monotonic)


@dataclass
class NodeState:
    """One node, from the moment that it listens. `serving` is None until it is loaded.

    startup: None as long as the manifest is being fetched from peers.
    """

    startup: Startup | None = None
    counters: Counters = field(default_factory=Counters)
    phase: Phase = Phase.LOADING
    loaded: tuple[int, int] = (0, 0)  # bytes, of bytes
    serving: Serving | None = None

    @property
    def settled(self) -> Startup:
        """What was settled; to be asked for once it is."""
        assert self.startup is not None
        return self.startup

    def flipped(self, roster: Roster) -> None:
        """Be a node of `roster` from now on."""
        settled = self.settled
        blocks = blocks_of(roster, settled.name, settled.store.manifest.shape)
        self.startup = replace(settled, roster=roster, blocks=blocks)

    def status(self, serving: Serving) -> dict[str, Any]:
        """The body of /status. Memory and partition in bytes."""
        settled, partition = self.settled, serving.partition
        self.counters.refresh()
        manifest, roster = settled.store.manifest, settled.roster
        return {
            "name": settled.name,
            "software": SOFTWARE,
            "protocol": VERSION,
            "model_digest": manifest.digest,
            "model_type": manifest.model_type,
            "roster": {**roster.to_wire(), "digest": roster.digest},
            "numerics": partition.numerics,
            "compute_dtype": partition.compute_dtype,
            "kernels": partition.kernels,
            "partition": {
                "blocks": partition.blocks,
                "bytes": partition.nbytes,
                "total_blocks": manifest.block_count,
                "layers": {
                    str(layer): partition.owned(layer).tolist() for layer, _ in manifest.shape
                },
            },
            "uptime_s": round(time.monotonic() - serving.ready_at, 3),
            "links": len(serving.links),
            "dispatches": self.counters.dispatches,
            "rss_bytes": resident_bytes(),
            "peak_rss_bytes": peak_rss(),
            "trunk": settled.store.trunk_path.is_file(),
        }

    def gauges(self) -> Mapping[str, float]:
        """The values for metrics.GAUGES, and the links' bytes."""
        serving = self.serving
        received, sent = serving.links.traffic() if serving else (0, 0)
        return {
            "links": len(serving.links) if serving else 0,
            "partition_bytes": serving.partition.nbytes if serving else 0,
            "partition_blocks": serving.partition.blocks if serving else 0,
            "resident_memory_bytes": resident_bytes(),
            "peak_resident_memory_bytes": peak_rss(),
            "uptime_seconds": time.monotonic() - serving.ready_at if serving else 0.0,
            "received_bytes": received,
            "sent_bytes": sent,
        }

    def build(self) -> dict[str, str]:
        """The labels of the build metric."""
        manifest = self.settled.store.manifest
        return {
            "name": self.settled.name,
            "version": __version__,
            "protocol": str(VERSION),
            "model_type": manifest.model_type,
            "model_digest": manifest.digest,
        }


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)
