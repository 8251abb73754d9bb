"""Asking an engine for a prompt's ids: SGLang's /v1/tokenize runs the very path that serves (contract, section 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from router.hashing import TokenIds, pack_ids
from router.prompt.body import RequestBody, present
from router.prompt.converted import Unsupported
from router.prompt.forms import PromptForm
from router.prompt.local import as_chat
from router.prompt.models import ModelFacts
from router.prompt.tools import Refused

DEADLINE_S = 0.25  # a prompt's ids are worth less than this much of its first token's time
MAX_ASKING = 32
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0

_SGLANG_CHAT = (
    *("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning", "reasoning_effort"),
    "continue_final_message",
)
_VLLM_CHAT = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")


class AskRefused(Exception):
    """The engine answered 4xx: it refuses this prompt, and is well."""


class _Answer(msgspec.Struct):
    tokens: list[int]


Question = tuple[str, bytes]


def tokenize_request(body: RequestBody, form: PromptForm, engine: str) -> Question | None:
    """(path, JSON) that asks for the first prompt's ids; None where the engine has no such route.

    Leaves out `stream` (501 in SGLang) and SGLang's `add_generation_prompt` (tokenize obeys it, chat does not).
    """
    if engine not in ("sglang", "vllm"):
        return None
    path = "/v1/tokenize" if engine == "sglang" else "/tokenize"
    fields: dict[str, object] = {}
    if form.kind == "chat":
        try:
            body = as_chat(body)
        except (Unsupported, Refused, ValueError, RecursionError):
            return None
        names = _SGLANG_CHAT if engine == "sglang" else _VLLM_CHAT
        if engine == "vllm" and (present(body.fields.tool_choice) or present(body.fields.reasoning_effort)):
            return None  # its tokenize route does not know them
        fields = {name: raw for name in names if present(raw := getattr(body.fields, name))}
    else:
        fields = {"prompt": form.text}
        if present(body.fields.model):
            fields["model"] = body.fields.model
    try:
        return path, msgspec.json.encode(fields)
    except UnicodeEncodeError:
        return None


class EngineTokenizer:
    """At most `max_asking` questions at once, each with a deadline; a model whose engines fail to answer is left alone
    for a while, longer each time."""

    def __init__(
        self,
        ask: Callable[[ModelFacts, str, bytes], Awaitable[bytes]],
        clock: Callable[[], float],
        *,
        deadline_s: float = DEADLINE_S,
        max_asking: int = MAX_ASKING,
    ) -> None:
        self._ask = ask
        self._deadline_s = deadline_s
        self._max_asking = max_asking
        self._clock = clock
        self._asking = 0
        self._pauses: dict[tuple[str, ...], tuple[float, float]] = {}  # names → (until_s, length_s)

    async def ids(self, model: ModelFacts, question: Question) -> TokenIds | str:
        """The ids, or the reason there are none: ask_busy, ask_paused, ask_refused, ask_failed."""
        until_s, pause_s = self._pauses.get(model.names, (0.0, 0.0))
        if self._clock() < until_s:
            return "ask_paused"
        if self._asking >= self._max_asking:
            return "ask_busy"
        self._asking += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._ask(model, *question)
            ids = pack_ids(msgspec.json.decode(answer, type=_Answer).tokens)
        except AskRefused:
            return "ask_refused"
        except Exception:  # the injected call's failures are its own; each only costs this prompt its ids
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            self._pauses[model.names] = (self._clock() + pause_s, pause_s)
            return "ask_failed"
        finally:
            self._asking -= 1
        self._pauses.pop(model.names, None)
        return ids or "ask_empty"
