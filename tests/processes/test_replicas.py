"""Processes and replicas together: two processes behind one address, a single router beside them, one engine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes.test_serving import announced
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, wait_until

PROMPT = list(range(10, 400))
ENGINE = (
    "from router.engine.options import EngineOptions; from router.engine.run import run_engine; "
    "run_engine(EngineOptions(port={port}, buffer_batches=1, model='tiny'))"
)
"""Its replay buffer reaches one batch back."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    port = free_ports(1)
    with process([sys.executable, "-c", ENGINE.format(port=port)], tmp_path / "engine.log"):
        wait_until(lambda: is_up(f"http://127.0.0.1:{port}/health"), 30, "the engine")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(folder: Path, engine: str, processes: int, own: int, other: int) -> Iterator[RouterProcess]:
    folder.mkdir()
    log, path = folder / "log", folder / "c.yaml"
    log.touch()
    config = {
        "processes": processes,
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0},
        "timeouts": {"drain_s": 0, "grace_s": 2},
        "workers": [{"url": engine}],
        "siblings": {"listen": f"tcp://127.0.0.1:{own}", "peers": [f"tcp://127.0.0.1:{other}"], "key": "k"},
    }
    path.write_text(yaml.safe_dump(config))
    with process([sys.executable, "-m", "router", "serve", "--config", str(path)], log):
        yield announced(log)


def rank(router: RouterProcess) -> dict[str, Any]:
    ranks = router.ranks()
    return ranks[0] if ranks else {}


def generate(router: RouterProcess, ids: list[int]) -> None:
    fetch(f"{router.base}/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})


def test_a_router_and_a_restarted_process_learn_what_the_replay_buffer_has_no_more(engine: str, tmp_path: Path) -> None:
    """case 113"""
    base = free_ports(2)
    turns = iter(range(3000))

    def knows_all(router: RouterProcess) -> bool:
        generate(pair, [next(turns) + 5] * 64)  # a stream that is at rest proves nothing
        found = rank(router)
        return found.get("state") == "live" and found["history"] == "complete"

    with ExitStack() as stack:
        pair = stack.enter_context(serving(tmp_path / "pair", engine, 2, base, base + 1))
        wait_until(lambda: rank(pair).get("state") == "live", 20, "the stream of both processes")
        for number in range(3):
            generate(pair, [*PROMPT, *[number + 5] * 40])
        alone = stack.enter_context(serving(tmp_path / "alone", engine, 1, base + 1, base))
        wait_until(lambda: len(fetch(f"{alone.admin}/workers")["siblings"]) == 2, 20, "both processes to be heard")
        wait_until(lambda: knows_all(alone), 30, "the blocks of the other router")
        assert rank(alone)["restored_from"] is not None
        decision = alone.route("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
        assert decision["candidates"][0]["cached_tokens"] == {"GPU": (len(PROMPT) - 1) // 16 * 16}
        os.kill(fetch(f"{pair.admin}/health")["processes"][0]["pid"], signal.SIGKILL)

        def is_back() -> bool:
            processes = fetch(f"{pair.admin}/health")["processes"]
            return [(one["state"], one["restarts"]) for one in processes] == [("serving", 1), ("serving", 0)]

        wait_until(is_back, 30, "the process to serve again")
        wait_until(lambda: knows_all(pair), 30, "the blocks of its sibling in the new process")
