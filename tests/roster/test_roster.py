from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import RosterError
from expert_roster.roster import MAX_NODES, Roster
from tests.roster.strategies import rosters


def test_parse_names() -> None:
    """'b, a' is two nodes of weight 1, sorted, one replica, epoch 0."""
    roster = Roster.parse("b, a")
    assert roster == Roster((("a", 1.0), ("b", 1.0)), replicas=1, epoch=0)
    assert roster.names == ("a", "b")


def test_parse_weights() -> None:
    """'a=64, b = 0.5,c' gives weights, and 1 where there is none; white space is left out."""
    roster = Roster.parse(" a=64, b = 0.5,c\n", replicas=2)
    assert roster.names == ("a", "b", "c")
    assert roster.weights.tolist() == [64.0, 0.5, 1.0]
    assert roster.replicas == 2


def test_weights_cannot_be_changed() -> None:
    """The weights that every owner order is made of are read-only."""
    with pytest.raises(ValueError, match="read-only"):
        Roster.parse("a,b").weights[0] = 2


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "the roster is empty; write it as a,b"),
        ("  ", "the roster is empty"),
        ("a,,b", "has an empty node name; write it as a,b"),
        ("a,", "has an empty node name"),
        ("a b", "'a b' is not a node name; use 1 to 64 letters"),
        ("ä", "'ä' is not a node name"),
        ("a:8301", "'a:8301' is not a node name"),
        ("a" * 65, "is not a node name"),
        ("a,b,a", "names node 'a' twice"),
        ("a=1,a=2", "names node 'a' twice"),
        ("a=x", "the weight of node 'a' is 'x', which is not a number"),
        ("a=", "the weight of node 'a' is '', which is not a number"),
        ("a=1=2", "the weight of node 'a' is '1=2', which is not a number"),
        ("a=0", "the weight of node 'a' is 0.0; it must lie between 1e-09 and 1e\\+18"),
        ("a=-1", "the weight of node 'a' is -1.0; it must lie"),
        ("a=nan", "the weight of node 'a' is nan; it must lie"),
        ("a=inf", "the weight of node 'a' is inf; it must lie"),
        ("a=1e19", "the weight of node 'a' is 1e\\+19; it must lie"),
        (",".join(f"n{i}" for i in range(MAX_NODES + 1)), "4097 nodes; at most 4096"),
    ],
)
def test_bad_specs_say_what_is_wrong(spec: str, sentence: str) -> None:
    """Each malformed roster is refused with a sentence that names the culprit."""
    with pytest.raises(RosterError, match=sentence):
        Roster.parse(spec)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """Whatever is typed as a roster gives a roster or a RosterError, nothing else."""
    for read in (Roster.parse, Roster.from_toml):
        try:
            assert read(text).nodes
        except RosterError as error:
            assert str(error).endswith(".")


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        (3, r"replicas is 3 and the roster names 2 node\(s\)"),
        (0, "replicas is 0; it must lie between 1"),
        (-1, "replicas is -1"),
        (True, "replicas is True; it must be a whole number"),
        (1.5, "replicas is 1.5; it must be a whole number"),
    ],
)
def test_bad_replicas(replicas: Any, sentence: str) -> None:
    """Replicas must be a whole number from 1 to the number of nodes."""
    with pytest.raises(RosterError, match=sentence):
        Roster.parse("a,b", replicas)


def test_epoch_fits_the_wire() -> None:
    """An epoch outside u32 is refused; it is not part of the digest."""
    nodes = (("a", 1.0),)
    for epoch in (-1, 2**32):
        with pytest.raises(RosterError, match=f"epoch is {epoch}; it must lie between 0"):
            Roster(nodes, epoch=epoch)
    assert Roster(nodes, epoch=2**32 - 1).digest == Roster(nodes).digest


def test_index_lists_the_names() -> None:
    """A name that is not in the roster is answered with those that are, fifty at the most."""
    roster = Roster.parse("b,a")
    assert [roster.index(name) for name in ("a", "b")] == [0, 1]
    with pytest.raises(RosterError, match=r"node 'c' is not in the roster, which names a, b; "):
        roster.index("c")
    many = Roster.parse(",".join(f"n{number:03}" for number in range(60)))
    with pytest.raises(RosterError, match="n048, n049 and 10 more; choose"):
        many.index("c")


TOML = """
replicas = 2
epoch = 3

[nodes]
a = 64
b = 0.5
"studio.local" = 192
"""


