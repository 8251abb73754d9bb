"""Reuse of what earlier turns already cost: their token ids and their block keys, kept at message boundaries.

A special token that the tokenizer matches before everything else is a hard boundary: text on one side of it never
changes the ids of the other. Rendered prompts are cut there, the pieces form a tree (piece after piece from the start),
and the next turn walks the tree as far as its text is the same and has only the rest tokenised and hashed. Pieces are
compared as text, never by a digest. A new piece is only kept after the cut was found again in the ids.

A long message is cut between words as well, for prompts that share the start of one message (a document, then each
time another question). Nothing in the ids shows such a cut, so a piece is only kept after its ids, made from it alone,
were found to be the very ones that stand at its place in the ids of the whole.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from router.hashing import (
    Namespace,
    Scheme,
    TokenIds,
    block_units,
    chain_digests,
    chain_root,
    digest_keys,
    full_blocks,
    pack_ids,
    token_count,
)

MAX_PIECES = 4096  # of one prompt; text behind the last cut is one piece
LONG_PIECE_CHARS = 4096  # a longer piece is cut between two words
SOFT_FAULTS = 4  # cuts between words that changed ids, after which none are made any more
MIN_PIECE_CHARS = 256  # a shorter piece is not worth its place: it stays with the next one
PIECES_AT_ONCE = 1024  # whose block keys are kept between two yields
STRETCH_CHARS = 65_536
_PIECE_BYTES = 620  # what a piece costs beside its text and ids, measured: two dict entries, four objects
_CHAIN_BYTES = 360
_numbers = count(1)

_BETWEEN_WORDS = re.compile(r"\w(?= \w)")
_OVERLAP_CHARS = 128
_SOFT = b""
"""Stands first among the marks of a piece that begins between two words."""

Encode = Callable[[str, bool], TokenIds]
_ChainKey = tuple[Scheme, Namespace]


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
        texts = sorted((token.text for token in tokens), key=lambda text: -len(text))
        self._longest = len(texts[0])
        shared = _shared_start(texts)  # ahead of the choice, where the search is fastest
        self._find = re.compile(re.escape(shared) + "(?:" + "|".join(re.escape(t[len(shared) :]) for t in texts) + ")")
        self._ids = {token.text: pack_ids([token.id]) for token in tokens if token.hard}
        self.root = next(_numbers)
        """The number all of this tokenizer's conversations start from."""
        self.between_words = False
        """Long pieces may be cut between words. Set once that was seen to be harmless."""
        self.soft_faults = 0

    def cut(self, text: str) -> tuple[list[str], list[list[TokenIds]]]:
        """(pieces, the hard tokens' ids in each, in order). Every piece but perhaps the first begins with one of them,
        or between two words: then its first mark is empty. Where a text is cut depends only on what is before the cut
        and the next two characters."""
        starts: list[int] = [0]
        marks: list[list[TokenIds]] = [[]]
        next_cut = 1
        for match in self._matches(text):
            mark = self._ids.get(match.group())
            if mark is None:
                continue
            start = match.start()
            if start - starts[-1] > LONG_PIECE_CHARS:
                self._cut_softly(text, start, starts, marks)
                next_cut = max(next_cut, starts[-1] + MIN_PIECE_CHARS)
            if start >= next_cut and len(starts) < MAX_PIECES:
                starts.append(start)
                marks.append([mark])
                next_cut = start + MIN_PIECE_CHARS
            else:
                marks[-1].append(mark)
        self._cut_softly(text, len(text), starts, marks)
        starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts)], marks

    def _cut_softly(self, text: str, end: int, starts: list[int], marks: list[list[TokenIds]]) -> None:
        while self.between_words and end - starts[-1] > LONG_PIECE_CHARS and len(starts) < MAX_PIECES:
            found = _BETWEEN_WORDS.search(text, starts[-1] + LONG_PIECE_CHARS, end)
            if found is None:
                return
            starts.append(found.end())
            marks.append([_SOFT])

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """As `finditer`, which searches a text of millions of characters in one call."""
        at = 0
        while at < len(text):
            end = at + STRETCH_CHARS
            for match in self._find.finditer(text, at, end + self._longest):
                if match.start() >= end:
                    break
                yield match
                at = match.end()
            at = max(at, end)


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = (a == b for a, b in zip(first, last, strict=False))
    length = next((n for n, equal in enumerate(same) if not equal), min(len(first), len(last)))
    return first[:length]


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
            offsets = _offsets(ids, pieces, marks, encode)
            if offsets is None or ids != b"".join(encode(piece, False) for piece in pieces):
                return None
    boundaries.between_words = True
    sides = [(left, right) for pair in pairwise(probes) for left, right in (pair, pair[::-1])]
    if not all(_cuts_between(left, right, boundaries, encode) for left, right in sides):
        boundaries.between_words = False
    return boundaries


