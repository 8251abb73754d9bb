"""What one (worker, rank) holds: its event batches, folded into the index. Pure.

Apply each batch once and in order (the stream's business); residency counts are right only then. Which block an event
means depends on the worker's scheme: either the engine's hash is the key, or our own chain is (see `scheme`, `names`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.contract.events import (
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Tier,
    WireError,
    decode_token_ids,
    tier_of,
    token_units,
)
from router.hashing import Scheme, TokenIds, bigrams, sglang_chain, xxh3_chain, xxh3_root
from router.index.adopt import Adopter, Expected
from router.index.inside import Inside
from router.index.kept import Kept
from router.index.names import Names, foreign_root, is_root, namespace_of
from router.index.prefix import PrefixIndex
from router.index.scheme import MAX_WIDTH, Finding, WorkerScheme
from router.index.vouch import Chains, Mark, Voucher

__all__ = ["Finding", "LedgerCounters", "RankLedger", "WorkerScheme"]

_FIRST_CHECKS = 4  # root stores recomputed after every clear, then one in _CHECK_EVERY
_CHECK_EVERY = 64
# Adapter blocks are kept under the engine's hash with these bits flipped: their hash may be the base model's.
_ADAPTER_BITS = 0x5BD1E9955BD1E995
# vLLM's hybrid models publish further groups (sliding window, mamba) beside the one that decides a prefix.
_PREFIX_GROUPS = (None, "full_attention", "mla_attention")


@dataclass(slots=True)
class LedgerCounters:
    """Totals since the ledger was made. Events: stored, removed, cleared, skipped (unreadable ones). The rest says what
    became of stores: `odd_widths`, `unknown_media`, `other_groups` were ignored; `orphans` (parent not resident here)
    and `foreign` (other namespaces) are kept without credit; `refused_blocks` met a cap. `doubtful` batches may have
    lost a removal, `switches` folded the rank again under another hash kind."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    skipped: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphans: int = 0
    odd_widths: int = 0
    unknown_media: int = 0
    other_groups: int = 0
    foreign: int = 0
    refused_blocks: int = 0
    doubtful: int = 0
    switches: int = 0
    vouched_blocks: int = 0
    """Ever counted as resident without a store of theirs (router.index.vouch)."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A prompt under way to a rank, for what its usage report will show. `expected` where our own chain is the key."""

    scheme: Scheme
    keys: Sequence[int]
    mark: Mark
    expected: Expected | None


