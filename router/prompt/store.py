"""Loaded models: each loaded once, off the event loop; a failed load waits for its retry, a changed file is noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from router.prompt.models import ModelFiles, ModelSource, Stamp, files_stamp, load_model

_Made = TypeVar("_Made")

log = logging.getLogger("router.prompt")

MAX_MODELS = 64  # loaded folders; a fleet of more models asks its engines for the rest
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
LOOK_AGAIN_S = 30.0
"""How often the files of a model that is used are looked at."""


@dataclass(slots=True)
class _Entry:
    files: ModelFiles | None = None
    problem: str = "loading"
    note: str = ""
    task: asyncio.Task[None] | None = None
    """The one thing done off the loop for this model: a load, a look at its files, a comparison."""
    failures: int = 0
    retry_at_s: float = 0.0
    stamp: Stamp = ()
    look_at_s: float = 0.0
    uses: int = 0


class ModelStore:
    """Models by source. `get` never waits; the first call for a source starts its one load (case 44).

    `compare_every`: of every so many prompts' texts one is tokenised by `tokenizers` as well where fastokens serves; a
    difference makes `tokenizers` serve (0: never). `on_change(source)`: prompts are made of other files from now on.
    """

    def __init__(
        self,
        load: Callable[[ModelSource], ModelFiles] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        compare_every: int = 0,
        on_check: Callable[[str], None] = lambda outcome: None,
        on_change: Callable[[ModelSource], None] = lambda source: None,
    ) -> None:
        self._load = load or self._load_files
        self._clock = clock
        self._now = now
        self._compare_every = compare_every
        self._on_check = on_check
        self._on_change = on_change
        self._entries: dict[ModelSource, _Entry] = {}
        self._slow: set[str] = set()
        """Folders that fastokens was found wrong for."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-load")

    def get(self, source: ModelSource) -> ModelFiles | None:
        """The model's files, or None while they load, failed to, or there are too many models; `problem` says which."""
        entry = self._entries.get(source)
        if entry is None:
            if len(self._entries) >= MAX_MODELS:
                return None
            entry = self._entries[source] = _Entry()
        entry.uses += 1
        if entry.task is not None:
            return entry.files
        now_s = self._clock()
        if entry.files is None:
            if now_s >= entry.retry_at_s:
                entry.task = asyncio.get_running_loop().create_task(self._fill(source, entry))
        elif now_s >= entry.look_at_s:
            entry.look_at_s = now_s + LOOK_AGAIN_S
            entry.task = asyncio.get_running_loop().create_task(self._look(source, entry))
        elif self._compare_every and entry.uses % self._compare_every == 0 and entry.files.tokenizer.comparable:
            entry.task = asyncio.get_running_loop().create_task(self._compare(source, entry, entry.files))
        return entry.files

    async def wait(self, source: ModelSource) -> ModelFiles | None:
        """As `get`, once what is in progress is over."""
        files = self.get(source)
        entry = self._entries.get(source)
        if entry is not None and entry.task is not None:
            await asyncio.shield(entry.task)
            return entry.files
        return files

    def look_again(self, source: ModelSource) -> None:
        """The next `get` looks at the files."""
        if (entry := self._entries.get(source)) is not None:
            entry.look_at_s = 0.0

    def problem(self, source: ModelSource) -> str:
        """Why `get` gave None: "loading", or the failure in words."""
        entry = self._entries.get(source)
        return entry.problem if entry is not None else f"over {MAX_MODELS} models"

    def note(self, source: ModelSource) -> str:
        """What an operator should know of a model that is loaded; mostly empty."""
        entry = self._entries.get(source)
        return entry.note if entry is not None else ""

    def loaded(self) -> dict[str, str]:
        """Folder → the backend that serves it, or what is wrong with it."""
        return {s.folder: e.files.tokenizer.backend if e.files else e.problem for s, e in self._entries.items()}

    async def _fill(self, source: ModelSource, entry: _Entry) -> None:
        try:
            entry.stamp = await self._in_thread(lambda: files_stamp(source))
            files = await self._in_thread(lambda: self._load(source))
            entry.files, entry.problem = files, files.template_problem
            entry.look_at_s = self._clock() + LOOK_AGAIN_S
        except Exception as error:  # a damaged file raises whatever its parser raises; none may kill routing
            entry.failures += 1
            entry.problem = str(error) or type(error).__name__
            entry.retry_at_s = self._clock() + min(FIRST_RETRY_S * 2 ** (entry.failures - 1), LAST_RETRY_S)
        finally:
            entry.task = None

    async def _look(self, source: ModelSource, entry: _Entry) -> None:
        try:
            stamp = await self._in_thread(lambda: files_stamp(source))
            if stamp == entry.stamp:
                return
            entry.stamp = stamp
            await self._reload(source, entry, "")
            log.info("%s: tokenizer or template files changed and were loaded anew", source.folder)
        except Exception as error:
            entry.note = f"files changed, and cannot be loaded ({error}); what was read before is still used"
            log.warning("%s: %s", source.folder, entry.note)
        finally:
            entry.task = None

    async def _compare(self, source: ModelSource, entry: _Entry, files: ModelFiles) -> None:
        try:
            at = await self._in_thread(files.tokenizer.compare)
            self._on_check("backend_equal" if at is None else "backend_different")
            if at is None:
                return
            self._slow.add(source.folder)
            note = f"token {at} of a prompt by fastokens was not that by tokenizers, which serves from now on"
            log.error("%s: %s", source.folder, note)
            await self._reload(source, entry, note)
        except Exception as error:
            log.warning("%s: the tokenizers could not be compared or exchanged: %s", source.folder, error)
        finally:
            entry.task = None

    async def _reload(self, source: ModelSource, entry: _Entry, note: str) -> None:
        """What was loaded serves until the new is there. Raises what loading raises."""
        files = await self._in_thread(lambda: self._load(source))
        entry.files, entry.problem, entry.note = files, files.template_problem, note
        self._on_change(source)

    async def _in_thread(self, work: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _load_files(self, source: ModelSource) -> ModelFiles:
        return load_model(source, self._now, fast_wanted=source.folder not in self._slow)

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)
