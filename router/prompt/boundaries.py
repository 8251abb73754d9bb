"""Where a rendered prompt may be cut without changing any of its token ids.

A special token that the tokenizer matches before everything else is a hard boundary: text on one side of it never
changes the ids of the other. A long message may be cut between two words as well; nothing in the ids shows such a cut,
so whoever relies on one has to see first that the pieces' ids are those of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from router.hashing import TokenIds, pack_ids
from router.prompt.turns import give_way

MAX_PIECES = 4096  # of one prompt; text behind the last cut is one piece
LONG_PIECE_CHARS = 2048  # a longer piece is cut between two words
MIN_PIECE_CHARS = 256  # a shorter piece is not worth its place: it stays with the next one
STRETCH_CHARS = 65_536
SPARSE_CHARS = 128
"""Between two places where a token might begin; where they are closer, a search for all tokens at once costs less."""
MAX_STOPS = 1024
TURN_CHARS = 4096  # may be full of hard tokens: a millisecond or two
TURN_TOKENS = 4096  # the same
numbers = count(1)

BETWEEN_WORDS = re.compile(r" (?<=\w )(?=\w)")
"""The space that begins a piece. It stands first in the pattern, where the search is fastest."""
SOFT = b""
"""Stands first among the marks of a piece that begins between two words."""

Encode = Callable[[str, bool], TokenIds]


@dataclass(frozen=True, slots=True)
class HardToken:
    """An added token as tokenizer.json lists it. `hard`: it takes no white space along and no word border decides."""

    text: str
    id: int
    hard: bool


class Boundaries:
    """Finds the hard boundaries of one tokenizer's texts."""

    def __init__(self, tokens: Sequence[HardToken]) -> None:
        """`tokens`: every added token matched on the raw text (`normalized` false), soft ones too: they may cover a
        hard one. Leftmost match, then longest, as the tokenizer's own search."""
        texts = sorted([token.text for token in tokens], key=len, reverse=True)
        self.longest = len(texts[0])
        shared = _shared_start(texts)  # ahead of the choice, where the search is fastest
        self._find = re.compile(
            re.escape(shared) + "(?:" + "|".join([re.escape(t[len(shared) :]) for t in texts]) + ")"
        )
        self._shared = shared
        self._ids = {token.text: pack_ids([token.id]) for token in tokens if token.hard}
        self.root = next(numbers)
        """The number all of this tokenizer's conversations start from."""
        self.between_words = False
        """Long pieces may be cut between words. Set once that was seen to be harmless."""
        self.soft_faults = 0

    def cut(
        self, text: str, begin: int = 0, softly: bool = False, before: int = 0, *, one: bool = False
    ) -> tuple[list[str], list[list[TokenIds]]]:
        """(pieces, the hard tokens' ids in each, in order). Every piece but perhaps the first begins with one of them,
        or between two words: then its first mark is SOFT. Where a text is cut depends only on what is before the cut
        and on the next characters: two, or the hard token.

        `begin`: where the text is known to be cut, `softly` or at a hard token, behind `before` pieces: the others, or
        with `one` those up to the next cut at a hard token.
        """
        starts: list[int] = [begin]
        marks: list[list[TokenIds]] = [[SOFT] if softly else []]
        next_cut = begin + MIN_PIECE_CHARS if begin else 1
        most = MAX_PIECES - before
        for start, mark in self._marks(text, begin):
            if start - starts[-1] > LONG_PIECE_CHARS:
                self._cut_softly(text, start, starts, marks, most)
                next_cut = max(next_cut, starts[-1] + MIN_PIECE_CHARS)
            if start >= next_cut and len(starts) < most:
                starts.append(start)
                if one:
                    break
                marks.append([mark])
                next_cut = start + MIN_PIECE_CHARS
            else:
                marks[-1].append(mark)
        else:
            self._cut_softly(text, len(text), starts, marks, most)
            starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts)], marks

    def _cut_softly(self, text: str, end: int, starts: list[int], marks: list[list[TokenIds]], most: int) -> None:
        at = starts[-1] + LONG_PIECE_CHARS
        while self.between_words and at < end and len(starts) < most:
            found = BETWEEN_WORDS.search(text, at, min(at + STRETCH_CHARS, end))
            if found is not None:
                starts.append(found.start())
                marks.append([SOFT])
                at = found.start() + LONG_PIECE_CHARS
            else:
                at += STRETCH_CHARS - 1  # the last character again: what follows a space decides
                give_way()

    def _marks(self, text: str, at: int) -> Iterator[tuple[int, TokenIds]]:
        """The hard tokens in `text` from `at` on: where each stands, and its id.

        Where all tokens begin with one character, the places of that are looked at one by one, which is several times
        as fast as a regular expression's search while they are few.
        """
        if self._shared:
            lead = self._shared[0]
            misses, begin = 0, at
            turn = at + TURN_CHARS
            at = text.find(lead, at)
            while at >= 0 and misses * SPARSE_CHARS <= at - begin + STRETCH_CHARS:
                if at > turn:
                    give_way()
                    turn = at + TURN_CHARS
                match = self._find.match(text, at) if text.startswith(self._shared, at) else None
                if match is None:
                    misses += 1
                    at = text.find(lead, at + 1)
                    continue
                mark = self._ids.get(match.group())
                if mark is not None:
                    yield at, mark
                at = text.find(lead, match.end())
            if at < 0:
                return
        while at < len(text):  # as `finditer`, which searches a text of millions of characters in one call
            give_way()
            end, turn = at + STRETCH_CHARS, at + TURN_CHARS
            for match in self._find.finditer(text, at, end + self.longest):
                if match.start() >= end:
                    break
                at = match.end()
                if at > turn:
                    give_way()
                    turn = at + TURN_CHARS
                mark = self._ids.get(match.group())
                if mark is not None:
                    yield match.start(), mark
            at = max(at, end)


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return first[: same.index(False) if False in same else len(same)]


