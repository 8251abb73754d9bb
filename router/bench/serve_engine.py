"""The engines of `bench serve`, all in one process: answers at once, true token counts, real KV events, no model.

Started as `python -m router.bench.serve_engine N`; prints the URLs as one JSON line, ends with its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import datetime
from typing import cast

import uvloop
import zmq
import zmq.asyncio
from httptools import HttpRequestParser

from router.bench.serve_bodies import CHUNKS, PACE_S, PREFIXES, long_body, owner_of
from router.engine.options import TINY_MODEL, EngineOptions
from router.engine.publisher import EventPublisher, bind_range, port_of
from router.engine.radix import Stored
from router.engine.server_info import BoundPorts, server_info, startup_times
from router.engine.wire import encode_batch
from router.hashing import NO_NAMESPACE, Scheme, TokenIds, prompt_keys, token_count
from router.prompt.body import parse_body
from router.prompt.forms import CHAT, prompt_form
from router.prompt.local import local_ids
from router.prompt.models import ModelFacts, ModelFiles, ModelSource, load_model

HOST = "127.0.0.1"
PAGE_TOKENS = 64
EVENT_EVERY_S = 0.25
"""A stream that says nothing while requests are served is not believed."""
_FACTS = ModelFacts("sglang", ("bench",))
_SCHEME = Scheme("sglang-sha256", PAGE_TOKENS)
_PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def ids_of(raw: bytes, files: ModelFiles) -> TokenIds:
    body = parse_body(CHAT, raw)
    return local_ids(body, prompt_form(body, "sglang"), files, _FACTS)


class _Connection(asyncio.Protocol):
    def __init__(self, files: ModelFiles, info: bytes) -> None:
        self._files = files
        self._info = info
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._path == b"/server_info":
            self._whole(200, self._info)
        elif self._path == CHAT.encode():
            self._answer(self._body)
        else:
            self._whole(200 if self._path == b"/health" else 404, b"{}")

    def _answer(self, raw: bytes) -> None:
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":64}' % token_count(ids_of(raw, self._files))
        if b'"stream":true' not in raw:
            self._whole(200, b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}],%b}' % usage)
            return
        last = b'data: {"choices":[],%b}\n\ndata: [DONE]\n\n' % usage
        end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)
        if b'"user":"paced"' in raw:
            self._transport.write(_STREAM)
            self._pace(CHUNKS, end)
        else:
            self._transport.write(_STREAM)
            for _ in range(CHUNKS):
                self._transport.write(_CHUNK)
            self._transport.write(end)

    def _pace(self, left: int, end: bytes) -> None:
        if left and not self._transport.is_closing():
            self._transport.write(_CHUNK)
            asyncio.get_running_loop().call_later(PACE_S, self._pace, left - 1, end)
        else:
            self._transport.write(end)

    def _whole(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


def _prefix_events(files: ModelFiles, owner: int, owners: int) -> list[Stored]:
    """The start that all long bodies of one prefix share, as whole pages."""
    events = []
    for prefix in range(PREFIXES):
        if owner_of(prefix, owners) != owner:
            continue
        one, other = (ids_of(long_body(prefix, number), files) for number in (1, 2))
        same = next(at for at in range(0, len(one), 4) if one[at : at + 4] != other[at : at + 4])
        ids = one[: same // (4 * PAGE_TOKENS) * (4 * PAGE_TOKENS)]
        keys = prompt_keys(_SCHEME, ids)
        assert keys
        events.append(Stored(keys, None, 0, NO_NAMESPACE, ids))
    return events


async def serve(engines: int) -> None:
    files = load_model(ModelSource(str(TINY_MODEL), "sglang"), datetime.now)
    loop, context = asyncio.get_running_loop(), zmq.asyncio.Context()
    urls: list[str] = []
    publishers: list[tuple[EventPublisher, list[Stored]]] = []
    replays: list[asyncio.Task[None]] = []
    for number in range(engines):
        (events,) = bind_range(context, zmq.PUB, HOST, 0, 1, send_limit=0)
        (replay,) = bind_range(context, zmq.ROUTER, HOST, 0, 1, send_limit=0)
        options = EngineOptions(host=HOST, page_size=PAGE_TOKENS, model="bench", topic="kv-events", tokens=4_000_000)
        ports = BoundPorts(port_of(events), port_of(replay), None)
        described = json.dumps(server_info(options, ports, startup_times())).encode()
        server = await loop.create_server(lambda info=described: _Connection(files, info), HOST, 0)  # type: ignore[misc]
        urls.append(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
        publisher = EventPublisher(events, replay, topic=options.topic, buffer_batches=10_000)
        replays.append(loop.create_task(publisher.serve_replay()))
        publishers.append((publisher, _prefix_events(files, number, engines)))
    print(json.dumps(urls), flush=True)
    while True:  # the same stores again and again: they keep the streams alive and change nothing
        for publisher, stores in publishers:
            publisher.send(encode_batch(time.time(), stores, 0, _SCHEME))
        await asyncio.sleep(EVENT_EVERY_S)


async def _until_the_parent_ends(engines: int) -> None:
    serving = asyncio.create_task(serve(engines))
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ended = asyncio.create_task(reader.read())
    await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_the_parent_ends(int(sys.argv[1])))
