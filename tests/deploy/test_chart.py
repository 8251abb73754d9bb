"""deploy/helm/kv-router, rendered by Helm itself (the dev-only package helm-python-sdk)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.checks import check_pod, check_rbac, covers, router_config
from tests.deploy.conftest import DEPLOY, MONITORING, check_objects, documents, pick

helm = pytest.importorskip("helm_python")
CHART = DEPLOY / "helm" / "kv-router"
EVERYTHING: dict[str, Any] = {
    "serviceMonitor": {"enabled": True, "labels": {"release": "prom"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prom"}},
    "dashboard": {"enabled": True, "annotations": {"folder": "LLM"}},
    "autoscaling": {"enabled": True},
    "networkPolicy": {"enabled": True, "ingressFrom": [{"podSelector": {"matchLabels": {"role": "gateway"}}}]},
    "imagePullSecrets": [{"name": "pull"}],
    "serviceAccount": {"annotations": {"a": "b"}},
    "service": {"annotations": {"a": "b"}, "labels": {"c": "d"}},
    "affinity": {"nodeAffinity": {}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "priorityClassName": "high",
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "extraArgs": ["--admin-port", "8081"],
    "extraEnv": [{"name": "KEY", "value": "x"}],
    "extraEnvFrom": [{"secretRef": {"name": "keys"}}],
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    "extraContainers": [{"name": "side", "image": "side:1"}],
    "extraInitContainers": [{"name": "before", "image": "before:1"}],
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {}},
        "apiVersion: v1\nkind: Secret\nmetadata: {name: text}\n",
    ],
}


def rendered(values: dict[str, Any] | None = None, name: str = "kv", namespace: str = "llm") -> list[dict[str, Any]]:
    chart = helm.Chart.load(str(CHART))
    pages = chart.render(values or {}, name=name, namespace=namespace)
    return [d for path, page in sorted(pages.items()) if not path.endswith("NOTES.txt") for d in documents(page)]


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(helm.HelmError) as error:
        rendered(values)
    return str(error.value)


def deployed(values: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    objects = rendered(values)
    return objects, pick(objects, "Deployment")


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_lints_without_a_finding(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_every_object_is_valid(values: dict[str, Any], version: str) -> None:
    check_objects(rendered(values), version)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_routers_pods_are_hardened_and_may_read_pods_only(values: dict[str, Any]) -> None:
    """Case 112."""
    objects, deployment = deployed(values)
    check_pod(deployment, router_config(objects, deployment))
    check_rbac(objects, deployment, "llm")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = pick(objects, kind)["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels.items()


def test_the_helm_test_pod_is_not_served_by_the_service_it_tests() -> None:
    objects = rendered()
    test, service = pick(objects, "Pod"), pick(objects, "Service")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert not service["spec"]["selector"].items() <= test["metadata"]["labels"].items()
    program = test["spec"]["containers"][0]["args"][0]
    compile(program, "test", "exec")
    assert f"http://{service['metadata']['name']}:8080" in program


def test_all_that_can_be_switched_on_is_there() -> None:
    objects = rendered(EVERYTHING)
    kinds = sorted(o["kind"] for o in objects)
    assert kinds == [
        *("ConfigMap", "ConfigMap", "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy"),
        *("NetworkPolicy", "Pod", "PodDisruptionBudget", "PrometheusRule", "Role", "RoleBinding", "Secret", "Service"),
        *("ServiceAccount", "ServiceMonitor"),
    ]
    assert pick(objects, "ConfigMap", "kv-x")["data"] == {}, "text in extra objects is a template"
    pod = pick(objects, "Deployment")["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["router", "side"]
    assert pod["containers"][0]["args"] == [
        *("serve", "--config", "/etc/kv-router/router.yaml", "--admin-port", "8081"),
    ]


def test_replicas_are_left_to_the_autoscaler_when_there_is_one() -> None:
    assert deployed({"replicaCount": 5})[1]["spec"]["replicas"] == 5
    objects, deployment = deployed({"autoscaling": {"enabled": True, "maxReplicas": 9}})
    assert "replicas" not in deployment["spec"]
    scaler = pick(objects, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["scaleTargetRef"]["name"], scaler["maxReplicas"]) == (deployment["metadata"]["name"], 9)


def test_the_pods_grace_period_follows_the_drain() -> None:
    """Case 94: SIGKILL must not come while streams may still finish."""

    def grace(timeouts: dict[str, Any]) -> int:
        pod = deployed({"config": {"timeouts": timeouts}})[1]["spec"]["template"]["spec"]
        return int(pod["terminationGracePeriodSeconds"])

    assert grace({}) == 15 + 60 + 15
    assert grace({"drain_s": 20.5, "grace_s": 600}) == 21 + 600 + 15


def test_configuration_reaches_the_router_as_written_and_a_change_rolls_the_pods() -> None:
    more = {"index": {"max_blocks": 20_000_000, "max_blocks_per_rank": 4_000_000}, "policy": {"u_weight": 1.25}}
    objects, deployment = deployed({"config": more})
    config = router_config(objects, deployment)
    assert (config.index.max_blocks, config.policy.u_weight) == (20_000_000, 1.25)
    before = deployed()[1]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
    assert deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"] != before


def test_the_ports_follow_the_configuration() -> None:
    objects, deployment = deployed({"config": {"listen": {"port": 9000}}, "networkPolicy": {"enabled": True}})
    check_pod(deployment, router_config(objects, deployment))
    assert pick(objects, "NetworkPolicy", "kv-kv-router")["spec"]["ingress"][0]["ports"] == [{"port": 9000}]
    assert pick(objects, "Service")["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http"}]


def test_probes_and_scrapes_speak_tls_when_the_listener_does() -> None:
    tls = {"config": {"listen": {"tls": {"cert": "/c", "key": "/k"}}}, "serviceMonitor": {"enabled": True}}
    objects, deployment = deployed(tls)
    router = deployment["spec"]["template"]["spec"]["containers"][0]
    assert {router[p]["httpGet"]["scheme"] for p in ("livenessProbe", "readinessProbe", "startupProbe")} == {"HTTPS"}
    assert pick(objects, "ServiceMonitor")["spec"]["endpoints"][0]["scheme"] == "https"


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_engines_ports_are_open_for_every_rank_and_to_the_router_alone(ranks: int) -> None:
    """Cases 104 and 112."""
    engines = {"dpSize": ranks, "replayPortBase": None, "httpPorts": [8000], "podLabels": {"app": "vllm"}}
    objects = rendered({"networkPolicy": {"enabled": True, "engines": engines}})
    router, guard = (pick(objects, "NetworkPolicy", f"kv-kv-router{end}")["spec"] for end in ("", "-engines"))
    for rules in (router["egress"][0]["ports"], guard["ingress"][0]["ports"]):
        wanted = [8000, *range(5557, 5557 + ranks), *range(5757, 5757 + ranks)]
        assert [port for port in range(1, 10_000) if covers(rules, port)] == sorted(wanted)
    assert guard["podSelector"] == router["egress"][0]["to"][0]["podSelector"] == {"matchLabels": {"app": "vllm"}}
    labels = pick(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert guard["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


def test_engines_in_another_namespace_are_reached_and_read_there() -> None:
    values = {
        "config": {"discovery": {"kubernetes": {"namespace": "gpu"}}},
        "networkPolicy": {"enabled": True, "engines": {"namespaceSelector": {"matchLabels": {"n": "gpu"}}}},
    }
    objects, deployment = deployed(values)
    check_rbac(objects, deployment, "llm")
    assert {pick(objects, kind)["metadata"]["namespace"] for kind in ("Role", "RoleBinding")} == {"gpu"}
    (policy,) = [o for o in objects if o["kind"] == "NetworkPolicy"]
    assert policy["spec"]["egress"][0]["to"][0]["namespaceSelector"] == {"matchLabels": {"n": "gpu"}}


def test_without_kubernetes_discovery_the_pods_get_no_token_and_no_role() -> None:
    values = {"config": {"discovery": {"kubernetes": None, "dns": {"names": ["engines"]}}}}
    objects, deployment = deployed({**values, "networkPolicy": {"enabled": True}})
    assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert not {"Role", "RoleBinding"} & {o["kind"] for o in objects}
    config = router_config(objects, deployment)
    assert config.discovery.kubernetes is None
    egress = pick(objects, "NetworkPolicy", "kv-kv-router")["spec"]["egress"]
    assert not any(covers(rule["ports"], 443) for rule in egress)


def test_alerts_and_dashboard_are_the_repositorys_own() -> None:
    objects = rendered(EVERYTHING)
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    made = pick(objects, "PrometheusRule")
    assert (made["apiVersion"], made["spec"]) == (MONITORING, rules)
    dashboard = pick(objects, "ConfigMap", "kv-kv-router-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"]["kv-router.json"].strip() == (DEPLOY / "grafana" / "kv-router.json").read_text().strip()


def test_a_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    """Alerts and dashboard are links in the repository; a package must hold the files."""
    packed = helm.Chart.load(str(CHART)).save(str(tmp_path))
    pages = helm.Chart.load(packed).render(EVERYTHING, name="kv", namespace="llm")
    again = [d for path, page in sorted(pages.items()) if not path.endswith("NOTES.txt") for d in documents(page)]
    assert again == rendered(EVERYTHING)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 3},
        {"image": {"repo": "x"}},
        {"replicaCount": "two"},
        {"service": {"port": 0}},
        {"networkPolicy": {"engines": {"dpSize": 0}}},
        {"livenessProbe": {"timeout": 1}},
        {"podDisruptionBudget": {"minAvailable": 1}},
        {"podDisruptionBudget": {"maxUnavailable": "150%"}},
        {"autoscaling": {"enabled": True, "minReplicas": 7}},
        {"serviceMonitor": {"enabled": True}, "config": {"listen": {"metrics": False}}},
        {"config": {"timeouts": {"grace_s": "60"}}},
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    (key,) = [key for key in values if key != "config"] or ["config"]
    assert key in refused(values) or next(iter(values[key])) in refused(values)


def test_every_value_has_a_default_and_a_schema() -> None:
    """A value that the schema knows and values.yaml does not show is one that nobody finds, and the other way round."""
    chart = helm.Chart.load(str(CHART))
    assert set(chart.values) == set(chart.schema["properties"]) - {"global"}


def test_replicas_that_tell_each_other_their_load_have_a_name_and_a_way() -> None:
    siblings = {"listen": "tcp://0.0.0.0:8082", "dns": "kv-kv-router-siblings", "key": {"env": "SIBLINGS_KEY"}}
    values = {"config": {"siblings": siblings}, "networkPolicy": {"enabled": True}}
    objects = rendered(values)
    (service,) = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"].endswith("-siblings")]
    assert service["metadata"]["name"] == siblings["dns"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["ports"][0]["port"] == 8082
    policy = next(
        one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "kv-kv-router"
    )
    for way in ("ingress", "egress"):
        assert [8082] in [[port["port"] for port in rule["ports"]] for rule in policy["spec"][way]]
    assert not [one for one in rendered() if one["metadata"]["name"].endswith("-siblings")]


def test_what_envoy_may_ask_is_opened_and_nothing_else() -> None:
    ports = {"ext_authz": {"host": "0.0.0.0", "port": 9001}, "ext_proc": {"host": "0.0.0.0", "port": 9002}}
    objects = rendered({"config": {"envoy": ports}, "networkPolicy": {"enabled": True}})
    assert {one["name"]: one["port"] for one in pick(objects, "Service")["spec"]["ports"]} == {
        "http": 8080,
        "ext-authz": 9001,
        "ext-proc": 9002,
    }
    policy = pick(objects, "NetworkPolicy", "kv-kv-router")
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": 8080}, {"port": 9001}, {"port": 9002}]
