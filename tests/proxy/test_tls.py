from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from router.proxy.connection import UpstreamConnectError
from router.proxy.server import ListenerOptions
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from tests.proxy.fakes import Url, bench
from tests.support.http import HOST, fetch, post

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=worker", "-addext", f"subjectAltName=IP:{HOST}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_a_listener_and_a_worker_speak_tls(certificate: tuple[Path, Path]) -> None:
    """The router behind itself: a TLS listener as the https worker of a plain one, its certificate verified."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    async with bench(options=ListenerOptions(port=0, tls=server)) as inner, bench(tls=trusting) as outer:
        outer.core.urls = [Url(HOST, inner.port, "https")]
        body = bytes(3 << 20)
        for _ in range(2):
            assert (await fetch(outer.port, post(body=body))).body == b"{}"
        assert [len(seen.body) for seen in inner.worker.requests] == [len(body)] * 2
        assert outer.upstream.idle_connections == 1


async def test_a_certificate_that_is_not_trusted_is_refused(certificate: tuple[Path, Path]) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    async with bench(options=ListenerOptions(port=0, tls=server)) as b:
        client = UpstreamClient(UpstreamLimits(connect_s=2))
        with pytest.raises(UpstreamConnectError):
            await client.send(Url(HOST, b.port, "https"), b"POST", b"/generate", [], b"{}")
        await client.close()
        assert b.worker.requests == []


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_half_closes_its_socket_behind_a_request_gets_the_routers_own_answer(
    certificate: tuple[Path, Path], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Without TLS's own goodbye: from then on TLS sends nothing more, and the end may come in the request's turn."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))

    def answer(port: int) -> bytes:
        with socket.create_connection((HOST, port)) as plain, trusting.wrap_socket(plain, server_hostname=HOST) as tls:
            tls.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            socket.socket.shutdown(tls, socket.SHUT_WR)
            return tls.recv(15)

    async def main() -> None:
        async with bench(options=ListenerOptions(port=0, tls=server)) as b:
            for _ in range(50):
                assert await asyncio.to_thread(answer, b.port) == b"HTTP/1.1 200 OK"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
