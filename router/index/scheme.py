"""How one worker's blocks are keyed, as its streams show it: width and hash kind, checked instead of trusted.

One WorkerScheme belongs to one worker incarnation and is shared by the ledgers of its ranks. Pure.

Width (public cases, settled rule 7): the advertised one, unless the stream opens with `VOTES_TO_ADOPT` stores of
another width and none of the advertised one; what came before the decision is held by the ledgers and applied after it.

Hash kind (design section 4): root stores are recomputed from their token ids. One that equals SGLang's chain proves it,
and the engine's hashes are the keys. As long as none does, the worker is keyed by our own chain. That step is taken at
the first root that differs, because it loses nothing: the ledgers keep what came since the last clear and fold it again
when the kind changes, in either direction (a root of another namespace differs too and may come first).

Checking goes on by sample after the proof. What differs then is kept without credit, and when most of it differs that
is a finding: prompts are served whose namespace cannot be reproduced, or the hash is no longer the proven one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

from router.hashing import HashKind, Scheme

VOTES_TO_ADOPT = 8
MAX_VOTES = 64  # stores of mixed odd widths after which the advertised one stands
MAX_WIDTH = 65_536
SAMPLES = 16  # of the latest roots checked after the proof
SAMPLES_DIFFER = 12  # so many of them make a finding,
SAMPLES_AGREE = 4  # so few end it


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement between what a worker advertises and what it sends."""

    kind: Literal["block_size", "hash", "outcome"]
    advertised: int | str
    observed: int | str
    advice: str


_rekeyed = 0


def rekeyed() -> int:
    """How often any worker's scheme became another one: what was made of the schemes of many holds until this grows."""
    return _rekeyed


class Ledger(Protocol):
    def width_settled(self) -> None:
        """Apply the events held until the width was known."""

    def kind_changed(self) -> None:
        """Fold everything since the last clear again, under the new hash kind."""

    def kind_proven(self) -> None:
        """The kind will not change any more: what was kept for that can go."""


