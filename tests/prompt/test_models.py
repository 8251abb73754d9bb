from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from router.prompt.models import ModelFiles, ModelSource, files_stamp, load_model
from router.prompt.tokenizer import TokenizerUnusable
from tests.prompt.support import TINY


def copied(tmp_path: Path, **files: str | dict[str, Any]) -> Path:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


def loaded(folder: Path, **where: Any) -> ModelFiles:
    return load_model(ModelSource(str(folder), **where), datetime.now)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("", r"no tokenizer\.json in .*: is it the model's folder"),
        ("gone", "there is no folder .*: set tokenizer.path"),
        (
            "Qwen/Qwen3-0.6B",
            "is no folder here and not in the Hugging Face cache; nothing is downloaded: set tokenizer.path",
        ),
    ],
)
def test_no_folder_no_tokenizer_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TokenizerUnusable, match=said):
        loaded(Path(folder) if "/" in folder else tmp_path / folder)


def test_a_hub_name_means_the_caches_copy_of_its_main_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = tmp_path / "hub" / "models--some--tiny"
    for revision in ("old", "new"):
        (model / "snapshots" / revision).mkdir(parents=True)
        copied(model / "snapshots" / revision, chat_template__jinja=revision)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("old\n")
    source = ModelSource("some/tiny")
    template, before = loaded(Path("some/tiny")).template, files_stamp(source)
    assert template is not None
    assert template.source == "old"
    (model / "refs" / "main").write_text("new")
    assert files_stamp(source) != before


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerUnusable, match="of another kind"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "own"]
)
def test_every_file_that_is_read_counts_for_the_stamp(tmp_path: Path, name: str) -> None:
    source = ModelSource(str(tmp_path), template=str(tmp_path / "own"))
    before = files_stamp(source)
    (tmp_path / name).write_text("{}")
    there = files_stamp(source)
    (tmp_path / name).write_text("{ }")
    assert len({before, there, files_stamp(source)}) == 3


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
