"""Bodies of /v1/messages (Anthropic) and /v1/responses → the chat body SGLang 0.5.23 makes of them before rendering.

What is not certain to be converted the same way raises Unsupported and is routed by load: prior thinking (the engine's
reasoning parser decides), server tools, stored responses, items of other kinds.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from router.prompt.body import plain, present
from router.prompt.fields import ABSENT, Fields
from router.prompt.tools import Refused

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


class Unsupported(Exception):
    """The engine may know what to do with this body; the router does not. The text is a short reason."""


def chat_fields(path: str, fields: Fields) -> Fields:
    """Fields of the chat body. Raises Unsupported, Refused, ValueError."""
    made = _from_messages(fields) if path == MESSAGES else _from_responses(fields)
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in made.items() if value is not None}
    kept = ("chat_template_kwargs", "reasoning_effort", "reasoning", "continue_final_message", "add_generation_prompt")
    cleared = {name: ABSENT for name in (*kept, "tools", "tool_choice", "messages", "input_ids") if name not in raw}
    if path == RESPONSES:
        cleared.pop("chat_template_kwargs", None)
    return msgspec.structs.replace(fields, **cleared, **raw)


def _from_messages(fields: Fields) -> dict[str, Any]:
    if present(fields.thinking) or present(fields.output_config):
        raise Unsupported("thinking")
    sent, system = plain(fields.messages), plain(fields.system)
    if not isinstance(sent, list):
        raise Refused("messages is not a list of messages")
    messages: list[dict[str, Any]] = []
    texts = [system] if isinstance(system, str) and system.strip() else []
    if isinstance(system, list):
        texts = [b["text"] for b in system if isinstance(b, dict) and b.get("type") == "text" and b.get("text")]
    if texts:
        messages.append({"role": "system", "content": "\n".join(texts)})
    for message in sent:
        _add_anthropic(messages, message)
    tools = [_anthropic_tool(tool) for tool in plain(fields.tools) or []]
    return {"messages": messages, "tools": tools or None, "tool_choice": _anthropic_choice(fields, bool(tools))}


def _add_anthropic(messages: list[dict[str, Any]], message: Any) -> None:
    """Tool results become messages of their own, in their place among the user's text."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ("user", "assistant"):
        raise Unsupported("inline_system" if role == "system" else "role")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise Refused("a message's content is neither text nor blocks")
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": ""}})
        elif kind == "tool_use":
            call = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "tool_result" and role == "user":
            if parts:
                messages.append({"role": "user", "content": _single(parts)})
                parts = []
            messages.append(_tool_result(block))
        else:
            raise Unsupported("block")
    if parts or calls or role == "assistant":
        made: dict[str, Any] = {"role": role}
        if calls:
            made["tool_calls"] = calls
        if parts or not calls:
            made["content"] = _single(parts) if parts else ""
        messages.append(made)


def _single(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _tool_result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        if not all(isinstance(item, dict) and item.get("type") == "text" for item in content):
            raise Unsupported("tool_result")
        parts = [{"type": "text", "text": item["text"]} for item in content if item.get("text")]
        made = _single(parts) if parts else ""
    else:
        made = str(content) if content else ""
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or block.get("id") or "", "content": made}


def _anthropic_tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict) or tool.get("type") not in (None, "custom"):
        raise Unsupported("server_tool")
    schema.setdefault("type", "object")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": schema,
        "strict": tool.get("strict", False),
    }
    return {"type": "function", "defer_loading": tool.get("defer_loading"), "function": function}


def _anthropic_choice(fields: Fields, tools: bool) -> object:
    choice = plain(fields.tool_choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "none" or (choice is None and not tools):
        return "none"
    if not tools:
        raise Refused("tool_choice without tools") if kind in ("any", "tool") else Unsupported("tool_choice")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if kind == "any" else "auto"


def _from_responses(fields: Fields) -> dict[str, Any]:
    if present(fields.previous_response_id) or present(fields.prompt):
        raise Unsupported("stored_response")
    if present(fields.tools) or present(fields.reasoning):
        raise Unsupported("responses_tools")
    instructions, sent = plain(fields.instructions), plain(fields.input)
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    if not isinstance(items, list) or not isinstance(instructions, str | None):
        raise Refused("input is neither text nor a list of items")
    system = [instructions] if instructions else []
    messages: list[dict[str, Any]] = []
    for item in items:
        role, text = _response_item(item)
        if role == "system":
            system.append(text)
        elif role == "assistant" and messages and messages[-1]["role"] == "assistant":
            both = (messages[-1]["content"], text)
            messages[-1]["content"] = ("\n\n" if all(both) else "").join(both)
        else:
            messages.append({"role": role, "content": text})
    if len(system) > 1:
        raise Unsupported("inline_system")
    if system:
        messages.insert(0, {"role": "system", "content": system[0]})
    return {"messages": messages, "tool_choice": "none"}


def _response_item(item: Any) -> tuple[str, str]:
    """Plain text messages only."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise Unsupported("item")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system") or item.keys() - {"role", "content", "type", "id", "status"}:
        raise Unsupported("item")
    if isinstance(content, list):
        if len(content) != 1 or not isinstance(content[0], dict):
            raise Unsupported("parts")
        part = content[0]
        content = part.get("text") if part.get("type") in ("input_text", "output_text", "text") else None
    if not isinstance(content, str):
        raise Unsupported("parts")
    return role, content
