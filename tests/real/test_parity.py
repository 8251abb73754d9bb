"""Live parity: the router's ids against a running engine's own, over many templates and real agents' prompts.

Cases 35–37. Each engine is a real CPU server with a tiny random model and a real tokenizer. One SGLang server takes all
templates in turn (swap_server.py); vLLM takes the template with the request.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from router.hashing import pack_ids
from router.prompt.body import RequestBody, parse_body
from router.prompt.conversation import ConversationCache
from router.prompt.engine import tokenize_request
from router.prompt.forms import prompt_form
from router.prompt.local import NoIds, local_prompt
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.real.conftest import START_LIMIT_S, setting
from tests.real.parity_data import bodies, templates, unpack_tokenizer
from tests.support.process import free_ports, is_up, process, wait_until

pytestmark = pytest.mark.real_engine

TOKENIZERS = ("qwen3", "deepseek_v3")
SGLANG = ModelFacts(engine="sglang", names=("tiny",))
VLLM = ModelFacts(engine="vllm", names=("tiny",))


@dataclass
class Engine:
    url: str
    folder: Path
    tokenizer: Tokenizer

    def post(self, path: str, body: object) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text[:1] == b"{" else text
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def _model(venv: Path, name: str, folder: Path, *sizes: str, **environment: str) -> Path:
    unpack_tokenizer(name, folder)
    script = str(Path(__file__).with_name("make_model.py"))
    with process(
        [str(venv / "bin" / "python"), script, str(folder), *sizes], folder / "make.log", **environment
    ) as made:
        assert made.wait(START_LIMIT_S) == 0, (folder / "make.log").read_text()
    return folder


@contextmanager
def _sglang(tokenizer: str, base: Path) -> Iterator[Engine]:
    venv = Path(setting("KV_ROUTER_SGLANG_VENV"))
    folder = _model(venv, tokenizer, base / "model", HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="1")
    command = [str(venv / "bin" / "python"), "-W", "ignore", str(Path(__file__).with_name("swap_server.py"))]
    command += ["--model-path", str(folder), "--served-model-name", "tiny", "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--max-total-tokens", "20000"]
    command += ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle", "--context-length", "32768"]
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with _serving(command, base, **environment) as url:
        yield Engine(url, folder, load_tokenizer(folder))


@contextmanager
def _vllm(tokenizer: str, base: Path) -> Iterator[Engine]:
    venv = Path(setting("KV_ROUTER_VLLM_VENV"))
    # With heads of 16 vLLM 0.32's CPU attention ends the engine at the first prompt.
    folder = _model(venv, tokenizer, base / "model", "64", "128", "2", "32", HF_HUB_OFFLINE="1")
    if tokenizer == "deepseek_v3":  # transformers 5 would build another tokenizer from this folder's class name
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    command = [str(venv / "bin" / "vllm"), "serve", str(folder), "--served-model-name", "tiny"]
    command += ["--max-model-len", "32768", "--block-size", "32", "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--enable-scale-out"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with _serving(command, base, VLLM_CPU_OMP_THREADS_BIND="nobind", **environment) as url:
        yield Engine(url, folder, load_tokenizer(folder))


@contextmanager
def _serving(command: list[str], base: Path, **environment: str) -> Iterator[str]:
    """The URL of the server, once it is up; when it ends before, its log's end is the failure."""
    port, output = free_ports(1), base / "server.log"
    with process([*command, "--host", "127.0.0.1", "--port", str(port)], output, **environment) as server:
        url = f"http://127.0.0.1:{port}"

        def up_or_gone() -> bool:
            assert server.poll() is None, output.read_text()[-3000:]
            return is_up(f"{url}/health")

        wait_until(up_or_gone, START_LIMIT_S, f"{url}/health")
        yield url


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine at a time: the next one starts when all tests of this one are over and it is down."""
    kind, tokenizer = request.param
    start = _sglang if kind == "sglang" else _vllm
    with start(tokenizer, tmp_path_factory.mktemp(f"{kind}_{tokenizer}")) as running:
        yield running


def _each(kind: str) -> pytest.MarkDecorator:
    engines = [pytest.param((kind, name), id=f"{kind}-{name}") for name in TOKENIZERS]
    return pytest.mark.parametrize("engine", engines, indirect=True, scope="module")


on_sglang, on_vllm = _each("sglang"), _each("vllm")


class Tally:
    """What came of every body: exact, different, engine (the router has no ids and asks), refused by both …"""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.left_to_engine: Counter[str] = Counter()
        self.templates: set[str] = set()

    def add(self, template: str, body: dict[str, Any], ours: bytes | NoIds, theirs: list[int] | None) -> None:
        if isinstance(ours, NoIds):
            self.seen["refused by both" if theirs is None else "left to the engine"] += 1
            if theirs is not None:
                self.left_to_engine[f"{template}: {ours.reason}"] += 1
        elif theirs is None:
            self.seen["the engine refuses"] += 1
        elif ours == pack_ids(theirs):
            self.seen["exact"] += 1
            self.templates.add(template)
        else:
            self.seen["different"] += 1
            self.wrong.append(f"{template}: {json.dumps(body)[:200]}")

    def check(self, title: str, capsys: pytest.CaptureFixture[str]) -> None:
        with capsys.disabled():
            print(f"\n{title}: {dict(self.seen)}, {len(self.templates)} templates")
            for what, count in self.left_to_engine.most_common():
                print(f"  left to the engine: {what} × {count}")
        assert self.wrong == []
        assert self.seen["exact"] > 500
        assert len(self.templates) >= 30


def request_of(body: dict[str, Any]) -> RequestBody:
    return parse_body("/v1/chat/completions", json.dumps({"model": "tiny", **body}).encode())


def local(request: RequestBody, files: ModelFiles, facts: ModelFacts, cache: ConversationCache) -> bytes | NoIds:
    try:
        return local_prompt(request, prompt_form(request, facts.engine), files, facts, cache).ids
    except NoIds as none:
        return none


def rendering(text: str, tokenizer: Tokenizer) -> ModelFiles:
    try:
        return ModelFiles(tokenizer, ChatTemplate(text, tokenizer.specials, datetime.now))
    except TemplateFailure as failure:
        return ModelFiles(tokenizer, None, str(failure))


@on_sglang
def test_sglang_ids_are_the_engines(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally, cache = Tally(), ConversationCache(64 << 20)
    for name, text in templates().items():
        path = tmp_path / f"{name}.jinja"
        path.write_text(text)
        status, swapped = engine.post("/swap_template", {"path": str(path)})
        assert status == 200, (name, swapped)
        files = rendering(text.strip("\n").replace("\\n", "\n"), engine.tokenizer)  # as SGLang reads the file
        for body in bodies():
            request = request_of(body)
            question = tokenize_request(request, prompt_form(request, "sglang"), "sglang")
            assert question is not None
            status, answer = engine.post(*question)
            tally.add(name, body, local(request, files, SGLANG, cache), answer["tokens"] if status == 200 else None)
    tally.check(f"SGLang, {engine.folder.parent.name}", capsys)


@on_vllm
def test_vllm_ids_are_the_engines(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    tally, cache = Tally(), ConversationCache(64 << 20)
    for name, text in templates().items():
        files = rendering(text, engine.tokenizer)
        for body in bodies():
            asked = {"model": "tiny", "chat_template": text, **body}
            status, answer = engine.post("/v1/chat/completions/render", asked)
            theirs = answer["token_ids"] if status == 200 else None
            tally.add(name, body, local(request_of(body), files, VLLM, cache), theirs)
    tally.check(f"vLLM, {engine.folder.parent.name}", capsys)


USER = {"role": "user", "content": "And now?"}
ANSWER = {"role": "assistant", "content": "This."}
ANTHROPIC: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello there"}]},
    {"system": "Be brief.", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {
        "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        ],
    },
    {
        "tools": [{"name": "add", "input_schema": {"properties": {"a": {"type": "integer"}}}}],
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1.50}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    },
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
]


@on_sglang
@pytest.mark.parametrize("number", range(len(ANTHROPIC)))
def test_anthropic_bodies_have_the_engines_token_count(engine: Engine, number: int, tmp_path: Path) -> None:
    name = "Qwen-Qwen3-0.6B"
    path = tmp_path / "t.jinja"
    path.write_text(templates()[name])
    assert engine.post("/swap_template", {"path": str(path)})[0] == 200
    body = {"model": "tiny", "max_tokens": 1, **ANTHROPIC[number]}
    request = parse_body("/v1/messages", json.dumps(body).encode())
    files = rendering(templates()[name].strip("\n").replace("\\n", "\n"), engine.tokenizer)
    ids = local(request, files, SGLANG, ConversationCache(1 << 20))
    assert isinstance(ids, bytes)
    status, answer = engine.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert (status, answer["input_tokens"]) == (200, len(ids) // 4)


@on_vllm
@pytest.mark.parametrize("number", range(len(ANTHROPIC)))
def test_vllm_counts_the_tokens_it_rendered_of_anthropic_bodies(engine: Engine, number: int) -> None:
    _rendered_and_served(engine, "/v1/messages", {"max_tokens": 1, **ANTHROPIC[number]})


@on_vllm
@pytest.mark.parametrize(
    "body", [{"input": "Hello there"}, {"instructions": "Be brief.", "input": [USER, ANSWER, USER]}]
)
def test_vllm_counts_the_tokens_it_rendered_of_responses_bodies(engine: Engine, body: dict[str, Any]) -> None:
    _rendered_and_served(engine, "/v1/responses", {"max_output_tokens": 1, **body})


def _rendered_and_served(engine: Engine, path: str, body: dict[str, Any]) -> None:
    """The ids that the router is given are as many as the engine says it prefilled."""
    request = parse_body(path, json.dumps({"model": "tiny", **body}).encode())
    question = tokenize_request(request, prompt_form(request, "vllm"), "vllm")
    assert question is not None
    status, rendered = engine.post(*question)
    assert (status, rendered.get("features")) == (200, None), rendered
    status, served = engine.post(path, {"model": "tiny", **body})
    assert (status, served["usage"]["input_tokens"]) == (200, len(rendered["token_ids"])), served


@on_sglang
def test_forwarded_ids_are_served_as_the_messages_are(engine: Engine, tmp_path: Path) -> None:
    """Greedy answers, finish reasons and usage are the same with `input_ids` beside the messages."""
    name = "Qwen-Qwen3-0.6B"
    path = tmp_path / "t.jinja"
    path.write_text(templates()[name])
    assert engine.post("/swap_template", {"path": str(path)})[0] == 200
    files = rendering(templates()[name].strip("\n").replace("\\n", "\n"), engine.tokenizer)
    plain = [body for body in bodies() if body.keys() == {"messages"}]
    compared = 0
    for body in plain:
        request = request_of(body)
        ids = local(request, files, SGLANG, ConversationCache(1 << 20))
        if isinstance(ids, NoIds):
            continue
        asked = {"model": "tiny", **body, "max_tokens": 24, "temperature": 0}
        answers = []
        for extra in ({}, {"input_ids": memoryview(ids).cast("I").tolist()}):
            engine.post("/flush_cache", b"")
            status, answer = engine.post("/v1/chat/completions", {**asked, **extra})
            assert status == 200, answer
            answers.append((answer["choices"], answer["usage"]))
        assert answers[0] == answers[1]
        compared += 1
    assert compared >= 8
