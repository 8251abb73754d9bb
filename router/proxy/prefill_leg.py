"""The prefill request of a pair as a task of its own: it may end long before or after the decode request."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from router.proxy.connection import Sink, UpstreamError, UpstreamReset
from router.proxy.headers import AnswerFields, for_worker
from router.proxy.plan import FAULTS, Outcome, PrefillLeg, RawHeaders, outcome_of
from router.proxy.upstream import UpstreamClient, UpstreamResponse
from router.proxy.usage import UsageTap

log = logging.getLogger("router.proxy")

MAX_HANDOVER_BYTES = 4 << 20
"""Of a prefill leg's answer that the decode leg is made from, or that is passed on as a refusal."""


class Asked(Protocol):
    """What of a client's request both legs carry (`router.proxy.attempt.Incoming`)."""

    @property
    def route(self) -> str: ...
    @property
    def target(self) -> bytes: ...
    @property
    def kept(self) -> RawHeaders: ...
    @property
    def request_id(self) -> str: ...


class Refusal:
    """The prefill leg's answer when it is an error: passed on to the client as it is. Like an UpstreamResponse."""

    def __init__(self, response: UpstreamResponse, body: bytes) -> None:
        self.status, self.reason, self.headers = response.status, response.reason, response.headers
        self.content_length: int | None = len(body)
        self.has_data = True
        self._body = body

    async def pipe(self, sink: Sink) -> None:
        sink.end(self._body)

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class _Dropped:
    """Sink of a prefill leg's answer: keeps what `limit` allows, and looks for usage."""

    def __init__(self, tap: UsageTap, limit: int) -> None:
        self._tap = tap
        self._limit = limit
        self._pieces: list[bytes] = []
        self.size = 0

    def write(self, data: bytes) -> None:
        self._tap.feed(data)
        if self.size < self._limit:
            self._pieces.append(data[: self._limit - self.size])
        self.size += len(data)

    def end(self, data: bytes) -> None:
        if data:
            self.write(data)

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)


class LegTask:
    """The prefill leg as a task of its own. `ended` has None when it went well, else what ends the pair."""

    def __init__(self, upstream: UpstreamClient, leg: PrefillLeg, asked: Asked, *, keep: bool) -> None:
        self._upstream = upstream
        self._leg = leg
        self._asked = asked
        self._keep = keep
        self.answer = b""
        self._body = leg.take_body()
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[UpstreamError | Refusal | None] = loop.create_future()
        self.task = loop.create_task(self._run(), name="prefill leg")
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        return self.task.done()

    @property
    def failed(self) -> bool:
        return self.ended.done() and self.ended.result() is not None

    def cut(self) -> None:
        self.task.cancel()

    def over(self) -> None:
        """Its task has ended, perhaps before it began."""
        self._leg.finish(Outcome.CLIENT_CLOSED)
        self._end(UpstreamReset("the prefill request was cut"))

    def linger(self, seconds: float) -> None:
        """Nobody waits for it any more; it may go on for so long."""
        if not self.done and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.task.cancel)

    async def _run(self) -> None:
        leg, response = self._leg, None
        try:
            fields = for_worker(self._asked.kept, self._asked.request_id, leg.authorization, leg.headers)
            body, self._body = self._body, b""  # not held while only the answer is waited for
            sending = self._upstream.send(leg.url, b"POST", self._asked.target, fields, body)
            del body
            response = await sending
            await self._read(response)
        except UpstreamError as error:
            log.warning("request %s: prefill leg: %s: %s", self._asked.request_id, leg.url.text, error)
            leg.finish(Outcome.UPSTREAM_ERROR, fault=error.fault)
            self._end(error)
        except Exception:
            log.exception("request %s: prefill leg failed in the router itself", self._asked.request_id)
            leg.finish(Outcome.UPSTREAM_ERROR)
            self._end(UpstreamReset("the prefill request failed in the router"))
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            if response is not None:
                response.close()

    async def _read(self, response: UpstreamResponse) -> None:
        fields = AnswerFields(response.headers)
        tap = UsageTap(self._asked.route, fields.content_type, fields.content_encoding)
        refused = response.status >= 400
        dropped = _Dropped(tap, MAX_HANDOVER_BYTES if refused or self._keep else 0)
        await response.pipe(dropped)
        if refused:
            status = response.status
            self._leg.finish(outcome_of(status), fault=FAULTS.get(status), status=status)
            self._end(Refusal(response, dropped.body))
            return
        self.answer = dropped.body
        self._leg.finish(Outcome.OK, status=response.status, usage=tap.result())
        self._end(None)

    def _end(self, how: UpstreamError | Refusal | None) -> None:
        if not self.ended.done():
            self.ended.set_result(how)
