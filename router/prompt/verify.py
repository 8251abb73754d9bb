"""Is what the router renders what the engine renders? Remembered per rendering and per feature set. Pure.

A rendering is an engine kind and release with a tokenizer, a template and default kwargs; a feature set is what a body
uses of them (tools, parts, kwargs …). Ids made here are VERIFIED for a set once the engine's own tokenizer answered
the same a few times, and DRIFTED as soon as it answered otherwise: that set, and every set that contains it, is left
to the engine from then on. In between they are used, since a wrong id costs a cache hit and no more, but they are
never sent to an engine in a prompt's place.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from router.hashing import TokenIds, token_count

AGREEMENTS = 3
"""Comparisons that verify a feature set."""
COUNT_FAULTS = 3
"""Prompts in a row whose token count the engine reported otherwise, and that nobody could compare, for drift."""
MAX_RENDERINGS = 64
MAX_SETS = 512
CONTEXT_IDS = 8

Standing = Literal["unverified", "verified", "drifted"]
Features = frozenset[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two id sequences part. `ours` and `theirs` are a few ids from `at` on, `before` those that are the same."""

    features: Features
    at: int
    before: tuple[int, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    tokens_ours: int
    tokens_theirs: int

    def __str__(self) -> str:
        feature = "+".join(sorted(self.features)) or "plain"
        if self.at < 0:
            return f"{feature}: the engine counted {self.tokens_theirs} prompt tokens, the router {self.tokens_ours}"
        return (
            f"{feature}: token {self.at} differs ({self.tokens_ours} tokens here, {self.tokens_theirs} there): "
            f"after {list(self.before)} here {list(self.ours)}, there {list(self.theirs)}"
        )


def difference(ours: TokenIds, theirs: TokenIds, features: Features) -> Difference | None:
    """None when they are the same."""
    if ours == theirs:
        return None
    low, high = 0, min(len(ours), len(theirs))
    while low < high:  # the longest common prefix, by halves
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ours[:middle] == theirs[:middle] else (low, middle - 1)
    at = low // 4
    return Difference(
        features,
        at,
        _ints(ours, max(0, at - CONTEXT_IDS), at),
        _ints(ours, at, at + CONTEXT_IDS),
        _ints(theirs, at, at + CONTEXT_IDS),
        token_count(ours),
        token_count(theirs),
    )


def _ints(ids: TokenIds, start: int, end: int) -> tuple[int, ...]:
    return tuple(memoryview(ids[4 * start : min(4 * end, len(ids))]).cast("I"))


@dataclass(slots=True)
class _Set:
    agreed: int = 0
    since_check: int = 0
    asked: bool = False
    """A comparison is under way."""
    unanswered: int = 0
    """Comparisons in a row that the engine did not answer: each doubles the prompts until the next."""
    count_faults: int = 0
    difference: Difference | None = None

    @property
    def standing(self) -> Standing:
        if self.difference is not None:
            return "drifted"
        return "verified" if self.agreed >= AGREEMENTS else "unverified"


@dataclass(slots=True)
class _Rendering:
    sets: dict[Features, _Set] = field(default_factory=dict)
    drifted: list[Features] = field(default_factory=list)


class Verification:
    """`every`: a verified set is compared again once in so many prompts; 0: nothing is ever compared."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._renderings: dict[Hashable, _Rendering] = {}

    def standing(self, rendering: Hashable, features: Features) -> Standing:
        known = self._renderings.get(rendering)
        if known is None:
            return "unverified"
        for bad in known.drifted:
            if bad <= features:
                return "drifted"
        found = known.sets.get(features)
        return found.standing if found is not None else "unverified"

    def due(self, rendering: Hashable, features: Features) -> bool:
        """Counts one prompt of this set; True when it should be compared, which then must end in `agreed`, `differed`
        or `unanswered`."""
        if self._every == 0:
            return False
        found = self._set(rendering, features)
        if found is None:
            return False
        found.since_check += 1
        fresh = found.standing == "unverified" or found.count_faults > 0
        patience = min(1 << min(found.unanswered, 30), self._every) if fresh else self._every
        if found.asked or found.since_check < patience:
            return False
        found.asked = True
        found.since_check = 0
        return True

    def agreed(self, rendering: Hashable, features: Features) -> None:
        found = self._set(rendering, features)
        if found is not None:
            found.agreed += 1
            found.asked = False
            found.unanswered = 0
            found.count_faults = 0

    def unanswered(self, rendering: Hashable, features: Features) -> None:
        """The engine could not be asked, or refused: nothing was learnt."""
        found = self._set(rendering, features)
        if found is not None:
            found.asked = False
            found.unanswered += 1

    def differed(self, rendering: Hashable, seen: Difference) -> bool:
        """True when this is news."""
        found = self._set(rendering, seen.features)
        if found is None:
            return False
        found.asked = False
        found.unanswered = 0
        news = found.difference is None
        found.difference = seen
        if news:
            self._renderings[rendering].drifted.append(seen.features)
        return news

    def counted(self, rendering: Hashable, features: Features, ours: int, theirs: int) -> bool:
        """The engine's own count of a prompt's tokens. An equal one proves little; an unequal one makes the next prompt
        of the set be compared. True when it was one too many, with nobody to ask: the set drifted."""
        found = self._set(rendering, features)
        if found is None or found.difference is not None:
            return False
        if ours == theirs:
            if not found.asked:
                found.count_faults = 0
            return False
        found.count_faults += 1
        if found.count_faults < COUNT_FAULTS or found.asked:
            return False
        return self.differed(rendering, Difference(features, -1, (), (), (), ours, theirs))

    def renderings(self) -> list[Hashable]:
        return list(self._renderings)

    def forget(self, rendering: Hashable) -> None:
        """Another process renders now: its files may be other ones. Everything is to be compared again."""
        self._renderings.pop(rendering, None)

    def first_difference(self, rendering: Hashable) -> Difference | None:
        """Why this rendering is drifted; None when it is not."""
        known = self._renderings.get(rendering)
        return known.sets[known.drifted[0]].difference if known is not None and known.drifted else None

    def describe(self, rendering: Hashable) -> list[dict[str, object]]:
        """Every feature set seen, for the admin page."""
        known = self._renderings.get(rendering)
        return [
            {
                "features": sorted(features),
                "standing": self.standing(rendering, features),
                "comparisons_equal": found.agreed,
                "difference": str(found.difference) if found.difference is not None else None,
            }
            for features, found in (known.sets.items() if known is not None else ())
        ]

    def _set(self, rendering: Hashable, features: Features) -> _Set | None:
        """None when there are too many: what is not remembered stays unverified."""
        known = self._renderings.get(rendering)
        if known is None:
            if len(self._renderings) >= MAX_RENDERINGS:
                del self._renderings[next(iter(self._renderings))]  # engines of a release that is long gone
            known = self._renderings[rendering] = _Rendering()
        found = known.sets.get(features)
        if found is None and len(known.sets) < MAX_SETS:
            found = known.sets[features] = _Set()
        return found
