"""Token counts of answered requests: one of these for the process, one for every rank's incarnation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Everything in tokens but `requests`. Only grows."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    """What the chosen rank was believed to hold."""
    best_cached_tokens: int = 0
    """The most any candidate was believed to hold."""
    blind_cached_tokens: float = 0.0
    """The candidates' mean: what a choice that knows nothing would have found."""
    reported_prompt_tokens: int = 0
    reported_cached_tokens: int = 0
    """What engines say they reused."""

    def placed(self, prompt: int, predicted: int, best: int, blind: float) -> None:
        self.requests += 1
        self.prompt_tokens += prompt
        self.predicted_cached_tokens += predicted
        self.best_cached_tokens += best
        self.blind_cached_tokens += blind

    def reported(self, prompt: int, cached: int) -> None:
        self.reported_prompt_tokens += prompt
        self.reported_cached_tokens += cached
