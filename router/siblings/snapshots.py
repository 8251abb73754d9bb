"""A cold rank's blocks from a sibling that knows them exactly, taken over only where the stream goes on without a gap.

A router that joins a warm fleet hears what is stored from then on; the engines' replay buffers reach back minutes. What
a rank held before that only a sibling can tell. Both hear the same numbered stream, so a state "after batch S" and the
batches behind S, which the cold router has kept since before it asked, make the whole; that batch S has the same bytes
on both sides proves that it is the same publisher process. Without that proof nothing is taken over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.index.snapshot import Piece, Restoring, SnapshotRefused, facts_of, told
from router.observe.metrics import Metrics
from router.siblings.frames import SENDER_BYTES, Ask, Heading, No, Offer, Reply, Take, Told
from router.siblings.taps import Batches, digest

log = logging.getLogger("router.siblings")

LOOK_EVERY_S = 0.5
RETRY_S = (5.0, 300.0)
"""First and largest wait before a rank is asked for again."""
OFFER_TRIES, EXPORT_TRIES, PIECE_TRIES = 2, 20, 4
"""Times a question is asked, ANSWER_S apart: an offer comes at once, a large state is made first."""
ANSWER_S = 0.5
SLICE_S = 0.001
MAX_SNAPSHOT_BYTES = 128 << 20
EXPORT_KEPT_S = 10.0
"""Without a question what was told is forgotten."""
CATCH_UP_S = 3.0

_encode = msgspec.msgpack.Encoder().encode
_heading = msgspec.msgpack.Decoder(Heading).decode
_piece = msgspec.msgpack.Decoder(Piece).decode


class Channel(Protocol):
    """How the siblings are reached."""

    @property
    def sender(self) -> bytes: ...

    @property
    def has_siblings(self) -> bool: ...

    def ask(self, make: Callable[[int, float], Ask | Take]) -> None:
        """`make` gets the message's number and time."""

    def reply(self, make: Callable[[int, float], Reply]) -> None: ...

    async def hear_replies(self) -> None: ...

    async def ignore_replies(self) -> None: ...


@dataclass(slots=True)
class _Export:
    ask: bytes
    pieces: list[bytes] = field(default_factory=list)
    why: str = "busy"
    ready: bool = False
    asked_s: float = 0.0