def _cuts_between(left: str, right: str, boundaries: Boundaries, encode: Encode) -> bool:
    """Whether every cut between two words of these texts leaves the ids as they are."""
    text = f"{left} {right}"
    for cut in _BETWEEN_WORDS.finditer(text):
        if encode(text[: cut.end()], False) + encode(text[cut.end() :], False) != encode(text, False):
            return False
    return True


def _offsets(
    ids: TokenIds, texts: Sequence[str], marks: Sequence[Sequence[TokenIds]], encode: Encode
) -> list[int] | None:
    """Where each piece starts in `ids`, in bytes; None when its hard tokens are not all there in this order. Raises
    SoftCut when the ids of a piece alone are not those at its place, although it ends between two words."""
    found: list[int] = []
    at = 0
    for number, piece in enumerate(marks):
        if number == 0 and piece[:1] in ([], [_SOFT]):  # a text's first piece need not begin with a hard token
            found.append(0)
        elif piece[0] == _SOFT:
            own = encode(texts[number - 1], False)
            if not ids.startswith(own, found[-1]):
                raise SoftCut
            at = found[-1] + len(own)
            found.append(at)
        for mark in piece:
            if mark == _SOFT:
                continue
            at = _find_id(ids, mark, at)
            if at < 0:
                return None
            if len(found) == number:
                found.append(at)
            at += 4
    return found


def _find_id(ids: TokenIds, mark: TokenIds, at: int) -> int:
    """The first place at or behind `at` where this id stands; -1 for none.

    Most ids end in zero bytes, at which a plain search stops everywhere; behind the zero byte that ends the id before
    it, the part of the mark without its zeros is rare.
    """
    if ids.startswith(mark, at):
        return at
    rare = b"\0" + mark.rstrip(b"\0")
    while True:
        at = ids.find(rare, at)
        if at < 0 or (at % 4 == 3 and ids.startswith(mark, at + 1)):
            return at if at < 0 else at + 1
        at += 1


class SoftCut(Exception):
    """A cut between two words changed the ids: the tokenizer joins what is on its two sides."""


@dataclass(slots=True, eq=False)
class _Piece:
    """One piece behind the pieces before it. `tokens_end` counts from the start of the prompt."""

    number: int
    key: tuple[int, str]
    ids: TokenIds
    tokens_end: int
    chains: dict[_ChainKey, tuple[array[int], bytes]] = field(default_factory=dict)
    """Per scheme and namespace: keys of the blocks that end inside this piece, and the chain's state at its end."""
    in_tree: bool = True


class CachedPrompt:
    """One prompt's way through the tree; knows the block keys that earlier prompts on the same way worked out."""

    __slots__ = ("_cache", "_ids", "_pieces", "tokens_reused")

    def __init__(self, cache: ConversationCache, pieces: list[_Piece], ids: TokenIds, tokens_reused: int) -> None:
        self._cache = cache
        self._pieces = pieces
        self._ids = ids
        self.tokens_reused = tokens_reused
        """Tokens at the start that did not have to be made again."""

    def steps(self, scheme: Scheme, namespace: Namespace, slice_blocks: int) -> Iterator[list[int] | None]:
        """Works out the keys of every full block, at most `slice_blocks` new ones between two yields. Yields an empty
        list while there is more to do, at last the keys: what `prompt_keys` would give."""
        state = chain_root(scheme, namespace)
        if state is None:
            yield None
            return
        key = (scheme, namespace)
        keys = array("q")
        known = 0
        for piece in self._pieces:
            chain = piece.chains.get(key)
            if chain is None:
                break
            keys.extend(chain[0])
            state = chain[1]
            known += 1
        start, end = len(keys), full_blocks(scheme, token_count(self._ids))
        last = state
        digests: list[bytes] = []
        fresh = array("q")
        while start + len(digests) < end:
            at = start + len(digests)
            made = chain_digests(scheme, last, block_units(scheme, self._ids, at, min(at + slice_blocks, end)))
            fresh.extend(digest_keys(scheme, made))
            digests += made
            last = made[-1]
            if start + len(digests) < end:
                yield []
        done = 0
        for first in range(known, len(self._pieces), PIECES_AT_ONCE):
            if first > known:
                yield []
            for piece in self._pieces[first : first + PIECES_AT_ONCE]:
                blocks = full_blocks(scheme, piece.tokens_end) - start
                if blocks > done:
                    state = digests[blocks - 1]
                piece.chains[key] = (fresh[done:blocks], state)
                self._cache.grew(piece, _CHAIN_BYTES + 8 * (blocks - done))
                done = blocks
        keys.extend(fresh)
        yield keys.tolist()


