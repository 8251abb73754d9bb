"""Two real SGLang servers behind the router: what it predicts is what the engine reports."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.process import RouterProcess, fetch, router, wait_until

pytestmark = pytest.mark.real_engine

TEXT = """router engine cache prefix block page rank token prefill decode stream event replay sequence window
tenant planet river copper violet seventeen because unless however between import return lambda yield"""
WORDS = TEXT.split()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def served(sglang_pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder: Path = tmp_path_factory.mktemp("router")
    with router(folder, sglang_pair) as running:
        wait_until(lambda: [r["state"] for r in running.ranks()] == ["live"] * 3, 60, "all three ranks live")
        yield running


def settle(running: RouterProcess) -> None:
    """Events of the last request are in: no rank's sequence moved between two looks, and nothing is in flight."""
    seen: list[Any] = []

    def still() -> bool:
        seen.append([(r["last_seq"], r["inflight_requests"]) for r in running.ranks()])
        return len(seen) > 3 and seen[-1] == seen[-2] == seen[-3] == seen[-4]

    wait_until(still, 10, "event streams at rest")


class Tally:
    """Predicted against reported cached tokens, request by request."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, int]] = []

    def add(self, headers: Any, predicted: int, reported: int, prompt: int) -> None:
        self.rows.append(
            (f"{headers['x-kv-router-worker']}#{headers['x-kv-router-rank']}", predicted, reported, prompt)
        )

    def check(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        exact = sum(predicted == reported for _, predicted, reported, _ in self.rows)
        reported = sum(r[2] for r in self.rows)
        with capsys.disabled():
            print(
                f"\n{name}: {exact} of {len(self.rows)} requests exact, {reported} of {sum(r[3] for r in self.rows)} "
                f"prompt tokens cached, targets {sorted({r[0] for r in self.rows})}"
            )
        wrong = [row for row in self.rows if row[1] != row[2]]
        assert exact >= 0.99 * len(self.rows), wrong
        assert reported > 0, "nothing was ever cached: the comparison would prove nothing"


def conversations(rng: random.Random) -> list[list[dict[str, str]]]:
    systems = [words(rng, 150) for _ in range(3)]
    return [[{"role": "system", "content": systems[i % 3]}] for i in range(9)]


def test_predicted_cached_tokens_equal_the_engines_over_multi_turn_chat(
    served: RouterProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    client, rng, tally = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none"), random.Random(5), Tally()
    talks = conversations(rng)
    for turn in range(5):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": words(rng, 40)})
            settle(served)
            if (turn + number) % 2:
                answer, headers, usage = stream(client, talk)
            else:
                answer, headers, usage = whole(client, talk)
            tally.add(headers, int(headers["x-kv-router-cached-tokens"]), cached(usage), usage.prompt_tokens)
            talk.append({"role": "assistant", "content": answer})
    tally.check("chat, streaming and not, 9 conversations × 5 turns", capsys)
    assert len({row[0] for row in tally.rows}) == 3, "every rank served"


def whole(client: openai.OpenAI, talk: Any) -> tuple[str, Any, Any]:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=talk, max_tokens=12, temperature=0)
    answer = raw.parse()
    return answer.choices[0].message.content or "", raw.headers, answer.usage


def stream(client: openai.OpenAI, talk: Any) -> tuple[str, Any, Any]:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=talk,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in raw.parse():
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    return text, raw.headers, usage


def cached(usage: Any) -> int:
    details = usage.prompt_tokens_details
    return int(details.cached_tokens or 0) if details is not None else 0


def test_the_rank_the_router_chose_is_the_rank_that_served(
    served: RouterProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same through DP-rank pinning; /generate's meta_info names the rank that served."""
    rng, tally, pins = random.Random(8), Tally(), []
    prompts = [[rng.randrange(10, 4000) for _ in range(600)] for _ in range(6)]
    for turn in range(8):
        for prompt in prompts:
            prompt.extend(rng.randrange(10, 4000) for _ in range(30 * (turn > 0)))
            settle(served)
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            decision = served.route("/generate", body)
            answer, headers = generate(served, body)
            meta = answer["meta_info"]
            tally.add(headers, int(headers["x-kv-router-cached-tokens"]), meta["cached_tokens"], meta["prompt_tokens"])
            two_ranks = sum(c["worker"] == headers["x-kv-router-worker"] for c in decision["candidates"]) > 1
            if two_ranks:
                pins.append((int(headers["x-kv-router-rank"]), meta["dp_rank"]))
    tally.check("/generate with input_ids, 6 prompts × 8 turns", capsys)
    assert pins
    assert all(chosen == served_by for chosen, served_by in pins), pins


def generate(served: RouterProcess, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import json
    import urllib.request

    request = urllib.request.Request(
        f"{served.base}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read()), answer.headers


def test_flush_on_the_engine_is_seen_as_an_empty_cache(served: RouterProcess, sglang_pair: list[str]) -> None:
    settle(served)
    for url in sglang_pair:
        import urllib.request

        request = urllib.request.Request(f"{url}/flush_cache", data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    wait_until(lambda: all(not r["blocks"] for r in served.ranks()), 5, "no blocks on any rank")
    assert fetch(f"{served.admin}/workers")["workers"][0]["state"] == "ready"
