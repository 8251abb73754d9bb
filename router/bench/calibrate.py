"""`bench calibrate URL`: the engine model's constants fitted from one real engine, and how far the model then is off.

Only prompts of token ids are sent, each unlike any other, so nothing is cached unless it is meant to be. The engine
must be idle otherwise. What is fitted is what a client sees: HTTP and the engine's queueing are in the step overhead.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import aiohttp

from router.bench.fit import fit
from router.bench.sim.rank import IDLE_S, Job, SimRank
from router.bench.sim.trace import TraceRequest
from router.engine.radix import RadixCache
from router.engine.timing import TimingProfile
from router.errors import ConfigError

FIRST_ID, LAST_ID = 10, 500
"""Ids every vocabulary has: one outside of it kills a CPU SGLang server (engine contract, section 5)."""
REPEATS = 3
"""Of prefills the shortest counts: whatever else runs on the machine only adds to it."""
LONGEST_TOKENS = 16_384
"""Prompts are no longer, even where the engine would take more."""
DECODE_TOKENS = 24
CHECK_REQUESTS = 40
CHECK_LOAD = 0.5
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one request, in seconds."""

    ttft_s: float
    tpot_s: float


Row = tuple[float, float, float, float, float, float, float]
"""Steps, uncached tokens, those times their mean context, half the square of the context cached before each step, KV
tokens that were there before each, decode steps, sequences in them."""


def prefill_row(cached: int, uncached: int, chunk_tokens: int) -> Row:
    """Of a lone prompt, prefilled chunk by chunk: what one chunk computed is cached context for the next."""
    steps = attended = again = before = 0.0
    at = cached
    while at < cached + uncached:
        tokens = min(chunk_tokens, cached + uncached - at)
        steps += 1
        attended += tokens * (at + tokens / 2)
        again += at * at / 2
        before += at
        at += tokens
    return steps, float(uncached), attended, again, before, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement: its time, and how much of each of the model's constants is in it."""

    row: Row
    seconds: float


class Engine:
    """One engine's completions route."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self.model = ""
        self.version = "unknown"
        self.chunk_tokens = TimingProfile().chunk_tokens
        self.max_running = TimingProfile().max_running
        self.context_tokens = 8192
        self.page_tokens = 16

    async def describe(self) -> None:
        """Raises ConfigError when nobody answers there."""
        try:
            models = await self._json("/v1/models")
            self.model = models["data"][0]["id"]
            self.context_tokens = int(models["data"][0].get("max_model_len") or self.context_tokens)
            info = await self._json("/server_info")
        except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, TypeError, ValueError) as error:
            if not self.model:
                raise ConfigError(f"{self._url}: no engine answers there: {error!r}") from None
            return  # vLLM has no /server_info
        states = info.get("internal_states") or [{}]
        self.version = f"SGLang {info.get('version', 'unknown')}"
        self.page_tokens = int(info.get("page_size") or self.page_tokens)
        chunk = info.get("chunked_prefill_size")
        self.chunk_tokens = chunk if isinstance(chunk, int) and chunk > 0 else 1 << 20
        running = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
        self.max_running = running if isinstance(running, int) and running > 0 else self.max_running

    async def _json(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def ask(self, ids: Sequence[int], output_tokens: int) -> Answer:
        """One streamed completion. Raises ConfigError when the engine refuses it."""
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        started = time.perf_counter()
        times: list[float] = []
        async with self._session.post(self._url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise ConfigError(f"{self._url}: {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        if not times:
            raise ConfigError(f"{self._url}: an empty answer")
        return Answer(times[0] - started, (times[-1] - times[0]) / max(1, output_tokens - 1))


async def calibrate(url: str, *, seed: int, told: Callable[[str], None]) -> dict[str, Any]:
    """{"engine", "source", "timing"} as `bench replay --profile` reads it, and "check": model against reality."""
    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        engine = Engine(url, session)
        await engine.describe()
        told(f"{engine.version}, model {engine.model}, context {engine.context_tokens}")
        await engine.ask(_ids(rng, 64), 4)  # the first request after start is slower than any later one
        measured = [*await _prefill(engine, rng, told), *await _decode(engine, rng, told)]
        timing = fitted(measured, chunk_tokens=engine.chunk_tokens, max_running=engine.max_running)
        off = fit_error(measured, timing)
        told(f"the fit is off its own measurements by {off:.0%} on average")
        check = await _check(engine, timing, rng, told)
    source = f"kv-router bench calibrate, seed {seed}"
    return {
        "engine": f"{engine.version} {engine.model}",
        "source": source,
        "timing": asdict(timing),
        "fit_error": off,
        "check": check,
    }


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def fitted(measured: Sequence[Measured], *, chunk_tokens: int, max_running: int) -> TimingProfile:
    """One fit of everything: the model's step is overhead + the longer of prefill and decode + sequences + KV. Relative
    errors count alike. Raises ConfigError when prefill time does not grow with the prompt."""
    rows = [[cell / m.seconds for cell in m.row] for m in measured]
    try:
        overhead_s, token_s, context_s, again_s, kv_s, decode_s, sequence_s = fit(rows, [1.0] * len(rows))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not token_s and not context_s:
        raise ConfigError("prefill time does not grow with the prompt: nothing to calibrate")
    token_s = max(token_s, context_s)  # a purely quadratic prefill still has a first token
    context_s = max(context_s, again_s)  # cached tokens are not attended to twice
    return TimingProfile(
        prefill_tokens_per_s=1 / token_s,
        attention_context_tokens=token_s / context_s if context_s else 1e12,
        step_overhead_s=overhead_s,
        decode_step_s=decode_s,
        per_sequence_s=sequence_s,
        per_kv_token_s=kv_s,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        cached_attention=again_s / context_s if context_s else 0.0,
    )


def fit_error(measured: Sequence[Measured], timing: TimingProfile) -> float:
    """Mean relative distance of the model from the measurements. Large: this engine is not of the model's form."""
    token_s = 1 / timing.prefill_tokens_per_s
    constants = (
        timing.step_overhead_s,
        token_s,
        token_s / timing.attention_context_tokens,
        timing.cached_attention * token_s / timing.attention_context_tokens,
        timing.per_kv_token_s,
        timing.decode_step_s,
        timing.per_sequence_s,
    )
    said = [sum(cell * constant for cell, constant in zip(m.row, constants, strict=True)) for m in measured]
    return fmean(abs(s / m.seconds - 1) for s, m in zip(said, measured, strict=True))


