"""Group I of the public cases, against a stand-in for the Kubernetes API over real HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import WorkerConfig
from router.contract.url import WorkerUrl
from router.fleet.registry import Fleet
from tests.discovery.conftest import Follow, Seen
from tests.support.engine import FakeEngine, stored
from tests.support.kube import FakeKube, pod
from tests.support.waiting import until

MakeEngine = Callable[[], Awaitable[FakeEngine]]


def urls(fleet: Fleet) -> list[str]:
    return sorted(worker.url.text for worker in fleet.workers)


def at(ip: str, port: int = 30000) -> str:
    return f"http://{ip}:{port}"


def static_pod(name: str, ip: str | None = None, port: int = 30000, **more: Any) -> dict[str, Any]:
    return pod(name, ip, ports={"http": port}, **more)


async def shows(fleet: Fleet, *wanted: str) -> None:
    await until(lambda: urls(fleet) == sorted(wanted), f"workers {sorted(wanted)}; has {urls(fleet)}")


async def watching(kube: FakeKube, watches: int = 1) -> None:
    await until(lambda: kube.watching and len(kube.watches) >= watches, f"watch {watches} is open")


# ---- list and watch


async def test_listed_pods_are_workers_and_watched_ones_come_and_go(kube: FakeKube, follow: Follow, seen: Seen) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    kube.put(static_pod("other", "127.9.0.9", labels={"app": "postgres"}))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    await watching(kube)
    kube.put(static_pod("b", "127.9.0.2"))
    kube.put(static_pod("x", "127.9.0.8", labels={"app": "postgres"}))
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))
    kube.delete("a")
    await shows(fleet, at("127.9.0.2"))
    assert kube.lists == 1, "all of it by one list and one watch"
    assert seen.synced[-1] == ("kubernetes", 1)
    assert kube.watches[0]["resourceVersion"] == "102"
    assert kube.watches[0]["labelSelector"] == "app=sglang"


async def test_the_watch_is_bounded_in_time_and_ends_in_a_new_list(kube: FakeKube, follow: Follow) -> None:
    """Case 108: periodically, whatever the watch says; replicas are spread by 20 %."""
    follow(relist_s=1.0)
    await until(lambda: kube.lists >= 3, "three lists")
    assert {query["timeoutSeconds"] for query in kube.watches} == {"1"}


async def test_a_list_in_pages_is_read_to_its_end(kube: FakeKube, follow: Follow) -> None:
    kube.page_limit = 2
    for number in range(5):
        kube.put(static_pod(f"p{number}", f"127.9.0.{number}"))
    await shows(follow(), *(at(f"127.9.0.{number}") for number in range(5)))


async def test_a_deletion_that_no_watch_delivered_is_found_when_the_connection_drops(
    kube: FakeKube, follow: Follow
) -> None:
    """Case 108: the watch drops, the pod goes meanwhile, the watch resumes."""
    kube.put(static_pod("a", "127.9.0.1"))
    kube.put(static_pod("b", "127.9.0.2"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))
    await watching(kube)
    kube.delete("a", unseen=True)
    kube.drop_watches()
    await shows(fleet, at("127.9.0.2"))
    await watching(kube, 2)
    kube.put(static_pod("c", "127.9.0.3"))
    await shows(fleet, at("127.9.0.2"), at("127.9.0.3"))


async def test_a_watch_that_is_silent_though_pods_go_is_corrected_by_the_next_list(
    kube: FakeKube, follow: Follow
) -> None:
    """Case 108: "a watch that is silent for 20 minutes"; here its bound is 1 s instead of 5 minutes."""
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow(relist_s=1.0)
    await shows(fleet, at("127.9.0.1"))
    kube.silent = True
    kube.delete("a")
    await shows(fleet)


@pytest.mark.parametrize("form", ["status", "event"])
async def test_a_version_that_is_too_old_leads_to_a_new_list(
    form: str, kube: FakeKube, follow: Follow, seen: Seen
) -> None:
    """Case 108, both forms of 410; neither is a failure of the source."""
    kube.put(static_pod("a", "127.9.0.1"))
    kube.list_delay_s = 0.3
    if form == "event":
        kube.in_stream_error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    fleet = follow()
    if form == "status":
        await shows(fleet, at("127.9.0.1"))
        kube.compact()
        kube.drop_watches()
    await until(lambda: kube.lists >= 2, "a second list")
    kube.delete("a")
    kube.put(static_pod("b", "127.9.0.2"))
    await shows(fleet, at("127.9.0.2"))
    if form == "event":
        assert seen.failures == 0


async def test_a_status_410_on_the_watch_itself_leads_to_a_new_list(kube: FakeKube, follow: Follow, seen: Seen) -> None:
    """Case 108: the version is compacted between the list and its watch."""
    kube.put(static_pod("a", "127.9.0.1"))
    kube.oldest = kube.version + 1
    fleet = follow()
    await until(lambda: kube.lists >= 2, "a second list")
    assert (seen.failures, urls(fleet)) == (0, [at("127.9.0.1")])
    kube.oldest = 0
    await watching(kube)
    kube.delete("a")
    await shows(fleet)


async def test_bookmarks_are_asked_for_and_are_signs_of_life_but_no_pods(
    kube: FakeKube, follow: Follow, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await watching(kube)
    before = len(seen.synced)
    kube.bookmark()
    await until(lambda: len(seen.synced) > before, "the bookmark was seen")
    assert (urls(fleet), kube.watches[0]["allowWatchBookmarks"]) == ([at("127.9.0.1")], "true")
    assert "skipped" not in caplog.text, "they have no name and need none"


async def test_an_api_that_fails_costs_no_worker(kube: FakeKube, follow: Follow, seen: Seen) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    await watching(kube)
    kube.list_status = 500
    kube.drop_watches()
    await until(lambda: seen.failures >= 3, "three failed lists")
    assert urls(fleet) == [at("127.9.0.1")]
    kube.delete("a")
    kube.list_status = None
    await shows(fleet)


async def test_an_api_that_is_slow_is_waited_for(kube: FakeKube, follow: Follow, seen: Seen) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    kube.list_delay_s = 1.0
    await shows(follow(), at("127.9.0.1"))
    assert seen.failures == 0


async def test_a_forbidden_list_says_what_is_missing(
    kube: FakeKube, follow: Follow, seen: Seen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 112: least privilege, and a message that says which; the token is read anew when it was rotated."""
    (tmp_path / "token").write_text("old\n")
    kube.token = "new"
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow(token_file=tmp_path / "token")
    await until(lambda: seen.failures, "a failure")
    assert "403 from the Kubernetes API: pods is forbidden" in caplog.text
    assert "needs get, list and watch on pods" in caplog.text
    assert "old" not in caplog.text.split("deploy/ has the Role")[0].split("forbidden")[1]
    (tmp_path / "token").write_text("new\n")
    await shows(fleet, at("127.9.0.1"))


