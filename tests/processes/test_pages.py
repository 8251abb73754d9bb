"""The metrics pages of several processes as one."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.observe.metrics import Metrics, RankSample, WorkerSample
from router.observe.tally import Tally
from router.processes.pages import GAUGES, SEEN_BY_ALL, Pages, parse

WORKER = "http://w:1"


def sample(state: str = "live", requests: int = 0, blocks: int = 10, tallied: int = 0) -> WorkerSample:
    tally = Tally(requests=tallied)
    ranks = [RankSample(0, state, {"GPU": blocks}, requests, 0, 0, None, tally)]
    return WorkerSample(
        worker=WORKER, role="plain", up=True, drift=(), capacity_blocks=100, breaker_open=False, ranks=ranks
    )


class Process:
    """What one process counts."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.workers = [sample()]

    def page(self) -> str:
        return self.metrics.render(self.workers, ("live", "replaying"), ("hash",)).decode()


def values(page: bytes) -> dict[str, float]:
    """By sample name and labels, as a scraper reads them."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for one in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def render(pages: Pages, *processes: Process, restarts: int = 0) -> dict[str, float]:
    return values(pages.render({(number, restarts): one.page() for number, one in enumerate(processes)}))


def test_every_gauge_and_every_shared_counter_of_the_router_has_its_rule() -> None:
    families = parse(Process().page())
    named = {name for name in families if not name.endswith("_created")}
    gauges = {name for name in named if families[name].kind == "gauge"}
    assert gauges - GAUGES.keys() == set()
    counters = {name.removesuffix("_total") for name in named if families[name].kind == "counter"}
    assert counters >= SEEN_BY_ALL


def test_requests_add_up_and_what_all_processes_hear_counts_once() -> None:
    one, two = Process(), Process()
    for process, requests in ((one, 3), (two, 4)):
        process.metrics.requests.inc("/generate", "ok", by=requests)
        process.metrics.request_seconds.observe(0.2, "/generate")
        process.metrics.events(WORKER, 0, "stored", 100)
    two.metrics.events(WORKER, 0, "stored", 5)
    seen = render(Pages(), one, two)
    assert seen["kv_router_requests_total{outcome=ok,route=/generate}"] == 7
    assert seen["kv_router_request_seconds_count{route=/generate}"] == 2
    assert seen["kv_router_request_seconds_bucket{le=0.25,route=/generate}"] == 2
    assert seen[f"kv_router_events_total{{rank=0,type=stored,worker={WORKER}}}"] == 105


def test_gauges_say_what_every_process_has_or_what_all_do_together() -> None:
    one, two = Process(), Process()
    one.workers, two.workers = [sample("live", 2, 10)], [sample("replaying", 3, 8)]
    seen = render(Pages(), one, two)
    at = f"rank=0,worker={WORKER}"
    assert seen[f"kv_router_worker_inflight_requests{{{at}}}"] == 5
    assert seen[f"kv_router_index_blocks{{medium=GPU,{at}}}"] == 8
    assert seen[f"kv_router_stream_state{{rank=0,state=live,worker={WORKER}}}"] == 0
    assert seen[f"kv_router_stream_state{{rank=0,state=replaying,worker={WORKER}}}"] == 1
    assert seen["kv_router_ready_workers"] == 1


def test_a_restarted_process_takes_no_count_back() -> None:
    pages, one, two = Pages(), Process(), Process()
    for process in (one, two):
        process.metrics.requests.inc("/generate", "ok", by=10)
        process.metrics.events(WORKER, 0, "stored", 50)
        process.workers = [sample(tallied=10)]
    render(pages, one, two)
    name = "kv_router_requests_total{outcome=ok,route=/generate}"
    tally = f"kv_router_rank_requests_total{{rank=0,worker={WORKER}}}"
    down = values(pages.render({(0, 0): one.page()}))
    assert (down[name], down[tally]) == (20, 20), "while it is away"
    assert down[f"kv_router_worker_inflight_requests{{rank=0,worker={WORKER}}}"] == 0
    fresh = Process()
    fresh.metrics.requests.inc("/generate", "ok")
    again = values(pages.render({(0, 0): one.page(), (1, 1): fresh.page()}))
    assert (again[name], again[tally]) == (21, 20)
    assert again[f"kv_router_events_total{{rank=0,type=stored,worker={WORKER}}}"] == 50


def test_the_one_that_saw_most_may_go_and_the_count_does_not_fall() -> None:
    pages, one, two = Pages(), Process(), Process()
    one.metrics.events(WORKER, 0, "stored", 50)
    two.metrics.events(WORKER, 0, "stored", 60)
    name = f"kv_router_events_total{{rank=0,type=stored,worker={WORKER}}}"
    assert render(pages, one, two)[name] == 60
    assert values(pages.render({(0, 0): one.page()}))[name] == 60


def test_a_removed_workers_series_end_although_an_ended_process_counted_for_it() -> None:
    """case 98"""
    pages, one, two = Pages(), Process(), Process()
    one.workers = two.workers = [sample(tallied=10)]
    render(pages, one, two)
    values(pages.render({(0, 0): one.page(), (1, 1): Process().page()}))
    one.workers = []
    fresh = Process()
    fresh.workers = []
    seen = values(pages.render({(0, 0): one.page(), (1, 1): fresh.page()}))
    assert not [name for name in seen if WORKER in name]


def test_what_a_process_does_not_answer_once_is_not_counted_twice() -> None:
    pages, one, two = Pages(), Process(), Process()
    two.metrics.requests.inc("/generate", "ok", by=5)
    name = "kv_router_requests_total{outcome=ok,route=/generate}"
    assert [
        render(pages, one, two)[name],
        values(pages.render({(0, 0): one.page()}))[name],
        render(pages, one, two)[name],
    ] == [5, 5, 5]


@pytest.mark.parametrize("text", ['a_total{x="y z # HELP b",q="}"} 3.0', "a_total 3.0"])
def test_odd_labels_survive(text: str) -> None:
    page = parse(f"# HELP a_total some\n# TYPE a_total counter\n{text}\n")
    assert list(page["a_total"].samples) == [text.rpartition(" ")[0]]
