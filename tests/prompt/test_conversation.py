"""The conversation cache gives what tokenising and hashing everything anew gives, and stays within its bound."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import Namespace, Scheme, TokenIds, chain_digests, pack_ids, prompt_keys, token_count
from router.prompt.boundaries import MAX_PIECES, MIN_PIECE_CHARS, Boundaries, HardToken, find_boundaries
from router.prompt.conversation import ConversationCache
from tests.prompt.support import tiny
from tests.support.built import interpreted

START, END = "<|im_start|>", "<|im_end|>"
SCHEMES = (
    Scheme("sglang-sha256", 4),
    Scheme("sglang-sha256", 16),
    Scheme("xxh3", 4),
    Scheme("sglang-sha256", 4, bigram=True),
)
ALL_AT_ONCE = 1 << 40


@functools.cache
def boundaries() -> Boundaries:
    found = tiny().tokenizer.boundaries
    assert found is not None
    return found


def plain(text: str) -> TokenIds:
    return tiny().tokenizer.encode(text, False)


class Counting:
    """The tiny tokenizer, and how many characters it was given."""

    def __init__(self) -> None:
        self.chars = 0

    def __call__(self, text: str, special: bool) -> TokenIds:
        self.chars += len(text)
        return plain(text)


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"


def encode(cache: ConversationCache, text: str) -> TokenIds:
    return cache.encode(text, boundaries(), tiny().tokenizer.encode)[0]


pieces = st.sampled_from(
    [START, END, "<|bos|>", "<|im_", "|>", "<", "\n", " ", "hello world " * 30, "ä漢👩‍👩‍👧", "e\u0301"]
)
texts = st.lists(pieces | st.text(max_size=20), max_size=25).map("".join)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=6))
def test_every_text_gets_its_own_ids_whatever_was_seen_before(growing: list[str]) -> None:
    """case 48: a turn re-sent as text is tokenised as text, never guessed from an earlier answer."""
    cache = ConversationCache(1 << 20)
    text = ""
    for more in growing:
        text += more
        for asked in (text, more):
            try:
                expected = plain(asked)
            except Exception:  # a lone surrogate: no engine could encode it either
                return
            assert encode(cache, asked) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.sampled_from(SCHEMES), st.integers(1, 7))
def test_block_keys_are_those_of_hashing_everything(words: list[int], scheme: Scheme, slice_blocks: int) -> None:
    cache = ConversationCache(1 << 20)
    text = ""
    for number, count in enumerate(words):
        text += turn("user", f"{number} " + "word " * count)
        ids, cached = cache.encode(text, boundaries(), tiny().tokenizer.encode)
        assert cached is not None
        for namespace in (Namespace(), Namespace(cache_salt="s")):
            *_, keys = cached.steps(scheme, namespace, slice_blocks)
            assert keys == prompt_keys(scheme, ids, namespace)


def test_a_namespace_that_cannot_be_reproduced_has_no_keys() -> None:
    """cases 40, 41"""
    _, cached = ConversationCache(1 << 20).encode(turn("user", "x"), boundaries(), tiny().tokenizer.encode)
    assert cached is not None
    assert list(cached.steps(SCHEMES[0], Namespace(lora_name="a"), 10)) == [None]


def test_the_next_turn_costs_its_own_text_only() -> None:
    cache, encoder, rng = ConversationCache(8 << 20), Counting(), random.Random(1)
    text = turn("system", "Be kind. " * 60)
    for number in range(20):
        text += turn("user", " ".join(str(rng.random()) for _ in range(40)))
        before = encoder.chars
        ids, cached = cache.encode(text + f"{START}assistant\n", boundaries(), encoder)
        assert ids == plain(text + f"{START}assistant\n")
        assert cached is not None
        if number > 1:
            assert encoder.chars - before < 2500
            assert cached.tokens_reused > 0.5 * token_count(ids)


def test_conversations_share_their_beginning_and_only_that() -> None:
    cache, encoder = ConversationCache(8 << 20), Counting()
    system = turn("system", "You are a careful assistant. " * 40)
    for name in ("ann", "bob", "cy"):
        text = system + turn("user", f"{name} asks " * 40) + f"{START}assistant\n"
        assert cache.encode(text, boundaries(), encoder)[0] == plain(text)
    assert encoder.chars < 3 * len(system)


@interpreted
def test_conversations_that_take_turns_behind_one_system_prompt_are_cut_where_they_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was said before is found by comparing it, at a parting of ways too; the message behind one is looked for."""
    looked_at = 0
    cut = Boundaries.cut

    def counted(*args: Any, **kwargs: Any) -> tuple[list[str], list[list[TokenIds]]]:
        nonlocal looked_at
        found = cut(*args, **kwargs)
        looked_at += sum(map(len, found[0]))
        return found

    monkeypatch.setattr(Boundaries, "cut", counted)
    cache = ConversationCache(8 << 20)
    talks = [turn("system", "Be kind. " * 400) + turn("user", f"I am {name}. " * 30) for name in range(5)]
    for number in range(12):
        for name in range(5):
            talks[name] += turn("assistant", f"{number} {name} yes. " * 60) + turn("user", f"{number} {name} no. " * 60)
            looked_at = 0
            assert encode(cache, talks[name]) == plain(talks[name])
            if number:
                assert looked_at < 4000


