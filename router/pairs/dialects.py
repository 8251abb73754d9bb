"""What makes two engines meet over one prompt, spliced into the client's body for each of them. Pure.

SGLang 0.5.23 (`sglang`): both legs are sent at once, with the same `bootstrap_host`, `bootstrap_port` and
`bootstrap_room`; the decode engine asks the prefill engine's bootstrap server for the room and answers the client.
vLLM 0.32 (`vllm`): the prefill leg goes first, for one token, and its answer names the blocks in `kv_transfer_params`,
which the decode leg carries.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.proxy.splice import set_fields

MAX_ROOM = 2**63 - 1
"""Rooms are kept in a signed 64-bit tensor, and 0 there means none (SGLang 0.5.23, MetadataBuffers)."""
REMOTE_DECODE = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
"""vLLM's NIXL connector: compute the prompt, keep its blocks for another engine."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one prompt (or batch) is handed over. A rank is None where its engine has only one.

    `host` is the prefill engine's, IPv6 without brackets. Each of `prompts` has a room of its own.
    """

    host: str
    port: int | None
    prefill_rank: int | None = None
    prefill_ranks: int = 1
    decode_rank: int | None = None
    prompts: int = 1
    client_named_rank: bool = False
    """The client's body or head names a rank, which both legs must not obey alike."""


class Dialect(Protocol):
    """One request's hand-over. Made anew for every pair: a retry never meets in an earlier try's room (case 62)."""

    together: bool
    """Both legs are sent at once; else the decode leg waits for the prefill leg's answer."""

    def prefill(self, body: bytes) -> bytes:
        """The prefill leg's body. Raises ValueError when `body` is no JSON object."""

    def decode(self, body: bytes, answer: bytes) -> bytes:
        """The decode leg's body; `answer` is the prefill leg's, empty when both go together. Raises ValueError when
        the answer names nothing to take over."""


class SglangDialect:
    """See the module's head. The ranks of both sides are named: the room alone would say prefill rank = room modulo
    ranks to both engines, so rooms are drawn to agree with that as well (engines that do not know
    `disagg_prefill_dp_rank`)."""

    together = True

    def __init__(self, meeting: Meeting, rng: random.Random) -> None:
        self._meeting = meeting
        self.rooms = fresh_rooms(meeting, rng)

    def prefill(self, body: bytes) -> bytes:
        fields = self._shared()
        # Nobody reads this answer but the router, which wants its usage: whole, also when the client streams.
        fields |= {name: value for name, value in _UNSTREAMED.items() if name.encode() in body}
        return set_fields(body, fields | self._rank(self._meeting.prefill_rank))

    def decode(self, body: bytes, answer: bytes) -> bytes:
        return set_fields(body, self._shared() | self._rank(self._meeting.decode_rank))

    def _shared(self) -> dict[str, bytes]:
        meeting = self._meeting
        host, port = msgspec.json.encode(meeting.host), str(meeting.port).encode()
        if meeting.prompts > 1:
            count = len(self.rooms)
            fields = {
                "bootstrap_host": b"[%b]" % b",".join([host] * count),
                "bootstrap_port": b"[%b]" % b",".join([port] * count),
                "bootstrap_room": msgspec.json.encode(self.rooms),
            }
        else:
            fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": str(self.rooms[0]).encode()}
        if meeting.prefill_rank is not None:
            fields["disagg_prefill_dp_rank"] = str(meeting.prefill_rank).encode()
        return fields

    def _rank(self, rank: int | None) -> dict[str, bytes]:
        if rank is not None:
            return {"routed_dp_rank": str(rank).encode()}
        return {"routed_dp_rank": b"0"} if self._meeting.client_named_rank else {}


_UNSTREAMED = {"stream": b"false", "stream_options": b"null"}


def fresh_rooms(meeting: Meeting, rng: random.Random) -> list[int]:
    """One room a prompt, each from 1 to MAX_ROOM and congruent to the prefill rank."""
    ranks = meeting.prefill_ranks if meeting.prefill_rank is not None else 1
    rank = meeting.prefill_rank or 0
    first = 1 if rank == 0 else 0
    last = (MAX_ROOM - rank) // ranks
    rooms: dict[int, None] = {}
    while len(rooms) < meeting.prompts:
        rooms[rng.randint(first, last) * ranks + rank] = None
    return list(rooms)


class _Handed(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class VllmDialect:
    """See the module's head."""

    together = False

    def __init__(self, meeting: Meeting, rng: random.Random) -> None:
        self._meeting = meeting

    def prefill(self, body: bytes) -> bytes:
        fields = {"kv_transfer_params": REMOTE_DECODE, "max_tokens": b"1"}
        optional = {**_UNSTREAMED, "max_completion_tokens": b"1", "min_tokens": b"0"}
        fields |= {name: value for name, value in optional.items() if name.encode() in body}
        return set_fields(body, fields)

    def decode(self, body: bytes, answer: bytes) -> bytes:
        try:
            params = bytes(msgspec.json.decode(answer, type=_Handed).kv_transfer_params)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            params = b""
        if not params.startswith(b"{"):
            raise ValueError("the prefill engine's answer has no kv_transfer_params: is its KV connector set?")
        return set_fields(body, {"kv_transfer_params": params})


DIALECTS: dict[str, type[SglangDialect] | type[VllmDialect]] = {"sglang": SglangDialect, "vllm": VllmDialect}
