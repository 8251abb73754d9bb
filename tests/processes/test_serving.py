"""`kv-router serve --processes 2` as processes: one port, one view, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from router.processes.front import READ_TIMEOUT_S
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, wait_until

COUNT = 2


def announced(log: Path) -> RouterProcess:
    def line() -> dict[str, str] | None:
        found = [text for text in log.read_text().splitlines() if text.startswith('{"listen"')]
        return json.loads(found[0]) if found else None

    where = wait_until(line, 40, "the announcement")
    assert where is not None
    made = RouterProcess(0, 0)
    made.base, made.admin = where["listen"], where["admin"]
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_ports(4)
    command = [sys.executable, "-m", "router", "engine", "--port", str(port), "--kv-port", str(port + 1)]
    command += ["--replay-port", str(port + 2), "--load-port", str(port + 3), "--model", "tiny", "--decode-ms", "20"]
    with process(command, tmp_path_factory.mktemp("engine") / "log"):
        wait_until(lambda: is_up(f"http://127.0.0.1:{port}/health"), 20, "the engine")
        yield f"http://127.0.0.1:{port}"


class Running:
    """A started supervisor and where its listeners are."""

    def __init__(self, supervisor: subprocess.Popen[bytes], router: RouterProcess, log: Path, config: Path) -> None:
        self.supervisor = supervisor
        self.router = router
        self.log = log
        self.config = config

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = fetch(f"{self.router.admin}/health")["processes"]
        return found

    def pids(self) -> list[int]:
        return [one["pid"] for one in self.processes()]

    def serving(self) -> bool:
        return [one["state"] for one in self.processes()] == ["serving"] * COUNT

    def live(self) -> bool:
        ranks = self.router.ranks()
        return bool(ranks) and all(rank["state"] == "live" for rank in ranks)


@pytest.fixture
def running(engine: str, tmp_path: Path) -> Iterator[Running]:
    log, path = tmp_path / "router.log", tmp_path / "router.yaml"
    config = {
        "processes": COUNT,
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0},
        "timeouts": {"drain_s": 0, "grace_s": 5},
        "workers": [{"url": engine}],
        "fleet": {"probe_interval_s": 0.5},
    }
    path.write_text(yaml.safe_dump(config))
    log.touch()
    with process([sys.executable, "-m", "router", "serve", "--config", str(path)], log) as supervisor:
        made = Running(supervisor, announced(log), log, path)
        wait_until(lambda: is_up(f"{made.router.admin}/ready"), 20, "every process ready")
        wait_until(made.live, 20, "the stream live in every process")
        yield made


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def complete(session: aiohttp.ClientSession, base: str, tokens: int = 2, **more: Any) -> str:
    """ok, or what went wrong."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, **more}
    try:
        async with session.post(f"{base}/v1/completions", json=body) as answer:
            text = await answer.text()
            return "ok" if answer.status == 200 and (not more or "[DONE]" in text) else f"{answer.status} {text[:200]}"
    except aiohttp.ClientError as error:
        return type(error).__name__


