"""A chat body → the text SGLang's template renders (SGLang 0.5.23; engine-contract section 6, captures facts 1–18)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from router.prompt.body import plain
from router.prompt.content_format import ContentFormat
from router.prompt.features import NO_FEATURES, TRAILING_ASSISTANT, chat_features
from router.prompt.fields import NO_FIELDS, Fields
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tools import Refused, choose_tools, render_tools
from router.prompt.turns import in_turns
from router.prompt.verify import Features

_ROLES = frozenset({"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"})
_TOOL_BEARERS = ("root", "system", "developer")  # whose message may carry tools of its own
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
MEDIA_PARTS = frozenset(
    {"image_url", "video_url", "audio_url", "input_audio", "input_image", "image", "video", "audio"}
)


class Rendered:
    """`text` is the template's output. `continuation` is encoded apart and appended (continue_final_message)."""

    __slots__ = ("continuation", "features", "text")

    def __init__(self, text: str, continuation: str = "", features: Features = NO_FEATURES) -> None:
        self.text = text
        self.continuation = continuation
        self.features = features


class HasMedia(Exception):
    """The prompt holds images, audio or video: its ids exist only inside the engine (case 42)."""


def render_chat(
    fields: Fields,
    template: ChatTemplate,
    defaults: Mapping[str, Any],
    *,
    obey_generation_prompt: bool = False,
    sent: Any = None,
) -> Rendered:
    """Render as SGLang does. `defaults` is the server's --default-chat-template-kwargs; `obey_generation_prompt` is for
    /v1/tokenize, which follows the body's `add_generation_prompt` where chat ignores it (fact 7). `sent`: the messages,
    where they are decoded already.

    Raises Refused, HasMedia, TemplateFailure, ValueError, RecursionError: the router has no ids of its own then.
    """
    if sent is None:
        sent = plain(fields.messages)
    if not isinstance(sent, list) or not sent:
        raise Refused("messages is not a list of messages")
    dumped = [_message(message) for message in in_turns(sent)]
    message_tools = any(m["role"] in _TOOL_BEARERS and m.get("tools") for m in dumped)
    tools = choose_tools(_tools(bytes(fields.tools)), plain(fields.tool_choice), message_tools)
    messages = [_for_template(message, template.sglang_format) for message in in_turns(dumped)]

    generation = plain(fields.add_generation_prompt) if obey_generation_prompt else None
    keep_going = boolean(plain(fields.continue_final_message), "continue_final_message")
    continuation = ""
    if generation is None or keep_going:
        messages, continuation = _settle_last(messages, keep_going)
    kwargs = _template_kwargs(fields, template, defaults)
    try:
        text = template.render(messages, tools, kwargs, add_generation_prompt=generation is not False)
    except TemplateFailure:
        # Some templates (Mistral's) want bare functions; the engine tries once more with those (fact 11).
        bare = [tool["function"] for tool in tools] if tools else None
        text = template.render(messages, bare, kwargs, add_generation_prompt=generation is not False)
    return Rendered(text, continuation, chat_features(fields, sent))


def render_usual(sent: list[Any], template: ChatTemplate, defaults: Mapping[str, Any]) -> Rendered:
    """As `render_chat` for a body of messages only, which most are, if these are no more than texts too."""
    roles: list[str] = []
    contents: list[str] = []
    for message in sent:
        if type(message) is not dict or len(message) != 2:
            break
        role, content = message.get("role"), message.get("content")
        if type(content) is not str or not (role == "user" or role == "assistant" or role == "system"):
            break
        roles.append(role)
        contents.append(content)
    if not roles or len(roles) != len(sent) or defaults:
        return render_chat(NO_FIELDS, template, defaults, sent=sent)
    if roles[-1] != "assistant":
        return Rendered(template.render_texts(roles, contents))
    roles[-1] = "user"  # as _settle_last
    return Rendered(template.render_texts(roles, contents), "", TRAILING_ASSISTANT)


@functools.lru_cache(maxsize=64)
def _tools(raw: bytes) -> list[dict[str, Any]] | None:
    """An agent sends the same tools with every turn. What is kept is only read: the template's sandbox forbids more."""
    return render_tools(plain(msgspec.Raw(raw))) if raw else None


