"""Long messages are cut between words too: the ids stay what they are, and what many prompts share is made once."""

from __future__ import annotations

import functools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import Namespace, Scheme, TokenIds, pack_ids, prompt_keys
from router.prompt.conversation import (
    LONG_PIECE_CHARS,
    SOFT_FAULTS,
    Boundaries,
    ConversationCache,
    HardToken,
    find_boundaries,
)
from tests.prompt.support import tiny

SCHEME = Scheme("sglang-sha256", 16)


@functools.cache
def boundaries() -> Boundaries:
    found = tiny().tokenizer.boundaries
    assert found is not None
    return found


def plain(text: str) -> TokenIds:
    return tiny().tokenizer.encode(text, False)


def words(seed: int, chars: int) -> str:
    rng = random.Random(seed)
    found = ""
    while len(found) < chars:
        found += rng.choice((" ", " ", " ", "\n", "  ", "'s ", ", ", "_", " 1", "é ", "\u4e2d\u6587 ", " <|im_end|>"))
        found += "".join(rng.choice("abcdefghij") for _ in range(rng.randrange(1, 9)))
    return found


def keys(cache: ConversationCache, text: str) -> tuple[TokenIds, list[int] | None, int]:
    """(ids, block keys, tokens that were not made again)."""
    ids, cached = cache.encode(text, boundaries(), tiny().tokenizer.encode)
    assert cached is not None
    *_, made = cached.steps(SCHEME, Namespace(), 1 << 40)
    return ids, made, cached.tokens_reused


def test_the_tiny_tokenizer_may_be_cut_between_words() -> None:
    assert boundaries().between_words


@given(st.integers(0, 1000), st.integers(0, 30_000), st.lists(st.integers(0, 1000), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_prompts_with_a_shared_start_get_the_ids_and_keys_of_the_whole(start: int, size: int, tails: list[int]) -> None:
    cache = ConversationCache(16 << 20)
    shared = words(start, size)
    for tail in tails:
        text = shared + words(tail, 9000)
        ids, made, _ = keys(cache, text)
        assert ids == plain(text)
        assert made == prompt_keys(SCHEME, ids)
    assert cache.refused == 0


def test_the_shared_start_of_one_long_message_is_made_once() -> None:
    cache = ConversationCache(16 << 20)
    shared = "<|im_start|>user\n" + " ".join(f"word{number}" for number in range(4000))
    first = keys(cache, f"{shared} What is it?")
    second = keys(cache, f"{shared} Another question, that nobody asked.")
    assert first[2] == 0
    assert second[2] > len(plain(shared)) / 4 * (1 - 1.1 * LONG_PIECE_CHARS / len(shared))


def joining(text: str, special: bool) -> TokenIds:
    """A tokenizer that makes one token of every two words (none is known to): no cut between words is harmless."""
    ids: list[int] = []
    for place, part in enumerate(text.split("<|s|>")):
        if place:
            ids.append(7)
        found = part.split(" ")
        ids += [1000 + hash(" ".join(found[at : at + 2])) % 50_000 for at in range(0, len(found), 2)]
    return pack_ids(ids)


HARD = [HardToken("<|s|>", 7, True)]


def test_a_tokenizer_that_joins_words_is_not_cut_between_them() -> None:
    found = find_boundaries(HARD, joining, ["one two three four", "five six seven", "eight nine ten"])
    assert found is None or not found.between_words


def test_cuts_that_change_ids_are_found_out_and_then_given_up() -> None:
    cut = Boundaries(HARD)
    cut.between_words = True
    cache = ConversationCache(1 << 20)
    for number in range(SOFT_FAULTS + 1):
        text = f"odd {number} " + " ".join(f"w{n}" for n in range(3000))
        ids, _ = cache.encode(text, cut, joining)
        assert ids == joining(text, False), "the ids are those of the whole all the same"
    assert not cut.between_words
    assert cut.soft_faults == SOFT_FAULTS


def test_a_splice_that_changes_ids_is_found_out_at_the_splice() -> None:
    """A kept piece was right where it stood; what follows it now may not be."""
    cut = Boundaries(HARD)
    cut.between_words = True
    cache = ConversationCache(1 << 20)
    honest = True

    def encode(text: str, special: bool) -> TokenIds:
        ids = plain(text)
        return ids if honest or len(text) < 500 else pack_ids([3]) + ids[4:]

    shared = " ".join(f"w{n}" for n in range(3000))
    assert cache.encode(f"{shared} one", cut, encode)[1] is not None
    honest = False
    ids, cached = cache.encode(f"{shared} two " + "x" * 600, cut, encode)
    assert cached is None
    assert ids[:4] == pack_ids([3])
    assert cut.soft_faults == 1
