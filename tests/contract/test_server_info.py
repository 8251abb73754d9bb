from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract.server_info import ServerInfo, parse_server_info
from router.errors import ContractError

STARTUP = {"load_weight": 0.06712926399995922, "scheduler_e2e": 2.235096149000128, "tokenizer_e2e": 21.624951380000084}


def real(**changes: object) -> dict[str, Any]:
    """Trimmed from a real SGLang 0.5.23 at `--dp-size 2` (sgl_dp2_server_info.json)."""
    state = {
        "page_size": 64,
        "dcp_size": 1,
        "speculative_algorithm": None,
        "max_total_tokens": 20000,
        "effective_max_running_requests_per_dp": 8,
        "memory_usage": {"weight": 0.003, "kvcache": 0.01, "token_capacity": 19968, "token_capacity_swa": None},
    }
    body: dict[str, Any] = {
        "model_path": "/models/tiny",
        "tokenizer_path": "/models/tiny",
        "served_model_name": "tiny",
        "chat_template": None,
        "default_chat_template_kwargs": None,
        "context_length": 4096,
        "page_size": 64,
        "dcp_size": 1,
        "dp_size": 2,
        "tp_size": 1,
        "max_running_requests": 8,
        "max_total_tokens": 20000,
        "disaggregation_mode": "null",
        "disaggregation_bootstrap_port": 8998,
        "speculative_algorithm": None,
        "enable_cache_report": True,
        "cuda_graph_config": {"decode": {"backend": "disabled", "bs": [1, 2, 3]}},
        "watermark_key": "<redacted>",
        "status": "ready",
        "version": "0.5.23",
        "max_total_num_tokens": 19968,
        "startup_time": STARTUP,
        "internal_states": [state, state],
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5730,
            "block_size": 64,
            "dp_size": 2,
        },
    }
    return body | changes


def parsed(**changes: object) -> ServerInfo:
    return parse_server_info(json.dumps(real(**changes)).encode())


def test_a_real_sglang_body_is_read() -> None:
    info = parsed()
    assert info == ServerInfo(
        engine="sglang",
        version="0.5.23",
        status="ready",
        model_names=("tiny",),
        model_path="/models/tiny",
        tokenizer_path="/models/tiny",
        says_role=True,
        bootstrap_port=8998,
        page_size=64,
        dp_size=2,
        max_total_tokens=19968,
        max_running_requests=8,
        context_length=4096,
        cache_report=True,
        startup_fingerprint=info.startup_fingerprint,
        kv_events=real()["kv_events"],
    )
    assert len(info.startup_fingerprint) == 16


# Shape of vLLM 0.32.0's body: captures/engine/vllm_http.jsonl, path /server_info.
VLLM = (
    "model='/models/tiny', speculative_config=None, tokenizer='/models/tok', skip_tokenizer_init=False, "
    "tokenizer_mode=auto, data_parallel_size=4, device_config=cpu, seed=0, served_model_name=tiny, "
    "compilation_config={'mode': 0, 'model': 'no'}"
)


def test_a_vllm_body_says_names_and_no_descriptor() -> None:
    info = parse_server_info(json.dumps({"vllm_config": VLLM, "vllm_env": {"X": 1}, "version": "0.32.0"}).encode())
    assert info == ServerInfo(
        engine="vllm",
        version="0.32.0",
        model_names=("tiny",),
        model_path="/models/tiny",
        tokenizer_path="/models/tok",
        dp_size=4,
    )


@pytest.mark.parametrize("said", ["…", "", None, 5, {"model_config": {}}, "served_model_name=['a', 'b'], model=None"])
def test_an_unreadable_vllm_configuration_costs_only_the_names(said: object) -> None:
    info = parse_server_info(json.dumps({"vllm_config": said, "version": "0.32.0"}).encode())
    assert info == ServerInfo(engine="vllm", version="0.32.0")


def test_capacity_is_the_live_pool_times_the_context_parallel_size() -> None:
    """Under DCP the pool is sharded: a request sees all shards (contract, section 1)."""
    state = real()["internal_states"][0] | {"dcp_size": 4}
    assert parsed(dcp_size=4, internal_states=[state]).max_total_tokens == 4 * 19968
    assert parsed(max_total_num_tokens=None).max_total_tokens == 19968, "the scheduler's token_capacity"
    assert parsed(max_total_num_tokens=None, internal_states=[]).max_total_tokens is None, "never the asked-for 20000"


