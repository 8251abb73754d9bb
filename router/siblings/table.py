"""Who the siblings are and what each has under way, folded into the ranks' accounts. Pure: times are passed in.

One Table a router. Its own share goes out through `changed` and `everything`, its placements beside either; what comes
in goes through `take`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.policy.load import NOTHING, Outstanding, RankLoad
from router.siblings.frames import MAX_ENTRIES, Entry, Frame
from router.siblings.placements import Placements

SILENT_S = 1.5
"""A sibling not heard for so long has nothing under way any more: three whole frames did not come."""
MAX_SIBLINGS = 64

Place = tuple[str, int]
"""(worker URL, rank)."""


@dataclass(slots=True)
class _Sibling:
    heard_s: float
    accounts: dict[Place, RankLoad] = field(default_factory=dict)
    """Where its share was folded in. A rank of a new incarnation has another account."""


class Table:
    """`find` gives the account of a rank the fleet has now, or None. `share_tau_s`: see CostWeights."""

    def __init__(
        self, sender: bytes, find: Callable[[Place], RankLoad | None], share_tau_s: float, placements: Placements
    ) -> None:
        self.sender = sender
        self.placements = placements
        self._find = find
        self._share_tau_s = share_tau_s
        self._siblings: dict[bytes, _Sibling] = {}
        self._dirty: dict[Place, RankLoad] = {}
        self._busy: dict[Place, RankLoad] = {}
        """Told to have something under way, or to have got something since the last whole frame."""

    # ---- own share

    def watch(self, place: Place, account: RankLoad, woken: Callable[[], None]) -> None:
        """From now on its changes are published; `woken` is called with the first one after each `changed`."""

        def changed() -> None:
            if not self._dirty:
                woken()
            self._dirty[place] = account

        account.on_change = changed

    def changed(self, now_s: float) -> list[Entry]:
        """The ranks whose own share changed since the last call."""
        dirty, self._dirty = self._dirty, {}
        self._busy.update(dirty)
        return self._entries(dirty, now_s)

    def everything(self, now_s: float) -> list[Entry]:
        """Every rank with something under way; the others have nothing."""
        self._busy.update(self._dirty)
        self._dirty = {}
        told = self._entries(self._busy, now_s)
        self._busy = {place: account for place, account in self._busy.items() if account.requests}
        return told[:MAX_ENTRIES]

    def _entries(self, accounts: Mapping[Place, RankLoad], now_s: float) -> list[Entry]:
        """Of an incarnation that ended nothing is told: it is nobody's candidate any more."""
        return [
            _entry(place, account.outstanding(), now_s)
            for place, account in accounts.items()
            if self._find(place) is account
        ]

    # ---- theirs

    def take(self, frame: Frame, now_s: float) -> bool:
        """False: there are too many siblings for another one."""
        if frame.sender == self.sender:
            return True
        sibling = self._siblings.get(frame.sender)
        if sibling is None:
            if len(self._siblings) >= MAX_SIBLINGS:
                return False
            sibling = self._siblings[frame.sender] = _Sibling(now_s)
        sibling.heard_s = now_s
        named = set()
        for entry in frame.entries:
            place = entry.worker, entry.rank
            named.add(place)
            account = self._find(place)
            if account is not None:
                self._fold(frame.sender, sibling, place, account, _outstanding(entry, now_s), now_s)
        if frame.whole:
            for place in sibling.accounts.keys() - named:
                account = sibling.accounts[place]
                placed = account.heard_of(frame.sender).placed_uncached_tokens
                idle = NOTHING._replace(placed_uncached_tokens=placed)
                if self._find(place) is account:
                    account.hear(frame.sender, idle, now_s, self._share_tau_s)
                else:
                    account.hear(frame.sender, None, now_s, self._share_tau_s)
                    del sibling.accounts[place]
        self.placements.take(frame.placed, now_s)
        return True

    def _fold(
        self, sender: bytes, sibling: _Sibling, place: Place, account: RankLoad, theirs: Outstanding, now_s: float
    ) -> None:
        before = sibling.accounts.get(place)
        if before is not account:
            if before is not None:
                before.hear(sender, None, now_s, self._share_tau_s)
            sibling.accounts[place] = account
        account.hear(sender, theirs, now_s, self._share_tau_s)

    def expire(self, now_s: float) -> list[bytes]:
        """The siblings that fell silent; what they had under way counts no more."""
        gone = [sender for sender, sibling in self._siblings.items() if now_s - sibling.heard_s > SILENT_S]
        for sender in gone:
            for account in self._siblings.pop(sender).accounts.values():
                account.hear(sender, None, now_s, self._share_tau_s)
        return gone

    @property
    def senders(self) -> list[bytes]:
        return list(self._siblings)

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        """`siblings` of GET /workers."""
        return [
            {
                "sender": sender.hex(),
                "heard_age_s": round(now_s - sibling.heard_s, 3),
                "inflight_requests": sum(a.heard_of(sender).requests for a in sibling.accounts.values()),
                "inflight_tokens": sum(a.heard_of(sender).tokens for a in sibling.accounts.values()),
            }
            for sender, sibling in self._siblings.items()
        ]


def _entry(place: Place, own: Outstanding, now_s: float) -> Entry:
    waits = own.oldest_placed_s < math.inf
    return Entry(
        *place,
        own.requests,
        own.tokens,
        own.queued_uncached_tokens,
        own.decoding,
        max(1, round((now_s - own.oldest_placed_s) * 1000)) if waits else 0,
        own.placed_uncached_tokens,
    )


def _outstanding(entry: Entry, now_s: float) -> Outstanding:
    return Outstanding(
        entry.requests,
        entry.tokens,
        entry.queued_uncached_tokens,
        entry.decoding,
        now_s - entry.wait_ms / 1000 if entry.wait_ms else math.inf,
        entry.placed_uncached_tokens,
    )
