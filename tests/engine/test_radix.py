"""The paged cache against a model of what it must keep true."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.engine.radix import Cleared, Node, RadixCache, Removed, Stored
from router.hashing import Namespace

PLAIN = Namespace()
NAMESPACES = st.sampled_from([PLAIN, Namespace(extra_key="x"), Namespace(cache_salt="s")])
# Page keys as a chain hash makes them: a page's key depends on all pages before it.
CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda path: [hash(tuple(path[: end + 1])) for end in range(len(path))]
)


def insert(cache: RadixCache, keys: list[int], namespace: Namespace = PLAIN) -> int:
    """Store a chain as a request would; the pages it added."""
    assert cache.allocate(len(keys))
    found = cache.insert(namespace, keys, b"")
    cache.release(found.pages)
    return len(keys) - found.pages


def resident(cache: RadixCache, keys: list[int], namespace: Namespace = PLAIN) -> int:
    return cache.peek(namespace, keys)


def test_a_new_cache_begins_with_its_own_clear() -> None:
    assert RadixCache(4).take_events() == [Cleared()]


def test_a_chain_is_stored_once_and_its_extension_alone_after_that() -> None:
    cache = RadixCache(10)
    cache.take_events()
    assert insert(cache, [1, 2]) == 2
    assert insert(cache, [1, 2, 3]) == 1
    stored = cache.take_events()
    assert [(e.keys, e.parent_key, e.first_page) for e in stored if isinstance(e, Stored)] == [
        ([1, 2], None, 0),
        ([3], 2, 2),
    ]


def test_the_least_recently_used_leaf_goes_first_and_whole() -> None:
    cache = RadixCache(10)
    insert(cache, [1, 2, 3])
    insert(cache, [7, 8])
    cache.match(PLAIN, [1, 2, 3])
    cache.take_events()
    assert cache.evict(1) == 2
    assert cache.take_events() == [Removed([7, 8], (None, None))]
    assert resident(cache, [1, 2, 3]) == 3


def test_a_parent_outlives_its_children() -> None:
    cache = RadixCache(10)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    cache.evict(2)
    assert resident(cache, [1, 2, 3]) == 2
    cache.evict(1)
    assert resident(cache, [1]) == 0


def test_room_is_made_by_eviction_and_the_removal_comes_before_the_store() -> None:
    cache = RadixCache(3)
    insert(cache, [1, 2])
    cache.take_events()
    insert(cache, [5, 6])
    assert [type(event) for event in cache.take_events()] == [Removed, Stored]


def test_pages_that_do_not_fit_are_refused_and_nothing_is_evicted() -> None:
    cache = RadixCache(3)
    insert(cache, [1, 2])
    cache.pin(cache.match(PLAIN, [1]).node)
    assert not cache.allocate(3)
    assert resident(cache, [1, 2]) == 2


def test_removals_of_one_namespace_share_an_event_and_another_extra_key_starts_one() -> None:
    """As SGLang 0.5.23 sent them in captures/engine/sgl_kv (batch 32)."""
    cache = RadixCache(10)
    insert(cache, [1])
    insert(cache, [2], Namespace(cache_salt="s"))
    insert(cache, [1], Namespace(extra_key="x"))
    insert(cache, [3])
    cache.take_events()
    cache.evict(4)
    assert [e.keys for e in cache.take_events() if isinstance(e, Removed)] == [[1, 2], [1], [3]]


def test_a_cache_in_use_is_not_cleared() -> None:
    cache = RadixCache(4)
    assert cache.allocate(1)
    with pytest.raises(RuntimeError, match="in use"):
        cache.clear()


def test_a_namespace_that_holds_nothing_is_forgotten() -> None:
    cache = RadixCache(4)
    for salt in range(50):
        node = cache.match(Namespace(cache_salt=str(salt)), [1]).node
        cache.pin(node)
        cache.unpin(node)
    insert(cache, [1], Namespace(cache_salt="kept"))
    cache.evict(1)
    assert not cache._roots


class CacheMachine(RuleBasedStateMachine):
    """Any order of use: the events fold to what is resident, capacity holds, pinned chains stay."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(12)
        self.folded: Counter[tuple[tuple[str | None, str | None], int]] = Counter()
        self.pinned: list[tuple[Namespace, list[int], Node]] = []

    @rule(keys=CHAINS, namespace=NAMESPACES)
    def store(self, keys: list[int], namespace: Namespace) -> None:
        if self.cache.allocate(len(keys)):
            self.cache.release(self.cache.insert(namespace, keys, b"").pages)
            assert self.cache.peek(namespace, keys) == len(keys)

    @rule(keys=CHAINS, namespace=NAMESPACES)
    def pin(self, keys: list[int], namespace: Namespace) -> None:
        found = self.cache.match(namespace, keys)
        self.cache.pin(found.node)
        self.pinned.append((namespace, keys[: found.pages], found.node))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pinned) - 1))
        self.cache.unpin(self.pinned.pop(index)[2])

    @rule(pages=st.integers(1, 5))
    def evict(self, pages: int) -> None:
        evictable = self.cache.evictable_pages
        assert self.cache.evict(pages) >= min(pages, evictable)

    @precondition(lambda self: not self.pinned)
    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def events_fold_to_the_tree(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, Cleared):
                self.folded.clear()
            elif isinstance(event, Removed):
                self.folded.subtract((event.label, key) for key in event.keys)
            else:
                label = (event.namespace.extra_key, event.namespace.lora_name)
                self.folded.update((label, key) for key in event.keys)
        assert min(self.folded.values(), default=0) >= 0
        held: Counter[tuple[tuple[str | None, str | None], int]] = Counter()
        for node in self.nodes():
            held.update(((node.namespace.extra_key, node.namespace.lora_name), key) for key in node.keys)
        assert +self.folded == held
        assert self.cache.tree_pages == held.total()

    @invariant()
    def capacity_holds(self) -> None:
        assert 0 <= self.cache.free_pages <= self.cache.capacity_pages
        locked = sum(len(node.keys) for node in self.nodes() if node.locks)
        assert self.cache.pinned_pages == locked

    @invariant()
    def pinned_chains_stay(self) -> None:
        for namespace, keys, _ in self.pinned:
            assert self.cache.peek(namespace, keys) == len(keys)

    def nodes(self) -> list[Node]:
        todo = list(self.cache._roots.values())
        found = []
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
