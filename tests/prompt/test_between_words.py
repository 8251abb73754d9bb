"""Long messages are cut between words too: the ids stay what they are, and what many prompts share is made once."""

from __future__ import annotations

import functools
import random
import sys
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import Namespace, Scheme, TokenIds, pack_ids, prompt_keys
from router.prompt.boundaries import LONG_PIECE_CHARS, Boundaries, HardToken, find_boundaries
from router.prompt.conversation import _CHAIN_BYTES, _PIECE_BYTES, SOFT_FAULTS, ConversationCache
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
        shared = f"odd {number} " + " ".join(f"w{n}" for n in range(3000))
        for text in (f"{shared} one", f"{shared} two"):
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


def test_what_nobody_shares_is_tokenised_once() -> None:
    chars = 0

    def encode(text: str, special: bool) -> TokenIds:
        nonlocal chars
        chars += len(text)
        return plain(text)

    cache = ConversationCache(16 << 20)
    for number in range(3):
        text = f"{number} " + words(number, 30_000)
        before = chars
        assert cache.encode(text, boundaries(), encode)[0] == plain(text)
        assert chars - before == len(text)


def test_a_piece_that_is_cut_keeps_what_hangs_on_it_and_costs_what_it_is() -> None:
    """A conversation goes on behind a long message, of which another prompt then shares the beginning only."""
    cache = ConversationCache(16 << 20)
    shared = "<|im_start|>user\n" + words(1, 20_000)
    first = f"{shared} one.<|im_end|>\n<|im_start|>assistant\n{words(2, 600)}"
    second = f"{shared} two, {words(3, 6000)}"
    longer = f"{first}<|im_end|>\n<|im_start|>user\nAnd then? {words(4, 600)}"
    for text, least in ((first, 0), (longer, 0.8), (second, 0.6), (longer, 1.0), (second, 1.0), (f"{longer} x", 0.9)):
        ids, made, reused = keys(cache, text)
        assert ids == plain(text)
        assert made == prompt_keys(SCHEME, ids)
        assert reused >= least * len(ids) / 4
    held = list(cache._pieces.values())
    assert all(piece.in_tree and cache._pieces[piece.key] is piece for piece in held)
    grown = sum(_CHAIN_BYTES + len(chain) for piece in held for chain in piece.chains.values())
    assert cache.bytes == sum(piece.bytes for piece in held) + grown


def test_the_words_kept_for_the_next_splice_are_counted() -> None:
    cache, cut = ConversationCache(16 << 20), Boundaries(HARD)
    cut.between_words = True
    shared = " ".join(f"w{n}" for n in range(600)) + " " + "x" * 3000  # no word ends in what is usually made again
    for end in ("one", "two"):
        cache.encode(f"{shared} {end} " + "y " * 3000, cut, tiny().tokenizer.encode)
    kept = [piece.overlap for piece in cache._pieces.values() if piece.overlap is not None]
    assert kept
    held = list(cache._pieces.values())
    bare = sum(len(piece.ids) + sum(map(sys.getsizeof, (piece.text, *piece.rest))) for piece in held)
    assert cache.bytes >= bare + _PIECE_BYTES * len(held) + sum(len(text) + len(ids) for text, ids in kept)


def test_after_cuts_between_words_were_given_up_no_earlier_one_is_relied_on() -> None:
    cut = Boundaries(HARD)
    cut.between_words = True
    cache = ConversationCache(16 << 20)
    shared = " ".join(f"w{n}" for n in range(3000))
    given: list[str] = []

    def encode(text: str, special: bool) -> TokenIds:
        given.append(text)
        return plain(text)

    for end in ("one", "two"):
        cache.encode(f"{shared} {end}", cut, encode)
    cut.between_words = False
    given.clear()
    ids, cached = cache.encode(f"{shared} three", cut, encode)
    assert given == [f"{shared} three"]
    assert cached is not None
    assert (ids, cached.tokens_reused) == (plain(f"{shared} three"), 0)


def test_prompts_that_share_their_starts_at_once_get_their_own_ids() -> None:
    """Several threads cut the same pieces."""
    cache, rng = ConversationCache(2 << 20), random.Random(5)
    shared = [words(seed, 25_000) for seed in range(3)]
    asked = [rng.choice(shared)[: rng.randrange(4000, 25_000)] + f" {n} " + words(n, 3000) for n in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: keys(cache, text), asked * 2))
    for text, (ids, made, _) in zip(asked * 2, found, strict=True):
        assert ids == plain(text)
        assert made == prompt_keys(SCHEME, ids)
    assert cache.refused == 0


@given(st.integers(0, 10**6), st.sampled_from([100_000, 16 << 20]))
@settings(max_examples=15, deadline=None)
def test_prompts_put_together_of_shared_parts_get_the_ids_and_keys_of_the_whole(seed: int, bound: int) -> None:
    """Hard and soft cuts, ends anywhere, the same ways again, also while pieces are dropped."""
    rng, cache = random.Random(seed), ConversationCache(bound)
    parts = [
        rng.choice(("<|im_start|>", "<|im_start|>user\n", "", "<|bos|>"))
        + words(rng.randrange(10**6), rng.choice((50, 300, 5000, 9000)))
        + rng.choice(("<|im_end|>", "<|im_end|>\n", " ", ""))
        for _ in range(5)
    ]
    for _ in range(15):
        text = parts[0] + "".join(rng.choices(parts, k=rng.randrange(5)))
        text = text[: rng.randrange(1, 2 * len(text))] + words(rng.randrange(10**6), rng.choice((3, 30, 6000)))
        ids, made, _ = keys(cache, text)
        assert ids == plain(text)
        assert made == prompt_keys(SCHEME, ids)
