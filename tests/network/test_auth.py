"""expert_network.net.auth"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import InputError, KeyRefused
from expert_network.net import auth
from expert_network.net.auth import (
    Answer,
    ClusterKey,
    KeyFile,
    KeyMemory,
    NonceTable,
    challenge,
    challenged_with,
    key_file_warning,
    verify,
)

KEY = ClusterKey.from_text("00112233445566778899aabbccddeeff" * 2)
OTHER = ClusterKey.from_text("ff" * 32)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nonces(clock: Clock) -> NonceTable:
    return NonceTable(clock)


def answer_to(nonces: NonceTable, key: ClusterKey = KEY, target: str = "/link") -> Answer:
    nonce = challenged_with(challenge(nonces))
    assert nonce is not None
    return Answer(key, "GET", target, nonce)


def test_a_target_that_is_no_text() -> None:
    """A stranger's target of any bytes is refused like any other, not a fault."""
    nonces = NonceTable(Clock())
    target = b"/\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(KeyRefused):
        verify(KEY, nonces, "GET", target, answer_to(nonces, OTHER, target).header)


def test_round() -> None:
    """A client with the key is let in, is shown a proof, and needs no second challenge."""
    nonces = NonceTable(Clock())
    memory = KeyMemory(KEY)
    assert memory.answer("GET", "/a") is None
    nonce = challenged_with(challenge(nonces))
    assert nonce is not None
    answer = memory.challenged("GET", "/a", nonce)
    memory.proved(answer, verify(KEY, nonces, "GET", "/a", answer.header))
    following = memory.answer("GET", "/b")
    assert following is not None and following.nonce != nonce
    memory.proved(following, verify(KEY, nonces, "GET", "/b", following.header))
    assert len(nonces) == 2


def test_the_macs_are_those_of_the_documents(nonces: NonceTable) -> None:
    """Both macs, computed here from the formula alone."""
    answer = Answer(KEY, "GET", "/block/3/17?x=1", nonces.issue(), "c0ffee")

    def mac(role: str) -> str:
        text = f"expert-network/1 {role}\nGET\n/block/3/17?x=1\n{answer.nonce}\nc0ffee"
        return hmac.new(KEY.secret, text.encode(), hashlib.sha256).hexdigest()

    assert answer.header == (
        f'ExpertKey nonce="{answer.nonce}", cnonce="c0ffee", mac="{mac("client")}"'
    )
    info = verify(KEY, nonces, "GET", "/block/3/17?x=1", answer.header)
    assert re.fullmatch(rf'mac="{mac("server")}", nextnonce="[0-9a-f]+"', info)


@pytest.mark.parametrize(
    ("method", "target", "key"),
    [("POST", "/link", KEY), ("GET", "/", KEY), ("GET", "/link", OTHER)],
)
def test_an_answer_is_for_one_request_and_one_key(
    nonces: NonceTable, method: str, target: str, key: ClusterKey
) -> None:
    """Another method, target or key is refused, and the nonce is not spent by it."""
    answer = answer_to(nonces)
    with pytest.raises(KeyRefused):
        verify(key, nonces, method, target, answer.header)
    verify(KEY, nonces, "GET", "/link", answer.header)


def test_an_answer_is_good_once(nonces: NonceTable) -> None:
    """A replayed answer is refused."""
    answer = answer_to(nonces)
    verify(KEY, nonces, "GET", "/link", answer.header)
    with pytest.raises(KeyRefused, match="used before"):
        verify(KEY, nonces, "GET", "/link", answer.header)
    with pytest.raises(KeyRefused):
        upper = answer.header.replace(answer.nonce, answer.nonce.upper())
        verify(KEY, nonces, "GET", "/link", upper)


def test_a_nonce_in_another_spelling_is_the_same_nonce(nonces: NonceTable) -> None:
    """A spent nonce is not good again in capitals, even with a mac over them."""
    nonce = nonces.issue()
    assert nonces.spend(nonce)
    assert not nonces.spend(nonce.upper())


@pytest.mark.parametrize(("age", "good"), [(0.0, True), (59.9, True), (60.0, False), (1e6, False)])
def test_a_nonce_lives_a_minute(nonces: NonceTable, clock: Clock, age: float, good: bool) -> None:
    """A nonce that is not answered within 60 s is refused."""
    nonce = nonces.issue()
    clock.now += age
    assert nonces.spend(nonce) is good


def test_a_nonce_of_another_node_is_refused(nonces: NonceTable, clock: Clock) -> None:
    """Nonces are good only where they were issued: answers cannot be carried between nodes."""
    assert not nonces.spend(NonceTable(clock).issue())


@given(st.text("0123456789abcdef", max_size=100))
def test_invented_nonces_are_refused(nonce: str) -> None:
    """Nobody but the table makes a nonce."""
    assert not NonceTable(Clock()).spend(nonce)


