"""Prompt → ids with the model's own files: the synchronous half, which runs inline or in a thread."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from router.hashing import TokenIds
from router.prompt.body import RequestBody, plain
from router.prompt.chat import MEDIA_PARTS, HasMedia, Rendered, render_chat, render_usual
from router.prompt.conversation import CachedPrompt, ConversationCache
from router.prompt.converted import MESSAGES, RESPONSES, Unsupported, chat_fields
from router.prompt.features import TEXT
from router.prompt.fields import NO_FIELDS
from router.prompt.forms import CHAT, TOKENIZE, PromptForm
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import MAX_CHARS, CannotEncode, Tokenizer
from router.prompt.tools import Refused
from router.prompt.turns import give_way, in_turns
from router.prompt.verify import Features
from router.prompt.vllm_chat import render_vllm_chat

_MEDIA_MARK = "\ue000media\ue000"  # stands where the first image, audio or video is, and is cut off with the rest
WORTH_KEEPING_CHARS = 512  # a shorter prompt is tokenised again in less time than it takes to look it up
_SAFE_END = re.compile(r"\w(?= \w)")  # between two words no tokenizer joins anything
_END_CHARS = 4096


class NoIds(Exception):
    """`reason` is a short label for the counter; `ask_engine`: the engine's own tokenizer may still know."""

    def __init__(self, reason: str, *, ask_engine: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.ask_engine = ask_engine


class LocalPrompt:
    """`partial`: the ids end somewhere before the first media item. `cached` knows block keys of earlier turns."""

    __slots__ = ("cached", "features", "ids", "partial")

    def __init__(
        self, ids: TokenIds, features: Features, cached: CachedPrompt | None = None, partial: bool = False
    ) -> None:
        self.ids = ids
        self.features = features
        self.cached = cached
        self.partial = partial


def local_ids(body: RequestBody, form: PromptForm, files: ModelFiles, facts: ModelFacts) -> TokenIds:
    """The ids of `local_prompt`, made from nothing but the body."""
    return local_prompt(body, form, files, facts).ids


def local_prompt(
    body: RequestBody, form: PromptForm, files: ModelFiles, facts: ModelFacts, cache: ConversationCache | None = None
) -> LocalPrompt:
    """Ids of the first prompt. Raises NoIds, and nothing else, whatever the body holds."""
    try:
        if form.kind == "chat":
            prompt = _chat_prompt(as_chat(body), files, facts, cache)
        else:
            text = form.text or ""
            _check_length(text)
            prompt = LocalPrompt(files.tokenizer.encode_raw_text(text, restore_flags=facts.engine != "vllm"), TEXT)
    except NoIds:
        raise
    except Refused:
        raise NoIds("refused", ask_engine=False) from None  # the engine answers 4xx; it need not be asked twice
    except Unsupported as what:
        raise NoIds(f"unsupported_{what}", ask_engine=False) from None
    except HasMedia:
        raise NoIds("media", ask_engine=False) from None
    except CannotEncode:
        raise NoIds("cannot_encode", ask_engine=False) from None
    except TemplateFailure:
        raise NoIds("template_error") from None
    except (ValueError, RecursionError, UnicodeError):
        raise NoIds("odd_body", ask_engine=False) from None
    if not prompt.ids:
        raise NoIds("empty", ask_engine=False)
    return prompt


def as_chat(body: RequestBody) -> RequestBody:
    """The body as the engine's chat route sees it; itself when it came that way. Raises as `chat_fields`."""
    if body.path not in (MESSAGES, RESPONSES):
        return body
    return body.with_fields(CHAT, chat_fields(body.path, body.fields))


def render(body: RequestBody, template: ChatTemplate, facts: ModelFacts) -> Rendered:
    """The text the engine's template makes of a chat body. Raises what `render_chat` raises."""
    sent = body.take_messages()
    if sent is not None and body.usual:
        if facts.engine == "vllm":
            return render_vllm_chat(NO_FIELDS, template, facts.default_kwargs, sent=sent)
        return render_usual(sent, template, facts.default_kwargs)
    if facts.engine == "vllm":
        return render_vllm_chat(body.fields, template, facts.default_kwargs, sent=sent)
    obey = body.path == TOKENIZE
    return render_chat(body.fields, template, facts.default_kwargs, obey_generation_prompt=obey, sent=sent)


def _chat_prompt(
    body: RequestBody, files: ModelFiles, facts: ModelFacts, cache: ConversationCache | None
) -> LocalPrompt:
    template = files.template
    if template is None:
        raise NoIds("no_template")
    try:
        rendered = render(body, template, facts)
    except HasMedia:
        if (template.vllm_format if facts.engine == "vllm" else template.sglang_format) != "openai":
            raise
        return _before_media(body, files, facts, cache)
    _check_length(rendered.text)
    ids, cached = _encode(rendered.text, files.tokenizer, cache)
    if ids and rendered.continuation:
        return LocalPrompt(ids + _continuation(files.tokenizer, rendered.continuation), rendered.features)
    return LocalPrompt(ids, rendered.features, cached)


def _encode(text: str, tokenizer: Tokenizer, cache: ConversationCache | None) -> tuple[TokenIds, CachedPrompt | None]:
    if cache is None or tokenizer.boundaries is None or len(text) < WORTH_KEEPING_CHARS:
        return tokenizer.encode(text, False), None
    return cache.encode(text, tokenizer.boundaries, tokenizer.encode)


def _before_media(
    body: RequestBody, files: ModelFiles, facts: ModelFacts, cache: ConversationCache | None
) -> LocalPrompt:
    """The prompt up to its first image, audio or video: what comes from there on exists only inside the engine, and
    equal text behind different images must not earn credit (case 42)."""
    assert files.template is not None
    sent = plain(body.fields.messages)
    marked = [_marked(message) for message in in_turns(sent)] if isinstance(sent, list) else sent
    fields = msgspec.structs.replace(body.fields, messages=msgspec.Raw(json.dumps(marked).encode()))
    rendered = render(body.with_fields(body.path, fields), files.template, facts)
    text = rendered.text.partition(_MEDIA_MARK)[0]
    _check_length(text)
    ids, cached = _encode(text[: _safe_end(text)], files.tokenizer, cache)
    return LocalPrompt(ids, rendered.features | {"media"}, cached, partial=True)


def _safe_end(text: str) -> int:
    """Behind the last word that another one follows; 0: there is none."""
    end = len(text)
    while end > 0:
        begin = max(0, end - _END_CHARS)
        found = [match.end() for match in _SAFE_END.finditer(text, begin, end)]
        if found:
            return found[-1]
        end = begin + 2 if begin else 0  # a match is seen from its word's last letter to the next one's first
        give_way()
    return 0


def _marked(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    mark = {"type": "text", "text": _MEDIA_MARK}
    return {**message, "content": [mark if _is_media(part) else part for part in in_turns(content)]}


def _is_media(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in MEDIA_PARTS


def _continuation(tokenizer: Tokenizer, text: str) -> TokenIds:
    """SGLang encodes the cut-off answer with default special tokens and takes one BOS off its front."""
    ids = tokenizer.encode_raw_text(text, restore_flags=True)
    return ids[4:] if tokenizer.bos is not None and ids.startswith(tokenizer.bos) else ids


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise NoIds("too_long", ask_engine=False)
