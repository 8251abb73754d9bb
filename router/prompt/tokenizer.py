"""Text → token ids for one model folder: `fastokens` where it can serve the file, else `tokenizers`.

Which one serves is `Tokenizer.backend`. Both are loaded once and compared on a built-in probe set; a difference means
`tokenizers` serves. Ids are u32 little-endian bytes, the form the page hash eats.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers

from router.hashing import TokenIds, pack_ids
from router.prompt.boundaries import Boundaries, HardToken, find_boundaries

try:
    import fastokens
except ImportError:  # no build for this platform
    fastokens = None

Backend = Literal["fastokens", "tokenizers"]
Encode = Callable[[str, bool], TokenIds]

MAX_COMPARED_CHARS = 65_536
MAX_CHARS = 4_000_000  # about 1M tokens; a longer prompt is routed by load. 4M spaces cost 2.3 s of a thread

# Classes that took add_bos_token / add_eos_token before transformers 5; SGLang restores the flags for these (fact 16).
_FLAGGED_CLASSES = frozenset(
    {
        *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"),
        *("GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast"),
    }
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_PROBES = (
    "The quick brown fox isn't 12,345.678 years old; it's they'll've SEEN camelCase snake_case CONSTANT_CASE.",
    "  leading\n\n\n\ttabs \t and   runs      of spaces   \r\n\r\n  trailing  ",
    "def f(x: int) -> str:\n    return f\"{x!r:>10}\" if x else ''  # naïve\n\n\nclass A(B):\n\tpass\n",
    '{"a": [1, 2.5e-7, null, true], "b": {"c": "d\\u00e9\\n"}} <tool_call>\n</tool_call> <think>\n\n</think>',
    "Ünïcödé: élève Ελληνικά Привет мир עברית العربية हिन्दी ไทย 한국어 日本語テキスト 中文字符，。！",
    "e\u0301 n\u0303 \u212b \ufb01 \u00bd \u2460 \u3000 \u200b\u200d \ufeff \u00a0 \u202e",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f600",
    "0 00 000 0000 1234567890123 3.14159 1_000_000 0xDEADBEEF ١٢٣ ४५६ ⅷ²³",
    "\x00\x01\x07\x1b[0m\x7f\x85 ---- ==== ____ **** .... !!!! ???? %%%% \\\\ // || && << >> ~~ ``` '' \"\"",
    "",
    " ",
    "a",
)


class TokenizerUnusable(Exception):
    """The folder holds no tokenizer that can be loaded. The text says why."""


class CannotEncode(Exception):
    """No engine could encode this text either (a lone surrogate), or it is one that breaks the library."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`specials` are bos_token, eos_token … as templates see them. `flagged_prefix` / `flagged_suffix`: the ids SGLang
    puts around raw text by the configuration's flags; None when the file's own post-processor decides. `vocab_size`:
    one more than the highest id of the file. `boundaries`: where texts may be cut, None when nowhere. `reference` is
    the encoder that `encoder` is held against at run time, on one of the texts `last` encoded.
    """

    backend: Backend
    specials: dict[str, str]
    bos: TokenIds | None
    flagged_prefix: TokenIds | None
    flagged_suffix: TokenIds
    encoder: Encode
    vocab_size: int | None = None
    boundaries: Boundaries | None = None
    decoder: Callable[[list[int]], str] | None = None
    reference: Encode | None = None
    last: deque[tuple[str, bool, TokenIds]] = field(default_factory=lambda: deque(maxlen=1), repr=False, compare=False)

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        """Raises CannotEncode. Not interruptible: the caller limits the length first (MAX_CHARS)."""
        ids = self.encoder(text, add_special_tokens)
        if self.reference is not None and len(text) <= MAX_COMPARED_CHARS:
            self.last.append((text, add_special_tokens, ids))
        return ids

    @property
    def comparable(self) -> bool:
        return bool(self.last)

    def compare(self) -> int | None:
        """Encodes the last text once more, with `reference`: the first token that differs, None when none does.
        Blocking, 40 ms at most. Raises CannotEncode."""
        if self.reference is None or not self.last:
            return None
        text, add_special_tokens, ids = self.last.pop()
        theirs = self.reference(text, add_special_tokens)
        if ids == theirs:
            return None
        pairs = zip(memoryview(ids).cast("I"), memoryview(theirs).cast("I"), strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(theirs)) // 4)

    def encode_raw_text(self, text: str, *, restore_flags: bool) -> TokenIds:
        """Text of /v1/completions and /generate, with the tokenizer's default special tokens (case 36).

        `restore_flags` is SGLang's repair of add_bos_token; vLLM leaves it to the file. A doubled BOS stays doubled.
        """
        if not restore_flags or self.flagged_prefix is None:
            return self.encode(text, True)
        return self.flagged_prefix + self.encode(text, False) + self.flagged_suffix


def load_tokenizer(folder: Path, *, fast_wanted: bool = True) -> Tokenizer:
    """Load tokenizer.json of `folder` (0.8–2.7 s for a large vocabulary). Raises TokenizerUnusable."""
    try:
        reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerUnusable(f"{folder / 'tokenizer.json'}: {error}") from error
    reference.no_truncation()
    reference.no_padding()
    config = read_tokenizer_config(folder)
    slow = _SlowEncoder(reference)
    fast = _fast_encoder(folder / "tokenizer.json") if fast_wanted else None
    agreed = fast is not None and _agree(fast, slow, _special_probes(reference))
    specials = _specials(config)
    bos = reference.token_to_id(specials.get("bos_token", ""))
    eos = reference.token_to_id(specials.get("eos_token", ""))
    prefix: TokenIds | None = None
    suffix = b""
    if config.get("tokenizer_class") in _FLAGGED_CLASSES:
        prefix = _flagged(config.get("add_bos_token"), bos, default=True)
        suffix = _flagged(config.get("add_eos_token"), eos, default=False)
    boundaries = find_boundaries(_matched_first(reference), slow, _PROBES)
    if boundaries is not None and not agreed:
        boundaries.between_words = False  # such cuts are proven by tokenising twice: too dear at 20 ms for 8k tokens
    return Tokenizer(
        backend="fastokens" if agreed else "tokenizers",
        specials=specials,
        bos=None if bos is None else pack_ids([bos]),
        flagged_prefix=prefix,
        flagged_suffix=suffix,
        encoder=fast if fast is not None and agreed else slow,
        vocab_size=max(reference.get_vocab(with_added_tokens=True).values(), default=-1) + 1 or None,
        boundaries=boundaries,
        decoder=functools.partial(reference.decode, skip_special_tokens=False),
        reference=slow if agreed else None,
    )


def _matched_first(model: tokenizers.Tokenizer) -> list[HardToken]:
    """The added tokens that are matched on the raw text, before anything is normalised."""
    added = model.get_added_tokens_decoder().items()
    return [
        HardToken(token.content, number, hard=not (token.lstrip or token.rstrip or token.single_word))
        for number, token in added
        if token.content and not token.normalized
    ]


def warm_up(tokenizer: Tokenizer) -> None:
    """The first call of a backend costs 90–180 ms: pay it here, on about 1 MB of mixed text."""
    block = "\n".join(_PROBES)
    text = "".join(f"{number} {block}" for number in range(700))
    tokenizer.encode(text, False)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; {} where it is absent. Raises TokenizerUnusable when it is not a JSON object."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerUnusable(f"{path}: not a JSON object")
    return config


def _specials(config: dict[str, Any]) -> dict[str, str]:
    """A special token is written as text or as an object with `content`; unset ones are absent (fact 17)."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _flagged(flag: object, token: int | None, *, default: bool) -> TokenIds:
    wanted = default if flag is None else bool(flag)
    return pack_ids([token]) if wanted and token is not None else b""