@pytest.mark.parametrize("trouble", ["garbage", "no uid", "strange type", "pod of wrong types"])
async def test_events_that_are_not_understood_end_nothing(trouble: str, kube: FakeKube, follow: Follow) -> None:
    """Case 109: no exception kills the watcher."""
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    await watching(kube)
    if trouble == "garbage":
        kube.say_raw("MODIFIED", "not a pod")
    elif trouble == "no uid":
        kube.say_raw("MODIFIED", {"metadata": {"labels": {"app": "sglang"}}, "spec": None})
    elif trouble == "strange type":
        kube.say_raw("WHATEVER", {"metadata": {"labels": {"app": "sglang"}}})
    else:
        wrong = {"metadata": {"uid": "u", "labels": {"app": "sglang"}}, "status": {"podIP": 5}, "spec": []}
        kube.say_raw("ADDED", wrong)
    kube.put(static_pod("b", "127.9.0.2"))
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))


# ---- half-filled, replaced, relabelled, terminating


async def test_a_pod_that_lost_its_address_is_removed(kube: FakeKube, follow: Follow) -> None:
    """Case 109: MODIFIED with podIP null (an evicted pod)."""
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    kube.put(static_pod("a", None, phase="Failed"))
    await shows(fleet)


async def test_a_deleted_pod_with_a_cleared_spec_is_removed(kube: FakeKube, follow: Follow) -> None:
    """Case 109 (smg#1531)."""
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    await watching(kube)
    kube.delete("a", spec={}, status=None)
    await shows(fleet)