async def many(base: str, count: int, connections: int) -> list[str]:
    connector = aiohttp.TCPConnector(limit=connections, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return list(await asyncio.gather(*(complete(session, base) for _ in range(count))))


def requests_total(page: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith("kv_router_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if '"/v1/completions"' in line)


def test_both_processes_serve_one_port_and_are_one_router_to_the_operator(running: Running) -> None:
    router = running.router
    assert asyncio.run(many(router.base, 200, 50)) == ["ok"] * 200
    assert requests_total(router.metrics()) == 200
    with urllib.request.urlopen(f"{router.base}/metrics", timeout=10) as answer:
        assert requests_total(answer.read().decode()) == 200, "the public page is of all processes as well"
    (worker,) = router.workers()
    assert worker["ranks"][0]["inflight_requests"] == 0
    served = [one["requests"] for one in fetch(f"{router.admin}/workers")["processes"]]
    assert sum(served) == 200
    assert min(served) > 40, "the kernel spreads connections evenly, not exactly"
    page = router.metrics()
    assert 'kv_router_process_up{process="1"} 1' in page
    assert "\nkv_router_siblings 1.0\n" in page
    shares = [
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith("kv_router_rank_requests_t")
    ]
    assert shares == [200]
    decision = router.route("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7]})
    assert decision["worker"] == worker["url"]
    assert fetch(f"{router.admin}/config")["processes"] == COUNT
    with pytest.raises(urllib.error.HTTPError) as missing:
        fetch(f"{router.admin}/nothing")
    assert missing.value.code == 404


def test_a_killed_process_costs_its_own_requests_only_and_is_back_within_seconds(running: Running) -> None:
    router, (doomed, survivor) = running.router, running.pids()

    async def under_load() -> tuple[list[str], list[str]]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = [asyncio.create_task(complete(session, router.base, 50, stream=True)) for _ in range(40)]

            def inflight() -> int:
                return int(router.ranks()[0]["inflight_requests"])

            await asyncio.to_thread(wait_until, lambda: inflight() == 40, 10, "every stream under way")
            os.kill(doomed, signal.SIGKILL)
            # A connection that the kernel still gave to the dying process breaks like those it was serving.
            await asyncio.to_thread(wait_until, lambda: not is_alive(doomed), 10, "the process to be gone")
            during = [await complete(session, router.base) for _ in range(20)]
            return list(await asyncio.gather(*streams)), during

    before = requests_total(router.metrics())
    streams, during = asyncio.run(under_load())
    assert set(streams) <= {"ok", "ServerDisconnectedError", "ClientPayloadError", "ClientOSError"}
    assert 0 < streams.count("ok") < 40, "only the killed process's streams broke"
    assert during == ["ok"] * 20
    wait_until(running.serving, 15, "the process to serve again")
    pids = running.pids()
    assert pids[1] == survivor
    assert pids[0] not in (doomed, survivor)
    page = router.metrics()
    assert 'kv_router_process_restarts_total{process="0"} 1' in page
    assert requests_total(page) >= before + 20
    wait_until(running.live, 10, "the new process's stream")


def test_what_was_changed_by_hand_holds_in_a_process_that_is_started_again(running: Running) -> None:
    router = running.router
    added = "http://127.0.0.1:9"
    assert fetch(f"{router.admin}/workers", {"url": added}) == {"url": added, "state": "starting"}
    (first,) = [worker["url"] for worker in router.workers() if worker["url"] != added]
    request = urllib.request.Request(f"{router.admin}/workers?url={first}", method="DELETE")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    os.kill(running.pids()[0], signal.SIGKILL)
    wait_until(lambda: running.processes()[0]["restarts"] == 1 and running.serving(), 25, "the new process")
    workers = router.workers()
    assert [worker["url"] for worker in workers] == [added]
    assert "only in" not in workers[0]["reason"]


def test_a_process_that_hangs_keeps_nobody_waiting_for_what_the_other_says(running: Running) -> None:
    hanging = running.pids()[0]
    os.kill(hanging, signal.SIGSTOP)
    try:
        for path in ("/workers", "/ready"):
            with urllib.request.urlopen(running.router.admin + path, timeout=READ_TIMEOUT_S + 2) as answer:
                assert answer.status == 200
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_sigterm_ends_all_and_leaves_nothing_behind(running: Running) -> None:
    """case 94"""
    pids = running.pids()
    running.supervisor.terminate()
    assert running.supervisor.wait(15) == 0
    assert not any(map(is_alive, pids))
    log = running.log.read_text()
    assert "Traceback" not in log
    assert "Fatal" not in log


def test_processes_do_not_outlive_a_killed_supervisor(running: Running) -> None:
    pids = running.pids()
    running.supervisor.kill()
    running.supervisor.wait(5)
    wait_until(lambda: not any(map(is_alive, pids)), 10, "the processes to end")


def test_sighup_is_passed_on(running: Running) -> None:
    config = yaml.safe_load(running.config.read_text())
    running.config.write_text(yaml.safe_dump({**config, "workers": [{"url": "http://127.0.0.1:9"}]}))
    running.supervisor.send_signal(signal.SIGHUP)

    def only_the_new_one() -> bool:
        workers = running.router.workers()
        return [w["url"] for w in workers] == ["http://127.0.0.1:9"] and "only in" not in workers[0]["reason"]

    wait_until(only_the_new_one, 10, "the new list in both")


def test_the_live_page_shows_requests_of_both_processes(running: Running) -> None:
    async def watched() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{running.router.admin}/ui/events") as page:
            await page.content.readuntil(b"\n\n")
            await many(running.router.base, 60, 30)
            while True:
                event = await page.content.readuntil(b"\n\n")
                message: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
                if message["finished"] == 60:
                    return message

    message = asyncio.run(asyncio.wait_for(watched(), 20))
    assert [worker["state"] for worker in message["workers"]] == ["ready"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"listen": {"host": "127.0.0.1", "tls": {"cert": "c.yaml", "key": "c.yaml"}}}, "listen.tls: cannot load"),
        ({"siblings": {"snapshots": False, "dns": "x"}}, "siblings.listen"),
    ],
)
def test_what_keeps_a_process_from_starting_ends_the_command(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"processes": 2, "admin": {"port": 0}, "listen": {"port": 0}, **settings}))
    command = [sys.executable, "-m", "router", "serve", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_routers_do_not_share_a_port_unnoticed(running: Running, tmp_path: Path) -> None:
    port = int(running.router.base.rpartition(":")[2])
    command = [sys.executable, "-m", "router", "serve", "--worker", "http://127.0.0.1:9", "--processes", "2"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--admin-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"listen: cannot bind 127.0.0.1:{port}" in ended.stderr
