"""No step on a large prompt holds the interpreter's lock for long: threads alone would not keep the event loop free.

Measured as CPU time of this thread, so that other processes do not count, from a C function's call to its return or to
its next call of a Python function, where other threads get their turn. Compiled code is such a C function.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from router.hashing import TokenIds
from router.prompt import chat
from router.prompt.body import parse_body
from router.prompt.conversation import ConversationCache
from router.prompt.forms import prompt_form
from router.prompt.local import local_prompt
from tests.prompt.support import CHAT, COMPLETIONS, FACTS, tiny

BAR_S = 0.005
RELEASES_THE_LOCK = ("encode_batch_flat", "encode_batch_fast")
HARD = "<|im_start|>"
WORDS = ("the", "router", "holds", "a", "block", "of", "every", "prefix", "while", "engines", "read", "and", "write")


def words(count: int) -> str:
    rng = random.Random(count)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def messages() -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": words(150)} for n in range(1001)]


def tools() -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": words(30)}}}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(4000)]


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a million ids": (COMPLETIONS, lambda: {"prompt": [n * 7919 % 4000 for n in range(1_000_000)]}),
    "ids in a batch": (COMPLETIONS, lambda: {"prompt": [list(range(4000))] * 200}),
    "a long text": (COMPLETIONS, lambda: {"prompt": words(500_000)}),
    "a long text of escapes": (COMPLETIONS, lambda: {"prompt": "漢字かな交じり文" * 60_000}),
    "a long message": (CHAT, lambda: {"messages": [{"role": "user", "content": words(500_000)}]}),
    "many messages": (CHAT, lambda: {"messages": messages()}),
    "many tools": (CHAT, lambda: {"messages": [{"role": "user", "content": "hi"}], "tools": tools()}),
    "many short messages": (CHAT, lambda: {"messages": [{"role": "user", "name": "n" * 30, "content": "a"}] * 11_000}),
    "many parts": (CHAT, lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]}),
    "hard tokens": (CHAT, lambda: {"messages": [{"role": "user", "content": HARD * 20_000 + words(120_000)}]}),
    "spaces": (CHAT, lambda: {"messages": [{"role": "user", "content": " " * 900_000}]}),
}


class Held:
    """The C function that took longest without a turn for other threads, and its seconds."""

    def __init__(self) -> None:
        self.longest = (0.0, "")
        self._inside: list[str] = []
        """The functions that run, "" for those in Python."""
        self._since_s = 0.0

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        running = self._inside[-1] if self._inside else ""
        if running and running not in RELEASES_THE_LOCK:
            self.longest = max(self.longest, (time.thread_time() - self._since_s, running))
        if event == "call":
            self._inside.append("")
        elif event == "c_call":
            self._inside.append(called.__name__)
        elif self._inside:
            self._inside.pop()
        self._since_s = time.thread_time()


@contextmanager
def watched() -> Iterator[Held]:
    held = Held()
    gc.disable()
    sys.setprofile(held)
    try:
        yield held
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize("name", BODIES)
def test_a_large_prompt_is_made_in_short_steps(name: str) -> None:
    """case 44"""
    path, fields = BODIES[name]
    raw = json.dumps({"model": "tiny", **fields()}).encode()
    assert len(raw) > 800_000
    longest = [longest_call(path, raw)]
    while longest[-1][0] >= BAR_S and len(longest) < 3:  # a call that is too long is so every time, a page fault is not
        longest.append(longest_call(path, raw))
    assert min(longest)[0] < BAR_S, longest


def longest_call(path: str, raw: bytes) -> tuple[float, str]:
    model = tiny()  # loaded once, not for each prompt
    encode = model.tokenizer.encoder

    def encoder(text: str, add_special_tokens: bool) -> TokenIds:
        """Called from compiled code, what releases the lock is only seen when it is called from here."""
        return encode(text, add_special_tokens)

    model = replace(model, tokenizer=replace(model.tokenizer, encoder=encoder))
    chat._tools.cache_clear()
    with watched() as held:
        body = parse_body(path, raw)
        form = prompt_form(body, "sglang")
        if form.kind == "ids":
            assert form.ids
        else:
            assert local_prompt(body, form, model, FACTS, ConversationCache(64 << 20)).ids
    return held.longest
