"""A seeded multi-turn chat workload: conversations under shared system prompts, each turn extending the last. Pure.

The schedule (who starts when, every user message, every think time) is fixed by the seed; a turn is sent at its think
time after the previous answer, so two policies meet the same load. Sized so that the fleet's caches hold the working
set once but not once per engine: the situation a KV-aware router is for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SYSTEM_PROMPTS = 6
SYSTEM_WORDS = 160
USER_WORDS = (60, 140)
TURNS = (5, 9)
ANSWER_TOKENS = (16, 48)
THINK_S = (0.3, 1.1)
CONVERSATIONS_PER_ENGINE = 9
"""Running at any time; a finished conversation is replaced by a new one until the time is over."""

_SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ren",
    "tu",
    "sa",
    "vel",
    "dor",
    "in",
    "the",
    "and",
    "with",
    "from",
    "cache",
    "plan",
    "note",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, after how long, and how long the answer may be."""

    think_s: float
    message: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """`start_s` is seconds after the phase began; for a replacement, after its predecessor ended."""

    system: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Conversations held one after the other by one user."""

    conversations: tuple[Conversation, ...]


def make_workload(engines: int, duration_s: float, seed: int) -> tuple[Lane, ...]:
    """One lane per concurrent user, each with more conversations than fit into `duration_s`."""
    rng = random.Random(seed)
    systems = [_text(rng, SYSTEM_WORDS) for _ in range(SYSTEM_PROMPTS)]
    per_lane = 1 + int(duration_s / (TURNS[0] * THINK_S[0]))
    return tuple(
        Lane(tuple(_conversation(rng, systems, first=number == 0) for number in range(per_lane)))
        for _ in range(engines * CONVERSATIONS_PER_ENGINE)
    )


def _conversation(rng: random.Random, systems: list[str], *, first: bool) -> Conversation:
    turns = tuple(
        Turn(rng.uniform(*THINK_S), _text(rng, rng.randint(*USER_WORDS)), rng.randint(*ANSWER_TOKENS))
        for _ in range(rng.randint(*TURNS))
    )
    return Conversation(rng.choice(systems), rng.uniform(0, 2.0) if first else 0.0, turns)


def _text(rng: random.Random, words: int) -> str:
    return " ".join("".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3))) for _ in range(words))
