from __future__ import annotations

import functools
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import pack_ids
from router.prompt import tokenizer as module
from router.prompt.forms import prompt_form
from router.prompt.local import local_ids
from router.prompt.models import ModelSource, load_model
from router.prompt.tokenizer import CannotEncode, Tokenizer, TokenizerUnusable, load_tokenizer, read_tokenizer_config
from tests.prompt.support import FACTS, TINY, chat, tiny, user


def folder(tmp_path: Path, config: dict[str, Any] | None = None) -> Path:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@functools.cache
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def ids(text: str) -> bytes:
    return pack_ids(reference().encode(text, add_special_tokens=False).ids)


def test_the_packaged_tokenizer_is_small_and_served_by_fastokens() -> None:
    pytest.importorskip("fastokens")
    loaded = tiny().tokenizer
    assert loaded.backend == "fastokens"
    assert loaded.encode("<|im_start|>user", False)[:4] == pack_ids([3])
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 300_000
    assert loaded.specials["bos_token"] == "<|bos|>"


def test_without_fastokens_the_same_ids_come_from_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fastokens", None)
    loaded = load_tokenizer(TINY)
    assert loaded.backend == "tokenizers"
    text = "Hello wörld, 你好 <|im_end|>\n 12345"
    assert loaded.encode(text, False) == tiny().tokenizer.encode(text, False) == ids(text)


def test_a_file_fastokens_cannot_serve_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsupported:
        class Tokenizer:
            @staticmethod
            def from_file(path: str) -> None:
                raise ValueError("unsupported normaliser")

    monkeypatch.setattr(module, "fastokens", Unsupported)
    assert load_tokenizer(TINY).backend == "tokenizers"


def test_a_backend_that_disagrees_on_the_probe_set_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    class OffByOne:
        class Tokenizer:
            def __init__(self, path: str) -> None:
                self._model = tokenizers.Tokenizer.from_file(path)

            from_file = classmethod(lambda cls, path: cls(path))

            def no_truncation(self) -> None: ...

            def encode_batch_flat(self, texts: list[str], special: bool) -> tuple[bytes, bytes]:
                wrong = "é" in texts[0]
                return pack_ids([i + wrong for i in self._model.encode(texts[0], add_special_tokens=special).ids]), b""

    monkeypatch.setattr(module, "fastokens", OffByOne)
    loaded = load_tokenizer(TINY)
    assert loaded.backend == "tokenizers"
    assert loaded.encode("é", False) == ids("é")


@pytest.mark.parametrize("fast", [True, False])
def test_a_lone_surrogate_cannot_be_encoded(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """captures fact 12"""
    if not fast:
        monkeypatch.setattr(module, "fastokens", None)
    with pytest.raises(CannotEncode):
        load_tokenizer(TINY).encode("a\ud800b", False)


def test_a_rust_panic_costs_one_prompt_its_ids() -> None:
    class PanicException(BaseException): ...

    def panics(texts: list[str], special: bool) -> list[bytes]:
        raise PanicException("index out of bounds")

    broken = Tokenizer("fastokens", {}, None, None, b"", module._FastEncoder(panics))
    with pytest.raises(CannotEncode, match="PanicException"):
        broken.encode("x", False)


def test_an_interrupt_is_not_contained() -> None:
    def stopped(texts: list[str], special: bool) -> list[bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._FastEncoder(stopped)("x", False)


@pytest.mark.parametrize(
    ("config", "prefix", "suffix"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, [1], []),
        ({"tokenizer_class": "LlamaTokenizerFast"}, [1], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, [], []),
    ],
)
def test_raw_text_gets_the_bos_sglang_restores(
    tmp_path: Path, config: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    """case 36, captures fact 16: by flags, for the classes that knew them; vLLM adds nothing."""
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", **config}
    loaded = load_tokenizer(folder(tmp_path, config))
    expected = pack_ids(prefix) + ids("hello") + pack_ids(suffix)
    assert loaded.encode_raw_text("hello", restore_flags=True) == expected
    assert loaded.encode_raw_text("hello", restore_flags=False) == ids("hello")


def test_a_bos_in_the_text_is_doubled_as_the_engine_doubles_it(tmp_path: Path) -> None:
    """case 36"""
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|bos|>"}
    loaded = load_tokenizer(folder(tmp_path, config))
    assert loaded.encode_raw_text("<|bos|>hello", restore_flags=True)[:8] == pack_ids([1, 1])


def test_a_post_processor_adds_its_bos_to_raw_text_only(tmp_path: Path) -> None:
    """case 36: Llama 3 has the BOS in tokenizer.json itself."""
    model = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 1)]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode_raw_text("hello", restore_flags=True) == pack_ids([1]) + ids("hello")
    assert loaded.encode("hello", False) == ids("hello")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_a_folder_without_a_usable_file_says_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{", '"x"'])
def test_a_broken_configuration_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerUnusable, match="tokenizer_config"):
        read_tokenizer_config(tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_both_backends_agree_on_any_text(text: str) -> None:
    assert tiny().tokenizer.encode(text, False) == ids(text)


def test_a_continued_answer_loses_the_bos_and_nothing_else(tmp_path: Path) -> None:
    """captures fact 6: encoded apart with the default special tokens, then one BOS is taken off its front."""
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_eos_token": True,
    }
    copied = folder(tmp_path, config)
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}")
    files = load_model(ModelSource(str(copied)), datetime.now)
    request = chat(user("a"), {"role": "assistant", "content": "wel"}, continue_final_message=True)
    found = local_ids(request, prompt_form(request), files, FACTS)
    assert found == ids("a") + ids("wel") + pack_ids([2])


@pytest.mark.parametrize("fast", [True, False])
def test_truncation_written_in_the_file_is_off(tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines turn it off: a long prompt keeps all its tokens."""
    if not fast:
        monkeypatch.setattr(module, "fastokens", None)
    model = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six"
    loaded = load_tokenizer(tmp_path)
    assert (loaded.backend, loaded.encode(text, False)) == ("fastokens" if fast else "tokenizers", ids(text))


@pytest.mark.parametrize("fast", [False, True])
def test_only_a_quick_tokenizer_cuts_between_words(fast: bool) -> None:
    """The proof of such a cut tokenises a new text twice."""
    loaded = load_tokenizer(TINY, fast_wanted=fast)
    assert loaded.boundaries is not None
    assert loaded.boundaries.between_words == (loaded.backend == "fastokens")
