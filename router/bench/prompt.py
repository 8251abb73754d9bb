"""`bench prompt`: CPU time from a request's body to its decision, on one core.

Everything the router does between the two is in it: reading the body, rendering the template, token ids, block keys,
look-up in the index, choice among the ranks. Two cases: a prompt never seen, with fastokens and with Hugging Face's
`tokenizers`, and the next turn of a conversation whose earlier turns were seen.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from router.contract.events import Tier
from router.engine.options import TINY_MODEL
from router.hashing import Namespace, Scheme, token_count
from router.index.prefix import PrefixIndex
from router.matching import PromptKeys, prompt_credits
from router.policy.cost import CostWeights
from router.policy.decide import Asked, Policy
from router.policy.load import RankLoad
from router.policy.predicted import PredictedBlocks
from router.prompt.body import parse_body
from router.prompt.conversation import ConversationCache
from router.prompt.forms import CHAT, prompt_form
from router.prompt.local import LocalPrompt, local_prompt
from router.prompt.models import ModelFacts, ModelFiles, ModelSource, load_model
from router.prompt.tokenizer import load_tokenizer

COLD_TOKENS = 8192
TURN_TOKENS = 32_768
MESSAGE_TOKENS = 256
PAGE_TOKENS = 16
RANKS = 8
CACHE_BYTES = 64 << 20
FACTS = ModelFacts("sglang", ("bench",))
_WORDS = (
    *("the", "router", "holds", "a", "block", "of", "every", "prefix", "while", "engines", "read", "tokens", "and"),
    *(
        "write",
        "pages",
        "for",
        "requests",
        "that",
        "come",
        "again",
        "because",
        "users",
        "ask",
        "one",
        "more",
        "question",
    ),
    *("about", "code,", "a", "file,", "weather", "in", "Lisbon", "or", "def", "main(argv):", "return", "0"),
)


@dataclass(slots=True)
class _Rank:
    account: RankLoad
    number: int
    credit_slot: int
    anchor: int = 0


class _Router:
    """The deciding half, over an index with eight ranks."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.cache = ConversationCache(CACHE_BYTES)
        self._scheme = Scheme("sglang-sha256", PAGE_TOKENS)
        self._index = PrefixIndex()
        self._predicted = PredictedBlocks(10.0)
        self._policy = Policy("kv", CostWeights(), default_rate_tokens_per_s=8000.0, rng=random.Random(1))
        self._ranks = [_Rank(RankLoad(), number, self._index.open_slot()) for number in range(RANKS)]

    def decide(self, raw: bytes) -> tuple[LocalPrompt, PromptKeys]:
        body = parse_body(CHAT, raw)
        made = local_prompt(body, prompt_form(body, "sglang"), self.files, FACTS, self.cache)
        keys = PromptKeys(made.ids, Namespace(), made.cached)
        credits = prompt_credits(self._index, self._predicted, keys, (self._scheme,))
        self._policy.decide(Asked(token_count(made.ids)), self._ranks, credits, 0.0)
        return made, keys

    def served(self, keys: PromptKeys) -> None:
        """One rank now holds what was asked."""
        self._index.store(self._ranks[0].credit_slot, Tier.GPU, keys.under(self._scheme))


def run(folder: Path | None, *, repeats: int = 15) -> dict[str, Any]:
    """Returns the `bench prompt` object that `--json` writes: medians in µs of CPU time of this process.

    `folder` holds tokenizer.json and a chat template; None: the small tokenizer that comes with the router. Raises
    ValueError when it has no template that can be rendered.
    """
    files = load_model(ModelSource(str(folder or TINY_MODEL), "sglang"), datetime.now)
    if files.template is None:
        raise ValueError(f"bench prompt renders chats: {files.template_problem}")
    slow = replace(files, tokenizer=load_tokenizer(folder or TINY_MODEL, fast_wanted=False))
    rng = random.Random(3)
    cold = [_body([_message(rng, files, COLD_TOKENS, "user")]) for _ in range(repeats)]
    turn_us, tokens = _turns(_Router(files), rng, repeats)
    return {
        "tokenizer": str(folder) if folder is not None else "tiny",
        "backend": files.tokenizer.backend,
        "cold_8k_us": _median_us(_Router(files), cold),
        "cold_8k_hf_us": _median_us(_Router(slow), cold),
        "turn_32k_text_to_decision_us": turn_us,
        "turn_32k_tokens": tokens,
        "turn_32k_messages": 2 * (TURN_TOKENS // MESSAGE_TOKENS // 2),
        "turn_32k_unseen_us": _median_us(_Router(files), [_body(_conversation(rng, files)) for _ in range(3)]),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """`run`'s result for people."""
    table = Table(title=f"text to decision: {result['tokenizer']}, {result['backend']}, CPU time")
    table.add_column("prompt")
    table.add_column("median", justify="right")
    table.add_row("8k tokens, never seen", f"{result['cold_8k_us']:,} µs")
    table.add_row("8k tokens, never seen, Hugging Face tokenizers", f"{result['cold_8k_hf_us']:,} µs")
    turn = f"next turn of {result['turn_32k_tokens']:,} tokens in {result['turn_32k_messages']} messages"
    table.add_row(turn, f"{result['turn_32k_text_to_decision_us']:,} µs")
    table.add_row("the same, never seen", f"{result['turn_32k_unseen_us']:,} µs")
    console.print(table)


def _turns(router: _Router, rng: random.Random, repeats: int) -> tuple[int, int]:
    """(µs, tokens) of turns near TURN_TOKENS. All earlier turns were asked before, and one rank serves them."""
    talk = _conversation(rng, router.files, TURN_TOKENS - repeats * MESSAGE_TOKENS)  # half of what the turns add
    router.served(router.decide(_body(talk))[1])
    spent, tokens = [], []
    for _ in range(repeats):
        talk += [_message(rng, router.files, MESSAGE_TOKENS, role) for role in ("assistant", "user")]
        raw = _body(talk)
        gc.collect()
        start = time.process_time()
        made, keys = router.decide(raw)
        spent.append(time.process_time() - start)
        router.served(keys)
        tokens.append(token_count(made.ids))
    return round(statistics.median(spent) * 1e6), round(statistics.median(tokens))


def _median_us(router: _Router, bodies: list[bytes]) -> int:
    router.decide(_body([{"role": "user", "content": "warm"}]))
    spent = []
    for raw in bodies:
        gc.collect()
        start = time.process_time()
        router.decide(raw)
        spent.append(time.process_time() - start)
    return round(statistics.median(spent) * 1e6)


def _conversation(rng: random.Random, files: ModelFiles, tokens: int = TURN_TOKENS) -> list[dict[str, str]]:
    roles = ["system", *(("user", "assistant") * (tokens // MESSAGE_TOKENS // 2))][:-1]
    return [_message(rng, files, MESSAGE_TOKENS, role) for role in roles]


def _message(rng: random.Random, files: ModelFiles, tokens: int, role: str) -> dict[str, str]:
    """A message of about so many tokens that no other is like."""
    per_word = token_count(files.tokenizer.encode(" ".join(_WORDS), False)) / len(_WORDS)
    words = [f"{rng.getrandbits(40):x}", *(rng.choice(_WORDS) for _ in range(round(tokens / per_word) - 12))]
    return {"role": role, "content": " ".join(words)}


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "bench", "messages": messages, "stream": True}).encode()
