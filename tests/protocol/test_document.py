"""docs/protocol.md says what the code does: its examples, limits, codes and states."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_network.net.auth import Answer, ClusterKey
from expert_protocol import greetings, header
from expert_protocol.connection import DriverConnection, NodeConnection
from expert_protocol.frames import (
    Dispatch,
    ErrorReply,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Reply,
    ReplyMode,
    Welcome,
    WireDType,
    Working,
)
from expert_protocol.header import Buffer, ErrorCode, Kind
from expert_protocol.states import DRIVER_SENDS, FATAL, NODE_SENDS, State, Table
from tests.support.wire import events, facts

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
MODEL = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
ROSTER = "caf6652d9ed42d0d2ca85a94169c690da567ffa712681f14c892758b4cf5d399"
NUMERICS = "mlx-cpu/switch-0.32.4/float32/avx2"
F32, BF16, F16 = WireDType.F32, WireDType.BF16, WireDType.F16


def raw(*rows: list[float]) -> Any:
    return BF16.encode(np.array(rows, np.float32))


HELLO = Hello(header.VERSION, MODEL, ROSTER, 0, (BF16, F32), NUMERICS, False, 64 << 20)
WELCOME = Welcome(
    protocol=header.VERSION,
    node="a",
    model_digest=MODEL,
    roster={"nodes": [["a", 1.0], ["b", 2.0]], "replicas": 1, "epoch": 0},
    roster_digest=ROSTER,
    epoch=0,
    numerics=NUMERICS,
    compute_dtype="float32",
    dtypes=(F32, BF16, F16),
    max_rows=4096,
    max_payload=64 << 20,
    software="expert-network 0.1.0",
)
DISPATCH = Dispatch(
    layer=1,
    epoch=0,
    mode=ReplyMode.SUM,
    dtype=BF16,
    rows=raw([1, -2, 0.5, 0], [3, 0.25, -1, 1.5]),
    offsets=np.array([0, 2, 3], np.uint32),
    ids=np.array([5, 17, 5], np.uint16),
    weights=np.array([0.75, 0.25, 1], np.float32),
)
REPLY = Reply(ReplyMode.SUM, BF16, 12, 345, raw([0.5, 1, -0.25, 2], [0, -1, 4, 0.125]))
ERROR = ErrorReply(ErrorCode.NOT_OWNED, "node a does not own block (1, 17)")

#: What the document shows, in an order in which it can happen: who sends it, how, and what it is.
Send = Callable[[DriverConnection, NodeConnection], list[Buffer]]
STORY: list[tuple[str, str, Send, object]] = [
    ("HELLO", "driver", lambda d, n: d.hello(HELLO), HELLO),
    ("WELCOME", "node", lambda d, n: n.welcome(WELCOME), WELCOME),
    ("DISPATCH", "driver", lambda d, n: d.dispatch(DISPATCH), DISPATCH),
    ("WORKING", "node", lambda d, n: n.working(), Working()),
    ("REPLY", "node", lambda d, n: n.reply(REPLY), REPLY),
    ("PING", "driver", lambda d, n: d.ping(), Ping()),
    ("PONG", "node", lambda d, n: n.pong(), Pong()),
    (
        "GOODBYE",
        "node",
        lambda d, n: n.goodbye("node a is draining"),
        Goodbye("node a is draining"),
    ),
]
REFUSAL: list[tuple[str, str, Send, object]] = [
    *STORY[:3],
    ("ERROR", "node", lambda d, n: n.error(ERROR.code, ERROR.message), ERROR),
]


def example(name: str) -> bytes:
    """The bytes of one example; what follows a semicolon is for people."""
    (block,) = re.findall(rf"```hex {name}\n(.*?)```", TEXT, re.DOTALL)
    return bytes.fromhex(" ".join(line.partition(";")[0] for line in block.splitlines()))


@pytest.mark.parametrize("story", [STORY, REFUSAL])
def test_examples(story: list[tuple[str, str, Send, object]]) -> None:
    """Each example is what our end sends, and what the other end reads from it."""
    driver, node = DriverConnection(lambda layer: 4), NodeConnection(lambda layer: 4)
    for name, sender, send, expected in story:
        assert b"".join(send(driver, node)) == example(name), name
        receiver = node if sender == "driver" else driver
        (event,) = events(receiver, [example(name)])
        assert facts(event) == facts(expected), name


def test_int8_example() -> None:
    """The row of the example travels as the bytes below it."""
    (block,) = re.findall(r"```int8\n(.*?)```", TEXT, re.DOTALL)
    lines = [line.partition(";")[0].split() for line in block.splitlines()]
    row = np.array([float(word) for line in lines[:5] for word in line], np.float32)
    assert len(row) == 66
    encoded = WireDType.INT8.encode(row)
    assert encoded.tobytes() == bytes.fromhex("".join(word for line in lines[5:] for word in line))
    assert WireDType.INT8.decode(encoded)[[0, 1]].tolist() == [127, -64]


def test_every_kind_has_an_example() -> None:
    """The document shows all eight kinds and the answer to a PING, and nothing else."""
    shown = re.findall(r"```hex (\w+)", TEXT)
    assert sorted(shown) == sorted([*(kind.name for kind in Kind), "PONG"])


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table after `heading`."""
    after = TEXT[TEXT.index(heading) + len(heading) :]
    (table,) = re.findall(r"\n\n((?:\|.*\n)+)", after)[:1]
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()][
        2:
    ]