def test_every_bit_of_a_nonce_counts(nonces: NonceTable) -> None:
    """A nonce with any one digit changed is refused."""
    nonce = nonces.issue()
    for at in range(len(nonce)):
        digit = "0" if nonce[at] != "0" else "1"
        assert not nonces.spend(nonce[:at] + digit + nonce[at + 1 :])
    assert nonces.spend(nonce)


def test_the_table_is_bounded(
    nonces: NonceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full table refuses rather than forgets, and is empty again after a minute."""
    monkeypatch.setattr(auth, "MAX_SPENT", 3)
    assert all(nonces.spend(nonces.issue()) for _ in range(3))
    assert not nonces.spend(nonces.issue())
    assert len(nonces) == 3
    clock.now += 60
    assert nonces.spend(nonces.issue())
    assert len(nonces) == 1


def test_issuing_keeps_nothing(nonces: NonceTable) -> None:
    """Strangers who only ask for nonces leave no trace."""
    for _ in range(5000):
        nonces.issue()
    assert len(nonces) == 0


@given(
    st.text(max_size=60)
    | st.builds(
        'ExpertKey {}="{}", mac="{}"'.format, st.sampled_from(["nonce", "x"]), st.text(), st.text()
    )
)
def test_any_authorization(text: str) -> None:
    """Garbage is refused with KeyRefused, nothing else."""
    nonces = NonceTable(Clock())
    with pytest.raises(KeyRefused):
        verify(KEY, nonces, "GET", "/link", text)
    assert len(nonces) == 0


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Basic Zm9vOmJhcg==",
        'ExpertKey nonce="a" cnonce="b", mac="c"',
        'ExpertKey nonce="a", nonce="b", cnonce="b", mac="c"',
        'ExpertKey nonce="", cnonce="", mac=""',
        'ExpertKey nonce="' + "a" * 2000 + '"',
    ],
)
def test_malformed_authorizations(nonces: NonceTable, header: str | None) -> None:
    """A missing, foreign, doubled or overlong header is refused."""
    with pytest.raises(KeyRefused):
        verify(KEY, nonces, "GET", "/link", header)


def test_both_nonces_are_needed(nonces: NonceTable) -> None:
    """A mac over empty nonces, computed with the key, is refused all the same."""
    for fields in ({}, {"nonce": nonces.issue()}, {"cnonce": "c"}):
        mac = KEY.mac("client", "GET", "/", fields.get("nonce", ""), fields.get("cnonce", ""))
        said = ", ".join(f'{name}="{value}"' for name, value in {**fields, "mac": mac}.items())
        with pytest.raises(KeyRefused):
            verify(KEY, nonces, "GET", "/", f"ExpertKey {said}")


@pytest.mark.parametrize("how", ["none", "garbage", "own mac", "wrong key"])
def test_a_server_without_the_key_is_caught(nonces: NonceTable, how: str) -> None:
    """A proof that is missing, reflected or from another key raises KeyRefused."""
    answer = answer_to(nonces)
    own = KEY.mac("client", "GET", "/link", answer.nonce, answer.cnonce)
    foreign = OTHER.mac("server", "GET", "/link", answer.nonce, answer.cnonce)
    info = {
        "none": None,
        "garbage": "mac=",
        "own mac": f'mac="{own}"',
        "wrong key": f'mac="{foreign}", nextnonce="a"',
    }[how]
    memory = KeyMemory(KEY)
    with pytest.raises(KeyRefused, match="did not prove"):
        memory.proved(answer, info)
    assert memory.answer("GET", "/") is None


def test_a_refused_nonce_is_not_tried_again(nonces: NonceTable) -> None:
    """A new challenge replaces every nonce that was kept."""
    memory = KeyMemory(KEY)
    for _ in range(2):
        answer = answer_to(nonces)
        memory.proved(answer, verify(KEY, nonces, "GET", "/link", answer.header))
    memory.challenged("GET", "/link", "fresh")
    assert memory.answer("GET", "/link") is None


@pytest.mark.parametrize("text", [None, "", "Basic realm=x", "ExpertKey", 'ExpertKey realm="x"'])
def test_a_401_of_somebody_else(text: str | None) -> None:
    """A challenge that is not ours holds no nonce."""
    assert challenged_with(text) is None


# Keys


def test_text_round_trip() -> None:
    """A key is written in hexadecimal and read back, with a line end and in capitals too."""
    key = ClusterKey.generate()
    assert re.fullmatch("[0-9a-f]{64}", key.text)
    assert ClusterKey.from_text(f" {key.text.upper()}\n") == key
    assert ClusterKey.generate() != key


def test_a_key_is_not_shown() -> None:
    """Neither a key nor an answer shows the secret when it is printed."""
    assert KEY.text[:8] not in repr(KEY) + repr(Answer(KEY, "GET", "/", "n"))
    assert repr(KEY.secret)[2:-1] not in repr(KEY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hexadecimal"),
        ("a passphrase that is long enough", "hexadecimal"),
        ("0123456789abcdef0123456789abcde", "hexadecimal"),
        ("0123456789abcdef0123456789abcd", "15 bytes and needs at least 16"),
        ("é" * 40, "hexadecimal"),
    ],
)
def test_bad_keys(text: str, words: str) -> None:
    """A key that is short or not hexadecimal is refused with what to do, and is not repeated."""
    with pytest.raises(InputError, match=words) as caught:
        ClusterKey.from_text(text)
    assert "expert-net key new" in str(caught.value)
    assert not text or text not in str(caught.value)


def test_key_files(tmp_path: Path) -> None:
    """A key file is read; others' access to it is a sentence with the command that ends it."""
    path = tmp_path / "key"
    path.write_text(KEY.text + "\n")
    path.chmod(0o600)
    assert ClusterKey.read(path) == KEY
    assert key_file_warning(path) is None
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        assert f"chmod 600 {path}" in str(key_file_warning(path))


def test_bad_key_files(tmp_path: Path) -> None:
    """A missing, short, binary or huge key file is refused by name."""
    path = tmp_path / "key"
    with pytest.raises(InputError, match=re.escape(str(path))):
        ClusterKey.read(path)
    for data in (b"abcd", b"\xff" * 64, b"x" * 10_000_000):
        path.write_bytes(data)
        with pytest.raises(InputError, match=re.escape(str(path))):
            ClusterKey.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        ClusterKey.read(tmp_path)


# While a key is replaced

BOTH = ClusterKey(OTHER.secret, KEY.secret)


def asked(memory: KeyMemory, key: ClusterKey, nonces: NonceTable) -> int:
    """How many answers it takes until a server with `key` accepts one; raises if none is."""
    for count in range(1, 4):
        nonce = challenged_with(challenge(nonces))
        assert nonce is not None
        answer = memory.challenged("GET", "/", nonce)
        try:
            memory.proved(answer, verify(key, nonces, "GET", "/", answer.header))
        except KeyRefused:
            if not memory.refused():
                raise
        else:
            return count
    raise AssertionError("answers without end")


@pytest.mark.parametrize(
    ("client", "server"),
    [(KEY, KEY), (KEY, BOTH), (BOTH, KEY), (BOTH, BOTH), (BOTH, OTHER), (OTHER, BOTH)],
)
def test_who_shares_a_key_is_let_in(
    client: ClusterKey, server: ClusterKey, nonces: NonceTable
) -> None:
    """With one of two keys in common, each side in turn, and the key that works is remembered."""
    memory = KeyMemory(client)
    assert asked(memory, server, nonces) == (2 if (client, server) == (BOTH, KEY) else 1)
    assert asked(memory, server, nonces) == 1


def test_who_shares_none_is_not(nonces: NonceTable) -> None:
    """Two keys do not help where neither is known, and are tried anew the next time."""
    stranger = ClusterKey(b"s" * 16, b"t" * 16)
    memory = KeyMemory(stranger)
    for _ in range(2):
        with pytest.raises(KeyRefused):
            asked(memory, BOTH, nonces)
    with pytest.raises(KeyRefused):
        asked(KeyMemory(KEY), OTHER, nonces)


def test_an_answer_with_either_key_is_good_once(nonces: NonceTable) -> None:
    """What was accepted is refused when it is played back, whichever key it was made with."""
    for key in (KEY, OTHER):
        answer = answer_to(nonces, key)
        verify(BOTH, nonces, "GET", "/link", answer.header)
        with pytest.raises(KeyRefused):
            verify(BOTH, nonces, "GET", "/link", answer.header)


def test_two_keys_in_a_file(tmp_path: Path) -> None:
    """A file holds two keys, one a line, and not three."""
    path = tmp_path / "key"
    path.write_text(BOTH.text + "\n")
    assert ClusterKey.read(path) == BOTH
    assert [key.secret for key in BOTH.each] == [OTHER.secret, KEY.secret]
    path.write_text(f"{BOTH.text}\n{KEY.text}\n")
    with pytest.raises(InputError, match="two at most"):
        ClusterKey.read(path)


def test_a_key_file_is_read_again(tmp_path: Path, clock: Clock) -> None:
    """What a file says after a change counts soon; nonsense in it, or none, leaves the keys."""
    path = tmp_path / "key"
    path.write_text(KEY.text)
    file = KeyFile(path, clock)
    key = ClusterKey(KEY.secret, file=file)
    assert list(key.each) == [KEY]
    fresh = tmp_path / "fresh"
    fresh.write_text(BOTH.text)
    fresh.replace(path)
    assert list(key.each) == [KEY]
    clock.now += auth.LOOK_SECONDS
    assert list(key.each) == [OTHER, KEY]
    path.write_text("half of a k")
    clock.now += auth.LOOK_SECONDS
    assert list(key.each) == [OTHER, KEY]
    path.unlink()
    clock.now += auth.LOOK_SECONDS
    assert list(key.each) == [OTHER, KEY]
    path.write_text(OTHER.text)
    clock.now += auth.LOOK_SECONDS
    assert list(key.each) == [OTHER]
