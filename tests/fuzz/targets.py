"""Every decoder of bytes that others make: what it is given, and how it may refuse."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from expert_driver.status import NodeStatus, as_json, problems, row
from expert_network.errors import (
    CheckpointError,
    ExpertNetworkError,
    InputError,
    KeyRefused,
    NotANode,
    RosterError,
    StoreError,
)
from expert_network.model.checkpoint import _check_shard
from expert_network.net.address import parse_url
from expert_network.net.answers import refusal, sentence_of
from expert_network.net.auth import (
    Answer,
    ClusterKey,
    NonceTable,
    challenge,
    challenged_with,
    verify,
)
from expert_network.net.blocks import start_of
from expert_network.net.opening import _Opening
from expert_network.net.proof import read_nonce
from expert_network.net.rosters import Seat
from expert_network.store.manifest import Manifest
from expert_network.store.reader import Store, read_config
from expert_network.store.trunk_file import TensorSource, header
from expert_node.content import Content, span
from expert_node.membership import Proposal, read_order
from expert_roster.roster import Roster
from tests.fuzz.mutation import mutated_json
from tests.fuzz.target import Never, Target
from tests.fuzz.wire import wire_targets
from tests.support.stores import write_store
from tests.support.wire import DIGEST, ROSTER

T = TypeVar("T")


def targets() -> list[Target]:
    """All decoders. Files that some of them read are written to a folder of this process."""
    return [*wire_targets(), *_stores(), *_rosters(), *_http(), *_words()]


# Stores


def _stores() -> list[Target]:
    folder = Path(_folder.name)
    manifest = write_store(folder / "store", (0, 3), 2).to_bytes()
    tensors = [TensorSource("a", "float32", (2, 2), lambda: memoryview(b""))]
    tensors += [TensorSource("b.c", "bfloat16", (4,), lambda: memoryview(b""))]
    shard = header(tensors)
    config = json.dumps({"model_type": "olmoe", "rope": {"theta": 1e4}, "sizes": [1, 2]}).encode()
    return [
        Target("manifest", _manifest, [manifest], StoreError, mutated_json),
        Target(
            "marks of a layer", partial(_marks, folder / "store"), [b"\2\0", b"\1\2"], StoreError
        ),
        Target(
            "safetensors header",
            partial(_safetensors, folder),
            [shard[8:]],
            CheckpointError,
            mutated_json,
        ),
        Target(
            "safetensors file",
            partial(_in_file, folder, _check_shard),
            [shard + bytes(24)],
            CheckpointError,
        ),
        Target(
            "config",
            partial(_in_file, folder, read_config),
            [config],
            InputError,
            mutated_json,
        ),
    ]


_folder = tempfile.TemporaryDirectory(prefix="expert-network-fuzz-")


def _manifest(data: bytes) -> None:
    manifest = Manifest.from_bytes(data, "here")
    assert manifest.digest == hashlib.sha256(data).hexdigest()
    for spec in manifest.layers:
        assert spec.block_bytes <= spec.stride and len(spec.sha256) == spec.experts


def _marks(folder: Path, data: bytes) -> None:
    store = Store.open_unchecked(folder)
    marks = folder / store.manifest.layer(0).marks
    marks.write_bytes(data)
    try:
        assert set(store.held(0)) <= {0, 1}
        for expert in store.held(0):
            store.read_block(0, expert)
        Store.open(folder)
    finally:
        marks.unlink()


def _in_file(folder: Path, read: Callable[[Path], T], data: bytes) -> T:
    file = folder / "fuzzed"
    file.write_bytes(data)
    return read(file)


def _safetensors(folder: Path, data: bytes) -> None:
    _in_file(folder, _check_shard, struct.pack("<Q", len(data)) + data + bytes(24))


# Rosters


def _rosters() -> list[Target]:
    table = b'replicas = 2\nepoch = 1\n[nodes]\na = 64\n"b.c" = 1.5\n'
    wire = json.dumps(ROSTER | {"digest": Roster.from_wire(ROSTER).digest}).encode()
    whole = Roster.from_wire(ROSTER)
    named = ROSTER | {"digest": whole.digest}
    addresses = {"a": "http://a:8301", "b": "http://b"}
    proposal = json.dumps(
        {"model": DIGEST, "roster": named, "proposer": "me at home", "addresses": addresses}
    ).encode()
    order = json.dumps({"epoch": 3, "digest": DIGEST}).encode()
    pending = {"epoch": 4, "digest": DIGEST, "proposer": "me", "done": 1, "total": 2}
    seat = json.dumps(
        {
            "node": "a",
            "model_digest": DIGEST,
            "roster": named,
            "addresses": addresses,
            "fetched": 0,
            "pending": pending | {"ready": False, "error": None},
        }
    ).encode()
    return [
        Target("roster on a command line", _text(Roster.parse), [b"a,b=2.5,c-1=16"], RosterError),
        Target("roster file", _text(Roster.from_toml), [table], RosterError),
        Target(
            "roster of a peer",
            _json(Roster.from_wire),
            [wire, json.dumps(ROSTER).encode()],
            RosterError,
            mutated_json,
        ),
        Target("proposal", _json(Proposal.read), [proposal], RosterError, mutated_json),
        Target("roster to commit", _json(read_order), [order], RosterError, mutated_json),
        Target("answer about rosters", _json(_seat), [seat], NotANode, mutated_json),
    ]


def _seat(value: object) -> None:
    seat = Seat.read(_URL, value)
    assert seat.order[0] >= 0
    assert len(seat.names) == len(seat.roster["nodes"])


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode(errors="replace"))


def _json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """What is no JSON does not get as far as `read`."""

    def run(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return run


# HTTP


_KEY = ClusterKey(bytes(range(32)))
_SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: expert-link/1\r\nConnection: upgrade\r\n\r\n"
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 21\r\n\r\n" + b'{"error": "it drains"}'
)
_URL = "http://127.0.0.1:8301"


def _http() -> list[Target]:
    nonces = NonceTable(lambda: 1000.0)
    challenged = challenge(nonces).encode()
    status = json.dumps(_status()).encode()
    ranges = [b"bytes=0-99\nx", b"bytes=-5\n*", b'bytes=7-\n"aa"', b'bytes=1-2,3-4\nW/"aa"']
    return [
        Target(
            "answer to an upgrade",
            _answer,
            [
                _SWITCH,
                _REFUSAL,
                b"HTTP/1.1 401 No\r\nWWW-Authenticate: " + challenged + b"\r\n\r\n",
            ],
            ExpertNetworkError,
        ),
        Target(
            "error of a node",
            _error,
            [b'{"error": "node a has no block"}'],
            ExpertNetworkError,
            mutated_json,
        ),
        Target("status of a node", _json(_read_status), [status], Never, mutated_json),
        Target("challenge", lambda data: challenged_with(data.decode("latin-1")), [challenged]),
        Target(
            "answer to a challenge", partial(_verify, nonces), [_answered(challenged)], KeyRefused
        ),
        Target(
            "proof of a key", _proved, [b'mac="' + b"0" * 64 + b'", nextnonce="abc"'], KeyRefused
        ),
        Target("ranges", _span, ranges),
        Target("part of a block", _start, [b"bytes 5-99/100"]),
    ]


def _status() -> dict[str, Any]:
    return {
        "name": "a",
        "software": "0.1.0",
        "protocol": 3,
        "model_digest": DIGEST,
        "roster": ROSTER,
        "numerics": "mlx-cpu/x",
        "partition": {"blocks": 2, "bytes": 9, "total_blocks": 4, "layers": {"0": [0, 1]}},
        "uptime_s": 75.0,
        "links": 1,
        "rss_bytes": 10**6,
    }


class _Socket:
    """Gives bytes in two pieces, then the end."""

    def __init__(self, data: bytes) -> None:
        self._pieces = [data[: len(data) // 2], data[len(data) // 2 :]]

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, count: int) -> bytes:
        while self._pieces:
            piece = self._pieces.pop(0)
            if len(piece) > count:
                self._pieces.insert(0, piece[count:])
            if piece:
                return piece[:count]
        return b""


def _answer(data: bytes) -> None:
    opening, sock = _Opening(_URL, None, 5.0), cast(Any, _Socket(data))
    head = opening._read_head(sock)
    challenged_with(head.headers.get("www-authenticate"))
    if not head.switched:
        raise opening._refused(sock, head)


def _error(data: bytes) -> None:
    sentence_of(data)
    raise refusal(_URL, 404, "Not Found", data, "/status")


def _read_status(value: object) -> None:
    node = NodeStatus.read(_URL, {"status": "ok"}, value)
    row(node)
    if not node.error:
        problems([node])
    json.dumps(as_json([node]))


def _answered(challenged: bytes) -> bytes:
    nonce = challenged_with(challenged.decode())
    assert nonce is not None
    return Answer(_KEY, "GET", "/status", nonce).header.encode()


def _verify(nonces: NonceTable, data: bytes) -> None:
    verify(_KEY, nonces, "GET", "/status", data.decode("utf-8", "surrogateescape"))


def _proved(data: bytes) -> None:
    Answer(_KEY, "GET", "/status", "00" * 40).proved(data.decode("utf-8", "surrogateescape"))


def _start(data: bytes) -> None:
    headers = {"Content-Range": data.decode("latin-1")}
    start = start_of(cast(Any, SimpleNamespace(status=206, headers=headers)))
    assert start is None or start >= 0


def _span(data: bytes) -> None:
    content = Content(1000, "aa", cast(Any, None))
    asked, _, tag = data.decode("latin-1").partition("\n")
    for name in ("If-None-Match", "If-Range"):
        part = span({"Range": asked, name: tag}, content)
        assert 0 <= part.start <= part.stop <= 1000


# Words that people, or scripts of theirs, type


def _words() -> list[Target]:
    addresses = [b"http://mini:8301", b"[::1]:8301", b"192.168.0.7", b"studio.local:80/"]
    return [
        Target("address", _text(parse_url), addresses, InputError),
        Target("cluster key", _text(ClusterKey.from_text), [b"00ff" * 16], InputError),
        Target("nonce of a proof", _text(read_nonce), [b"0f" * 16], InputError),
    ]