def find_boundaries(tokens: Sequence[HardToken], encode: Encode, probes: Sequence[str]) -> Boundaries | None:
    """Boundaries for a tokenizer, or None where cutting its texts is not proven harmless on the probes."""
    hard = [token for token in tokens if token.hard]
    if not hard:
        return None
    boundaries = Boundaries(tokens)
    sample = hard[:4] + hard[-4:]
    for number, token in enumerate(sample):
        other = sample[number - 1]
        for left, right in pairwise(probes):
            far = right * (1 + MIN_PIECE_CHARS // max(1, len(right)))
            text = left + token.text + far + other.text + token.text + left
            pieces, marks = boundaries.cut(text)
            ids = encode(text, False)
            if offsets(ids, marks) is None or ids != b"".join([encode(piece, False) for piece in pieces]):
                return None
    boundaries.between_words = True
    sides = [(left, right) for pair in pairwise(probes) for left, right in (pair, pair[::-1])]
    if not all(_cuts_between(left, right, boundaries, encode) for left, right in sides):
        boundaries.between_words = False
    return boundaries


def _cuts_between(left: str, right: str, boundaries: Boundaries, encode: Encode) -> bool:
    """Whether every cut between two words of these texts leaves the ids as they are."""
    text = f"{left} {right}"
    for cut in BETWEEN_WORDS.finditer(text):
        at = cut.start()
        if encode(text[:at], False) + encode(text[at:], False) != encode(text, False):
            return False
    return True


def offsets(ids: TokenIds, marks: Sequence[Sequence[TokenIds]]) -> list[int] | None:
    """Where each piece starts in `ids`, in bytes; None when its hard tokens are not all there in this order. Only the
    first piece may begin with something else than a hard token."""
    found: list[int] = []
    low = ids[::4]
    at = turn = 0
    for number, piece in enumerate(marks):
        if number == 0 and (not piece or piece[0] == SOFT):
            found.append(0)
        for mark in piece:
            if mark == SOFT:
                continue
            at = _find_id(ids, low, mark, at)
            if at < 0:
                return None
            if len(found) == number:
                found.append(at)
            at += 4
            if at > turn:
                give_way()
                turn = at + 4 * TURN_TOKENS
    return found


def _find_id(ids: TokenIds, low: bytes, mark: TokenIds, at: int) -> int:
    """The first place at or behind `at` where this id stands; -1 for none. `low` are the ids' lowest bytes: a search
    for one byte is by far the fastest, as long as it seldom stops.

    Most ids end in zero bytes, at which a plain search would stop everywhere; behind the zero byte that ends the id
    before it, the part of the mark without its zeros is rare.
    """
    place = at // 4
    for _ in range(MAX_STOPS):
        place = low.find(mark[0], place)
        if place < 0 or ids.startswith(mark, 4 * place):
            return 4 * place if place >= 0 else -1
        place += 1
    rare = b"\0" + mark.rstrip(b"\0")
    at = 4 * place - 1
    while True:
        give_way()
        for _ in range(MAX_STOPS):
            at = ids.find(rare, at)
            if at < 0 or (at % 4 == 3 and ids.startswith(mark, at + 1)):
                return at if at < 0 else at + 1
            at += 1
