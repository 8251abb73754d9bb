"""Text and token ids of a simulated engine: the project's own tokenising and chat rendering, and made-up answers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import tokenizers

from router.errors import RouterError
from router.hashing import TokenIds, pack_ids
from router.prompt.body import parse_body
from router.prompt.chat import HasMedia, render_chat
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import CannotEncode, Tokenizer, load_tokenizer, read_tokenizer_config
from router.prompt.tools import Refused

_WORD = re.compile("Ġ[a-z]{2,}")  # byte-level BPE writes a leading space as Ġ


class PromptRefused(Exception):
    """This body or text makes no prompt; the request is answered 400."""


class TextCodec:
    """One model folder. Immutable once loaded: engines of one process may share it.

    Answers are words that are one token each, so that the answer's text, sent back in the next turn, becomes the very
    same ids again, as a real model's answers nearly always do.
    """

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerUnusable, TemplateFailure, or ValueError when the folder is no byte-level BPE chat model."""
        config = read_tokenizer_config(folder)
        self._tokenizer: Tokenizer = load_tokenizer(folder)
        template = config.get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{folder}: tokenizer_config.json has no chat_template")
        self._template = ChatTemplate(template, self._tokenizer.specials)
        vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        self.vocabulary_size = max(vocabulary.values()) + 1
        words = sorted((number, word) for word, number in vocabulary.items() if _WORD.fullmatch(word))
        texts = [(number, " " + word[1:]) for number, word in words]
        self._texts = {number: text for number, text in texts if self.encode(text) == pack_ids([number])}
        self._words = list(self._texts)
        if not self._words:
            raise ValueError(f"{folder}: no vocabulary entry is a plain word; use a byte-level BPE tokenizer")

    def encode(self, text: str) -> TokenIds:
        """Raw text, with the tokenizer's default special tokens. Raises PromptRefused."""
        try:
            return self._tokenizer.encode_raw_text(text, restore_flags=True)
        except CannotEncode as error:
            raise PromptRefused(str(error)) from error

    def render_chat(self, path: str, raw: bytes) -> TokenIds:
        """A chat body → ids, as SGLang makes them. `path` /v1/tokenize obeys the body's add_generation_prompt.

        Raises PromptRefused.
        """
        try:
            fields = parse_body(path, raw).fields
            chat = render_chat(fields, self._template, {}, obey_generation_prompt=path == "/v1/tokenize")
            return self._tokenizer.encode(chat.text, False) + self._tokenizer.encode(chat.continuation, False)
        except HasMedia as error:
            raise PromptRefused(f"this engine has no multimodal model: {error}") from error
        except (RouterError, Refused, TemplateFailure, CannotEncode, ValueError, RecursionError) as error:
            raise PromptRefused(str(error)) from error

    def answer(self, ids: TokenIds, choice: int) -> Callable[[int], int]:
        """The made-up answer to a prompt: output token i. Equal prompts and choices get equal answers."""
        seed = zlib.crc32(choice.to_bytes(4, "little"), zlib.crc32(ids))
        words = self._words

        def sample(i: int) -> int:
            mixed = (seed + i * 0x9E3779B9) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            return words[(mixed ^ (mixed >> 16)) % len(words)]

        return sample

    def text_of(self, token: int) -> str:
        """The text of one answer token."""
        return self._texts[token]
