"""The requests of `bench serve`: every one unlike all before, made from the same seed in every run. No I/O."""

from __future__ import annotations

import json
import random
from functools import lru_cache

CHUNKS = 64
PACE_S = 0.01
PREFIXES = 8
PREFIX_BYTES = 24_576
TAIL_BYTES = 8_192
TURNS = 16
TURN_BYTES = 2_048
CONVERSATIONS = 32
_WORDS = (
    *("the", "router", "holds", "a", "block", "of", "every", "prefix", "while", "engines", "read", "tokens", "and"),
    *("write", "pages", "for", "requests", "that", "come"),
)


def owner_of(prefix: int, owners: int) -> int:
    return prefix % owners


@lru_cache(maxsize=4096)
def text(seed: int, size: int) -> str:
    """About `size` bytes of words."""
    rng = random.Random(seed)
    words: list[str] = []
    length = 0
    while length < size:
        words.append(rng.choice(_WORDS) if rng.random() < 0.8 else f"{rng.getrandbits(20):x}")
        length += len(words[-1]) + 1
    return " ".join(words)


def _chat(messages: list[dict[str, str]], **more: object) -> bytes:
    body = {"model": "bench", "max_tokens": 64, **more, "messages": messages}
    return json.dumps(body, separators=(",", ":")).encode()


def small_body(number: int) -> bytes:
    return _chat([{"role": "user", "content": f"question {number:09}: {text(number % 64, 90)}"}])


def burst_body(number: int) -> bytes:
    return _chat([{"role": "user", "content": f"question {number:09}: {text(number % 64, 90)}"}], stream=True)


def paced_body(number: int) -> bytes:
    content = f"question {number:09}: {text(number % 64, 90)}"
    return _chat([{"role": "user", "content": content}], stream=True, user="paced")


def long_body(prefix: int, number: int) -> bytes:
    """One message: a start of 24 KB that many share, and 8 KB that nobody had."""
    content = f"{text(1000 + prefix, PREFIX_BYTES)} {number:09} {text(2000 + number % 64, TAIL_BYTES)}"
    return _chat([{"role": "user", "content": content}])


def long_prompt(number: int) -> bytes:
    return long_body(number % PREFIXES, number)


def turn_body(number: int) -> bytes:
    """Turn by turn of conversations that grow to 32 KB; after the last turn they are new ones."""
    turn, conversation = divmod(number, CONVERSATIONS)
    batch, turn = divmod(turn, TURNS)
    messages = [{"role": "system", "content": text(3000 + conversation % 8, TURN_BYTES)}]
    for step in range(turn + 1):
        asked = f"{batch:06} {conversation:03} {step:02} {text(4000 + step, TURN_BYTES // 2)}"
        messages.append({"role": "user", "content": asked})
        if step < turn:
            messages.append({"role": "assistant", "content": text(5000 + step, TURN_BYTES // 2)})
    return _chat(messages)
