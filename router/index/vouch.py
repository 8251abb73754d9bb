"""Cold join (design section 5): what a rank holds although its store was never heard. Pure.

Roots are stored once and never announced again. A router that joined late, or lost a stretch of the stream, sees only
what is stored below them. Engines evict leaves first, so a store whose parent is not resident here proves that the
parent and everything above it is: as far as that chain is known, those blocks count as resident from then on, until a
removal of them is announced. So do the blocks an engine says it reused for a request.

Two kinds of worker, two ways. Where the engine's hashes are the keys, a key names its whole prefix: chains are known
from prompts routed and from events of any rank (`Chains`), and removals name the vouched block (`Voucher`). Where our
own chain is the key, an engine's name for a block it was never heard to store is unknown: see `adopt`.

Nothing here may credit too much: a vouched copy yields to any announced removal and to a real store of the block, and
a block whose removal was announced is vouched for only after it was stored again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from router.contract.events import Tier
from router.hashing import Scheme
from router.index.prefix import PrefixIndex
from router.index.scheme import rekeyed

MAX_LINKS = 131_072  # per generation, two each for prompts and for events: 90 B a link, made only while needed
MAX_TOLD_BLOCKS = 131_072  # of recent stores, whose tuples the index shares
MAX_WAITING = 65_536  # ranks' unknown parents whose chain may still become known
MAX_GONE = 8_192  # announced removals remembered per generation and rank

_UNKNOWN = object()


class Mark(NamedTuple):
    """A point in a rank's stream: what a report is worth depends on what was announced since."""

    epoch: int
    removals: int


class _Recent:
    """A dict of the newest `limit` to 2 × `limit` entries. What is dropped goes to `discard`, to be freed in slices."""

    def __init__(self, limit: int, discard: Callable[[dict[Any, Any]], None]) -> None:
        self._limit = limit
        self._discard = discard
        self._young: dict[int, int | None] = {}
        self._old: dict[int, int | None] = {}

    def update(self, items: Iterable[tuple[int, int | None]]) -> None:
        self._young.update(items)
        if len(self._young) > self._limit:
            self._discard(self._old)
            self._old, self._young = self._young, {}

    def get(self, key: int) -> object:
        found = self._young.get(key, _UNKNOWN)
        return self._old.get(key, _UNKNOWN) if found is _UNKNOWN else found

    def learn_chain(self, keys: Sequence[int]) -> Sequence[int]:
        """Each key with the one before it. A key names its whole prefix: where one is among the young entries, all
        before it are. Returns what was not there."""
        young = self._young
        known, unknown = 0, len(keys)
        while known < unknown:
            middle = (known + unknown) // 2
            if keys[middle] in young:
                known = middle + 1
            else:
                unknown = middle
        if known:
            fresh = keys[known:]
            if fresh:
                self.update(zip(fresh, keys[known - 1 :], strict=False))
            return fresh
        self.update(zip(keys, chain((None,), keys), strict=False))
        return keys

    def __contains__(self, key: int) -> bool:
        return key in self._young or key in self._old

    def forget(self, keys: Sequence[int]) -> None:
        for part in (self._young, self._old):
            if part and not part.keys().isdisjoint(keys):
                for key in keys:
                    part.pop(key, None)

    def clear(self) -> None:
        self._discard(self._young)
        self._discard(self._old)
        self._young, self._old = {}, {}


