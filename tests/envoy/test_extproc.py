"""ext_proc over gRPC: the endpoint picker protocol of the Gateway API Inference Extension, from Envoy's side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

from router.envoy.exchange import PIECE_BYTES  # noqa: E402
from router.envoy.messages import (  # noqa: E402
    BUFFERED,
    FULL_DUPLEX,
    NO_BODY,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    Message,
    ProcessingRequest,
    ProcessingResponse,
)
from router.proxy.plan import RequestRecord  # noqa: E402
from tests.e2e.conftest import Running  # noqa: E402
from tests.envoy.conftest import Pickers, StartEngine  # noqa: E402
from tests.support.engine import FakeEngine, stored  # noqa: E402

PROMPT = list(range(1, 42))


def body_of(prompt: object = PROMPT, **more: object) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt, **more}).encode()


class Stream:
    """One request as Envoy tells of it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def head(
        self,
        mode: int,
        path: str = "/v1/completions",
        *,
        last: bool = False,
        among: list[str] | None = None,
        method: str = "POST",
        answer_mode: int = 0,
        **fields: str,
    ) -> None:
        message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=last))
        for name, value in {":method": method, ":path": path, "x-request-id": "r-1", **fields}.items():
            message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = answer_mode
        if among is not None:
            hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value
            hint.get_or_create_list("x-gateway-destination-endpoint-subset").extend(among)
        await self._call.write(message)

    async def body(self, *pieces: bytes, last: bool = True) -> None:
        for number, piece in enumerate(pieces, 1):
            await self.tell(request_body=HttpBody(body=piece, end_of_stream=last and number == len(pieces)))

    async def tell(self, **message: Any) -> None:
        await self._call.write(ProcessingRequest(**message))

    async def answer(self) -> Message:
        found = await asyncio.wait_for(self._call.read(), 10)
        assert isinstance(found, ProcessingResponse), "the stream has ended"
        return found

    async def refused(self) -> tuple[int, str]:
        """(status, code) of an immediate response, after which the stream ends."""
        answer = await self.answer()
        assert answer.WhichOneof("response") == "immediate_response", answer
        found = answer.immediate_response
        code = json.loads(found.body)["error"]["code"]
        fields = {one.header.key: one.header.raw_value for one in found.headers.set_headers}
        assert (fields["x-kv-router-error"], fields["content-type"]) == (code.encode(), b"application/json")
        assert await asyncio.wait_for(self._call.read(), 10) is grpc.aio.EOF
        return found.status.code, code

    async def end(self) -> None:
        await self._call.done_writing()
        assert await asyncio.wait_for(self._call.read(), 10) is grpc.aio.EOF


@asynccontextmanager
async def asking(running: Running) -> Any:
    assert running.service.envoy is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.service.envoy.ports['ext_proc']}") as channel:

        def stream() -> Stream:
            name = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
            return Stream(
                channel.stream_stream(name, ProcessingRequest.SerializeToString, ProcessingResponse.FromString)()
            )

        stream.channel = channel  # type: ignore[attr-defined]
        yield stream


def fields_of(answer: ProcessingResponse) -> dict[str, str]:
    part = answer.request_headers if answer.HasField("request_headers") else answer.request_body
    found = {one.header.key: one.header.raw_value.decode() for one in part.response.header_mutation.set_headers}
    assert all(one.append_action == 2 for one in part.response.header_mutation.set_headers)
    return found


def destination(answer: ProcessingResponse) -> list[str]:
    """The endpoints, the same in the header field and in the dynamic metadata."""
    told: str = fields_of(answer)["x-gateway-destination-endpoint"]
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == told
    return told.split(",")


def given_back(answers: Iterable[ProcessingResponse]) -> tuple[bytes, list[bool]]:
    parts = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    assert all(len(part.body) <= PIECE_BYTES for part in parts)
    return b"".join(part.body for part in parts), [part.end_of_stream for part in parts]


def at(*engines: FakeEngine) -> list[str]:
    return [f"127.0.0.1:{engine.port}" for engine in engines]


@pytest.fixture
async def records(monkeypatch: pytest.MonkeyPatch) -> list[RequestRecord]:
    """Every request the router reports as done."""
    from router.core import RoutingCore

    seen: list[RequestRecord] = []
    done = RoutingCore.request_done

    def note(core: RoutingCore, record: RequestRecord) -> None:
        seen.append(record)
        done(core, record)

    monkeypatch.setattr(RoutingCore, "request_done", note)
    return seen


