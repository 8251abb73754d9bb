"""From a pod object to workers: addresses, ports, labels, identity."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import KubernetesConfig, KvEventsConfig, Secret
from router.fleet.discovery.base import Found
from router.fleet.discovery.pods import decode_pod, found_in, one_per_url
from tests.support.kube import pod

DEFAULT = KubernetesConfig(selector="app=sglang")


def read(made: dict[str, Any], **config: Any) -> tuple[tuple[Found, ...], tuple[str, ...]]:
    decoded = decode_pod(msgspec.json.encode(made))
    assert decoded is not None
    return found_in(decoded, msgspec.structs.replace(DEFAULT, **config))


def urls(made: dict[str, Any], **config: Any) -> list[str]:
    return [found.url for found in read(made, **config)[0]]


def test_a_pod_is_one_worker_at_its_address() -> None:
    found, notes = read(pod("a", "10.0.0.1"), api_key=Secret("k"), kv_events=KvEventsConfig(dp_size=2))
    assert notes == ()
    assert [each.url for each in found] == ["http://10.0.0.1:30000"]
    assert found[0].identity == "pod default/a uid uid-a restarts 0"
    settings = found[0].settings
    assert (settings.model, settings.role, settings.api_key) == (None, None, Secret("k"))
    assert settings.kv_events == KvEventsConfig(dp_size=2)
    assert found[0].hold is None


@pytest.mark.parametrize(
    ("family", "url"),
    [
        ("auto", "http://10.0.0.1:30000"),
        ("ipv4", "http://10.0.0.1:30000"),
        ("ipv6", "http://[fd00::5]:30000"),
    ],
)
def test_a_dual_stack_pod_is_one_worker_of_the_wanted_family(family: str, url: str) -> None:
    """Case 109; IPv6 is bracketed (cases 15, 109)."""
    assert urls(pod("a", "10.0.0.1", ips=["10.0.0.1", "fd00::5"]), ip_family=family) == [url]


def test_the_primary_address_counts_when_it_is_ipv6() -> None:
    assert urls(pod("a", "fd00::5", ips=["fd00::5", "10.0.0.1"])) == ["http://[fd00::5]:30000"]


def test_a_pod_without_an_address_of_the_wanted_family_is_none_and_says_so() -> None:
    assert read(pod("a", "10.0.0.1"), ip_family="ipv6") == ((), ("no ipv6 address among 10.0.0.1",))


def test_an_address_where_no_engine_is_dialled_is_refused() -> None:
    """Case 102."""
    found, notes = read(pod("a", "169.254.169.254"))
    assert found == ()
    assert "link-local" in notes[0]


def test_each_port_is_a_worker_of_its_own() -> None:
    made = pod("a", "10.0.0.1", ports={"one": 30000, "two": 30001})
    assert urls(made, ports=(30000, 30001)) == ["http://10.0.0.1:30000", "http://10.0.0.1:30001"]
    assert urls(made, ports=("two", "one")) == ["http://10.0.0.1:30001", "http://10.0.0.1:30000"]
    assert urls(made, ports=("one", 30000)) == ["http://10.0.0.1:30000"], "one port under two spellings is one worker"


def test_a_number_needs_no_declaration_and_a_name_does() -> None:
    assert urls(pod("a", "10.0.0.1"), ports=(8000,)) == ["http://10.0.0.1:8000"]
    assert read(pod("a", "10.0.0.1"), ports=("http",)) == ((), ("no container has a port named 'http'",))


def test_with_two_containers_the_one_behind_the_port_counts() -> None:
    """Case 109: a sidecar's restarts are not the engine's."""
    made = pod("a", "10.0.0.1", ports={"http": 30000}, restarts=2)
    made["spec"]["containers"].insert(0, {"name": "proxy", "ports": [{"containerPort": 9}]})
    made["status"]["containerStatuses"].append({"name": "proxy", "ready": False, "restartCount": 7})
    made["status"]["conditions"] = None
    (found,), _ = read(made)
    assert found.identity.endswith("restarts 2")
    assert found.hold is None
    made["spec"]["containers"][1]["ports"] = None
    (found,), _ = read(made)
    assert found.identity.endswith("restarts 9"), "which is behind the port cannot be told: any restart counts"
    assert found.hold is not None


def test_model_and_role_come_from_labels_or_annotations() -> None:
    """A label cannot hold the slash of a model name; an annotation can."""
    made = pod("a", "10.0.0.1", labels={"kv-router/role": "decode"}, annotations={"kv-router/model": "org/Model-8B"})
    (found,), _ = read(made)
    assert (found.settings.model, found.settings.role) == ("org/Model-8B", "decode")
    made = pod("a", "10.0.0.1", labels={"role": "prefill", "m": "x"})
    (found,), _ = read(made, model_label="m", role_label="role")
    assert (found.settings.model, found.settings.role) == ("x", "prefill")


def test_the_transfer_group_comes_from_a_label() -> None:
    (found,), _ = read(pod("a", "10.0.0.1", labels={"kv-router/group": "rack-7"}))
    assert found.settings.group == "rack-7"
    (found,), _ = read(pod("a", "10.0.0.1", labels={"rack": "8", "kv-router/group": ""}), group_label="rack")
    assert found.settings.group == "8"
    (found,), _ = read(pod("a", "10.0.0.1", labels={"kv-router/group": ""}))
    assert found.settings.group is None


def test_a_role_that_is_none_is_left_to_the_engine_and_said() -> None:
    found, notes = read(pod("a", "10.0.0.1", labels={"kv-router/role": "worker"}))
    assert found[0].settings.role is None
    assert notes == ("kv-router/role 'worker' is not plain, prefill or decode: the engine's own counts",)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_ended_is_no_worker(phase: str) -> None:
    assert urls(pod("a", "10.0.0.1", phase=phase)) == []


def test_of_two_pods_at_one_address_the_one_in_use_counts_then_the_younger() -> None:
    """Case 110."""

    def entry(name: str, created: str, **more: Any) -> Any:
        made = pod(name, "10.0.0.1", created=created, **more)
        if more.get("going"):
            made["metadata"]["deletionTimestamp"] = "2026"
        decoded = decode_pod(msgspec.json.encode(made))
        assert decoded is not None
        return decoded, found_in(decoded, DEFAULT)[0]

    going, unready, old, new = (
        entry("going", "4", going=True),
        entry("unready", "3", ready=False),
        entry("old", "1"),
        entry("new", "2"),
    )
    for order in ([going, unready, old, new], [new, old, unready, going]):
        for drop, winner in enumerate(["new", "old", "unready", "going"]):
            left = [each for each in order if each[0].metadata.name in ["new", "old", "unready", "going"][drop:]]
            (found,) = one_per_url(left)
            assert f"default/{winner} " in found.identity


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(Json, st.sampled_from(["metadata", "spec", "status", "labels", "podIP", "podIPs", "containerStatuses", "ports"]))
def test_no_pod_object_raises(junk: Any, where: str) -> None:
    """Case 109: whatever one field holds."""
    made = pod("a", "10.0.0.1", ports={"http": 30000})
    places = {
        "labels": made["metadata"],
        "podIP": made["status"],
        "podIPs": made["status"],
        "containerStatuses": made["status"],
        "ports": made["spec"]["containers"][0],
    }
    places.get(where, made)[where] = junk
    decoded = decode_pod(msgspec.json.encode(made))
    if decoded is not None:
        found, _ = found_in(decoded, DEFAULT)
        assert len(found) <= 1
