"""A paged prefix cache with leaf-first LRU eviction, as SGLang 0.5.23 keeps one per data-parallel rank. No I/O.

The tree is keyed by page hashes (`router.hashing`), one root a namespace. A page is in one of three places: in the
tree, private to a running request (prefill not finished, or output), or free. Pages of running requests are pinned.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from router.hashing import Namespace, TokenIds


@dataclass(slots=True)
class Stored:
    """Pages `first_page` … of the chain over `ids` became resident; `parent_key` is the page before, None at a root."""

    keys: list[int]
    parent_key: int | None
    first_page: int
    namespace: Namespace
    ids: TokenIds
    session_id: str | None = None


@dataclass(slots=True)
class Removed:
    """Pages left the tree; several chains, one namespace label (SGLang starts a new event when extra_key changes)."""

    keys: list[int]
    label: tuple[str | None, str | None]


@dataclass(slots=True)
class Cleared:
    """The whole cache is empty."""


CacheEvent = Stored | Removed | Cleared


class Node:
    """A run of pages of one chain. `touched` orders by last use; `locks` counts the requests that pin it."""

    __slots__ = ("children", "keys", "locks", "namespace", "parent", "queued", "touched")

    def __init__(self, namespace: Namespace, keys: list[int], parent: Node | None, touched: int) -> None:
        self.namespace = namespace
        self.keys = keys
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.touched = touched
        self.locks = 0
        self.queued = False


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix: how many pages, and the node that ends with the last of them."""

    node: Node
    pages: int


class RadixCache:
    """`capacity_pages` pages of one rank, shared by the tree and by the private pages of running requests."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self.tree_pages = 0
        self.pinned_pages = 0
        self.private_pages = 0
        self._tick = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._roots: dict[Namespace, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self.tree_pages = self.pinned_pages = 0
        self._events: list[CacheEvent] = [Cleared()]

    @property
    def free_pages(self) -> int:
        return self.capacity_pages - self.tree_pages - self.private_pages

    @property
    def evictable_pages(self) -> int:
        return self.tree_pages - self.pinned_pages

    def take_events(self) -> list[CacheEvent]:
        """What happened since the last call, in order. A new cache begins with its own clear (seq 0 on the wire)."""
        events, self._events = self._events, []
        return events

    def clear(self) -> None:
        """Drop everything (`/flush_cache`). RuntimeError while a request still uses pages."""
        if self.pinned_pages or self.private_pages:
            raise RuntimeError("the cache is in use: finish or abort the running requests before clearing it")
        pending = self._events
        self._start_empty()
        self._events = [*pending, Cleared()]

    def match(self, namespace: Namespace, keys: Sequence[int]) -> Match:
        """The longest resident prefix of `keys`; every node on it counts as just used. Splits the node it ends in."""
        node, pages = self._root(namespace), 0
        self._tick += 1
        while pages < len(keys) and (child := node.children.get(keys[pages])) is not None:
            child.touched = self._tick
            common = _common(child.keys, keys, pages)
            pages += common
            if common < len(child.keys):
                return Match(self._split(child, common), pages)
            node = child
        return Match(node, pages)

    def peek(self, namespace: Namespace, keys: Sequence[int]) -> int:
        """Pages `match` would find, without touching anything."""
        node, pages = self._roots.get(namespace), 0
        while node is not None and pages < len(keys) and (child := node.children.get(keys[pages])) is not None:
            common = _common(child.keys, keys, pages)
            pages += common
            node = child if common == len(child.keys) else None
        return pages

    def insert(self, namespace: Namespace, keys: Sequence[int], ids: TokenIds, session_id: str | None = None) -> Match:
        """Make the chain `keys` (pages of `ids`) resident. The pages it adds come out of the private ones.

        Returns the node that ends the chain and how many leading pages were resident already: those the caller still
        holds privately are duplicates, to be released. `session_id` only labels the event.
        RuntimeError when too few pages had been allocated.
        """
        found = self.match(namespace, keys)
        if found.pages == len(keys):
            return found
        new = list(keys[found.pages :])
        if len(new) > self.private_pages:
            raise RuntimeError(f"{len(new)} pages inserted but only {self.private_pages} allocated")
        self.private_pages -= len(new)
        self.tree_pages += len(new)
        self._tick += 1
        leaf = Node(namespace, new, found.node, self._tick)
        found.node.children[new[0]] = leaf
        self._queue_leaf(leaf)
        parent_key = found.node.keys[-1] if found.node.keys else None
        self._events.append(Stored(new, parent_key, found.pages, namespace, ids, session_id))
        return Match(leaf, found.pages)

    def allocate(self, pages: int) -> bool:
        """Take `pages` private pages, evicting unpinned leaves if need be. False (nothing done) if they do not fit."""
        if pages > self.free_pages + self.evictable_pages:
            return False
        self.evict(pages - self.free_pages)
        self.private_pages += pages
        return True

    def release(self, pages: int) -> None:
        """Give private pages back."""
        if not 0 <= pages <= self.private_pages:
            raise RuntimeError(f"{pages} pages released of {self.private_pages} private ones")
        self.private_pages -= pages

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors resident until `unpin`."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.pinned_pages += len(step.keys)
            step.locks += 1
            step = step.parent

    def unpin(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                self.pinned_pages -= len(step.keys)
                self._queue_leaf(step)
                self._forget_empty_root(step)
            step = step.parent

    def evict(self, pages: int) -> int:
        """Remove whole leaves, least recently used first, until `pages` pages went (a leaf is never cut)."""
        evicted = 0
        while evicted < pages and self._leaves:
            touched, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children or node.locks or node.parent is None:
                continue  # no longer an evictable leaf; queued again when it is one
            if node.touched != touched:
                self._queue_leaf(node)  # used since it was queued
                continue
            evicted += len(node.keys)
            self._drop(node, node.parent)
        return evicted

    def _drop(self, node: Node, parent: Node) -> None:
        del parent.children[node.keys[0]]
        self.tree_pages -= len(node.keys)
        label = (node.namespace.extra_key, node.namespace.lora_name)
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and last.label == label:
            last.keys.extend(node.keys)
        else:
            self._events.append(Removed(list(node.keys), label))
        self._queue_leaf(parent)
        self._forget_empty_root(parent)

    def _forget_empty_root(self, node: Node) -> None:
        """Namespaces come from clients: one that holds nothing must not stay."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, [], None, 0)
        return root

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; returns the new upper part. The lower part keeps its identity and pins."""
        parent = node.parent
        assert parent is not None
        self._tick += 1
        upper = Node(node.namespace, node.keys[:pages], parent, self._tick)
        upper.locks = node.locks
        parent.children[upper.keys[0]] = upper
        node.keys = node.keys[pages:]
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _queue_leaf(self, node: Node) -> None:
        if not (node.queued or node.children or node.locks or node.parent is None):
            node.queued = True
            heapq.heappush(self._leaves, (node.touched, id(node), node))


def _common(held: list[int], keys: Sequence[int], start: int) -> int:
    """How many leading pages of `held` equal keys[start:]."""
    length = min(len(held), len(keys) - start)
    if held[:length] == list(keys[start : start + length]):
        return length
    return next(i for i in range(length) if held[i] != keys[start + i])
