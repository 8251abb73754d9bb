"""Real clients through the router against a real SGLang server, compared with the same client talking to it directly.

Sampling is greedy and every request is asked twice before, so that the two answers differ in ids and times only.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.process import RouterProcess, fetch, router, wait_until

httpx = pytest.importorskip("httpx", reason="pip install httpx")
anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

pytestmark = pytest.mark.real_engine

CHAT, COMPLETIONS, GENERATE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"
TALK: list[Any] = [
    {"role": "user", "content": "the router sends each request where its first token will come soonest 🙂"}
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "finds a word",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
SAMPLING = {"temperature": 0, "max_new_tokens": 12}
ENDS = {"stream": True, "stream_options": {"include_usage": True}}

REQUESTS: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {**GREEDY, "messages": TALK}),
    "chat stream": (CHAT, {**GREEDY, "messages": TALK, "stream": True}),
    "chat stream with usage": (CHAT, {**GREEDY, "messages": TALK, **ENDS}),
    "chat tools": (CHAT, {**GREEDY, "messages": TALK, "tools": TOOLS}),
    "chat tool result": (
        CHAT,
        {
            **GREEDY,
            "tools": TOOLS,
            "messages": [
                *TALK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "a"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
            ],
        },
    ),
    "chat n = 2": (CHAT, {**GREEDY, "messages": TALK, "n": 2}),
    "chat logprobs": (CHAT, {**GREEDY, "messages": TALK, "logprobs": True, "top_logprobs": 3}),
    "chat stream logprobs": (CHAT, {**GREEDY, "messages": TALK, "logprobs": True, "top_logprobs": 2, "stream": True}),
    "chat stop": (CHAT, {**GREEDY, "messages": TALK, "stop": ["e"]}),
    "chat json schema": (
        CHAT,
        {**GREEDY, "max_tokens": 24, "messages": TALK, "response_format": {"type": "json_object"}},
    ),
    "completion": (COMPLETIONS, {**GREEDY, "prompt": "the prefix of a block"}),
    "completion ids": (COMPLETIONS, {**GREEDY, "prompt": [11, 12, 13, 14] * 12}),
    "completion stream": (COMPLETIONS, {**GREEDY, "prompt": "the prefix of a block", **ENDS}),
    "completion echo": (COMPLETIONS, {**GREEDY, "prompt": "the prefix of a block", "echo": True}),
    "completion n = 2": (COMPLETIONS, {**GREEDY, "prompt": "the prefix of a block", "n": 2}),
    "completion batch": (COMPLETIONS, {**GREEDY, "prompt": ["one prompt", "another prompt"]}),
    "completion logprobs": (COMPLETIONS, {**GREEDY, "prompt": "the prefix of a block", "logprobs": 2}),
    "generate": (GENERATE, {"text": "the prefix of a block", "sampling_params": SAMPLING}),
    "generate stream": (GENERATE, {"text": "the prefix of a block", "sampling_params": SAMPLING, "stream": True}),
    "generate batch": (GENERATE, {"text": ["one", "two"], "sampling_params": SAMPLING}),
    "generate ids logprob": (
        GENERATE,
        {"input_ids": [11, 12, 13, 14] * 12, "sampling_params": SAMPLING, "return_logprob": True},
    ),
    "messages": (MESSAGES, {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": TALK}),
    "messages stream": (
        MESSAGES,
        {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": TALK, "stream": True},
    ),
    "tokenize": ("/v1/tokenize", {"model": "tiny", "prompt": "the prefix of a block"}),
    "detokenize": ("/v1/detokenize", {"model": "tiny", "tokens": [11, 12, 13]}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0}),
    "error: embeddings of a generator": ("/v1/embeddings", {"model": "tiny", "input": "x"}),
    "error: too long": (COMPLETIONS, {**GREEDY, "prompt": [7] * 5000}),
    "error: too long, streamed": (COMPLETIONS, {**GREEDY, "prompt": [7] * 5000, "stream": True}),
    "error: bad parameter": (CHAT, {**GREEDY, "messages": TALK, "temperature": -3}),
    "error: wrong type": (CHAT, {**GREEDY, "messages": "none"}),
    "error: no prompt": (GENERATE, {"sampling_params": SAMPLING}),
}

VARIES = [
    (rb'"id":\s*"[^"]*"', b'"id":"ID"'),
    (rb'"(created|created_at|completed_at)":\s*[0-9.]+', rb'"\1":0'),
    (rb'"(e2e_latency|[a-z_]*_(time|ts|latency|duration|throughput)|decode_throughput)":\s*[-0-9.e]+', rb'"\1":0'),
    (rb'"(item_id|response_id)":\s*"[^"]*"', rb'"\1":"ID"'),
]


def settled(body: bytes) -> bytes:
    for pattern, replacement in VARIES:
        body = re.sub(pattern, replacement, body)
    return body


@pytest.fixture(scope="module")
def engine(sglang_pair: list[str]) -> str:
    return sglang_pair[0]


@pytest.fixture(scope="module")
def served(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with router(tmp_path_factory.mktemp("router"), [engine]) as running:
        yield from _up(running)


def _up(running: RouterProcess) -> Iterator[RouterProcess]:
    wait_until(lambda: _ready(running), 60, "the router is ready")
    yield running


def _ready(running: RouterProcess) -> bool:
    with httpx.Client() as client:
        return bool(client.get(f"{running.base}/ready").status_code == 200)


def both(engine: str, served: RouterProcess, ask: Callable[[str], Any]) -> tuple[Any, Any]:
    """What `ask` gets directly and through the router, the engine's cache being warm for both.

    The engine itself now and then differs from itself (how many tokens it puts into one event, the last digit of a
    logprob), so each side is asked again until one answer of this side is one of that side.
    """
    ask(engine)
    ask(engine)
    direct, through = [ask(engine)], [ask(served.base)]
    while through[-1] not in direct and len(direct) < 8:
        direct.append(ask(engine))
        through.append(ask(served.base))
        if any(answer in direct for answer in through):
            through.append(next(answer for answer in through if answer in direct))
    return (through[-1] if through[-1] in direct else direct[-1]), through[-1]


@pytest.mark.parametrize("name", REQUESTS)
def test_httpx_gets_the_same_bytes(engine: str, served: RouterProcess, name: str) -> None:
    path, body = REQUESTS[name]

    def ask(base: str) -> tuple[int, str, bytes]:
        with httpx.Client(timeout=60) as client:
            answer = client.post(base + path, json=body)
            return answer.status_code, answer.headers.get("content-type", ""), settled(answer.content)

    direct, through = both(engine, served, ask)
    assert through == direct
    assert (direct[0] >= 400) == name.startswith("error"), direct


def test_curl_gets_the_same_bytes_streamed_and_with_a_large_body(
    engine: str, served: RouterProcess, tmp_path: Path
) -> None:
    """Case 82: curl asks to continue before it sends 2 MiB."""
    large = tmp_path / "large.json"
    large.write_text(json.dumps({**GREEDY, "prompt": "x " * (1 << 20)}))
    small = tmp_path / "small.json"
    small.write_text(json.dumps({**GREEDY, "prompt": "the prefix of a block", **ENDS}))

    def ask(file: Path) -> Callable[[str], bytes]:
        def one(base: str) -> bytes:
            command = ["curl", "-sN", "-w", "%{http_code}", "-H", "Content-Type: application/json"]
            done = subprocess.run(
                [*command, "--data-binary", f"@{file}", base + COMPLETIONS],
                capture_output=True,
                timeout=120,
                check=True,
            )
            return settled(done.stdout)

        return one

    direct, through = both(engine, served, ask(small))
    assert direct.endswith(b"data: [DONE]\n\n200")
    assert through == direct
    direct, through = both(engine, served, ask(large))
    assert direct.endswith(b"400")
    assert through == direct


def of_openai(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def shown(value: Any) -> bytes:
    return settled(value.model_dump_json().encode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"tools": TOOLS}])
def test_the_openai_client_gets_the_same(
    engine: str, served: RouterProcess, more: dict[str, Any], stream: bool
) -> None:
    def ask(base: str) -> list[bytes]:
        answer = of_openai(base).chat.completions.create(**GREEDY, messages=TALK, **more, stream=stream)
        pieces = [shown(piece) for piece in answer] if stream else [shown(answer)]
        return sorted(pieces) if "n" in more else pieces  # two sequences' pieces interleave as they will

    direct, through = both(engine, served, ask)
    assert through == direct
    assert len(direct) > 3 or not stream


def test_the_openai_client_raises_the_same_errors(engine: str, served: RouterProcess) -> None:
    def ask(base: str) -> tuple[type, Any]:
        with pytest.raises(openai.APIStatusError) as raised:
            of_openai(base).completions.create(model="tiny", prompt=[7] * 5000)
        return type(raised.value), raised.value.body

    direct, through = both(engine, served, ask)
    assert through == direct
    assert direct[0] is openai.BadRequestError
    with pytest.raises(openai.NotFoundError) as unknown:
        of_openai(served.base).chat.completions.create(model="nope", messages=TALK)
    assert unknown.value.code == "model_not_found"
    assert [model.id for model in of_openai(served.base).models.list()] == ["tiny"]


def test_the_anthropic_client_gets_the_same(engine: str, served: RouterProcess) -> None:
    asked = {"model": "tiny", "max_tokens": 12, "messages": TALK, "extra_body": {"temperature": 0}}

    def client(base: str) -> Any:
        return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)

    direct, through = both(engine, served, lambda base: shown(client(base).messages.create(**asked)))
    assert through == direct

    def stream(base: str) -> list[bytes]:
        return [shown(event) for event in client(base).messages.create(**asked, stream=True)]

    direct, through = both(engine, served, stream)
    assert through == direct
    assert b"message_stop" in direct[-1]
    with pytest.raises(anthropic.NotFoundError):
        client(served.base).messages.create(**{**asked, "model": "nope"})


def gauge(engine: str, name: str) -> int:
    page = httpx.get(f"{engine}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"sglang:{name}{{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(
    engine: str, served: RouterProcess, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases 63 and 64: closing the connection is enough, streaming or not; no abort call is needed."""
    asked = {**GREEDY, "max_tokens": 3900, "ignore_eos": True, "messages": TALK, "stream": stream}
    body = json.dumps(asked).encode()
    aborted = gauge(engine, "num_aborted_requests_total")
    at = httpx.URL(served.base)
    with socket.create_connection((at.host, at.port)) as client:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        wait_until(lambda: gauge(engine, "num_running_reqs") == 1, 20, "the engine runs it")
        assert sum(rank["inflight_requests"] for rank in served.ranks()) == 1
    left = time.monotonic()
    wait_until(lambda: sum(rank["inflight_requests"] for rank in served.ranks()) == 0, 5, "no load left here")
    ours_s = time.monotonic() - left
    wait_until(lambda: gauge(engine, "num_aborted_requests_total") == aborted + 1, 20, "the engine gave it up")
    with capsys.disabled():
        print(f"\nstream={stream}: router free after {ours_s:.2f} s, engine after {time.monotonic() - left:.2f} s")
    assert 'outcome="client_closed"' in served.metrics()


