"""Why a rank is not believed although its stream is in order, and what a worker's ranks look like together. Pure.

A stream can be connected, gapless and useless: a publisher that connects instead of binding, a topic that is not ours,
a rank that speaks on another's port, stores of a width nobody knows (design, section 4; cases 11, 12, 16, 17). What the
stream cannot see shows in what was served meanwhile, and in how the ranks compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SILENT_REQUESTS = 3
"""Requests with new tokens that were served, with no event since: one could be a request of unknown length."""
SILENT_AFTER_S = 3.0
"""How long ago the first of them must have ended: engines publish with the step, vLLM's with the next one."""
SILENT_BLOCKS = 2
"""New blocks that a request must have filled to count."""
UNUSABLE_STORES = 16
"""Stores in a row that could not be used, after which nothing is believed of the rank."""
STRAY_BATCHES = 8
"""Batches that name one other rank before that is worth telling; a few are a restart's."""
STRAY_S = 60.0
"""So long after the last of them it is over."""
MAX_NAMES = 16


class Doubt(NamedTuple):
    """The state a live stream is shown as instead, and why."""

    state: str
    reason: str


class Silence:
    """Requests the engine must have cached something of, since the last event."""

    def __init__(self) -> None:
        self.requests = 0
        self.new_tokens = 0
        self._first_s = 0.0

    def heard(self) -> None:
        self.requests = self.new_tokens = 0

    def served(self, new_tokens: int, now_s: float) -> None:
        if self.requests == 0:
            self._first_s = now_s
        self.requests += 1
        self.new_tokens += new_tokens

    def lasts(self, now_s: float) -> bool:
        return self.requests >= SILENT_REQUESTS and now_s - self._first_s >= SILENT_AFTER_S


class UnusableStores:
    """Counts stores in a row of which no block could be kept."""

    def __init__(self) -> None:
        self.known = 0
        """The total of unusable ones that was last told."""
        self._kept = 0
        self._before = 0

    def in_a_row(self, kept_blocks: int, unusable: int) -> int:
        """Both are the ledger's totals. Needs to be told only when `unusable` grew."""
        known, self.known = self.known, unusable
        if kept_blocks != self._kept:
            self._kept, self._before = kept_blocks, known
        return unusable - self._before


class Strays:
    """The other ranks that a rank's batches name (case 12), counted."""

    def __init__(self) -> None:
        self.names: Counter[int] = Counter()
        self._last_s = 0.0

    def saw(self, name: int, now_s: float) -> None:
        if name in self.names or len(self.names) < MAX_NAMES:
            self.names[name] += 1
        self._last_s = now_s

    def named(self, now_s: float) -> int | None:
        """The rank named most often, while it is worth telling."""
        if not self.names or now_s - self._last_s > STRAY_S:
            return None
        name, count = self.names.most_common(1)[0]
        return name if count >= STRAY_BATCHES else None


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, as far as the judgement of all of them needs it. `names`: see `Strays.named`."""

    number: int
    state: str
    endpoint: str | None
    names: int | None


class RanksFinding(NamedTuple):
    """For the drift item of kind `ranks`."""

    observed: str
    advice: str


_ADVICE = {
    "off": "has no event port that can be dialled: see its reason",
    "unreachable": "nothing accepts connections at its event port: open the ports base to base + dp_size - 1 from "
    "here; ranks on other nodes need workers[].kv_events.endpoints; SGLang before the pure-DP fix put all ranks on one "
    "port",
    "silent": "requests are served and no event comes: the topic, a publisher that connects instead of binding "
    '(endpoint tcp://*:PORT, or "bind":true), or a disabled prefix cache',
    "duplicated": "two publishers speak on its port: one event port a rank, one publishing process a rank",
}


def judge_ranks(ranks: Sequence[RankView]) -> RanksFinding | None:
    """What is wrong with the advertised ranks, None when every one of them is heard on a port of its own."""
    observed, advice = [], []
    for state, words in _ADVICE.items():
        numbers = [rank.number for rank in ranks if rank.state == state]
        if numbers:
            observed.append(f"{_ranks(numbers)} {state}")
            advice.append(f"{_ranks(numbers)}: {words}")
    for sharing in _sharing(ranks):
        observed.append(f"{_ranks(sharing)} on one port")
        advice.append(f"{_ranks(sharing)}: one event endpoint is listed for all of them; every rank has its own")
    told = {rank.number: rank.names for rank in ranks if rank.names is not None}
    for number, name in told.items():
        if told.get(name) == number and number < name:
            observed.append(f"ranks {number} and {name} crossed")
            advice.append(f"ranks {number} and {name} name each other in their batches: their event ports are swapped")
        elif told.get(name) != number:
            observed.append(f"rank {number} names rank {name}")
            advice.append(
                f"rank {number}'s port delivers batches that name rank {name}: several ranks share that port, or the "
                "engine numbers its batches wrongly. The port is believed; give every rank an event port of its own"
            )
    return RanksFinding("; ".join(observed), "; ".join(advice)) if observed else None


def _sharing(ranks: Iterable[RankView]) -> list[list[int]]:
    at: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.endpoint is not None:
            at.setdefault(rank.endpoint, []).append(rank.number)
    return [numbers for numbers in at.values() if len(numbers) > 1]


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"