class Chains:
    """Which block follows which, fleet-wide, in bounded memory.

    Links made from a prompt's ids are certain and come before those an event claims. Prompts are learnt only while some
    rank's history is partial; stores are noted always (a deque entry each), because a gap may come, and made into links
    when the first parent is looked for. `discard` frees dicts (`PrefixIndex.discard`).
    """

    def __init__(self, discard: Callable[[dict[Any, Any]], None]) -> None:
        self._prompts = _Recent(MAX_LINKS, discard)
        self._events = _Recent(MAX_LINKS, discard)
        self._told: deque[tuple[int | None, Sequence[int]]] = deque()
        self._told_blocks = 0
        self._waiting: dict[int, list[tuple[Voucher, int, Tier]]] = {}
        self._waiting_count = 0
        self._partial: dict[Voucher, None] = {}
        self._schemes: set[Scheme] | None = None
        self._rekeyed = 0  # as of `_schemes`

    def join(self, voucher: Voucher) -> None:
        self._partial[voucher] = None
        self._schemes = None

    def leave(self, voucher: Voucher) -> None:
        self._partial.pop(voucher, None)
        self._schemes = None
        if not self._partial:
            self._waiting, self._waiting_count = {}, 0
            self._prompts.clear()
            self._events.clear()

    def schemes(self) -> set[Scheme]:
        """Under which prompts are worth learning now; empty when every history is complete. Not to be changed."""
        if self._schemes is None or self._rekeyed != rekeyed():
            self._rekeyed = rekeyed()
            self._schemes = {voucher.scheme() for voucher in self._partial}
        return self._schemes

    def prompt(self, keys: Sequence[int]) -> None:
        """A prompt was routed: its blocks from the first one on, under a scheme keyed by the engine's hashes."""
        if keys and self._partial:
            fresh = self._prompts.learn_chain(keys)
            if fresh and self._waiting:
                self._wake(fresh)

    def stored(self, parent: int | None, keys: Sequence[int]) -> None:
        """Some rank announced `keys` below `parent` (None: from the root)."""
        self._told.append((parent, keys))
        self._told_blocks += len(keys)
        if self._told_blocks > MAX_TOLD_BLOCKS:
            while self._told_blocks > MAX_TOLD_BLOCKS // 2:  # half of it at once: every store comes through here
                self._told_blocks -= len(self._told.popleft()[1])
        if self._waiting and not self._waiting.keys().isdisjoint(keys):
            self._wake(keys)

    def parent(self, key: int) -> object:
        """The key before `key`; None for a first block; another object where it is unknown."""
        found = self._prompts.get(key)
        if found is not _UNKNOWN:
            return found
        while self._told:
            above, keys = self._told.popleft()
            self._events.update(zip(keys, chain((above,), keys), strict=False))
        self._told_blocks = 0
        return self._events.get(key)

    def wait(self, top: int, voucher: Voucher, origin: int, tier: Tier) -> bool:
        """`voucher.resume(origin, tier)` once the parent of `top` is known. False: too many wait already."""
        if self._waiting_count >= MAX_WAITING:
            self._drop_stale()
            if self._waiting_count >= MAX_WAITING:
                return False
        self._waiting.setdefault(top, []).append((voucher, origin, tier))
        self._waiting_count += 1
        return True

    def _drop_stale(self) -> None:
        kept: dict[int, list[tuple[Voucher, int, Tier]]] = {}
        for top, entries in self._waiting.items():
            alive = [entry for entry in entries if entry[0].waits(entry[1], top)]
            if alive:
                kept[top] = alive
        self._waiting = kept
        self._waiting_count = sum(map(len, kept.values()))

    def _wake(self, keys: Sequence[int]) -> None:
        if not self._waiting or self._waiting.keys().isdisjoint(keys):
            return
        for key in keys:
            for voucher, origin, tier in self._waiting.pop(key, ()):
                self._waiting_count -= 1
                if voucher.waits(origin, key):
                    voucher.resume(origin, tier)