class WorkerScheme:
    """`advertised_width`: tokens a block by the descriptor or configuration. `engine`: sglang, vllm or unknown;
    SGLang's chain is assumed for sglang only, and vLLM's is known to be another, so nothing is checked there."""

    def __init__(self, advertised_width: int, engine: str, bigram: bool = False) -> None:
        if not 1 <= advertised_width <= MAX_WIDTH:
            raise ValueError(f"a block width of {advertised_width} tokens; it must be 1 to {MAX_WIDTH}")
        self.advertised_width = advertised_width
        self.assumed_kind: HashKind = "sglang-sha256" if engine == "sglang" else "xxh3"
        self.scheme = Scheme(self.assumed_kind, advertised_width, bigram)
        self.proven = engine == "vllm"
        self.is_width_settled = False
        self.content_hashes = False  # SGLang ≤ 0.5.3: a hash names a page's tokens, not its prefix
        self.nil_parents_lie = False  # SGLang 0.5.3: a page after a node split claims to be a root
        self.findings: tuple[Finding, ...] = ()
        """A new object whenever one is added or ends."""
        self.is_doubtful = False
        """The latest samples differed, and what that means is open: every root is worth a check."""
        self._advertised_bigram = bigram
        self._causes: dict[str, Finding] = {}
        self._samples: deque[bool] = deque(maxlen=SAMPLES)
        self._votes: dict[int, int] = {}
        self._ledgers: list[Ledger] = []

    def join(self, ledger: Ledger) -> None:
        self._ledgers.append(ledger)

    def leave(self, ledger: Ledger) -> None:
        self._ledgers.remove(ledger)

    def saw_width(self, width: int) -> None:
        """A sound store of `width` came while the width is open. May settle it, which calls every ledger."""
        if width == self.advertised_width:
            self._settle(width)
            return
        votes = self._votes[width] = self._votes.get(width, 0) + 1
        if votes >= VOTES_TO_ADOPT:
            self.find(
                "width",
                Finding(
                    "block_size",
                    self.advertised_width,
                    width,
                    f"the descriptor says {self.advertised_width} tokens a block, the events carry {width}: upgrade "
                    "the engine (SGLang before 0.5.18 advertises the physical page under decode-context parallelism) "
                    f"or set kv_events.block_size: {width} for this worker",
                ),
            )
            self._settle(width)
        elif sum(self._votes.values()) >= MAX_VOTES:
            self._settle(self.advertised_width)

    def saw_root(self, equals: bool, unsalted: bool, content_hash: bool, pairs: bool) -> None:
        """A root store was recomputed. `equals`: by SGLang's chain; `content_hash`: its hash is that of the page alone.
        May change the kind, which makes every ledger fold again."""
        if pairs != self.scheme.bigram and (equals or not self.proven):
            self._take_bigram(pairs)
        if self.proven and self.scheme.kind == "sglang-sha256":
            self._sample(equals)
        elif equals:
            self._adopt("sglang-sha256")
            self._prove()
        elif content_hash and not self.proven:
            self.content_hashes = True
            self._adopt("xxh3")
            self._prove()
        elif unsalted and not self.proven:
            self._adopt("xxh3")

    def saw_key(self) -> None:
        """A block the engine announced bears the key computed from a prompt: SGLang's chain, as good as from a root."""
        if not self.proven and self.scheme.kind == "sglang-sha256":
            self._prove()

    def find(self, cause: str, finding: Finding | None) -> None:
        """What disagrees for this cause from now on; None: nothing does."""
        if self._causes.get(cause) == finding:
            return
        if finding is None:
            del self._causes[cause]
        else:
            self._causes[cause] = finding
        self.findings = tuple(self._causes.values())

    def _rekey(self, scheme: Scheme) -> None:
        global _rekeyed
        self.scheme = scheme
        _rekeyed += 1

    def _take_bigram(self, pairs: bool) -> None:
        self._rekey(self.scheme._replace(bigram=pairs))
        if pairs == self._advertised_bigram:
            self.find("bigram", None)
            return
        words = {True: "pairs of token ids", False: "single token ids"}
        self.find(
            "bigram",
            Finding(
                "hash",
                words[self._advertised_bigram],
                words[pairs],
                f"by speculative_algorithm its blocks hold {words[self._advertised_bigram]}, the events carry "
                f"{words[pairs]}: the router goes by the events. Check the engine's release and that setting",
            ),
        )

    def _sample(self, equals: bool) -> None:
        self._samples.append(equals)
        differ = self._samples.count(False)
        if len(self._samples) == SAMPLES and differ >= SAMPLES_DIFFER:
            self.find(
                "samples",
                Finding(
                    "hash",
                    "sglang-sha256",
                    "other hashes",
                    f"most of the prompts' first blocks that were checked (at least {SAMPLES_DIFFER} of {SAMPLES}) "
                    "do not have the hash of SGLang's chain, and earn no credit. In the events' format dynamo that is "
                    "traffic with an extra_key, which is in the hash by a rule the router does not know: separate "
                    "tenants by cache_salt, in the default format. If no client sends one, the engine's hash changed",
                ),
            )
        elif differ <= SAMPLES_AGREE:
            self.find("samples", None)
        latest = list(self._samples)[-2:]
        self.is_doubtful = "samples" not in self._causes and len(latest) == 2 and not any(latest)

    def _adopt(self, kind: HashKind) -> None:
        if kind == self.scheme.kind:
            return
        self._rekey(self.scheme._replace(kind=kind))
        finding = None
        if kind != self.assumed_kind and kind == "xxh3":
            finding = Finding(
                "hash",
                self.assumed_kind,
                kind,
                "this engine's block hashes are not SGLang's SHA-256 chain (SGLang before 0.5.10, or a changed hash): "
                "the router keys its blocks itself, from the token ids of the events. Upgrade the engine to spare it "
                "that work",
            )
        self.find("kind", finding)
        for ledger in self._ledgers:
            ledger.kind_changed()

    def _prove(self) -> None:
        if not self.proven:
            self.proven = True
            for ledger in self._ledgers:
                ledger.kind_proven()

    def _settle(self, width: int) -> None:
        self.is_width_settled = True
        self._rekey(self.scheme._replace(width=width))
        for ledger in self._ledgers:
            ledger.width_settled()
