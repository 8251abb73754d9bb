"""What one rank holds, as bytes for another router, and back. Pure; in slices, so that nobody waits for a large one.

Only an exact state is told: everything the rank stored since its cache was last empty was heard, nothing is inferred,
and no removal can have been missed. Both sides see to it that no batch is applied meanwhile, or the copy is not of one
moment. Runs are told as they stand: consecutive blocks of a chain, which keeps the other index as compact as this one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from router.contract.events import Tier
from router.index.ledger import RankLedger

PIECE_BLOCKS = 8192
NAMES = len(Tier)
"""`what` of a piece with engine hashes and our own keys, in turn; smaller numbers are tiers."""
SLICE_RUNS = 500
"""Looked at between two yields."""

Blocks = Annotated[int, Meta(ge=0, le=1 << 40)]


class Facts(msgspec.Struct, array_like=True, frozen=True):
    """How the blocks are to be understood, and how many there are by tier: what arrived is counted."""

    kind: str
    width: int
    bigram: bool
    blocks: tuple[Blocks, Blocks, Blocks, Blocks]
    names: Blocks
    has_adapters: bool
    other_groups: Annotated[list[int], Meta(max_length=256)]
    copies: Annotated[list[tuple[int, int, int]], Meta(max_length=1_000_000)]
    """(tier, key, copies beyond the first)."""


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """`lengths`: of the runs whose keys follow each other in `keys` (int64, little-endian)."""

    what: Annotated[int, Meta(ge=0, le=NAMES)]
    lengths: list[int]
    keys: bytes


class SnapshotRefused(Exception):
    """The text says why the state cannot be told, or not be taken over."""


def facts_of(ledger: RankLedger) -> Facts:
    """Raises SnapshotRefused when the ledger's state is not exact."""
    problem = ledger.inexact
    if problem:
        raise SnapshotRefused(problem)
    of = ledger.inside
    gpu, pinned, disk, external = of.index.blocks(of.slot)
    return Facts(
        of.scheme.kind,
        of.scheme.width,
        of.scheme.bigram,
        (gpu, pinned, disk, external),
        len(of.names),
        of.has_adapters,
        sorted(of.other_groups),
        [(int(tier), key, count) for tier, key, count in of.index.copies(of.slot)],
    )


def told(ledger: RankLedger) -> Iterator[Piece | None]:
    """The pieces; None marks a place to give way to others."""
    of = ledger.inside
    for tier in Tier:
        runs: list[Sequence[int]] = []
        count = 0
        position = 0
        while position >= 0:
            position, found = of.index.runs_of(of.slot, tier, position, SLICE_RUNS)
            for keys in found:
                runs.append(keys)
                count += len(keys)
                if count >= PIECE_BLOCKS:
                    yield _piece(tier, runs)
                    runs, count = [], 0
            yield None
        if runs:
            yield _piece(tier, runs)
    for shard in of.names.pairs():
        for start in range(0, len(shard), PIECE_BLOCKS):
            flat = [number for pair in shard[start : start + PIECE_BLOCKS] for number in pair]
            yield Piece(NAMES, [], _packed(flat))
        yield None


def _piece(tier: Tier, runs: Sequence[Sequence[int]]) -> Piece:
    return Piece(tier, [len(keys) for keys in runs], _packed([key for keys in runs for key in keys]))


def _packed(numbers: Sequence[int]) -> bytes:
    return array("q", numbers).tobytes()


class Restoring:
    """Fills a ledger from pieces. `begin` empties it, `take` each piece in small steps, `end` checks and trusts."""

    def __init__(self, ledger: RankLedger, facts: Facts) -> None:
        self._ledger = ledger
        self._facts = facts

    def begin(self) -> None:
        """Raises SnapshotRefused when the state is of another scheme."""
        facts, scheme = self._facts, self._ledger.inside.scheme
        if (facts.kind, facts.width, facts.bigram) != (scheme.kind, scheme.width, scheme.bigram):
            raise SnapshotRefused(f"the sibling keys this rank's blocks as {facts.kind} of {facts.width} tokens")
        self._ledger.reset()

    def take(self, piece: Piece) -> Iterator[None]:
        """Step by step. Raises SnapshotRefused for what is not well-formed."""
        of = self._ledger.inside
        numbers = array("q")
        try:
            numbers.frombytes(piece.keys)
        except ValueError:
            raise SnapshotRefused("a piece is not made of 8-byte numbers") from None
        if piece.what == NAMES:
            if len(numbers) % 2:
                raise SnapshotRefused("a hash without its key")
            for name, key in zip(numbers[::2], numbers[1::2], strict=True):
                of.names.add(name, key)
            yield
            return
        if sum(piece.lengths) != len(numbers) or any(length < 1 for length in piece.lengths):
            raise SnapshotRefused("a piece's runs are not as long as it says")
        position = 0
        for number, length in enumerate(piece.lengths):
            keys = tuple(numbers[position : position + length])
            of.index.hold(of.slot, Tier(piece.what), keys)
            position += length
            if number % 16 == 15:
                yield
        yield

    def end(self) -> None:
        """From here on the rank's history is whole. Raises SnapshotRefused when something is missing."""
        facts, ledger = self._facts, self._ledger
        of = ledger.inside
        if of.index.blocks(of.slot) != facts.blocks or len(of.names) != facts.names:
            raise SnapshotRefused("blocks are missing from what was told")
        for tier, key, count in facts.copies:
            for _ in range(min(count, 1 << 16)):
                of.index.store(of.slot, Tier(tier), (key,))
        ledger.restored(has_adapters=facts.has_adapters, other_groups=facts.other_groups)
