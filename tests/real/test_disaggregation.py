"""A real SGLang prefill and decode server on CPU behind the router: what the router injects is what they understand.

KV moves with Mooncake over TCP: SGLang's `fake` backend is refused by prefill servers. Needs
`mooncake-transfer-engine-non-cuda` (and libibverbs) importable by the engines' Python; skipped without.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.real.conftest import START_LIMIT_S, scripts, setting
from tests.real.test_sglang import WORDS, cached, settle, stream, whole, words
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, router, wait_until

pytestmark = pytest.mark.real_engine
FLAGS = ["--disaggregation-transfer-backend", "mooncake_tcp"]
ON_CPU = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
"""The default of decode servers is a pool of pinned host memory."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of a real prefill server with two data-parallel ranks and a real decode server."""
    if running := os.environ.get("KV_ROUTER_SGLANG_PAIR_URLS"):
        yield running.split(",")
        return
    venv, model = setting("KV_ROUTER_SGLANG_VENV"), setting("KV_ROUTER_TINY_MODEL")
    if subprocess.run(
        [f"{venv}/bin/python", "-c", "import mooncake.engine"], capture_output=True, check=False
    ).returncode:
        pytest.skip("mooncake.engine cannot be imported by the engines' Python (tests/real/README.md)")
    script, folder = str(scripts() / "start_sglang_cpu.sh"), tmp_path_factory.mktemp("pair")
    http, kv, meet = free_ports(2), free_ports(90) + 3, free_ports(95) + 92
    prefill = [script, venv, model, str(http), str(kv), "16", "--dp-size", "2", "--disaggregation-mode", "prefill"]
    decode = [script, venv, model, str(http + 1), str(kv + 40), "16", "--disaggregation-mode", "decode"]
    meeting = ["--disaggregation-bootstrap-port", str(meet)]
    path = os.pathsep.join([str(Path(__file__).parent / "cpu_pair"), os.environ.get("PYTHONPATH", "")])
    with (
        process(["bash", *prefill, *FLAGS, *meeting], folder / "prefill.log", PYTHONPATH=path, DP="2"),
        process(["bash", *decode, *FLAGS, *ON_CPU], folder / "decode.log", PYTHONPATH=path),
    ):
        urls = [f"http://127.0.0.1:{http}", f"http://127.0.0.1:{http + 1}"]
        for url in urls:
            wait_until(lambda url=url: is_up(f"{url}/health"), START_LIMIT_S, f"{url}/health")  # type: ignore[misc]
        yield urls


@pytest.fixture(scope="module")
def served(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with router(tmp_path_factory.mktemp("router"), pair) as running:
        wait_until(lambda: is_up(f"{running.base}/ready"), 60, "the router is ready")
        prefill = running.workers()[0]["ranks"]
        wait_until(
            lambda: {r["state"] for r in running.workers()[0]["ranks"]} == {"live"}, 60, f"{len(prefill)} live streams"
        )
        yield running


def ask(served: RouterProcess, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], Any]:
    request = urllib.request.Request(
        served.base + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}"), error.headers


def counted(served: RouterProcess, name: str) -> float:
    return sum(float(v) for v in re.findall(rf"^kv_router_{name}(?:\{{.*\}})? (\S+)$", served.metrics(), re.MULTILINE))


def test_the_engines_say_their_roles_and_the_router_pools_them(served: RouterProcess, pair: list[str]) -> None:
    workers = {worker["url"]: worker for worker in served.workers()}
    assert [workers[url]["role"] for url in pair] == ["prefill", "decode"]
    assert [workers[url]["drift"] for url in pair] == [[], []]
    assert workers[pair[0]]["bootstrap_port"]


