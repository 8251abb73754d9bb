"""Asking an engine for a prompt's ids: SGLang's /v1/tokenize runs the very path that serves (contract, section 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from router.hashing import TokenIds
from router.prompt.body import ABSENT, RequestBody, present
from router.prompt.converted import Unsupported
from router.prompt.forms import PromptForm, read_ids
from router.prompt.large import LARGE_BYTES
from router.prompt.local import as_chat
from router.prompt.models import ModelFacts
from router.prompt.tools import Refused

DEADLINE_S = 0.25  # a prompt's ids are worth less than this much of its first token's time
MAX_ASKING = 32
MAX_ASKED_BYTES = 1_048_576  # a longer body is not answered within the deadline anyway
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
    """`tokens` of a tokenize route, `token_ids` of a render route; `features` are those of images and audio."""

    tokens: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT
    features: msgspec.Raw = ABSENT


def _answered(raw: bytes) -> TokenIds:
    """Empty where equal ids may stand for different images (case 42). Raises ValueError for what is no answer."""
    answer = msgspec.json.decode(raw, type=_Answer)
    if present(answer.features):
        return b""
    return read_ids(bytes(answer.tokens if answer.tokens is not ABSENT else answer.token_ids))


Question = tuple[str, bytes]


def tokenize_request(body: RequestBody, form: PromptForm, engine: str) -> Question | None:
    """(path, JSON) that asks for the first prompt's ids (vLLM 0.32 renders /v1/messages and /v1/responses at …/render,
    with --enable-scale-out); None where the engine has no such route, or for a long body.

    Leaves out `stream` (501 in SGLang) and SGLang's `add_generation_prompt` (tokenize obeys it, chat does not).
    """
    if engine not in ("sglang", "vllm") or len(body.raw) > MAX_ASKED_BYTES:
        return None
    path = "/v1/tokenize" if engine == "sglang" else "/tokenize"
    fields: dict[str, object] = {}
    if form.kind == "rendered":
        return body.path + "/render", body.raw
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
    """At most `max_asking` questions at once, each with a deadline; a model whose engines fail to answer on a route is
    not asked there for a while, longer each time."""

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
        # (names, path) → (until_s, length_s): a server without one of the routes may have the others
        self._pauses: dict[tuple[tuple[str, ...], str], tuple[float, float]] = {}

    async def ids(self, model: ModelFacts, question: Question) -> TokenIds | str:
        """The ids, or the reason there are none: ask_busy, ask_paused, ask_refused, ask_failed."""
        asked = model.names, question[0]
        until_s, pause_s = self._pauses.get(asked, (0.0, 0.0))
        if self._clock() < until_s:
            return "ask_paused"
        if self._asking >= self._max_asking:
            return "ask_busy"
        self._asking += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._ask(model, *question)
            ids = _answered(answer) if len(answer) <= LARGE_BYTES else await asyncio.to_thread(_answered, answer)
        except AskRefused:
            return "ask_refused"
        except Exception:  # the injected call's failures are its own; each only costs this prompt its ids
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            self._pauses[asked] = (self._clock() + pause_s, pause_s)
            return "ask_failed"
        finally:
            self._asking -= 1
        self._pauses.pop(asked, None)
        return ids or "ask_empty"