async def test_a_pod_that_is_not_ready_gets_no_requests_and_keeps_what_is_known_of_it(
    kube: FakeKube, follow: Follow, engine: MakeEngine
) -> None:
    """Case 109. Its readiness probe may only have been slow: engines take 1 s to answer /health."""
    one = await engine()
    kube.put(static_pod("a", "127.0.0.1", one.port))
    fleet = follow()
    await until(lambda: fleet.routable("tiny"), "routable")
    (worker,) = fleet.workers
    await one.listened()
    one.publish(stored([1, 2], range(8), 4))
    await until(lambda: sum(worker.ranks[0].blocks().values()) == 2, "two blocks")
    kube.put(static_pod("a", "127.0.0.1", one.port, ready=False))
    await until(lambda: not fleet.routable("tiny"), "out")
    assert (worker.state, worker.reason) == ("unhealthy", "pod default/a is not ready")
    kube.put(static_pod("a", "127.0.0.1", one.port))
    await until(lambda: fleet.routable("tiny"), "back")
    assert fleet.workers == [worker]
    assert worker.ranks[0].blocks() == {"GPU": 2}


@pytest.mark.parametrize("change", [{"uid": "uid-2"}, {"restarts": 1}], ids=["new pod", "container restarted"])
async def test_another_process_at_the_same_address_owns_nothing_of_the_old_one(
    change: dict[str, Any], kube: FakeKube, follow: Follow, engine: MakeEngine
) -> None:
    """Case 110: a new UID at the same IP and port between two looks; an in-place restart shows only in its count."""
    one = await engine()
    kube.put(static_pod("a", "127.0.0.1", one.port))
    fleet = follow()
    await until(lambda: fleet.routable("tiny"), "routable")
    (old,) = fleet.workers
    (rank,) = old.ranks
    await one.listened()
    one.publish(stored([1, 2], range(8), 4))
    await until(lambda: sum(rank.blocks().values()) == 2, "two blocks")
    rank.account.place(10, 10, 0.0, 1.0)
    kube.put(static_pod("a", "127.0.0.1", one.port, **change))
    await until(lambda: fleet.workers and fleet.workers[0] is not old and fleet.routable("tiny"), "the new one")
    (new,) = fleet.workers
    assert (old.state, rank.dead, rank.account.requests) == ("draining", True, 1), "its streams may finish"
    assert (new.incarnation, new.ranks[0].blocks(), new.ranks[0].account.requests) == (2, {}, 0)
    assert str(change.get("uid") or "restarts 1") in str(fleet.describe()[0]["identity"])


async def test_the_end_of_the_old_pod_does_not_take_the_new_one_at_its_address(kube: FakeKube, follow: Follow) -> None:
    """Case 110 (sglang#38523): a rollout on the host network, old and new pod have one address for a while."""
    kube.put(static_pod("old", "127.9.0.1", created="2026-11-29T10:00:00Z"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    going = static_pod("old", "127.9.0.1", created="2026-11-29T10:00:00Z")
    going["metadata"]["deletionTimestamp"] = "2026-11-29T11:00:00Z"
    kube.put(going)
    await until(lambda: fleet.workers[0].state == "draining", "draining")
    kube.put(static_pod("new", "127.9.0.1", created="2026-11-29T11:00:00Z"))
    await until(lambda: "default/new" in str(fleet.workers[0].identity), "the new pod")
    await watching(kube)
    kube.delete("old")
    kube.put(static_pod("b", "127.9.0.2"))
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))
    assert fleet.worker(at("127.9.0.1")) is not None
    assert "default/new" in str(fleet.describe()[0]["identity"])


