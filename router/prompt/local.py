"""Prompt → ids with the model's own files: the synchronous half, which runs inline or in a thread."""

from __future__ import annotations

from router.hashing import TokenIds
from router.prompt.body import RequestBody
from router.prompt.chat import HasMedia, Rendered, render_chat
from router.prompt.forms import TOKENIZE, PromptForm
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import MAX_CHARS, CannotEncode, Tokenizer
from router.prompt.tools import Refused
from router.prompt.vllm_chat import render_vllm_chat


class NoIds(Exception):
    """`reason` is a short label for the counter; `ask_engine`: the engine's own tokenizer may still know."""

    def __init__(self, reason: str, *, ask_engine: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.ask_engine = ask_engine


def local_ids(body: RequestBody, form: PromptForm, files: ModelFiles, facts: ModelFacts) -> TokenIds:
    """Ids of the first prompt. Raises NoIds, and nothing else, whatever the body holds."""
    try:
        if form.kind == "chat":
            ids = _chat_ids(body, files, facts)
        else:
            text = form.text or ""
            _check_length(text)
            ids = files.tokenizer.encode_raw_text(text, restore_flags=facts.engine != "vllm")
    except NoIds:
        raise
    except Refused:
        raise NoIds("refused", ask_engine=False) from None  # the engine answers 4xx; it need not be asked twice
    except HasMedia:
        raise NoIds("media", ask_engine=False) from None
    except CannotEncode:
        raise NoIds("cannot_encode", ask_engine=False) from None
    except TemplateFailure:
        raise NoIds("template_error") from None
    except (ValueError, RecursionError, UnicodeError):
        raise NoIds("odd_body", ask_engine=False) from None
    if not ids:
        raise NoIds("empty", ask_engine=False)
    return ids


def render(body: RequestBody, template: ChatTemplate, facts: ModelFacts) -> Rendered:
    """The text the engine's template makes of a chat body. Raises what `render_chat` raises."""
    if facts.engine == "vllm":
        return render_vllm_chat(body.fields, template, facts.default_kwargs)
    obey = body.path == TOKENIZE
    return render_chat(body.fields, template, facts.default_kwargs, obey_generation_prompt=obey)


def _chat_ids(body: RequestBody, files: ModelFiles, facts: ModelFacts) -> TokenIds:
    if files.template is None:
        raise NoIds("no_template")
    rendered = render(body, files.template, facts)
    _check_length(rendered.text)
    ids = files.tokenizer.encode(rendered.text, False)
    if ids and rendered.continuation:
        ids += _continuation(files.tokenizer, rendered.continuation)
    return ids


def _continuation(tokenizer: Tokenizer, text: str) -> TokenIds:
    """SGLang encodes the cut-off answer with default special tokens and takes one BOS off its front."""
    ids = tokenizer.encode_raw_text(text, restore_flags=True)
    return ids[4:] if tokenizer.bos is not None and ids.startswith(tokenizer.bos) else ids


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise NoIds("too_long", ask_engine=False)
