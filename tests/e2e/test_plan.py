"""Planning at once and planning with waits give the same, and each request is counted once either way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from router.core import LONG_PROMPT_BYTES, RequestPlan, RoutingCore
from router.errors import RouterError
from router.fleet.breaker import FAULTS_TO_OPEN
from router.fleet.rank import Rank
from router.fleet.worker import Hold
from router.prompt.forms import CHAT
from router.proxy.plan import Outcome, Unplanned
from tests.e2e.conftest import Running, Start
from tests.e2e.test_mixed_fleet import MESSAGE, Fake, kinds

COMPLETIONS = "/v1/completions"
NOBODY: frozenset[str] = frozenset()


def core_of(router: Running) -> RoutingCore:
    return router.service.core


def seen(plan: RequestPlan | Unplanned) -> tuple[object, ...]:
    assert isinstance(plan, RequestPlan)
    prompt = plan.prompt
    return plan.model, plan.client_rank, plan.encoded, plan.rules, prompt.ids, prompt.tokens, prompt.source


def body_of(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "tiny", **fields})


async def test_what_needs_no_waiting_is_planned_at_once_and_counted_once(
    start_router: Start, fake_engine: Fake
) -> None:
    router, _ = await kinds(start_router, fake_engine, None)
    core = core_of(router)
    asked = [
        (CHAT, {}, body_of(messages=[MESSAGE])),
        (COMPLETIONS, {"x-data-parallel-rank": "0"}, body_of(prompt=[1, 2, 3])),
        (COMPLETIONS, {"content-encoding": "gzip"}, b"\x1f\x8b"),
    ]
    for number, (route, headers, body) in enumerate(asked):
        at_once = core.plan_now(route, headers, body, f"a{number}")
        assert await router.metric("prompts_total") == 2 * number + 1
        assert seen(at_once) == seen(await core.plan(route, headers, body, f"b{number}"))
        assert await router.metric("prompts_total") == 2 * number + 2


async def test_several_kinds_of_engine_and_long_prompts_are_left_to_plan_which_goes_on_from_there(
    start_router: Start, fake_engine: Fake, tmp_path: Any
) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    several, _ = await kinds(start_router, fake_engine, None, str(other))
    single, _ = await kinds(start_router, fake_engine, None)
    long = body_of(prompt=[7] * (LONG_PROMPT_BYTES // 4 + 1))
    for router, route, body in ((several, CHAT, body_of(messages=[MESSAGE])), (single, COMPLETIONS, long)):
        core = core_of(router)
        unplanned = core.plan_now(route, {}, body, "r1")
        assert isinstance(unplanned, Unplanned)
        plan = await core.plan(route, {}, body, "r1", unplanned)
        assert plan.prompt.ids is not None
        assert len(plan.others) == (1 if router is several else 0)
        assert await router.metric("prompts_total") == 1


async def test_requests_that_are_begun_in_one_turn_are_counted_once_each(
    start_router: Start, fake_engine: Fake
) -> None:
    """`plan` has its turn when others were begun too, even under the same request id."""
    router, _ = await kinds(start_router, fake_engine, None)
    core = core_of(router)
    fields = {"prompt": [7] * (LONG_PROMPT_BYTES // 4 + 1), "extra_key": "x"}  # cannot be credited (case 41)
    bodies = [body_of(**fields, user=str(number)) for number in range(3)]
    begun = [core.plan_now(COMPLETIONS, {}, body, "the same id") for body in bodies]
    for body, unplanned in zip(reversed(bodies), reversed(begun), strict=True):
        assert isinstance(unplanned, Unplanned)
        plan = await core.plan(COMPLETIONS, {}, body, "the same id", unplanned)
        assert plan.body.raw is body
    assert await router.metric("prompts_total") == 3
    assert await router.metric("uncredited_prompts_total") == 3


async def test_both_ways_refuse_alike(start_router: Start, fake_engine: Fake) -> None:
    router, _ = await kinds(start_router, fake_engine, None)
    core = core_of(router)
    refused = [(b"{", "bad_json"), (b'{"model":"x"}', "model_not_found"), (body_of(bootstrap_host="h"), "bad_request")]
    for body, code in refused:
        with pytest.raises(RouterError) as at_once:
            core.plan_now(COMPLETIONS, {}, body, "r")
        with pytest.raises(RouterError) as in_time:
            await core.plan(COMPLETIONS, {}, body, "r")
        assert (at_once.value.code, in_time.value.code) == (code, code)


async def test_ranks_come_and_go_between_plan_and_place(start_router: Start, fake_engine: Fake) -> None:
    """What is remembered of a model's pools must not outlive a breaker that opens or closes, or a worker."""
    router, engines = await kinds(start_router, fake_engine, None, None)
    core, (one, two) = core_of(router), engines
    plan = core.plan_now(COMPLETIONS, {}, body_of(prompt=[1, 2, 3]), "r1")
    assert isinstance(plan, RequestPlan)

    def candidates() -> list[str]:
        placement = core.place_whole(plan, NOBODY)
        placement.finish(Outcome.CLIENT_CLOSED)
        return [rank.worker.url.text for rank in placement.decision.targets]

    assert candidates() == [one.url, two.url]
    worker = core.fleet.worker(one.url)
    assert worker is not None
    for _ in range(FAULTS_TO_OPEN):
        core.fleet.fault(worker, "http_500")
    assert candidates() == [two.url]
    core.fleet.served(worker)
    core.plan_now(COMPLETIONS, {}, body_of(prompt=[1, 2, 3]), "r2")
    assert candidates() == [one.url, two.url]
    core.fleet.remove(two.url)
    assert candidates() == [one.url]


async def test_what_is_remembered_of_a_fleet_follows_holds_restarts_and_hashes(
    start_router: Start, fake_engine: Fake
) -> None:
    router, engines = await kinds(start_router, fake_engine, None, None)
    core = core_of(router)
    one, two = (core.fleet.worker(engine.url) for engine in engines)
    assert one is not None
    assert two is not None

    def decided() -> tuple[list[Rank], list[str]]:
        plan = core.plan_now(COMPLETIONS, {}, body_of(prompt=list(range(300))), "r")
        assert isinstance(plan, RequestPlan)
        placement = core.place_whole(plan, NOBODY)
        placement.finish(Outcome.CLIENT_CLOSED)
        return list(placement.decision.targets), sorted({scheme.kind for scheme in plan.keys._by_scheme})

    assert decided() == ([*one.ranks, *two.ranks], ["sglang-sha256"])
    core.fleet.hold(one, Hold("draining", "going"))
    assert decided()[0] == [*two.ranks]
    core.fleet.hold(one, None)
    assert one.info is not None
    before = one.ranks
    core.fleet._described(one, replace(one.info, startup_fingerprint="another process"))
    core.fleet._settle(one)
    assert one.ranks != before
    assert decided()[0] == [*one.ranks, *two.ranks]
    assert two.scheme is not None
    two.scheme.saw_root(False, True, False, False)  # a root that is not SGLang's chain
    assert decided() == ([*one.ranks, *two.ranks], ["sglang-sha256", "xxh3"])
