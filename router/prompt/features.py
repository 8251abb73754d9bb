"""Which parts of an engine's rendering rules a chat body uses: what is verified, or turned off, one by one."""

from __future__ import annotations

from typing import Any

from router.prompt.body import present
from router.prompt.fields import Fields
from router.prompt.turns import in_turns
from router.prompt.verify import Features

TEXT: Features = frozenset({"text"})
"""Raw text: no template, the tokenizer's default special tokens."""
NO_FEATURES: Features = frozenset()
TRAILING_ASSISTANT: Features = frozenset({"trailing_assistant"})

_BY_FIELD = (
    *(("tools", "tools"), ("tool_choice", "tool_choice"), ("chat_template_kwargs", "kwargs")),
    *(("reasoning_effort", "effort"), ("reasoning", "effort"), ("continue_final_message", "continue")),
    *(("add_generation_prompt", "generation_prompt"), ("documents", "documents")),
)
_BY_KEY = (("tool_calls", "tool_calls"), ("reasoning_content", "reasoning"), ("tools", "message_tools"))


def chat_features(fields: Fields, sent: list[Any]) -> Features:
    """`sent` is the body's `messages` as Python values, already known to be a list of objects."""
    found = {feature for name, feature in _BY_FIELD if present(getattr(fields, name))}
    for message in in_turns(sent):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            found.add("tool_results" if role == "tool" else "other_roles")
        if isinstance(message.get("content"), list):
            found.add("parts")
        if role != "user":
            found.update(feature for key, feature in _BY_KEY if message.get(key))
    if sent and sent[-1].get("role") == "assistant":
        found.add("trailing_assistant")
    return frozenset(found)