class RankLedger:
    """One rank's residency in `index` under `slot`. `degraded`: a removal may have been missed since the last clear, or
    blocks could not be carried over to another hash kind, so that the index may not show this rank exactly."""

    def __init__(self, index: PrefixIndex, slot: int, worker: WorkerScheme, chains: Chains | None = None) -> None:
        """`chains`: what the fleet's ranks share of it; a ledger of its own has nothing to share."""
        self.counters = LedgerCounters()
        self.degraded = False
        self._index = index
        self._slot = slot
        self._worker = worker
        self._names = Names()
        self._chains = Chains(index.discard) if chains is None else chains
        self._voucher = Voucher(index, slot, self._chains, lambda: worker.scheme)
        self._adopter = Adopter(index, slot, self._names)
        self._held = Kept()  # while the width is open: from the first store of another width on
        self._journal: Kept | None = None if worker.proven else Kept()
        self._heard_clear = False  # since the last reset
        self._roots_seen = 0  # since the last clear
        self._any_stored = False  # since the last clear
        self._has_adapters = False  # since the last clear
        self._other_groups: set[int] = set()
        worker.join(self)

    def apply(self, batch: EventBatch) -> None:
        """Fold one batch, in the order of its events."""
        counters = self.counters
        if batch.skipped:
            counters.skipped += batch.skipped
            if batch.doubtful:
                counters.doubtful += 1
                self.degraded = True
        for event in batch.events:
            if type(event) is BlockStored:
                counters.stored += 1
                if event.kv_cache_spec_kind not in _PREFIX_GROUPS:
                    self._leave_out(event)
                elif self._worker.is_width_settled:
                    self._store(event)
                else:
                    self._weigh(event)
            elif type(event) is BlockRemoved:
                counters.removed += 1
                counters.removed_blocks += len(event.block_hashes)
                if event.group_idx in self._other_groups:
                    continue
                if self._held.events:
                    self._hold(event)
                else:
                    self._remove(event)
            else:
                counters.cleared += 1
                self._clear()
                self._heard_clear = True
                self._voucher.set_partial(False)

    def reset(self) -> None:
        """Whatever the rank held is void (restart, unfillable gap). Not an event: the counters stay. The rank may hold
        more than is known, until `set_history` says otherwise."""
        self._clear()
        self._heard_clear = False
        self._voucher.set_partial(True)

    def close(self) -> None:
        """The rank is gone. The slot stays open; it is the opener's to close."""
        self._clear()
        self._voucher.set_partial(False)
        self._worker.leave(self)

    # Cold join (router.index.vouch).

    def set_history(self, *, complete: bool) -> None:
        """Whether everything the rank holds was announced since the last reset. A clear makes it so."""
        self._voucher.set_partial(not (complete or self._heard_clear))

    @property
    def is_history_complete(self) -> bool:
        return not self._voucher.partial

    def routed(self, ids: TokenIds, keys: Sequence[int], lora_name: str | None) -> Routed | None:
        """A prompt goes to this rank, `keys` being its creditable blocks. None: nothing is to be learnt from it."""
        worker = self._worker
        if not self._voucher.partial or not keys or worker.content_hashes:
            return None
        scheme, expected = worker.scheme, None
        if scheme.kind == "xxh3":
            expected = self._adopter.expect(bigrams(ids) if scheme.bigram else ids, keys, lora_name)
        return Routed(scheme, keys, self._voucher.mark, expected)

    def served(self, routed: Routed, cached_tokens: int | None) -> None:
        """That prompt was answered; the engine reported so many of its tokens as reused (None: it did not say)."""
        same = routed.scheme == self._worker.scheme
        blocks = min((cached_tokens or 0) // routed.scheme.width, len(routed.keys))
        if routed.expected is not None:
            self.counters.vouched_blocks += self._adopter.settle(routed.expected, blocks if same else 0)
        elif same:
            self._prove_by(routed.keys)
            self._voucher.reported(routed.keys[:blocks], routed.mark)
            self.counters.vouched_blocks = self._voucher.vouched_total

    def _prove_by(self, keys: Sequence[int]) -> None:
        if not self._worker.proven and any(self._index.holds(self._slot, key) for key in keys):
            self._worker.saw_key()

    # Snapshots (router.index.snapshot).

    @property
    def inside(self) -> Inside:
        groups = frozenset(self._other_groups)
        return Inside(self._index, self._slot, self._names, self._worker.scheme, self._has_adapters, groups)

    @property
    def inexact(self) -> str:
        """Why this is not exactly what the rank holds; empty when it is."""
        worker = self._worker
        if self._voucher.partial:
            return "its history is partial"
        if self.degraded:
            return "a removal may have been missed"
        if len(self._voucher) or len(self._adopter):
            return "some blocks are inferred"
        if not worker.proven or not worker.is_width_settled or worker.content_hashes or self._held.events:
            return "its hash or width is open"
        return ""

    def restored(self, *, has_adapters: bool, other_groups: Iterable[int]) -> None:
        """The index holds exactly what the rank does, although nobody heard it store that here."""
        if not self._worker.is_width_settled:
            self._worker.saw_width(self._worker.scheme.width)
        self._has_adapters = has_adapters
        self._other_groups.update(other_groups)
        self._any_stored = self._heard_clear = True
        self._journal = None
        self._voucher.set_partial(False)

    # What the worker's scheme calls when it decides something.

    def width_settled(self) -> None:
        for event in self._held.take():
            self._fold(event)

    def kind_changed(self) -> None:
        self.counters.switches += 1
        journal = self._journal
        events = journal.take() if journal is not None else []
        self.degraded = self.degraded or (journal is None and self._any_stored)
        self._forget_blocks()
        for event in events:
            self._fold(event, checked=True)

    def kind_proven(self) -> None:
        self._journal = None

    # Width.

    def _weigh(self, event: BlockStored) -> None:
        """A store while the width is open (settled rule 7)."""
        worker = self._worker
        width = event.block_size
        units = token_units(event.token_ids)[0]
        if not 1 <= width <= MAX_WIDTH or units < 1 or units != width * len(event.block_hashes):
            self.counters.odd_widths += 1
            return
        if width != worker.advertised_width:
            self._hold(event)
            worker.saw_width(width)
            return
        worker.saw_width(width)
        self._store(event)

    def _hold(self, event: Event) -> None:
        if not self._held.add(event):
            self.degraded = True

    # Applying.

    def _fold(self, event: Event, *, checked: bool = False) -> None:
        if isinstance(event, BlockStored):
            self._store(event, checked=checked)
        elif isinstance(event, BlockRemoved):
            self._remove(event)

    def _leave_out(self, event: BlockStored) -> None:
        """A store of another cache group (vllm#51614): its blocks are not the prefix's, and its removals must not take
        those."""
        self.counters.other_groups += 1
        if event.group_idx is not None and len(self._other_groups) < 256:
            self._other_groups.add(event.group_idx)

    def _store(self, event: BlockStored, *, checked: bool = False) -> None:
        worker = self._worker
        hashes = event.block_hashes
        tier = tier_of(event.medium)
        if tier is None:
            self.counters.unknown_media += 1
            return
        width = event.block_size
        units = token_units(event.token_ids)[0]
        if width != worker.scheme.width or (units != width * len(hashes) and units > 0):
            # Never sliced by guess: which tokens belong to which hash cannot be told (case 11).
            self.counters.odd_widths += 1
            return
        if not checked and (event.parent_block_hash is None or not worker.proven):
            self._check_root(event)
        if self._journal is not None and not self._journal.add(event):
            self._journal = None
        if worker.scheme.kind == "sglang-sha256":
            self._store_by_hash(event, tier)
        else:
            self._store_by_tokens(event, tier)
        self._any_stored = True

    def _store_by_hash(self, event: BlockStored, tier: Tier) -> None:
        keys = tuple(event.block_hashes)
        parent = event.parent_block_hash
        if event.lora_name is None and event.lora_id is None:
            self._store_keys(keys, parent, tier)
            return
        self.counters.foreign += 1
        self._has_adapters = True
        self._store_keys(_adapter_keys(keys), None if parent is None else parent ^ _ADAPTER_BITS, tier, adapter=True)

    def _store_keys(self, keys: Sequence[int], parent: int | None, tier: Tier, *, adapter: bool = False) -> None:
        """`keys` is the one copy that index and chains share."""
        counters, voucher = self.counters, self._voucher
        if voucher.partial or voucher.vouched:
            voucher.storing(keys, tier)
            # Of a complete history no parent is missing, and the look-up would be a tenth of what an event costs.
            if voucher.partial and parent is not None and not self._index.holds(self._slot, parent):
                counters.orphans += 1
                if not adapter:
                    voucher.orphan(parent, tier)
                    counters.vouched_blocks = voucher.vouched_total
        refused = self._index.store(self._slot, tier, keys, parent)
        counters.stored_blocks += len(keys) - refused
        if refused:
            counters.refused_blocks += refused
        if not adapter:
            self._chains.stored(parent, keys)

    def _remove(self, event: BlockRemoved) -> None:
        if self._journal is not None and not self._journal.add(event):
            self._journal = None
        # An unknown medium clears everywhere: better a block too few than one too many.
        tier = None if event.medium is None else tier_of(event.medium)
        if self._worker.scheme.kind == "sglang-sha256":
            if self._voucher.partial or self._voucher.vouched:
                self._voucher.removed(event.block_hashes, tier)
            self._index.remove(self._slot, tier, event.block_hashes)
            if self._has_adapters:
                # Which of the two went is not said when both have the hash: neither keeps the credit of this copy.
                self._index.remove(self._slot, tier, _adapter_keys(event.block_hashes))
            return
        for name, keys in self._names.all(event.block_hashes):
            self._index.remove(self._slot, tier, keys)
            self._names.forget(name, [key for key in keys if self._index.holds(self._slot, key)])
            self._adopter.removed(name)

    def _clear(self) -> None:
        self._held.take()
        self._forget_blocks()
        self.degraded = False
        if not self._worker.proven:
            self._journal = Kept()

    def _forget_blocks(self) -> None:
        self._index.clear(self._slot)
        for names in self._names.take_all():
            self._index.discard(names)
        self._voucher.clear()
        self._adopter.clear()
        self._roots_seen = 0
        self._any_stored = False
        self._has_adapters = False

    # Hash kind.

    def _check_root(self, event: BlockStored) -> None:
        """Recompute the first block of a root store, always until the kind is proven, later by sample."""
        worker = self._worker
        if event.lora_name is not None or event.lora_id is not None:
            return
        self._roots_seen += 1
        if not self._is_check_due(self._roots_seen):
            return
        if not is_root(event) or not event.block_hashes:
            return
        try:
            ids, pairs = decode_token_ids(event.token_ids)
        except WireError:
            return
        block = ids[: event.block_size * (8 if pairs else 4)]
        if not block:
            return
        equals = sglang_chain(block, len(block), event.cache_salt) == event.block_hashes[:1]
        content_hash = not pairs and hash(tuple(array("I", block))) == event.block_hashes[0]
        if worker.proven and not equals:
            self.counters.foreign += 1
        worker.saw_root(equals, event.cache_salt is None, content_hash, pairs)

    def _is_check_due(self, root: int) -> bool:
        """Of the `root`th root since the last clear."""
        worker = self._worker
        if not worker.proven:
            return True
        sampled = root <= _FIRST_CHECKS or not root % _CHECK_EVERY or worker.is_doubtful
        return sampled and worker.scheme.kind == "sglang-sha256"

    # Our own chain.

    def _store_by_tokens(self, event: BlockStored, tier: Tier) -> None:
        keys = self._own_keys(event)
        if keys is None:
            self.counters.skipped += 1
            return
        names = self._names
        pairs = [(name, key) for name, key in zip(event.block_hashes, keys, strict=True) if names.add(name, key)]
        parent = None if event.parent_block_hash is None else names.one(event.parent_block_hash)
        refused = self._index.store(self._slot, tier, [key for _, key in pairs], parent)
        self.counters.stored_blocks += len(pairs) - refused
        self.counters.refused_blocks += refused
        for name, key in pairs[len(pairs) - refused :]:  # the caps refuse the last ones
            if not self._index.holds(self._slot, key):
                names.forget(name, [k for _, known in names.all((name,)) for k in known if k != key])

    def _own_keys(self, event: BlockStored) -> list[int] | None:
        """Our keys of the event's blocks; None if its tokens are needed and cannot be read."""
        hashes = event.block_hashes
        # A hash that names a prefix keeps its key, whatever parent the event gives: vLLM's host tier gives none.
        known = [] if self._worker.content_hashes else self._names.leading(hashes)
        if len(known) == len(hashes):
            return known
        try:
            ids, pairs = decode_token_ids(event.token_ids)
        except WireError:
            return None
        block_bytes = event.block_size * (8 if pairs else 4)
        if len(ids) != block_bytes * len(hashes):
            return None
        parent, told = self._own_parent(event, known, ids, block_bytes)
        told = max(told, len(known))
        start = len(known)
        keys = known + xxh3_chain(parent, ids[start * block_bytes : told * block_bytes], block_bytes)
        if told < len(hashes):
            self.counters.foreign += 1
            keys += xxh3_chain(foreign_root(hashes[told]), ids[told * block_bytes :], block_bytes)
        return keys

    def _own_parent(self, event: BlockStored, known: list[int], ids: TokenIds, block_bytes: int) -> tuple[int, int]:
        """(the key the first new block hangs below, how many of the event's blocks the tokens tell apart)."""
        namespace, told = namespace_of(event)
        if known:
            return known[-1], told
        first = event.block_hashes[0]
        if is_root(event):
            if namespace is None:
                return 0, 0
            if self._is_true_root(event):
                return xxh3_root(namespace), told
            self.counters.orphans += 1
            return foreign_root(first), told
        assert event.parent_block_hash is not None
        if self._worker.content_hashes:
            for name in event.block_hashes:
                self._names.note_inner(name)
        parent = self._names.one(event.parent_block_hash)
        if parent is None:
            self.counters.orphans += 1
            if self._voucher.partial and not self._worker.content_hashes and told == len(event.block_hashes):
                parent = self._adopter.place(event.parent_block_hash, ids, block_bytes, event.lora_name)
        return foreign_root(event.parent_block_hash) if parent is None else parent, told

    def _is_true_root(self, event: BlockStored) -> bool:
        """SGLang 0.5.3 gives a nil parent to every node's first page. That shows at the first split, when pages known
        from inside a chain come again without a parent; from then on only what must be a root is taken for one."""
        first = event.block_hashes[0]
        worker = self._worker
        if not worker.content_hashes:
            # A host tier's store of a block never seen on the device does not say where it belongs.
            return tier_of(event.medium) is Tier.GPU
        if event.parent_block_hash is not None:
            return True
        if self._names.was_inner(first):
            worker.nil_parents_lie = True
            return False
        if worker.nil_parents_lie and self._any_stored and first not in self._names.roots:
            return False
        if len(self._names.roots) < 65_536:
            self._names.roots[first] = None
        for name in event.block_hashes[1:]:
            self._names.note_inner(name)
        return True


def _adapter_keys(keys: Sequence[int]) -> list[int]:
    return [key ^ _ADAPTER_BITS for key in keys]
