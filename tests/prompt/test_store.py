from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from router.config.schema import TokenizerConfig
from router.hashing import TokenIds
from router.prompt.models import ModelFiles, ModelSource
from router.prompt.source import PromptSource
from router.prompt.store import FIRST_RETRY_S, LAST_RETRY_S, LOOK_AGAIN_S, MAX_MODELS, ModelStore
from router.prompt.tokenizer import TokenizerUnusable
from tests.prompt.support import FACTS, TINY, chat, tiny, user

SOURCE = ModelSource(str(TINY))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_many_requests_cause_one_load() -> None:
    """case 44: single-flight."""
    calls = []
    release = threading.Event()

    def load(source: ModelSource) -> ModelFiles:
        calls.append(source)
        release.wait(5)
        return tiny()

    store = ModelStore(load)
    assert [store.get(SOURCE) for _ in range(10)] == [None] * 10
    assert store.problem(SOURCE) == "loading"
    waiting = [asyncio.create_task(store.wait(SOURCE)) for _ in range(3)]
    release.set()
    assert await asyncio.gather(*waiting) == [tiny()] * 3
    assert (calls, store.get(SOURCE), store.problem(SOURCE)) == ([SOURCE], tiny(), "")
    assert store.loaded() == {str(TINY): tiny().tokenizer.backend}
    await store.close()


async def test_a_failed_load_waits_longer_each_time_before_it_is_tried_again() -> None:
    """case 44: failures cached with back-off."""
    calls = 0

    def load(source: ModelSource) -> ModelFiles:
        nonlocal calls
        calls += 1
        raise TokenizerUnusable("the hub is unreachable")

    clock = Clock()
    store = ModelStore(load, clock=clock)
    pause_s = FIRST_RETRY_S
    for attempt in range(1, 10):
        assert await store.wait(SOURCE) is None
        assert (calls, store.problem(SOURCE)) == (attempt, "the hub is unreachable")
        clock.now_s += pause_s - 0.01
        assert await store.wait(SOURCE) is None
        assert calls == attempt
        clock.now_s += 0.02
        pause_s = min(2 * pause_s, LAST_RETRY_S)
    await store.close()


async def test_models_are_kept_apart_and_bounded() -> None:
    """case 43"""
    store = ModelStore(lambda source: tiny())
    for number in range(MAX_MODELS):
        assert await store.wait(ModelSource(f"/models/{number}")) is tiny()
    extra = ModelSource("/models/extra")
    assert await store.wait(extra) is None
    assert "over" in store.problem(extra)
    await store.close()


async def test_closing_while_a_load_runs_leaves_nothing_behind() -> None:
    release = threading.Event()

    def load(source: ModelSource) -> ModelFiles:
        release.wait(5)
        return tiny()

    store = ModelStore(load)
    store.get(SOURCE)
    closing = asyncio.create_task(store.close())
    release.set()
    await closing


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


class Watched:
    """A prompt source over a folder whose files change, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.changed: list[str] = []
        config = TokenizerConfig(path=folder, verify_every=0)
        self.source = PromptSource(config, clock=self.clock, on_change=self.changed.append)

    async def text(self) -> str:
        """What is rendered of a message, once all work off the loop is done."""
        assert await self.source.prepare(FACTS) == ""
        prompt = await self.source.resolve(chat(user("hello")), FACTS)
        assert prompt.ids is not None
        decode = tiny().tokenizer.decoder
        assert decode is not None
        return decode(list(memoryview(prompt.ids).cast("I")))


@pytest.fixture
async def watched(folder: Path) -> AsyncIterator[Watched]:
    made = Watched(folder)
    yield made
    await made.source.close()


async def test_a_changed_template_is_used_within_the_time_between_two_looks(watched: Watched, folder: Path) -> None:
    assert await watched.text() == "<|im_start|>hello"
    (folder / "chat_template.jinja").write_text(TEMPLATE + "!")
    watched.clock.now_s += LOOK_AGAIN_S - 0.1
    assert await watched.text() == "<|im_start|>hello"
    watched.clock.now_s += 0.2
    assert await watched.text() == "<|im_start|>hello!"
    assert watched.changed == [str(folder)]


async def test_a_new_process_of_the_engine_has_the_files_looked_at_at_once(watched: Watched, folder: Path) -> None:
    await watched.text()
    (folder / "chat_template.jinja").write_text(TEMPLATE + "!")
    watched.source.doubt(FACTS)
    assert await watched.text() == "<|im_start|>hello!"


async def test_what_was_verified_of_changed_files_is_to_be_verified_again(watched: Watched, folder: Path) -> None:
    await watched.text()
    source = watched.source._source(FACTS)
    assert source is not None
    key = ((source, FACTS.version, ""), frozenset[str]())
    watched.source._checks._verification.agreed(*key)
    assert watched.source._checks._verification.renderings()
    (folder / "chat_template.jinja").write_text(TEMPLATE + "!")
    watched.clock.now_s += LOOK_AGAIN_S
    await watched.text()
    assert watched.source._checks._verification.renderings() == []


async def test_files_that_cannot_be_loaded_any_more_leave_the_old_ones_and_say_so(
    watched: Watched, folder: Path
) -> None:
    await watched.text()
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{")
    watched.clock.now_s += LOOK_AGAIN_S
    assert await watched.text() == "<|im_start|>hello"
    assert "what was read before is still used" in watched.source.describe(FACTS)["note"]
    (folder / "tokenizer.json").write_text(whole)
    watched.clock.now_s += LOOK_AGAIN_S
    assert await watched.text() == "<|im_start|>hello"
    assert (watched.changed, watched.source.describe(FACTS)["note"]) == ([str(folder)], None)


async def test_untouched_files_are_loaded_once(watched: Watched) -> None:
    for _ in range(4):
        await watched.text()
        watched.clock.now_s += LOOK_AGAIN_S
    assert watched.changed == []


def strayed(files: ModelFiles) -> ModelFiles:
    """A model whose quick tokenizer leaves out the last token."""
    right = files.tokenizer.encode

    def quick(text: str, special: bool) -> TokenIds:
        return right(text, special)[:-4]

    tokenizer = replace(files.tokenizer, backend="fastokens", encoder=quick, reference=right)
    return replace(files, tokenizer=tokenizer)


@pytest.mark.parametrize("wrong", [False, True])
async def test_one_text_in_so_many_is_tokenised_twice_and_a_difference_exchanges_the_tokenizer(wrong: bool) -> None:
    loads: list[ModelFiles] = [strayed(tiny()) if wrong else replace(tiny()), tiny()]
    outcomes: list[str] = []
    changed: list[ModelSource] = []
    store = ModelStore(lambda source: loads.pop(0), compare_every=3, on_check=outcomes.append, on_change=changed.append)
    for _ in range(8):
        files = await store.wait(SOURCE)
        assert files is not None
        files.tokenizer.encode("one two three", False)
    assert outcomes[0] == ("backend_different" if wrong else "backend_equal")
    assert "backend_different" not in outcomes[1:]
    assert ("by fastokens was not that by tokenizers" in store.note(SOURCE)) == wrong
    assert changed == [SOURCE] * wrong
    await store.close()
