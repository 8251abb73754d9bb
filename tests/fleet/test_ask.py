from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from router.contract.server_info import ServerInfo
from router.fleet.ask import MAX_BODY_BYTES, Unanswered, ask_health, ask_info, probe_session
from router.fleet.observer import NullObserver
from router.fleet.worker import Worker
from tests.fleet.helpers import MakeEngine, settings

LIMIT_S = 5.0


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with probe_session() as session:
        yield session


def worker_at(url: str, authorization: str | None = None) -> Worker:
    return Worker(
        settings(url), authorization=authorization, unhealthy_after=3, clock=time.monotonic, observer=NullObserver()
    )


async def refusal(session: aiohttp.ClientSession, url: str, timeout_s: float = LIMIT_S) -> Unanswered:
    with pytest.raises(Unanswered) as caught:
        await ask_info(session, worker_at(url), timeout_s)
    return caught.value


async def test_server_info_is_read_with_the_workers_key(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    engine = await make_engine()
    info = await ask_info(session, worker_at(engine.url, "Bearer k1"), LIMIT_S)
    assert (info.engine, info.model_names) == ("sglang", ("tiny",))
    assert engine.requests == [("/server_info", "Bearer k1")]


async def test_an_older_engine_is_asked_by_the_older_path(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    engine = await make_engine()
    engine.statuses = {"/server_info": 404}
    info = await ask_info(session, worker_at(engine.url), LIMIT_S)
    assert info.model_names == ("tiny",)


async def vllm(make_engine: MakeEngine, session: aiohttp.ClientSession, **statuses: int) -> ServerInfo:
    engine = await make_engine()
    engine.statuses = {"/server_info": 404, "/get_server_info": 404, **{f"/{k}": v for k, v in statuses.items()}}
    engine.bodies["/version"] = b'{"version":"0.32.0"}'
    engine.bodies["/v1/models"] = (
        b'{"object":"list","data":[{"id":"sql","root":"/adapters/sql","parent":"base"},'
        b'{"id":"base","root":"/models/base","parent":null,"max_model_len":4096,"created":1}]}'
    )
    return await ask_info(session, worker_at(engine.url), LIMIT_S)


async def test_vllm_is_described_by_its_version_and_models(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    info = await vllm(make_engine, session)
    assert (info.engine, info.version) == ("vllm", "0.32.0")
    assert info.model_names == ("sql", "base")
    assert (info.model_path, info.tokenizer_path, info.context_length) == ("/models/base", "/models/base", 4096)
    assert info.kv_events is None


async def test_an_engine_that_only_lists_models_is_unknown_but_served(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    info = await vllm(make_engine, session, version=404)
    assert (info.engine, info.version, info.model_names) == ("unknown", None, ("sql", "base"))


async def test_vllm_in_development_mode_still_tells_its_adapters(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    engine = await make_engine()
    engine.bodies["/server_info"] = (
        b"""{"vllm_config":"model='/models/base', served_model_name=base, x=1","version":"0.32.0"}"""
    )
    engine.bodies["/v1/models"] = b'{"data":[{"id":"base"},{"id":"sql","parent":"base"}]}'
    info = await ask_info(session, worker_at(engine.url), LIMIT_S)
    assert (info.engine, info.model_names, info.model_path) == ("vllm", ("base", "sql"), "/models/base")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_missing_key_is_named_as_the_setting_that_mends_it(
    status: int, make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    """Case 92."""
    engine = await make_engine()
    engine.statuses["/server_info"] = status
    error = await refusal(session, engine.url)
    assert str(error) == f"{status} from /server_info: set workers[].api_key or worker_api_key"


async def test_redirects_are_refused_not_followed(make_engine: MakeEngine, session: aiohttp.ClientSession) -> None:
    """Case 102."""
    engine = await make_engine()
    engine.statuses["/server_info"] = 302
    assert "redirects are not followed" in str(await refusal(session, engine.url))
    assert len(engine.requests) == 1


async def test_proxies_of_the_environment_are_ignored(
    make_engine: MakeEngine, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 102."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    engine = await make_engine()
    await ask_health(session, worker_at(engine.url), LIMIT_S)
    assert engine.requests == [("/health", None)]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"<html>", b"[" * 20000, b'{"kv_events":', b"\xff\xfe"],
    ids=["empty", "list", "html", "deep", "cut", "bytes"],
)
async def test_garbage_is_a_reason_not_a_crash(
    body: bytes, make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    engine = await make_engine()
    engine.bodies["/server_info"] = body
    assert str(await refusal(session, engine.url)).startswith("/server_info")


async def test_an_endless_body_is_given_up(make_engine: MakeEngine, session: aiohttp.ClientSession) -> None:
    engine = await make_engine()
    engine.bodies["/server_info"] = b" " * (MAX_BODY_BYTES + 1)
    assert f"more than {MAX_BODY_BYTES} bytes" in str(await refusal(session, engine.url))


async def test_nobody_at_home_is_told_apart_from_a_slow_engine(
    make_engine: MakeEngine, session: aiohttp.ClientSession
) -> None:
    engine = await make_engine()
    engine.delays["/server_info"] = 30.0
    slow = await refusal(session, engine.url, 0.05)
    assert (str(slow), slow.refused) == ("no answer from /server_info within 0.05 s", False)
    await engine.stop_http()
    gone = await refusal(session, engine.url)
    assert (str(gone), gone.refused) == ("connection refused", True)


async def test_a_host_that_does_not_resolve_is_said(session: aiohttp.ClientSession) -> None:
    assert str(await refusal(session, "http://no-such-host.invalid:1")).startswith("host no-such-host.invalid cannot")


async def test_vllm_without_models_is_not_described(make_engine: MakeEngine, session: aiohttp.ClientSession) -> None:
    engine = await make_engine()
    engine.statuses = {"/server_info": 404, "/get_server_info": 404, "/version": 404}
    for body, reason in [(b'{"data":[]}', "lists no model"), (b"{}", "/v1/models is not understood")]:
        engine.bodies["/v1/models"] = body
        assert reason in str(await refusal(session, engine.url))
