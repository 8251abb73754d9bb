"""Flags → options, and the values that make no engine."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from router.engine.options import EngineOptions, add_engine_arguments, options_from
from router.errors import ConfigError


def parsed(*flags: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return options_from(parser.parse_args(flags))


def test_no_flags_are_the_defaults() -> None:
    assert parsed() == EngineOptions()


def test_every_promised_flag_is_taken() -> None:
    flags = """
        --port 0 --kv-port 5700 --page-size 64 --dcp-size 4 --dp-size 2 --tokens 4096 --load-port 5710
        --replay-port 5720 --format dynamo --eagle --role plain --prefill-tokens-per-s 5e3 --decode-ms 20
        --max-running 4 --chunk-tokens 512 --model m --time-scale 0.5
    """
    options = parsed(*flags.split())
    assert (options.kv_port, options.load_port, options.replay_port) == (5700, 5710, 5720)
    assert (options.block_tokens, options.dp_size, options.tokens, options.format) == (256, 2, 4096, "dynamo")
    assert (options.eagle, options.model, options.time_scale) == (True, "m", 0.5)
    timing = options.timing
    assert (timing.prefill_tokens_per_s, timing.decode_step_s, timing.max_running) == (5000.0, 0.02, 4)
    assert timing.chunk_tokens == 512


def test_sockets_can_be_turned_off() -> None:
    options = parsed("--kv-port", "off", "--load-port", "off")
    assert (options.kv_port, options.replay_port, options.load_port) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transfer_fault": "sometimes"}, "none, never or fails"),
        ({"decode_radix_cache": True}, "--role decode"),
        ({"transfer_tokens_per_s": 0.0}, "--transfer-tokens-per-s"),
        ({"role": "cook"}, "plain, prefill or decode"),
        ({"format": "yaml"}, "default or dynamo"),
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"tokens": 60, "page_size": 16, "dcp_size": 4}, "less than one block of 64"),
        ({"kv_port": 65535, "dp_size": 2}, "--kv-port 65535: 2 ports"),
        ({"time_scale": 0.0}, "--time-scale"),
        ({"kv_port": None, "replay_port": 5}, "--replay-port off"),
    ],
)
def test_what_makes_no_engine_is_a_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**settings)
