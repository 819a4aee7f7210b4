"""The cluster key: who may ask, and who may answer. The key itself never travels.

    server  401, WWW-Authenticate: ExpertKey nonce="N"
    client  Authorization: ExpertKey nonce="N", cnonce="C", mac="HMAC(key, client, ...)"
    server  Authentication-Info: mac="HMAC(key, server, ...)", nextnonce="N2"

Both macs are HMAC-SHA256 in hexadecimal over role, method, target, nonce and cnonce, so that an
answer is good for one request, once, and no answer of one side can be played back as the other's.
docs/protocol.md has the bytes.
"""

from __future__ import annotations

import hmac
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic

from expert_network.errors import InputError, KeyRefused

SCHEME = "ExpertKey"
#: Shorter keys could be guessed from a recorded challenge.
MIN_KEY_BYTES = 16
KEY_BYTES = 32
#: A nonce is answered at once or not at all; a minute leaves room for slow machines.
NONCE_SECONDS = 60.0
#: Nonces spent within NONCE_SECONDS: a bootstrap of a thousand blocks a second for a minute.
#: Only who holds the key can spend one.
MAX_SPENT = 1 << 16
#: Nonces a client keeps for its next requests.
MAX_KEPT = 64
#: Bytes of an authentication header; ours are under 250.
MAX_HEADER = 1024
#: Bytes of a key file that are looked at.
MAX_KEY_FILE = 1024
#: How often a key file is looked at, for a key that has been rotated.
LOOK_SECONDS = 2.0

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")
_FIELDS = re.compile(r'\s*([a-z]{1,16})="([A-Za-z0-9_-]{1,128})"\s*')


@dataclass(frozen=True)
class ClusterKey:
    """A shared secret of at least 16 bytes, and while it is rotated the `older` one.

    file: where it was read, which is looked at again.
    """

    secret: bytes = field(repr=False)
    older: bytes | None = field(default=None, repr=False)
    file: KeyFile | None = field(default=None, repr=False, compare=False)

    @classmethod
    def generate(cls) -> ClusterKey:
        """A new random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_text(cls, text: str, where: str = "the cluster key") -> ClusterKey:
        """The key that `text` writes in hexadecimal, and the older one in a second line.

        Raises InputError, with `where` and no key.
        """
        found = [_secret(line, where) for line in text.split() or [""]]
        if len(found) > 2:
            raise InputError(
                f"{where} is one of {len(found)}, and two at most are good at a time; end the "
                "rotation before with `expert-net key rotate --finish`."
            )
        return cls(found[0], found[1] if len(found) > 1 else None)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """The key in a file, which is looked at again later.

        Raises InputError. See `key_file_warning` as well.
        """
        file = KeyFile(path)
        return replace(file.read(), file=file)

    @property
    def text(self) -> str:
        """How it is written in a file: hexadecimal, the older one in a line of its own."""
        return "\n".join(secret.hex() for secret in (self.secret, self.older) if secret)

    @property
    def each(self) -> tuple[ClusterKey, ...]:
        """The keys that are good now, one by one, the one to be used first at first."""
        now = self if self.file is None else self.file.now(self)
        return (ClusterKey(now.secret), *([ClusterKey(now.older)] if now.older else []))

    def rotated(self) -> ClusterKey:
        """A new key, with this one as the older: both are good."""
        return ClusterKey(ClusterKey.generate().secret, self.secret)

    def mac(self, role: str, method: str, target: str, nonce: str, cnonce: str) -> str:
        """What `role` ("client" or "server") proves itself with, in hexadecimal."""
        message = "\n".join((f"expert-network/1 {role}", method, target, nonce, cnonce))
        # aiohttp hands on bytes of a target that are no UTF-8 as surrogates.
        return hmac.new(self.secret, message.encode(errors="surrogateescape"), sha256).hexdigest()


class KeyFile:
    """A key file that is read again when it has changed. Any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = monotonic) -> None:
        self._path, self._clock = path, clock
        self._looked, self._stamp = clock(), self._changed()
        self._found: ClusterKey | None = None
        self._one = Lock()

    def read(self) -> ClusterKey:
        """What it says. Raises InputError."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_KEY_FILE)
        except OSError as error:
            raise InputError(
                f"{self._path}: the key file cannot be read ({error.strerror}); give the file that "
                "`expert-net key new` wrote."
            ) from error
        where = f"{self._path}: the key in this file"
        return ClusterKey.from_text(data.decode("ascii", "replace"), where)

    def now(self, first: ClusterKey) -> ClusterKey:
        """What it said when it was last sound; `first` is what it said at first."""
        with self._one:  # nobody gets what was before while another one reads
            if self._clock() >= self._looked + LOOK_SECONDS:
                self._looked, stamp = self._clock(), self._changed()
                if stamp != self._stamp:
                    self._stamp = stamp
                    with suppress(InputError):  # in the middle of being written, or taken away
                        self._found = self.read()
            return self._found or first

    def _changed(self) -> tuple[int, int] | None:
        with suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_ino
        return None


def _secret(text: str, where: str) -> bytes:
    if _HEX.fullmatch(text) is None:
        raise InputError(
            f"{where} is not written in hexadecimal; make a key with `expert-net key new`."
        )
    if len(text) < 2 * MIN_KEY_BYTES:
        raise InputError(
            f"{where} has {len(text) // 2} bytes and needs at least {MIN_KEY_BYTES}; make one "
            "with `expert-net key new`."
        )
    return bytes.fromhex(text)


def key_file_warning(path: Path) -> str | None:
    """A sentence if others than its owner can read the key file."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{path} can be read by others on this machine; run: chmod 600 {path}"
    return None


# The server's side


