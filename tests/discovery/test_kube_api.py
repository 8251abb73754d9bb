"""Where the API is and with what to ask it; the rest of kube_api is tested through discovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import KubernetesApiConfig
from router.contract.url import WorkerUrl
from router.errors import ConfigError
from router.fleet.discovery.kube_api import KubeApi, KubeError, api_access
from tests.support.kube import FakeKube, pod


def account(folder: Path) -> Path:
    (folder / "namespace").write_text("team-a\n")
    (folder / "token").write_text("t\n")
    return folder


def test_a_pod_knows_everything_from_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssl.create_default_context", lambda cafile: cafile)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = api_access(KubernetesApiConfig(), None, environment, account(tmp_path))
    assert (access.url, access.namespace) == ("https://[fd00::1]:6443", "team-a")
    assert access.token_file == tmp_path / "token"
    assert str(access.tls) == str(tmp_path / "ca.crt")


def test_what_is_configured_beats_the_pod(tmp_path: Path) -> None:
    config = KubernetesApiConfig(url=WorkerUrl.parse("http://127.0.0.1:8001"))
    access = api_access(config, "b", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, account(tmp_path))
    assert (access.url, access.namespace, access.token_file, access.tls) == ("http://127.0.0.1:8001", "b", None, None)


def test_outside_of_a_cluster_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^discovery.kubernetes.api.url: missing"):
        api_access(KubernetesApiConfig(), "a", {}, tmp_path)
    with pytest.raises(ConfigError, match=r"^discovery.kubernetes.namespace: missing"):
        api_access(KubernetesApiConfig(url=WorkerUrl.parse("http://127.0.0.1:8001")), None, {}, tmp_path)
    with pytest.raises(ConfigError, match=r"^discovery.kubernetes.api.ca: "):
        api_access(KubernetesApiConfig(), "a", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


async def test_an_event_larger_than_a_read_buffer_comes_whole(kube: FakeKube) -> None:
    """Pods with large annotations are over the 64 KB that line readers stop at."""
    access = api_access(KubernetesApiConfig(url=WorkerUrl.parse(kube.url)), "default", {})
    api = KubeApi(access, "app=sglang")
    try:
        _, version = await api.list_pods()
        kube.put(pod("a", "10.0.0.1", annotations={"big": "x" * 400_000}))
        async for change in api.watch_pods(version, 5):
            assert (change.kind, len(change.object) > 400_000) == ("ADDED", True)
            break
    finally:
        await api.close()


async def test_nobody_there_is_a_reason_in_words() -> None:
    access = api_access(KubernetesApiConfig(url=WorkerUrl.parse("http://127.0.0.1:9")), "default", {})
    api = KubeApi(access, "app=sglang")
    try:
        with pytest.raises(KubeError, match="the pod list could not be read: ClientConnectorError"):
            await api.list_pods()
    finally:
        await api.close()
