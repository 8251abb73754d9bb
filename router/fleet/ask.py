"""The questions a worker is asked over HTTP, each one call: is it healthy, and what does it say of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from typing import TypeVar

import aiohttp
import msgspec

from router.contract.server_info import ServerInfo, parse_server_info
from router.errors import ContractError
from router.fleet.worker import Worker

MAX_BODY_BYTES = 4 * 1024 * 1024
"""A /server_info is 40-60 KB."""
MAX_MODELS = 1024
"""Served names taken from /v1/models, adapters included."""
KEY_ADVICE = "set workers[].api_key or worker_api_key"


T = TypeVar("T")


class Unanswered(Exception):
    """No usable answer; the text says why. `refused`: nothing accepts connections there. `status`: HTTP, if it came."""

    def __init__(self, reason: str, *, refused: bool = False, status: int | None = None) -> None:
        super().__init__(reason)
        self.refused = refused
        self.status = status


def probe_session(ssl_context: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """For probes only. Environment proxies are ignored and cookies dropped (public case 102); each question opens its
    own connection, because whether one can be opened is half of what is asked."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=ssl_context if ssl_context is not None else True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)


async def ask_health(session: aiohttp.ClientSession, worker: Worker, timeout_s: float) -> None:
    """Returns when `GET /health` said 200. SGLang takes 1.0 s to say so. Raises Unanswered."""
    await _get(session, worker, "/health", timeout_s)


async def ask_bootstrap(worker: Worker, timeout_s: float) -> str:
    """Why nobody can connect to a prefill engine's bootstrap port; empty when one can, or when there is none to ask."""
    port = worker.bootstrap_port
    if port is None or worker.dialect == "vllm":
        return ""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(worker.url.host, port)
    except TimeoutError:
        return f"no connection within {timeout_s:g} s"
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or type(error).__name__
    writer.close()
    return ""


async def ask_info(session: aiohttp.ClientSession, worker: Worker, timeout_s: float) -> ServerInfo:
    """What the engine is. Old SGLang knows only /get_server_info; vLLM has neither (outside its development mode) and
    is asked for its version and models. Raises Unanswered."""
    for path in ("/server_info", "/get_server_info"):
        try:
            body = await _get(session, worker, path, timeout_s)
        except Unanswered as error:
            if error.status != 404:
                raise
            continue
        try:
            info = parse_server_info(body)
        except ContractError as error:
            raise Unanswered(f"{path}: {error}") from None
        return await _ask_models(session, worker, timeout_s, info) if info.engine == "vllm" else info
    return await _ask_models(session, worker, timeout_s, None)


async def ask_metrics(session: aiohttp.ClientSession, worker: Worker, timeout_s: float) -> bytes:
    """The engine's Prometheus page. Raises Unanswered."""
    return await _get(session, worker, "/metrics", timeout_s)


class _Model(msgspec.Struct):
    """One of /v1/models. vLLM lists adapters too: they have a parent."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str | None = None


async def _ask_models(
    session: aiohttp.ClientSession, worker: Worker, timeout_s: float, said: ServerInfo | None
) -> ServerInfo:
    """For engines without a /server_info, and for vLLM, whose own (development mode only) names no adapters."""
    models = _decoded(await _get(session, worker, "/v1/models", timeout_s), _Models, "/v1/models").data
    if not models:
        raise Unanswered("/v1/models lists no model")
    if said is None:
        said = await _ask_version(session, worker, timeout_s)
    base = next((model for model in models if model.parent is None), models[0])
    return dataclasses.replace(
        said,
        model_names=tuple(dict.fromkeys(model.id for model in models[:MAX_MODELS])),
        adapters=frozenset(model.id for model in models[:MAX_MODELS] if model.parent is not None),
        model_path=said.model_path or base.root or base.id,
        tokenizer_path=said.tokenizer_path or base.root or base.id,
        context_length=base.max_model_len,
    )


async def _ask_version(session: aiohttp.ClientSession, worker: Worker, timeout_s: float) -> ServerInfo:
    try:
        body = await _get(session, worker, "/version", timeout_s)
    except Unanswered as error:
        if error.status != 404:
            raise
        return parse_server_info(b"{}")
    version = _decoded(body, _Version, "/version").version
    return parse_server_info(msgspec.json.encode({"vllm_config": "", "version": version}))


def _decoded(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unanswered(f"{path} is not understood: {error}") from None


async def _get(session: aiohttp.ClientSession, worker: Worker, path: str, timeout_s: float) -> bytes:
    headers = {"Authorization": worker.authorization} if worker.authorization else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(
            worker.url.text + path, headers=headers, allow_redirects=False, timeout=timeout
        ) as response:
            if response.status != 200:
                raise Unanswered(_status_reason(response.status, path), status=response.status)
            return await _read(response, path)
    except TimeoutError:
        raise Unanswered(f"no answer from {path} within {timeout_s:g} s") from None
    except aiohttp.ClientSSLError as error:
        raise Unanswered(f"TLS failed (worker_tls.ca names the authority to trust): {error}") from None
    except aiohttp.ClientConnectorDNSError as error:
        raise Unanswered(f"host {worker.url.host} cannot be resolved: {error.os_error.strerror}") from None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionRefusedError):
            raise Unanswered("connection refused", refused=True) from None
        raise Unanswered(f"cannot connect: {error.os_error.strerror or error.os_error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unanswered(f"{path} broke off: {type(error).__name__}") from None


async def _read(response: aiohttp.ClientResponse, path: str) -> bytes:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise Unanswered(f"{path} answered more than {MAX_BODY_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _status_reason(status: int, path: str) -> str:
    if status in (401, 403):
        return f"{status} from {path}: {KEY_ADVICE}"
    if 300 <= status < 400:
        return f"{status} from {path}: redirects are not followed; give the worker's own URL"
    return f"{status} from {path}"
