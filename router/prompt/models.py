"""What one model's prompts are made with: tokenizer and chat template, from the folder its engines name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from router.contract.server_info import ServerInfo
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import Tokenizer, TokenizerUnusable, load_tokenizer, read_tokenizer_config, warm_up

MAX_MADE = 4096

# Architectures whose prompts an engine builds in Python, whatever the template says (contract 6.6).
_PYTHON_RENDERED = {
    "sglang": ("DeepseekV4", "KimiK3", "InklingForConditionalGeneration"),
    "vllm": ("DeepseekV32", "DeepseekV4", "KimiK3", "Inkling", "GptOss"),
}


_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OTHER_ENCODERS = ("vision_config", "audio_config", "thinker_config", "vision_tower", "mm_projector_type")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the prompt stage must know of the engines that serve a model.

    `names` are the base model's served names, `adapters` the names that are LoRA adapters over it (vLLM lists them as
    models). `chat_template` is the engine's own --chat-template: a .jinja file this machine may or may not have.
    """

    engine: Literal["sglang", "vllm", "unknown"] = "unknown"
    names: tuple[str, ...] = ()
    tokenizer_path: str | None = None
    chat_template: str | None = None
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    version: str | None = None

    @classmethod
    def from_server_info(cls, info: ServerInfo) -> ModelFacts:
        """The same object for the same `info`: this is asked several times a request."""
        known = _MADE.get(id(info))
        if known is not None and known[0] is info:
            return known[1]
        facts = cls(
            engine=info.engine,
            version=info.version,
            names=tuple(name for name in info.model_names if name not in info.adapters),
            tokenizer_path=info.tokenizer_path or info.model_path,
            chat_template=info.chat_template,
            default_kwargs=info.default_chat_template_kwargs,
            adapters=info.adapters,
        )
        if len(_MADE) >= MAX_MADE:
            _MADE.clear()
        _MADE[id(info)] = info, facts
        return facts


_MADE: dict[int, tuple[ServerInfo, ModelFacts]] = {}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`template` is None when chat prompts cannot be rendered here; `template_problem` says why. `vocab_size` is the
    model's (config.json), or its tokenizer's if that is larger; None when neither is known. `multimodal`: config.json
    names another encoder beside the language model.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_problem: str = ""
    vocab_size: int | None = None
    multimodal: bool = False


class ModelSource(NamedTuple):  # looked up several times a request
    """Where one model's files are: a folder, the operator's template file, the engine's --chat-template."""

    folder: str
    engine: str = "unknown"
    template: str | None = None
    engine_template: str | None = None


def folder_of(source: ModelSource) -> Path:
    """The folder, or for a hub name (`Qwen/Qwen3-0.6B`) the Hugging Face cache's copy of its main revision when this
    machine has one. Nothing is ever downloaded."""
    folder = Path(source.folder)
    if folder.is_absolute() or folder.is_dir() or not _HUB_NAME.fullmatch(source.folder):
        return folder
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    model = cache / f"models--{source.folder.replace('/', '--')}"
    try:
        return model / "snapshots" / (model / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return folder


Stamp = tuple[tuple[int, int, int] | None, ...]


def files_stamp(source: ModelSource) -> Stamp:
    """Changes when a file that `load_model` reads does. Blocking: the folder may be on a network."""
    folder = folder_of(source)
    paths = [folder / name for name in _FILES]
    paths += [Path(path) for path in (source.template, source.engine_template) if path is not None]
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            known = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((known.st_ino, known.st_size, known.st_mtime_ns))
    return tuple(found)


def load_model(source: ModelSource, now: Callable[[], datetime], *, fast_wanted: bool = True) -> ModelFiles:
    """Blocking, 0.8–2.7 s for a large vocabulary. Raises TokenizerUnusable."""
    folder = folder_of(source)
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerUnusable(_no_tokenizer(folder))
    tokenizer = load_tokenizer(folder, fast_wanted=fast_wanted)
    warm_up(tokenizer)
    config = _read_config(folder)
    vocab, multimodal = _vocab_size(config, tokenizer), any(name in config for name in _OTHER_ENCODERS)
    try:
        text = _template_text(source, folder)
        return ModelFiles(tokenizer, ChatTemplate(text, tokenizer.specials, now), "", vocab, multimodal)
    except TemplateFailure as error:
        return ModelFiles(tokenizer, None, str(error), vocab, multimodal)


def _no_tokenizer(folder: Path) -> str:
    """Why there is no tokenizer.json, and what to do."""
    if not folder.is_dir():
        advice = "set tokenizer.path to a copy of the model's tokenizer files"
        if _HUB_NAME.fullmatch(str(folder)):
            return f"{folder} is no folder here and not in the Hugging Face cache; nothing is downloaded: {advice}"
        return f"there is no folder {folder} on this machine: {advice}"
    if any(folder.glob("*.tiktoken")) or (folder / "tokenizer.model").is_file():
        return f"no tokenizer.json in {folder}, only a tokenizer of another kind, which the router does not read"
    return f"no tokenizer.json in {folder}: is it the model's folder?"


def _vocab_size(config: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """A model's table of embeddings is often padded past its tokenizer's last id: those ids do no harm."""
    inner = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, inner) if isinstance(part, dict)]
    known = [size for size in (*sizes, tokenizer.vocab_size) if isinstance(size, int) and size > 0]
    return max(known, default=None)


def _template_text(source: ModelSource, folder: Path) -> str:
    """Raises TemplateFailure when the text the engine renders is not to be had here."""
    if source.template is not None:
        return _read(Path(source.template))
    if source.engine_template is not None:
        path = Path(source.engine_template)
        if path.suffix != ".jinja":
            raise TemplateFailure(f"the engine renders its own template {source.engine_template}")
        return _read(path).strip("\n").replace("\\n", "\n")  # as SGLang reads the file
    if architecture := _python_rendered(folder, source.engine):
        raise TemplateFailure(f"the engine renders {architecture} prompts without a template")
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    template = read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list) and template and isinstance(template[0], dict):
        if source.engine == "vllm" and len(template) > 1:
            raise TemplateFailure("vLLM picks one of several named chat templates for each request")
        template = template[0].get("template")  # SGLang takes the first of named templates
    if not isinstance(template, str):
        raise TemplateFailure(f"no chat template in {folder}")
    return template


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateFailure(f"cannot read the chat template {path}: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json; {} when it is absent or unreadable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _python_rendered(folder: Path, engine: str) -> str:
    """The architecture of config.json if it is one that bypasses Jinja."""
    names = _read_config(folder).get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    return first if any(known in first for known in _PYTHON_RENDERED.get(engine, ())) else ""
