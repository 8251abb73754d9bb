"""Names of workers become the addresses Envoy knows."""

from __future__ import annotations

import asyncio

from router.contract.url import WorkerUrl
from router.envoy.addresses import RENEW_S, AddressBook


class Resolver:
    def __init__(self, **names: list[str]) -> None:
        self.names = names
        self.asked: list[str] = []
        self.fails = False
        self.now_s = 0.0
        self.book = AddressBook(clock=lambda: self.now_s, resolve=self)

    async def __call__(self, name: str) -> list[str]:
        self.asked.append(name)
        if self.fails:
            raise OSError("no resolver")
        return self.names.get(name, [])


def url(text: str) -> WorkerUrl:
    return WorkerUrl.parse(text)


def test_an_address_is_given_as_it_stands_and_nobody_is_asked() -> None:
    resolver = Resolver()
    assert resolver.book.known(url("http://10.0.0.1:30000")) == "10.0.0.1:30000"
    assert resolver.book.known(url("http://[2001:db8::1]:30000")) == "[2001:db8::1]:30000"
    assert resolver.asked == []


async def test_a_name_is_asked_for_once_and_then_known() -> None:
    resolver = Resolver(engine=["10.0.0.1"])
    assert resolver.book.known(url("http://engine:1")) is None
    assert await resolver.book.find(url("http://engine:1")) == "10.0.0.1:1"
    assert await resolver.book.find(url("http://engine:2")) == "10.0.0.1:2"
    assert resolver.asked == ["engine"]


async def test_many_requests_at_once_ask_for_a_name_once_and_one_that_leaves_takes_no_answer_away() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(Resolver):
        async def __call__(self, name: str) -> list[str]:
            found = await super().__call__(name)
            asked.set()
            await answer.wait()
            return found

    resolver = Slow(engine=["10.0.0.1"])
    first, *others = [asyncio.create_task(resolver.book.find(url("http://engine:1"))) for _ in range(50)]
    await asked.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    answer.set()
    assert await asyncio.gather(*others) == ["10.0.0.1:1"] * 49
    assert resolver.asked == ["engine"]


async def test_a_name_without_an_address_is_no_destination() -> None:
    resolver = Resolver()
    assert await resolver.book.find(url("http://engine:1")) is None
    resolver.fails = True
    assert await resolver.book.find(url("http://engine:1")) is None


async def test_a_name_is_renewed_when_its_answer_is_old_and_kept_while_the_resolver_fails() -> None:
    resolver = Resolver(engine=["10.0.0.1"])
    urls = [url("http://engine:1")]
    await resolver.book.renew(urls)
    resolver.names["engine"] = ["10.0.0.2"]
    resolver.now_s = RENEW_S / 2
    await resolver.book.renew(urls)
    assert resolver.book.known(urls[0]) == "10.0.0.1:1"
    resolver.now_s = RENEW_S
    await resolver.book.renew(urls)
    assert resolver.book.known(urls[0]) == "10.0.0.2:1"
    resolver.fails = True
    resolver.now_s = 3 * RENEW_S
    await resolver.book.renew(urls)
    assert (resolver.book.known(urls[0]), len(resolver.asked)) == ("10.0.0.2:1", 3)


async def test_of_several_addresses_the_one_in_use_stays() -> None:
    resolver = Resolver(engine=["10.0.0.1", "10.0.0.2"])
    await resolver.book.renew([url("http://engine:1")])
    resolver.names["engine"] = ["10.0.0.2", "10.0.0.1"]
    resolver.now_s = RENEW_S
    await resolver.book.renew([url("http://engine:1")])
    assert resolver.book.known(url("http://engine:1")) == "10.0.0.1:1"


async def test_hosts_that_left_the_fleet_are_forgotten() -> None:
    resolver = Resolver(engine=["10.0.0.1"])
    await asyncio.gather(resolver.book.renew([url("http://engine:1"), url("http://10.0.0.9:1")]))
    await resolver.book.renew([url("http://10.0.0.8:1")])
    assert resolver.book.known(url("http://engine:1")) is None
    assert resolver.book._addresses.keys() <= {"10.0.0.8"}
