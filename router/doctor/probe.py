"""`--probe`: small prompts to one engine, rank by rank; does what it then says agree with what the router believes?

Every prompt is fresh random ids, so nothing of anybody's cache is touched or learnt. Four requests of one token a rank.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from router.contract.events import Tier
from router.doctor.findings import Finding
from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.hashing import Namespace, TokenIds, creditable_blocks, pack_ids, prompt_keys, token_count
from router.index.prefix import PrefixIndex

BLOCKS = 3
REQUESTS_PER_RANK = 3
MAX_TOKENS = 4096
ID_RANGE = (10, 250)
"""Small ids every vocabulary has: an id outside it kills a CPU SGLang (contract, section 5)."""
EVENTS_WAIT_S = 3.0

Ask = Callable[[str, dict[str, Any], dict[str, str]], Awaitable[dict[str, Any]]]
"""(path, JSON body, headers) → the engine's JSON answer. Raises ProbeRefused."""


class ProbeRefused(Exception):
    """The engine did not serve a probe; the text says how it answered."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine reported of one probe. None: not reported."""

    prompt_tokens: int | None
    cached_tokens: int | None
    rank: int | None


async def probe_worker(worker: Worker, index: PrefixIndex, ask: Ask, rng: random.Random) -> list[Finding]:
    """Probes every rank in turn. An engine that refuses is a finding, not an exception."""
    findings: list[Finding] = []
    for rank in worker.ranks:
        try:
            findings.extend(await _probe_rank(worker, rank, index, ask, rng))
        except ProbeRefused as refused:
            findings.append(
                Finding("error", "probe_refused", f"rank {rank.number}: {refused}", "see the engine's own log")
            )
    return findings


async def _probe_rank(worker: Worker, rank: Rank, index: PrefixIndex, ask: Ask, rng: random.Random) -> list[Finding]:
    name = f"rank {rank.number}"
    width = worker.scheme.scheme.width if worker.scheme is not None else 64
    tokens = min(MAX_TOKENS, BLOCKS * width) + 1
    ids = [rng.randrange(*ID_RANGE) for _ in range(tokens)]
    findings: list[Finding] = []
    served = await _serve(worker, rank, ids, ask)
    if served.prompt_tokens is not None and served.prompt_tokens != tokens:
        what = f"{name}: {tokens} ids were sent, the engine counted {served.prompt_tokens} prompt tokens"
        findings.append(Finding("error", "prompt", what, "is another router or a template between?"))
    if rank.pin is not None and served.rank is not None and served.rank != rank.pin:
        what = f"{name} was named in the request and rank {served.rank} served it"
        findings.append(Finding("error", "pinning", what, "this release does not know routed_dp_rank: upgrade SGLang"))
    predicted = await _credited(worker, rank, index, ids)
    for _ in range(REQUESTS_PER_RANK - 1):
        served = await _serve(worker, rank, ids, ask)
    if served.cached_tokens is None:
        return findings
    if rank.trusted and predicted != served.cached_tokens:
        what = f"{name}: {predicted} cached tokens predicted, the engine reused {served.cached_tokens}"
        findings.append(
            Finding(
                "error",
                "prediction",
                what,
                "another finding may say why; if none does, report it with this output",
            )
        )
    elif not served.cached_tokens:
        what = f"{name}: a repeated prompt of {tokens} tokens was not reused"
        advice = "is the prefix cache off (--disable-radix-cache, --no-enable-prefix-caching)?"
        findings.append(Finding("error", "no_reuse", what, advice))
    return findings


async def _serve(worker: Worker, rank: Rank, ids: list[int], ask: Ask) -> Served:
    """One token, greedy, on that rank."""
    if worker.info is not None and worker.info.engine == "vllm":
        body: dict[str, Any] = {"model": worker.models[0], "prompt": ids, "max_tokens": 1, "temperature": 0}
        headers = {} if rank.pin is None else {"X-Data-Parallel-Rank": str(rank.pin)}
        usage = (await ask("/v1/completions", body, headers)).get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Served(usage.get("prompt_tokens"), details.get("cached_tokens"), None)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    if rank.pin is not None:
        body["routed_dp_rank"] = rank.pin
    meta = (await ask("/generate", body, {})).get("meta_info") or {}
    return Served(meta.get("prompt_tokens"), meta.get("cached_tokens"), meta.get("dp_rank"))


async def _credited(worker: Worker, rank: Rank, index: PrefixIndex, ids: list[int]) -> int:
    """Tokens of `ids` the rank is credited with once its events had time to come."""
    if worker.scheme is None or rank.ledger is None:
        return 0
    loop = asyncio.get_running_loop()
    deadline, packed = loop.time() + EVENTS_WAIT_S, pack_ids(ids)
    while True:
        scheme = worker.scheme.scheme  # it may change while the first stores come
        most = creditable_blocks(scheme, token_count(packed))
        keys = (prompt_keys(scheme, packed, Namespace()) or [])[:most]
        blocks = index.match(keys).get(rank.slot, (0, 0, 0, 0))[Tier.EXTERNAL]
        if blocks == most or loop.time() > deadline:
            return blocks * scheme.width
        await asyncio.sleep(0.05)


def compare_ids(local: TokenIds, theirs: TokenIds) -> Finding | None:
    """The engine's ids of one chat against the router's; None when they are equal."""
    if local == theirs:
        return None
    pairs = zip(memoryview(local).cast("I"), memoryview(theirs).cast("I"), strict=False)
    shortest = min(token_count(local), token_count(theirs))
    first = next((number for number, (ours, other) in enumerate(pairs) if ours != other), shortest)
    what = (
        f"the engine makes other ids of the same chat, from token {first} on "
        f"({token_count(theirs)} tokens, {token_count(local)} here)"
    )
    advice = (
        "tokenizer.path and tokenizer.chat_template must be this model's own; tokenizer.mode: engine asks the engine"
    )
    return Finding("error", "prompt", what, advice)
