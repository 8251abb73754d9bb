"""`bench index`: what an event, a removal, a lookup and a block cost one core (this process's CPU time).

Events are SGLang 0.5.23's map form, 16 blocks of 16 tokens each, hashes random as real ones are; they pass through the
decoder and the ledger into the index, so the numbers are those of the serving path without its socket.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from router.contract.events import EventBatch, Tier, decode_batch
from router.fleet.registry import SWEEP_BLOCKS
from router.hashing import Scheme, pack_ids, prompt_keys
from router.index.ledger import RankLedger, WorkerScheme
from router.index.prefix import PrefixIndex

BLOCKS_PER_EVENT = 16
TOKENS_PER_BLOCK = 16
LOOKUP_BLOCKS = (128, 512, 2048)
_EVENTS_PER_BATCH = (1, 8)
_SLICE_EVENTS = 512  # encoded ahead, outside the clock
_ROOT_EVERY = 16
_encoder = msgspec.msgpack.Encoder()


def run(blocks: int, ranks: int) -> dict[str, Any]:
    """Fill an index with `blocks` blocks spread over `ranks` ranks of one worker, then look up and remove.

    Returns the `bench index` object that `--json` writes. `ingest_events_per_s` is that of one event a message, the
    form a loaded engine sends; `…_by_batch` has it for 8 a message too. Lookup times are medians of a prompt seen
    before; `first_lookup_us` is that of the longest prompt, never seen. `clear_us` and `sweep_slice_ms` are what it
    takes to clear one rank, and the slices in which its memory is given back. `bytes_per_block` is growth of this
    process's resident memory. Raises ValueError for numbers that leave nothing to measure.
    """
    if ranks < 1 or blocks < 16_384:
        raise ValueError(
            f"bench index needs --blocks of at least 16384 and --ranks of at least 1, not {blocks}, {ranks}"
        )
    fleet = _Fleet(ranks)
    before = _resident_bytes()
    seconds, events = fleet.fill(blocks)
    grown = _resident_bytes() - before
    held = fleet.index.total_blocks
    lookup_us, with_holes_us = fleet.lookups()
    first_us = fleet.first_lookup_us()
    removed_per_s = fleet.removals()
    clear_us, slices_ms = fleet.clear()
    by_batch = {str(size): round(events[size] / seconds[size]) for size in _EVENTS_PER_BATCH}
    return {
        "blocks": held,
        "ranks": ranks,
        "ingest_events_per_s": by_batch["1"],
        "ingest_events_per_s_by_batch": by_batch,
        "ingest_blocks_per_s": by_batch["1"] * BLOCKS_PER_EVENT,
        "remove_blocks_per_s": round(removed_per_s),
        "lookup_us": lookup_us,
        "lookup_us_with_holes": with_holes_us,
        "first_lookup_us": first_us,
        "clear_us": clear_us,
        "sweep_slice_ms": slices_ms,
        "bytes_per_block": round(grown / held, 1),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """`run`'s result for people."""
    table = Table(title=f"index: {result['blocks']:,} blocks, {result['ranks']} ranks, one core")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for size, rate in result["ingest_events_per_s_by_batch"].items():
        table.add_row(f"ingest, {size} event(s) of 16 blocks a message", f"{rate:,} events/s")
    table.add_row("ingest", f"{result['ingest_blocks_per_s']:,} blocks/s")
    table.add_row("removal", f"{result['remove_blocks_per_s']:,} blocks/s")
    for size in result["lookup_us"]:
        table.add_row(
            f"lookup of {size} blocks, all ranks; with holes",
            f"{result['lookup_us'][size]} µs; {result['lookup_us_with_holes'][size]} µs",
        )
    longest = max(LOOKUP_BLOCKS)
    table.add_row(f"first lookup of {longest} blocks, all ranks", f"{result['first_lookup_us']} µs")
    table.add_row("clear of one rank", f"{result['clear_us']} µs")
    slices = result["sweep_slice_ms"]
    table.add_row("its sweep, a slice: median; worst", f"{slices['median']} ms; {slices['worst']} ms")
    table.add_row("memory", f"{result['bytes_per_block']} bytes/block")
    console.print(table)