def test_aiperf_drives_it_without_an_error(
    served: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, model = os.environ.get("KV_ROUTER_AIPERF"), os.environ.get("KV_ROUTER_TINY_MODEL")
    if not program or not model:
        pytest.skip("KV_ROUTER_AIPERF or KV_ROUTER_TINY_MODEL is not set (tests/real/README.md)")
    scripts = Path(os.environ.get("KV_ROUTER_ENGINE_SCRIPTS", "../shared/engines")).resolve()
    subprocess.run(["bash", str(scripts / "mk_hf_cache.sh"), str(tmp_path / "hf"), "org/tiny", model], check=True)
    out = tmp_path / "out"
    command = f"profile --model tiny --tokenizer org/tiny --url {served.base} --endpoint-type chat --streaming"
    command += " --concurrency 4 --request-count 24 --synthetic-input-tokens-mean 120 --output-tokens-mean 16"
    command += f" --random-seed 1 --no-gpu-telemetry --ui-type simple --artifact-dir {out}"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([program, *command.split()], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    report = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    with capsys.disabled():
        print(
            f"\naiperf: {report['request_count']['avg']:.0f} requests, errors {report.get('error_summary')}, "
            f"TTFT p50 {report['time_to_first_token']['p50']:.0f} ms"
        )
    assert report["request_count"]["avg"] == 24
    assert not report.get("error_summary")
    assert fetch(f"{served.admin}/workers")["workers"][0]["state"] == "ready"