async def _prefill(engine: Engine, rng: random.Random, told: Callable[[str], None]) -> list[Measured]:
    longest = min(engine.context_tokens - 64, LONGEST_TOKENS)
    measured = []
    for cached in (0, longest // 4, longest // 2):
        head = _ids(rng, cached)
        if cached:
            await engine.ask(head, 1)
        for share in (0.01, 0.1, 0.25, 0.5):
            uncached = max(16, round(share * longest) // 16 * 16)
            seen = [(await engine.ask([*head, *_ids(rng, uncached)], 1)).ttft_s for _ in range(REPEATS)]
            measured.append(Measured(prefill_row(cached, uncached, engine.chunk_tokens), min(seen)))
            told(f"prefill {uncached:6} uncached after {cached:6} cached: {measured[-1].seconds * 1000:8.1f} ms")
    return measured


async def _decode(engine: Engine, rng: random.Random, told: Callable[[str], None]) -> list[Measured]:
    long = min(engine.context_tokens // 2, 4096)
    measured = []
    for batch, prompt in ((1, 32), (4, 32), (8, 32), (1, long), (4, long)):
        if batch > engine.max_running:
            continue
        seen = []
        for _ in range(REPEATS):
            answers = await asyncio.gather(*(engine.ask(_ids(rng, prompt), DECODE_TOKENS) for _ in range(batch)))
            # The last to begin decodes while all others do, and no prefill comes between its tokens.
            seen.append(max(answers, key=lambda answer: answer.ttft_s).tpot_s)
        step_s = median(seen)  # tokens that were read together make a step look shorter than any
        row = (1.0, 0.0, 0.0, 0.0, batch * (prompt + DECODE_TOKENS / 2), 1.0, float(batch))
        measured.append(Measured(row, step_s))
        told(f"decode of {batch} at {prompt:5} tokens each: {step_s * 1000:8.2f} ms a step")
    return measured


async def _check(
    engine: Engine, timing: TimingProfile, rng: random.Random, told: Callable[[str], None]
) -> dict[str, Any]:
    """The same open-loop load on the engine and in the model."""
    longest = min(engine.context_tokens // 4, 4096)
    asks: list[tuple[float, list[int], int]] = []
    at_s = 0.0
    for _ in range(CHECK_REQUESTS):
        ids, output = _ids(rng, rng.randrange(32, longest)), rng.randrange(2, 16)
        asks.append((at_s, ids, output))
        alone = simulate(timing, engine.page_tokens, [(0.0, len(ids), output)])[0]
        at_s += rng.expovariate(CHECK_LOAD / (alone.ttft_s + alone.tpot_s * (output - 1)))
    started = time.perf_counter()

    async def one(ask: tuple[float, list[int], int]) -> Answer:
        await asyncio.sleep(max(0.0, ask[0] - (time.perf_counter() - started)))
        return await engine.ask(ask[1], ask[2])

    real = await asyncio.gather(*(one(ask) for ask in asks))
    modelled = simulate(timing, engine.page_tokens, [(at, len(ids), output) for at, ids, output in asks])
    pairs = {
        "ttft_mean_s": (fmean(a.ttft_s for a in real), fmean(a.ttft_s for a in modelled)),
        "tpot_mean_s": (fmean(a.tpot_s for a in real), fmean(a.tpot_s for a in modelled)),
    }
    for key, (seen, said) in pairs.items():
        told(f"{key[:4]}: engine {seen * 1000:.1f} ms, model {said * 1000:.1f} ms ({said / seen - 1:+.0%})")
    shown = {key: {"engine": seen, "model": said} for key, (seen, said) in pairs.items()}
    return {"requests": len(asks), "span_s": at_s, **shown}


def simulate(timing: TimingProfile, width: int, asks: Sequence[tuple[float, int, int]]) -> list[Answer]:
    """One rank with room for everything under `asks`: (time s, prompt tokens, output tokens), nothing shared."""
    rank = SimRank(timing, width, RadixCache(1 << 30))
    jobs = []
    for number, (at_s, prompt, output) in enumerate(asks):
        while rank.next_s <= at_s:
            rank.advance(rank.next_s)
        keys = tuple(range(number << 20, (number << 20) + prompt // width))
        jobs.append(Job(TraceRequest(at_s, prompt, output, keys), number))
        rank.submit(jobs[-1], at_s)
    while rank.next_s != IDLE_S:
        rank.advance(rank.next_s)
    answers = []
    for job in jobs:
        assert job.first_token_s is not None
        assert job.finished_s is not None
        decoding_s = job.finished_s - job.first_token_s
        answers.append(Answer(job.first_token_s - job.submitted_s, decoding_s / max(1, job.request.output_tokens - 1)))
    return answers


def run(url: str, *, seed: int, told: Callable[[str], None]) -> str:
    """The profile as JSON text."""
    return json.dumps(asyncio.run(calibrate(url, seed=seed, told=told)), indent=2) + "\n"
