"""`kv-router serve` as a process: signals, start-up errors, the announcement."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import Overrides
from router.config.load import build_config
from router.service import Service
from router.stream.pump import running_pump
from tests.support.process import RouterProcess, fetch, is_up, process, wait_until

SERVE = [sys.executable, "-m", "router", "serve", "--config"]


def settings(**more: Any) -> dict[str, Any]:
    listeners = {"listen": {"host": "127.0.0.1", "port": 0}, "admin": {"host": "127.0.0.1", "port": 0}}
    return {**listeners, "timeouts": {"drain_s": 0.5, "grace_s": 2}, **more}


def write(path: Path, **more: Any) -> Path:
    path.write_text(yaml.safe_dump(settings(**more)))
    return path


def announced(log: Path) -> RouterProcess:
    """Where the listeners are, from the first line the process printed."""

    def line() -> dict[str, str] | None:
        found = [text for text in log.read_text().splitlines() if text.startswith('{"listen"')]
        where: dict[str, str] | None = json.loads(found[0]) if found else None
        return where

    where = wait_until(line, 20, "the announcement")
    assert where is not None
    made = RouterProcess(0, 0)
    made.base, made.admin = where["listen"], where["admin"]
    return made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "router.log"
    path.touch()
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(number: signal.Signals, tmp_path: Path, log: Path) -> None:
    """case 94"""
    with process([*SERVE, str(write(tmp_path / "c.yaml"))], log) as running:
        router = announced(log)
        assert is_up(f"{router.base}/health")
        running.send_signal(number)
        assert running.wait(10) == 0
    assert "Traceback" not in log.read_text()


def test_readiness_fails_before_the_listener_closes(tmp_path: Path, log: Path) -> None:
    """case 94: still answering, but no longer ready, while the drain delay lasts"""
    with process([*SERVE, str(write(tmp_path / "c.yaml", timeouts={"drain_s": 30, "grace_s": 1}))], log) as running:
        router = announced(log)
        running.terminate()
        wait_until(lambda: "stopping" in log.read_text(), 10, "the drain to begin")
        assert is_up(f"{router.base}/health")
        assert not is_up(f"{router.base}/ready")
        running.terminate()  # a second signal cuts it short
        assert running.wait(10) == 0


def test_sighup_re_reads_workers_and_keeps_the_rest_when_the_file_is_wrong(tmp_path: Path, log: Path) -> None:
    path = write(tmp_path / "c.yaml", workers=[{"url": "http://127.0.0.1:9"}])
    with process([*SERVE, str(path)], log) as running:
        router = announced(log)

        def urls() -> list[str]:
            return [worker["url"] for worker in fetch(f"{router.admin}/workers")["workers"]]

        assert urls() == ["http://127.0.0.1:9"]
        write(path, workers=[{"url": "http://127.0.0.1:10"}])
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: urls() == ["http://127.0.0.1:10"], 10, "the new worker list")
        write(path, wrokers=[])
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: "did you mean workers" in log.read_text(), 10, "the refusal in the log")
        assert urls() == ["http://127.0.0.1:10"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker_api_keys: x", "worker_api_key"),
        ("workers: [{url: 'ftp://engine'}]", "workers[0].url"),
        ("listen: {port: eighty}", "listen.port"),
        ("workers: [", "line 1"),
        ("policy: {name: best}", "round_robin"),
        ("worker_tls: {ca: c.yaml}", "worker_tls.ca: cannot load"),
    ],
)
def test_a_bad_configuration_ends_with_a_message_that_names_the_key(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    ended = subprocess.run([*SERVE, str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("listener", ["listen", "admin"])
def test_an_address_in_use_is_said_plainly(listener: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = write(tmp_path / "c.yaml", **{listener: {"host": "127.0.0.1", "port": port}})
        ended = subprocess.run([*SERVE, str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert f"{listener}: cannot bind 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_worker_given_on_the_command_line_is_enough(log: Path) -> None:
    command = [sys.executable, "-m", "router", "serve", "--worker", "http://127.0.0.1:9", "--host", "127.0.0.1"]
    with process([*command, "--port", "0", "--admin-port", "0"], log, PYTHONPATH=os.getcwd()):
        router = announced(log)
        assert [worker["url"] for worker in fetch(f"{router.admin}/workers")["workers"]] == ["http://127.0.0.1:9"]


async def test_what_is_held_for_clients_and_workers_does_not_wait_for_a_burst_of_events() -> None:
    service = Service(build_config(settings(), Overrides(), {}, Path()))
    await service.start()
    assert service._upstream.turn.flush in running_pump().before
    await service.stop(0.0)
    assert not running_pump().before


async def test_a_step_of_stopping_that_fails_keeps_none_of_the_others_from_being_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(build_config(settings(), Overrides(), {}, Path()))
    await service.start()
    port = service.listener.port

    async def fails() -> None:
        raise RuntimeError("a discovery that cannot be closed")

    monkeypatch.setattr(service._discovery, "close", fails)
    await service.stop(0.0)
    assert service._session.closed
    assert service._context.closed
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
