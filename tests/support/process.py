"""Starting the router (or an engine) as the operator does: a process, a port, a log."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive free loopback ports below the ephemeral range."""
    for base in range(15_000 + os.getpid() % 7_000, 32_000, max(count, 1) + 3):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports")


def wait_until(seen: Callable[[], T], timeout_s: float, what: str) -> T:
    """Polls until `seen` is true and returns its value; fails saying what was last seen."""
    deadline, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        try:
            last = seen()
            if last:
                return last
        except OSError as error:
            last = error  # type: ignore[assignment]
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen {last!r}")


def fetch(url: str, body: object | None = None, timeout_s: float = 10.0) -> Any:
    """GET, or POST of a JSON body; the decoded JSON answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.loads(answer.read() or b"null")


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command with its output in `log`, and ends it (by pid) afterwards."""
    with log.open("wb") as out:
        running = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
        )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(5)


class RouterProcess:
    """A running `kv-router serve`: public port, admin port."""

    def __init__(self, port: int, admin_port: int, pid: int = 0) -> None:
        self.pid = pid
        self.base = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin_port}"

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = fetch(f"{self.admin}/workers")["workers"]
        return workers

    def ranks(self) -> list[dict[str, Any]]:
        return [rank for worker in self.workers() for rank in worker["ranks"]]

    def route(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = fetch(f"{self.admin}/route", {"path": path, "body": body})
        return answer

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text


@contextlib.contextmanager
def router(folder: Path, workers: Sequence[str | dict[str, Any]], **settings: Any) -> Iterator[RouterProcess]:
    """`kv-router serve` of this checkout over the given workers (URLs or entries of `workers`), up to its /health."""
    port = free_ports(2)
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"host": "127.0.0.1", "port": port + 1, "expose_routing_headers": True},
        "workers": [{"url": one} if isinstance(one, str) else one for one in workers],
        **settings,
    }
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(config))
    with process([sys.executable, "-m", "router", "serve", "--config", str(path)], folder / "router.log") as running:
        made = RouterProcess(port, port + 1, running.pid)

        def up() -> bool:
            assert running.poll() is None, (folder / "router.log").read_text()[-2000:]
            return is_up(f"{made.base}/health")

        wait_until(up, 20, "the router's /health")
        yield made
