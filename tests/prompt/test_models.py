from __future__ import annotations

import asyncio
import json
import shutil
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from router.prompt.models import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    MAX_MODELS,
    ModelFiles,
    ModelSource,
    ModelStore,
    load_model,
)
from router.prompt.tokenizer import TokenizerUnusable
from tests.prompt.support import TINY, tiny

SOURCE = ModelSource(str(TINY))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def copied(tmp_path: Path, **files: str | dict[str, Any]) -> Path:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


def loaded(folder: Path, **where: Any) -> ModelFiles:
    return load_model(ModelSource(str(folder), **where), datetime.now)


async def test_many_requests_cause_one_load() -> None:
    """case 44: single-flight."""
    calls = []
    release = threading.Event()

    def load(source: ModelSource) -> ModelFiles:
        calls.append(source)
        release.wait(5)
        return tiny()

    store = ModelStore(load)
    assert [store.get(SOURCE) for _ in range(10)] == [None] * 10
    assert store.problem(SOURCE) == "loading"
    waiting = [asyncio.create_task(store.wait(SOURCE)) for _ in range(3)]
    release.set()
    assert await asyncio.gather(*waiting) == [tiny()] * 3
    assert (calls, store.get(SOURCE), store.problem(SOURCE)) == ([SOURCE], tiny(), "")
    assert store.loaded() == {str(TINY): tiny().tokenizer.backend}
    await store.close()


async def test_a_failed_load_waits_longer_each_time_before_it_is_tried_again() -> None:
    """case 44: failures cached with back-off."""
    calls = 0

    def load(source: ModelSource) -> ModelFiles:
        nonlocal calls
        calls += 1
        raise TokenizerUnusable("the hub is unreachable")

    clock = Clock()
    store = ModelStore(load, clock=clock)
    pause_s = FIRST_RETRY_S
    for attempt in range(1, 10):
        assert await store.wait(SOURCE) is None
        assert (calls, store.problem(SOURCE)) == (attempt, "the hub is unreachable")
        clock.now_s += pause_s - 0.01
        assert await store.wait(SOURCE) is None
        assert calls == attempt
        clock.now_s += 0.02
        pause_s = min(2 * pause_s, LAST_RETRY_S)
    await store.close()


async def test_models_are_kept_apart_and_bounded() -> None:
    """case 43"""
    store = ModelStore(lambda source: tiny())
    for number in range(MAX_MODELS):
        assert await store.wait(ModelSource(f"/models/{number}")) is tiny()
    extra = ModelSource("/models/extra")
    assert await store.wait(extra) is None
    assert "over" in store.problem(extra)
    await store.close()


async def test_closing_while_a_load_runs_leaves_nothing_behind() -> None:
    release = threading.Event()

    def load(source: ModelSource) -> ModelFiles:
        release.wait(5)
        return tiny()

    store = ModelStore(load)
    store.get(SOURCE)
    closing = asyncio.create_task(store.close())
    release.set()
    await closing


def test_no_folder_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json"):
        loaded(tmp_path)


def test_the_template_file_beats_the_configuration(tmp_path: Path) -> None:
    folder = copied(tmp_path, tokenizer_config__json={"chat_template": "config"})
    template = loaded(folder).template
    assert template is not None
    assert template.source == "config"
    (folder / "chat_template.jinja").write_text("file")
    template = loaded(folder).template
    assert template is not None
    assert template.source == "file"


def test_the_first_of_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    folder = copied(tmp_path, tokenizer_config__json={"chat_template": named})
    template = loaded(folder).template
    assert template is not None
    assert template.source == "first"
    assert "named" in loaded(folder, engine="vllm").template_problem


def test_the_operators_template_beats_the_engines_and_both_beat_the_folder(tmp_path: Path) -> None:
    own, engines = tmp_path / "own.jinja", tmp_path / "engine.jinja"
    own.write_text("own")
    engines.write_text("\nline\\nbreak\n")
    template = loaded(TINY, template=str(own), engine_template=str(engines)).template
    assert template is not None
    assert template.source == "own"
    template = loaded(TINY, engine_template=str(engines)).template
    assert template is not None
    assert template.source == "line\nbreak"


@pytest.mark.parametrize("engine_template", ["llama-2", "/nowhere/else.jinja"])
def test_an_engine_template_that_is_not_here_leaves_chat_to_the_engine(engine_template: str) -> None:
    """case 37: never the folder's template in its place."""
    files = loaded(TINY, engine_template=engine_template)
    assert files.template is None
    assert engine_template in files.template_problem


@pytest.mark.parametrize(
    ("engine", "architecture"), [("sglang", "DeepseekV4ForCausalLM"), ("vllm", "GptOssForCausalLM")]
)
def test_architectures_rendered_in_python_leave_chat_to_the_engine(
    tmp_path: Path, engine: str, architecture: str
) -> None:
    folder = copied(
        tmp_path, tokenizer_config__json={"chat_template": "x"}, config__json={"architectures": [architecture]}
    )
    assert loaded(folder, engine=engine).template is None
    assert loaded(folder).template is not None


def test_a_broken_or_missing_template_costs_only_chat(tmp_path: Path) -> None:
    files = loaded(copied(tmp_path, chat_template__jinja="{% if %}"))
    assert files.template is None
    assert "does not compile" in files.template_problem
    (tmp_path / "chat_template.jinja").unlink()
    files = loaded(tmp_path)
    assert "no chat template" in files.template_problem
    assert files.tokenizer.encode("x", False)
