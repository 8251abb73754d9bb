"""Modelled radix caches behind ledgers that may join late: truth and belief side by side."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgpack

from router.contract.events import decode_batch
from router.engine.radix import Cleared, RadixCache, Removed, Stored
from router.hashing import Namespace, Scheme, TokenIds, creditable_blocks, pack_ids, prompt_keys, token_count
from router.index.ledger import RankLedger, Routed, WorkerScheme
from router.index.prefix import PrefixIndex
from router.index.vouch import Chains
from tests.index.streams import CLEARED, removed, store

WIDTH = 2
SGLANG = Scheme("sglang-sha256", WIDTH)
PLAIN = Namespace()


@dataclass
class Report:
    """A usage report on its way to the router."""

    rank: ModelRank
    routed: Routed | None
    prompt_tokens: int
    cached_tokens: int


class ModelRank:
    """One engine rank. `heard` is its ledger, None until the router joins. vLLM names blocks by hashes of its own."""

    def __init__(self, fleet: ModelFleet, capacity_blocks: int, engine: str, salt: int) -> None:
        self.cache = RadixCache(capacity_blocks)
        self.heard: RankLedger | None = None
        self.slot = -1
        self._fleet = fleet
        self._engine = engine
        self._salt = salt

    def join(self) -> None:
        self.slot = self._fleet.index.open_slot()
        worker = WorkerScheme(WIDTH, self._engine)
        self.heard = RankLedger(self._fleet.index, self.slot, worker, self._fleet.chains)
        self.heard.set_history(complete=False)

    def scheme(self) -> Scheme:
        return SGLANG if self._engine == "sglang" else Scheme("xxh3", WIDTH)

    def name(self, key: int) -> int:
        if self._engine == "sglang":
            return key
        return random.Random(key ^ self._salt).getrandbits(64) - 2**63

    def serve(self, ids: TokenIds, output: TokenIds, *, may_report: bool = True) -> Report:
        """Runs one prompt, publishes what the cache did, and returns the report the router will get."""
        keys = prompt_keys(SGLANG, ids) or []
        own = (prompt_keys(self.scheme(), ids) or [])[: creditable_blocks(SGLANG, token_count(ids))]
        routed = None
        if self.heard is not None:
            if self._engine == "sglang":
                self._fleet.chains.prompt(own)
            routed = self.heard.routed(ids, own, None)
        cached = min(self.cache.match(PLAIN, keys).pages, creditable_blocks(SGLANG, token_count(ids)))
        self._insert(keys, ids)
        self.publish()
        whole = ids + output
        self._insert(prompt_keys(SGLANG, whole) or [], whole)
        self.publish()
        return Report(self, routed, token_count(ids), cached * WIDTH if may_report else 0)

    def _insert(self, keys: list[int], ids: TokenIds) -> None:
        found = self.cache.match(PLAIN, keys)
        self.cache.pin(found.node)
        if self.cache.allocate(len(keys) - found.pages):
            self.cache.insert(PLAIN, keys, ids)
        self.cache.unpin(found.node)

    def publish(self) -> None:
        events = []
        for event in self.cache.take_events():
            if isinstance(event, Stored):
                start = event.first_page * WIDTH * 4
                ids = event.ids[start : start + len(event.keys) * WIDTH * 4]
                tokens = list(memoryview(ids).cast("I"))
                parent = None if event.parent_key is None else self.name(event.parent_key)
                events.append(store(tokens, [self.name(key) for key in event.keys], parent, WIDTH))
            elif isinstance(event, Removed):
                events.append(removed([self.name(key) for key in event.keys]))
            else:
                assert isinstance(event, Cleared)
                events.append(CLEARED)
        if self.heard is not None and events:
            self.heard.apply(decode_batch(msgpack.packb([1.0, events])))

    def truth(self, ids: TokenIds) -> int:
        """Blocks of the prompt the engine would reuse now."""
        keys = prompt_keys(SGLANG, ids) or []
        return min(self.cache.peek(PLAIN, keys), creditable_blocks(SGLANG, token_count(ids)))

    def credit(self, ids: TokenIds) -> int:
        """Blocks of it the router believes to be there."""
        keys = prompt_keys(self.scheme(), ids) or []
        found = self._fleet.index.match(keys, creditable_blocks(SGLANG, token_count(ids)))
        return max(found.get(self.slot, (0,)))


@dataclass
class ModelFleet:
    """Ranks over one index, and conversations that grow."""

    rng: random.Random
    engine: str = "sglang"
    ranks: list[ModelRank] = field(default_factory=list)
    talks: list[list[int]] = field(default_factory=list)
    question_tokens: tuple[int, int] = (1, 5)

    def __post_init__(self) -> None:
        self.index = PrefixIndex()
        self.chains = Chains(self.index.discard)

    def populate(self, ranks: int, capacity_blocks: int, talks: int, tokens: int = 7) -> None:
        self.ranks = [ModelRank(self, capacity_blocks, self.engine, self.rng.getrandbits(60)) for _ in range(ranks)]
        systems = [[1000 + n] * tokens for n in range(2)]
        self.talks = [[*self.rng.choice(systems)] for _ in range(talks)]

    def prompt(self, number: int) -> TokenIds:
        return pack_ids(self.talks[number])

    def turn(self, number: int, rank: ModelRank, *, may_report: bool = True) -> Report:
        """The conversation's next turn: a question, and an answer that is part of the next prompt."""
        talk = self.talks[number]
        talk.extend(self.rng.randrange(50) for _ in range(self.rng.randint(*self.question_tokens)))
        answer = [self.rng.randrange(50) for _ in range(self.rng.randrange(0, 5))]
        report = rank.serve(pack_ids(talk), pack_ids(answer), may_report=may_report)
        talk.extend(answer)
        return report


def deliver(report: Report) -> None:
    if report.routed is not None and report.rank.heard is not None:
        report.rank.heard.served(report.routed, report.cached_tokens)