class Snapshots:
    """`run` looks for cold ranks of our own; `heard` answers siblings'. One of each at a time."""

    def __init__(self, fleet: Fleet, channel: Channel, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._channel = channel
        self._metrics = metrics
        self._clock = clock
        self._replies: asyncio.Queue[Reply] = asyncio.Queue(64)
        self._waiting_for: bytes | None = None
        self._offered: dict[bytes, Rank] = {}
        self._export: _Export | None = None
        self._exporting: asyncio.Task[None] | None = None
        self._next_try: dict[Rank, tuple[float, float]] = {}

    async def close(self) -> None:
        if self._exporting is not None:
            self._exporting.cancel()
            await asyncio.gather(self._exporting, return_exceptions=True)

    # ---- telling

    def heard(self, message: Ask | Take) -> None:
        if isinstance(message, Ask):
            self._offer(message)
        elif message.donor == self._channel.sender:
            self._tell(message)

    def _offer(self, ask: Ask) -> None:
        worker = self._fleet.worker(ask.worker)
        if worker is None or ask.rank >= len(worker.ranks):
            return
        rank = worker.ranks[ask.rank]
        if not rank.trusted or rank.ledger is None or rank.ledger.inexact or (rank.last_seq or -1) < ask.after_seq:
            return
        self._offered[ask.ask] = rank
        while len(self._offered) > 16:
            del self._offered[next(iter(self._offered))]
        self._channel.reply(lambda seq, at_s: Offer(self._channel.sender, seq, at_s, ask.ask))

    def _tell(self, take: Take) -> None:
        now_s = self._clock()
        export = self._export
        if export is not None and export.ask != take.ask and now_s - export.asked_s > EXPORT_KEPT_S:
            export = self._export = None
        rank = self._offered.pop(take.ask, None)
        if export is None and rank is not None:
            export = self._export = _Export(take.ask)
            self._exporting = asyncio.create_task(self._make(export, rank), name="snapshot")
        if export is None or export.ask != take.ask:
            self._channel.reply(lambda seq, at_s: No(self._channel.sender, seq, at_s, take.ask, "busy"))
            return
        export.asked_s = now_s
        if export.ready:
            self._answer(export, take.number)

    def _answer(self, export: _Export, number: int) -> None:
        sender, of = self._channel.sender, len(export.pieces)
        if number >= of:
            self._channel.reply(lambda seq, at_s: No(sender, seq, at_s, export.ask, export.why))
            return
        data = export.pieces[number]
        self._channel.reply(lambda seq, at_s: Told(sender, seq, at_s, export.ask, number, of, data))
        if number == of - 1:
            self._export = None  # asked for once more, it would have to be made anew

    async def _make(self, export: _Export, rank: Rank) -> None:
        """The whole state after one batch: meanwhile the rank's batches wait."""
        batches = Batches(rank, holding=True)
        seq = rank.last_seq
        try:
            if batches.void or rank.ledger is None or seq is None:
                raise SnapshotRefused("the rank's stream is at work")
            heading = Heading(seq, digest(rank.last_payload), facts_of(rank.ledger))
            pieces, size = [_encode(heading)], 0
            until_s = time.monotonic() + SLICE_S
            for piece in told(rank.ledger):
                if piece is not None:
                    pieces.append(_encode(piece))
                    size += len(pieces[-1])
                if size > MAX_SNAPSHOT_BYTES:
                    raise SnapshotRefused("it is too large")
                if time.monotonic() > until_s:
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + SLICE_S
                if batches.void or rank.dead:
                    raise SnapshotRefused("the rank's stream broke")
            export.pieces = pieces
        except SnapshotRefused as refused:
            export.why = str(refused)
        finally:
            if not batches.void:
                batches.release(seq)
            batches.close()
        export.ready = True
        self._metrics.snapshots.inc("told" if export.pieces else "refused")
        self._answer(export, 0)

    # ---- learning

    def replied(self, reply: Reply) -> None:
        if reply.ask == self._waiting_for and not self._replies.full():
            self._replies.put_nowait(reply)

    async def run(self) -> None:
        """For ever: asks for the cold ranks, one after the other."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self._channel.has_siblings:
                continue
            cold = self._cold()
            if not cold:
                continue
            await self._channel.hear_replies()
            try:
                for rank in cold:
                    await self._learn(rank)
            finally:
                await self._channel.ignore_replies()

    def _cold(self) -> list[Rank]:
        now_s = self._clock()
        ranks = [rank for worker in self._fleet.workers if worker.routable for rank in worker.ranks]
        self._next_try = {rank: when for rank, when in self._next_try.items() if not rank.dead}
        return [
            rank
            for rank in ranks
            if rank.trusted
            and rank.ledger is not None
            and not rank.ledger.is_history_complete
            and rank.last_seq is not None
            and self._next_try.get(rank, (0.0, 0.0))[0] <= now_s
        ]

    async def _learn(self, rank: Rank) -> None:
        wait_s = min(max(RETRY_S[0], 2 * self._next_try.get(rank, (0.0, 0.0))[1]), RETRY_S[1])
        self._next_try[rank] = self._clock() + wait_s, wait_s
        batches = Batches(rank, holding=False)
        name = f"{rank.worker.url} rank {rank.number}"
        try:
            if batches.void:
                return
            donor, heading, pieces = await self._fetch(rank)
            blocks = await self._take_over(rank, batches, heading, pieces)
            rank.restored_from = donor.hex()[:8]
            self._metrics.snapshots.inc("restored")
            log.info(
                "%s: %d blocks taken over from sibling %s as of batch %d", name, blocks, rank.restored_from, heading.seq
            )
        except TimeoutError:
            self._metrics.snapshots.inc("none")
            log.debug("%s: no sibling knows more", name)
        except (SnapshotRefused, msgspec.MsgspecError) as error:
            self._metrics.snapshots.inc("failed")
            log.info("%s: a sibling's blocks were not taken over: %s", name, error)
        finally:
            self._waiting_for = None
            batches.close()
            rank.believe("restore")

    async def _fetch(self, rank: Rank) -> tuple[bytes, Heading, list[bytes]]:
        """Raises TimeoutError when nobody offers, SnapshotRefused."""
        while not self._replies.empty():
            self._replies.get_nowait()
        ask = self._waiting_for = os.urandom(SENDER_BYTES)
        after_seq = rank.last_seq or 0
        place = rank.worker.url.text, rank.number
        sender = self._channel.sender

        def question() -> None:
            self._channel.ask(lambda seq, at_s: Ask(sender, seq, at_s, ask, *place, after_seq))

        offer = await self._reply_to(question, lambda reply: isinstance(reply, Offer), OFFER_TRIES)
        pieces: list[bytes] = []
        of = 1
        while len(pieces) < of:
            number = len(pieces)

            def wanted(number: int = number) -> None:
                self._channel.ask(lambda seq, at_s: Take(sender, seq, at_s, ask, offer.sender, number))

            def is_it(reply: Reply, number: int = number) -> bool:
                return isinstance(reply, No) or (isinstance(reply, Told) and reply.number == number)

            try:
                answer = await self._reply_to(wanted, is_it, PIECE_TRIES if number else EXPORT_TRIES)
            except TimeoutError:
                raise SnapshotRefused("the sibling does not answer any more") from None
            if isinstance(answer, No):
                raise SnapshotRefused(answer.why)
            assert isinstance(answer, Told)
            pieces.append(answer.data)
            of = answer.of
            if sum(map(len, pieces)) > 2 * MAX_SNAPSHOT_BYTES:
                raise SnapshotRefused("it is too large")
        return offer.sender, _heading(pieces[0]), pieces[1:]

    async def _reply_to(self, ask: Callable[[], None], is_it: Callable[[Reply], bool], tries: int) -> Reply:
        """Asks again when no answer comes: messages may be lost. Raises TimeoutError."""
        for _ in range(tries):
            ask()
            try:
                async with asyncio.timeout(ANSWER_S):
                    while True:
                        reply = await self._replies.get()
                        if is_it(reply):
                            return reply
            except TimeoutError:
                continue
        raise TimeoutError

    async def _take_over(self, rank: Rank, batches: Batches, heading: Heading, pieces: list[bytes]) -> int:
        """Blocks taken over. Raises SnapshotRefused; from the first change on the rank then holds nothing."""
        until_s = self._clock() + CATCH_UP_S
        while not batches.void and heading.seq not in batches.kept and self._clock() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # its batch comes over the engine's stream
        _check_run(batches, heading)
        assert rank.ledger is not None
        ledger = rank.ledger
        restoring = Restoring(ledger, heading.facts)
        applied = rank.last_seq
        batches.holding, batches.spoilt = True, ledger.reset
        rank.doubt("restore", "replaying", "a sibling's knowledge of its blocks is being taken over")
        try:
            restoring.begin()
            await _in_slices(restoring, pieces, batches)
            restoring.end()
            applied = heading.seq
        except (SnapshotRefused, msgspec.MsgspecError):
            if not batches.void:
                ledger.reset()
            raise
        finally:
            while not batches.void and batches.release(applied, 50):
                applied = rank.last_seq
                await asyncio.sleep(0)
        return sum(heading.facts.blocks)


def _check_run(batches: Batches, heading: Heading) -> None:
    if batches.void:
        raise SnapshotRefused("the rank's stream broke meanwhile")
    payload = batches.kept.get(heading.seq)
    if payload is None:
        raise SnapshotRefused(f"batch {heading.seq}, up to which it reaches, did not come")
    if digest(payload) != heading.digest:
        raise SnapshotRefused(f"the sibling's batch {heading.seq} is another one: it hears another process")


async def _in_slices(restoring: Restoring, pieces: list[bytes], batches: Batches) -> None:
    until_s = time.monotonic() + SLICE_S
    for data in pieces:
        for _ in restoring.take(_piece(data)):
            if time.monotonic() > until_s:
                await asyncio.sleep(0)
                until_s = time.monotonic() + SLICE_S
            if batches.void:
                raise SnapshotRefused("the rank's stream broke meanwhile")
