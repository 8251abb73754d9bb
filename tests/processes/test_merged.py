"""`GET /workers` and the live page of several processes as one."""

from __future__ import annotations

from typing import Any

from router.observe.history import FIELDS
from router.observe.views import RANK_FIELDS
from router.processes.live import LiveMerge
from router.processes.merged import merge_workers
from router.processes.process import BACKOFF_S, backoff_s, ending

URL = "http://w:1"


def rank(**changes: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "state": "live",
        "reason": "heard from the first batch",
        "history": "complete",
        "blocks": {"GPU": 10},
        "last_seq": 7,
        "gaps": 1,
        "replays": {"filled": 1},
        "inflight_requests": 2,
        "inflight_tokens": 20,
        "trusted": True,
        **changes,
    }


def view(*ranks: dict[str, Any], url: str = URL, **changes: Any) -> dict[str, Any]:
    worker = {
        "url": url,
        "state": "ready",
        "reason": "",
        "incarnation": 1,
        "drift": [],
        "ranks": list(ranks),
        **changes,
    }
    return {"workers": [worker]}


def test_what_each_does_adds_up_and_what_all_follow_is_the_least_of_them() -> None:
    ahead = rank(blocks={"GPU": 12, "DISK": 1}, last_seq=9, gaps=0, inflight_requests=3)
    (worker,) = merge_workers([(0, view(rank())), (1, view(ahead))])
    (merged,) = worker["ranks"]
    assert merged["inflight_requests"] == 5
    assert merged["blocks"] == {"GPU": 10, "DISK": 0}
    assert (merged["last_seq"], merged["gaps"], merged["replays"]) == (7, 1, {"filled": 2})


def test_the_worst_state_is_shown_with_the_process_it_is_of() -> None:
    late = rank(state="replaying", reason="asked replay", trusted=False, last_seq=None, history="partial")
    (worker,) = merge_workers([(0, view(rank())), (1, view(late, state="starting", reason="not probed yet"))])
    assert (worker["state"], worker["reason"]) == ("starting", "process 1: not probed yet")
    (merged,) = worker["ranks"]
    assert (merged["state"], merged["reason"]) == ("replaying", "process 1: asked replay")
    assert (merged["trusted"], merged["last_seq"], merged["history"]) == (False, 7, "partial")


def test_states_that_agree_name_no_process() -> None:
    (worker,) = merge_workers([(0, view(rank())), (1, view(rank()))])
    assert (worker["state"], worker["reason"], worker["ranks"][0]["reason"]) == (
        "ready",
        "",
        "heard from the first batch",
    )


def test_a_worker_only_one_process_knows_says_so() -> None:
    (worker,) = merge_workers([(0, {"workers": []}), (1, view(rank()))])
    assert worker["reason"].startswith("only in process 1.")


def test_one_drift_of_a_kind_is_shown() -> None:
    drift = [{"kind": "hash", "advertised": "a", "observed": "b", "since_s": 1, "advice": "c"}]
    (worker,) = merge_workers([(0, view(drift=drift)), (1, view(drift=drift))])
    assert worker["drift"] == drift


# ---- the live page


def state(at: float = 100.0, running: int = 1, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(RANK_FIELDS, 0) | {"rank": 0, "state": "live", "reason": "", "blocks": 5}
    values |= {"requests": 4, "tokens_per_s": None}
    worker = {"url": URL, "state": "ready", "reason": "", "ranks": [[values[name] for name in RANK_FIELDS]]}
    base = {"at": at, "running": running, "finished": 3, "failed": 1, "workers": [worker]}
    return {**base, "decisions": [], "point": None, "points": [], "ended": {}, **changes}


def point(at: float, requests: int, p50: float | None) -> list[Any]:
    values: dict[str, Any] = dict.fromkeys(FIELDS, 0) | {"at": at, "requests": requests}
    values |= {"ttft_p50_s": p50, "ttft_p95_s": p50}
    return [values[name] for name in FIELDS]


def decision(number: int) -> dict[str, Any]:
    return {"number": number, "worker": URL}


def test_the_page_shows_the_work_of_all_processes() -> None:
    merge = LiveMerge()
    merge.take(0, "hello", state(version="1", policy="kv"))
    merge.take(1, "hello", state(running=2, version="1", policy="kv"))
    hello = merge.hello()
    assert (hello["running"], hello["finished"], hello["failed"], hello["version"]) == (3, 6, 2, "1")
    (worker,) = hello["workers"]
    ranks = dict(zip(RANK_FIELDS, worker["ranks"][0], strict=True))
    assert (ranks["requests"], ranks["blocks"], ranks["tokens_per_s"]) == (8, 5, None)


def test_decisions_of_two_processes_have_numbers_of_their_own_and_end_once() -> None:
    merge = LiveMerge()
    merge.take(0, "hello", state(decisions=[decision(1)]))
    merge.take(1, "hello", state(decisions=[decision(1)]))
    merge.take(1, "tick", state(decisions=[decision(2)], ended={"1": {"outcome": "ok"}}))
    tick = merge.tick()
    assert [(one["number"], one["process"]) for one in tick["decisions"]] == [(1, 0), (2, 1), (3, 1)]
    assert tick["ended"] == {"2": {"outcome": "ok"}}
    assert merge.tick()["decisions"] == []


def test_a_restarted_process_may_count_its_decisions_from_one_again() -> None:
    merge = LiveMerge()
    merge.take(0, "hello", state(decisions=[decision(1)]))
    merge.lost(0)
    assert merge.tick()["running"] == 0
    merge.take(0, "hello", state(decisions=[decision(1)]))
    assert [one["number"] for one in merge.tick()["decisions"]] == [2]


def test_curves_add_up_by_the_clock() -> None:
    merge = LiveMerge()
    merge.take(0, "hello", state(points=[point(100.1, 3, 0.1), point(102.1, 1, None)]))
    merge.take(1, "hello", state(points=[point(99.9, 1, 0.5)]))
    first, second = merge.hello()["points"]
    assert (first[0], first[1], first[FIELDS.index("ttft_p50_s")]) == (100.0, 4, 0.2)
    assert (second[0], second[1], second[FIELDS.index("ttft_p50_s")]) == (102.0, 1, None)
    merge.take(0, "tick", state(point=point(104.1, 2, 0.1)))
    assert merge.tick()["point"] is None, "its step may not be over for the other"
    merge.take(1, "tick", state(point=point(103.9, 5, 0.1)))
    merge.take(0, "tick", state(point=point(106.1, 1, 0.1)))
    shown = merge.tick()["point"]
    assert shown is not None
    assert shown[:2] == [104.0, 7]


def test_a_process_that_keeps_ending_is_started_ever_more_seldom_but_always() -> None:
    waits = [backoff_s(failures) for failures in (1, 2, 3, 50)]
    assert waits == [BACKOFF_S[0], 0.2, 0.4, BACKOFF_S[1]]
    assert [ending(-9), ending(2)] == ["was ended by SIGKILL", "ended with status 2"]
