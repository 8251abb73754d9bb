"""SGLang's load stream: one `LoadStat` array a message (engine contract, section 4)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.errors import ContractError

MAX_PAYLOAD_BYTES = 64 * 1024

Count = Annotated[int, Meta(ge=0, le=2**53)]


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag="LoadStat", gc=False):
    """One rank's load at one moment. The first six positions (tag included) are stable; later ones may be absent.

    The two `total_` fields are cumulative over the engine's life: only differences mean anything, and their quotient is
    the rank's real prefill speed. `rank` is what the engine says; the socket's rank is the one to believe (case 12).
    """

    running_requests: Count
    waiting_requests: Count
    kv_tokens_used: Count
    kv_tokens_capacity: Count
    rank: Count | None
    waiting_uncached_tokens: Count | None = None
    used_plus_queued_tokens: Count | None = None
    max_running_requests: Count | None = None
    total_prefill_uncached_tokens: Count | None = None
    total_prefill_busy_us: Count | None = None


_decoder = msgspec.msgpack.Decoder(LoadReport)


def decode_load(payload: bytes) -> LoadReport:
    """Raises ContractError for anything that is no load report: negative, not a number, too short, another type."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ContractError(f"load report of {len(payload)} bytes, over {MAX_PAYLOAD_BYTES}")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ContractError(f"load report not understood: {error}") from None
