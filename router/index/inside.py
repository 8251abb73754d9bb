"""A ledger's parts, for `router.index.snapshot`."""

from __future__ import annotations

from dataclasses import dataclass

from router.hashing import Scheme
from router.index.names import Names
from router.index.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class Inside:
    """Of one rank's ledger; not to be changed but by `Restoring`."""

    index: PrefixIndex
    slot: int
    names: Names
    scheme: Scheme
    has_adapters: bool
    other_groups: frozenset[int]
