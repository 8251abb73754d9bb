"""Load of engines that do not announce it: vLLM's /metrics, asked again and again. A poorer substitute for LoadStat.

vLLM counts requests, not uncached tokens: what waits is taken to be as large as what this router sends there. Enough to
see other routers' work (public case 57); what was placed since the answer is added by `RankLoad` itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import aiohttp

from router.fleet.ask import Unanswered, ask_metrics
from router.fleet.worker import Worker
from router.policy.load import Report

log = logging.getLogger("router.fleet")

TIMEOUT_S = 2.0
_SAMPLE = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{([^}\n]*)\})? ([0-9.eE+]+)\s*$", re.MULTILINE)
_ENGINE = re.compile(rb'(?:^|,)engine="(\d{1,4})"')


def parse_vllm_metrics(page: bytes) -> dict[int, tuple[int, int]]:
    """(running, waiting) requests by data-parallel engine number; empty when the page has neither."""
    counts: dict[int, dict[bytes, int]] = defaultdict(dict)
    for name, labels, value in _SAMPLE.findall(page):
        found = _ENGINE.search(labels)
        engine = int(found[1]) if found else 0
        try:
            counts[engine][name] = min(round(float(value)), 1 << 31)
        except (ValueError, OverflowError):
            continue
    return {engine: (seen.get(b"running", 0), seen.get(b"waiting", 0)) for engine, seen in counts.items()}


class LoadPoll:
    """Asks one worker every `interval_s` and reports to its ranks' accounts. An answer that does not come ages out."""

    def __init__(
        self, worker: Worker, session: aiohttp.ClientSession, *, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._worker = worker
        self._ranks = worker.ranks
        self._session = session
        self._interval_s = interval_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"load poll {self._worker.url}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self._take(parse_vllm_metrics(await ask_metrics(self._session, self._worker, TIMEOUT_S)))
            except Unanswered as error:
                self._complain(str(error))
            await asyncio.sleep(self._interval_s)

    def _take(self, counts: Mapping[int, tuple[int, int]]) -> None:
        if not counts:
            self._complain("/metrics names no vllm:num_requests_waiting")
            return
        self._complained = False
        now_s = self._clock()
        if len(self._ranks) == 1:  # one routing target, however many engines share the work behind it
            counts = {self._ranks[0].number: (sum(r for r, _ in counts.values()), sum(w for _, w in counts.values()))}
        for rank in self._ranks:
            if rank.dead or rank.number not in counts:
                continue
            running, waiting = counts[rank.number]
            tokens = round(waiting * rank.account.mean_uncached_tokens)
            rank.account.reported(Report(now_s, running, waiting, tokens))

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.info("%s: no load report, its load is what this router sends: %s", self._worker.url, why)
