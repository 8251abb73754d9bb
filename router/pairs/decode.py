"""The second half of a pair: which decode rank takes a prompt over. Pure: randomness is passed in.

    cost = (tokens in use + this prompt's − those it holds) ÷ capacity  +  requests ÷ slots       (lowest wins)

A decode step gets slower with every sequence and with the KV it reads, and a rank without room makes the request wait,
so both shares count alike. Ranks with room beat those without. What a decode engine's own radix cache holds of the
prompt is not moved again: it takes no new room. Tokens in use and requests are the larger of the router's own view and
the engine's load report.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

TYPICAL_SLOTS = 128
"""Requests at a time on a rank that does not say its limit."""
MAX_RESERVED_TOKENS = 512
"""SGLang 0.5.23 keeps so many tokens free for a new request's answer (num_reserved_decode_tokens)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """One decode rank now, in tokens and requests. `capacity_tokens` None: the engine does not say."""

    used_tokens: int
    requests: int
    capacity_tokens: int | None = None
    slots: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeScored(Generic[T]):
    """One candidate; `fits`: prompt and the first of the answer have room there now."""

    target: T
    load: DecodeLoad
    fits: bool
    cost: float


@dataclass(frozen=True, slots=True)
class DecodeChoice(Generic[T]):
    """The chosen rank and every candidate at that moment, in the given order."""

    chosen: DecodeScored[T]
    scored: tuple[DecodeScored[T], ...]


def choose_decode(
    targets: Sequence[tuple[T, DecodeLoad]], prompt_tokens: int, answer_tokens: int, rng: random.Random
) -> DecodeChoice[T]:
    """Chooses one of `targets` (never empty); exact ties at random (case 50). `answer_tokens` is the answer's limit."""
    stated = [load.capacity_tokens for _, load in targets if load.capacity_tokens]
    typical = max(stated) if stated else None
    need = prompt_tokens + min(answer_tokens, MAX_RESERVED_TOKENS)
    scored = tuple(_scored(target, load, need, typical) for target, load in targets)
    best = min((not one.fits, one.cost) for one in scored)
    return DecodeChoice(rng.choice([one for one in scored if (not one.fits, one.cost) == best]), scored)


def _scored(target: T, load: DecodeLoad, need_tokens: int, typical_capacity: int | None) -> DecodeScored[T]:
    capacity = load.capacity_tokens or typical_capacity
    after = load.used_tokens + need_tokens - load.cached_tokens
    full = after / capacity if capacity else 0.0
    fits = capacity is None or after <= capacity
    return DecodeScored(target, load, fits, full + load.requests / (load.slots or TYPICAL_SLOTS))
