"""Real engines: a router that joins late, eviction pressure, the host tier, flushes; vLLM through our own chain."""

from __future__ import annotations

import json
import os
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import START_LIMIT_S, scripts, setting
from tests.support.process import RouterProcess, fetch, free_ports, is_up, process, router, wait_until

pytestmark = pytest.mark.real_engine

SETTINGS: dict[str, Any] = {
    "timeouts": {"drain_s": 0.0, "grace_s": 5.0},
    "fleet": {"probe_timeout_s": 60.0, "unhealthy_after": 20},  # busy machines: these tests are not about health
}


def engine_ports() -> int:
    """The first of 60 ports: engines bind them long after somebody looked, so a shared machine needs fixed ones."""
    return int(os.environ.get("KV_ROUTER_ENGINE_PORTS") or free_ports(60))


@contextmanager
def sglang(folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """The URL of one real SGLang server, page 16, whose replay buffer holds three batches."""
    venv, model = setting("KV_ROUTER_SGLANG_VENV"), setting("KV_ROUTER_TINY_MODEL")
    port = engine_ports()
    kv = port + 5
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{kv}", "replay_endpoint": f"tcp://*:{kv + 20}"}
    command = ["bash", str(scripts() / "start_sglang_cpu.sh"), venv, model, str(port), str(kv), "16", *flags]
    command += ["--kv-events-config", json.dumps({**events, "topic": "kv-events", "buffer_steps": 3})]
    with process(command, folder / f"sglang-{port}.log", **environment):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_up(f"{url}/health"), START_LIMIT_S, f"{url}/health")
        yield url


@contextmanager
def joined(folder: Path, workers: list[dict[str, Any]], ranks: int) -> Iterator[RouterProcess]:
    folder.mkdir(exist_ok=True)
    with router(folder, workers, **SETTINGS) as running:
        wait_until(lambda: [r["state"] for r in running.ranks()] == ["live"] * ranks, 120, "every rank live")
        wait_until(lambda: is_up(f"{running.base}/ready"), 120, "a worker that can serve")
        yield running


def settle(running: RouterProcess) -> None:
    """Nothing is in flight and no rank's sequence moved between four looks."""
    seen: list[Any] = []

    def still() -> bool:
        seen.append([(r["last_seq"], r["inflight_requests"]) for r in running.ranks()])
        return len(seen) > 3 and seen[-1] == seen[-2] == seen[-3] == seen[-4]

    wait_until(still, 20, "event streams at rest")


class Rows(list[tuple[int, int, int]]):
    """(predicted, reported, prompt) tokens of sequential requests."""

    def summary(self, what: str) -> str:
        exact = sum(predicted == reported for predicted, reported, _ in self)
        over = sum(predicted > reported for predicted, reported, _ in self)
        return (
            f"{what}: {exact} of {len(self)} exact, {over} over-credited, hit rate {self.hit_rate:.3f} "
            f"(predicted {sum(row[0] for row in self)} of {sum(row[1] for row in self)} cached tokens)"
        )

    @property
    def hit_rate(self) -> float:
        return sum(row[1] for row in self) / sum(row[2] for row in self)

    @property
    def exact_share(self) -> float:
        return sum(row[0] == row[1] for row in self) / len(self)


def generate(running: RouterProcess, ids: list[int], rows: Rows, rank: int | None = None) -> int:
    """One request to SGLang's own route, once the events of the last one are in. Returns the rank that served."""
    settle(running)
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
    if rank is not None:
        body["routed_dp_rank"] = rank
    answer, headers = _post(running, "/generate", body)
    meta = answer["meta_info"]
    rows.append((int(headers["x-kv-router-cached-tokens"]), meta["cached_tokens"], meta["prompt_tokens"]))
    return int(headers["x-kv-router-rank"])


