"""A chat body → the text vLLM's template renders, where it differs from SGLang (vLLM 0.32.0; captures facts 19–22)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.prompt.body import plain, present
from router.prompt.chat import MEDIA_PARTS, HasMedia, Rendered, boolean
from router.prompt.content_format import ContentFormat
from router.prompt.features import chat_features
from router.prompt.fields import Fields
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tools import Refused

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_TEXT_PARTS = {  # part type → the key that holds its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # put behind the last message, found again in the output and cut there


def render_vllm_chat(
    fields: Fields, template: ChatTemplate, defaults: Mapping[str, Any], *, sent: Any = None
) -> Rendered:
    """`sent`: the messages, where they are decoded already. Raises Refused, HasMedia, TemplateFailure, ValueError,
    RecursionError, as `render_chat`."""
    if present(fields.chat_template):
        raise TemplateFailure("the request brings its own template")
    if sent is None:
        sent = plain(fields.messages)
    if not isinstance(sent, list) or not sent:
        raise Refused("messages is not a list of messages")
    messages = [_message(message, template.vllm_format) for message in sent]
    if any(m["role"] == "developer" for m in messages) and not _knows_developer(template.source):
        messages = _merge_systems([_as_system(message) for message in messages])
    tools = _tools(plain(fields.tools))

    generation = boolean(plain(fields.add_generation_prompt), "add_generation_prompt")
    generation = generation or not present(fields.add_generation_prompt)
    keep_going = boolean(plain(fields.continue_final_message), "continue_final_message")
    if keep_going and generation:
        raise Refused("continue_final_message needs add_generation_prompt false")
    kwargs = _template_kwargs(fields, defaults)
    if not keep_going:
        text = template.render(messages, tools, kwargs, add_generation_prompt=generation)
        return Rendered(text, features=chat_features(fields, sent))
    last = _mark_end(messages)
    text = template.render(messages, tools, kwargs, add_generation_prompt=False)
    return Rendered(_cut_at_mark(text, last), features=chat_features(fields, sent))


def _template_kwargs(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    asked = plain(fields.chat_template_kwargs)
    if not isinstance(asked, dict | None):
        raise Refused("chat_template_kwargs is not an object")
    effort = plain(fields.reasoning_effort)
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise Refused("reasoning_effort is unknown")
    kwargs = {**defaults, **(asked or {})}
    for own in ("add_generation_prompt", "continue_final_message"):  # the body's fields of these names win
        kwargs.pop(own, None)
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if "enable_thinking" not in (asked or {}):
            kwargs["enable_thinking"] = effort != "none"
    documents = plain(fields.documents)
    if documents is not None:
        kwargs["documents"] = documents
    return kwargs


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Always in the order name, description, parameters, strict; a tool_choice changes nothing (facts 19, 20)."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Refused("tools is not a list of tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise Refused("a tool is not an object with a function")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not (isinstance(name, str) and isinstance(description, str | None) and isinstance(parameters, dict | None)):
        raise Refused("a function's name, description or parameters has the wrong type")
    if tool.get("type", "function") != "function":
        raise Refused("a tool's type is not function")
    printed: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    deferred = tool.get("defer_loading")
    for key, value in (("strict", None), ("defer_loading", deferred)):
        if (own := function.get(key, value)) is not None:
            printed[key] = own
    dumped: dict[str, Any] = {"type": "function", "function": printed}
    return dumped if deferred is None else {**dumped, "defer_loading": deferred}


def _message(message: object, content_format: ContentFormat) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise Refused("a message is not an object with a role")
    parts = _parts(message.get("content"))
    dumped: dict[str, Any] = {"role": role, "content": parts if content_format == "openai" else _joined(parts)}
    if role == "assistant":
        _add_answer(dumped, message)
    elif role == "tool":
        if "tool_call_id" in message:
            dumped["tool_call_id"] = message["tool_call_id"]
        if all(part["type"] == "text" for part in parts):
            dumped["content"] = _joined(parts)
    if isinstance(message.get("name"), str):
        dumped["name"] = message["name"]
    if role == "developer":
        dumped["tools"] = message.get("tools")
    return dumped


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["text"])


def _parts(content: object) -> list[dict[str, Any]]:
    """Content as text parts; every kind of text part, thinking too, becomes type text (fact 20)."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Refused("a message's content is neither text nor parts")
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            raise HasMedia(kind)
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise Refused(f"a content part of type {json.dumps(kind)} is not known")
        text = part.get(_TEXT_PARTS[kind])
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif text is not None:
            raise Refused("a content part's text is not text")
    return parts


def _add_answer(dumped: dict[str, Any], message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:  # an empty list is dropped
        dumped["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        dumped["reasoning"] = dumped["reasoning_content"] = reasoning


def _tool_call(call: object) -> dict[str, Any]:
    """Arguments that are empty, no JSON or no object become {}; an object instead of text is refused (fact 22)."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise Refused("a tool call is not an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict) or call.get("type", "function") != "function":
        raise Refused("a tool call's arguments or type is not as OpenAI's")
    parsed: object = {}
    if isinstance(arguments, str) and arguments:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = {}
    parsed = parsed if isinstance(parsed, dict) else {}
    known = {key: call[key] for key in ("id", "function", "type") if key in call}
    return {**known, "function": {"arguments": parsed, "name": function.get("name")}}


def _knows_developer(source: str) -> bool:
    return '"developer"' in source or "'developer'" in source


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {key: "system" if key == "role" else value for key, value in message.items() if key != "tools"}


def _merge_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one in front, unless there is but one and it is there already."""
    systems = [message for message in messages if message["role"] == "system"]
    if len(systems) < 2 and messages[0]["role"] == "system":
        return messages
    texts = [
        m["content"] if isinstance(m["content"], str) else "\n".join(p["text"] for p in m["content"]) for m in systems
    ]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put the tag behind the last message's text, as transformers does; returns that text."""
    last = messages[-1] = dict(messages[-1])
    if isinstance(last["content"], str):
        text: str = last["content"]
        last["content"] = text + _CONTINUE_TAG
        return text
    if not last["content"]:
        raise Refused("there is no text to continue")
    text = last["content"][-1]["text"]
    last["content"] = [*last["content"][:-1], {"type": "text", "text": text + _CONTINUE_TAG}]
    return text


def _cut_at_mark(text: str, last: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if last.strip() not in text or tag not in text:
        raise TemplateFailure("the template does not print the message to continue")
    at = text.rindex(tag)
    return text[:at] if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:at].rstrip()