def test_a_conversation_is_handed_over_turn_by_turn_and_predicted_equals_reported(
    served: RouterProcess, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    client, rng = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none"), random.Random(5)
    rows: list[tuple[int, int, int]] = []
    ranks = set()
    for _ in range(3):
        talk = [{"role": "system", "content": words(rng, 120)}]
        for turn in range(4):
            talk.append({"role": "user", "content": words(rng, 40)})
            settle(served)
            answer, headers, usage = (stream if turn % 2 else whole)(client, talk)
            assert (headers["x-kv-router-worker"], headers["x-kv-router-decode-worker"]) == tuple(pair)
            ranks.add(headers["x-kv-router-rank"])
            rows.append((int(headers["x-kv-router-cached-tokens"]), cached(usage), usage.prompt_tokens))
            talk.append({"role": "assistant", "content": answer})
    exact = sum(predicted == reported for predicted, reported, _ in rows)
    with capsys.disabled():
        total = sum(row[2] for row in rows)
        hits = sum(row[1] for row in rows)
        print(
            f"\nreal pair: {exact} of {len(rows)} exact, {hits} of {total} tokens cached, prefill ranks {sorted(ranks)}"
        )
    assert exact == len(rows), rows
    assert sum(reported for _, reported, _ in rows) > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_prompts_of_ids_and_batches_are_handed_over(served: RouterProcess, path: str) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 4000) for _ in range(200)] for _ in range(3)]
    for prompt in (prompts[0], prompts):
        if path == "/generate":
            body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        else:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        status, answer, headers = ask(served, path, body)
        assert status == 200, answer
        assert headers["x-kv-router-decode-worker"]
        several = len(answer) if path == "/generate" and isinstance(answer, list) else len(answer.get("choices", [1]))
        assert several == (3 if prompt is prompts else 1)


def test_the_decode_engine_goes_on_as_the_prefill_engine_alone_would_have(served: RouterProcess) -> None:
    """The same greedy continuation twice: the KV that moved is the prompt's own."""
    rng = random.Random(11)
    body = {
        "model": "tiny",
        "prompt": [rng.randrange(10, 4000) for _ in range(300)],
        "max_tokens": 12,
        "temperature": 0,
    }
    texts = {ask(served, "/v1/completions", body)[1]["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


def test_many_at_once_and_clients_that_leave_leave_nothing_behind(
    served: RouterProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(13)
    bodies = [
        {"model": "tiny", "prompt": " ".join(rng.choice(WORDS) for _ in range(80)), "max_tokens": 8} for _ in range(40)
    ]

    def one(number: int) -> int:
        if number % 4 == 0:  # leaves
            request = urllib.request.Request(
                f"{served.base}/v1/completions",
                data=json.dumps({**bodies[number], "max_tokens": 400, "stream": True}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.readline()
            return 0
        return ask(served, "/v1/completions", bodies[number])[0]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(one, range(40)))
    assert sorted(set(statuses)) == [0, 200], statuses
    wait_until(lambda: counted(served, "prefill_legs") == 0, 60, "every prefill leg ended")
    wait_until(lambda: not any(r["inflight_requests"] for r in served.ranks()), 30, "nothing in flight")
    with capsys.disabled():
        lines = [line for line in served.metrics().splitlines() if line.startswith("kv_router_pairs_total")]
        print("\n" + "\n".join(lines))
    status, _, _ = ask(served, "/v1/completions", bodies[0])
    assert status == 200


def test_a_request_both_refuse_comes_back_as_the_engines_own_words(served: RouterProcess) -> None:
    status, answer, headers = ask(served, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 10_000_000})
    assert status == 400, answer
    assert headers["x-kv-router-error"] is None
    wait_until(lambda: not any(r["inflight_requests"] for r in served.ranks()), 30, "nothing in flight")


def test_a_prompt_without_a_room_is_refused_by_the_engines_themselves(pair: list[str]) -> None:
    """What would happen to plain traffic (case 62). One such request ends a prefill server with several ranks: its
    data-parallel controller fails an assertion, so those are not asked."""
    for url in pair:
        if fetch(f"{url}/server_info")["dp_size"] > 1:
            continue
        here = RouterProcess(int(url.rsplit(":", 1)[1]), 0)
        status, answer, _ = ask(here, "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}})
        assert status in (400, 500), (Path(url), status, answer)
