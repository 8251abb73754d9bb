"""Reuse of what earlier turns already cost: their token ids and their block keys, kept at message boundaries.

A special token that the tokenizer matches before everything else is a hard boundary: text on one side of it never
changes the ids of the other. Rendered prompts are cut there, the pieces form a tree (piece after piece from the start),
and the next turn walks the tree as far as its text is the same and has only the rest tokenised and hashed. Pieces are
compared as text, never by a digest. A new piece is only kept after the cut was found again in the ids.
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
    block_bytes,
    chain_digests,
    chain_root,
    digest_keys,
    pack_ids,
    prompt_keys,
)

MAX_PIECES = 4096  # of one prompt; text behind the last cut is one piece
MIN_PIECE_CHARS = 256  # a shorter piece is not worth its place: it stays with the next one
_PIECE_BYTES = 620  # what a piece costs beside its text and ids, measured: two dict entries, four objects
_CHAIN_BYTES = 360
_numbers = count(1)

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
        shared = _shared_start(texts)  # ahead of the choice, where the search is fastest
        self._find = re.compile(re.escape(shared) + "(?:" + "|".join(re.escape(t[len(shared) :]) for t in texts) + ")")
        self._ids = {token.text: pack_ids([token.id]) for token in tokens if token.hard}
        self.root = next(_numbers)
        """The number all of this tokenizer's conversations start from."""

    def cut(self, text: str) -> tuple[list[str], list[list[TokenIds]]]:
        """(pieces, the hard tokens' ids in each, in order). Every piece but perhaps the first begins with one of them.
        Where a text is cut depends only on what is before the cut."""
        starts: list[int] = [0]
        marks: list[list[TokenIds]] = [[]]
        next_cut = 1
        for match in self._find.finditer(text):
            mark = self._ids.get(match.group())
            if mark is None:
                continue
            start = match.start()
            if start >= next_cut and len(starts) < MAX_PIECES:
                starts.append(start)
                marks.append([mark])
                next_cut = start + MIN_PIECE_CHARS
            else:
                marks[-1].append(mark)
        starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts)], marks


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
            offsets = _offsets(ids, marks)
            if offsets is None or ids != b"".join(encode(piece, False) for piece in pieces):
                return None
    return boundaries


def _offsets(ids: TokenIds, marks: Sequence[Sequence[TokenIds]]) -> list[int] | None:
    """Where each piece starts in `ids`, in bytes; None when its hard tokens are not all there in this order."""
    found: list[int] = []
    at = 0
    for piece in marks:
        if not piece:  # only the first piece of a text has none
            found.append(0)
        for number, mark in enumerate(piece):
            at = ids.find(mark, at)
            while at % 4 and at >= 0:  # the same bytes across two tokens
                at = ids.find(mark, at + 1)
            if at < 0:
                return None
            if number == 0:
                found.append(at)
            at += 4
    return found


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
        if state is None or scheme.bigram:  # a pair reaches over a piece's end
            yield None if state is None else prompt_keys(scheme, self._ids, namespace)
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
        size = block_bytes(scheme)
        start, end = len(keys), len(self._ids) // size
        last = state
        digests: list[bytes] = []
        fresh = array("q")
        while start + len(digests) < end:
            at = start + len(digests)
            made = chain_digests(scheme, last, self._ids[at * size : min(at + slice_blocks, end) * size])
            fresh.extend(digest_keys(scheme, made))
            digests += made
            last = made[-1]
            if start + len(digests) < end:
                yield []
        self._keep(key, known, state, start, fresh, digests)
        keys.extend(fresh)
        yield keys.tolist()

    def _keep(
        self, key: _ChainKey, known: int, state: bytes, start: int, fresh: array[int], digests: list[bytes]
    ) -> None:
        done = start
        for piece in self._pieces[known:]:
            blocks = piece.tokens_end // key[0].width
            if blocks > done:
                state = digests[blocks - start - 1]
            piece.chains[key] = (fresh[done - start : blocks - start], state)
            self._cache.grew(piece, _CHAIN_BYTES + 8 * (blocks - done))
            done = blocks


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
        tail = encode("".join(texts[known:]) if known else text, False)
        offsets = _offsets(tail, marks[known:])
        if offsets is None or offsets[0]:
            with self._lock:
                self.refused += 1
            return (tail if not known else encode(text, False)), None
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