def _fast_encoder(path: Path) -> Encode | None:
    if fastokens is None:
        return None
    try:
        model = fastokens.Tokenizer.from_file(str(path))
        model.no_truncation()
    except Exception:  # a file it cannot serve: ValueError as documented, and whatever a new release raises
        return None

    return _FastEncoder(model.encode_batch_flat)


class _FastEncoder:
    __slots__ = ("_encode",)

    def __init__(self, encode: Callable[[list[str], bool], Sequence[bytes]]) -> None:
        self._encode = encode

    def __call__(self, text: str, add_special_tokens: bool) -> TokenIds:
        try:
            return bytes(self._encode([text], add_special_tokens)[0])
        except BaseException as error:
            _contain(error)
            raise


class _SlowEncoder:
    __slots__ = ("_model",)

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model

    def __call__(self, text: str, add_special_tokens: bool) -> TokenIds:
        try:
            # The batch call: `Tokenizer.encode` holds the GIL for the whole text.
            return pack_ids(self._model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except BaseException as error:
            _contain(error)
            raise


def _contain(error: BaseException) -> None:
    """Raises CannotEncode for a failure of the library's. A Rust panic is a BaseException (10 MB of spaces in
    `tokenizers`): one prompt without ids, not a dead router."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        raise CannotEncode(f"{type(error).__name__}: {error}"[:200]) from error


def _special_probes(model: tokenizers.Tokenizer) -> list[str]:
    """Texts with the file's own added tokens inside: alone, glued and spaced."""
    added = [token.content for token in model.get_added_tokens_decoder().values()]
    sample = added[:8] + added[-8:]
    return ["x" + token + "y " + token + " \n" + token + token for token in sample] + ["".join(sample)]


def _agree(fast: Encode, slow: Encode, extra: list[str]) -> bool:
    try:
        return all(fast(text, flag) == slow(text, flag) for text in (*_PROBES, *extra) for flag in (False, True))
    except CannotEncode:
        return False
