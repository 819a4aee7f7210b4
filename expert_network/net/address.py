"""Addresses as people type them: http://host:port, host:port or host."""

from __future__ import annotations

import re
from ipaddress import ip_address

from expert_network.errors import InputError

DEFAULT_PORT = 8301

# A host goes into a request's head as it is, so it must not be able to end a line there.
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[^:]*))?")


def parse_url(url: str) -> tuple[str, int]:
    """(host, port) of a node's address. Raises InputError, which says how to write one.

    An IPv6 address stands in brackets where a port follows: [::1]:8301.
    """
    rest = url.strip()
    scheme, separator, after = rest.partition("://")
    if separator:
        if scheme.lower() != "http":
            raise _refused(url, f"{scheme}:// is not spoken by nodes")
        rest = after
    rest = rest.removesuffix("/")
    if is_ip(rest):
        return rest, DEFAULT_PORT
    match = _ADDRESS.fullmatch(rest)
    if match is None:
        raise _refused(url, "there is more in it than a host and a port")
    return _host(url, match["host"]), _port(url, match["port"])


def format_url(host: str, port: int) -> str:
    """The address in full: http://host:port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is not looked up."""
    if host.lower().rstrip(".") == "localhost":
        return True
    return is_ip(host) and ip_address(host).is_loopback


def _host(url: str, text: str) -> str:
    if text.startswith("["):
        if not is_ip(text[1:-1]):
            raise _refused(url, f"{text} is not an IPv6 address")
        return text[1:-1]
    try:
        host = text if text.isascii() else text.encode("idna").decode("ascii")
    except UnicodeError:
        host = ""
    if _HOST.fullmatch(host) is None:
        raise _refused(url, f"{text!r} is not a host name" if text else "the host is missing")
    return host


def _port(url: str, text: str | None) -> int:
    if text is None:
        return DEFAULT_PORT
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536):
        raise _refused(url, f"{text!r} is not a port from 1 to 65535")
    return int(text)


def is_ip(text: str) -> bool:
    """Whether `text` is an IPv4 or IPv6 address, not a name."""
    # A zone (fe80::1%eth0) would have to be checked too; link-local addresses need a name.
    if "%" in text:
        return False
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _refused(url: str, problem: str) -> InputError:
    return InputError(
        f"{url!r} is not a node's address: {problem}; write it like http://host:{DEFAULT_PORT}."
    )
