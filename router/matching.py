"""How much of one prompt each rank holds: the one place where hashing, index and the engine's cap meet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from router.hashing import (
    Namespace,
    Scheme,
    TokenIds,
    block_units,
    chain_digests,
    chain_root,
    creditable_blocks,
    digest_keys,
    full_blocks,
    token_count,
)
from router.index.prefix import PrefixIndex
from router.policy.decide import NO_CREDIT, Credit
from router.policy.predicted import PredictedBlocks

MAX_BLOCKS_AT_ONCE: Final = 1 << 40


class KeySource(Protocol):
    """Where the keys of one prompt's full blocks come from."""

    def steps(self, scheme: Scheme, namespace: Namespace, slice_blocks: int) -> Iterator[list[int] | None]:
        """Yields after every `slice_blocks` blocks it had to hash; at last what `hashing.prompt_keys` gives."""


class FreshKeys:
    """Every key made from the ids."""

    __slots__ = ("ids",)

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids

    def steps(self, scheme: Scheme, namespace: Namespace, slice_blocks: int) -> Iterator[list[int] | None]:
        state = chain_root(scheme, namespace)
        if state is None:
            yield None
            return
        keys: list[int] = []
        end = full_blocks(scheme, token_count(self.ids))
        for first in range(0, end, slice_blocks):
            digests = chain_digests(scheme, state, block_units(scheme, self.ids, first, min(first + slice_blocks, end)))
            state = digests[-1]
            keys += digest_keys(scheme, digests)
            if first + slice_blocks < end:
                yield []
        yield keys


class PromptKeys:
    """A prompt's block keys, made once per distinct scheme of the fleet (design, section 3)."""

    __slots__ = ("_by_scheme", "_keys", "_scheme", "ids", "namespace", "source")

    def __init__(self, ids: TokenIds | None, namespace: Namespace, source: KeySource | None = None) -> None:
        """`source` knows keys that earlier prompts worked out; None: all are made here."""
        self.ids = ids
        self.namespace = namespace
        self.source = source
        self._by_scheme: dict[Scheme, list[int]] = {}
        self._scheme: Scheme | None = None  # the one asked for last: mostly there is no other
        self._keys: list[int] = []

    @classmethod
    def known(cls, scheme: Scheme, keys: list[int]) -> PromptKeys:
        """Of a prompt whose creditable keys under `scheme` are given (a trace), its ids unknown."""
        made = cls(None, Namespace())
        made._by_scheme[scheme] = keys
        return made

    def under(self, scheme: Scheme) -> list[int]:
        """Keys of the blocks the engine may serve from its cache, in order; empty when nothing can be credited: no ids,
        a prompt too short, or a namespace whose seed cannot be reproduced."""
        if scheme is self._scheme:
            return self._keys
        keys = self._by_scheme.get(scheme)
        if keys is None:
            if self.ids is None or not creditable_blocks(scheme, token_count(self.ids)):
                keys = self._by_scheme[scheme] = []
            else:
                for _ in self._make(scheme, MAX_BLOCKS_AT_ONCE):
                    pass
                keys = self._by_scheme[scheme]
        self._scheme, self._keys = scheme, keys
        return keys

    def steps(self, schemes: Iterable[Scheme], slice_blocks: int = 512) -> Iterator[None]:
        """Makes the keys `under` will give, yielding now and then so that a long prompt can be worked on in turns."""
        for scheme in schemes:
            if scheme not in self._by_scheme:
                yield from self._make(scheme, slice_blocks)

    def _make(self, scheme: Scheme, slice_blocks: int) -> Iterator[None]:
        made: list[int] | None = None
        creditable = creditable_blocks(scheme, token_count(self.ids)) if self.ids is not None else 0
        if self.ids is not None and creditable:
            for keys in (self.source or FreshKeys(self.ids)).steps(scheme, self.namespace, slice_blocks):
                made = keys
                yield
        self._by_scheme[scheme] = made[:creditable] if made else []


def prompt_credits(
    index: PrefixIndex, predicted: PredictedBlocks, keys: PromptKeys, schemes: Iterable[Scheme]
) -> dict[int, Credit]:
    """What every slot holds of the prompt, in tokens; slots that hold nothing are absent. One look-up per scheme."""
    credits: dict[int, Credit] = {}
    for scheme in schemes:
        chain = keys.under(scheme)
        if not chain:
            continue
        width = scheme.width
        found = index.match(chain)
        made: dict[int, Credit] = {}  # by identity: `match` gives one object to all slots of equal depths
        for slot, depths in found.items():
            credit = made.get(id(depths))
            if credit is None:
                a, b, c, d = depths
                confirmed: Credit = (a * width, b * width, c * width, d * width, d * width)
                credit = made[id(depths)] = confirmed
            credits[slot] = credit
        extended: dict[tuple[int, int], Credit] = {}  # one object for equal ones here too: `Policy` goes by identity
        for slot, depth in predicted.extend(chain, found):
            held = credits.get(slot, NO_CREDIT)
            same = id(held), depth
            longer = extended.get(same)
            if longer is None:
                a, b, c, d, _ = held
                hoped: Credit = (a, b, c, d, depth * width)
                longer = extended[same] = hoped
            credits[slot] = longer
    return credits