def test_the_schedulers_live_values_beat_what_was_asked_for() -> None:
    state = real()["internal_states"][0] | {
        "page_size": 128,
        "speculative_algorithm": "EAGLE3",
        "effective_max_running_requests_per_dp": 4,
    }
    info = parsed(page_size=1, max_running_requests=4096, internal_states=[state])
    assert (info.page_size, info.max_running_requests, info.bigram) == (128, 4, True)
    alone = parsed(internal_states=None, page_size=1, max_running_requests=4096)
    assert (alone.page_size, alone.max_running_requests) == (1, 4096)


@pytest.mark.parametrize(
    ("algorithm", "bigram"),
    [
        *[(name, True) for name in ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP", "eagle")],
        *[(name, False) for name in ("STANDALONE", "NGRAM", "DFLASH", None, "", 5)],
    ],
)
def test_the_eagle_family_keys_its_tree_by_pairs(algorithm: object, bigram: bool) -> None:
    """dynamo#10982: a name set that misses EAGLE3 or FROZEN_KV_MTP gives an overlap of always 0."""
    assert parsed(speculative_algorithm=algorithm).bigram is bigram


@pytest.mark.parametrize(
    ("mode", "role"),
    [("null", "plain"), (None, "plain"), ("prefill", "prefill"), ("decode", "decode"), ("x", "plain"), (1, "plain")],
)
def test_role_follows_the_disaggregation_mode(mode: object, role: str) -> None:
    info = parsed(disaggregation_mode=mode)
    assert info.role == role
    assert info.says_role == (mode in ("null", "prefill", "decode"))


@pytest.mark.parametrize(
    ("served", "names"),
    [
        ("tiny", ("tiny",)),
        (["a", "b", "a"], ("a", "b")),
        (["a", 5, None], ("a",)),
        ([], ("/models/tiny",)),
        (None, ("/models/tiny",)),
        ("", ("/models/tiny",)),
        ({"x": 1}, ("/models/tiny",)),
    ],
)
def test_model_names_are_the_served_ones_and_the_path_only_as_last_resort(
    served: object, names: tuple[str, ...]
) -> None:
    """Case 93."""
    assert parsed(served_model_name=served).model_names == names


def test_the_startup_fingerprint_is_opaque_and_tells_starts_apart() -> None:
    first = parsed()
    assert first.startup_fingerprint == parsed(max_running_requests=9).startup_fingerprint
    assert first.startup_fingerprint != parsed(startup_time=STARTUP | {"tokenizer_e2e": 21.62}).startup_fingerprint
    assert parsed(startup_time=None).startup_fingerprint == ""
    assert parsed(startup_time="odd").startup_fingerprint != ""


@pytest.mark.parametrize("given", [{"thinking": True}, '{"thinking": true}'])
def test_default_template_arguments_come_as_object_or_as_text(given: object) -> None:
    assert parsed(default_chat_template_kwargs=given).default_chat_template_kwargs == {"thinking": True}


@pytest.mark.parametrize("key", sorted(set(real()) - {"model_path"}))
@pytest.mark.parametrize("odd", [[[]], {"x": []}, -1, 1.5, True, "\ud800", None])
def test_one_field_of_a_wrong_type_costs_only_itself(key: str, odd: object) -> None:
    """Case 14."""
    assert parsed(**{key: odd}).model_path == "/models/tiny"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"<html>502</html>",
        b'{"page_size":',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * 5_000_000,
        b'{"version":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(11),
)
def test_what_is_no_json_object_is_a_contract_error(body: bytes) -> None:
    with pytest.raises(ContractError, match="/server_info"):
        parse_server_info(body)


def test_an_object_of_something_else_is_an_unknown_engine() -> None:
    assert parse_server_info(b'{"error":"not found"}') == ServerInfo()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), "\ud800"])
def test_values_only_python_writes_do_not_change_the_rest_or_look_like_a_restart(odd: object) -> None:
    info = parsed(watermark_key=odd, version=odd)
    assert info.version is None
    assert info.startup_fingerprint == parsed().startup_fingerprint
    assert info.kv_events == parsed().kv_events


@given(st.dictionaries(st.sampled_from([*real(), "vllm_config"]), json_values), st.binary(max_size=4))
def test_any_body_is_read_or_a_contract_error(changes: dict[str, Any], tail: bytes) -> None:
    body = json.dumps(real(**changes)).encode()
    info = parse_server_info(body)
    assert info.dcp_size >= 1
    assert info.dp_size >= 1
    for broken in (body + tail, body[: len(body) // 2] + tail, tail):
        try:
            parse_server_info(broken)
        except ContractError:
            continue
