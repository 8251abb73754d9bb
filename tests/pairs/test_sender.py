"""The two requests of a pair on scripted workers: what each is sent, in what order, and what the client sees."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from router.errors import RouterError
from router.pairs.dialects import DIALECTS, Dialect, Meeting
from router.proxy.attempt import Incoming
from router.proxy.connection import UpstreamConnectError, UpstreamError, UpstreamReset
from router.proxy.pair import PairResponse, PairSender
from router.proxy.plan import Fault, Origin, Outcome, Usage
from router.proxy.prefill_leg import Refusal
from router.proxy.upstream import UpstreamClient, UpstreamLimits, UpstreamResponse
from tests.proxy.fakes import Url
from tests.support.built import interpreted
from tests.support.http import HOST, Reply, ScriptedWorker, Seen
from tests.support.waiting import until

BODY = b'{"model":"m","prompt":"hi","stream":true}'
PREFILLED = b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}'


@dataclass
class Leg:
    url: Origin
    body: bytes
    authorization: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ends: list[tuple[Outcome, Fault | None, int | None, Usage | None]] = field(default_factory=list)

    def take_body(self) -> bytes:
        return self.body

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        if not self.ends:
            self.ends.append((outcome, fault, status, usage))


class FakePair:
    """Of two scripted workers."""

    def __init__(self, prefill: Url, decode: Url, dialect: Dialect, meet_s: float = 5.0, linger_s: float = 5.0) -> None:
        self.prefill = Leg(prefill, dialect.prefill(BODY))
        self.url: Origin = decode
        self.together = dialect.together
        self.meet_s, self.linger_s = meet_s, linger_s
        self.authorization = b"Bearer of-decode"
        self.headers = ((b"x-data-parallel-rank", b"3"),)
        self.body = b""
        self.route_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.to_avoid: tuple[str, ...] = ()
        self._dialect = dialect

    @property
    def pair(self) -> FakePair:
        return self

    def decode_body(self, answer: bytes) -> bytes:
        return self._dialect.decode(BODY, answer)

    def first_byte(self) -> None: ...
    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None: ...


class Collected:
    def __init__(self) -> None:
        self.data = b""
        self.ended = False

    def write(self, data: bytes) -> None:
        self.data += data

    def end(self, data: bytes) -> None:
        self.data += data
        self.ended = True


class Stage:
    """Two workers, a sender, and a gate each script can wait at."""

    def __init__(self, prefill: ScriptedWorker, decode: ScriptedWorker, upstream: UpstreamClient) -> None:
        self.prefill, self.decode, self.upstream = prefill, decode, upstream
        self.released = 0
        self.sender = PairSender(upstream, released=self._released)
        self.go = asyncio.Event()

    def _released(self) -> None:
        self.released += 1

    def pair(self, dialect: str = "sglang", **times: float) -> FakePair:
        made = DIALECTS[dialect](Meeting("10.0.0.7", 8998), random.Random(4))
        return FakePair(Url(HOST, self.prefill.port), Url(HOST, self.decode.port), made, **times)

    async def send(self, pair: FakePair) -> PairResponse | Refusal | UpstreamResponse:
        asked = Incoming("/v1/completions", b"/v1/completions", {}, [(b"Accept", b"*/*")], BODY, "id-1")
        return await self.sender.send(pair, asked)

    async def settled(self) -> None:
        await until(lambda: self.sender.legs == 0, "every prefill leg ended")
        await until(lambda: self.upstream.open_connections == self.upstream.idle_connections, "no connection is in use")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    prefill, decode = await ScriptedWorker().start(), await ScriptedWorker().start()
    upstream = UpstreamClient(UpstreamLimits(connect_s=2, idle_s=30))
    yield Stage(prefill, decode, upstream)
    await upstream.close()
    await prefill.close()
    await decode.close()


async def prefilled(seen: Seen, reply: Reply) -> None:
    await reply.whole(200, PREFILLED)


async def streamed(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    await reply.chunk(b"data: one\n\n")
    await reply.chunk(b"data: [DONE]\n\n")
    await reply.end_stream()


async def test_both_sglang_legs_are_under_way_at_once_and_each_has_its_own_head(stage: Stage) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        await until(lambda: bool(stage.decode.requests), "the decode leg is there as well")
        await prefilled(seen, reply)

    async def decode(seen: Seen, reply: Reply) -> None:
        await until(lambda: bool(stage.prefill.requests), "the prefill leg is there as well")
        await streamed(seen, reply)

    stage.prefill.script, stage.decode.script = prefill, decode
    pair = stage.pair()
    response = await stage.send(pair)
    sink = Collected()
    await response.pipe(sink)
    response.close()
    assert (sink.data, sink.ended) == (b"data: one\n\ndata: [DONE]\n\n", True)
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.OK, None, 200, Usage(9, 4, 1))]
    one, other = stage.prefill.requests[0], stage.decode.requests[0]
    assert (one.one("authorization"), other.one("authorization")) == (None, "Bearer of-decode")
    assert (one.one("x-data-parallel-rank"), other.one("x-data-parallel-rank")) == (None, "3")
    assert one.one("x-request-id") == other.one("x-request-id") == "id-1"
    assert json.loads(one.body)["bootstrap_room"] == json.loads(other.body)["bootstrap_room"]
    assert (json.loads(one.body)["stream"], json.loads(other.body)["stream"]) == (False, True)
    assert stage.released == 1


async def test_the_vllm_decode_leg_is_made_from_the_prefill_legs_answer(stage: Stage) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        assert stage.decode.requests == []
        await reply.whole(200, PREFILLED[:-1] + b',"kv_transfer_params":{"remote_block_ids":[1,2]}}')

    stage.prefill.script, stage.decode.script = prefill, streamed
    response = await stage.send(stage.pair("vllm"))
    response.close()
    assert json.loads(stage.prefill.requests[0].body)["max_tokens"] == 1
    assert json.loads(stage.decode.requests[0].body)["kv_transfer_params"] == {"remote_block_ids": [1, 2]}
    await stage.settled()


async def test_a_vllm_prefill_answer_without_blocks_is_a_clear_error_and_nothing_is_decoded(stage: Stage) -> None:
    stage.prefill.script = prefilled
    with pytest.raises(UpstreamError, match="kv_transfer_params"):
        await stage.send(stage.pair("vllm"))
    assert stage.decode.requests == []
    await stage.settled()


async def test_nothing_reaches_the_client_before_the_decode_engines_first_byte(stage: Stage) -> None:
    """A head alone is no answer: until the first byte a prefill failure can still be told as an error."""

    async def decode(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        stage.go.set()
        await reply.gone()

    async def prefill(seen: Seen, reply: Reply) -> None:
        await stage.go.wait()
        await reply.whole(500, b'{"message":"the transfer failed"}')

    stage.prefill.script, stage.decode.script = prefill, decode
    pair = stage.pair()
    response = await stage.send(pair)
    assert isinstance(response, Refusal)
    sink = Collected()
    await response.pipe(sink)
    assert (response.status, sink.data) == (500, b'{"message":"the transfer failed"}')
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.UPSTREAM_ERROR, "http_500", 500, None)]


async def test_a_prefill_failure_after_the_first_byte_ends_nothing(stage: Stage) -> None:
    """The prompt is handed over: a prefill engine that dies now costs this client nothing."""
    pair = stage.pair()

    async def decode(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.chunk(b"data: one\n\n")
        await until(lambda: bool(pair.prefill.ends), "the prefill leg failed")
        await reply.chunk(b"data: [DONE]\n\n")
        await reply.end_stream()

    async def prefill(seen: Seen, reply: Reply) -> None:
        await stage.go.wait()
        reply.reset()

    stage.prefill.script, stage.decode.script = prefill, decode
    response = await stage.send(pair)
    stage.go.set()
    sink = Collected()
    await response.pipe(sink)
    response.close()
    assert (sink.data, sink.ended) == (b"data: one\n\ndata: [DONE]\n\n", True)
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.UPSTREAM_ERROR, "reset", None, None)]


@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_an_error_of_the_prefill_engine_is_passed_on_as_it_is_and_the_decode_leg_is_cut(
    stage: Stage, status: int
) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        await reply.whole(status, b'{"message":"no"}', "Retry-After: 3\r\n")

    async def decode(seen: Seen, reply: Reply) -> None:
        await reply.gone()
        stage.go.set()

    stage.prefill.script, stage.decode.script = prefill, decode
    pair = stage.pair()
    response = await stage.send(pair)
    assert (response.status, (b"Retry-After", b"3") in response.headers) == (status, True)
    assert pair.prefill.ends == [(Outcome.REJECTED, None, status, None)]
    await asyncio.wait_for(stage.go.wait(), 5)
    await stage.settled()


async def test_an_error_of_the_decode_engine_cuts_the_prefill_leg(stage: Stage) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        await reply.gone()
        stage.go.set()

    async def decode(seen: Seen, reply: Reply) -> None:
        await until(lambda: bool(stage.prefill.requests), "the prefill leg is there")
        await reply.whole(400, b'{"message":"no"}')

    stage.prefill.script, stage.decode.script = prefill, decode
    pair = stage.pair()
    response = await stage.send(pair)
    assert response.status == 400
    await asyncio.wait_for(stage.go.wait(), 5)
    response.close()
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.CLIENT_CLOSED, None, None, None)]


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_connect_failure_of_either_leg_is_one_and_the_other_leg_is_cut(stage: Stage, half: str) -> None:
    async def waits(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    stage.prefill.script = stage.decode.script = waits
    pair = stage.pair()
    dead = await ScriptedWorker().start()
    port = dead.port
    await dead.close()
    if half == "prefill":
        pair.prefill.url = Url(HOST, port)
    else:
        pair.url = Url(HOST, port)
    with pytest.raises(UpstreamConnectError):
        await stage.send(pair)
    await stage.settled()
    assert len(pair.prefill.ends) == 1


async def test_legs_that_never_meet_end_both_with_their_own_code(stage: Stage) -> None:
    async def waits(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    stage.prefill.script = stage.decode.script = waits
    with pytest.raises(RouterError) as raised:
        await stage.send(stage.pair(meet_s=0.2))
    assert (raised.value.code, raised.value.status) == ("pair_timeout", 504)
    await stage.settled()


async def test_a_client_that_leaves_cuts_the_decode_leg_and_not_the_prefill_leg(stage: Stage) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        await stage.go.wait()
        await prefilled(seen, reply)

    left = asyncio.Event()

    async def decode(seen: Seen, reply: Reply) -> None:
        await reply.gone()
        left.set()

    stage.prefill.script, stage.decode.script = prefill, decode
    pair = stage.pair()
    sending = asyncio.create_task(stage.send(pair))
    await until(lambda: bool(stage.prefill.requests and stage.decode.requests), "both legs are under way")
    sending.cancel()
    await asyncio.wait_for(left.wait(), 5)
    assert (stage.sender.legs, stage.prefill.open, pair.prefill.ends) == (1, 1, [])
    stage.go.set()
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.OK, None, 200, Usage(9, 4, 1))]


async def test_a_prefill_leg_without_a_client_is_cut_when_its_time_is_over(stage: Stage) -> None:
    async def waits(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    stage.prefill.script = stage.decode.script = waits
    pair = stage.pair(linger_s=0.2)
    sending = asyncio.create_task(stage.send(pair))
    await until(lambda: bool(stage.prefill.requests and stage.decode.requests), "both legs are under way")
    sending.cancel()
    await stage.settled()
    assert pair.prefill.ends == [(Outcome.CLIENT_CLOSED, None, None, None)]


async def test_a_send_cancelled_before_its_first_step_leaves_nothing(stage: Stage) -> None:
    pair = stage.pair(linger_s=0.0)
    sending = asyncio.create_task(stage.send(pair))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await stage.settled()
    assert [outcome for outcome, *_ in pair.prefill.ends] == [Outcome.CLIENT_CLOSED]


@interpreted
async def test_a_client_that_leaves_while_the_decode_leg_is_withdrawn_is_heard() -> None:
    """Its cancellation is not mistaken for the one of the decode leg: nobody would end its connection's task."""
    clients: list[asyncio.Task[object]] = []

    class Upstream(UpstreamClient):
        async def send(
            self, origin: Origin, method: bytes, target: bytes, headers: object, body: bytes
        ) -> UpstreamResponse:
            if origin.port == 1:
                raise UpstreamReset("the prefill engine went away")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                clients[0].cancel()
            raise AssertionError

    upstream = Upstream()
    dialect = DIALECTS["sglang"](Meeting("10.0.0.7", 8998), random.Random(4))
    asked = Incoming("/v1/completions", b"/v1/completions", {}, [], BODY, "id-1")

    async def client() -> object:
        with suppress(UpstreamReset):
            await PairSender(upstream, released=lambda: None).send(FakePair(Url(HOST, 1), Url(HOST, 2), dialect), asked)
        await asyncio.sleep(0)
        return "went on without its client"

    clients.append(asyncio.create_task(client()))
    (ended,) = await asyncio.gather(*clients, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    await upstream.close()


async def test_an_endless_prefill_answer_is_read_and_not_kept(stage: Stage) -> None:
    async def prefill(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for _ in range(200):
            await reply.chunk(b"x" * 65_536)
        await reply.end_stream()

    stage.prefill.script, stage.decode.script = prefill, streamed
    pair = stage.pair()
    response = await stage.send(pair)
    response.close()
    await stage.settled()
    assert [outcome for outcome, *_ in pair.prefill.ends] == [Outcome.OK]