def complete(running: RouterProcess, ids: list[int], rows: Rows) -> None:
    settle(running)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 20, "temperature": 0}
    answer, headers = _post(running, "/v1/completions", body)
    usage = answer["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    rows.append((int(headers["x-kv-router-cached-tokens"]), cached, usage["prompt_tokens"]))


def _post(running: RouterProcess, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    request = urllib.request.Request(
        f"{running.base}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read()), answer.headers


class Talks:
    """Conversations of growing token-id prompts under two system prompts."""

    def __init__(self, seed: int, count: int = 6) -> None:
        self._rng = random.Random(seed)
        systems = [self._ids(300) for _ in range(2)]
        self.prompts = [[*systems[n % 2]] for n in range(count)]
        self.ranks = [0] * count
        """Where each was served last."""

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 4000) for _ in range(count)]

    def round(self, running: RouterProcess, *, pinned: bool = False) -> Rows:
        """`pinned`: the client sends every conversation where it was served last."""
        rows = Rows()
        for number, prompt in enumerate(self.prompts):
            prompt.extend(self._ids(60))
            self.ranks[number] = generate(running, prompt, rows, self.ranks[number] if pinned else None)
        return rows


def test_one_request_per_conversation_after_a_restart_the_hit_rate_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two routers over one server of two ranks: one is never restarted, the other is, beside full caches."""
    said = []
    with sglang(tmp_path, "--dp-size", "2", DP="2") as url, joined(tmp_path / "kept", [{"url": url}], 2) as kept:
        ours, others = Talks(1), Talks(2)
        with joined(tmp_path / "first", [{"url": url}], 2) as first:
            for _ in range(3):
                others.round(first)
                ours.round(kept)
        with joined(tmp_path / "second", [{"url": url}], 2) as second:
            assert [rank["history"] for rank in second.ranks()] == ["partial", "partial"]
            rates = []
            for number in range(3):
                restarted, never = others.round(second), ours.round(kept)
                said += [restarted.summary(f"round {number}, restarted"), never.summary(f"round {number}, never")]
                rates.append((restarted.hit_rate, never.hit_rate))
                assert all(predicted <= reported for predicted, reported, _ in restarted)
        with joined(tmp_path / "third", [{"url": url}], 2) as third:
            warm = [others.round(third, pinned=True) for _ in range(3)]
            said += [rows.summary(f"round {number}, restarted, pinned") for number, rows in enumerate(warm)]
            vouched = [rank["ledger"].get("vouched_blocks", 0) for rank in third.ranks()]
            said.append(f"blocks vouched for: {vouched}")
    with capsys.disabled():
        print("\n" + "\n".join(said))
    for after, before in rates[1:]:
        assert after >= before - 0.05
    assert sum(vouched) > 0
    assert all(predicted <= reported for rows in warm for predicted, reported, _ in rows)
    assert warm[1].exact_share == warm[2].exact_share == 1.0


@pytest.mark.parametrize("host_tier", [False, True], ids=["device only", "host tier"])
def test_predictions_stay_exact_under_eviction_pressure_and_after_a_flush(
    host_tier: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool of 3,000 tokens, prompts that take 11,000; then /flush_cache."""
    flags = ["--hicache-ratio", "1.6", "--hicache-write-policy", "write_through", "--hicache-io-backend", "direct"]
    flags = ["--enable-hierarchical-cache", *flags, "--hicache-mem-layout", "layer_first"] if host_tier else []
    environment = {"POOL_TOKENS": "3000"} | ({"SGL_CPU_HICACHE": "1"} if host_tier else {})
    rng, rows = random.Random(7), Rows()
    prompts = [[rng.randrange(10, 4000) for _ in range(500)] for _ in range(12)]
    with sglang(tmp_path, *flags, **environment) as url, joined(tmp_path / "r", [{"url": url}], 1) as running:
        for number in range(48):
            prompt = prompts[rng.randrange(12)] if number > 12 else prompts[number % 12]
            generate(running, prompt, rows)
            if number % 3 == 0:
                prompt.extend(rng.randrange(10, 4000) for _ in range(40))
        removed = running.ranks()[0]["ledger"]["removed_blocks"]
        blocks = running.ranks()[0]["blocks"]
        settle(running)
        urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", data=b""), timeout=30).close()
        wait_until(lambda: not running.ranks()[0]["blocks"], 2, "no blocks within 2 s of the flush")
        after = Rows()
        for prompt in prompts[:4] * 2:
            generate(running, prompt, after)
    with capsys.disabled():
        print(f"\n{rows.summary('pressure')}; {removed} blocks removed, held at the end {blocks}")
        print(after.summary("after the flush"))
    assert removed > 200
    assert sum(row[1] for row in rows) > 0
    assert rows.exact_share >= 0.99
    assert after.exact_share == 1.0
    assert sum(row[1] for row in after) > 0


@pytest.mark.parametrize("form", ["ints", "bytes"])
def test_vllm_is_exact_through_our_own_chain(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block hashes as 64-bit ints (the default), and as 32-byte digests; then a router that joins late."""
    venv, model = setting("KV_ROUTER_VLLM_VENV"), setting("KV_ROUTER_TINY_MODEL")
    port = engine_ports()
    kv = port + 5
    command = ["bash", str(scripts() / "start_vllm_cpu.sh"), venv, model, str(port), str(kv)]
    environment = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"} if form == "bytes" else {}
    events = {"endpoint_port_base": kv, "dp_size": 1, "block_size": 32, "topic": "kv-events"}
    rng, said = random.Random(3), []
    systems = [[rng.randrange(10, 4000) for _ in range(300)] for _ in range(2)]
    prompts = [[*systems[n % 2]] for n in range(8)]
    with process(command, tmp_path / "vllm.log", **environment):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_up(f"{url}/health"), START_LIMIT_S, f"{url}/health")
        whole = [{"url": url, "kv_events": {**events, "replay_endpoint_port_base": kv + 20}}]
        rows = Rows()
        with joined(tmp_path / "whole", whole, 1) as running:
            for _ in range(6):
                for prompt in prompts:
                    prompt.extend(rng.randrange(10, 4000) for _ in range(70))
                    complete(running, prompt, rows)
            assert fetch(f"{running.admin}/workers")["workers"][0]["hash"] == "xxh3"
            said.append(rows.summary(f"vLLM, {form}"))
        late = Rows()
        with joined(tmp_path / "late", [{"url": url, "kv_events": events}], 1) as running:
            for _ in range(3):
                for prompt in prompts:
                    prompt.extend(rng.randrange(10, 4000) for _ in range(70))
                    complete(running, prompt, late)
            vouched = running.ranks()[0]["ledger"].get("vouched_blocks", 0)
        said += [
            Rows(late[:8]).summary("a late joiner's first round"),
            Rows(late[8:]).summary(f"then ({vouched} vouched)"),
        ]
    with capsys.disabled():
        print("\n" + "\n".join(said))
    assert rows.exact_share >= 0.95
    assert all(predicted <= reported for predicted, reported, _ in late)
    assert Rows(late[8:]).exact_share >= 0.95
