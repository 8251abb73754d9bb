"""The `envoy` section: what is refused at start, and what is warned of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from router.config import EnvoyConfig, EnvoyListenConfig, Overrides, build_config
from router.envoy.pickers import EnvoyPickers
from router.errors import ConfigError
from router.proxy.request import BodyBudget
from router.proxy.server import ListenerOptions
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from router.service import Service
from tests.e2e.conftest import Running, Start, config


def problem(**document: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        build_config(document, Overrides(), {}, Path())
    return str(refused.value)


def test_a_port_is_used_once() -> None:
    assert problem(envoy={"ext_authz": {"port": 8080}}) == (
        "envoy.ext_authz.port: 8080 is listen.port as well; choose another"
    )
    both = {"ext_authz": {"port": 9001}, "ext_proc": {"port": 9001}}
    assert problem(envoy=both) == "envoy.ext_proc.port: 9001 is envoy.ext_authz.port as well; choose another"


def test_a_setting_without_a_listener_is_an_error() -> None:
    assert problem(envoy={"fallbacks": 3}) == (
        "envoy.fallbacks: has no effect without envoy.ext_authz or envoy.ext_proc"
    )


def test_several_processes_need_a_port_to_share() -> None:
    assert "must be a number, not 0" in problem(processes=2, envoy={"ext_proc": {"port": 0}})


def test_a_port_others_reach_is_warned_of_when_keys_are_told_there() -> None:
    document = {"envoy": {"ext_proc": {"host": "0.0.0.0", "port": 9002}}, "worker_api_key": "k"}
    (warning,) = build_config(document, Overrides(), {}, Path()).warnings()
    assert warning.startswith("envoy.ext_proc.host 0.0.0.0 is reachable from other machines")
    assert build_config({**document, "worker_api_key": None}, Overrides(), {}, Path()).warnings() == ()


async def test_an_address_that_is_taken_is_an_error_at_start(start_router: Start) -> None:
    first: Running = await start_router(envoy={"ext_authz": {"port": 0}, "ext_proc": {"port": 0}})
    assert first.service.envoy is not None
    for protocol, port in first.service.envoy.ports.items():
        service = Service(config(envoy={protocol: {"port": port}}))
        with pytest.raises(ConfigError, match=f"envoy.{protocol}: cannot bind"):
            await service.start()
        await service.stop(0.0)


async def test_without_the_extra_the_error_says_what_to_install(
    start_router: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = (await start_router()).service
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "router.envoy.extproc", raising=False)
    with pytest.raises(ConfigError, match=r"pip install '\.\[envoy\]'"):
        EnvoyPickers(
            EnvoyConfig(ext_proc=EnvoyListenConfig(port=0)),
            service.core,
            UpstreamClient(UpstreamLimits()),
            ListenerOptions(),
            BodyBudget(1),
        )
