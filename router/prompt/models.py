"""The tokenizer and chat template of each model: loaded once, off the event loop; a failed load waits for its retry."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from router.contract.server_info import ServerInfo
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import Tokenizer, TokenizerUnusable, load_tokenizer, read_tokenizer_config, warm_up

MAX_MODELS = 64  # loaded folders; a fleet of more models asks its engines for the rest
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0

# Architectures whose prompts an engine builds in Python, whatever the template says (contract 6.6).
_PYTHON_RENDERED = {
    "sglang": ("DeepseekV4", "KimiK3", "InklingForConditionalGeneration"),
    "vllm": ("DeepseekV32", "DeepseekV4", "KimiK3", "Inkling", "GptOss"),
}


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
        return cls(
            engine=info.engine,
            version=info.version,
            names=tuple(name for name in info.model_names if name not in info.adapters),
            tokenizer_path=info.tokenizer_path or info.model_path,
            chat_template=info.chat_template,
            default_kwargs=info.default_chat_template_kwargs,
            adapters=info.adapters,
        )


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


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where one model's files are: a folder, the operator's template file, the engine's --chat-template."""

    folder: str
    engine: str = "unknown"
    template: str | None = None
    engine_template: str | None = None


def load_model(source: ModelSource, now: Callable[[], datetime]) -> ModelFiles:
    """Blocking, 0.8–2.7 s for a large vocabulary. Raises TokenizerUnusable."""
    folder = Path(source.folder)
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerUnusable(f"no tokenizer.json in {folder}")
    tokenizer = load_tokenizer(folder)
    warm_up(tokenizer)
    config = _read_config(folder)
    vocab, multimodal = _vocab_size(config, tokenizer), any(name in config for name in _OTHER_ENCODERS)
    try:
        text = _template_text(source, folder)
        return ModelFiles(tokenizer, ChatTemplate(text, tokenizer.specials, now), "", vocab, multimodal)
    except TemplateFailure as error:
        return ModelFiles(tokenizer, None, str(error), vocab, multimodal)


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


@dataclass(slots=True)
class _Entry:
    files: ModelFiles | None = None
    problem: str = "loading"
    loading: asyncio.Task[None] | None = None
    failures: int = 0
    retry_at_s: float = 0.0


class ModelStore:
    """Loaded models by source. `get` never waits; the first call for a source starts its one load (case 44)."""

    def __init__(
        self,
        load: Callable[[ModelSource], ModelFiles] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._load = load or functools.partial(load_model, now=now)
        self._clock = clock
        self._entries: dict[ModelSource, _Entry] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-load")

    def get(self, source: ModelSource) -> ModelFiles | None:
        """The model's files, or None while they load, failed to, or there are too many models; `problem` says which."""
        entry = self._entries.get(source)
        if entry is None:
            if len(self._entries) >= MAX_MODELS:
                return None
            entry = self._entries[source] = _Entry()
        if entry.files is None and entry.loading is None and self._clock() >= entry.retry_at_s:
            entry.loading = asyncio.get_running_loop().create_task(self._fill(source, entry))
        return entry.files

    async def wait(self, source: ModelSource) -> ModelFiles | None:
        """As `get`, once the load in progress is over."""
        files = self.get(source)
        entry = self._entries.get(source)
        if entry is not None and entry.loading is not None:
            await asyncio.shield(entry.loading)
            return entry.files
        return files

    def problem(self, source: ModelSource) -> str:
        """Why `get` gave None: "loading", or the failure in words."""
        entry = self._entries.get(source)
        return entry.problem if entry is not None else f"over {MAX_MODELS} models"

    def loaded(self) -> dict[str, str]:
        """Folder → the backend that serves it, or what is wrong with it."""
        return {s.folder: e.files.tokenizer.backend if e.files else e.problem for s, e in self._entries.items()}

    async def _fill(self, source: ModelSource, entry: _Entry) -> None:
        try:
            entry.files = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, source)
            entry.problem = entry.files.template_problem
        except Exception as error:  # a damaged file raises whatever its parser raises; none may kill routing
            entry.failures += 1
            entry.problem = str(error) or type(error).__name__
            entry.retry_at_s = self._clock() + min(FIRST_RETRY_S * 2 ** (entry.failures - 1), LAST_RETRY_S)
        finally:
            entry.loading = None

    async def close(self) -> None:
        loads = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
