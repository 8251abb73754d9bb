"""The HTTP face of one simulated engine, with SGLang 0.5.23's routes and answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from router.engine.answer import Answer
from router.engine.body import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    BadRequest,
    Call,
    json_object,
    read_call,
    read_tokenize,
)
from router.engine.handover import BootstrapServer, HandoverFailed, Meeting, read_meetings
from router.engine.options import EngineOptions
from router.engine.publisher import EventPublisher, LoadPublisher, bind_range, port_of
from router.engine.radix import RadixCache
from router.engine.rank import Rank
from router.engine.rooms import Fault, Handed, Rooms
from router.engine.scheduler import Scheduler
from router.engine.server_info import BoundPorts, server_info, startup_times
from router.engine.shapes import error_body
from router.engine.split import prefill_answer, taken_over
from router.engine.text import TextCodec
from router.engine.wire import PageHasher

_MAX_BODY_BYTES = 64 << 20
_PUB_BACKLOG = 100_000
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class SimulatedEngine:
    """One engine: `start`, then serve at `url` until `stop`. Several may share a loop, a ZMQ context and a codec.

    >>> engine = SimulatedEngine(EngineOptions(port=0))
    >>> await engine.start()
    >>> engine.url
    'http://127.0.0.1:41231'
    >>> await engine.stop()
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        codec: TextCodec | None = None,
        context: zmq.asyncio.Context | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self.ranks: list[Rank] = []
        self.ports = BoundPorts(None, None, None)
        self.url = ""
        self.draining = False
        self._given_codec = codec
        self._own_context = context is None
        self._context = context if context is not None else zmq.asyncio.Context()
        self._clock_s = clock_s
        self._startup = startup_times()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._runner: web.AppRunner | None = None
        self._answers: set[Answer] = set()
        self.bootstrap: BootstrapServer | None = None
        """Of a prefill engine."""
        self.refused = 0
        """Requests a prefill or decode engine got without a room: plain traffic, which it must never get."""
        self._next_rank = 0

    async def start(self) -> None:
        """Bind everything and serve. OSError when a port is taken; nothing stays open then."""
        try:
            codec = self._given_codec
            self._codec = codec if codec is not None else await asyncio.to_thread(TextCodec, self.options.model_path)
            self._open_ranks()
            await self._open_bootstrap()
            for rank in self.ranks:
                rank.start()
            # A client that goes away cancels its handler, which aborts the request.
            runner = web.AppRunner(
                self._application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2
            )
            self._runner = runner
            await runner.setup()
            await web.TCPSite(runner, self.options.host, self.options.port).start()
        except BaseException:
            await self.stop()
            raise
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        self.url = f"http://{host}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close everything at once; running requests are cut off."""
        for rank in self.ranks:
            await rank.stop()
        if self.bootstrap is not None:
            await self.bootstrap.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        for socket in self._sockets:
            socket.close(linger=0)
        if self._own_context:
            self._context.term()

    async def drain(self) -> None:
        """As SGLang after SIGTERM: /health answers 503 from now on; returns when the running requests are done."""
        self.draining = True
        while self._answers:
            await asyncio.gather(*(answer.closed.wait() for answer in self._answers))

    def _open_ranks(self) -> None:
        options, count = self.options, self.options.dp_size
        kv = self._bind(zmq.PUB, options.kv_port, _PUB_BACKLOG)
        replay = self._bind(zmq.ROUTER, options.replay_port if kv else None, options.buffer_batches + 1)
        load = self._bind(zmq.PUB, options.load_port, _PUB_BACKLOG)
        bound = [port_of(sockets[0]) if sockets else None for sockets in (kv, replay, load)]
        self.ports = BoundPorts(bound[0], bound[1], bound[2])
        hasher = PageHasher(options.block_tokens, bigram=options.eagle, format=options.format)
        for rank in range(count):
            cache = RadixCache(options.tokens // options.block_tokens)
            events: EventPublisher | None = None
            if kv:
                events = EventPublisher(
                    kv[rank],
                    replay[rank] if replay else None,
                    topic=options.topic,
                    buffer_batches=options.buffer_batches,
                )
            reports = LoadPublisher(load[rank], rank, time_scale=options.time_scale) if load else None
            keeps = options.role != "decode" or options.decode_radix_cache
            scheduler = Scheduler(cache, hasher, options.timing, keeps_prefixes=keeps)
            scale = options.time_scale
            self.ranks.append(Rank(rank, scheduler, hasher, events, reports, time_scale=scale, clock_s=self._clock_s))

    async def _open_bootstrap(self) -> None:
        options = self.options
        if options.role != "prefill":
            return
        self.bootstrap = BootstrapServer(
            Rooms(self._fault),
            ranks=options.dp_size,
            transfer_tokens_per_s=options.transfer_tokens_per_s,
            timeout_s=options.bootstrap_timeout_s,
            time_scale=options.time_scale,
        )
        await self.bootstrap.start(options.host, options.bootstrap_port)
        self.ports = replace(self.ports, bootstrap=self.bootstrap.port)

    def _fault(self, room: int) -> Fault:
        options = self.options
        if options.transfer_fault == "none" or random.Random(room).random() >= options.transfer_fault_share:
            return ""
        return "never" if options.transfer_fault == "never" else "fails"

    def _bind(self, kind: int, base: int | None, backlog: int) -> list[zmq.asyncio.Socket]:
        if base is None:
            return []
        sockets = bind_range(self._context, kind, self.options.host, base, self.options.dp_size, send_limit=backlog)
        self._sockets += sockets
        return sockets

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_detail_errors])
        for path in ("/health", "/health_generate", "/ping"):
            app.router.add_get(path, self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/rooms", self._rooms)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)
        for path in (CHAT, COMPLETIONS, GENERATE):
            app.router.add_post(path, self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503)
        if self.options.health_delay_s:
            await asyncio.sleep(self.options.health_delay_s)
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(server_info(self.options, self.ports, self._startup))

    async def _models(self, request: web.Request) -> web.Response:
        name = self.options.model
        model = {
            "id": name,
            "object": "model",
            "created": int(self._clock_s()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.options.context_length,
        }
        return _json({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            prompts, batched = read_tokenize(await request.read(), self._codec)
        except BadRequest as error:
            return _refusal(request.path, error)
        tokens = [list(memoryview(ids).cast("I")) for ids in prompts]
        counts = [len(ids) for ids in tokens]
        return _json(
            {
                "tokens": tokens if batched else tokens[0],
                "count": counts if batched else counts[0],
                "max_model_len": self.options.context_length,
            }
        )

    async def _flush(self, request: web.Request) -> web.Response:
        if not all(rank.idle for rank in self.ranks):
            return web.Response(status=400, text="Flush cache failed.\n")
        for rank in self.ranks:
            rank.flush()
        return web.Response(text=_FLUSHED)

    async def _abort(self, request: web.Request) -> web.Response:
        """`rid` matches by prefix, as SGLang's does; an empty one only with abort_all."""
        try:
            body = json_object(await request.read())
        except BadRequest as error:
            return _refusal(request.path, error)
        rid = body.get("rid")
        everything = body.get("abort_all") is True
        if everything or (isinstance(rid, str) and rid):
            for answer in list(self._answers):
                answer.abort("" if everything else str(rid))
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        answer: Answer | None = None
        try:
            call = read_call(request.path, raw, request.headers, self.options, self._codec)
            if self.options.role == "prefill":
                return await self._prefill(call, raw)
            ranks = self._pick(call.rank, len(call.sequences))
            handed = await self._taken_over(call, raw, ranks) if self.options.role == "decode" else None
            answer = Answer(call, self._codec, ranks, self.options, self._clock_s, handed)
            answer.submit()
        except BadRequest as error:
            return _refusal(request.path, error)
        except HandoverFailed as error:
            return _json(error_body(request.path, 500, str(error), "InternalServerError"), status=500)
        self._answers.add(answer)
        try:
            return await (answer.stream(request) if call.stream else answer.whole())
        finally:
            answer.close()
            self._answers.discard(answer)

    async def _prefill(self, call: Call, raw: bytes) -> web.StreamResponse:
        """Whole, also where a stream was asked for: one token is all there is."""
        assert self.bootstrap is not None
        meetings = self._meetings(call, raw)
        one_token = replace(call, max_new_tokens=1, stream=False)
        ranks = [self.ranks[m.room % len(self.ranks)] if call.rank is None else self.ranks[call.rank] for m in meetings]
        prompts = [(sequence.ids, sequence.namespace) for sequence in call.sequences]
        made: list[Answer] = []

        def make() -> Answer:
            made.append(Answer(one_token, self._codec, ranks, self.options, self._clock_s))
            self._answers.update(made)
            return made[0]

        try:
            return await prefill_answer(self.bootstrap, meetings, ranks, prompts, make)
        finally:
            self._answers.difference_update(made)

    async def _taken_over(self, call: Call, raw: bytes, ranks: list[Rank]) -> list[Handed]:
        prompts = [(sequence.ids, sequence.namespace) for sequence in call.sequences]
        return await taken_over(self._meetings(call, raw), ranks, prompts, self.options.bootstrap_timeout_s)

    def _meetings(self, call: Call, raw: bytes) -> list[Meeting]:
        body = json_object(raw)
        self.refused += body.get("bootstrap_room") is None
        return read_meetings(body, len(call.sequences))

    async def _rooms(self, request: web.Request) -> web.Response:
        """Of the simulation only: how hand-overs went."""
        rooms = self.bootstrap.rooms if self.bootstrap is not None else Rooms()
        return _json({**asdict(rooms.counts), "open": len(rooms), "refused": self.refused})

    def _pick(self, pinned: int | None, count: int) -> list[Rank]:
        """The rank of each sequence: the pinned one, else all in turn."""
        if pinned is not None:
            return [self.ranks[pinned]] * count
        start, self._next_rank = self._next_rank, (self._next_rank + count) % len(self.ranks)
        return [self.ranks[(start + i) % len(self.ranks)] for i in range(count)]


@web.middleware
async def _detail_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """404 and 405 as FastAPI words them."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _json({"detail": error.reason}, status=error.status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _refusal(path: str, error: BadRequest) -> web.Response:
    if error.type == "plain":
        return web.Response(status=error.status, text=str(error))
    return _json(error_body(path, error.status, str(error), error.type), status=error.status)
