from __future__ import annotations

import pytest
from multidict import CIMultiDict

from router.proxy.headers import AnswerFields, ClientKeys, for_worker, forwardable, request_id

NO_KEYS = ClientKeys(())


def test_hop_by_hop_fields_and_those_named_by_connection_stay() -> None:
    """Case 71."""
    fields = [
        (b"Connection", b"keep-alive, X-Secret"),
        (b"X-Secret", b"1"),
        (b"TE", b"trailers"),
        (b"Trailer", b"x"),
        (b"Upgrade", b"h2c"),
        (b"Proxy-Authorization", b"Basic eA=="),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"3"),
        (b"Host", b"router"),
        (b"Expect", b"100-continue"),
        (b"Cookie", b"a=b"),
        (b"X-End-To-End", b"1"),
    ]
    assert forwardable(fields, NO_KEYS, forward_authorization=False) == [(b"Cookie", b"a=b"), (b"X-End-To-End", b"1")]


def test_internal_fields_of_the_client_are_dropped() -> None:
    """Case 107."""
    assert forwardable([(b"X-KV-Router-Worker", b"w")], NO_KEYS, forward_authorization=True) == []


CREDENTIALS = [(b"authorization", b"Bearer client"), (b"X-Api-Key", b"client")]


@pytest.mark.parametrize(
    ("keys", "forward", "worker", "sent"),
    [
        ((), False, None, []),
        ((), True, None, [b"Bearer client", b"client"]),
        ((), True, b"Bearer worker", [b"Bearer worker"]),
        ((), False, b"Bearer worker", [b"Bearer worker"]),
        (("client",), True, None, []),
        (("client",), False, b"Bearer worker", [b"Bearer worker"]),
        (("other",), True, None, [b"Bearer client", b"client"]),
    ],
)
def test_authorization_has_one_owner(
    keys: tuple[str, ...], forward: bool, worker: bytes | None, sent: list[bytes]
) -> None:
    """Case 103: our key never goes on, the worker's replaces the client's, pass-through only when configured."""
    kept = forwardable(CREDENTIALS, ClientKeys(keys), forward_authorization=forward)
    fields = for_worker(kept, "id", worker, [])
    assert [value for name, value in fields if name.lower() in (b"authorization", b"x-api-key")] == sent


def test_a_placements_field_replaces_the_clients() -> None:
    kept = [(b"X-Data-Parallel-Rank", b"999"), (b"A", b"1")]
    fields = for_worker(kept, "id", None, [(b"x-data-parallel-rank", b"2")])
    assert fields == [(b"A", b"1"), (b"X-Request-Id", b"id"), (b"x-data-parallel-rank", b"2")]


@pytest.mark.parametrize(
    ("fields", "admitted"),
    [
        ({"Authorization": "Bearer k1"}, True),
        ({"authorization": "bearer  k2 "}, True),
        ({"X-API-Key": "k2"}, True),
        ({"Authorization": "Basic k1"}, False),
        ({"Authorization": "Bearer k"}, False),
        ({"Authorization": "k1"}, False),
        ({"X-Api-Key": "\udcffk1"}, False),
        ({}, False),
    ],
)
def test_client_keys(fields: dict[str, str], admitted: bool) -> None:
    assert ClientKeys(("k1", "k2")).admit(CIMultiDict(fields)) is admitted
    assert NO_KEYS.admit(CIMultiDict(fields))


@pytest.mark.parametrize("given", [[], ["a", "b"], ["x" * 129], ["a b"], ["a\tb"], ["\u00e9"], [""]])
def test_an_unfit_request_id_is_replaced(given: list[str]) -> None:
    """Case 105."""
    fresh = request_id(given)
    assert fresh not in given
    assert len(fresh) == 32
    assert fresh != request_id(given)


def test_a_fit_request_id_is_kept() -> None:
    assert request_id(["req-1/~!"]) == "req-1/~!"


def test_answer_fields_lose_hops_and_keep_the_rest_in_order() -> None:
    answer = AnswerFields(
        [
            (b"Date", b"now"),
            (b"Connection", b"close, X-Hop"),
            (b"X-Hop", b"secret"),
            (b"x-kv-router-error", b"forged"),
            (b"Set-Cookie", b"a=1"),
            (b"Set-Cookie", b"b=2"),
            (b"Content-Type", b"Text/Event-Stream"),
            (b"Cache-Control", b"no-cache"),
            (b"Content-Length", b"3"),
        ]
    )
    assert answer.kept == [
        (b"Date", b"now"),
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
        (b"Content-Type", b"Text/Event-Stream"),
        (b"Cache-Control", b"no-cache"),
        (b"X-Accel-Buffering", b"no"),
    ]


def test_heads_that_would_beat_the_body_at_the_engine_do_not_cross() -> None:
    """Case 107: SGLang 0.5.23 takes bootstrap host, rank and priority from x-override-* heads."""
    sent = [(b"X-Override-Bootstrap-Host", b"10.0.0.1"), (b"x-override-priority", b"9"), (b"x-kept", b"1")]
    assert forwardable(sent, ClientKeys(()), forward_authorization=False) == [(b"x-kept", b"1")]
