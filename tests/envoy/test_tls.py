"""Both listeners over TLS, and what a pair of files that does not fit is told."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest

from router.envoy.pickers import EnvoyPickers
from router.errors import ConfigError
from router.proxy.request import BodyBudget
from router.proxy.server import ListenerOptions
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from tests.e2e.conftest import Start, config
from tests.envoy.conftest import Pickers, StartEngine
from tests.proxy.test_tls import certificate

grpc = pytest.importorskip("grpc")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


async def test_both_listeners_speak_tls(
    fake_engine: StartEngine, pickers: Pickers, certificate: tuple[Path, Path]
) -> None:
    tls = {"cert": str(certificate[0]), "key": str(certificate[1])}
    asked = {name: {"port": 0, "tls": tls} for name in ("ext_authz", "ext_proc")}
    engine = await fake_engine()
    running = await pickers(engine, envoy=asked)
    assert running.service.envoy is not None
    ports = running.service.envoy.ports
    trusting = ssl.create_default_context(cafile=certificate[0])
    url = f"https://127.0.0.1:{ports['ext_authz']}/v1/completions"
    body = {"model": "tiny", "prompt": [1, 2, 3]}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=trusting) as answer:
        assert (answer.status, answer.headers["x-gateway-destination-endpoint"]) == (200, f"127.0.0.1:{engine.port}")
    credentials = grpc.ssl_channel_credentials(certificate[0].read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{ports['ext_proc']}", credentials) as channel:
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"


@pytest.mark.parametrize("name", ["ext_authz", "ext_proc"])
async def test_files_that_do_not_fit_are_an_error_at_start(
    name: str, start_router: Start, certificate: tuple[Path, Path]
) -> None:
    service = (await start_router()).service
    asked = config(envoy={name: {"port": 0, "tls": {"cert": str(certificate[0]), "key": str(certificate[0])}}}).envoy
    with pytest.raises(ConfigError, match=rf"envoy\.{name}\.tls: cannot load"):
        EnvoyPickers(asked, service.core, UpstreamClient(UpstreamLimits()), ListenerOptions(), BodyBudget(1))


__all__ = ["certificate"]
