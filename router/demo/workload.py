"""A seeded multi-turn chat workload: conversations under shared system prompts, each turn extending the last. Pure.

The schedule is fixed by the seed: who says what, and when. A turn is sent at its time, or as soon as the previous
answer is there when that is later; every scheduled turn is sent. So two policies are asked the very same things. Sized
so that the fleet's caches hold the working set once, but not once per engine: the situation a KV-aware router is for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SYSTEM_PROMPTS = 8
SYSTEM_WORDS = 80
USER_WORDS = (70, 150)
TURNS = (5, 9)
ANSWER_TOKENS = (16, 48)
TURN_GAP_S = (1.2, 2.4)
USERS_PER_ENGINE = 9

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
    """What a user says, when (seconds after the start), and how long the answer may be."""

    at_s: float
    message: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class User:
    """Holds one conversation after the other."""

    conversations: tuple[Conversation, ...]


def make_workload(engines: int, duration_s: float, seed: int) -> tuple[User, ...]:
    """Every turn is scheduled within `duration_s`."""
    rng = random.Random(seed)
    systems = [_text(rng, SYSTEM_WORDS) for _ in range(SYSTEM_PROMPTS)]
    return tuple(_user(rng, systems, duration_s) for _ in range(engines * USERS_PER_ENGINE))


def _user(rng: random.Random, systems: list[str], duration_s: float) -> User:
    conversations: list[Conversation] = []
    at_s = rng.uniform(0, TURN_GAP_S[1])
    while at_s < duration_s:
        turns: list[Turn] = []
        for _ in range(rng.randint(*TURNS)):
            if at_s >= duration_s:
                break
            turns.append(Turn(at_s, _text(rng, rng.randint(*USER_WORDS)), rng.randint(*ANSWER_TOKENS)))
            at_s += rng.uniform(*TURN_GAP_S)
        conversations.append(Conversation(rng.choice(systems), tuple(turns)))
    return User(tuple(conversations))


def _text(rng: random.Random, words: int) -> str:
    return " ".join("".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3))) for _ in range(words))
