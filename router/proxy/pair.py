"""The two requests of a prefill/decode pair: sent together or in turn, ended together, answered by the decode leg.

What holds, however a pair ends: until the decode engine's first byte nothing reaches the client, and the first failure
ends both legs with one error; from then on the prompt is handed over, and only the decode leg counts. The prefill leg
outlives a client that leaves, for at most `linger_s`, because its KV may be on its way into the decode engine's memory;
its answer is read and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from router.errors import RouterError
from router.proxy.connection import Sink, UpstreamError, UpstreamReset
from router.proxy.headers import for_worker
from router.proxy.plan import Pair
from router.proxy.prefill_leg import Asked, LegTask, Refusal
from router.proxy.upstream import UpstreamClient, UpstreamResponse

log = logging.getLogger("router.proxy")

MAX_LINGERING = 4096
"""Prefill legs without a client at a time; one more is cut at once."""


class _Gate:
    """Keeps what the decode engine sends until somebody takes it; `opened` is done with the first piece."""

    def __init__(self, opened: asyncio.Future[None]) -> None:
        self.opened = opened
        self._sink: Sink | None = None
        self._held: list[bytes] = []
        self._ended = False

    def write(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.write(data)
            return
        self._held.append(data)
        self._open()

    def end(self, data: bytes) -> None:
        self._ended = True
        if self._sink is not None:
            self._sink.end(data)
            return
        self._held.append(data)
        self._open()

    def give_to(self, sink: Sink) -> None:
        self._sink = sink
        data, self._held = b"".join(self._held), []
        if self._ended:
            sink.end(data)
        elif data:
            sink.write(data)

    def _open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)


class PairResponse:
    """The decode leg's answer, held until its first byte. Like an UpstreamResponse; `close` must be called."""

    has_data = True

    def __init__(self, response: UpstreamResponse, gate: _Gate, piping: asyncio.Task[None], leg: LegTask) -> None:
        self.status, self.reason, self.headers = response.status, response.reason, response.headers
        self.content_length = response.content_length
        self._response = response
        self._gate = gate
        self._piping = piping
        self._leg = leg
        self._on_close: Callable[[LegTask], None] = lambda leg: None

    def when_closed(self, call: Callable[[LegTask], None]) -> PairResponse:
        self._on_close = call
        return self

    async def pipe(self, sink: Sink) -> None:
        """Raises UpstreamError. A prefill leg that fails from here on ends nothing: its prompt is handed over."""
        self._gate.give_to(sink)
        try:
            await self._piping
        except UpstreamError:
            self._leg.cut()
            raise

    def pause(self) -> None:
        self._response.pause()

    def resume(self) -> None:
        self._response.resume()

    def close(self) -> None:
        self._piping.cancel()
        self._response.close()
        self._on_close(self._leg)