async def test_a_late_word_of_the_old_pods_end_does_not_end_the_new_one_of_its_name(
    kube: FakeKube, follow: Follow
) -> None:
    """Case 110: pods of a StatefulSet keep their names."""
    kube.put(static_pod("a", "127.9.0.1", uid="old"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    await watching(kube)
    kube.put(static_pod("a", "127.9.0.2", uid="new"))
    kube.say_raw("DELETED", static_pod("a", "127.9.0.1", uid="old"))
    kube.put(static_pod("b", "127.9.0.3"))
    await shows(fleet, at("127.9.0.2"), at("127.9.0.3"))


async def test_a_terminating_pod_gets_no_new_requests_and_is_dropped_when_it_is_gone(
    kube: FakeKube, follow: Follow, engine: MakeEngine
) -> None:
    """Case 111."""
    one = await engine()
    kube.put(static_pod("a", "127.0.0.1", one.port))
    fleet = follow()
    await until(lambda: fleet.routable("tiny"), "routable")
    (worker,) = fleet.workers
    worker.ranks[0].account.place(10, 10, 0.0, 1.0)
    going = static_pod("a", "127.0.0.1", one.port)
    going["metadata"]["deletionTimestamp"] = "2026-11-29T11:00:00Z"
    kube.put(going)
    await until(lambda: worker.state == "draining", "draining")
    assert (fleet.routable("tiny"), worker.reason) == ([], "pod default/a is terminating; open streams may finish")
    assert fleet.describe()[0]["ranks"][0]["inflight_requests"] == 1, "its streams are seen until they are done"
    kube.delete("a")
    await shows(fleet)


async def test_a_pod_that_no_longer_matches_gets_nothing_though_it_answers_health(
    kube: FakeKube, follow: Follow, engine: MakeEngine
) -> None:
    """Case 111."""
    one = await engine()
    kube.put(static_pod("a", "127.0.0.1", one.port))
    fleet = follow()
    await until(lambda: fleet.routable("tiny"), "routable")
    kube.relabel_away("a")
    await shows(fleet)
    assert fleet.routable("tiny") == []


async def test_a_changed_label_is_taken_over(kube: FakeKube, follow: Follow) -> None:
    """Case 87 and 111: the same pod with another role is replaced, not registered twice."""
    kube.put(static_pod("a", "127.9.0.1", labels={"kv-router/role": "prefill"}))
    fleet = follow()
    await until(lambda: [w.role for w in fleet.workers] == ["prefill"], "prefill")
    kube.put(static_pod("a", "127.9.0.1", labels={"kv-router/role": "decode"}))
    await until(lambda: [w.role for w in fleet.workers] == ["decode"], "decode")


# ---- beside other workers


async def test_a_worker_that_somebody_configured_is_not_discoverys(
    kube: FakeKube, follow: Follow, make_fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    kube.put(static_pod("b", "127.9.0.2"))
    own = WorkerConfig(url=WorkerUrl.parse(at("127.9.0.1")), model="mine")
    fleet = follow(make_fleet(workers=(own,)))
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))
    kube.delete("a")
    kube.delete("b")
    await shows(fleet, at("127.9.0.1"))
    assert fleet.models() == ["mine"]
    assert caplog.text.count("http://127.9.0.1:30000 is in the fleet already") == 1


async def test_a_worker_deleted_by_hand_stays_away_until_its_pod_is_another(kube: FakeKube, follow: Follow) -> None:
    kube.put(static_pod("a", "127.9.0.1"))
    fleet = follow()
    await shows(fleet, at("127.9.0.1"))
    fleet.remove(at("127.9.0.1"))
    kube.put(static_pod("b", "127.9.0.2"))
    await shows(fleet, at("127.9.0.2"))
    kube.put(static_pod("a", "127.9.0.1", restarts=1))
    await shows(fleet, at("127.9.0.1"), at("127.9.0.2"))
