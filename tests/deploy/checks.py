"""What must hold of the router's manifests however they were made: by kustomize or by the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from router.config import Config, Overrides, build_config


def router_config(objects: list[dict[str, Any]], deployment: dict[str, Any]) -> Config:
    """The configuration that the router's pods mount, read as the router reads it."""
    (volume,) = [v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == "config"]
    (made,) = [o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == volume["configMap"]["name"]]
    return build_config(yaml.safe_load(made["data"]["router.yaml"]), Overrides(), {}, Path())


def check_pod(deployment: dict[str, Any], config: Config) -> None:
    """Case 112 and the hardening that every cluster asks for."""
    pod = deployment["spec"]["template"]["spec"]
    (router,) = [c for c in pod["containers"] if c["name"] == "router"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert router["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["terminationGracePeriodSeconds"] > config.timeouts.drain_s + config.timeouts.grace_s
    liveness, readiness = router["livenessProbe"], router["readinessProbe"]
    assert (liveness["httpGet"]["path"], readiness["httpGet"]["path"]) == ("/health", "/ready")
    patience_s = (liveness["timeoutSeconds"], liveness["periodSeconds"] * liveness["failureThreshold"])
    assert patience_s >= (5, 60), "a busy router must not be killed"
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < config.timeouts.drain_s, (
        "the endpoint is withdrawn before the listener closes"
    )
    assert [p["containerPort"] for p in router["ports"]] == [config.listen.port]
    assert "memory" in router["resources"]["limits"]
    assert "cpu" not in router["resources"]["limits"], "throttling is latency"


def check_rbac(objects: list[dict[str, Any]], deployment: dict[str, Any], namespace: str) -> None:
    """Least privilege: reading pods in one namespace, and the very account that the pods run as."""
    kinds = [o["kind"] for o in objects]
    assert "ClusterRole" not in kinds
    assert "ClusterRoleBinding" not in kinds
    (role,) = [o for o in objects if o["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    (binding,) = [o for o in objects if o["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": namespace}
    ]


def covers(rules: list[dict[str, Any]], port: int) -> bool:
    """Whether NetworkPolicy ports let TCP through to `port`."""
    return any(
        rule.get("protocol", "TCP") == "TCP" and rule["port"] <= port <= rule.get("endPort", rule["port"])
        for rule in rules
    )
