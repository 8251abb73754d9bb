"""The truth metric of one rank: cached tokens predicted against those its engine reported. Pure.

Single misses are normal: blocks are evicted between decision and prefill. What persists is not. Engines that forget to
announce removals (case 34) keep credit for what is gone; a wrong hash or template shows as reuse nobody predicted.

The latest `WINDOW` requests count, where either side says that something was cached, none older than `MAX_AGE_S`:
- over: at least half of them were over-predicted, and a quarter of all predicted tokens was not there. The rank's
  credit is scaled by the share that was. It ends when the last `RECOVERED` predictions were right within 5 %.
- under: three quarters of them were under-predicted, and half of what was reported had not been predicted. Only said,
  and only where the history is complete: before that, it is how a rank is learnt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from router.index.scheme import Finding

WINDOW = 16
RECOVERED = 8
MAX_AGE_S = 600.0
_OVER_REQUESTS = WINDOW // 2
_OVER_SHARE = 0.25
_UNDER_REQUESTS = WINDOW * 3 // 4
_UNDER_SHARE = 0.5
_RIGHT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    held: int
    """Predicted from events."""
    hoped: int
    """The same with blocks expected from prompts under way."""
    reported: int


class OutcomeWatch:
    """`verdict` is what the latest requests show; `credit` (0 … 1) is what the rank's resident blocks are worth."""

    def __init__(self) -> None:
        self.verdict: Literal["", "over", "under"] = ""
        self.credit = 1.0
        self._samples: deque[_Sample] = deque(maxlen=WINDOW)

    def add(self, held: int, hoped: int, reported: int, *, complete: bool, now_s: float) -> bool:
        """One answered request: tokens held by events, held or hoped for, and reported. `complete`: the rank's history
        is. Returns whether `verdict` or `credit` changed."""
        before = self.verdict, self.credit
        if held or reported:
            self._samples.append(_Sample(now_s, held, max(held, hoped), reported))
            self._judge(complete, now_s)
        return (self.verdict, self.credit) != before

    def expire(self, now_s: float) -> bool:
        """Forgets what is too old to say anything of now. Returns whether `verdict` or `credit` changed."""
        before = self.verdict, self.credit
        samples = self._samples
        while samples and now_s - samples[0].at_s > MAX_AGE_S:
            samples.popleft()
        if not samples:
            self.verdict, self.credit = "", 1.0
        return (self.verdict, self.credit) != before

    def finding(self, rank: int) -> Finding | None:
        """What to say of it; None when all is well."""
        predicted, reported = self._sums()
        seen = f"rank {rank}: of its last {len(self._samples)} requests with cached tokens"
        if self.verdict == "over":
            return Finding(
                "outcome",
                predicted,
                reported,
                f"{seen}, {predicted} were predicted and {reported} reported: the engine no longer holds what it "
                "announced. It may not announce every removal (upgrade it), or its KV pool is too small for its load. "
                "The rank's credit is scaled down until predictions are right again",
            )
        if self.verdict == "under":
            return Finding(
                "outcome",
                predicted,
                reported,
                f"{seen}, {predicted} were predicted and {reported} reported: the engine reuses what the router does "
                "not find. Router and engine make different token ids (chat template, tokenizer) or hashes: compare "
                "with the engine's own tokens; `kv-router doctor` names what differs",
            )
        return None

    def _judge(self, complete: bool, now_s: float) -> None:
        self.expire(now_s)
        samples = self._samples
        if self.verdict == "over":
            if _missed(list(islice(reversed(samples), RECOVERED))) > _RIGHT_SHARE:
                self.credit = round(1 - _missed(samples), 2)
                return
            samples_kept = list(samples)[-RECOVERED:]
            samples.clear()
            samples.extend(samples_kept)
        self.verdict, self.credit = "", 1.0
        if len(samples) < WINDOW:
            return
        predicted, reported = self._sums()
        over = sum(s.held > s.reported for s in samples)
        under = sum(s.reported > s.hoped for s in samples)
        if over >= _OVER_REQUESTS and _missed(samples) >= _OVER_SHARE:
            self.verdict, self.credit = "over", round(1 - _missed(samples), 2)
        elif complete and under >= _UNDER_REQUESTS and reported - predicted >= _UNDER_SHARE * reported:
            self.verdict = "under"

    def _sums(self) -> tuple[int, int]:
        return sum(s.held for s in self._samples), sum(s.reported for s in self._samples)


def _missed(samples: deque[_Sample] | list[_Sample]) -> float:
    """The share of predicted tokens that was not there."""
    predicted = sum(s.held for s in samples)
    return sum(max(0, s.held - s.reported) for s in samples) / predicted if predicted else 0.0