def test_toml() -> None:
    """A TOML roster has weights, replicas and epoch; the last two may be left out."""
    nodes = (("a", 64.0), ("b", 0.5), ("studio.local", 192.0))
    assert Roster.from_toml(TOML) == Roster(nodes, replicas=2, epoch=3)
    assert Roster.from_toml("[nodes]\na = 1") == Roster.parse("a")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no table of nodes; write \\[nodes\\]"),
        ("nodes = 3", "no table of nodes"),
        ("[nodes]", "names no node"),
        ("[nodes]\na = x", r"not valid TOML: .*line 2"),
        ("[nodes]\na = 1\na = 2", "not valid TOML: Cannot overwrite"),
        ('[nodes]\na = "64"', "weight of node 'a' is '64', which is not a number"),
        ("[nodes]\na = true", "weight of node 'a' is True, which is not a number"),
        ("[nodes]\na = nan", "weight of node 'a' is nan"),
        ("[nodes]\na = -1", "weight of node 'a' is -1; it must lie"),
        (f"[nodes]\na = 1{'0' * 400}", "weight of node 'a' is 10+…; it must lie"),
        (f"[nodes]\na = 1{'0' * 5000}", "not valid TOML"),
        ("[nodes]\nstudio.local = 1", 'a node name with a dot needs quotes: "studio'),
        ('[nodes]\n"a b" = 1', "'a b' is not a node name"),
        ("[nodes]\na = 1\nreplicas = 2", r"replicas stands below \[nodes\].*move it above"),
        ("[nodes]\na = 1\nepoch = 2", r"epoch stands below \[nodes\]"),
        ("replica = 2\n[nodes]\na = 1", "unknown key 'replica'"),
        ("replicas = 2\n[nodes]\na = 1", "replicas is 2 and the roster names 1 node"),
        ("replicas = '2'\n[nodes]\na = 1", "replicas is '2'; it must be a whole number"),
        ("epoch = 1.5\n[nodes]\na = 1", "epoch is 1.5; it must be a whole number"),
    ],
)
def test_bad_toml_says_what_is_wrong(text: str, sentence: str) -> None:
    """Each malformed TOML roster is refused with a sentence that names the culprit."""
    with pytest.raises(RosterError, match=sentence):
        Roster.from_toml(text)


def read(path: str) -> str:
    return Path(path).read_text("utf-8")


def test_a_spec_is_names_or_a_file(tmp_path: Path) -> None:
    """What ends in .toml or has a slash is read as a file, all else as names."""
    file = tmp_path / "roster.toml"
    file.write_text(TOML)
    bare = tmp_path / "roster"
    bare.write_text(TOML)
    for path in (file, bare):
        assert Roster.from_spec(str(path), read) == Roster.from_toml(TOML)
    assert Roster.from_spec("a=64,b", read) == Roster.parse("a=64,b")


def test_replicas_of_a_spec_win_over_the_file(tmp_path: Path) -> None:
    """Replicas asked for on the command line replace those of the file and keep its epoch."""
    file = tmp_path / "roster.toml"
    file.write_text(TOML)
    roster = Roster.from_spec(str(file), read, replicas=3)
    assert (roster.replicas, roster.epoch) == (3, 3)
    assert Roster.from_spec("a,b", read, replicas=2).replicas == 2
    with pytest.raises(RosterError, match=r"roster\.toml: replicas is 4 and"):
        Roster.from_spec(str(file), read, replicas=4)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, bytes that are no text and bad TOML are told with the path."""
    missing, binary, bad = tmp_path / "no.toml", tmp_path / "binary.toml", tmp_path / "bad.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    bad.write_text("[nodes]\na = 0")
    for path, problem in (
        (missing, "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "cannot be read: 'utf-8' codec"),
        (bad, "the weight of node 'a' is 0"),
    ):
        with pytest.raises(RosterError, match=problem) as caught:
            Roster.from_spec(str(path), read)
        assert str(path) in str(caught.value)


@given(rosters())
def test_wire_round_trip(roster: Roster) -> None:
    """A roster survives msgpack and JSON bit by bit, digest included."""
    packed = msgpack.unpackb(msgpack.packb(roster.to_wire()))
    for message in (packed, json.loads(json.dumps(roster.to_wire()))):
        back = Roster.from_wire(message)
        assert back == roster
        assert back.digest == roster.digest


def test_wire_digest_is_checked() -> None:
    """A digest that comes with a roster must be that of the roster; other keys are left alone."""
    roster = Roster.parse("a=64,b=16")
    message = {**roster.to_wire(), "digest": roster.digest, "seen": "later"}
    assert Roster.from_wire(message) == roster
    with pytest.raises(RosterError, match="does not have the digest it states"):
        Roster.from_wire({**message, "replicas": 2})


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        "a,b",
        {},
        {"nodes": {}},
        {"nodes": []},
        {"nodes": "ab"},
        {"nodes": ["ab"]},
        {"nodes": [["a"]]},
        {"nodes": [["a", 1, 2]]},
        {"nodes": [[b"a", 1]]},
        {"nodes": [["a", "1"]]},
        {"nodes": [["a", None]]},
        {"nodes": [["a", math.nan]]},
        {"nodes": [["a", 1], ["a", 1]]},
        {"nodes": [["a", 1]], "replicas": "1"},
        {"nodes": [["a", 1]], "replicas": 2},
        {"nodes": [["a", 1]], "epoch": -1},
        {"nodes": [["a", 1]], "epoch": None},
        {"nodes": [["a", 1]], "digest": 7},
        {"nodes": [["a", 1]] * (MAX_NODES + 1)},
    ],
)
def test_malformed_wire_is_refused(message: object) -> None:
    """Whatever a peer sends in place of a roster is a RosterError and nothing else."""
    with pytest.raises(RosterError):
        Roster.from_wire(message)


@given(rosters(), rosters())
def test_digests_tell_rosters_apart(one: Roster, other: Roster) -> None:
    """Digests are equal exactly when names, weights and replicas are."""
    same = (one.nodes, one.replicas) == (other.nodes, other.replicas)
    assert (one.digest == other.digest) == same


@given(rosters(min_nodes=2))
def test_digest_covers_weights_and_replicas(roster: Roster) -> None:
    """One weight changed in its last bit, or R by one, is another digest."""
    (name, weight), *rest = roster.nodes
    nudged = float(np.nextafter(weight, 1.0 if weight != 1.0 else 2.0))
    assert Roster(((name, nudged), *rest), roster.replicas).digest != roster.digest
    replicas = roster.replicas - 1 or 2
    assert Roster(roster.nodes, replicas).digest != roster.digest
