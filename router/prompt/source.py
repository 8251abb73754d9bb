"""Request → prompt: ids given, made here, or asked of the engine; else an estimate. Never a client's error."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from router.config.schema import TokenizerConfig
from router.errors import RouterError
from router.hashing import Namespace, TokenIds, token_count
from router.prompt.body import RequestBody, parse_body
from router.prompt.checks import Checked, PromptChecks
from router.prompt.conversation import CachedPrompt, ConversationCache
from router.prompt.engine import EngineTokenizer, tokenize_request
from router.prompt.forms import PromptForm, prompt_form
from router.prompt.forward import may_forward
from router.prompt.large import LARGE_BYTES
from router.prompt.local import LocalPrompt, NoIds, local_prompt
from router.prompt.models import ModelFacts, ModelFiles, ModelSource
from router.prompt.store import ModelStore
from router.prompt.verify import Difference

Ask = Callable[[ModelFacts, str, bytes], Awaitable[bytes]]
Count = Callable[[str, str], None]

INLINE_BYTES = {"fastokens": 65_536, "tokenizers": 2_048}  # up to 0.6 ms; a hop to a thread costs 0.15
ENCODE_THREADS = 2
MAX_QUEUED = 64  # bodies waiting for or in a thread; one more is routed by load
MAX_BODY_BYTES = 64 * 1024 * 1024
ENCODE_DEADLINE_S = 1.0


@dataclass(slots=True)  # not frozen: that costs a microsecond a request
class Prompt:
    """The router's view of a request's prompt.

    `ids` are the FIRST prompt's; None routes by load. They may end before the prompt does (in front of an image).
    `tokens` is what all prompts of the batch make the engine prefill, `n` copies each: exact where ids are known, else
    characters ÷ 4. `reason` says why `source` is not better: empty for "given" and "local".

    `cached` knows block keys that earlier turns worked out. `forward_for`: the ids may be sent in the prompt's place to
    an engine of these facts. `counted(facts, tokens)` is to be told the engine's own count of the prompt's tokens.
    """

    ids: TokenIds | None
    tokens: int
    namespace: Namespace
    source: Literal["given", "local", "engine", "none"]
    reason: str = ""
    standing: str = field(default="", compare=False)
    cached: CachedPrompt | None = field(default=None, compare=False)
    forward_for: ModelFacts | None = field(default=None, compare=False)
    counted: Callable[[ModelFacts, int], None] | None = field(default=None, compare=False)


class PromptSource:
    """Resolves requests in the order: ids in the body, local tokenizer and template, the engine's tokenizer, load-only.

    `ask(model, path, body)` posts JSON to one engine of these facts and returns its answer's body; it raises
    `AskRefused` for a 4xx and anything else for a failure. `count(source, reason)` is called once a request,
    `on_drift(model, difference)` when what is made here turned out not to be what those engines make,
    `on_change(folder)` when its files were read anew, so that what was found before may no longer hold.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        *,
        ask: Ask | None = None,
        count: Count = lambda source, reason: None,
        on_check: Callable[[str], None] = lambda outcome: None,
        on_tokens: Callable[[str, int], None] = lambda result, tokens: None,
        on_drift: Callable[[ModelFacts, Difference], None] = lambda model, seen: None,
        on_change: Callable[[str], None] = lambda folder: None,
        store: ModelStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        encode_deadline_s: float = ENCODE_DEADLINE_S,
    ) -> None:
        self._mode = config.mode
        self._folder = str(config.path) if config.path is not None else None
        self._template = str(config.chat_template) if config.chat_template is not None else None
        self._forward = config.forward_ids
        self._count = count
        self._on_change = on_change
        self._store = store or ModelStore(
            clock=clock, now=now, compare_every=config.verify_every, on_check=on_check, on_change=self._changed
        )
        self._engine = EngineTokenizer(ask, clock) if ask is not None else None
        self.cache = ConversationCache(config.cache_mb << 20)
        self._on_tokens = on_tokens
        self._use_cache = config.cache_mb > 0
        self._checks = PromptChecks(
            config, ask=ask if config.mode == "auto" else None, clock=clock, on_check=on_check, on_drift=on_drift
        )
        self._deadline_s = encode_deadline_s
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenize")
        # One: every thread that wants the interpreter's lock makes the event loop wait for its turn.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-body")
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

    def drift(self, model: ModelFacts) -> Difference | None:
        """How prompts made here were found to differ from those of engines of these facts; None: not at all."""
        source = self._source(model)
        return None if source is None else self._checks.drift(model, source)

    def doubt(self, model: ModelFacts) -> None:
        """An engine of these facts was started anew, perhaps with other files: what was verified, or found to differ,
        is to be compared again."""
        source = self._source(model)
        if source is not None:
            self._checks.forget(model, source)
            self._store.look_again(source)

    def _changed(self, source: ModelSource) -> None:
        self._checks.forget_source(source)
        self._on_change(source.folder)

    def describe(self, model: ModelFacts) -> dict[str, Any]:
        """Where this model's ids come from and what is verified of it, for the admin page."""
        source = self._source(model)
        if source is None or self._mode in ("engine", "off"):
            return {"tokenizer": None, "problem": "no local tokenizer", "features": []}
        files = self._store.get(source)
        return {
            "tokenizer": files.tokenizer.backend if files is not None else None,
            "problem": self._store.problem(source) or None,
            "note": self._store.note(source) or None,
            "cuts_conversations": files is not None and files.tokenizer.boundaries is not None,
            "features": self._checks.describe(model, source),
        }

    async def read(self, path: str, raw: bytes) -> RequestBody:
        """`parse_body` off the event loop, for bodies over LARGE_BYTES."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, parse_body, path, raw)

    async def resolve(self, body: RequestBody, model: ModelFacts | None, *, again: bool = False) -> Prompt:
        """`model` is None when no worker is known for it. `again`: the request was resolved for another kind of engine
        before, and is not counted twice. Never raises for what an engine sent; of a client's bodies
        only token ids that are none in the model's vocabulary raise: RouterError("bad_token_ids")."""
        engine = model.engine if model is not None else "unknown"
        if len(body.raw) > LARGE_BYTES:
            form = await asyncio.get_running_loop().run_in_executor(self._reader, prompt_form, body, engine)
        else:
            form = prompt_form(body, engine)
        namespace = _namespace(body, model)
        prompt = await self._resolve(body, form, namespace, model)
        if not again:
            self._count(prompt.source, prompt.reason or prompt.standing)
        return prompt

    async def _resolve(
        self, body: RequestBody, form: PromptForm, namespace: Namespace, model: ModelFacts | None
    ) -> Prompt:
        def unknown(reason: str) -> Prompt:
            return Prompt(None, form.estimate_tokens * body.copies, namespace, "none", reason)

        if model is not None and (form.max_id is not None or form.reason == "odd_ids"):
            self._check_vocabulary(form, model)
        if body.odd & {"cache_salt", "extra_key", "lora_path", "model"}:
            return unknown("odd_namespace")
        if form.kind == "none":
            return unknown(form.reason)
        if form.ids is not None:
            return Prompt(form.ids, form.estimate_tokens * body.copies, namespace, "given")
        if self._mode == "off" or model is None:
            return unknown("off" if model is not None else "no_worker")
        reason = "engine_mode" if self._mode == "engine" else "route"
        if form.kind == "rendered" and self._mode == "local":
            return unknown(reason)
        if self._mode != "engine" and form.kind != "rendered":
            try:
                return await self._local(body, form, namespace, model)
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

    async def _local(self, body: RequestBody, form: PromptForm, namespace: Namespace, model: ModelFacts) -> Prompt:
        source = self._source(model)
        if source is None:
            raise NoIds("no_tokenizer")
        files = self._store.get(source)
        if files is None:
            raise NoIds("loading" if self._store.problem(source) == "loading" else "no_tokenizer")
        made = await self._make(body, form, files, model)
        if made.cached is not None:
            self._on_tokens("reused", made.cached.tokens_reused)
            self._on_tokens("made", token_count(made.ids) - made.cached.tokens_reused)
        tokens = _tokens(made.ids, form)
        if made.partial:
            tokens = max(tokens, form.estimate_tokens)
            return Prompt(made.ids, tokens * body.copies, namespace, "local", "media", cached=made.cached)
        checked = Checked(body, form, model, source, files, made)
        standing = self._checks.take(checked)
        if standing == "drifted":
            raise NoIds("drifted")
        single = body.copies == 1 and form.prompts == 1
        return Prompt(
            made.ids,
            tokens * body.copies,
            namespace,
            "local",
            standing=standing,
            cached=made.cached,
            forward_for=model if self._forward and standing == "verified" and may_forward(checked) else None,
            counted=functools.partial(self._checks.counted, checked.key, tokens) if single else None,
        )

    async def _make(self, body: RequestBody, form: PromptForm, files: ModelFiles, model: ModelFacts) -> LocalPrompt:
        cache = self.cache if self._use_cache and self._checks.cache_trusted else None
        if len(body.raw) <= INLINE_BYTES[files.tokenizer.backend]:
            return local_prompt(body, form, files, model, cache)
        if self._queued >= MAX_QUEUED:
            raise NoIds("busy", ask_engine=False)
        if len(body.raw) > MAX_BODY_BYTES:
            raise NoIds("too_long", ask_engine=False)
        self._queued += 1
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._threads, local_prompt, body, form, files, model, cache)
        job.add_done_callback(self._left)
        done, _ = await asyncio.wait([job], timeout=self._deadline_s)
        if not done:  # the thread cannot be stopped: it keeps its place in the queue until it ends
            raise NoIds("deadline", ask_engine=False)
        return job.result()

    def _left(self, job: asyncio.Future[LocalPrompt]) -> None:
        self._queued -= 1
        if not job.cancelled():
            job.exception()  # read, so that a job nobody waits for any more is not reported as unhandled

    def _check_vocabulary(self, form: PromptForm, model: ModelFacts) -> None:
        """One id outside the vocabulary ends a CPU SGLang server (contract, section 5)."""
        source = self._source(model)
        files = self._store.get(source) if source is not None and self._mode in ("auto", "local") else None
        if files is None or files.vocab_size is None:
            return
        if form.max_id is None:
            raise RouterError("bad_token_ids", f"token ids are integers from 0 to {files.vocab_size - 1}")
        if form.max_id >= files.vocab_size:
            raise RouterError("bad_token_ids", f"token id {form.max_id} is not in the vocabulary of {files.vocab_size}")

    def _source(self, model: ModelFacts) -> ModelSource | None:
        folder = self._folder or model.tokenizer_path
        if folder is None:
            return None
        return ModelSource(folder, model.engine, self._template, model.chat_template)

    async def close(self) -> None:
        await self._checks.close()
        await self._store.close()
        for pool in (self._threads, self._reader):
            pool.shutdown(wait=False, cancel_futures=True)


def unseen(prompt: Prompt) -> Prompt:
    """The prompt for an engine of a kind that it was not made for."""
    return replace(prompt, ids=None, source="none", reason="other_kind", cached=None, forward_for=None, counted=None)


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
