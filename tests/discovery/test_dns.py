"""Addresses of names, with the answers scripted: the system's resolver cannot be pointed at a test's server."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest

from router.config import DnsConfig
from router.fleet.discovery.base import Membership
from router.fleet.discovery.dns import FORGET_LOOKS, DnsDiscovery, system_resolve
from router.fleet.registry import Fleet
from tests.discovery.conftest import Seen
from tests.support.waiting import until

MakeFleet = Callable[..., Fleet]


class Names:
    """Scripted answers: addresses, or what the resolver raises."""

    def __init__(self, **answers: list[str] | Exception) -> None:
        self.answers: dict[str, list[str] | Exception] = dict(answers)

    async def __call__(self, name: str) -> list[str]:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Case:
    def __init__(self, fleet: Fleet, names: Names, seen: Seen, **config: object) -> None:
        self.fleet = fleet
        settings = DnsConfig(**{"names": tuple(names.answers), **config})  # type: ignore[arg-type]
        self.discovery = DnsDiscovery(settings, Membership(fleet, "dns", seen), rng=random.Random(1), resolve=names)

    async def look(self, times: int = 1) -> list[str]:
        for _ in range(times):
            await self.discovery.look()
        return sorted(worker.url.text for worker in self.fleet.workers)


async def test_every_address_of_every_name_with_every_port_is_a_worker(make_fleet: MakeFleet, seen: Seen) -> None:
    case = Case(make_fleet(), Names(a=["127.9.0.1", "127.9.0.2", "127.9.0.1"], b=["127.9.0.2"]), seen, ports=(1, 2))
    assert await case.look() == [f"http://127.9.0.{host}:{port}" for host in (1, 2) for port in (1, 2)]
    assert case.fleet.describe()[0]["identity"] == "dns a"
    assert seen.synced[-1] == ("dns", 4)


async def test_an_address_leaves_after_three_answers_without_it(make_fleet: MakeFleet, seen: Seen) -> None:
    """Resolvers give partial answers; a worker that is really gone is out by its health meanwhile."""
    names = Names(a=["127.9.0.1", "127.9.0.2"])
    case = Case(make_fleet(), names, seen)
    await case.look()
    names.answers["a"] = ["127.9.0.2"]
    assert len(await case.look(FORGET_LOOKS - 1)) == 2
    names.answers["a"] = ["127.9.0.1", "127.9.0.2"]
    await case.look()
    names.answers["a"] = []
    assert len(await case.look(FORGET_LOOKS - 1)) == 2, "seen again in between: the count starts anew"
    assert await case.look() == []


@pytest.mark.parametrize("trouble", [socket.gaierror(socket.EAI_AGAIN, "try again"), TimeoutError(), UnicodeError()])
async def test_a_resolver_that_fails_costs_no_worker(trouble: Exception, make_fleet: MakeFleet, seen: Seen) -> None:
    """Case 108, in DNS: no answer is not the answer "none"."""
    names = Names(a=["127.9.0.1"], b=["127.9.0.2"])
    case = Case(make_fleet(), names, seen)
    await case.look()
    names.answers["a"] = trouble
    names.answers["b"] = ["127.9.0.3", "127.9.0.2"]
    found = await case.look(FORGET_LOOKS + 1)
    assert found == ["http://127.9.0.1:30000", "http://127.9.0.2:30000", "http://127.9.0.3:30000"]
    assert seen.failures == FORGET_LOOKS + 1


@pytest.mark.parametrize(
    ("family", "found"),
    [("auto", ["http://127.9.0.1:30000"]), ("ipv6", ["http://[::1]:30000"]), ("ipv4", ["http://127.9.0.1:30000"])],
)
async def test_a_dual_stack_engine_is_one_worker(
    family: str, found: list[str], make_fleet: MakeFleet, seen: Seen
) -> None:
    """Case 109."""
    assert await Case(make_fleet(), Names(a=["::1", "127.9.0.1"]), seen, ip_family=family).look() == found


async def test_addresses_where_no_engine_is_dialled_are_skipped(make_fleet: MakeFleet, seen: Seen) -> None:
    """Case 102."""
    case = Case(make_fleet(), Names(a=["169.254.169.254", "0.0.0.0", "127.9.0.1"]), seen)
    assert await case.look() == ["http://127.9.0.1:30000"]


async def test_the_systems_resolver_finds_localhost() -> None:
    assert "127.0.0.1" in await system_resolve("localhost")


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_that_does_not_exist_has_no_address_and_another_failure_is_one(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A headless service without a ready pod has no name."""

    async def refuse(*arguments: object, **more: object) -> None:
        raise failure

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", refuse)
    failure = socket.gaierror(code, "no address")
    assert await system_resolve("a") == []
    failure = socket.gaierror(socket.EAI_AGAIN, "try again")
    with pytest.raises(socket.gaierror):
        await system_resolve("a")


async def test_looks_go_on_until_cancelled(make_fleet: MakeFleet, seen: Seen) -> None:
    names = Names(a=["127.9.0.1"])
    case = Case(make_fleet(), names, seen, interval_s=0.1)
    task = asyncio.create_task(case.discovery.run())
    names.answers["a"] = ["127.9.0.1", "127.9.0.2"]
    await until(lambda: len(case.fleet.workers) == 2, "the second address")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
