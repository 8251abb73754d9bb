"""Pools by role: who may be paired, and which half is missing (case 62)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.pairs.pools import Pools, by_role, missing_text, partners


@dataclass(frozen=True)
class One:
    name: str
    role: str = "plain"
    group: str | None = None
    dialect: str = "sglang"
    can_meet: bool = True


P, D, X = One("p", "prefill"), One("d", "decode"), One("x")


def test_every_worker_is_in_the_pool_of_its_role_in_order() -> None:
    other = One("p2", "prefill")
    assert by_role([P, X, D, other]) == Pools([X], [P, other], [D])


def test_a_prefill_engine_that_cannot_be_met_is_in_no_pool() -> None:
    pools = by_role([One("p", "prefill", can_meet=False), D])
    assert pools == Pools([], [], [D])
    assert pools.missing() == "no_prefill_workers"


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ([], None),
        ([X], None),
        ([P, D], None),
        ([P], "no_decode_workers"),
        ([X, P], "no_decode_workers"),
        ([D], "no_prefill_workers"),
        ([One("p", "prefill", "a"), One("d", "decode", "b")], "no_decode_workers"),
        ([One("p", "prefill"), One("d", "decode", dialect="vllm")], "no_decode_workers"),
        ([One("p", "prefill", "a"), P, One("d", "decode", "b")], None),
    ],
)
def test_the_missing_half_is_named(workers: list[One], code: str | None) -> None:
    assert by_role(workers).missing() == code


def test_partners_share_group_and_dialect_and_no_label_is_anybodys() -> None:
    a, b, none = One("a", "decode", "a"), One("b", "decode", "b"), One("n", "decode")
    assert partners(One("p", "prefill", "a"), [a, b, none]) == [a, none]
    assert partners(P, [a, b, none]) == [a, b, none]
    assert partners(One("p", "prefill", dialect="vllm"), [a, b, none]) == []


def test_what_is_said_names_what_is_there_and_what_is_not() -> None:
    assert missing_text("no_decode_workers", "m").startswith("model 'm' has prefill engines and no decode engine")
    assert missing_text("no_prefill_workers", None).startswith("any model has decode engines and no prefill engine")