def test_memory_stays_within_the_bound_and_leaves_go_first() -> None:
    """A hundred times the bound of distinct prompts; the shared system prompt, used by all, is never dropped."""
    bound = 300_000
    cache, encoder = ConversationCache(bound), Counting()
    system = turn("system", "shared " * 200)
    for number in range(4000):
        ids, cached = cache.encode(system + turn("user", f"{number} " * 80), boundaries(), encoder)
        assert cached is not None
        list(cached.steps(SCHEMES[0], Namespace(), ALL_AT_ONCE))
        assert cache.bytes <= bound
        if number:
            assert cached.tokens_reused >= token_count(plain(system)) - 2  # its end goes with the next piece
    assert ids == plain(system + turn("user", f"{number} " * 80))
    encode(cache, turn("user", "x"))
    assert 0 < cache.bytes <= bound


def test_one_prompt_under_ever_new_salts_stays_within_the_bound() -> None:
    bound = 100_000
    cache, text = ConversationCache(bound), turn("user", "word " * 500) + turn("user", "x")
    for number in range(300):
        ids, cached = cache.encode(text, boundaries(), tiny().tokenizer.encode)
        assert cached is not None
        namespace = Namespace(cache_salt=str(number))
        *_, keys = cached.steps(SCHEMES[0], namespace, ALL_AT_ONCE)
        assert keys == prompt_keys(SCHEMES[0], ids, namespace)
        assert cache.bytes <= bound


class Interrupting:
    """A lock behind whose release another thread drops all there is, once `armed`."""

    def __init__(self, cache: ConversationCache) -> None:
        self.cache = cache
        self.armed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self.armed:
            self.cache._max_bytes = 0
            self.cache._evict()


def test_keys_of_a_piece_that_is_dropped_at_that_moment_are_not_counted_for_ever() -> None:
    cache = ConversationCache(1 << 20)
    lock = Interrupting(cache)
    cache._lock = lock  # type: ignore[assignment]
    text = turn("user", "word " * 500) + turn("user", "x")
    ids, cached = cache.encode(text, boundaries(), tiny().tokenizer.encode)
    assert cached is not None
    lock.armed = True
    *_, keys = cached.steps(SCHEMES[0], Namespace(), ALL_AT_ONCE)
    assert keys == prompt_keys(SCHEMES[0], ids)
    assert (len(cache), cache.bytes) == (0, 0)


def test_nothing_is_kept_when_the_bound_is_zero() -> None:
    cache = ConversationCache(0)
    assert encode(cache, turn("user", "x")) == plain(turn("user", "x"))
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_hostile_number_of_special_tokens_makes_a_bounded_number_of_pieces() -> None:
    text = (START + "x" * MIN_PIECE_CHARS) * (3 * MAX_PIECES // 2)
    found, marks = boundaries().cut(text)
    assert len(found) == len(marks) == MAX_PIECES
    assert "".join(found) == text
    cache = ConversationCache(64 << 20)
    assert encode(cache, text) == encode(cache, text) == plain(text)


def test_a_tokenizer_that_hides_its_special_tokens_is_used_whole() -> None:
    """The cut is only believed when the special token's id is found again in the ids."""

    def other(text: str, special: bool) -> TokenIds:
        return pack_ids(list(text.encode()))

    cache = ConversationCache(1 << 20)
    text = turn("user", "a" * 600) + turn("user", "b")
    ids, cached = cache.encode(text, boundaries(), other)
    assert (ids, cached, cache.refused, len(cache)) == (pack_ids(list(text.encode())), None, 1, 0)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "no token"),
        ([HardToken("<s>", 1, hard=False)], "only soft tokens: they take white space along"),
    ],
)
def test_without_hard_tokens_there_are_no_boundaries(tokens: list[HardToken], reason: str) -> None:
    assert find_boundaries(tokens, lambda text, special: pack_ids(list(text.encode())), ("a", "b")) is None, reason


def test_boundaries_are_refused_when_the_pieces_are_not_the_whole() -> None:
    """A tokenizer that looks across its special tokens (here: counts characters so far) must not be cut."""

    def across(text: str, special: bool) -> TokenIds:
        return pack_ids([*range(len(text)), 7])

    assert find_boundaries([HardToken("<s>", 7, hard=True)], across, ("a", "b", "c")) is None


def test_a_soft_token_that_covers_a_hard_one_hides_it() -> None:
    found = Boundaries([HardToken("<s>", 1, hard=True), HardToken("<<s>>", 2, hard=False)])
    text = "x" * 300
    assert found.cut(f"{text}<<s>>{text}<s>{text}")[0] == [f"{text}<<s>>{text}", f"<s>{text}"]


@interpreted
def test_pair_keys_of_earlier_turns_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE engines: a block of pairs reads one token behind itself, and is kept with the piece that holds that one."""
    hashed: list[bytes] = []

    def counted(scheme: Scheme, state: bytes, units: bytes) -> list[bytes]:
        made = chain_digests(scheme, state, units)
        hashed.extend(made)
        return made

    monkeypatch.setattr("router.prompt.conversation.chain_digests", counted)
    scheme, cache, talk, keys = Scheme("sglang-sha256", 4, bigram=True), ConversationCache(1 << 20), "", [0]
    for number in range(4):
        talk += turn("user", f"{number} " * 300)
        ids, cached = cache.encode(talk, boundaries(), tiny().tokenizer.encode)
        assert cached is not None
        *_, made = cached.steps(scheme, Namespace(), 64)
        assert made is not None
        keys = made
        assert keys == prompt_keys(scheme, ids, Namespace())
    assert len(keys) <= len(hashed) <= len(keys) + 8, "all but the blocks at a turn's end are hashed once"
