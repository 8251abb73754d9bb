"""The cost of sending one prompt to one rank, in tokens of prefill work before its first token.

    cost = Q + u·(1.5 + 0.03·n) + 0.01·E            (policy-study.md, best found; lowest wins)

Q  uncached tokens queued ahead (RankLoad.queue_tokens)
u  this prompt's uncached tokens there, times the attention factor: a token costs more after a long context
n  own requests there past their first token: decodes slow a prefill down, by a little
E  decayed sum of the uncached tokens sent there: keeps long-term shares even when nothing else differs

Costs are compared in seconds: tokens over the rank's prefill speed, the fleet's median where speeds hardly differ.
`kv-router bench replay` shows what each constant is worth on a trace.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Every constant of the cost. Defaults are the tuned values of policy-study.md."""

    u_weight: float = 1.5
    decode_weight: float = 0.03
    share_weight: float = 0.01
    share_tau_s: float = 120.0
    attention_tokens: float = 100_000.0
    """Context at which a token costs twice as much to prefill; the study's engine model."""
    age_rate_factor: float = 0.5
    """Share of the prefill speed used to turn a wait into tokens: too high is catastrophic, too low harmless."""
    same_speed: float = 1.5
    """Ranks whose measured speed is within this factor of the fleet's median count as equally fast: one machine's
    measure moves with the context of its prompts (taken as it is, it costs 7 % of TTFT on the synthetic trace)."""
    consistent_tolerance: float = 0.0
    """Idle ranks that hold the same of a prompt count as equally good up to this share above the lowest cost, and the
    prompt goes where every router would send it. Simulated: 0.1 takes 6 % off the TTFT of sibling bursts where two
    routers see each other only through 0.1 s old reports, nothing where they tell each other their load, and adds 0 to
    4 % to plain traffic. So only exact ties are decided that way by default."""
    tier_weights: tuple[float, float, float, float] = (0.0, 0.2, 0.6, 0.7)
    """Work per cached token by tier (GPU, host, disk, external): loading back is cheaper than prefill, not free."""


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The parts of one candidate's cost, all in tokens; `total` is their sum."""

    queue: float
    prefill: float
    share: float

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.share


def work_tokens(prompt_tokens: int, cached_by_tier: tuple[int, int, int, int], weights: CostWeights) -> float:
    """Prefill-equivalent tokens of this prompt: what is cached nowhere counts whole, slower tiers by their weight.

    `cached_by_tier` is cumulative tokens (that tier or a faster one), fastest first.
    """
    work = float(prompt_tokens - cached_by_tier[3])
    faster = 0
    for tokens, weight in zip(cached_by_tier, weights.tier_weights, strict=True):
        work += weight * (tokens - faster)
        faster = tokens
    return work


def attention_factor(prompt_tokens: int, cached_tokens: int, weights: CostWeights) -> float:
    """Mean slowdown of the uncached tail: its tokens attend to the cached context and to half of themselves."""
    return 1.0 + (cached_tokens + prompt_tokens) / 2 / weights.attention_tokens


def cost(
    *, queue_tokens: float, work: float, attention: float, decoding: int, share_tokens: float, weights: CostWeights
) -> CostTerms:
    """One candidate's cost; see the module's head for the formula."""
    prefill = work * attention * (weights.u_weight + weights.decode_weight * decoding)
    return CostTerms(queue_tokens, prefill, weights.share_weight * share_tokens)
