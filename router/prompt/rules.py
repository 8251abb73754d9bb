"""Which rules a worker's prompts are made by. A fleet may serve one model with several kinds of engine (SGLang beside
vLLM, another template, other server defaults): the same body is then other token ids on some of its workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.contract.server_info import ServerInfo
from router.prompt.models import ModelFacts

MAX_KINDS = 4
"""Prompts are made for so many kinds of engine at most; workers of any further kind earn no credit."""

Rules = tuple[object, ...]


class Described(Protocol):
    @property
    def info(self) -> ServerInfo | None: ...


def rules_of(facts: ModelFacts) -> Rules:
    """Equal for engines that make the same ids of the same body, whatever their releases are."""
    kwargs = repr(sorted(facts.default_kwargs.items())) if facts.default_kwargs else ""
    return facts.engine, facts.tokenizer_path, facts.chat_template, kwargs


def kinds_of(workers: Iterable[Described]) -> dict[Rules, ModelFacts]:
    """The kinds of engine among `workers`, each with the facts of its first; the first one's kind first."""
    found: dict[Rules, ModelFacts] = {}
    for worker in workers:
        if worker.info is not None and len(found) < MAX_KINDS:
            facts = ModelFacts.from_server_info(worker.info)
            found.setdefault(rules_of(facts), facts)
    return found
