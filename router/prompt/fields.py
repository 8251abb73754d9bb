"""The keys of a request body that routing may read, as data."""

from __future__ import annotations

from typing import Any

import msgspec

ABSENT = msgspec.Raw()


class _Seldom(msgspec.Struct, gc=False):
    """Keys that most chat bodies lack, as raw JSON."""

    sampling_params: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    rid: msgspec.Raw = ABSENT
    routed_dp_rank: msgspec.Raw = ABSENT
    data_parallel_rank: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    input_embeds: msgspec.Raw = ABSENT
    image_data: msgspec.Raw = ABSENT
    video_data: msgspec.Raw = ABSENT
    audio_data: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT
    bootstrap_pair_key: msgspec.Raw = ABSENT
    decode_tp_size: msgspec.Raw = ABSENT
    disagg_prefill_dp_rank: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT


class Fields(_Seldom, gc=False):
    """Known top-level keys as raw JSON, ABSENT where the key is not there; a repeated key keeps its last value."""

    model: msgspec.Raw = ABSENT
    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    n: msgspec.Raw = ABSENT
    max_tokens: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    session_id: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class SamplingParams(msgspec.Struct, gc=False):
    n: int | None = None
    max_new_tokens: int | None = None


class Usual(_Seldom, gc=False):
    """A chat body, its usual keys decoded in one go, each of the one type that every engine takes."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    messages: list[Any] | None = None


_SELDOM = len(_Seldom.__struct_fields__)
_NOTHING_SELDOM = msgspec.structs.astuple(_Seldom())
NO_FIELDS = Fields()

decode_fields = msgspec.json.Decoder(Fields).decode
decode_usual = msgspec.json.Decoder(Usual).decode


def has_seldom(usual: Usual) -> bool:
    """Whether any key but the usual ones is there."""
    return msgspec.structs.astuple(usual)[:_SELDOM] != _NOTHING_SELDOM
