"""Fields that belong to the traffic between routers and engines, when a client sends them (case 107).

A bootstrap host makes an engine connect to wherever it names, so those are refused unless configured. A data-parallel
rank is the client's to choose, but only one that exists: out of range it has crashed controllers.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import RouterError
from router.fleet.worker import Worker
from router.prompt.body import RequestBody, present
from router.prompt.fields import ABSENT

RANK_HEADER = "x-data-parallel-rank"
RANK_FIELDS = frozenset({"routed_dp_rank", "data_parallel_rank"})
INTERNAL_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "kv_transfer_params",
)
"""SGLang 0.5.23's GenerateReqInput and vLLM 0.32's kv_transfer_params: prefill/decode hand-over."""
MAX_RANK_DIGITS = 6


def refuse_internal(request: RequestBody) -> None:
    """Raises RouterError("bad_request") when the client's body holds an internal field."""
    if request.usual:
        return
    fields = request.fields
    for name in INTERNAL_FIELDS:
        value = getattr(fields, name)
        if value is not ABSENT and present(value):
            text = f"{name} is between router and engine (listen.allow_internal_fields lets clients send it)"
            raise RouterError("bad_request", text)


def client_rank_of(route: str, headers: Mapping[str, str], request: RequestBody) -> int | None:
    """The rank the client pinned: the header beats the body on OpenAI routes and is ignored on /generate (contract,
    section 5). Raises RouterError("bad_request") for what is no rank."""
    named = headers.get(RANK_HEADER) if route != "/generate" else None
    if named is not None:
        digits = named.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_RANK_DIGITS):
            raise RouterError("bad_request", f"{RANK_HEADER} must be a data-parallel rank: 0, 1, …")
        return int(digits)
    rank = request.routed_dp_rank
    if (rank is not None and rank < 0) or (request.odd and request.odd & RANK_FIELDS):
        raise RouterError("bad_request", "routed_dp_rank must be a data-parallel rank: 0, 1, …")
    return rank


def with_rank(workers: list[Worker], rank: int) -> list[Worker]:
    """Those of `workers` that have this rank, by their streams or by their own account.

    Raises RouterError("bad_request") when there are workers and none has it.
    """
    found = [w for w in workers if rank < max(len(w.ranks), (w.info.dp_size or 1) if w.info is not None else 1)]
    if workers and not found:
        raise RouterError("bad_request", f"no worker of this model has a data-parallel rank {rank}")
    return found
