"""One request as the router reads it: what it asks for, and its prompt as an engine will have it."""

from __future__ import annotations

from router.fleet.worker import Worker
from router.matching import PromptKeys
from router.prompt.body import RequestBody
from router.prompt.models import ModelFacts
from router.prompt.rules import Rules, rules_of
from router.prompt.source import Prompt, unseen


class RequestPlan:
    """One request, read once. `client_rank` is the DP rank the client named, never overridden. An `encoded` body
    (Content-Encoding) is not looked into and not changed: it goes by load (case 72)."""

    __slots__ = ("body", "client_rank", "encoded", "keys", "model", "others", "prompt", "request_id", "route", "rules")

    def __init__(
        self,
        route: str,
        body: RequestBody,
        prompt: Prompt,
        model: str | None,
        client_rank: int | None,
        encoded: bool,
        request_id: str,
        rules: Rules | None,
    ) -> None:
        self.route = route
        self.body = body
        self.prompt = prompt
        self.model = model
        self.client_rank = client_rank
        self.encoded = encoded
        self.request_id = request_id
        self.rules = rules
        """The kind of engine that `prompt` is made for."""
        self.others: tuple[RequestPlan, ...] = ()
        """The same request as the model's other kinds of engine read it; mostly there are none."""
        self.keys = PromptKeys(prompt.ids, prompt.namespace, prompt.cached)

    def of(self, prompt: Prompt, rules: Rules | None) -> RequestPlan:
        """The same request with another prompt, and no other views."""
        return RequestPlan(
            self.route, self.body, prompt, self.model, self.client_rank, self.encoded, self.request_id, rules
        )

    def seen_by(self, worker: Worker) -> RequestPlan:
        """The plan with the prompt as this worker's kind of engine makes it."""
        if not self.others:
            return self
        rules = rules_of(ModelFacts.from_server_info(worker.info)) if worker.info is not None else None
        for plan in (self, *self.others):
            if plan.rules == rules:
                return plan
        return self.of(unseen(self.prompt), self.rules)

    @property
    def copies(self) -> int:
        return self.body.copies

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def answer_tokens(self) -> int | None:
        return self.body.max_new_tokens
