"""A stand-in for the Kubernetes API over real HTTP: pods with resource versions, paged lists, watches that resume,
bookmarks, both forms of 410, disconnects, slowness. `kubectl get -w` takes it for one (test_kube.py)."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import msgspec
from aiohttp import web

HOST = "127.0.0.1"


def pod(name: str, ip: str | None, **more: Any) -> dict[str, Any]:
    """A running, ready pod. `more`: uid, labels, annotations, ports (name → number), restarts, ready, phase, ips."""
    ports = more.get("ports", {})
    ready, ips = more.get("ready", True), more.get("ips", [ip] if ip else [])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": more.get("uid", f"uid-{name}"),
            "labels": {"app": "sglang", **more.get("labels", {})},
            "annotations": more.get("annotations", {}),
            "creationTimestamp": more.get("created", "2026-11-29T10:00:00Z"),
        },
        "spec": {
            "containers": [
                {"name": "engine", "ports": [{"name": key, "containerPort": port} for key, port in ports.items()]}
            ]
        },
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "podIPs": [{"ip": each} for each in ips],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": more.get("restarts", 0)}],
        },
    }


class FakeKube:
    """`put` and `delete` change the pods; the other attributes say how the API behaves. All may change at any time."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        """Watches from before this version get 410."""
        self.token: str | None = None
        self.page_limit = 500
        """The most pods a page; a client's own limit counts when it is smaller."""
        self.list_status: int | None = None
        self.list_delay_s = 0.0
        self.silent = False
        """Watches stay open and are told nothing; what happens is still remembered."""
        self.in_stream_error: dict[str, Any] | None = None
        """Sent instead of the events of the next watch, which then ends."""
        self.lists = 0
        """Whole lists (first pages) answered with 200."""
        self.watches: list[dict[str, str]] = []
        """The query of every watch."""
        self._pods: dict[str, dict[str, Any]] = {}
        self._log: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._open: list[asyncio.Transport] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    # ---- what happens in the cluster

    def put(self, made: dict[str, Any]) -> None:
        """Creates the pod, or changes the one of that name."""
        name = made["metadata"]["name"]
        self._happened("MODIFIED" if name in self._pods else "ADDED", made)
        self._pods[name] = self._log[-1][1]["object"]

    def delete(self, name: str, *, unseen: bool = False, **last: Any) -> None:
        """`unseen`: the event is lost, as when it fell between two watches. `last`: what the event says of the pod."""
        gone = self._pods.pop(name)
        if unseen:
            self.version += 1
            self.oldest = self.version
        else:
            self._happened("DELETED", {**copy.deepcopy(gone), **last})

    def relabel_away(self, name: str) -> None:
        """The pod stops matching every selector: watches see it as deleted, although it runs on."""
        gone = copy.deepcopy(self._pods.pop(name))
        gone["metadata"]["labels"] = {}
        self._happened("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 1
        half = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}}
        self._say({"type": "BOOKMARK", "object": {**half, "spec": {"containers": None}, "status": {}}})

    def say_raw(self, kind: str, thing: Any) -> None:
        """An event that no pod stands behind."""
        self.version += 1
        self._say({"type": kind, "object": thing})

    def compact(self) -> None:
        """Every version so far is too old to watch from."""
        self.oldest = self.version + 1
        self.version += 1

    def drop_watches(self) -> None:
        """Cuts every connection that watches."""
        for transport in self._open:
            transport.abort()

    @property
    def watching(self) -> int:
        return len(self._open)

    def _happened(self, kind: str, made: dict[str, Any]) -> None:
        self.version += 1
        made = copy.deepcopy(made)
        made["metadata"]["resourceVersion"] = str(self.version)
        self._say({"type": kind, "object": made})

    def _say(self, event: dict[str, Any]) -> None:
        self._log.append((self.version, event))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- HTTP

    async def start(self) -> FakeKube:
        app = web.Application()
        app.router.add_get("/api", _json({"kind": "APIVersions", "versions": ["v1"]}))
        app.router.add_get("/apis", _json({"kind": "APIGroupList", "apiVersion": "v1", "groups": []}))
        resource = {"name": "pods", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}
        found = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]}
        app.router.add_get("/api/v1", _json(found))
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods_endpoint)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"
        return self

    async def close(self) -> None:
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _pods_endpoint(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _failure(403, "Forbidden", 'pods is forbidden: User "nobody" cannot list resource "pods"')
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request)
        return await self._list(request)

    async def _list(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.list_delay_s)
        if self.list_status is not None:
            return _failure(self.list_status, "Trouble", "the API has trouble")
        start = int(request.query.get("continue") or 0)
        limit = min(int(request.query.get("limit") or self.page_limit), self.page_limit)
        matching = [made for made in self._pods.values() if _matches(made, request)]
        page = matching[start : start + limit]
        meta = {"resourceVersion": str(self.version)}
        if start + limit < len(matching):
            meta["continue"] = str(start + limit)
        if start == 0:
            self.lists += 1
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        since = int(request.query.get("resourceVersion") or self.version)
        if since < self.oldest:
            return _failure(410, "Expired", f"too old resource version: {since} ({self.oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        assert request.transport is not None
        transport = request.transport
        self._open.append(transport)
        try:
            if self.in_stream_error is not None:
                error, self.in_stream_error = self.in_stream_error, None
                await response.write(msgspec.json.encode({"type": "ERROR", "object": error}) + b"\n")
                return response
            async with asyncio.timeout(float(request.query.get("timeoutSeconds") or 300)):
                while True:
                    since = await self._tell(request, response, since)
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._open.remove(transport)

    async def _tell(self, request: web.Request, response: web.StreamResponse, since: int) -> int:
        changed = self._changed
        for version, event in self._log if not self.silent else []:
            matches = event["type"] in ("BOOKMARK", "DELETED") or _matches(event["object"], request)
            if version > since and matches:
                # Two pieces: an event is not a packet.
                line = msgspec.json.encode(event) + b"\n"
                await response.write(line[:40])
                await response.write(line[40:])
            since = max(since, version)
        await changed.wait()
        return since


def _matches(made: Any, request: web.Request) -> bool:
    """Equality selectors only."""
    selector = request.query.get("labelSelector", "")
    labels = made.get("metadata", {}).get("labels") or {} if isinstance(made, dict) else {}
    return all(
        labels.get(key) == value for key, _, value in (each.partition("=") for each in selector.split(",") if each)
    )


def _failure(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return web.json_response({**status, "reason": reason, "code": code}, status=code)


def _json(value: object) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(value)

    return answer
