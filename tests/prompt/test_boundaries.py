"""Where texts are cut, and where the cuts are found again in the ids."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import TokenIds, pack_ids
from router.prompt.boundaries import (
    BETWEEN_WORDS,
    LONG_PIECE_CHARS,
    MIN_PIECE_CHARS,
    SOFT,
    Boundaries,
    HardToken,
    offsets,
)

TOKENS = [
    HardToken("<|a|>", 5, hard=True),
    HardToken("<|a|>|>", 6, hard=False),
    HardToken("<|end|>", 0x02505D, hard=True),
    HardToken("<|<|", 0, hard=True),
]
words = st.sampled_from([*[token.text for token in TOKENS], "<", "<|", "|>", "a", " ", "x" * MIN_PIECE_CHARS, "\u4e2d"])
texts = st.lists(words, max_size=30).map("".join)


def naive_marks(text: str, tokens: list[HardToken]) -> list[TokenIds]:
    """Leftmost, then longest."""
    by_text = {token.text: token for token in tokens}
    found = re.findall("|".join(map(re.escape, sorted(by_text, key=len, reverse=True))), text)
    return [pack_ids([by_text[one].id]) for one in found if by_text[one].hard]


@settings(deadline=None)
@given(texts, st.sampled_from([1, 128, 1 << 40]))
def test_every_hard_token_is_found_however_it_is_searched_for(text: str, sparse: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.prompt.boundaries.SPARSE_CHARS", sparse)
        patch.setattr("router.prompt.boundaries.STRETCH_CHARS", 40)
        for tokens in (TOKENS, [*TOKENS, HardToken("x|", 9, hard=True)]):  # with and without a shared beginning
            pieces, marks = Boundaries(tokens).cut(text)
            assert "".join(pieces) == text
            assert [mark for piece in marks for mark in piece] == naive_marks(text, tokens)
            assert all(len(piece) >= MIN_PIECE_CHARS for piece in pieces[1:-1])


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 5, 0x105, 0x505, 0x5D, 0x02505D, 7]), max_size=40), st.data())
def test_offsets_are_those_of_a_plain_search(ids: list[int], data: st.DataObject) -> None:
    marks = data.draw(st.lists(st.lists(st.sampled_from([0, 5, 0x02505D]), min_size=1, max_size=2), max_size=4))
    packed = [[pack_ids([mark]) for mark in piece] for piece in marks]
    expected: list[int] | None = []
    at = 0
    for piece in marks:
        for number, mark in enumerate(piece):
            if expected is None or mark not in ids[at:]:
                expected = None
                break
            at = ids.index(mark, at)
            if number == 0:
                expected.append(4 * at)
            at += 1
    stops = data.draw(st.sampled_from([1, 2, 1024]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.prompt.boundaries.MAX_STOPS", stops)
        assert offsets(pack_ids(ids), packed) == expected


def test_the_first_piece_may_begin_with_text() -> None:
    ids = pack_ids([1, 2, 5, 3])
    assert offsets(ids, [[], [pack_ids([5])]]) == [0, 8]
    assert offsets(ids, [[SOFT, pack_ids([5])]]) == [0]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "a b", " ", "." * 13, "." * 39]), max_size=40).map("".join))
def test_a_cut_between_words_is_found_however_far_away_it_is(rest: str) -> None:
    boundaries = Boundaries(TOKENS)
    boundaries.between_words = True
    text = "." * LONG_PIECE_CHARS + rest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.prompt.boundaries.STRETCH_CHARS", 40)
        pieces, _ = boundaries.cut(text)
    found = BETWEEN_WORDS.search(text, LONG_PIECE_CHARS)
    assert pieces == ([text] if found is None else [text[: found.start()], text[found.start() :]])


@settings(deadline=None)
@given(texts)
def test_what_is_behind_a_known_cut_is_cut_as_in_the_whole(text: str) -> None:
    boundaries = Boundaries(TOKENS)
    boundaries.between_words = True
    text += " a" * 3000 + text
    pieces, marks = boundaries.cut(text)
    begin = 0
    for before, (piece, own) in enumerate(zip(pieces, marks, strict=True)):
        softly = own[:1] == [SOFT]
        assert boundaries.cut(text, begin, softly, before) == (pieces[before:], marks[before:])
        hard = [at for at in range(before + 1, len(pieces)) if marks[at][:1] != [SOFT]]
        end = hard[0] if hard else len(pieces)
        assert boundaries.cut(text, begin, softly, before, one=True) == (pieces[before:end], marks[before:end])
        begin += len(piece)
