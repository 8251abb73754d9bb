"""Two questions to the Kubernetes API: which pods are there, and what happens to them from then on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec

from router.config import KubernetesApiConfig
from router.contract.url import bracketed
from router.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_PAGE = 250
"""Pods a page; one is 5 to 20 KB."""
LIST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
WATCH_GRACE_S = 10.0
"""A watch that the server should have ended is given up this much later: a dead peer says nothing (case 108)."""
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_EVENT_BYTES = 8 * 1024 * 1024
GONE = 410
WATCHED = frozenset({"ADDED", "MODIFIED", "DELETED"})
RBAC_ADVICE = "the service account needs get, list and watch on pods in this namespace (deploy/ has the Role)"


class KubeError(Exception):
    """The API did not give what was asked for; the text says why. `routine`: nothing is wrong that a new list would not
    mend (410: the version asked for is too old; a watch cut off on its way)."""

    def __init__(self, reason: str, *, routine: bool = False) -> None:
        super().__init__(reason)
        self.routine = routine


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a watch. `kind`: ADDED, MODIFIED, DELETED, or BOOKMARK, which only shows that the watch is alive."""

    kind: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Where the API is and with what to ask it. The token is read anew for every request: Kubernetes rotates it."""

    url: str
    namespace: str
    token_file: Path | None
    tls: ssl.SSLContext | None


def api_access(
    config: KubernetesApiConfig,
    namespace: str | None,
    environment: Mapping[str, str],
    account: Path = SERVICE_ACCOUNT,
) -> ApiAccess:
    """From the configuration, else from what every pod is given. Raises ConfigError where neither says enough."""
    where = "discovery.kubernetes"
    if config.url is not None:
        url = config.url.text
    elif host := environment.get("KUBERNETES_SERVICE_HOST"):
        url = f"https://{bracketed(host)}:{environment.get('KUBERNETES_SERVICE_PORT') or 443}"
    else:
        raise ConfigError(f"{where}.api.url: missing; this is no pod, so say where the API is (kubectl proxy will do)")
    if namespace is None:
        try:
            namespace = (account / "namespace").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise ConfigError(f"{where}.namespace: missing, and this is no pod that has one") from None
    token_file, ca = config.token_file, config.ca
    if config.url is None:
        token_file, ca = token_file or account / "token", ca or account / "ca.crt"
    tls = None
    if url.startswith("https:"):
        try:
            tls = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{where}.api.ca: {ca}: {error}") from None
    return ApiAccess(url, namespace, token_file, tls)


class _ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str | None = None
    more: str | None = None


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    """A v1 Status."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


class KubeApi:
    """Asks for the pods of one namespace by label. No proxies, no redirects, no cookies (case 102)."""

    def __init__(self, access: ApiAccess, selector: str) -> None:
        self._access = access
        self._query = f"?labelSelector={quote(selector, safe='')}"
        self._path = f"/api/v1/namespaces/{quote(access.namespace, safe='')}/pods"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=access.tls if access.tls is not None else True),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def list_pods(self) -> tuple[list[msgspec.Raw], str]:
        """Every pod as it is now, and the version to watch from. Raises KubeError."""
        pods: list[msgspec.Raw] = []
        more = ""
        while True:
            query = f"{self._query}&limit={LIST_PAGE}" + (f"&continue={quote(more, safe='')}" if more else "")
            page = await self._page(query)
            pods += page.items or ()
            more = page.metadata.more or ""
            if not more:
                break
        if not page.metadata.resource_version:
            raise KubeError("the list has no resourceVersion; is this a Kubernetes API?")
        return pods, page.metadata.resource_version

    async def watch_pods(self, version: str, timeout_s: float) -> AsyncIterator[Change]:
        """What happens after `version`, for about `timeout_s`. Ends when the server ends it; raises KubeError when the
        version is gone (both forms: the status, and an ERROR event), when the connection breaks, or in silence."""
        query = f"{self._query}&watch=1&allowWatchBookmarks=true"
        query += f"&resourceVersion={quote(version, safe='')}&timeoutSeconds={max(1, round(timeout_s))}"
        limit = aiohttp.ClientTimeout(total=timeout_s + WATCH_GRACE_S, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(
                self._access.url + self._path + query,
                headers=await self._headers(),
                allow_redirects=False,
                timeout=limit,
            ) as response:
                await _raise_for(response)
                async for line in _lines(response):
                    yield _change(line)
        except TimeoutError:
            raise KubeError(f"the watch did not end after {timeout_s:g} s; a dead connection?", routine=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(f"the watch broke off: {_said(error)}", routine=True) from None

    async def _page(self, query: str) -> _PodList:
        try:
            async with self._session.get(
                self._access.url + self._path + query,
                headers=await self._headers(),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=LIST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                await _raise_for(response)
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MAX_PAGE_BYTES:
                        raise KubeError(f"a page of the pod list is over {MAX_PAGE_BYTES} bytes")
        except TimeoutError:
            raise KubeError(f"the pod list did not come within {LIST_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(f"the pod list could not be read: {_said(error)}") from None
        try:
            return msgspec.json.decode(body, type=_PodList)
        except (msgspec.MsgspecError, ValueError) as error:
            raise KubeError(f"the pod list is not understood: {error}") from None

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        file = self._access.token_file
        if file is not None:
            try:
                token = await asyncio.to_thread(file.read_text, encoding="ascii")
            except (OSError, ValueError) as error:
                raise KubeError(f"the token {file} cannot be read: {error}") from None
            headers["Authorization"] = f"Bearer {token.strip()}"
        return headers


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    said = ""
    try:
        said = msgspec.json.decode(await response.content.read(4096), type=_Failure).message or ""
    except (msgspec.MsgspecError, ValueError):
        pass
    advice = f"; {RBAC_ADVICE}" if response.status in (401, 403) else ""
    reason = f"{response.status} from the Kubernetes API{': ' if said else ''}{said[:300]}{advice}"
    raise KubeError(reason, routine=response.status == GONE)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The chunks of the answer cut at newlines; what comes after the last one was cut off by the peer."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        rest += piece
        if b"\n" in piece:
            *lines, tail = bytes(rest).split(b"\n")
            rest = bytearray(tail)
            for line in lines:
                if line.strip():
                    yield line
        elif len(rest) > MAX_EVENT_BYTES:
            raise KubeError(f"an event of the watch is over {MAX_EVENT_BYTES} bytes")


def _change(line: bytes) -> Change:
    try:
        event = msgspec.json.decode(line, type=_Event)
        if event.type in WATCHED or event.type == "BOOKMARK":
            return Change(event.type, event.object)
        failure = msgspec.json.decode(event.object, type=_Failure)
    except (msgspec.MsgspecError, ValueError) as error:
        raise KubeError(f"the watch is not understood: {error}") from None
    said = f"{failure.code} {failure.reason or ''}: {failure.message or ''}"[:300]
    raise KubeError(f"the watch ended with {event.type[:20]} {said}", routine=failure.code == GONE)


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:300].strip()
