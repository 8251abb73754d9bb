"""What requests teach about the ranks they went to. Runs on the event loop, between two awaits.

Two lessons: the chain of a prompt's blocks and the tokens its engine reused vouch for blocks a rank was never heard to
store (router.index.vouch), and predictions are held against reports (router.index.outcome). Only requests that were
sent teach; `POST /route` does not come through here, but for the credit that is already scaled down.
"""

from __future__ import annotations

from collections.abc import Callable

from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.hashing import token_count
from router.index.ledger import Routed
from router.index.prefix import PrefixIndex
from router.index.vouch import Chains
from router.matching import PromptKeys, prompt_credits
from router.policy.decide import NO_CREDIT, Credit
from router.policy.predicted import PredictedBlocks
from router.prompt.source import Prompt


class Lesson:
    """One request under way, to be told to `Feedback.ended` once."""

    __slots__ = ("held_tokens", "hoped_tokens", "prompt_tokens", "rank", "routed")

    def __init__(
        self,
        rank: Rank,
        held_tokens: int,
        hoped_tokens: int,
        prompt_tokens: int,
        routed: Routed | None,
    ) -> None:
        self.rank = rank
        self.held_tokens = held_tokens
        self.hoped_tokens = hoped_tokens
        self.prompt_tokens = prompt_tokens
        self.routed = routed


class Feedback:
    """Shared by all requests of a router."""

    def __init__(
        self, chains: Chains, index: PrefixIndex, predicted: PredictedBlocks, clock: Callable[[], float]
    ) -> None:
        self._chains = chains
        self._index = index
        self._predicted = predicted
        self._clock = clock
        self._doubted: dict[Rank, None] = {}

    def learn(self, keys: PromptKeys) -> None:
        """A prompt is about to be sent somewhere: now its chain is known."""
        for scheme in self._chains.schemes():
            if scheme.kind == "sglang-sha256":
                self._chains.prompt(keys.under(scheme))

    def temper(self, credits: dict[int, Credit]) -> None:
        """Scales the credit of ranks whose engines keep reporting less than was predicted, in whole blocks."""
        if not self._doubted:
            return
        for rank in list(self._doubted):
            if rank.dead or rank.outcome.expire(self._clock()):
                self._judged(rank)
            credit = credits.get(rank.slot)
            scheme = rank.worker.scheme
            if credit is not None and scheme is not None and not rank.dead:
                width, share = scheme.scheme.width, rank.outcome.credit
                a, b, c, d, e = (int(tokens * share) // width * width for tokens in credit)
                credits[rank.slot] = (a, b, c, d, e)

    def placed(self, rank: Rank, credit: Credit, prompt: Prompt, keys: PromptKeys) -> Lesson | None:
        """A prompt was given to a trusted rank, credited with that, and is not among the predicted ones yet. Some block
        of it can be credited there. None: its answer will teach nothing."""
        ids, scheme, ledger = prompt.ids, rank.worker.scheme, rank.ledger
        # The reports of a batch, or of several copies, are sums: they teach nothing.
        if ids is None or scheme is None or ledger is None or token_count(ids) != prompt.tokens:
            return None
        own = keys.under(scheme.scheme)
        held, hoped = credit[3], credit[4]
        if rank in self._doubted:
            found = prompt_credits(self._index, self._predicted, keys, (scheme.scheme,))
            _, _, _, held, hoped = found.get(rank.slot, NO_CREDIT)
        return Lesson(rank, held, hoped, prompt.tokens, ledger.routed(ids, own, prompt.namespace.lora_name))

    def ended(self, lesson: Lesson, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """With what the engine reported (None: nothing)."""
        rank = lesson.rank
        if rank.dead or rank.ledger is None:
            return
        if prompt_tokens != lesson.prompt_tokens:
            cached_tokens = None  # nothing reported, or of other token ids than ours
        if lesson.routed is not None:
            rank.ledger.served(lesson.routed, cached_tokens)
        if cached_tokens is not None:
            complete = rank.ledger.is_history_complete
            if rank.outcome.add(
                lesson.held_tokens, lesson.hoped_tokens, cached_tokens, complete=complete, now_s=self._clock()
            ):
                self._judged(rank)

    def _judged(self, rank: Rank) -> None:
        """The verdict on `rank` changed, or the rank is gone."""
        if rank.outcome.verdict == "over" and not rank.dead:
            self._doubted[rank] = None
        else:
            self._doubted.pop(rank, None)
        if not rank.dead:
            _show(rank.worker)


def _show(worker: Worker) -> None:
    for rank in worker.ranks:
        finding = rank.outcome.finding(rank.number)
        if finding is not None:
            worker.drifted(finding.kind, finding.advertised, finding.observed, finding.advice)
            return
    worker.drift_over("outcome")