class ConversationCache:
    """The tree of all models' conversations, at most `max_bytes` of it; the pieces longest unused go first, leaves
    before what they hang on. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[tuple[int, str], _Piece] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        self.refused = 0
        """Prompts whose cuts were not found again in the ids: tokenised whole and not kept."""

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, boundaries: Boundaries, encode: Encode) -> tuple[TokenIds, CachedPrompt | None]:
        """`encode(text, False)`, with only the new end of the text tokenised. Raises what `encode` raises."""
        texts, marks = boundaries.cut(text)
        with self._lock:
            found = self._walk(boundaries.root, texts)
        if len(found) == len(texts):
            ids = b"".join([piece.ids for piece in found])
            return ids, CachedPrompt(self, found, ids, len(ids) // 4)
        known = len(found)
        try:
            tail = self._tail(found, texts, marks, encode)
            offsets = _offsets(tail, texts[known:], marks[known:], encode)
        except SoftCut:
            offsets = None
            boundaries.soft_faults += 1
            boundaries.between_words = boundaries.soft_faults < SOFT_FAULTS
        if offsets is None or offsets[0]:
            with self._lock:
                self.refused += 1
            return encode(text, False), None
        head = b"".join([piece.ids for piece in found])
        offsets.append(len(tail))
        with self._lock:
            parent = found[-1].number if found else boundaries.root
            tokens = len(head) // 4
            for index, piece_text in enumerate(texts[known:]):
                piece_ids = tail[offsets[index] : offsets[index + 1]]
                tokens += len(piece_ids) // 4
                piece = self._add((parent, piece_text), piece_ids, tokens)
                found.append(piece)
                parent = piece.number
            # Leaves become the oldest of their conversation, so that nothing outlives what it hangs on.
            for piece in reversed(found):
                if piece.in_tree:
                    self._pieces.move_to_end(piece.key)
            self._evict()
        ids = head + tail
        return ids, CachedPrompt(self, found, ids, len(head) // 4)

    def _tail(self, found: list[_Piece], texts: list[str], marks: list[list[TokenIds]], encode: Encode) -> TokenIds:
        """Ids of what follows the known pieces. Between two words the last of the known ones are made again with it, to
        see that nothing joins over the cut. Raises SoftCut."""
        new = "".join(texts[len(found) :])
        if not found or marks[len(found)][:1] != [_SOFT]:
            return encode(new, False)
        before = found[-1]
        word = _BETWEEN_WORDS.search(before.key[1], max(0, len(before.key[1]) - _OVERLAP_CHARS))
        overlap = before.key[1][word.end() if word is not None else 0 :]
        known, both = encode(overlap, False), encode(overlap + new, False)
        if not before.ids.endswith(known) or not both.startswith(known):
            raise SoftCut
        return both[len(known) :]

    def _walk(self, root: int, texts: list[str]) -> list[_Piece]:
        found: list[_Piece] = []
        parent = root
        for text in texts:
            piece = self._pieces.get((parent, text))
            if piece is None:
                break
            found.append(piece)
            parent = piece.number
        for piece in reversed(found):
            self._pieces.move_to_end(piece.key)
        return found

    def _add(self, key: tuple[int, str], ids: TokenIds, tokens_end: int) -> _Piece:
        there = self._pieces.get(key)  # another thread was faster
        if there is not None:
            return there
        piece = _Piece(next(_numbers), key, ids, tokens_end)
        self._pieces[key] = piece
        self.bytes += _own_bytes(piece)
        return piece

    def grew(self, piece: _Piece, by_bytes: int) -> None:
        with self._lock:
            if piece.in_tree:
                self.bytes += by_bytes

    def _evict(self) -> None:
        while self.bytes > self._max_bytes and self._pieces:
            _, piece = self._pieces.popitem(last=False)
            piece.in_tree = False
            self.bytes -= _own_bytes(piece)
            self.bytes -= sum(_CHAIN_BYTES + 8 * len(keys) for keys, _ in piece.chains.values())


def _own_bytes(piece: _Piece) -> int:
    return _PIECE_BYTES + sys.getsizeof(piece.key[1]) + len(piece.ids)
