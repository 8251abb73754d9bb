"""One identity per worker: `http://w:30000`, `http://W:30000/` and `HTTP://w:30000` are the same engine (case 87)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from router.errors import ConfigError

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 2048
MAX_HOST_CHARS = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PRINTABLE = re.compile(r"[!-~]+")
_TCP_ENDPOINT = re.compile(r"tcp://(?P<host>\[[^\[\]]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})")
# Cloud metadata over IPv6; the IPv4 one is link-local and refused as such (case 102).
_METADATA = ipaddress.ip_address("fd00:ec2::254")


@lru_cache(maxsize=4096)
def _text(scheme: str, host: str, port: int) -> str:
    """Asked for several times a request."""
    return f"{scheme}://{bracketed(host)}:{port}"


@dataclass(frozen=True, slots=True)
class WorkerUrl:
    """Where a worker answers HTTP. `host` is lower-case and without brackets, `port` always explicit.

    >>> WorkerUrl.parse("HTTP://Engine-0/").text
    'http://engine-0:80'
    """

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """`host:port`, IPv6 bracketed."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def text(self) -> str:
        """`scheme://host:port`: the identity, and the `worker` label everywhere."""
        return _text(self.scheme, self.host, self.port)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: object) -> WorkerUrl:
        """Raises ConfigError unless it is `http(s)://host[:port][/]`; no message repeats user-info (cases 15, 102)."""
        if not isinstance(text, str) or not text:
            raise ConfigError("a worker URL must be text such as http://engine-0:30000")
        if len(text) > MAX_URL_CHARS or not _PRINTABLE.fullmatch(text):
            raise ConfigError(
                f"a worker URL must be at most {MAX_URL_CHARS} printable ASCII characters without spaces "
                "(write an international name in its xn-- form)"
            )
        if "@" in text:
            raise ConfigError("a worker URL must not carry user-info (user:password@); set workers[].api_key instead")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"worker URL {text!r} cannot be read: {error}") from None
        if "://" not in text:
            raise ConfigError(f"worker URL {text!r} has no scheme; write http://{text.lstrip('/')}")
        if parts.scheme not in DEFAULT_PORTS:
            raise ConfigError(f"worker URL {text!r}: the scheme must be http or https")
        if parts.path not in ("", "/") or "?" in text or "#" in text:
            raise ConfigError(
                f"worker URL {text!r} must not have a path, query or fragment; write only scheme://host:port"
            )
        if port == 0:
            raise ConfigError(f"worker URL {text!r}: port 0 cannot be connected to")
        try:
            host = diallable_host(parts.hostname or "")
        except ValueError as error:
            raise ConfigError(f"worker URL {text!r}: {error}") from None
        return cls(parts.scheme, host, DEFAULT_PORTS[parts.scheme] if port is None else port)


def canonical_host(text: str) -> str:
    """Lower-case name or canonical address, never bracketed. Raises ValueError (reason in words) for anything else."""
    host = text.lower()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise ValueError("the host is empty")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _checked_name(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"host {host!r}: zone identifiers (%eth0) are not supported; use a global address")
        address = address.ipv4_mapped or address
    return str(address)


def diallable_host(text: str) -> str:
    """`canonical_host` of a place where an engine can be (case 102).

    Raises ValueError for wildcard, multicast and link-local addresses too: cloud metadata services live at the last.
    """
    host = canonical_host(text)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        raise ValueError(f"host {host!r} is the wildcard address; write the address to dial, such as 127.0.0.1")
    if address.is_link_local or address.is_multicast or address == _METADATA:
        raise ValueError(f"host {host!r} is a link-local, multicast or metadata address; no engine is dialled there")
    return host


def bracketed(host: str) -> str:
    """`host` as URLs and ZMQ endpoints want it."""
    return f"[{host}]" if ":" in host else host


def tcp_endpoint(host: str, port: int) -> str:
    """ZMQ endpoint; IPv6 needs `zmq.IPV6` on the socket as well."""
    return f"tcp://{bracketed(host)}:{port}"


def parse_tcp_endpoint(text: str) -> tuple[str, int]:
    """`tcp://host:port` as written in the configuration → (host, port). Raises ValueError with the reason."""
    match = _TCP_ENDPOINT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not of the form tcp://host:port (IPv6 in brackets)")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"{text[:80]!r}: the port must be 1 to 65535")
    return diallable_host(match["host"]), port


def parse_bind_endpoint(text: str) -> tuple[str, int]:
    """As `parse_tcp_endpoint`, of an address to listen at: the wildcard is one, a name is not."""
    match = _TCP_ENDPOINT.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{text[:80]!r} is not of the form tcp://address:port (IPv6 in brackets)")
    host = canonical_host(match["host"])
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text[:80]!r}: give the address to listen at, such as 0.0.0.0, not a name") from None
    return host, int(match["port"])


def _checked_name(host: str) -> str:
    labels = host.removesuffix(".").split(".")
    if len(host) > MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"host {host[:80]!r} is neither a DNS name nor an IP address")
    if _NUMBER.fullmatch(labels[-1]):
        # 127.1, 2130706433, 0x7f.1: resolvers read them as addresses, so they would pass every address check.
        raise ValueError(f"host {host[:80]!r} looks like a number; write an IPv4 address with four decimal parts")
    return host
