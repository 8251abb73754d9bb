"""Request → prompt: ids given, made here, or asked of the engine; else an estimate. Never a client's error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from router.config.schema import TokenizerConfig
from router.hashing import Namespace, TokenIds, token_count
from router.prompt.body import RequestBody
from router.prompt.engine import EngineTokenizer, tokenize_request
from router.prompt.forms import PromptForm, prompt_form
from router.prompt.local import NoIds, local_ids
from router.prompt.models import ModelFacts, ModelSource, ModelStore

Ask = Callable[[ModelFacts, str, bytes], Awaitable[bytes]]
Count = Callable[[str, str], None]

INLINE_BYTES = {"fastokens": 16_384, "tokenizers": 2_048}  # bodies this small cost less than a hop to a thread
ENCODE_THREADS = 2
MAX_QUEUED = 64  # bodies waiting for or in a thread; one more is routed by load
MAX_BODY_BYTES = 64 * 1024 * 1024
ENCODE_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The router's view of a request's prompt.

    `ids` are the FIRST prompt's; None routes by load. `tokens` is what all prompts of the batch make the engine
    prefill, `n` copies each: exact where ids are known, else characters ÷ 4. `reason` says why `source` is not better:
    empty for "given" and "local".
    """

    ids: TokenIds | None
    tokens: int
    namespace: Namespace
    source: Literal["given", "local", "engine", "none"]
    reason: str = ""


class PromptSource:
    """Resolves requests in the order: ids in the body, local tokenizer and template, the engine's tokenizer, load-only.

    `ask(model, path, body)` posts JSON to one engine of the model and returns its answer's body; it raises
    `AskRefused` for a 4xx and anything else for a failure. `count(source, reason)` is called once a request.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        *,
        ask: Ask | None = None,
        count: Count = lambda source, reason: None,
        store: ModelStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        encode_deadline_s: float = ENCODE_DEADLINE_S,
    ) -> None:
        self._mode = config.mode
        self._folder = str(config.path) if config.path is not None else None
        self._template = str(config.chat_template) if config.chat_template is not None else None
        self._count = count
        self._store = store or ModelStore(clock=clock, now=now)
        self._engine = EngineTokenizer(ask, clock) if ask is not None else None
        self._deadline_s = encode_deadline_s
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenize")
        self._queued = 0

    async def prepare(self, model: ModelFacts) -> str:
        """Load the model's files now. Returns "" or, in words, why its prompts are not made here."""
        source = self._source(model)
        if source is None:
            return "no local tokenizer is configured, and the engine names none"
        await self._store.wait(source)
        return self._store.problem(source)

    def loaded(self) -> dict[str, str]:
        """Tokenizer folder → "fastokens" or "tokenizers", or what is wrong with it."""
        return self._store.loaded()

    async def resolve(self, body: RequestBody, model: ModelFacts | None) -> Prompt:
        """Never raises for what a client or an engine sent. `model` is None when no worker is known for it."""
        form = prompt_form(body, model.engine if model is not None else "unknown")
        namespace = _namespace(body, model)
        prompt = await self._resolve(body, form, namespace, model)
        self._count(prompt.source, prompt.reason)
        return prompt

    async def _resolve(
        self, body: RequestBody, form: PromptForm, namespace: Namespace, model: ModelFacts | None
    ) -> Prompt:
        def unknown(reason: str) -> Prompt:
            return Prompt(None, form.estimate_tokens * body.copies, namespace, "none", reason)

        if body.odd & {"cache_salt", "extra_key", "lora_path", "model"}:
            return unknown("odd_namespace")
        if form.kind == "none":
            return unknown(form.reason)
        if form.ids is not None:
            return Prompt(form.ids, form.estimate_tokens * body.copies, namespace, "given")
        if self._mode == "off" or model is None:
            return unknown("off" if model is not None else "no_worker")
        reason = "engine_mode"
        if self._mode != "engine":
            try:
                ids = await self._local(body, form, model)
                return Prompt(ids, _tokens(ids, form) * body.copies, namespace, "local")
            except NoIds as none:
                reason = none.reason
                if not none.ask_engine or self._mode == "local":
                    return unknown(reason)
        question = tokenize_request(body, form, model.engine) if self._engine is not None else None
        if self._engine is None or question is None:
            return unknown(reason)
        answer = await self._engine.ids(model, question)
        if isinstance(answer, str):
            return unknown(f"{reason}+{answer}")
        return Prompt(answer, _tokens(answer, form) * body.copies, namespace, "engine", reason)

    async def _local(self, body: RequestBody, form: PromptForm, model: ModelFacts) -> TokenIds:
        source = self._source(model)
        if source is None:
            raise NoIds("no_tokenizer")
        files = self._store.get(source)
        if files is None:
            raise NoIds("loading" if self._store.problem(source) == "loading" else "no_tokenizer")
        if len(body.raw) <= INLINE_BYTES[files.tokenizer.backend]:
            return local_ids(body, form, files, model)
        if self._queued >= MAX_QUEUED:
            raise NoIds("busy", ask_engine=False)
        if len(body.raw) > MAX_BODY_BYTES:
            raise NoIds("too_long", ask_engine=False)
        self._queued += 1
        job = asyncio.get_running_loop().run_in_executor(self._threads, local_ids, body, form, files, model)
        job.add_done_callback(self._left)
        done, _ = await asyncio.wait([job], timeout=self._deadline_s)
        if not done:  # the thread cannot be stopped: it keeps its place in the queue until it ends
            raise NoIds("deadline", ask_engine=False)
        return job.result()

    def _left(self, job: asyncio.Future[TokenIds]) -> None:
        self._queued -= 1
        if not job.cancelled():
            job.exception()  # read, so that a job nobody waits for any more is not reported as unhandled

    def _source(self, model: ModelFacts) -> ModelSource | None:
        folder = self._folder or model.tokenizer_path
        if folder is None:
            return None
        return ModelSource(folder, model.engine, self._template, model.chat_template)

    async def close(self) -> None:
        await self._store.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _tokens(ids: TokenIds, form: PromptForm) -> int:
    """The first prompt's tokens and, for a batch of texts, the others' at the first one's characters per token."""
    first = token_count(ids)
    if not form.rest_chars or not form.text:
        return first
    return first + round(form.rest_chars * first / len(form.text))


def _namespace(body: RequestBody, model: ModelFacts | None) -> Namespace:
    adapter = _adapter(body.model or "", model)
    return Namespace(cache_salt=body.cache_salt, lora_name=adapter or body.lora_path, extra_key=body.extra_key)


def _adapter(name: str, model: ModelFacts | None) -> str | None:
    """SGLang's "base:adapter", which beats lora_path; a served name may hold colons itself (case 40)."""
    if model is not None:
        if name in model.adapters:
            return name
        if name in model.names or model.engine == "vllm":
            return None
        for served in model.names:
            if name.startswith(f"{served}:"):
                return name[len(served) + 1 :].strip() or None
    return name.partition(":")[2].strip() or None
