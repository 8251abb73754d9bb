"""A real Envoy, the router as its picker, and engines that really answer. Marked: see tests/envoy/real.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import threading
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.envoy.conftest import Pickers, StartEngine
from tests.envoy.real import PROTOCOLS, RealEnvoy, envoy
from tests.support.engine import free_ports as other_ports
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, router, wait_until

pytestmark = pytest.mark.real_envoy
PAGE, RANKS = 16, 2
CONVERSATIONS, TURNS, TURN_TOKENS = 12, 5, 160


@dataclass
class Fleet:
    """Engines by HTTP port, with the process of each."""

    ports: list[int]
    running: list[Any]


@contextlib.contextmanager
def fleet(folder: Path, count: int = 3) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        made = Fleet([], [])
        for number in range(count):
            port = free_ports(10)
            command = [sys.executable, "-m", "router", "engine", "--port", str(port), "--kv-port", str(port + 1)]
            command += ["--load-port", str(port + 3), "--replay-port", str(port + 5), "--page-size", str(PAGE)]
            command += ["--dp-size", str(RANKS)]
            command += ["--model", "tiny", "--tokens", "200000", "--decode-ms", "4", "--health-delay-s", "0"]
            made.running.append(stack.enter_context(process(command, folder / f"engine-{number}.log")))
            wait_until(lambda port=port: is_up(f"http://127.0.0.1:{port}/health"), 30, "an engine")  # type: ignore[misc]
            made.ports.append(port)
        yield made


@contextlib.contextmanager
def picking(folder: Path, ports: list[int], **settings: Any) -> Iterator[tuple[RouterProcess, dict[str, int]]]:
    """The router over these engines, up to live streams; its ports by protocol."""
    near = free_ports(2)  # what `router` will take for itself
    base = next(port for port in iter(lambda: other_ports(2), None) if abs(port - near) > 100)
    asked = {"ext_authz": base, "ext_proc": base + 1, "ext_proc_buffered": base + 1}
    listeners = {"ext_authz": {"port": base}, "ext_proc": {"port": base + 1}}
    with router(folder, [f"http://127.0.0.1:{port}" for port in ports], envoy=listeners, **settings) as running:
        live = ["live"] * RANKS * len(ports)
        wait_until(lambda: [rank["state"] for rank in running.ranks()] == live, 20, "live streams")
        yield running, asked


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouterProcess, dict[str, int], Fleet]]:
    """For tests that leave everybody alive."""
    folder = tmp_path_factory.mktemp("together")
    with fleet(folder) as engines, picking(folder, engines.ports) as (running, asked):
        yield running, asked, engines


@pytest.fixture(scope="module", params=PROTOCOLS)
def front(
    request: pytest.FixtureRequest,
    together: tuple[RouterProcess, dict[str, int], Fleet],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealEnvoy]:
    running, asked, engines = together
    with envoy(
        tmp_path_factory.mktemp("envoy"), request.param, engines.ports, asked[request.param], running.base
    ) as made:
        yield made


def complete(base: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}
    answer: dict[str, Any] = fetch(f"{base}/v1/completions", body, timeout_s=30)
    return answer


def best(running: RouterProcess, prompt: list[int]) -> int:
    """The most tokens of it that any rank is known to hold."""
    candidates = running.route("/v1/completions", {"model": "tiny", "prompt": prompt})["candidates"]
    return max(int(one["cached_tokens"]["GPU"]) for one in candidates)


def cached_tokens(base: str) -> tuple[int, int]:
    """(prompt, cached) tokens of conversations that grow, never seen before, as the engines report them."""
    rng = random.Random()
    told: list[tuple[int, int]] = []

    def talk(prompt: list[int], turns: list[list[int]]) -> None:
        for turn in turns:
            prompt = prompt + turn
            usage = complete(base, prompt)["usage"]
            told.append((usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)))

    def tokens() -> list[int]:
        return [rng.randrange(10, 200) for _ in range(TURN_TOKENS)]

    talks = [
        threading.Thread(target=talk, args=(tokens(), [tokens() for _ in range(TURNS)])) for _ in range(CONVERSATIONS)
    ]
    for one in talks:
        one.start()
    for one in talks:
        one.join()
    assert len(told) == CONVERSATIONS * TURNS
    return sum(prompt for prompt, _ in told), sum(cached for _, cached in told)


def test_conversations_hit_as_often_as_through_the_proxy(
    front: RealEnvoy, together: tuple[RouterProcess, dict[str, int], Fleet]
) -> None:
    running, _, _ = together
    proxied = picked = prompts = 0
    for _ in range(2):  # in turns, so that a busy moment of the machine meets both
        proxied += cached_tokens(running.base)[1]
        prompt, cached = cached_tokens(front.base)
        prompts, picked = prompts + prompt, picked + cached
    print(f"\n{front.protocol}: cached of {prompts} prompt tokens: proxy {proxied}, Envoy {picked}")
    assert proxied > 0.5 * prompts
    assert picked == pytest.approx(proxied, rel=0.1)


def test_an_answer_streams_and_ends_as_the_engine_ends_it(front: RealEnvoy) -> None:
    client = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 50, "stream": True}
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
    events = [line for line in answer if line.startswith(b"data: ")]
    assert len(events) > 50
    assert events[-1] == b"data: [DONE]\n"


def test_the_routers_own_routes_and_refusals_reach_clients(front: RealEnvoy) -> None:
    assert [model["id"] for model in fetch(f"{front.base}/v1/models")["data"]] == ["tiny"]
    for path, body, status, code in (
        ("/flush_cache", {}, 404, "not_found"),
        ("/metrics", {}, 404, "not_found"),
        ("/v1/completions", {"model": "other", "prompt": [1]}, 404, "model_not_found"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(f"{front.base}{path}", body)
        assert (refused.value.code, refused.value.headers["x-kv-router-error"]) == (status, code)
        assert json.loads(refused.value.read())["error"]["code"] == code


def test_a_prompt_goes_to_the_very_rank_that_holds_it(
    front: RealEnvoy, together: tuple[RouterProcess, dict[str, int], Fleet]
) -> None:
    """/generate takes the rank only from its body, which ext_authz cannot change: any rank serves it there."""
    running, _, _ = together
    for _ in range(4):
        prompt = [random.randrange(10, 200) for _ in range(8 * PAGE)]
        complete(front.base, prompt)
        wait_until(lambda prompt=prompt: best(running, prompt) == 7 * PAGE, 10, "the prompt is held")  # type: ignore[misc]
        usage = complete(front.base, prompt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7 * PAGE
        if front.protocol != "ext_authz":
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
            assert fetch(f"{front.base}/generate", body)["meta_info"]["cached_tokens"] == 7 * PAGE


def test_a_body_of_20_mb_passes_unchanged_in_length(front: RealEnvoy) -> None:
    usage = complete(front.base, [5] * 100, user="x" * (20 << 20))["usage"]
    assert usage["prompt_tokens"] == 100


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dead_pick_falls_to_the_next_of_the_list(protocol: str, tmp_path: Path) -> None:
    slow = {"probe_interval_s": 3600, "info_interval_s": 3600, "unhealthy_after": 100}
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(fleet(tmp_path))
        running, asked = stack.enter_context(picking(tmp_path, engines.ports, fleet=slow))
        front = stack.enter_context(envoy(tmp_path, protocol, engines.ports, asked[protocol], running.base))
        engines.running[0].kill()
        engines.running[0].wait(10)
        for number in range(24):
            assert complete(front.base, [number + 1] * 40)["usage"]["prompt_tokens"] == 40
        assert front.stat("cluster.engines.upstream_rq_retry") > 0
        assert running.workers()[0]["state"] == "ready"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_the_picker_the_answer_is_503_until_it_is_back(protocol: str, tmp_path: Path) -> None:
    with fleet(tmp_path) as engines, contextlib.ExitStack() as first:
        running, asked = first.enter_context(picking(tmp_path, engines.ports))
        with envoy(tmp_path, protocol, engines.ports, asked[protocol], running.base) as front:
            assert complete(front.base, [1] * 40)["usage"]["prompt_tokens"] == 40
            first.close()
            with pytest.raises(urllib.error.HTTPError) as refused:
                complete(front.base, [1] * 40)
            assert refused.value.code == 503
            names = {"ext_authz": {"port": asked["ext_authz"]}, "ext_proc": {"port": asked["ext_proc"]}}
            with router(tmp_path, [f"http://127.0.0.1:{port}" for port in engines.ports], envoy=names):

                def served() -> bool:
                    with contextlib.suppress(urllib.error.HTTPError):
                        return bool(complete(front.base, [1] * 40)["usage"]["prompt_tokens"] == 40)
                    return False

                wait_until(served, 20, "an answer through the new router")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_a_worker_the_answer_is_503_and_ext_proc_says_why(protocol: str, tmp_path: Path) -> None:
    with (
        picking(tmp_path, []) as (running, asked),
        envoy(tmp_path, protocol, [1], asked[protocol], running.base) as front,
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(front.base, [1] * 40)
        code = refused.value.headers.get("x-kv-router-error")
        assert (refused.value.code, code) == (503, None if protocol == "ext_authz" else "no_worker")


@pytest.mark.parametrize("protocol", ["ext_authz", "ext_proc_buffered"])
def test_failure_mode_allow_lets_requests_through_without_a_picker(
    protocol: str, together: tuple[RouterProcess, dict[str, int], Fleet], tmp_path: Path
) -> None:
    running, _, engines = together
    nobody = other_ports(1)
    with envoy(tmp_path, protocol, engines.ports, nobody, running.base, failure_mode_allow=True) as front:
        assert complete(front.base, [1] * 40)["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize("worker_key", ["engine", None])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_client_key_reaches_an_engine_and_its_own_key_does(
    protocol: str, worker_key: str | None, fake_engine: StartEngine, pickers: Pickers, tmp_path: Path
) -> None:
    """case 103"""
    engine = await fake_engine(dp_size=2)
    running = await pickers(engine, api_keys=["client"], worker_api_key=worker_key)
    assert running.service.envoy is not None
    picker = running.service.envoy.ports[protocol.removesuffix("_buffered")]
    forged = {"x-gateway-destination-endpoint": "10.0.0.1:1", "x-envoy-original-dst-host": "10.0.0.1:1"}
    with envoy(tmp_path, protocol, [engine.port], picker, running.base) as front:
        for keys in ({"x-api-key": "client"}, {"Authorization": "Bearer client"}):
            body = {"model": "tiny", "prompt": [1, 2, 3]}
            url = f"{front.base}/v1/completions"
            async with running.session.post(url, json=body, headers={**keys, **forged}) as answer:
                assert answer.status == 200
            seen = engine.headers["/v1/completions"]
            assert "x-api-key" not in seen
            assert seen.get("authorization") == (None if worker_key is None else f"Bearer {worker_key}")
            assert seen.get("x-data-parallel-rank") in ("0", "1")
