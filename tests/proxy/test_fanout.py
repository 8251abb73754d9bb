"""Control calls that mean every worker (case 66)."""

from __future__ import annotations

from router.proxy.fanout import MAX_ANSWER_BYTES, FanOut
from tests.proxy.fakes import Url, bench
from tests.support.http import HOST, Reply, Seen

FIELDS = [(b"Content-Type", b"application/json")]


async def test_every_worker_gets_the_same_bytes_and_its_own_key() -> None:
    async with bench(workers=3) as b:
        workers = [(url, f"Bearer {at}") for at, url in enumerate(b.core.urls)]
        body = b'{"rid": "x", "a": 1.0}'
        answers = await FanOut(b.upstream)(workers, b"/abort_request?x=%20", FIELDS, body, 5.0)
        assert [(a.worker, a.ok, a.status, a.body, a.error) for a in answers] == [
            (url.text, True, 200, b"{}", None) for url in b.core.urls
        ]
        for at, worker in enumerate(b.workers):
            (seen,) = worker.requests
            assert (seen.method, seen.target, seen.body) == ("POST", "/abort_request?x=%20", body)
            assert seen.all("authorization") == [f"Bearer {at}"]


async def test_one_that_is_down_one_that_hangs_and_one_that_refuses_do_not_hide_the_others() -> None:
    async with bench(workers=4) as b:
        await b.workers[0].stop_listening()

        async def hangs(seen: Seen, reply: Reply) -> None:
            await reply.gone()

        async def refuses(seen: Seen, reply: Reply) -> None:
            await reply.whole(400, b"Flush cache failed.")

        b.workers[1].script, b.workers[2].script = hangs, refuses
        answers = await FanOut(b.upstream)([(u, None) for u in b.core.urls], b"/flush_cache", FIELDS, b"", 0.3)
        assert [(a.ok, a.status) for a in answers] == [(False, None), (False, None), (False, 400), (True, 200)]
        assert (answers[0].error or "").startswith("no connection to")
        assert answers[1].error == "no answer within 0.3 s; it may still be carried out"
        assert answers[2].body == b"Flush cache failed."
        assert max(a.seconds for a in answers) < 3


async def test_an_endless_answer_is_cut() -> None:
    async with bench() as b:

        async def endless(seen: Seen, reply: Reply) -> None:
            await reply.whole(200, b"x" * (MAX_ANSWER_BYTES * 3))

        b.worker.script = endless
        (answer,) = await FanOut(b.upstream)([(b.core.urls[0], None)], b"/flush_cache", FIELDS, b"", 5.0)
        assert (answer.ok, len(answer.body)) == (False, MAX_ANSWER_BYTES)
        assert "is over" in (answer.error or "")


async def test_a_redirect_is_a_result_and_not_followed() -> None:
    """Case 102."""
    async with bench() as b:

        async def redirect(seen: Seen, reply: Reply) -> None:
            await reply.whole(302, b"", f"Location: http://{HOST}:1/\r\n")

        b.worker.script = redirect
        (answer,) = await FanOut(b.upstream)([(Url(HOST, b.worker.port), None)], b"/flush_cache", FIELDS, b"", 5.0)
        assert (answer.ok, answer.status, len(b.worker.requests)) == (False, 302, 1)