def _settle_last(messages: list[dict[str, Any]], keep_going: bool) -> tuple[list[dict[str, Any]], str]:
    """A trailing assistant text is cut off to be continued, or becomes the user's (facts 5, 6); parts stay."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return messages, ""
    if keep_going:
        return messages[:-1], last["content"]
    return [*messages[:-1], {"role": "user", "content": last["content"]}], ""


def _template_kwargs(fields: Fields, template: ChatTemplate, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """reasoning_effort, what it implies, chat_template_kwargs over it, server defaults under it (facts 10, 18)."""
    asked = plain(fields.chat_template_kwargs)
    if not isinstance(asked, dict | None):
        raise Refused("chat_template_kwargs is not an object")
    effort, thinking = _reasoning(plain(fields.reasoning_effort), plain(fields.reasoning))
    kwargs = dict(asked or {})
    if "chat_template" in kwargs:
        raise Refused("chat_template comes with the request")
    if thinking is not None:
        kwargs.setdefault("thinking", thinking)
        kwargs.setdefault("enable_thinking", thinking)
    for key, value in defaults.items():
        kwargs.setdefault(key, value)
    if effort is None and defaults:
        effort = kwargs.get("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if effort == "low" and "low_effort" in template.source and "truncate_history_thinking" in template.source:
        kwargs.setdefault("low_effort", True)  # Nemotron 3's own name for it
    return kwargs


def _reasoning(effort: object, reasoning: object) -> tuple[str | float | None, bool | None]:
    """`reasoning_effort` and `reasoning` → (effort, thinking on or off; None: not said)."""
    thinking: bool | None = None
    if isinstance(reasoning, dict):
        inner = reasoning.get("effort")
        if inner is None:
            inner = reasoning.get("reasoning_effort")
        effort = effort if inner is None else inner
        enabled = reasoning.get("enabled")
        if enabled is None:
            enabled = reasoning.get("enable", False)
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in {"1", "true", "yes", "y", "on"}
        if enabled:
            thinking = True
    if effort is None:
        return None, thinking
    if isinstance(effort, str) and effort in _EFFORTS:
        return effort, effort != "none"
    try:
        number = float(effort) if isinstance(effort, str | int | float) and not isinstance(effort, bool) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if not 0.0 <= number <= 0.99:
        raise Refused("reasoning_effort is unknown")
    return number, True


def boolean(value: object, name: str) -> bool:
    """As pydantic's lax mode reads a boolean field whose default is false; null is refused."""
    if value is None or isinstance(value, bool):
        return bool(value)
    lowered = str(value).lower() if isinstance(value, str | int | float) else ""
    if lowered in ("1", "1.0", "true", "t", "yes", "y", "on"):
        return True
    if lowered in ("0", "0.0", "false", "f", "no", "n", "off"):
        return False
    raise Refused(f"{name} is not a boolean")


def _message(message: object) -> dict[str, Any]:
    """One message with the keys SGLang's model knows, in its order; the rest is dropped (fact 4)."""
    if not isinstance(message, dict):
        raise Refused("a message is not an object")
    role = message.get("role")
    content = message.get("content")
    if role == "user":
        if content is None:
            raise Refused("a user message has no content")
        return {"role": "user", "content": _content(content, "user")}
    role = role.lower() if isinstance(role, str) else ""
    if role not in _ROLES:
        raise Refused("a message's role is unknown")
    dumped: dict[str, Any] = {"role": role, "content": "" if content is None else _content(content, role)}
    for key in ("tool_call_id", "name", "phase", "reasoning_content"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise Refused(f"a message's {key} is not text")
            dumped[key] = value
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise Refused("tool_calls is not a list")
        dumped["tool_calls"] = [_tool_call(call, parse=role == "assistant") for call in in_turns(calls)]
    if (tools := render_tools(message.get("tools"))) is not None:
        dumped["tools"] = tools
    if (prefix := message.get("prefix")) is not None:
        dumped["prefix"] = boolean(prefix, "prefix")
    return dumped


def _tool_call(call: object, *, parse: bool) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Refused("a tool call is not an object with a function")
    identity, index, function = call.get("id"), call.get("index"), call["function"]
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(identity, str | None) or not isinstance(name, str | None):
        raise Refused("a tool call's id or name is not text")
    if not isinstance(index, int | None) or not isinstance(arguments, str | dict | None):
        raise Refused("a tool call's index or arguments has the wrong type")
    if call.get("type", "function") != "function":
        raise Refused("a tool call's type is not function")
    if parse and isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {"id": identity, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments are parsed and printed again by the template: 1e5 → 100000.0, a repeated key keeps its last value."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise Refused("a tool call's arguments are not JSON") from None
    if not isinstance(value, dict):
        raise Refused("a tool call's arguments are not an object")
    return value


def _content(content: object, role: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused("a message's content is neither text nor parts")
    return [_part(part, role) for part in in_turns(content)]


def _part(part: object, role: str) -> dict[str, Any]:
    """A part with its model's keys only (fact 8)."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise Refused("a content part is not an object with a type")
    if kind in MEDIA_PARTS:
        raise HasMedia(kind)
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("thinking", "reasoning") and role == "assistant":
        thought, text = part.get("thinking"), part.get("text")
        if (thought is None) != (text is None) and isinstance(thought, str | None) and isinstance(text, str | None):
            return {"type": kind, "thinking": thought, "text": text}
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    raise Refused(f"a content part of type {json.dumps(kind)} is not valid here")


def _for_template(message: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    """Parts as the template takes them: joined with ONE SPACE ("string"), or text and tool references ("openai")."""
    parts = message["content"]
    if isinstance(parts, str):
        return message
    if content_format == "openai":
        kept = [part for part in in_turns(parts) if part["type"] in ("text", "tool_reference")]
        if message["role"] != "tool" or any(part["type"] != "text" for part in kept):
            rest = {key: value for key, value in message.items() if key != "content"}
            return {**rest, "content": kept}
        parts = kept
    return {**message, "content": " ".join([part["text"] for part in in_turns(parts) if part["type"] == "text"])}
