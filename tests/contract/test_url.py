from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract.url import WorkerUrl, canonical_host, diallable_host, parse_tcp_endpoint, tcp_endpoint
from router.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["http://w:30000", "http://w:30000/", "HTTP://W:30000", "hTTp://w:30000/", "http://w:030000"]
)
def test_spellings_of_one_worker_are_one_identity(text: str) -> None:
    """Case 87."""
    assert WorkerUrl.parse(text) == WorkerUrl("http", "w", 30000)
    assert WorkerUrl.parse(text).text == "http://w:30000"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://w", "http://w:80"),
        ("https://W.Example.COM/", "https://w.example.com:443"),
        ("http://[FD00:0::5]:30000/", "http://[fd00::5]:30000"),
        ("http://[::ffff:10.0.0.5]:1", "http://10.0.0.5:1"),
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("http://engine_0.ns.svc.:80", "http://engine_0.ns.svc.:80"),
    ],
)
def test_ports_become_explicit_and_hosts_canonical(text: str, normal: str) -> None:
    """Case 15."""
    assert str(WorkerUrl.parse(text)) == normal
    assert WorkerUrl.parse(normal) == WorkerUrl.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be text"),
        (None, "must be text"),
        (30000, "must be text"),
        ("w:30000", "write http://w:30000"),
        ("//w:30000", "write http://w:30000"),
        ("file:///etc/passwd", "scheme must be http or https"),
        ("ftp://w:30000", "scheme must be http or https"),
        ("http://w:30000/v1", "path, query or fragment"),
        ("http://w:30000//", "path, query or fragment"),
        ("http://w:30000/?", "path, query or fragment"),
        ("http://w:30000#", "path, query or fragment"),
        ("http://w:30000\\x", "cannot be read"),
        ("http://w:0", "port 0"),
        ("http://w:65536", "cannot be read"),
        ("http://w:abc", "cannot be read"),
        ("http://w:-1", "cannot be read"),
        ("http:///", "host is empty"),
        ("http://:80", "host is empty"),
        ("http://a b:80", "without spaces"),
        ("http://w:80\n", "without spaces"),
        ("http://wörker:80", "xn--"),
        ("http://-w:80", "neither a DNS name"),
        ("http://" + "w" * 300, "neither a DNS name"),
        ("http://" + "w" * 3000, "at most 2048"),
        ("http://[fe80::1%25eth0]:80", "zone identifiers"),
        ("http://[::1:80", "cannot be read"),
    ],
)
def test_what_is_no_worker_url_is_refused_with_the_reason(text: object, reason: str) -> None:
    """Case 102."""
    with pytest.raises(ConfigError, match=reason):
        WorkerUrl.parse(text)


def test_user_info_is_refused_and_never_repeated() -> None:
    """Cases 15 and 102."""
    with pytest.raises(ConfigError, match="user-info") as refused:
        WorkerUrl.parse("http://user:hunter2@host:80")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "169.254.169.254",
            "[fd00:ec2::254]",
            "[::ffff:169.254.169.254]",
            "[fe80::1]",
            "0.0.0.0",
            "[::]",
            "224.0.0.1",
        ),
        *("2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376"),
    ],
)
def test_metadata_and_wildcard_addresses_are_refused_in_every_spelling(host: str) -> None:
    """Case 102: http://169.254.169.254/ and the number forms that resolvers read as it."""
    with pytest.raises(ConfigError):
        WorkerUrl.parse(f"http://{host}/")
    with pytest.raises(ValueError, match="host"):
        diallable_host(host)


def test_zmq_endpoints_keep_ipv6_brackets() -> None:
    """Case 15."""
    assert tcp_endpoint("fd00::5", 5557) == "tcp://[fd00::5]:5557"
    assert tcp_endpoint("w", 5557) == "tcp://w:5557"
    assert parse_tcp_endpoint("tcp://[FD00::5]:5557") == ("fd00::5", 5557)
    assert parse_tcp_endpoint("tcp://Node-0:1") == ("node-0", 1)


@pytest.mark.parametrize(
    "text", ["tcp://w", "ipc:///x", "tcp://*:5557", "tcp://w:0", "tcp://w:65536", "tcp://::1:80", "w:80"]
)
def test_what_is_no_tcp_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://|host"):
        parse_tcp_endpoint(text)


@given(st.one_of(st.text(), st.from_regex(r"https?://[^\n]*"), st.none(), st.integers(), st.lists(st.text())))
def test_any_input_is_a_url_or_a_config_error(value: object) -> None:
    try:
        url = WorkerUrl.parse(value)
    except ConfigError:
        return
    assert WorkerUrl.parse(url.text) == url
    assert canonical_host(url.host) == url.host
