"""One HTTP answer in the making: its sequences on their ranks, written whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

from router.engine.body import CHAT, GENERATE, BadRequest, Call
from router.engine.options import EngineOptions
from router.engine.rank import Rank
from router.engine.rooms import Handed
from router.engine.scheduler import DoesNotFit, Request
from router.engine.shapes import DONE, OpenAiShapes, generate_item, sse
from router.engine.text import TextCodec

_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class Answer:
    """Submits every sequence of a call and follows them. `close` must be called: it aborts what still runs."""

    def __init__(
        self,
        call: Call,
        codec: TextCodec,
        ranks: list[Rank],
        options: EngineOptions,
        clock_s: Callable[[], float],
        handed: list[Handed] | None = None,
    ) -> None:
        """`handed`: what a prefill engine computed of each sequence."""
        self.closed = asyncio.Event()
        self._call = call
        self._codec = codec
        self._ranks = ranks
        self._options = options
        self._moved: asyncio.Queue[int] = asyncio.Queue()
        self._requests = [
            Request(
                rid=sequence.rid,
                ids=sequence.ids,
                namespace=sequence.namespace,
                max_new_tokens=call.max_new_tokens,
                sample=codec.answer(sequence.ids, sequence.choice % call.copies),
                session_id=sequence.session_id,
                handed_cached_tokens=None if handed is None else handed[sequence.choice].cached_tokens,
                progressed=self._notifier(sequence.choice),
            )
            for sequence in call.sequences
        ]
        self._submitted: list[tuple[Request, Rank]] = []
        self._texts = [""] * len(self._requests)
        self._read = [0] * len(self._requests)
        self._open = set(range(len(self._requests)))
        self._shapes = OpenAiShapes(call, int(clock_s()), cache_report=options.cache_report)

    @property
    def requests(self) -> list[Request]:
        """One a sequence, in order."""
        return self._requests

    def submit(self) -> None:
        """Raises BadRequest when a sequence can never fit its rank; none runs then."""
        try:
            for request, rank in zip(self._requests, self._ranks, strict=True):
                rank.submit(request)
                self._submitted.append((request, rank))
        except DoesNotFit as error:
            self.close()
            raise BadRequest(str(error)) from None

    def abort(self, rid_prefix: str) -> None:
        """Stop the sequences whose rid starts with `rid_prefix`; "" stops all."""
        for request, rank in self._submitted:
            if request.finish is None and request.rid.startswith(rid_prefix):
                rank.abort(request)

    def close(self) -> None:
        self.abort("")
        self.closed.set()

    async def whole(self) -> web.Response:
        async for _ in self._progress():
            pass
        if self._call.path == GENERATE:
            items = [self._generated(i) for i in range(len(self._requests))]
            return _json_response(items if self._call.batched else items[0])
        return _json_response(self._shapes.answer(self._requests, self._texts))

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """Headers go out with the first token, so that a refusal can still be a plain 4xx until then."""
        response = web.StreamResponse(headers=_SSE_HEADERS)
        write = self._write_generated if self._call.path == GENERATE else self._write_openai
        async for index, text, first in self._progress():
            if not response.prepared:
                await response.prepare(http)
            await response.write(write(index, text, first))
        if self._call.path != GENERATE and self._call.include_usage:
            await response.write(self._shapes.total(self._requests))
        await response.write(DONE)
        await response.write_eof()
        return response

    def _notifier(self, index: int) -> Callable[[Request], None]:
        def moved(request: Request) -> None:
            if self._call.stream or request.finish is not None:
                self._moved.put_nowait(index)

        return moved

    async def _progress(self) -> AsyncIterator[tuple[int, str, bool]]:
        """(sequence, its new text, whether that is its first), until every sequence has ended.

        A slow reader gets several tokens at once; nothing is yielded twice.
        """
        while self._open:
            index = await self._moved.get()
            request = self._requests[index]
            read, self._read[index] = self._read[index], len(request.output)
            if index not in self._open or (read == len(request.output) and request.finish is None):
                continue
            if request.finish is not None:
                self._open.remove(index)
            text = "".join(self._codec.text_of(token) for token in request.output[read:])
            self._texts[index] += text
            yield index, text, read == 0

    def _generated(self, index: int) -> dict[str, Any]:
        rank = self._ranks[index].rank if self._options.dp_size > 1 else None
        return generate_item(self._requests[index], self._texts[index], rank)

    def _write_generated(self, index: int, text: str, first: bool) -> bytes:
        item = self._generated(index)
        return sse({**item, "index": index} if self._call.batched else item)

    def _write_openai(self, index: int, text: str, first: bool) -> bytes:
        request = self._requests[index]
        so_far = self._shapes.usage(self._requests) if self._call.continuous_usage else None
        chunks = []
        if self._call.path == CHAT:
            if first:
                chunks.append(self._shapes.opening(index))
            if text:
                chunks.append(self._shapes.token(index, text, None, so_far))
            if request.finish is not None:
                chunks.append(self._shapes.closing(index, request.finish))
        else:
            chunks.append(self._shapes.token(index, text, request.finish, so_far))
        return b"".join(chunks)


def _json_response(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