class _Fleet:
    """One worker with many ranks, and events for them."""

    def __init__(self, ranks: int) -> None:
        self.random = random.Random(7)
        self.index = PrefixIndex()
        worker = WorkerScheme(TOKENS_PER_BLOCK, "sglang")
        self.slots = [self.index.open_slot() for _ in range(ranks)]
        self.ledgers = [RankLedger(self.index, slot, worker) for slot in self.slots]
        self.last_hash: list[int | None] = [None] * ranks
        self.tokens = [
            [self.random.randrange(150_000) for _ in range(BLOCKS_PER_EVENT * TOKENS_PER_BLOCK)] for _ in range(64)
        ]
        self.encoded_tokens = [msgspec.Raw(_encoder.encode(ids)) for ids in self.tokens]
        self._prove()

    def _prove(self) -> None:
        """One root with SGLang's own hashes, as every real stream soon has: from then on hashes are the keys."""
        keys = prompt_keys(Scheme("sglang-sha256", TOKENS_PER_BLOCK), pack_ids(self.tokens[0]))
        assert keys is not None
        self.ledgers[0].apply(decode_batch(_message([_stored(keys, None, self.encoded_tokens[0])])))

    def fill(self, blocks: int) -> tuple[dict[int, float], dict[int, int]]:
        """Seconds and events per messages' size, in alternating slices so that all see the same index."""
        seconds = dict.fromkeys(_EVENTS_PER_BATCH, 0.0)
        events = dict.fromkeys(_EVENTS_PER_BATCH, 0)
        rank = 0
        while self.index.total_blocks < blocks:
            for size in _EVENTS_PER_BATCH:
                messages = []
                for _ in range(_SLICE_EVENTS // size):
                    rank = (rank + 1) % len(self.ledgers)
                    messages.append((self.ledgers[rank], _message([self._store(rank) for _ in range(size)])))
                seconds[size] += _timed(messages)
                events[size] += len(messages) * size
        return seconds, events

    def _store(self, rank: int) -> dict[str, Any]:
        hashes = self._hashes(BLOCKS_PER_EVENT)
        parent = self.last_hash[rank] if self.random.randrange(_ROOT_EVERY) else None
        self.last_hash[rank] = hashes[-1]
        return _stored(hashes, parent, self.random.choice(self.encoded_tokens))

    def _hashes(self, count: int) -> list[int]:
        return [self.random.getrandbits(64) - 2**63 for _ in range(count)]

    def lookups(self) -> tuple[dict[str, float], dict[str, float]]:
        """Median µs of a lookup: all ranks hold the whole chain; all but one lack one block somewhere."""
        whole, holed = {}, {}
        for blocks in LOOKUP_BLOCKS:
            chain = self._resident_chain(blocks)
            query = [key + 0 for key in chain]  # a prompt's keys are not the objects the index holds
            whole[str(blocks)] = self._lookup_us(query, dict.fromkeys(self.slots, blocks))
            # The first rank keeps its chain, so that no lookup ends early.
            holes = {slot: self.random.randrange(blocks) for slot in self.slots[1:]}
            for slot, hole in holes.items():
                self.index.remove(slot, Tier.GPU, [chain[hole]])
            holed[str(blocks)] = self._lookup_us(query, {self.slots[0]: blocks} | holes)
            for slot in self.slots:
                self.index.remove(slot, None, chain)
        return whole, holed

    def _resident_chain(self, blocks: int) -> list[int]:
        """A prompt's keys that every rank holds."""
        chain = self._hashes(blocks)
        for slot in self.slots:
            for start in range(0, blocks, BLOCKS_PER_EVENT):
                self.index.store(slot, Tier.GPU, chain[start : start + BLOCKS_PER_EVENT])
        return chain

    def first_lookup_us(self) -> float:
        """Median µs of the first lookup of a prompt."""
        return round(statistics.median([self._first_lookup_s() for _ in range(15)]) * 1e6, 1)

    def _first_lookup_s(self) -> float:
        chain = self._resident_chain(max(LOOKUP_BLOCKS))
        query = [key + 0 for key in chain]
        (seconds,) = _repeat(lambda: self.index.match(query), 1)
        for slot in self.slots:
            self.index.remove(slot, None, chain)
        return seconds

    def clear(self) -> tuple[float, dict[str, float]]:
        """(µs to clear the first rank, ms a slice of the sweep that follows)."""
        while self.index.sweep(SWEEP_BLOCKS):
            pass
        (cleared_s,) = _repeat(lambda: self.index.clear(self.slots[0]), 1)
        slices_s = []
        more = True
        while more:
            start = time.process_time()
            more = self.index.sweep(SWEEP_BLOCKS)
            slices_s.append(time.process_time() - start)
        return round(cleared_s * 1e6, 1), {
            "median": round(statistics.median(slices_s) * 1e3, 2),
            "worst": round(max(slices_s) * 1e3, 2),
        }

    def _lookup_us(self, query: list[int], expected: dict[int, int]) -> float:
        found = self.index.match(query)
        assert {slot: depths[0] for slot, depths in found.items()} == {s: d for s, d in expected.items() if d}
        return round(statistics.median(_repeat(lambda: self.index.match(query), 101)) * 1e6, 1)

    def removals(self) -> float:
        """Blocks a second through the decoder and the ledger, of blocks that are there."""
        messages = []
        blocks = 0
        for slot, ledger in zip(self.slots, self.ledgers, strict=True):
            for _ in range(4):
                hashes = self._hashes(256)
                self.index.store(slot, Tier.GPU, hashes)
                event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
                messages.append((ledger, _message([event])))
                blocks += len(hashes)
        return blocks / _timed(messages)


def _stored(hashes: list[int], parent: int | None, tokens: msgspec.Raw) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": TOKENS_PER_BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }


def _message(events: list[dict[str, Any]]) -> bytes:
    return _encoder.encode([1_700_000_000.0, events, 0])


def _timed(messages: Iterable[tuple[RankLedger, bytes]]) -> float:
    decode: Callable[[bytes], EventBatch] = decode_batch
    start = time.process_time()
    for ledger, payload in messages:
        ledger.apply(decode(payload))
    return time.process_time() - start


def _repeat(call: Callable[[], object], times: int) -> Iterator[float]:
    for _ in range(times):
        start = time.process_time()
        call()
        yield time.process_time() - start


def _resident_bytes() -> int:
    """Resident memory of this process now. Linux only, like the product's containers; elsewhere its peak."""
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
