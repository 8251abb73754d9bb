"""deploy/compose and the Dockerfile: that what they name exists and does what they want of it. The image itself can be
built only where there are containers (deploy/README.md says how it was)."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import __version__
from router.cli import main
from router.config import load_config
from tests.deploy.conftest import DEPLOY
from tests.support.process import free_ports, is_up, process, router, wait_until

COMPOSE = DEPLOY / "compose"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def health_command() -> list[str]:
    match = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert match is not None
    command: list[str] = ast.literal_eval(match[1])
    return command


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [mount for service in services().values() for mount in service.get("volumes", [])]
    assert len(mounts) >= 6
    for mount in mounts:
        source, _, mode = mount.split(":")
        assert (COMPOSE / source).exists(), source
        assert mode == "ro"


def test_the_router_follows_the_engines_by_the_services_name_and_port() -> None:
    config = load_config(COMPOSE / "router.yaml", env={})
    assert config.discovery.dns is not None
    assert config.discovery.dns.names == ("engine",)
    words = shlex.split(services()["engine"]["command"])
    assert config.discovery.dns.ports == (int(words[words.index("--port") + 1]),)
    scrape = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"router:{config.listen.port}"]


def test_the_admin_listener_and_the_dashboards_are_for_this_machine_alone() -> None:
    """Case 101."""
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["8080:8080"]


def test_the_engine_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(services()["engine"]["command"])
    assert words[0] == "engine"
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in text] == []


def test_the_users_are_served_through_the_router(tmp_path: Path) -> None:
    """The compose file's fleet without containers: the engine's own command, the router, the users."""
    ports = free_ports(4)
    words = shlex.split(services()["engine"]["command"])
    for number, flag in enumerate(("--port", "--kv-port", "--replay-port", "--load-port")):
        words[words.index(flag) + 1] = str(ports + number)
    words[words.index("--host") + 1] = "127.0.0.1"
    engine = [sys.executable, "-m", "router", *words]
    url = f"http://127.0.0.1:{ports}"
    with process(engine, tmp_path / "engine.log"):
        wait_until(lambda: is_up(f"{url}/health"), 20, "the engine")
        with router(tmp_path, [url]) as running:
            wait_until(lambda: is_up(f"{running.admin}/ready"), 20, "ready")
            users = [sys.executable, str(COMPOSE / "users.py"), running.base]
            with process(users, tmp_path / "users.log", PYTHONPATH=str(DEPLOY.parent)):
                done = r'kv_router_requests_total{outcome="ok",route="/v1/chat/completions"} '
                wait_until(lambda: done in running.metrics(), 20, "a served chat turn")
        assert (tmp_path / "users.log").read_text() == ""


def test_the_health_command_tells_a_living_router_from_none(tmp_path: Path) -> None:
    command = health_command()
    assert command[0] == "python3"
    assert "127.0.0.1:8081/health" in command[-1], "the admin listener: the public one may speak TLS"
    with router(tmp_path, []) as running:
        port = running.admin.rpartition(":")[2]
        here = [sys.executable, *command[1:-1], command[-1].replace("8081", port)]
        assert subprocess.run(here, timeout=20, check=False).returncode == 0
    assert subprocess.run(here, timeout=20, check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_the_image_runs_the_router_as_nobody() -> None:
    stages = DOCKERFILE.split("\nFROM ")
    assert len(stages) == 3, "what builds is not what runs"
    assert "\nUSER 65532:65532\n" in stages[-1]
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", stages[-1], re.MULTILINE)[1])  # type: ignore[index]
    command = json.loads(re.search(r"^CMD (.*)$", stages[-1], re.MULTILINE)[1])  # type: ignore[index]
    assert (entry, command) == (["kv-router"], ["serve", "--config", "/etc/kv-router/router.yaml"])


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copied = re.search(r"^COPY (pyproject.*) \./$", DOCKERFILE, re.MULTILINE)
    assert copied is not None
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == {*copied[1].split(), ".build", "router"}


def test_versions_agree() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "kv-router" / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


async def test_users_whom_nobody_answers_say_so_and_go_on() -> None:
    """The router may still be starting, or restart."""
    users = await asyncio.create_subprocess_exec(
        *(sys.executable, str(COMPOSE / "users.py"), "http://127.0.0.1:9"),
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(DEPLOY.parent)},
    )
    assert users.stderr is not None
    try:
        line = await asyncio.wait_for(users.stderr.readline(), 20)
        assert b"ClientConnectorError" in line
        assert users.returncode is None
    finally:
        users.terminate()
        await users.wait()
