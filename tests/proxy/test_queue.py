"""Room on workers: limits, the line of those who wait, and its ends."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, cast

import pytest

from router.errors import RouterError
from router.proxy.plan import NoRoom, Outcome, Placement
from router.proxy.queue import QueueOptions, WaitQueue
from router.proxy.server import ListenerOptions
from tests.proxy.fakes import Bench, bench, every_way, unpooled  # noqa: F401
from tests.support.http import RawClient, Reply, Seen, fetch, post
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("every_way")


def waiting(most: int = 10, wait_s: float = 20.0, priority_header: str | None = None) -> ListenerOptions:
    return ListenerOptions(port=0, queue=QueueOptions(most, wait_s), priority_header=priority_header)


class Gate:
    """Every worker answers with its request's body, once for each `let_one`."""

    def __init__(self, b: Bench) -> None:
        self.open = asyncio.Semaphore(0)
        for worker in b.workers:
            worker.script = self.answer

    async def answer(self, seen: Seen, reply: Reply) -> None:
        await self.open.acquire()
        await reply.whole(200, seen.body)


async def sent(b: Bench, body: bytes, fields: str = "") -> RawClient:
    """A request that is placed or waits when this returns."""
    before = len(b.core.placements) + b.listener.waiting
    client = await RawClient.to(b.port)
    await client.send(post(body=body, fields=fields))
    await until(lambda: len(b.core.placements) + b.listener.waiting > before, "placed or waiting")
    return client


def bodies(b: Bench) -> list[bytes]:
    return [placement.body for placement in b.core.placements]


async def test_requests_over_the_limit_wait_and_are_served_in_the_order_they_came() -> None:
    async with bench(workers=2, options=waiting()) as b:
        b.core.limit = 1
        b.core.pool = lambda plan: "one line"  # type: ignore[method-assign]
        gate = Gate(b)
        clients = [await sent(b, b'{"n":%d}' % n) for n in range(6)]
        assert (len(b.core.placements), b.listener.waiting) == (2, 4)
        for _ in clients:
            gate.open.release()
        answers = [await client.answer() for client in clients]
        assert [answer.body for answer in answers] == [b'{"n":%d}' % n for n in range(6)]
        assert bodies(b) == [b'{"n":%d}' % n for n in range(6)]
        assert b.listener.waiting == 0
        queued = [record.queued_s is not None for record in sorted(b.core.records, key=lambda r: r.request_id)]
        assert sum(queued) == 4
        for client in clients:
            client.leave()


async def test_never_more_than_the_limit_is_in_flight_under_a_crowd() -> None:
    async with bench(workers=2, options=waiting(most=100)) as b:
        b.core.limit = 3
        most = 0

        async def script(seen: Seen, reply: Reply) -> None:
            nonlocal most
            most = max(most, sum(not p.ends for p in b.core.placements))
            await asyncio.sleep(0)
            await reply.whole()

        for worker in b.workers:
            worker.script = script
        answers = await asyncio.gather(*(fetch(b.port, post()) for _ in range(60)))
        assert {answer.status for answer in answers} == {200}
        assert most == 6


async def test_one_more_than_may_wait_is_refused_at_once() -> None:
    async with bench(options=waiting(most=1)) as b:
        b.core.limit = 1
        gate = Gate(b)
        clients = [await sent(b, b'{"n":%d}' % n) for n in range(2)]
        refused = await fetch(b.port, post())
        assert (refused.status, refused.one("x-kv-router-error"), refused.one("retry-after")) == (
            429,
            "queue_full",
            "1",
        )
        gate.open.release()
        gate.open.release()
        assert [(await client.answer()).status for client in clients] == [200, 200]
        assert b.core.records[0].outcome is Outcome.REJECTED


async def test_without_a_line_the_limit_refuses() -> None:
    async with bench() as b:
        b.core.limit = 1
        gate = Gate(b)
        client = await sent(b, b"{}")
        assert (await fetch(b.port, post())).status == 429
        gate.open.release()
        assert (await client.answer()).status == 200


async def test_who_waits_too_long_is_told_to_come_back() -> None:
    async with bench(options=waiting(wait_s=0.2)) as b:
        b.core.limit = 1
        gate = Gate(b)
        client = await sent(b, b"{}")
        late = await fetch(b.port, post())
        assert (late.status, late.one("x-kv-router-error"), late.one("retry-after")) == (503, "queue_timeout", "1")
        gate.open.release()
        assert (await client.answer()).status == 200
        gate.open.release()
        assert (await fetch(b.port, post())).status == 200


async def test_a_client_that_leaves_the_line_is_skipped_and_holds_nothing() -> None:
    """Cases 55 and 64: also when it leaves in the very turn in which room became free."""
    async with bench(options=waiting()) as b:
        b.core.limit = 1
        gate = Gate(b)
        first, second, third = [await sent(b, b'{"n":%d}' % n) for n in range(3)]
        second.leave()
        await until(lambda: Outcome.CLIENT_CLOSED in b.core.outcomes, "seen to have left")
        assert b.listener.waiting == 1
        gate.open.release()
        gate.open.release()
        assert [(await client.answer()).body for client in (first, third)] == [b'{"n":0}', b'{"n":2}']


