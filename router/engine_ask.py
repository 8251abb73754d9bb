"""Asking one of a model's engines for token ids (its /v1/tokenize), over HTTP, for prompts not made here."""

from __future__ import annotations

import ssl

import aiohttp

from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.prompt.engine import AskRefused
from router.prompt.models import ModelFacts

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS_PER_ENGINE = 16
NOT_SERVED = (401, 403, 404, 405)
"""Statuses that are about the route or the key, not about the prompt: the asking pauses instead."""


class EngineAsk:
    """Callable as router.prompt.source.Ask."""

    def __init__(self, fleet: Fleet, tls: ssl.SSLContext | None) -> None:
        self._fleet = fleet
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=MAX_CONNECTIONS_PER_ENGINE,
            keepalive_timeout=4.0,
            ssl=tls if tls is not None else True,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def __call__(self, model: ModelFacts, path: str, body: bytes) -> bytes:
        """The answer's body. Raises AskRefused when the engine refuses the prompt, and OSError or aiohttp.ClientError
        when it does not answer."""
        worker = self._worker(model)
        headers = {"Content-Type": "application/json"}
        if worker.authorization is not None:
            headers["Authorization"] = worker.authorization
        async with self._session.post(
            worker.url.text + path, data=body, headers=headers, allow_redirects=False
        ) as answer:
            if 400 <= answer.status < 500 and answer.status not in NOT_SERVED:
                raise AskRefused(f"{answer.status} from {path}")
            if answer.status != 200:
                raise ConnectionError(f"{answer.status} from {path}")
            read = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while len(read) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                read += more
            if len(read) > MAX_ANSWER_BYTES:
                raise ConnectionError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
            return read

    def _worker(self, model: ModelFacts) -> Worker:
        """The least loaded ready worker that is of this kind: another release may render another prompt."""
        found = [
            worker
            for name in model.names[:1] or (None,)
            for worker in self._fleet.routable(name)
            if worker.info is not None and ModelFacts.from_server_info(worker.info) == model
        ]
        if not found:
            raise ConnectionError("no worker of this model can be asked now")
        return min(found, key=lambda worker: sum(rank.account.requests for rank in worker.ranks))

    async def close(self) -> None:
        await self._session.close()
