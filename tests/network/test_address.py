"""expert_network.net.address"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_network.errors import InputError
from expert_network.net.address import format_url, is_loopback, parse_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://mac-mini.local:8302", ("mac-mini.local", 8302)),
        ("http://10.0.0.5:80/", ("10.0.0.5", 80)),
        ("HTTP://Host", ("Host", 8301)),
        ("a:1", ("a", 1)),
        (" a ", ("a", 8301)),
        ("my_mac", ("my_mac", 8301)),
        ("localhost", ("localhost", 8301)),
        ("[::1]:9000", ("::1", 9000)),
        ("http://[fe80::1]", ("fe80::1", 8301)),
        ("::1", ("::1", 8301)),
        ("bücher.example", ("xn--bcher-kva.example", 8301)),
    ],
)
def test_accepted(url: str, expected: tuple[str, int]) -> None:
    """Everything that a person may type names a host and a port, 8301 unless given."""
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://a:8301", "https://"),
        ("ftp://a", "ftp://"),
        ("", "missing"),
        (":8301", "missing"),
        ("http://", "missing"),
        ("a:", "port"),
        ("a:0", "port"),
        ("a:65536", "port"),
        ("a:-1", "port"),
        ("a:99999999999999999999", "port"),
        ("a:8301x", "port"),
        ("a:٣", "port"),
        ("a/b", "host name"),
        ("http://a:1/link", "port"),
        ("user:pw@a:1", "more"),
        ("user@a", "host name"),
        ("[::1", "more"),
        ("[nope]:1", "IPv6"),
        ("fe80::1%eth0", "more"),
        ("a b", "host name"),
        ("a\r\nX: y", "host name"),
        ("x" * 254, "host name"),
        ("ä" * 80, "host name"),
    ],
)
def test_refused(url: str, words: str) -> None:
    """Anything else is refused with a sentence that shows how to write an address."""
    with pytest.raises(InputError, match=words) as caught:
        parse_url(url)
    assert "http://host:8301" in str(caught.value)


@given(st.text(max_size=40) | st.text("a1.:[]/@%-", max_size=20))
def test_any_text(url: str) -> None:
    """Any text is an address or InputError, and an address survives being formatted."""
    try:
        host, port = parse_url(url)
    except InputError:
        return
    assert not set(host) & set(" \r\n\t/@")
    assert parse_url(format_url(host, port)) == (host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LocalHost."])
def test_loopback(host: str) -> None:
    """What only this machine can reach."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "localhost.example.com", "a", ""])
def test_not_loopback(host: str) -> None:
    """Everything else, names that are not looked up included."""
    assert not is_loopback(host)
