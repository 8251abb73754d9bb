"""Request → prompt: ids given, made here, or asked of the engine; else an estimate. Never a client's error."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Literal

from router.config.schema import TokenizerConfig
from router.errors import RouterError
from router.hashing import NO_NAMESPACE, Namespace, TokenIds, token_count
from router.prompt.body import RequestBody, parse_body
from router.prompt.checks import Checked, PromptChecks, rendering
from router.prompt.conversation import CachedPrompt, ConversationCache
from router.prompt.engine import EngineTokenizer, Question, tokenize_request
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
MAX_KINDS = 4096
_NAMING = frozenset({"cache_salt", "extra_key", "lora_path", "model"})


class Prompt:
    """The router's view of a request's prompt.

    `ids` are the FIRST prompt's; None routes by load. They may end before the prompt does (in front of an image).
    `tokens` is what all prompts of the batch make the engine prefill, `n` copies each: exact where ids are known, else
    characters ÷ 4. `reason` says why `source` is not better: empty for "given" and "local".

    `cached` knows block keys that earlier turns worked out. `forward_for`: the ids may be sent in the prompt's place to
    an engine of these facts. `counted(facts, tokens)` is to be told the engine's own count of the prompt's tokens.
    """

    __slots__ = ("cached", "counted", "forward_for", "ids", "namespace", "reason", "source", "standing", "tokens")

    def __init__(
        self,
        ids: TokenIds | None,
        tokens: int,
        namespace: Namespace,
        source: Literal["given", "local", "engine", "none"],
        reason: str = "",
        standing: str = "",
        cached: CachedPrompt | None = None,
        forward_for: ModelFacts | None = None,
        counted: Callable[[ModelFacts, int], None] | None = None,
    ) -> None:
        self.ids = ids
        self.tokens = tokens
        self.namespace = namespace
        self.source = source
        self.reason = reason
        self.standing = standing
        self.cached = cached
        self.forward_for = forward_for
        self.counted = counted


class _Kind:
    """What is worked out once for all requests to engines of the same facts."""

    __slots__ = ("model", "source", "where")

    def __init__(self, model: ModelFacts, source: ModelSource | None) -> None:
        self.model = model
        self.source = source
        self.where = rendering(model, source) if source is not None else ""


class _Later:
    """A prompt that cannot be had at once: `question` is for the engine; without one it is made of `files`, by a
    thread. `reason` is that of the question."""

    __slots__ = ("files", "form", "kind", "namespace", "question", "reason")

    def __init__(
        self,
        kind: _Kind,
        form: PromptForm,
        namespace: Namespace,
        files: ModelFiles | None,
        question: Question | None,
        reason: str,
    ) -> None:
        self.kind = kind
        self.form = form
        self.namespace = namespace
        self.files = files
        self.question = question
        self.reason = reason


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
        self._kinds: dict[int, _Kind] = {}

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

    def resolve_now(self, body: RequestBody, model: ModelFacts | None) -> Prompt | None:
        """As `resolve`, for a prompt that no thread and no engine has to be waited for: all but long ones, mostly.
        None: await `resolve(body, model)`, which goes on from here; the request is not counted yet."""
        if len(body.raw) > LARGE_BYTES:
            return None
        found = self._begin(body, prompt_form(body, model.engine if model is not None else "unknown"), model)
        if isinstance(found, _Later):
            body.unresolved = found
            return None
        body.take_messages()
        self._count(found.source, found.reason or found.standing)
        return found

    async def resolve(self, body: RequestBody, model: ModelFacts | None, *, again: bool = False) -> Prompt:
        """`model` is None when no worker is known for it. `again`: the request was resolved for another kind of engine
        before, and is not counted twice. Never raises for what an engine sent; of a client's bodies
        only token ids that are none in the model's vocabulary raise: RouterError("bad_token_ids")."""
        begun, body.unresolved = body.unresolved, None
        found: Prompt | _Later
        if isinstance(begun, _Later) and begun.kind.model is model:
            found = begun
        else:
            engine = model.engine if model is not None else "unknown"
            if len(body.raw) > LARGE_BYTES:
                form = await asyncio.get_running_loop().run_in_executor(self._reader, prompt_form, body, engine)
            else:
                form = prompt_form(body, engine)
            found = self._begin(body, form, model)
        while isinstance(found, _Later):
            found = await self._go_on(body, found)
        body.take_messages()
        if not again:
            self._count(found.source, found.reason or found.standing)
        return found

    def _begin(self, body: RequestBody, form: PromptForm, model: ModelFacts | None) -> Prompt | _Later:
        namespace = _namespace(body, model)
        if model is not None and (form.max_id is not None or form.reason == "odd_ids"):
            self._check_vocabulary(form, model)
        if body.odd and body.odd & _NAMING:
            return _unknown(body, form, namespace, "odd_namespace")
        if form.kind == "none":
            return _unknown(body, form, namespace, form.reason)
        if form.ids is not None:
            return Prompt(form.ids, form.estimate_tokens * body.copies, namespace, "given")
        if self._mode == "off" or model is None:
            return _unknown(body, form, namespace, "off" if model is not None else "no_worker")
        kind = self._kind(model)
        if self._mode == "engine":
            return self._asked(body, form, namespace, kind, "engine_mode")
        if form.kind == "rendered":
            return self._asked(body, form, namespace, kind, "route")
        try:
            return self._local(body, form, namespace, kind)
        except NoIds as none:
            return self._not_here(body, form, namespace, kind, none)

    def _not_here(
        self, body: RequestBody, form: PromptForm, namespace: Namespace, kind: _Kind, none: NoIds
    ) -> Prompt | _Later:
        if not none.ask_engine:
            return _unknown(body, form, namespace, none.reason)
        return self._asked(body, form, namespace, kind, none.reason)

    def _asked(
        self, body: RequestBody, form: PromptForm, namespace: Namespace, kind: _Kind, reason: str
    ) -> Prompt | _Later:
        """To be asked of the engine, where there is one to ask and it can be asked this."""
        asks = self._engine is not None and self._mode != "local"
        question = tokenize_request(body, form, kind.model.engine) if asks else None
        if question is None:
            return _unknown(body, form, namespace, reason)
        return _Later(kind, form, namespace, None, question, reason)

    async def _go_on(self, body: RequestBody, later: _Later) -> Prompt | _Later:
        form, namespace, kind = later.form, later.namespace, later.kind
        if later.question is not None and self._engine is not None:
            answer = await self._engine.ids(kind.model, later.question)
            if isinstance(answer, str):
                return _unknown(body, form, namespace, f"{later.reason}+{answer}")
            return Prompt(answer, _tokens(answer, form) * body.copies, namespace, "engine", later.reason)
        assert later.files is not None
        try:
            made = await self._in_thread(body, form, later.files, kind.model)
            return self._made(body, form, namespace, kind, later.files, made)
        except NoIds as none:
            return self._not_here(body, form, namespace, kind, none)

    def _local(self, body: RequestBody, form: PromptForm, namespace: Namespace, kind: _Kind) -> Prompt | _Later:
        """Raises NoIds."""
        source = kind.source
        if source is None:
            raise NoIds("no_tokenizer")
        files = self._store.get(source)
        if files is None:
            raise NoIds("loading" if self._store.problem(source) == "loading" else "no_tokenizer")
        if len(body.raw) > INLINE_BYTES[files.tokenizer.backend]:
            return _Later(kind, form, namespace, files, None, "")
        made = local_prompt(body, form, files, kind.model, self._trusted_cache())
        return self._made(body, form, namespace, kind, files, made)

    def _trusted_cache(self) -> ConversationCache | None:
        return self.cache if self._use_cache and self._checks.cache_trusted else None

    def _made(
        self,
        body: RequestBody,
        form: PromptForm,
        namespace: Namespace,
        kind: _Kind,
        files: ModelFiles,
        made: LocalPrompt,
    ) -> Prompt:
        """The prompt of ids made here. Raises NoIds where such ids were found wrong."""
        cached = made.cached
        if cached is not None:
            self._on_tokens("reused", cached.tokens_reused)
            self._on_tokens("made", token_count(made.ids) - cached.tokens_reused)
        tokens = _tokens(made.ids, form)
        if made.partial:
            tokens = max(tokens, form.estimate_tokens)
            return Prompt(made.ids, tokens * body.copies, namespace, "local", "media", "", cached)
        model, where = kind.model, kind.where
        checked = Checked(body, form, model, where, files, made)
        standing = self._checks.take(checked)
        if standing == "drifted":
            raise NoIds("drifted")
        forward_for = model if self._forward and standing == "verified" and may_forward(checked) else None
        counted: Callable[[ModelFacts, int], None] | None = None
        if body.copies == 1 and form.prompts == 1:
            counted = functools.partial(self._checks.counted, (where, made.features, model), tokens)
        return Prompt(made.ids, tokens * body.copies, namespace, "local", "", standing, cached, forward_for, counted)

    async def _in_thread(
        self, body: RequestBody, form: PromptForm, files: ModelFiles, model: ModelFacts
    ) -> LocalPrompt:
        if self._queued >= MAX_QUEUED:
            raise NoIds("busy", ask_engine=False)
        if len(body.raw) > MAX_BODY_BYTES:
            raise NoIds("too_long", ask_engine=False)
        cache = self._trusted_cache()
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
        return self._kind(model).source

    def _kind(self, model: ModelFacts) -> _Kind:
        """By identity: facts are long, and made once for an engine."""
        known = self._kinds.get(id(model))
        if known is not None and known.model is model:
            return known
        folder = self._folder or model.tokenizer_path
        source = ModelSource(folder, model.engine, self._template, model.chat_template) if folder is not None else None
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        made = self._kinds[id(model)] = _Kind(model, source)
        return made

    async def close(self) -> None:
        await self._checks.close()
        await self._store.close()
        for pool in (self._threads, self._reader):
            pool.shutdown(wait=False, cancel_futures=True)


def unseen(prompt: Prompt) -> Prompt:
    """The prompt for an engine of a kind that it was not made for."""
    return Prompt(None, prompt.tokens, prompt.namespace, "none", "other_kind", prompt.standing)


def _unknown(body: RequestBody, form: PromptForm, namespace: Namespace, reason: str) -> Prompt:
    return Prompt(None, form.estimate_tokens * body.copies, namespace, "none", reason)


def _tokens(ids: TokenIds, form: PromptForm) -> int:
    """The first prompt's tokens and, for a batch of texts, the others' at the first one's characters per token."""
    first = token_count(ids)
    if not form.rest_chars or not form.text:
        return first
    return first + round(form.rest_chars * first / len(form.text))


def _namespace(body: RequestBody, model: ModelFacts | None) -> Namespace:
    salt, adapter, extra = body.cache_salt, _adapter(body.model or "", model) or body.lora_path, body.extra_key
    if salt is None and adapter is None and extra is None:
        return NO_NAMESPACE
    return Namespace(salt, adapter, extra)


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