class PairSender:
    """Sends pairs and looks after prefill legs that are left alone."""

    def __init__(self, upstream: UpstreamClient, *, released: Callable[[], None]) -> None:
        """`released` is called when a prefill leg has ended: its worker has room again."""
        self._upstream = upstream
        self._released = released
        self._legs: set[LegTask] = set()
        self._lingering = 0

    @property
    def legs(self) -> int:
        """Prefill legs that have not ended, with and without a client."""
        return len(self._legs)

    async def send(self, pair: Pair, asked: Asked) -> PairResponse | Refusal | UpstreamResponse:
        """What the client is to be answered: the decode leg's answer once its first byte came, or an error answer of
        either leg. Both legs are accounted for when this raises, the decode leg by the caller.

        Raises UpstreamError of the leg that failed first, and RouterError("pair_timeout").
        """
        leg = self._start(pair, asked)
        try:
            async with asyncio.timeout(pair.meet_s):
                return await (self._together(pair, leg, asked) if pair.together else self._in_turn(pair, leg, asked))
        except TimeoutError:
            leg.cut()
            log.warning(
                "request %s: %s and %s did not meet within %g s",
                asked.request_id,
                pair.prefill.url.text,
                pair.url.text,
                pair.meet_s,
            )
            text = f"the prefill and the decode engine did not meet within {pair.meet_s:g} s"
            raise RouterError("pair_timeout", text) from None
        except asyncio.CancelledError:
            # In turn, nothing is moved before the decode leg is sent: a prefill nobody waits for is cut.
            self._leave(leg, pair.linger_s if pair.together else 0.0)
            raise
        except BaseException:
            leg.cut()
            raise

    def _start(self, pair: Pair, asked: Asked) -> LegTask:
        leg = LegTask(self._upstream, pair.prefill, asked, keep=not pair.together)
        self._legs.add(leg)
        leg.task.add_done_callback(lambda task: self._ended(leg))
        return leg

    def _ended(self, leg: LegTask) -> None:
        self._legs.discard(leg)
        leg.over()
        self._released()

    def _leave(self, leg: LegTask, linger_s: float) -> None:
        """Its client is gone, or has its whole answer."""
        if leg.done:
            return
        if linger_s and self._lingering < MAX_LINGERING:
            self._lingering += 1
            leg.task.add_done_callback(self._lingered)
            leg.linger(linger_s)
        else:
            leg.cut()

    def _lingered(self, task: asyncio.Task[None]) -> None:
        self._lingering -= 1

    async def _together(self, pair: Pair, leg: LegTask, asked: Asked) -> PairResponse | Refusal | UpstreamResponse:
        sending = asyncio.ensure_future(self._decode(pair, pair.decode_body(b""), asked))
        response: UpstreamResponse | None = None
        try:
            if not await _won(leg, sending):
                return _outcome(leg)
            response = await sending
        finally:
            if response is None:
                _withdraw(sending)
        return await self._opened(response, leg, pair)

    async def _in_turn(self, pair: Pair, leg: LegTask, asked: Asked) -> PairResponse | Refusal | UpstreamResponse:
        await asyncio.wait((leg.ended,))
        if leg.failed:
            return _outcome(leg)
        try:
            body = pair.decode_body(leg.answer)
        except ValueError as error:
            raise UpstreamReset(str(error)) from None
        return await self._opened(await self._decode(pair, body, asked), leg, pair)

    async def _decode(self, pair: Pair, body: bytes, asked: Asked) -> UpstreamResponse:
        fields = for_worker(asked.kept, asked.request_id, pair.authorization, pair.headers)
        return await self._upstream.send(pair.url, b"POST", asked.target, fields, body)

    async def _opened(
        self, response: UpstreamResponse, leg: LegTask, pair: Pair
    ) -> PairResponse | Refusal | UpstreamResponse:
        """Waits for the first byte of the decode leg's body; until then a failure can still be told to the client."""
        if response.status >= 400:
            leg.cut()
            return response
        gate = _Gate(asyncio.get_running_loop().create_future())
        piping = asyncio.ensure_future(response.pipe(gate))
        piping.add_done_callback(_seen)
        kept = False
        try:
            if not await _won(leg, gate.opened, piping):
                return _outcome(leg)
            if not gate.opened.done():
                await piping  # raises what ended the answer before its first byte
            kept = True
        finally:
            if not kept:
                piping.cancel()
                response.close()
        return PairResponse(response, gate, piping, leg).when_closed(lambda leg: self._leave(leg, pair.linger_s))


async def _won(leg: LegTask, *waits: asyncio.Future[Any]) -> bool:
    """Until one of `waits` is done; False when the prefill leg failed before."""
    while not any(wait.done() for wait in waits):
        if leg.failed:
            return False
        running = () if leg.ended.done() else (leg.ended,)
        await asyncio.wait((*waits, *running), return_when=asyncio.FIRST_COMPLETED)
    return True


def _outcome(leg: LegTask) -> Refusal:
    """The prefill leg's error answer. Raises its UpstreamError when it gave none."""
    how = leg.ended.result()
    assert how is not None
    if isinstance(how, UpstreamError):
        raise how
    return how


def _withdraw(sending: asyncio.Future[UpstreamResponse]) -> None:
    """Nobody waits for this answer any more: its connection is cut, so that the engine stops. Not awaited: a client
    that leaves meanwhile could not be told from the cancellation of `sending`."""
    sending.add_done_callback(_thrown_away)
    sending.cancel()


def _thrown_away(sending: asyncio.Future[UpstreamResponse]) -> None:
    if not sending.cancelled() and sending.exception() is None:
        sending.result().close()


def _seen(task: asyncio.Future[None]) -> None:
    """Read, so that an end nobody waits for any more is not reported as unhandled."""
    if not task.cancelled():
        task.exception()
