"""Sampled comparison of prompts made here with the engine's own tokenizer, beside the requests and never in their way.

The first few prompts of every feature set are compared, then one in `tokenizer.verify_every`. What the engine reports
as `usage.prompt_tokens` is compared on every answer. A difference is logged as ids, as text only when the operator
allows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from router.config.schema import TokenizerConfig
from router.hashing import TokenIds
from router.prompt.body import RequestBody
from router.prompt.engine import EngineTokenizer, Question, tokenize_request
from router.prompt.forms import PromptForm
from router.prompt.local import LocalPrompt, NoIds, local_prompt
from router.prompt.models import ModelFacts, ModelFiles, ModelSource
from router.prompt.verify import Difference, Features, Standing, Verification, difference

log = logging.getLogger("router.prompt")

MAX_COMPARING = 2
COMPARE_DEADLINE_S = 5.0
MAX_COMPARED_BYTES = 262_144
CACHE_FAULTS = 3

Key = tuple[Hashable, Features, ModelFacts]


class Checked:
    """A prompt made here, with all it was made from. `where`: its `rendering`."""

    __slots__ = ("body", "files", "form", "made", "model", "where")

    def __init__(
        self,
        body: RequestBody,
        form: PromptForm,
        model: ModelFacts,
        where: Hashable,
        files: ModelFiles,
        made: LocalPrompt,
    ) -> None:
        self.body = body
        self.form = form
        self.model = model
        self.where = where
        self.files = files
        self.made = made


def rendering(model: ModelFacts, source: ModelSource) -> Hashable:
    """What decides how a prompt is made: engine kind and release, files, server defaults."""
    defaults = repr(sorted(model.default_kwargs.items())) if model.default_kwargs else ""
    return source, model.version, defaults


class PromptChecks:
    """`ask` None: nothing is compared, only counts are."""

    def __init__(
        self,
        config: TokenizerConfig,
        *,
        ask: Callable[[ModelFacts, str, bytes], Awaitable[bytes]] | None,
        clock: Callable[[], float],
        on_check: Callable[[str], None],
        on_drift: Callable[[ModelFacts, Difference], None],
    ) -> None:
        self._verification = Verification(config.verify_every if ask is not None else 0)
        self._engine = (
            EngineTokenizer(ask, clock, deadline_s=COMPARE_DEADLINE_S, max_asking=MAX_COMPARING)
            if ask is not None
            else None
        )
        self._log_text = config.log_text
        self._on_check = on_check
        self._on_drift = on_drift
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache_faults = 0

    @property
    def cache_trusted(self) -> bool:
        """False once conversations put together from kept pieces were wrong several times."""
        return self._cache_faults < CACHE_FAULTS

    def take(self, checked: Checked) -> Standing:
        """How far this prompt's ids can be trusted; begins a comparison where one is due."""
        where, features = checked.where, checked.made.features
        standing = self._verification.standing(where, features)
        if standing == "drifted" or self._engine is None or len(checked.body.raw) > MAX_COMPARED_BYTES:
            return standing
        if len(self._tasks) < MAX_COMPARING and self._verification.due(where, features):
            question = tokenize_request(checked.body, checked.form, checked.model.engine)
            if question is None:
                self._verification.unanswered(where, features)
            else:
                task = asyncio.get_running_loop().create_task(self._compare(checked, question, self._engine))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return standing

    async def _compare(self, checked: Checked, question: Question, engine: EngineTokenizer) -> None:
        where, features = checked.where, checked.made.features
        theirs = await engine.ids(checked.model, question)
        if isinstance(theirs, str):
            self._verification.unanswered(where, features)
            self._on_check("unanswered")
            return
        seen = difference(checked.made.ids, theirs, features)
        if seen is not None:
            seen = await self._look_again(checked, theirs)
        if seen is None:
            self._verification.agreed(where, features)
            self._on_check("equal")
            return
        self._on_check("different")
        if self._verification.differed(where, seen):
            self._tell(checked.model, seen, checked.files)

    async def _look_again(self, checked: Checked, theirs: TokenIds) -> Difference | None:
        """Made anew from nothing but the body: the date may have changed in between, or a kept piece was wrong."""
        try:
            again = await asyncio.to_thread(local_prompt, checked.body, checked.form, checked.files, checked.model)
        except NoIds:
            again = checked.made
        seen = difference(again.ids, theirs, again.features)
        if seen is None and checked.made.cached is not None:
            self._cache_faults += 1
            self._on_check("cache_fault")
            log.error("a conversation put together from kept pieces was not what the engine has")
        return seen

    def counted(self, key: Key, ours: int, facts: ModelFacts, theirs: int) -> None:
        """The engine of `facts` says how many tokens the prompt had."""
        where, features, model = key
        if (facts is model or facts == model) and self._verification.counted(where, features, ours, theirs):
            seen = self._verification.first_difference(where)
            if seen is not None:
                self._tell(model, seen, None)

    def forget(self, model: ModelFacts, source: ModelSource) -> None:
        self._verification.forget(rendering(model, source))

    def forget_source(self, source: ModelSource) -> None:
        """Its files changed: prompts of all engines that they are made for are to be compared again."""
        for where in self._verification.renderings():
            if isinstance(where, tuple) and where[0] == source:
                self._verification.forget(where)

    def drift(self, model: ModelFacts, source: ModelSource) -> Difference | None:
        return self._verification.first_difference(rendering(model, source))

    def describe(self, model: ModelFacts, source: ModelSource) -> list[dict[str, Any]]:
        return self._verification.describe(rendering(model, source))

    def _tell(self, model: ModelFacts, seen: Difference, files: ModelFiles | None) -> None:
        fields: dict[str, object] = {"engine": model.engine, "version": model.version, "models": list(model.names)}
        decoder = files.tokenizer.decoder if files is not None else None
        if self._log_text and decoder is not None:
            fields["text_here"] = decoder([*seen.before, *seen.ours])
            fields["text_there"] = decoder([*seen.before, *seen.theirs])
        log.warning(
            "prompts made here are not the engine's, its tokenizer is asked from now on: %s", seen, extra=fields
        )
        self._on_drift(model, seen)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
