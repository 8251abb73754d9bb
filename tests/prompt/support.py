"""The tiny tokenizer's folder, bodies, and the recorded prompts of real engines (shared/captures/prompts)."""

from __future__ import annotations

import functools
import json
import lzma
from datetime import datetime
from pathlib import Path
from typing import Any

from router.prompt.body import RequestBody, parse_body
from router.prompt.models import ModelFacts, ModelFiles, ModelSource, load_model

ROOT = Path(__file__).parents[2]
TINY = ROOT / "router" / "engine" / "data" / "tiny"
SHARED = ROOT.parent / "shared"
SLICE = ROOT / "tests" / "data" / "prompts.jsonl.xz"

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"

FACTS = ModelFacts(engine="sglang", names=("tiny",), tokenizer_path=str(TINY))


def body(path: str, **fields: Any) -> RequestBody:
    return parse_body(path, json.dumps({"model": "tiny", **fields}).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> RequestBody:
    return body(CHAT, messages=list(messages) or [{"role": "user", "content": "hi"}], **fields)


def user(content: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


@functools.cache
def tiny() -> ModelFiles:
    return load_model(ModelSource(str(TINY)), datetime.now)


def lines(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
