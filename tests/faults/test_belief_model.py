"""Tracker, ledger and index together, against a model of engines with radix caches: what is credited is true.

The world is that of the sequence model (publish, drop, burn, deliver twice, reorder, cut, restart, end, replay badly);
each batch stores, evicts leaves or clears. While the rank is live its credit never exceeds what the publisher held when
it sent the last batch applied, equals it where the history is complete, and is that of the present publisher once the
world is at rest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from router.contract.events import decode_batch
from router.hashing import Namespace, pack_ids, prompt_keys
from router.index.ledger import RankLedger
from router.index.prefix import PrefixIndex
from router.index.scheme import WorkerScheme
from router.stream.actions import Action, Apply, Reset
from tests.stream.test_sequence_model import Engine, Message, StreamMachine
from tests.support.engine import stored

CLEARED = {"type": "AllBlocksCleared"}
WIDTH = 2
DEPTH = 4
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4, 9, 10, 11, 12],
    [1, 2, 13, 14, 15, 16, 17, 18],
    [21, 22, 23, 24, 25, 26, 27, 28],
]
CHAINS = [prompt_keys(WorkerScheme(WIDTH, "sglang").scheme, pack_ids(p), Namespace()) or [] for p in PROMPTS]


class CachingEngine(Engine):
    """Batch 0 is the clear of cache construction, every other one a few random steps. `world.sent[payload]`: the batch,
    and the blocks held when it was sent."""

    def __init__(self, process: int, rng: random.Random, world: BeliefMachine) -> None:
        super().__init__(process)
        self._rng = rng
        self._world = world
        self.cache: set[int] = set()

    def publish(self) -> Message:
        seq, payload = super().publish()
        events = [self._step() for _ in range(self._rng.randint(1, 3))] if seq else [CLEARED]
        self._world.sent[payload] = msgspec.msgpack.encode([0.0, events, 0]), frozenset(self.cache)
        return seq, payload

    def _step(self) -> dict[str, Any]:
        number, action = self._rng.randrange(len(PROMPTS)), self._rng.random()
        prompt, chain = PROMPTS[number], CHAINS[number]
        have = next((n for n, key in enumerate(chain) if key not in self.cache), DEPTH)
        if action < 0.55 and have < DEPTH:
            upto = self._rng.randint(have + 1, DEPTH)
            self.cache.update(chain[have:upto])
            tokens = prompt[have * WIDTH : upto * WIDTH]
            return stored(chain[have:upto], tokens, WIDTH, parent=chain[have - 1] if have else None)
        leaves = [key for key in sorted(self.cache) if not self._children(key)]
        if action < 0.95 and leaves:
            gone = self._rng.sample(leaves, self._rng.randint(1, len(leaves)))
            self.cache.difference_update(gone)
            return {"type": "BlockRemoved", "block_hashes": gone}
        self.cache.clear()
        return CLEARED

    def _children(self, key: int) -> bool:
        return any(a == key and b in self.cache for chain in CHAINS for a, b in pairwise(chain))


class BeliefMachine(StreamMachine):
    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.sent: dict[bytes, tuple[bytes, frozenset[int]]] = {b"": (b"", frozenset())}
        self.index = PrefixIndex()
        self.slot = self.index.open_slot()
        self.ledger = RankLedger(self.index, self.slot, WorkerScheme(WIDTH, "sglang"))
        super().__init__()

    def new_engine(self, process: int) -> Engine:
        return CachingEngine(process, self.rng, self)

    @initialize(seed=st.integers(0, 2**32))
    def plan(self, seed: int) -> None:
        self.rng.seed(seed)

    def took(self, actions: Sequence[Action]) -> None:
        for action in actions:
            super().took([action])
            match action:
                case Apply(_, payload):
                    self.ledger.apply(decode_batch(self.sent[payload][0]))
                case Reset():
                    self.ledger.reset()
                case _:
                    pass

    def credits(self) -> list[int]:
        return [self.index.match(chain).get(self.slot, (0, 0, 0, 0))[0] for chain in CHAINS]

    @staticmethod
    def truth(held: frozenset[int]) -> list[int]:
        return [next((n for n, key in enumerate(chain) if key not in held), DEPTH) for chain in CHAINS]

    @invariant()
    def what_is_credited_is_true(self) -> None:
        if not hasattr(self, "tracker") or self.tracker.state != "live" or not self.applied:
            return
        truth, credits = self.truth(self.sent[self.applied[-1][1]][1]), self.credits()
        if self.tracker.history == "complete":
            assert credits == truth
        else:
            assert all(credit <= true for credit, true in zip(credits, truth, strict=True))

    @invariant()
    def nothing_held_is_nothing_credited(self) -> None:
        if not self.applied:
            assert self.credits() == [0] * len(CHAINS)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "tracker"):
            assert isinstance(self.engine, CachingEngine)
            now = self.truth(frozenset(self.engine.cache))
            assert all(credit <= true for credit, true in zip(self.credits(), now, strict=True))
            if self.tracker.history == "complete":
                assert self.credits() == now


TestBeliefMachine = BeliefMachine.TestCase
TestBeliefMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