async def test_a_buffered_body_is_answered_with_destination_and_fallbacks(
    fake_engine: StartEngine, pickers: Pickers, records: list[RequestRecord]
) -> None:
    engines = [await fake_engine() for _ in range(3)]
    running = await pickers(*engines)
    engines[2].publish(stored([101, 102], PROMPT[:8], 4))

    async def credited() -> bool:
        return await running.credit(PROMPT, engines[2].url) == 8

    await running.until(credited, "the prefix is known")
    async with asking(running) as stream:
        one = stream()
        await one.head(BUFFERED)
        assert (await one.answer()).request_headers.ByteSize() == 0
        await one.body(body_of())
        answer = await one.answer()
        assert destination(answer)[0] == at(engines[2])[0]
        assert sorted(destination(answer)) == sorted(at(*engines))
        assert not answer.request_body.response.HasField("body_mutation")
        await one.end()
    (record,) = records
    assert (record.request_id, record.route, record.outcome, record.worker) == (
        "r-1",
        "/v1/completions",
        "ok",
        engines[2].url,
    )


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
async def test_a_streamed_body_is_held_to_its_end_and_given_back_unchanged(
    size: int, fake_engine: StartEngine, pickers: Pickers
) -> None:
    engine = await fake_engine()
    async with asking(await pickers(engine)) as stream:
        one = stream()
        await one.head(FULL_DUPLEX)
        sent = body_of(user="x" * size)
        pieces = [sent[at : at + 40_000] for at in range(0, len(sent), 40_000)]
        await one.body(*pieces, b"")  # the end comes in an empty piece of its own
        answer = await one.answer()
        assert destination(answer) == at(engine)
        count = -(-len(sent) // PIECE_BYTES)
        assert given_back([await one.answer() for _ in range(count)]) == (sent, [False] * (count - 1) + [True])
        await one.end()


async def test_with_trailers_the_body_ends_with_them(fake_engine: StartEngine, pickers: Pickers) -> None:
    engine = await fake_engine()
    async with asking(await pickers(engine)) as stream:
        one = stream()
        await one.head(FULL_DUPLEX)
        await one.body(body_of(), last=False)
        await one.tell(request_trailers=HttpTrailers())
        assert destination(await one.answer()) == at(engine)
        assert given_back([await one.answer()]) == (body_of(), [False])
        assert (await one.answer()).HasField("request_trailers")
        await one.end()


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
async def test_the_rank_of_generate_goes_into_the_body(mode: int, fake_engine: StartEngine, pickers: Pickers) -> None:
    """The header that pins a rank elsewhere is ignored there (contract, section 5)."""
    engine = await fake_engine(dp_size=2)
    async with asking(await pickers(engine)) as stream:
        one = stream()
        await one.head(mode, "/generate")
        if mode == BUFFERED:
            await one.answer()
        await one.body(b'{"input_ids":[1,2,3]}')
        answer = await one.answer()
        assert "x-data-parallel-rank" not in fields_of(answer)
        if mode == BUFFERED:
            body = answer.request_body.response.body_mutation.body
            assert fields_of(answer)["content-length"] == str(len(body))
        else:
            body, _ = given_back([await one.answer()])
        assert json.loads(body) == {"input_ids": [1, 2, 3], "routed_dp_rank": json.loads(body)["routed_dp_rank"]}
        assert json.loads(body)["routed_dp_rank"] in (0, 1)
        await one.end()


async def test_only_endpoints_of_a_prescribed_subset_are_named(fake_engine: StartEngine, pickers: Pickers) -> None:
    engines = [await fake_engine() for _ in range(3)]
    running = await pickers(*engines)
    async with asking(running) as stream:
        for among, named in ((at(*engines[:2]), at(*engines[:2])), ([*at(engines[1]), "10.0.0.1:1"], at(engines[1]))):
            one = stream()
            await one.head(BUFFERED, among=among)
            await one.answer()
            await one.body(body_of())
            assert sorted(destination(await one.answer())) == sorted(named)
            await one.end()
        for nobody in ([], ["10.0.0.1:30000"]):
            one = stream()
            await one.head(FULL_DUPLEX, among=nobody)
            await one.body(body_of())
            assert await one.refused() == (503, "no_worker")


async def test_refusals_are_the_clients_answer_and_are_counted(
    fake_engine: StartEngine, pickers: Pickers, records: list[RequestRecord]
) -> None:
    running = await pickers(await fake_engine(), api_keys=["client"], listen={"host": "127.0.0.1", "port": 0})
    key = {"x_api_key": "client"}
    cases: list[tuple[dict[str, Any], bytes | None, tuple[int, str]]] = [
        ({"path": "/v1/completions"}, None, (401, "unauthorized")),
        ({"path": "/flush_cache", **key}, None, (404, "not_found")),
        ({"path": "/v1/models", "method": "GET", **key}, None, (404, "not_found")),
        ({"path": "/v1/completions", "method": "GET", **key}, None, (405, "method_not_allowed")),
        ({"path": "/v1/completions", "content_length": str(65 << 20), **key}, None, (413, "body_too_large")),
        ({"path": "/v1/completions", **key}, b"[]", (400, "bad_json")),
        ({"path": "/v1/completions", **key}, body_of(model="other"), (404, "model_not_found")),
    ]
    async with asking(running) as stream:
        for head, body, refused in cases:
            one = stream()
            await one.head(FULL_DUPLEX, **head)
            if body is not None:
                await one.body(body)
            assert await one.refused() == refused
    assert [(record.status, record.error) for record in records] == [refused for *_, refused in cases]
    assert running.service.listener.buffered_bytes == 0


async def test_a_body_beyond_the_limit_is_refused_as_it_arrives(fake_engine: StartEngine, pickers: Pickers) -> None:
    """case 78"""
    running = await pickers(await fake_engine(), listen={"host": "127.0.0.1", "port": 0, "max_body_mb": 1})
    async with asking(running) as stream:
        one = stream()
        await one.head(FULL_DUPLEX)
        await one.body(*[b"x" * 65536] * 17, last=False)
        assert await one.refused() == (413, "body_too_large")
    assert running.service.listener.buffered_bytes == 0


async def test_a_body_that_does_not_end_is_given_up(fake_engine: StartEngine, pickers: Pickers) -> None:
    running = await pickers(await fake_engine(), timeouts={"body_s": 0.2})
    async with asking(running) as stream:
        one = stream()
        await one.head(FULL_DUPLEX)
        await one.body(b"{", last=False)
        assert await one.refused() == (408, "request_timeout")
    assert running.service.listener.buffered_bytes == 0


async def test_a_client_that_leaves_in_its_body_is_counted_and_its_bytes_are_given_back(
    fake_engine: StartEngine, pickers: Pickers, records: list[RequestRecord]
) -> None:
    running = await pickers(await fake_engine())
    async with asking(running) as stream:
        one = stream()
        await one.head(FULL_DUPLEX)
        await one.body(b"{" * 1000, last=False)

        async def held() -> bool:
            return running.service.listener.buffered_bytes == 1000

        await running.until(held, "the piece is held")
        one._call.cancel()

        async def recorded() -> bool:
            return bool(records)

        await running.until(recorded, "the end of the request")
    assert [(record.outcome, record.status) for record in records] == [("client_closed", 499)]
    assert running.service.listener.buffered_bytes == 0


async def test_the_clients_key_is_taken_off_and_the_workers_put_on(fake_engine: StartEngine, pickers: Pickers) -> None:
    """case 103"""
    running = await pickers(await fake_engine(), api_keys=["client"], worker_api_key="engine")
    async with asking(running) as stream:
        one = stream()
        await one.head(FULL_DUPLEX, x_api_key="client")
        await one.body(body_of())
        answer = await one.answer()
        assert fields_of(answer)["authorization"] == "Bearer engine"
        assert list(answer.request_headers.response.header_mutation.remove_headers) == ["x-api-key"]


async def test_a_filter_that_sends_no_bodies_is_told_so(fake_engine: StartEngine, pickers: Pickers) -> None:
    async with asking(await pickers(await fake_engine())) as stream:
        one = stream()
        await one.head(NO_BODY)
        assert await one.refused() == (500, "internal")


async def test_parts_of_the_answer_pass_untouched_when_a_data_plane_sends_them(
    fake_engine: StartEngine, pickers: Pickers
) -> None:
    async with asking(await pickers(await fake_engine())) as stream:
        one = stream()
        await one.head(FULL_DUPLEX, answer_mode=FULL_DUPLEX)
        await one.body(body_of())
        destination(await one.answer())
        await one.answer()
        await one.tell(response_headers=HttpHeaders())
        assert (await one.answer()).response_headers.ByteSize() == 0
        for piece, last in ((b"data: 1\n\n", False), (b"data: [DONE]\n\n", True)):
            await one.tell(response_body=HttpBody(body=piece, end_of_stream=last))
            part = (await one.answer()).response_body.response.body_mutation.streamed_response
            assert (part.body, part.end_of_stream) == (piece, last)
        await one.tell(response_trailers=HttpTrailers())
        assert (await one.answer()).HasField("response_trailers")
        await one.end()


async def test_health_follows_readiness_and_liveness_does_not(fake_engine: StartEngine, pickers: Pickers) -> None:
    running = await pickers(await fake_engine())
    async with asking(running) as stream:
        check = stream.channel.unary_unary("/grpc.health.v1.Health/Check")

        async def status(name: str) -> bytes:
            return bytes(await check(bytes([10, len(name)]) + name.encode() if name else b"", timeout=10))

        names = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness")
        assert [await status(name) for name in names] == [b"\x08\x01"] * 4
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("other")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stream.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x01"
        running.service.leave()
        assert await asyncio.wait_for(watch.read(), 10) == b"\x08\x02"
        assert [await status(name) for name in names] == [b"\x08\x02"] * 3 + [b"\x08\x01"]
        watch.cancel()