def test_limits() -> None:
    """Every limit stands in the table with its value, and every one of the table in the code."""
    stated = {name: int(value) for name, value, _ in rows_of("### Limits")}
    actual = {
        name: value
        for module in (header, greetings)
        for name, value in vars(module).items()
        if name.startswith("MAX_") and name != "MAX_U32"
    }
    assert stated == actual


def test_header_layout() -> None:
    """The header's table is gapless and ends at 32."""
    end = 0
    for offset, size, *_ in rows_of("## Frames"):
        assert int(offset) == end
        end += int(size)
    assert end == header.HEADER_SIZE
    (kinds,) = [row[3] for row in rows_of("## Frames") if row[2] == "kind"]
    assert kinds == ", ".join(f"{kind.value} {kind.name}" for kind in Kind)
    (dtypes,) = [row[3] for row in rows_of("## Frames") if row[2] == "dtype"]
    assert ", ".join(f"{dtype.value} {dtype.label}" for dtype in WireDType) in dtypes


def test_error_codes() -> None:
    """Every code stands in the table with its number."""
    stated = {name: int(number) for number, name, _ in rows_of("### ERROR")}
    assert stated == {code.name: code.value for code in ErrorCode}
    assert {code.name for code in FATAL} == {"PROTOCOL", "VERSION", "TOO_LARGE"}


@pytest.mark.parametrize(
    ("heading", "table"),
    [("What the driver may send:", DRIVER_SENDS), ("What the node may send:", NODE_SENDS)],
)
def test_states(heading: str, table: Table) -> None:
    """The state tables are the code's, cell by cell."""
    stated = {(state, frame, after) for state, frame, after in rows_of(heading)}
    assert stated == {
        (state.name.lower(), kind.name, after.name.lower())
        for state in State
        for kind, after in table[state].items()
    }


@pytest.mark.parametrize(("heading", "event"), [("### HELLO", HELLO), ("### WELCOME", WELCOME)])
def test_greeting_keys(heading: str, event: Hello | Welcome) -> None:
    """The keys of a greeting are those of the table."""
    stated = {key.strip() for keys, _ in rows_of(heading) for key in keys.split(",")}
    assert stated == set(type(event).__dataclass_fields__)


def test_key_example() -> None:
    """The macs of the example follow from the key and the formula beside it."""
    key = bytes.fromhex(re.findall(r"with the key `([0-9a-f]{64})`", TEXT)[0])
    (authorization,) = re.findall("\nAuthorization: ExpertKey (.*)\n", TEXT)
    client = dict(re.findall('([a-z]+)="([^"]*)"', authorization))
    (info,) = re.findall('\nAuthentication-Info: mac="([0-9a-f]{64})"', TEXT)
    for role, stated in (("client", client["mac"]), ("server", info)):
        lines = [f"expert-network/1 {role}", "GET", "/link", client["nonce"], client["cnonce"]]
        assert hmac.new(key, "\n".join(lines).encode(), hashlib.sha256).hexdigest() == stated


def test_the_key_example_is_what_the_code_does() -> None:
    """The same macs come from the code that sends and checks them."""
    key = ClusterKey.from_text(re.findall(r"with the key `([0-9a-f]{64})`", TEXT)[0])
    (authorization,) = re.findall("\nAuthorization: (.*)\n", TEXT)
    (info,) = re.findall("\nAuthentication-Info: (.*)\n", TEXT)
    fields = dict(re.findall('([a-z]+)="([^"]*)"', authorization))
    answer = Answer(key, "GET", "/link", fields["nonce"], fields["cnonce"])
    assert answer.header == authorization
    assert answer.proved(info) == "90"
