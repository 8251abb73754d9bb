"""May a chat body be sent with its token ids, so that SGLang neither renders nor tokenises it a second time?

SGLang 0.5.23's chat route takes `input_ids` beside `messages` and then reads of the messages nothing. Everything that
decides about sampling and parsing (grammar, reasoning, stop strings, logprobs) is still read from the body's other
fields, but not all of it is the same with and without rendering. Only what was seen to be served identically is sent.
"""

from __future__ import annotations

import msgspec

from router.hashing import TokenIds
from router.prompt.body import present
from router.prompt.checks import Checked
from router.prompt.forms import CHAT

FORWARDED_FEATURES = frozenset({"parts", "trailing_assistant", "tool_results"})
MAX_FORWARDED_TOKENS = 262_144
_NOT_WITH = ("tools", "tool_choice", "response_format", "logprobs", "input_ids", "chat_template", "documents")


def may_forward(checked: Checked) -> bool:
    """Text-only chat with a verified rendering, without features that touch sampling."""
    body, made = checked.body, checked.made
    return (
        checked.model.engine == "sglang"
        and body.path == CHAT
        and not checked.files.multimodal
        and not body.odd
        and made.features <= FORWARDED_FEATURES
        and len(made.ids) <= 4 * MAX_FORWARDED_TOKENS
        and (body.usual or not any(present(getattr(body.fields, name)) for name in _NOT_WITH))
    )


def ids_json(ids: TokenIds) -> bytes:
    """The ids as a JSON array."""
    return msgspec.json.encode(memoryview(ids).cast("I").tolist())
