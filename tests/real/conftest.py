"""Real SGLang servers, started once a session with the scripts of shared/engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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


@pytest.fixture(scope="session")
def sglang_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two real SGLang servers: page 16 with one rank, page 64 with two data-parallel ranks."""
    if running := os.environ.get("KV_ROUTER_SGLANG_URLS"):
        yield running.split(",")
        return
    venv, model = setting("KV_ROUTER_SGLANG_VENV"), setting("KV_ROUTER_TINY_MODEL")
    script, folder = str(scripts() / "start_sglang_cpu.sh"), tmp_path_factory.mktemp("sglang")
    http, kv = free_ports(2), free_ports(60) + 2
    with ExitStack() as stack:
        stack.enter_context(process(["bash", script, venv, model, str(http), str(kv), "16"], folder / "one.log"))
        stack.enter_context(
            process(
                ["bash", script, venv, model, str(http + 1), str(kv + 30), "64", "--dp-size", "2"],
                folder / "two.log",
                DP="2",
            )
        )
        urls = [f"http://127.0.0.1:{http}", f"http://127.0.0.1:{http + 1}"]
        for url in urls:
            wait_until(lambda url=url: is_up(f"{url}/health"), START_LIMIT_S, f"{url}/health")  # type: ignore[misc]
        yield urls
