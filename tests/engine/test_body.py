"""Which requests are accepted, and what they ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.engine.body import CHAT, COMPLETIONS, GENERATE, BadRequest, Call, read_call
from router.engine.options import EngineOptions
from router.engine.text import TextCodec
from router.hashing import Namespace, pack_ids

OPTIONS = EngineOptions(dp_size=2, context_length=100)


@pytest.fixture
def read(codec: TextCodec) -> Any:
    def reader(path: str, headers: dict[str, str] | None = None, **body: Any) -> Call:
        return read_call(path, json.dumps(body).encode(), headers or {}, OPTIONS, codec)

    return reader


def test_every_legal_prompt_form_is_read(read: Any, codec: TextCodec) -> None:
    """Case 38."""
    hello, ids = codec.encode("hello"), pack_ids([1, 2])
    forms: list[tuple[str, dict[str, Any], list[bytes]]] = [
        (COMPLETIONS, {"prompt": "hello"}, [hello]),
        (COMPLETIONS, {"prompt": ["hello", "hello"]}, [hello, hello]),
        (COMPLETIONS, {"prompt": [1, 2]}, [ids]),
        (COMPLETIONS, {"prompt": [[1, 2], [1, 2]]}, [ids, ids]),
        (GENERATE, {"text": "hello"}, [hello]),
        (GENERATE, {"input_ids": [1, 2]}, [ids]),
        (GENERATE, {"input_ids": [[1, 2], [1, 2]]}, [ids, ids]),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "input_ids": [1, 2]}, [ids]),
    ]
    for path, body, prompts in forms:
        assert [sequence.ids for sequence in read(path, **body).sequences] == prompts, body


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": []}, "none empty"),
        (COMPLETIONS, {"prompt": [-5]}, "token ids must be integers"),
        (COMPLETIONS, {"prompt": [True]}, "token ids must be integers"),
        (COMPLETIONS, {"prompt": [1 << 40]}, "token ids must be integers"),
        (GENERATE, {}, "Either text or input_ids"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "Either text or input_ids"),
        (CHAT, {"messages": []}, "Messages cannot be empty."),
        (CHAT, {}, "valid list"),
        (COMPLETIONS, {"prompt": [1], "max_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        (COMPLETIONS, {"prompt": [1], "max_tokens": "8"}, "valid integer"),
        (COMPLETIONS, {"prompt": [1], "n": 0}, "1 to 1024"),
        (COMPLETIONS, {"prompt": [1] * 100}, "The input (100 tokens) is longer than the model's context length"),
        (COMPLETIONS, {"prompt": [1] * 90, "max_tokens": 11}, "You requested a total of 101 tokens"),
        (COMPLETIONS, {"prompt": [1], "routed_dp_rank": 2}, "routed_dp_rank=2 out of range [0, 2)"),
        (COMPLETIONS, {"prompt": [1], "data_parallel_rank": -1}, "routed_dp_rank=-1 out of range [0, 2)"),
    ],
)
def test_what_sglang_refuses_is_refused(read: Any, path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, **body)
    assert message in str(refused.value)
    assert refused.value.status == 400


def test_the_rank_header_beats_the_body_on_openai_routes_and_is_ignored_on_generate(read: Any) -> None:
    """Engine contract, section 5."""
    header = {"X-Data-Parallel-Rank": "1"}
    assert read(COMPLETIONS, header, prompt=[1], routed_dp_rank=0).rank == 1
    assert read(GENERATE, header, input_ids=[1], routed_dp_rank=0).rank == 0
    assert read(GENERATE, header, input_ids=[1]).rank is None
    assert read(COMPLETIONS, prompt=[1], data_parallel_rank=1).rank == 1
    with pytest.raises(BadRequest, match="must be an integer, got 'abc'"):
        read(COMPLETIONS, {"X-Data-Parallel-Rank": "abc"}, prompt=[1])


def test_namespaces_are_read_one_a_prompt(read: Any) -> None:
    call = read(GENERATE, input_ids=[[1], [2]], cache_salt=["a", None], extra_key="k")
    assert [sequence.namespace for sequence in call.sequences] == [
        Namespace(cache_salt="a", extra_key="k"),
        Namespace(extra_key="k"),
    ]


def test_the_adapter_in_the_model_name_beats_lora_path(read: Any) -> None:
    assert read(COMPLETIONS, prompt=[1], model="tiny:ad").sequences[0].namespace == Namespace(lora_name="ad")
    assert read(COMPLETIONS, prompt=[1], model="tiny:ad", lora_path="p").sequences[0].namespace.lora_name == "ad"
    assert read(COMPLETIONS, prompt=[1], lora_path="p").sequences[0].namespace.lora_name == "p"
    assert read(COMPLETIONS, prompt=[1], model="other:ad").sequences[0].namespace.lora_name is None


def test_several_sequences_get_rids_that_the_clients_rid_is_a_prefix_of(read: Any) -> None:
    call = read(COMPLETIONS, prompt=[[1], [2]], n=2, rid="mine")
    assert call.rid == "mine"
    assert [sequence.rid for sequence in call.sequences] == ["mine_0", "mine_1", "mine_2", "mine_3"]


def test_a_body_that_is_json_but_no_object_is_a_plain_500(codec: TextCodec) -> None:
    """Engine contract, section 5."""
    with pytest.raises(BadRequest) as refused:
        read_call(CHAT, b"[1]", {}, OPTIONS, codec)
    assert (refused.value.status, refused.value.type) == (500, "plain")
