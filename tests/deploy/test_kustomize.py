"""deploy/kubernetes, rendered by kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from router.contract.descriptor import parse_descriptor
from router.contract.url import WorkerUrl
from tests.deploy.checks import check_pod, check_rbac, covers, router_config
from tests.deploy.conftest import DEPLOY, check_objects, documents, pick

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def rendered(folder: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return documents(done.stdout)


@pytest.mark.parametrize("folder", ["base", "example-sglang"])
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_every_object_is_valid(folder: str, version: str) -> None:
    check_objects(rendered(folder), version)


@pytest.mark.parametrize(("folder", "namespace"), [("base", "default"), ("example-sglang", "llm")])
def test_the_routers_pods_are_hardened_and_may_read_pods_only(folder: str, namespace: str) -> None:
    """Case 112."""
    objects = rendered(folder)
    deployment = pick(objects, "Deployment", "kv-router")
    config = router_config(objects, deployment)
    check_pod(deployment, config)
    check_rbac(objects, deployment, namespace)
    assert config.discovery.kubernetes is not None
    assert {o["metadata"]["namespace"] for o in objects} == {namespace}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = pick(objects, kind)["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels.items()


def test_the_example_opens_every_ranks_ports_to_the_router_alone() -> None:
    """Case 112: a policy with only the base port open leaves the other ranks deaf. Case 104: events are not public."""
    objects = rendered("example-sglang")
    engine = pick(objects, "Deployment", "sglang")["spec"]["template"]
    args = engine["spec"]["containers"][0]["args"]
    assert "--enable-cache-report" in args
    (events,) = [json.loads(a.partition("=")[2]) for a in args if a.startswith("--kv-events-config=")]
    (load,) = [a.rpartition(":")[2] for a in args if a.startswith("--load-publish-endpoint=")]
    described = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": int(events["endpoint"].rpartition(":")[2]),
        "replay_endpoint_port_base": int(events["replay_endpoint"].rpartition(":")[2]),
        "load_endpoint_port_base": int(load),
        "topic": events["topic"],
        "block_size": 64,
        "dp_size": 8,
    }
    descriptor = parse_descriptor(described, WorkerUrl.parse("http://10.0.0.1:30000"))
    assert descriptor.notes == ()
    router_out = pick(objects, "NetworkPolicy", "kv-router")["spec"]["egress"][0]
    engine_in = pick(objects, "NetworkPolicy", "sglang")["spec"]
    assert router_out["to"][0]["podSelector"]["matchLabels"].items() <= engine["metadata"]["labels"].items()
    assert engine_in["podSelector"]["matchLabels"].items() <= engine["metadata"]["labels"].items()
    router_labels = pick(objects, "Deployment", "kv-router")["spec"]["template"]["metadata"]["labels"]
    (rule,) = engine_in["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= router_labels.items()
    endpoints = [at for rank in descriptor.ranks for at in (rank.events, rank.replay, rank.load)]
    ports = [30000, *(int(str(at).rpartition(":")[2]) for at in endpoints)]
    assert len(set(ports)) == 25
    for port in ports:
        assert covers(router_out["ports"], port), port
        assert covers(rule["ports"], port), port
    assert not covers(rule["ports"], max(ports) + 1)


def test_the_examples_engines_are_found_by_the_routers_selector_at_the_port_they_serve() -> None:
    """Case 112 (llm-d#981): a guide whose discovery finds nothing."""
    objects = rendered("example-sglang")
    engine = pick(objects, "Deployment", "sglang")["spec"]["template"]
    kubernetes = router_config(objects, pick(objects, "Deployment", "kv-router")).discovery.kubernetes
    assert kubernetes is not None
    key, _, value = kubernetes.selector.partition("=")
    assert engine["metadata"]["labels"][key] == value
    assert kubernetes.ports[0] in [p["containerPort"] for p in engine["spec"]["containers"][0]["ports"]]


def test_the_example_router_has_the_engines_tokenizer_at_the_same_path() -> None:
    """Case 112: a read-only root with no tokenizer cache."""
    objects = rendered("example-sglang")
    pods = [pick(objects, "Deployment", name)["spec"]["template"]["spec"] for name in ("kv-router", "sglang")]
    mounts = [{m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]} for pod in pods]
    assert mounts[0]["models"] == mounts[1]["models"] == "/models"
    model = pods[1]["containers"][0]["args"][0]
    assert model.startswith("--model-path=/models/")
