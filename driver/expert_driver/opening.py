"""From options to a model that answers: the store, the experts here or on nodes, the trunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from expert_driver import fetching
from expert_driver.config import NetworkConfig
from expert_driver.dispatch.agreement import Wanted
from expert_driver.dispatch.dispatcher import NetworkExperts
from expert_driver.dispatch.epochs import asking
from expert_driver.dispatch.links import Opener
from expert_driver.dispatch.network import Network
from expert_driver.dispatch.pushing import Pusher
from expert_driver.engine import Engine
from expert_driver.figures import NetworkFigures
from expert_driver.passes.passes import Passes
from expert_driver.stopping import Stop
from expert_driver.text import Text
from expert_network import places
from expert_network.backend import Backend, detect, start_kernels_at_once
from expert_network.commandline import progress, warn
from expert_network.errors import InputError, OutOfMemory
from expert_network.experts.partition import Blocks, load_partition, partition_bytes
from expert_network.memory import available_memory
from expert_network.model.deferred import Experts
from expert_network.model.seam import Mode
from expert_network.model.trunk import load_trunk
from expert_network.store.manifest import TRUNK, Manifest
from expert_network.store.reader import Store
from expert_network.transfer import transfer_for
from expert_protocol.dtypes import WireDType
from expert_protocol.frames import Hello, dispatch_size
from expert_protocol.greetings import MAX_PEERS
from expert_protocol.header import VERSION

WORKING_BYTES = 200_000_000  # besides the weights: activations, a small KV cache, the interpreter


@dataclass
class Session:
    """An open model. `network` is None where all experts are in this process.

    `mode` is that of the seams, `computing` what computes in this process, for a person.
    """

    store: Store
    engine: Engine
    text: Text | None
    network: Network | None
    mode: Mode
    computing: str

    @property
    def figures(self) -> NetworkFigures | None:
        """The network's counters."""
        return None if self.network is None else self.network.figures

    @property
    def longest(self) -> int | None:
        """How many tokens the model was made for, as its config says."""
        config = self.store.config
        stated = config.get("max_position_embeddings") or (config.get("text_config") or {}).get(
            "max_position_embeddings"
        )
        return stated if isinstance(stated, int) else None


@contextmanager
def opened(name: str | None, config: NetworkConfig, with_text: bool) -> Iterator[Session]:
    """The model of the store called `name` (None: the only one, or the nodes' own), ready to use.

    Raises whatever keeps it from answering, as early as it can be known; see expert_network.errors.
    """
    if config.nodes:
        start_kernels_at_once()
    backend = detect(config.computing.kernels, config.computing.threads)
    precise = config.computing.precise(config.exact)
    stop = Stop()
    mode: Mode = "exact" if config.exact else "sum"
    computing = backend.computing(precise)
    store = _find(name, config)
    if not config.nodes:
        text = Text.open(store) if with_text else None
        experts = _load_experts(store, backend, precise)
        engine = _engine(store, backend, experts, mode, precise, text, stop)
        yield Session(store, engine, text, None, mode, computing)
        return
    advice = "leave other programs, or use a machine with more memory"
    _check_memory(store.manifest, {}, advice, backend)
    network = connect(config, store, backend)
    try:
        text = Text.open(store) if with_text else None
        remote = NetworkExperts(network, precise, transfer_for(backend.name))
        engine = _engine(store, backend, remote, mode, precise, text, stop)
        yield Session(store, engine, text, network, mode, computing)
    finally:
        network.close()


def connect(config: NetworkConfig, store: Store, backend: Backend) -> Network:
    """Links to all nodes of `config`, checked. Raises NodeError, KeyRefused, NetworkMismatch."""
    manifest = store.manifest
    compute = backend.compute_dtype(manifest.dtype)
    wanted = Wanted(
        model_digest=manifest.digest,
        shape=manifest.shape,
        compute_dtype=compute,
        exact=config.exact,
        wire=choose_wire(config, compute),
        row_bytes=max(
            dispatch_size(1, layer.experts, layer.hidden, WireDType.F32)
            for layer in manifest.layers
        ),
    )
    hello = Hello(
        protocol=VERSION,
        model_digest=manifest.digest,
        roster_digest=None,
        epoch=0,
        dtypes=(wanted.wire,),
        numerics=backend.numerics(compute),
        exact=config.exact,
        peers=config.nodes[:MAX_PEERS],
    )
    opener = Opener(config.key, hello, lambda layer: manifest.layer(layer).hidden)
    ask, push = asking(config.key), Pusher(store, config.key).push
    return Network(config.nodes, wanted, opener.open, warn, config.hedge, ask, push)


def choose_wire(config: NetworkConfig, compute_dtype: str) -> WireDType:
    """What rows travel as. Raises InputError for another --wire than --exact can have."""
    exact = WireDType.for_compute(compute_dtype)
    if not config.exact:
        return WireDType.from_label(config.wire or WireDType.BF16.label)
    if config.wire not in (None, exact.label):
        raise InputError(
            f"--exact carries rows in the dtype they are computed in, here {exact.label}; leave "
            f"--wire {config.wire} out, or leave --exact out."
        )
    return exact


def _find(name: str | None, config: NetworkConfig) -> Store:
    """The store: with nodes, one without blocks will do, and without a name theirs is fetched."""
    if not config.nodes:
        path = (
            places.only_store(config.home) if name is None else places.find_store(name, config.home)
        )
        return Store.open(path)
    if name is not None:
        return Store.open(places.find_store(name, config.home), blocks=False)
    with progress() as report:
        return fetching.fetch(config.nodes, config.key, places.cache_dir(config.home), report)


def _load_experts(store: Store, backend: Backend, precise: bool) -> Experts:
    blocks = {layer: np.arange(experts) for layer, experts in store.manifest.shape}
    advice = "spread the experts over nodes (--nodes), or use a model that is smaller"
    _check_memory(store.manifest, blocks, advice, backend)
    with progress() as report:
        return load_partition(store, blocks, backend, report, precise)


def _check_memory(manifest: Manifest, blocks: Blocks, advice: str, backend: Backend) -> None:
    trunk = manifest.files[TRUNK].size
    needed, available = (
        trunk + partition_bytes(manifest, blocks) + WORKING_BYTES,
        available_memory(backend.name),
    )
    if needed > available:
        what = "the trunk" if not blocks else "the model (trunk and all experts)"
        raise OutOfMemory(what, needed, available, advice)


def _engine(
    store: Store,
    backend: Backend,
    experts: Experts,
    mode: Mode,
    precise: bool,
    text: Text | None,
    stop: Stop,
) -> Engine:
    passes = Passes(stop)
    model = load_trunk(store, backend, passes.attend(experts), mode, precise)
    return Engine(model, text.eos if text else frozenset(), passes)