async def test_leaving_while_being_placed_gives_the_room_back() -> None:
    async with bench(options=waiting()) as b:
        b.core.limit = 1
        b.core.pool = lambda plan: "one line"  # type: ignore[method-assign]
        assert b.listener._forwarder is not None
        queue = b.listener._forwarder._queue
        held = b.core.place(b"held", frozenset())
        waiter = asyncio.ensure_future(queue.wait(b"leaver", frozenset(), 0))
        heir = asyncio.ensure_future(queue.wait(b"heir", frozenset(), 0))
        await until(lambda: queue.waiting == 2, "both wait")
        held.finish(Outcome.OK)
        queue.released()  # the leaver is placed here …
        waiter.cancel()  # … and cancelled before it runs
        placement = await asyncio.wait_for(heir, 5)
        assert [p.ends[0][0] for p in b.core.placements if p.ends] == [Outcome.OK, Outcome.CLIENT_CLOSED]
        placement.finish(Outcome.OK)
        assert waiter.cancelled()


async def test_a_larger_priority_goes_first_and_nonsense_counts_as_none() -> None:
    async with bench(options=waiting(priority_header="x-priority")) as b:
        b.core.limit = 1
        b.core.pool = lambda plan: "one line"  # type: ignore[method-assign]
        gate = Gate(b)
        asked = [(0, ""), (1, "x-priority: -5\r\n"), (2, "x-priority: zzz\r\n"), (3, "x-priority: 7\r\n"), (4, "")]
        clients = [await sent(b, b'{"n":%d}' % n, fields) for n, fields in asked]
        for _ in clients:
            gate.open.release()
        for client in clients:
            assert (await client.answer()).status == 200
        assert bodies(b) == [b'{"n":%d}' % n for n in (0, 3, 2, 4, 1)]


async def test_lines_of_different_pools_do_not_block_each_other() -> None:
    async with bench(workers=2, options=waiting()) as b:
        gate = Gate(b)
        full = {b'{"m":"a"}': True, b'{"m":"b"}': True}
        place = b.core.place

        def choosy(plan: bytes, tried: frozenset[str]) -> object:
            if full[plan]:
                raise NoRoom()
            return place(plan, tried)

        b.core.place = choosy  # type: ignore[method-assign,assignment]
        a = await sent(b, b'{"m":"a"}')
        other = await sent(b, b'{"m":"b"}')
        full[b'{"m":"b"}'] = False  # nobody tells the line: it looks by itself
        gate.open.release()
        assert (await other.answer()).status == 200
        assert b.listener.waiting == 1
        full[b'{"m":"a"}'] = False
        gate.open.release()
        assert (await a.answer()).status == 200


async def test_who_waits_for_workers_that_all_go_away_is_told_so() -> None:
    async with bench(options=waiting()) as b:
        b.core.limit = 1
        gate = Gate(b)
        first = await sent(b, b"{}")
        second = await sent(b, b"{}")
        urls, b.core.urls = b.core.urls, []
        answer = await second.answer()
        assert (answer.status, answer.one("x-kv-router-error")) == (503, "no_worker")
        b.core.urls = urls
        gate.open.release()
        assert (await first.answer()).status == 200


async def test_a_second_try_does_not_wait_in_line() -> None:
    """The first worker's 429 is passed on rather than held back until another has room."""
    async with bench(workers=2, options=waiting()) as b:
        b.core.limit = 1

        async def busy(seen: Seen, reply: Reply) -> None:
            await reply.whole(429, b"busy")

        b.worker.script = busy
        placement = b.core.place(b"x", frozenset({b.core.urls[0].text}))
        answer = await fetch(b.port, post())
        assert (answer.status, answer.body) == (429, b"busy")
        placement.finish(Outcome.OK)


@pytest.mark.usefixtures("unpooled")
async def test_after_a_connect_failure_the_request_waits_for_the_others() -> None:
    """Nothing of it was sent yet, so it goes on as if the dead worker were not there."""
    async with bench(workers=2, options=waiting()) as b:
        b.core.limit = 1
        gate = Gate(b)
        await b.worker.stop_listening()
        held = b.core.place(b"x", frozenset({b.core.urls[0].text}))
        client = await RawClient.to(b.port)
        await client.send(post())
        await until(lambda: b.listener.waiting == 1, "waits for the second")
        held.finish(Outcome.OK)
        gate.open.release()
        assert (await client.answer()).status == 200
        assert [p.url for p in b.core.placements] == [b.core.urls[1], b.core.urls[0], b.core.urls[1]]


async def test_a_fault_while_placing_reaches_the_one_who_waits() -> None:
    async with bench(options=waiting()) as b:
        b.core.limit = 1
        gate = Gate(b)
        first, second = await sent(b, b"{}"), await sent(b, b"{}")

        def broken(plan: bytes, tried: frozenset[str]) -> object:
            raise RouterError("bad_request", "no such rank")

        b.core.place = broken  # type: ignore[method-assign,assignment]
        assert (await second.answer()).status == 400
        gate.open.release()
        assert (await first.answer()).status == 200


async def test_a_plan_whose_client_left_is_not_kept_behind_one_that_waits() -> None:
    class Full:
        def place(self, plan: object, tried: frozenset[str]) -> Placement:
            raise NoRoom()

        def pool(self, plan: object) -> str:
            return "one line"

    class Plan:
        pass

    queue = WaitQueue[Any](cast(Any, Full()), QueueOptions(max_waiting=10, wait_s=60.0))
    first, later = Plan(), Plan()
    gone = weakref.ref(later)
    stays = asyncio.ensure_future(queue.wait(first, frozenset(), 1))
    leaves = asyncio.ensure_future(queue.wait(later, frozenset(), 0))
    await until(lambda: queue.waiting == 2, "both wait")
    del later
    leaves.cancel()
    await asyncio.wait((leaves,))
    del leaves  # it knows the frame in which it was cancelled
    await until(lambda: gone() is None, "its plan is dropped")
    assert queue.waiting == 1
    assert not stays.done()
    stays.cancel()
    await asyncio.wait((stays,))
