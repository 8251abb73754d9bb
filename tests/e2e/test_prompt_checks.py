"""Prompts made here compared with a running (simulated) engine's own tokenizer, through the whole router."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.engine.options import TINY_MODEL
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, router, wait_until

OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if tools %}!{% endif %}[assistant] "
)
ASK = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "What is the time in Lisbon now?"}]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    http, kv = free_ports(1), free_ports(40) + 5
    command = [sys.executable, "-m", "router", "engine", "--port", str(http), "--kv-port", str(kv)]
    with process(command, tmp_path_factory.mktemp("engine") / "log"):
        url = f"http://127.0.0.1:{http}"
        wait_until(lambda: is_up(f"{url}/health"), 20, url)
        yield url


def ask(running: RouterProcess, **more: Any) -> Any:
    return fetch(f"{running.base}/v1/chat/completions", {**ASK, **more})


def counter(running: RouterProcess, name: str) -> float:
    lines = [line for line in running.metrics().splitlines() if line.startswith(f"kv_router_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def loaded(running: RouterProcess) -> bool:
    prompts = fetch(f"{running.admin}/workers")["prompts"]
    return [p["tokenizer"] for p in prompts] not in ([], [None]) and running.workers()[0]["state"] == "ready"


def test_a_template_that_is_not_the_engines_is_named(engine: str, tmp_path: Path) -> None:
    """The drift no store and no look-up shows: every one applies cleanly and every prompt misses."""
    (tmp_path / "other.jinja").write_text(OTHER_TEMPLATE)
    settings = {"path": str(TINY_MODEL), "chat_template": str(tmp_path / "other.jinja")}
    with router(tmp_path, [engine], tokenizer=settings) as running:
        wait_until(lambda: loaded(running), 20, "tokenizer loaded")
        ask(running)
        (drift,) = wait_until(lambda: running.workers()[0]["drift"], 10, "the drift is named")
        assert drift["kind"] == "prompt"
        assert "Lisbon" not in str(drift)
        assert 'kind="prompt"' in running.metrics()
        assert running.route("/v1/chat/completions", ASK)["ids_source"] == "engine"
        assert "Lisbon" not in (tmp_path / "router.log").read_text()


def test_verified_chats_are_forwarded_with_their_ids_and_served_alike(engine: str, tmp_path: Path) -> None:
    settings = {"path": str(TINY_MODEL), "forward_ids": True}
    with router(tmp_path, [engine], tokenizer=settings) as running:
        wait_until(lambda: loaded(running), 20, "tokenizer loaded")
        first = ask(running)
        wait_until(lambda: (ask(running), counter(running, "forwarded_prompts_total"))[1], 10, "forwarding begins")
        later = ask(running)
        assert later["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
        assert running.workers()[0]["drift"] == []
        (prompts,) = fetch(f"{running.admin}/workers")["prompts"]
        assert [f["standing"] for f in prompts["features"]] == ["verified"]
        assert counter(running, 'prompt_checks_total{outcome="equal"}') == 3


def test_ids_outside_the_vocabulary_never_reach_the_engine(engine: str, tmp_path: Path) -> None:
    """case 48"""
    with router(tmp_path, [engine], tokenizer={"path": str(TINY_MODEL)}) as running:
        wait_until(lambda: loaded(running), 20, "tokenizer loaded")
        with pytest.raises(OSError, match="400"):
            fetch(f"{running.base}/v1/completions", {"model": "tiny", "prompt": [1, 2, 2**31], "max_tokens": 1})