class NonceTable:
    """Nonces that are good once and for a minute. `clock` gives seconds that never go back.

    Nothing is kept for a nonce that is only issued: it carries its time and a mac of our own. So
    strangers, who can ask for nonces but cannot spend them, cannot fill the table.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._spent: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._spent)

    def issue(self) -> str:
        """A new nonce."""
        body = secrets.token_bytes(16) + int(self._clock() * 1000).to_bytes(8, "big")
        return (body + self._seal(body)).hex()

    def spend(self, nonce: str) -> bool:
        """Whether `nonce` was issued here, less than a minute ago, and not spent yet."""
        now = self._clock()
        body = self._body(nonce)
        if body is None or not 0 <= now - int.from_bytes(body[16:], "big") / 1000 < NONCE_SECONDS:
            return False
        self._forget(now)
        if body in self._spent or len(self._spent) >= MAX_SPENT:
            return False
        self._spent[body] = now
        return True

    def _body(self, nonce: str) -> bytes | None:
        if len(nonce) != 80 or _HEX.fullmatch(nonce) is None:
            return None
        data = bytes.fromhex(nonce)
        return data[:24] if hmac.compare_digest(data[24:], self._seal(data[:24])) else None

    def _seal(self, body: bytes) -> bytes:
        return hmac.new(self._secret, body, sha256).digest()[:16]

    def _forget(self, now: float) -> None:
        while self._spent:
            oldest = next(iter(self._spent))
            if now - self._spent[oldest] < NONCE_SECONDS:
                return
            del self._spent[oldest]


def challenge(nonces: NonceTable) -> str:
    """The value of WWW-Authenticate for a 401."""
    return f'{SCHEME} nonce="{nonces.issue()}"'


def verify(
    key: ClusterKey, nonces: NonceTable, method: str, target: str, authorization: str | None
) -> str:
    """The value of Authentication-Info if `authorization` is right; raises KeyRefused if not.

    target: the request's target as it came, query included. The reason does not tell a stranger
    whether the key was wrong; a client that is refused on a fresh nonce knows.
    """
    if authorization is None:
        raise KeyRefused("this node needs the cluster key; give it with --key-file.")
    fields = _fields(authorization, SCHEME)
    nonce, cnonce = fields.get("nonce", ""), fields.get("cnonce", "")
    said = (method, target, nonce, cnonce)
    # All of them, so that the time does not tell which one was tried.
    right = [
        one
        for one in key.each
        if hmac.compare_digest(one.mac("client", *said), fields.get("mac", ""))
    ]
    if not (right and cnonce and nonces.spend(nonce)):
        raise KeyRefused(
            "the cluster key is wrong, or this answer was used before; give the key file that "
            "this node was started with."
        )
    proof = right[0].mac("server", *said)
    return f'mac="{proof}", nextnonce="{nonces.issue()}"'


# The client's side


@dataclass(frozen=True)
class Answer:
    """One request's answer to a challenge, kept to check the server's proof against."""

    key: ClusterKey = field(repr=False)
    method: str
    target: str
    nonce: str
    cnonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def header(self) -> str:
        """The value of Authorization."""
        mac = self.key.mac("client", self.method, self.target, self.nonce, self.cnonce)
        return f'{SCHEME} nonce="{self.nonce}", cnonce="{self.cnonce}", mac="{mac}"'

    def proved(self, info: str | None) -> str | None:
        """The next nonce, if an Authentication-Info proves that the server knows the key too.

        Raises KeyRefused if it does not.
        """
        fields = _fields(info or "")
        expected = self.key.mac("server", self.method, self.target, self.nonce, self.cnonce)
        if not hmac.compare_digest(expected, fields.get("mac", "")):
            raise KeyRefused("it did not prove that it knows the cluster key")
        return fields.get("nextnonce")


def challenged_with(www_authenticate: str | None) -> str | None:
    """The nonce of a 401's challenge; None if that is not a node's 401."""
    return _fields(www_authenticate or "", SCHEME).get("nonce")


class KeyMemory:
    """A client's nonces for one server: each answers one request, the next comes with the reply.

    Of two keys the one that this server takes is remembered.
    """

    def __init__(self, key: ClusterKey) -> None:
        self._cluster, self._keys = key, list(key.each)
        self._nonces: deque[str] = deque(maxlen=MAX_KEPT)

    def answer(self, method: str, target: str) -> Answer | None:
        """An answer from a nonce that is at hand; None without one: ask, and be challenged."""
        return Answer(self._keys[0], method, target, self._nonces.pop()) if self._nonces else None

    def challenged(self, method: str, target: str, nonce: str) -> Answer:
        """The answer to a 401 with `nonce`."""
        # What was kept is at least as old as the nonce that this 401 may have refused.
        self._nonces.clear()
        return Answer(self._keys[0], method, target, nonce)

    def refused(self) -> bool:
        """Say that a fresh answer was refused; whether there is another key to try."""
        del self._keys[0]
        if self._keys:
            return True
        self._keys = list(self._cluster.each)
        return False

    def proved(self, answer: Answer, info: str | None) -> None:
        """Check the server's proof and keep the next nonce. Raises KeyRefused."""
        nonce = answer.proved(info)
        if nonce is not None:
            self._nonces.append(nonce)


def _fields(header: str, scheme: str | None = None) -> dict[str, str]:
    """name="value", ... as a dict; empty for anything that is not exactly that, after `scheme`."""
    if len(header) > MAX_HEADER:
        return {}
    if scheme is not None:
        word, _, header = header.partition(" ")
        if word.lower() != scheme.lower():
            return {}
    found: dict[str, str] = {}
    for part in header.split(","):
        match = _FIELDS.fullmatch(part)
        if match is None or match[1] in found:
            return {}
        found[match[1]] = match[2]
    return found