class Voucher:
    """One rank's blocks that were never heard stored, where the engine's hashes are the keys.

    `partial`: the rank may hold blocks from before its history begins; without that nothing is ever vouched for.
    `vouched`: for reading. Stores and removals are to be told while either is true.
    """

    def __init__(self, index: PrefixIndex, slot: int, chains: Chains, scheme: Callable[[], Scheme]) -> None:
        self.scheme = scheme
        self.partial = False
        self.vouched_total = 0
        self._index = index
        self._slot = slot
        self._chains = chains
        self.vouched: dict[int, Tier] = {}
        self._origins: dict[int, int] = {}  # parent that must be resident → the key above which its chain is unknown
        self._gone = _Recent(MAX_GONE, index.discard)
        self._epoch = 0
        self._removals = 0
        self._full = False  # the index refused vouched blocks: no more of them before the next clear

    def __len__(self) -> int:
        """Blocks counted as resident on an inference alone."""
        return len(self.vouched)

    def set_partial(self, partial: bool) -> None:
        if partial == self.partial:
            return
        self.partial = partial
        if partial:
            self._chains.join(self)
        else:
            self._chains.leave(self)
            self._origins = {}

    @property
    def mark(self) -> Mark:
        return Mark(self._epoch, self._removals)

    def clear(self) -> None:
        """The rank holds nothing, or nothing that is known."""
        self._index.discard(self.vouched)
        self.vouched, self._origins = {}, {}
        self._gone.clear()
        self._epoch += 1
        self._full = False

    def storing(self, keys: Sequence[int], tier: Tier) -> None:
        """Before a store is counted: it takes the place of a vouched copy, which may have been the same one."""
        vouched = self.vouched
        if vouched and not vouched.keys().isdisjoint(keys):
            known = [key for key in keys if vouched.get(key) == tier]
            for key in known:
                vouched.pop(key, None)
            self._index.remove(self._slot, tier, known)
        self._gone.forget(keys)

    def removed(self, keys: Sequence[int], tier: Tier | None) -> None:
        """Before a removal is counted. A vouched copy goes with a removal from any tier: where it lay was a guess."""
        vouched = self.vouched
        if vouched and not vouched.keys().isdisjoint(keys):
            for key in keys:
                held = vouched.pop(key, None)
                if held is not None and tier is not None and held != tier:
                    self._index.remove(self._slot, held, (key,))
        if not self.partial:
            return
        self._removals += len(keys)
        self._gone.update(zip(keys, keys, strict=True))
        if self._origins and not self._origins.keys().isdisjoint(keys):
            for key in keys:
                self._origins.pop(key, None)

    def orphan(self, parent: int, tier: Tier) -> None:
        """A block was stored in `tier` below `parent`, which is not known to be resident, and so must be."""
        if self.partial and (parent in self._origins or len(self._origins) < MAX_WAITING):
            self.resume(parent, tier)

    def waits(self, origin: int, top: int) -> bool:
        return self._origins.get(origin) == top

    def resume(self, origin: int, tier: Tier) -> None:
        """Follows the chain above `origin` (inclusive) and counts it as resident, if it is known to its beginning or
        to a block that is resident. If not, this is tried again when the missing link comes."""
        self._origins.pop(origin, None)
        found: dict[int, None] = {}
        for step in self._upwards(origin):
            if step is None or self._index.holds(self._slot, step):
                self._vouch(list(reversed(found)), tier)
                return
            if step in found or step in self._gone or self._full:
                return  # events claim a circle; or its removal was announced: a hole, by this engine's own word
            found[step] = None
            top = step
        if found and self._chains.wait(top, self, origin, tier):
            self._origins[origin] = top

    def _upwards(self, key: int) -> Iterator[int | None]:
        """`key`, its parent, and so on: ends with None after a first block, without it where the chain is unknown."""
        above: object = key
        while isinstance(above, int):
            yield above
            above = self._chains.parent(above)
        if above is None:
            yield None

    def reported(self, keys: Sequence[int], since: Mark) -> None:
        """The engine says it reused these blocks, a prompt's first ones, for a request placed at `since`."""
        if not self.partial or since.epoch != self._epoch or self._removals - since.removals > MAX_GONE:
            return
        missing = []
        for key in keys:
            if key in self._gone:
                break
            if not self._index.holds(self._slot, key):
                missing.append(key)
        self._vouch(missing, Tier.GPU)

    def _vouch(self, keys: Sequence[int], tier: Tier) -> None:
        refused = self._index.store(self._slot, tier, keys) if keys else 0
        self._full = self._full or refused > 0
        kept = keys[: len(keys) - refused]
        self.vouched.update(dict.fromkeys(kept, tier))
        self.vouched_total += len(kept)
