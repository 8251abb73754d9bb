"""One request to every worker (flush_cache and the like): results per worker, bounded in time and size (case 66)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from router.proxy.connection import UpstreamError, UpstreamProtocolError
from router.proxy.plan import Origin, RawHeaders
from router.proxy.upstream import UpstreamClient, UpstreamResponse

MAX_ANSWER_BYTES = 64 << 10

FANNED_OUT = (
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/start_profile",
    "/stop_profile",
    "/reset_prefix_cache",
)
"""POST routes of SGLang 0.5.23's (the last one: vLLM's) that mean every engine of a fleet. Nothing that would need a
different body for each engine, and nothing that stops one."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What one worker said. `status` None: it did not answer, `error` says why."""

    worker: str
    status: int | None
    body: bytes
    error: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status is not None and self.status < 300


class _Collected:
    """Sink that keeps an answer of at most MAX_ANSWER_BYTES."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    def write(self, data: bytes) -> None:
        if self.size < MAX_ANSWER_BYTES:
            self.pieces.append(data[: MAX_ANSWER_BYTES - self.size])
        self.size += len(data)

    def end(self, data: bytes) -> None:
        self.write(data)


class FanOut:
    """Asks all workers at once, each on its own deadline; one that is down does not keep the others' results back."""

    def __init__(self, upstream: UpstreamClient) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()

    async def __call__(
        self,
        workers: Sequence[tuple[Origin, str | None]],
        target: bytes,
        fields: RawHeaders,
        body: bytes,
        timeout_s: float,
    ) -> list[WorkerAnswer]:
        """POSTs the same bytes to each (origin, Authorization value). Never raises for what a worker does."""
        return await asyncio.gather(*(self._ask(*worker, target, fields, body, timeout_s) for worker in workers))

    async def _ask(
        self,
        origin: Origin,
        authorization: str | None,
        target: bytes,
        fields: RawHeaders,
        body: bytes,
        timeout_s: float,
    ) -> WorkerAnswer:
        started = self._loop.time()
        status, collected, error = None, _Collected(), None
        if authorization is not None:
            fields = [*fields, (b"Authorization", authorization.encode())]
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._upstream.send(origin, b"POST", target, fields, body)
                try:
                    await self._read(response, collected)
                    status = response.status
                finally:
                    response.close()
        except TimeoutError:
            error = f"no answer within {timeout_s:g} s; it may still be carried out"
        except UpstreamError as failed:
            error = str(failed)
        return WorkerAnswer(origin.text, status, b"".join(collected.pieces), error, self._loop.time() - started)

    async def _read(self, response: UpstreamResponse, collected: _Collected) -> None:
        await response.pipe(collected)
        if collected.size > MAX_ANSWER_BYTES:
            raise UpstreamProtocolError(f"the answer ({response.status}) is over {MAX_ANSWER_BYTES} bytes")
