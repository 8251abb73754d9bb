"""Workers by role: who can take a request whole, who only one half of it. Pure.

A prefill or decode engine never receives plain traffic: it would wait for a partner that never comes (case 62).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PAIRED_ROUTES = {
    "sglang": frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"}),
    "vllm": frozenset({"/v1/chat/completions", "/v1/completions"}),
}
"""By dialect: routes whose bodies carry the hand-over fields (SGLang 0.5.23: PDRoutingFields and GenerateReqInput; vLLM
0.32: kv_transfer_params)."""
TEXT_ROUTES = frozenset({"/v1/tokenize", "/v1/detokenize"})
"""Routes that an engine answers without its scheduler: any role will do."""


class Member(Protocol):
    """What of a worker decides which pool it is in and whom it can be paired with."""

    @property
    def role(self) -> str:
        """plain, prefill or decode."""

    @property
    def group(self) -> str | None:
        """Transfer group by configuration or label; None: anybody's partner."""

    @property
    def dialect(self) -> str:
        """How its engine hands KV over (a key of `dialects.DIALECTS`): partners speak the same."""

    @property
    def can_meet(self) -> bool:
        """False for a prefill engine that says no place where a decode engine could meet it."""


W = TypeVar("W", bound=Member)


@dataclass(frozen=True, slots=True)
class Pools(Generic[W]):
    """The workers of one model, each in one pool, in the order given."""

    plain: Sequence[W] = ()
    prefill: Sequence[W] = ()
    decode: Sequence[W] = ()

    @property
    def split(self) -> bool:
        """There is at least half of a split pool."""
        return bool(self.prefill or self.decode)

    def missing(self) -> str | None:
        """The error code of the half that is missing; None when requests can be paired, or nothing is split."""
        if not self.split:
            return None
        if not self.prefill:
            return "no_prefill_workers"
        return None if any(partners(one, self.decode) for one in self.prefill) else "no_decode_workers"


def by_role(workers: Iterable[W]) -> Pools[W]:
    plain: list[W] = []
    prefill: list[W] = []
    decode: list[W] = []
    for worker in workers:
        if worker.role == "plain":
            plain.append(worker)
        elif worker.role == "decode":
            decode.append(worker)
        elif worker.can_meet:
            prefill.append(worker)
    return Pools(plain, prefill, decode)


def partners(prefill: W, decode: Sequence[W]) -> list[W]:
    """Those of `decode` that can take over what `prefill` computed."""
    group, dialect = prefill.group, prefill.dialect
    return [
        other
        for other in decode
        if other.dialect == dialect and (group is None or other.group is None or other.group == group)
    ]


def missing_text(code: str, model: str | None) -> str:
    """What clients and operators are told about half a pool."""
    name = f"model {model!r}" if model else "any model"
    here, there = ("decode", "prefill") if code == "no_prefill_workers" else ("prefill", "decode")
    return f"{name} has {here} engines and no {there} engine that can be paired with them now"
