"""deploy/envoy without an Envoy: the files hold what Envoy's own messages allow, and fit the router's defaults."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import Config
from router.envoy.pick import DESTINATION
from router.internal_fields import RANK_HEADER

json_format = pytest.importorskip("google.protobuf.json_format")

FOLDER = Path(__file__).parents[2] / "deploy" / "envoy"
EXTENSIONS = (
    "envoy.extensions.filters.http.ext_authz.v3.ext_authz_pb2",
    "envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2",
    "envoy.extensions.filters.http.router.v3.router_pb2",
    "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2",
    "envoy.extensions.load_balancing_policies.override_host.v3.override_host_pb2",
    "envoy.extensions.load_balancing_policies.round_robin.v3.round_robin_pb2",
    "envoy.extensions.upstreams.http.v3.http_protocol_options_pb2",
)


def loaded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


def manager(document: dict[str, Any]) -> dict[str, Any]:
    (listener,) = document["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


@pytest.mark.parametrize("name", ["ext_authz.yaml", "ext_proc.yaml"])
def test_every_key_is_one_of_envoys(name: str) -> None:
    """Needs xds-protos, in an environment without OpenTelemetry's exporter: the two overwrite each other's files."""
    pytest.importorskip("envoy.service.ext_proc.v3")
    for module in EXTENSIONS:
        importlib.import_module(module)
    bootstrap = importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2").Bootstrap()
    json_format.ParseDict(loaded(name), bootstrap)
    assert [cluster.name for cluster in bootstrap.static_resources.clusters] == ["engines", "picker", "router"]


@pytest.mark.parametrize("name", ["ext_authz.yaml", "ext_proc.yaml"])
def test_envoy_tries_as_many_engines_as_the_router_names(name: str) -> None:
    route = manager(loaded(name))["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
    assert route["retry_policy"] == {"retry_on": "connect-failure", "num_retries": Config().envoy.fallbacks}


def test_ext_authz_passes_on_what_the_router_sets_and_reads() -> None:
    settings = manager(loaded("ext_authz.yaml"))["http_filters"][0]["typed_config"]
    assert settings["with_request_body"]["max_request_bytes"] == Config().listen.max_body_mb << 20
    set_fields = settings["http_service"]["authorization_response"]["allowed_upstream_headers"]["patterns"]
    assert {DESTINATION.decode(), RANK_HEADER, "authorization"} <= {one["exact"] for one in set_fields}
    seen = {one["exact"] for one in settings["allowed_headers"]["patterns"]}
    assert {"content-encoding", RANK_HEADER, "x-api-key"} <= seen
    assert settings["failure_mode_allow"] is False


def test_ext_proc_follows_the_endpoint_picker_protocol() -> None:
    document = loaded("ext_proc.yaml")
    settings = manager(document)["http_filters"][0]["typed_config"]
    assert settings["processing_mode"]["response_header_mode"] == "SKIP"
    assert settings["metadata_options"] == {"receiving_namespaces": {"untyped": ["envoy.lb"]}}
    policy = document["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"][0]
    source = policy["typed_extension_config"]["typed_config"]["override_host_sources"]
    assert source == [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION.decode()}]}}]
    assert settings["failure_mode_allow"] is False
