"""Real SGLang servers, started once a session with the scripts of shared/engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfile

import pytest

from tests.support.process import free_ports, is_up, process, wait_until

START_LIMIT_S = float(os.environ.get("KV_ROUTER_START_LIMIT_S", "240"))


def setting(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set (tests/real/README.md)")
    return value


def scripts() -> Path:
    return Path(os.environ.get("KV_ROUTER_ENGINE_SCRIPTS", "../shared/engines")).resolve()


@contextmanager
def started_pair(folder: Path, model: str, *flags: str, **environment: str) -> Iterator[list[str]]:
    """URLs of two real SGLang servers: page 16 with one rank, page 64 with two data-parallel ranks."""
    venv, script = setting("KV_ROUTER_SGLANG_VENV"), str(scripts() / "start_sglang_cpu.sh")
    http, kv = free_ports(2), free_ports(60) + 2
    with ExitStack() as stack:
        command = ["bash", script, venv, model, str(http), str(kv), "16", *flags]
        stack.enter_context(process(command, folder / "one.log", **environment))
        command = ["bash", script, venv, model, str(http + 1), str(kv + 30), "64", "--dp-size", "2", *flags]
        stack.enter_context(process(command, folder / "two.log", DP="2", **environment))
        urls = [f"http://127.0.0.1:{http}", f"http://127.0.0.1:{http + 1}"]
        for url in urls:
            wait_until(lambda url=url: is_up(f"{url}/health"), START_LIMIT_S, f"{url}/health")  # type: ignore[misc]
        yield urls


@pytest.fixture(scope="session")
def sglang_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """`started_pair` of the tiny model."""
    if running := os.environ.get("KV_ROUTER_SGLANG_URLS"):
        yield running.split(",")
        return
    with started_pair(tmp_path_factory.mktemp("sglang"), setting("KV_ROUTER_TINY_MODEL")) as urls:
        yield urls


@pytest.fixture(scope="session")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """`started_pair` of a model whose prefill takes time, for prompts of up to 16k tokens."""
    if running := os.environ.get("KV_ROUTER_SGLANG_LONG_URLS"):
        yield running.split(",")
        return
    folder, model = tmp_path_factory.mktemp("sglang-long"), tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copyfile(Path(setting("KV_ROUTER_TINY_MODEL")) / name, model / name)
    script = str(Path(__file__).with_name("make_model.py"))
    python = f"{setting('KV_ROUTER_SGLANG_VENV')}/bin/python"
    with process([python, script, str(model), "384", "3072", "4"], model / "make.log", HF_HUB_OFFLINE="1") as made:
        assert made.wait(START_LIMIT_S) == 0, (model / "make.log").read_text()
    with started_pair(folder, str(model), "--context-length", "16384", POOL_TOKENS="60000") as urls:
        yield urls
