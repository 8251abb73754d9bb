"""Reuse of what earlier turns already cost: their token ids and their block keys, kept at message boundaries.

Rendered prompts are cut where `router.prompt.boundaries` says, the pieces form a tree (piece after piece from the
start), and the next turn walks the tree as far as its text is the same and has only the rest tokenised and hashed.
Pieces are compared as text, never by a digest alone. A new piece is only kept after the cut in front of it was found
again in the ids.

Nothing in the ids shows a cut between two words. What is first seen is therefore kept as one piece up to the next hard
boundary, and only cut when a second prompt shares its beginning: after the ids of the parts, made from each alone, were
found to be the very ones that stand at their places. Text that nobody shares is not tokenised twice.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from router.hashing import (
    Namespace,
    Scheme,
    TokenIds,
    block_units,
    chain_digests,
    chain_root,
    digest_bytes,
    digest_keys,
    full_blocks,
    token_count,
)
from router.prompt.boundaries import BETWEEN_WORDS, SOFT, Boundaries, Encode, numbers, offsets
from router.prompt.turns import give_way

SOFT_FAULTS = 4  # cuts between words that changed ids, after which none are made any more
PIECES_AT_ONCE = 1024  # whose block keys are kept between two yields
_PIECE_BYTES = 560  # what a piece costs beside its text and ids, measured: two dict entries, three objects
_CHAIN_BYTES = 240
_OVERLAP_CHARS = 128
_BEGUN_CHARS = 64
_MAX_BEGUN = 1024

_Key = tuple[int, int]


class SoftCut(Exception):
    """A cut between two words changed the ids: the tokenizer joins what is on its two sides."""


class _Piece:
    """One piece behind the pieces before it: `text`, and the texts behind it between words that are not cut yet.
    `key` is the number of the piece before and `text`'s digest; `tokens_end` counts from the start of the prompt.

    `softly`: it begins between two words. `overlap`: its last words, and their ids, once they were asked for. A prompt
    on its way through the tree may hold it: only `chains`, `in_tree`, `next`, `overlap` and `bytes` are ever changed.
    """

    __slots__ = (
        "bytes",
        "chains",
        "ids",
        "in_tree",
        "key",
        "next",
        "number",
        "overlap",
        "rest",
        "softly",
        "text",
        "tokens_end",
    )

    def __init__(
        self, number: int, key: _Key, softly: bool, text: str, rest: tuple[str, ...], ids: TokenIds, tokens_end: int
    ) -> None:
        self.number = number
        self.key = key
        self.softly = softly
        self.text = text
        self.rest = rest
        self.ids = ids
        self.tokens_end = tokens_end
        self.chains: dict[bytes, bytes] = {}
        """Per scheme and root: keys of the blocks that end inside this piece, and the chain's state at its end. Bytes,
        and `rest` a tuple, since there are many pieces: the search for cycles passes over these."""
        self.in_tree = False
        self.next: _Key | None = None
        """What the last prompt that went this way had behind it, perhaps dropped since."""
        self.bytes = _PIECE_BYTES + len(ids) + sys.getsizeof(text)
        for part in rest:
            self.bytes += sys.getsizeof(part)
        self.overlap: tuple[str, TokenIds] | None = None


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
        key = f"{scheme.kind} {scheme.width} {scheme.bigram} ".encode() + state  # of all that a chain depends on
        state_bytes = digest_bytes(scheme)
        keys = array("q")
        known = 0
        for piece in self._pieces:
            chain = piece.chains.get(key)
            if chain is None:
                break
            if chain:
                keys.frombytes(chain[:-state_bytes])
                state = chain[-state_bytes:]
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
                if key not in piece.chains:  # it may stand behind one that was cut in two
                    self._cache.keep_chain(piece, key, fresh[done:blocks].tobytes() + state)
                done = blocks
        keys.extend(fresh)
        yield keys.tolist()


class ConversationCache:
    """The tree of all models' conversations, at most `max_bytes` of it; the pieces longest unused go first, leaves
    before what they hang on. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[_Key, _Piece] = OrderedDict()
        self._begun: OrderedDict[tuple[int, str], _Key] = OrderedDict()
        """For the beginning of a prompt, the first piece of the last one that began so."""
        self._lock = threading.Lock()
        self.bytes = 0
        self.refused = 0
        """Prompts whose cuts were not found again in the ids: tokenised whole and not kept."""

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, boundaries: Boundaries, encode: Encode) -> tuple[TokenIds, CachedPrompt | None]:
        """`encode(text, False)`, with only the new end of the text tokenised. Raises what `encode` raises."""
        begun = (boundaries.root, text[:_BEGUN_CHARS])
        found: list[_Piece] = []
        at, softly, before = 0, False, 0
        try:
            while True:
                with self._lock:
                    at, softly, before = self._follow(begun, text, boundaries, found, at, softly, before)
                texts, marks = boundaries.cut(text, at, softly, before, one=True)
                known = self._known(boundaries.root, found, texts, encode)
                for part in texts:
                    at += len(part)
                before += len(texts)
                if known < len(texts) or at == len(text):
                    break
                softly = False
            reused = found[-1].tokens_end if found else 0
            if known == len(texts):
                with self._lock:
                    self._used(begun, found)
                ids = b"".join([piece.ids for piece in found])
                return ids, CachedPrompt(self, found, ids, reused)
            if at < len(text):
                others, their_marks = boundaries.cut(text, at, False, before)
                texts += others
                marks += their_marks
            tail = self._tail(found, texts, marks, known, encode)
        except SoftCut:
            boundaries.soft_faults += 1
            boundaries.between_words = boundaries.soft_faults < SOFT_FAULTS
            return self._refuse(text, encode)
        new_texts, new_marks = _grouped(texts, marks, known)
        starts = offsets(tail, new_marks)
        if starts is None or starts[0]:
            return self._refuse(text, encode)
        starts.append(len(tail))
        ids = b"".join([*[piece.ids for piece in found], tail])
        give_way()  # not with the lock held
        with self._lock:
            parent, tokens = found[-1].number if found else boundaries.root, reused
            for index, group in enumerate(new_texts):
                piece_ids = tail[starts[index] : starts[index + 1]]
                tokens += len(piece_ids) // 4
                kept = not found or found[-1].in_tree
                softly = marks[known][:1] == [SOFT] if not index else False
                piece = self._add(parent, softly, group, piece_ids, tokens, kept)
                found.append(piece)
                parent = piece.number
            self._used(begun, found)
            self._evict()
        return ids, CachedPrompt(self, found, ids, reused)

    def _refuse(self, text: str, encode: Encode) -> tuple[TokenIds, None]:
        with self._lock:
            self.refused += 1
        return encode(text, False), None

    def _follow(
        self,
        begun: tuple[int, str],
        text: str,
        boundaries: Boundaries,
        found: list[_Piece],
        at: int,
        softly: bool,
        before: int,
    ) -> tuple[int, bool, int]:
        """Adds the pieces with which `text`, known to be cut at `at` behind `found`, goes on as the last prompt did:
        known without looking for cuts in them. (where they end, whether between two words, how many texts they are.)

        That the text is cut behind a piece is only certain where the next one goes on as it did, and, between words,
        while such cuts are made.
        """
        longest, pieces = boundaries.longest, self._pieces
        key = found[-1].next if found else self._begun.get(begun)
        piece = pieces.get(key) if key is not None else None
        end = _end_of(piece, text, at) if piece is not None else -1
        while piece is not None and end >= 0:
            behind = pieces.get(piece.next) if piece.next is not None else None
            if behind is None or len(behind.text) < longest + 2 or (behind.softly and not boundaries.between_words):
                break
            behind_end = _end_of(behind, text, end)
            if behind_end < 0 and not text.startswith(behind.text[: longest + 2], end):
                break
            found.append(piece)
            at, softly, before = end, behind.softly, before + 1 + len(piece.rest)
            piece, end = behind, behind_end
        return at, softly, before

    def _known(self, root: int, found: list[_Piece], texts: list[str], encode: Encode) -> int:
        """Adds the pieces that come next in this prompt to `found`; how many of its texts they are. Cuts one of which
        only the beginning is shared; raises SoftCut when that cannot be."""
        followed = len(found)
        while True:
            with self._lock:
                known, shared = self._walk(root, found, texts)
                if not shared:
                    return known
            partly = found[-1]
            del found[followed:]
            try:
                ends = _cut_ends(partly, shared, encode)
            except SoftCut:
                with self._lock:
                    self._drop(partly)
                raise
            with self._lock:
                self._split(partly, ends)

    def _tail(
        self, found: list[_Piece], texts: list[str], marks: list[list[TokenIds]], known: int, encode: Encode
    ) -> TokenIds:
        """Ids of what follows the known pieces. Between two words the last of the known ones are made again with it, to
        see that nothing joins over the cut. Raises SoftCut."""
        new = "".join(texts[known:])
        if not found or marks[known][:1] != [SOFT]:
            return encode(new, False)
        overlap, same = self._overlap(found[-1], encode)
        both = encode(overlap + new, False)
        if not both.startswith(same):
            raise SoftCut
        return both[len(same) :]

    def _overlap(self, piece: _Piece, encode: Encode) -> tuple[str, TokenIds]:
        """The last words of `piece`, and their ids. Raises SoftCut when these are not its last ids."""
        made = piece.overlap
        if made is None:
            last = piece.rest[-1] if piece.rest else piece.text
            word = BETWEEN_WORDS.search(last, max(0, len(last) - _OVERLAP_CHARS))
            text = last[word.start() if word is not None else 0 :]
            made = text, encode(text, False)
            if not piece.ids.endswith(made[1]):
                raise SoftCut
            with self._lock:
                if piece.overlap is None:
                    piece.overlap = made
                    grown = sys.getsizeof(made) + sys.getsizeof(made[0]) + sys.getsizeof(made[1])
                    piece.bytes += grown
                    if piece.in_tree:
                        self.bytes += grown
        return made

    def _walk(self, root: int, found: list[_Piece], texts: list[str]) -> tuple[int, int]:
        """(how many texts the pieces are, of the last piece how many when it is not all of them: 0 when it is)."""
        parent, at = found[-1].number if found else root, 0
        while at < len(texts):
            piece = self._pieces.get((parent, _digest(texts[at])))
            if piece is None or piece.text != texts[at]:
                break
            found.append(piece)
            at += 1
            rest = piece.rest
            if rest:
                if tuple(texts[at : at + len(rest)]) != rest:
                    return at - 1, _shared(piece, texts, at)
                at += len(rest)
            parent = piece.number
        return at, 0

    def _add(self, parent: int, softly: bool, texts: list[str], ids: TokenIds, tokens_end: int, kept: bool) -> _Piece:
        """`kept`: the piece it hangs on is in the tree."""
        text, rest = texts[0], tuple(texts[1:])
        key = (parent, _digest(text))
        there = self._pieces.get(key)
        if there is not None and there.text == text and there.rest == rest:  # another thread was faster
            return there
        piece = _Piece(next(numbers), key, softly, text, rest, ids, tokens_end)
        if kept and there is None:  # else two texts of one digest: the first one stays
            self._insert(piece)
        return piece

    def _insert(self, piece: _Piece) -> None:
        self._pieces[piece.key] = piece
        piece.in_tree = True
        self.bytes += piece.bytes

    def _used(self, begun: tuple[int, str], found: list[_Piece]) -> None:
        """Leaves become the oldest of their conversation, so that nothing outlives what it hangs on."""
        behind: _Key | None = None
        for piece in reversed(found):
            if piece.in_tree:
                self._pieces.move_to_end(piece.key)
            if behind is not None:
                piece.next = behind
            behind = piece.key
        assert behind is not None
        self._begun[begun] = behind
        self._begun.move_to_end(begun)
        if len(self._begun) > _MAX_BEGUN:
            self._begun.popitem(last=False)

    def _drop(self, piece: _Piece) -> None:
        if piece.in_tree:
            del self._pieces[piece.key]
            self._left(piece)

    def _left(self, piece: _Piece) -> None:
        piece.in_tree = False
        self.bytes -= piece.bytes
        for chain in piece.chains.values():
            self.bytes -= _CHAIN_BYTES + len(chain)

    def _split(self, piece: _Piece, ends: list[int]) -> None:
        """Put parts whose ids end at `ends`, in bytes, in the place of `piece`, and what is left of it behind them,
        under its number: so what hangs on it stays. Their block keys have to be made again."""
        if not piece.in_tree:  # another thread was faster
            return
        self._drop(piece)
        texts = [piece.text, *piece.rest]
        parent, start = piece.key[0], 0
        first_token = piece.tokens_end - len(piece.ids) // 4
        parts: list[_Piece] = []
        for text, end in zip(texts, ends, strict=False):
            key = (parent, _digest(text))
            softly = True if parts else piece.softly
            part = _Piece(next(numbers), key, softly, text, (), piece.ids[start:end], first_token + end // 4)
            parts.append(part)
            parent, start = part.number, end
        left = texts[len(ends) :]
        key = (parent, _digest(left[0]))
        self._insert(_Piece(piece.number, key, True, left[0], tuple(left[1:]), piece.ids[start:], piece.tokens_end))
        for part in reversed(parts):
            self._insert(part)

    def keep_chain(self, piece: _Piece, key: bytes, chain: bytes) -> None:
        """Kept and counted at once: another thread may drop the piece at any time."""
        with self._lock:
            if key not in piece.chains:
                piece.chains[key] = chain
                if piece.in_tree:
                    self.bytes += _CHAIN_BYTES + len(chain)
                    self._evict()  # one prompt may come again and again under ever new salts

    def _evict(self) -> None:
        while self.bytes > self._max_bytes and self._pieces:
            _, piece = self._pieces.popitem(last=False)
            self._left(piece)


def _digest(text: str) -> int:
    """Finds a piece, which is then compared as text."""
    return xxh3_64_intdigest(text.encode()) if text.isascii() else hash(text)


def _end_of(piece: _Piece, text: str, at: int) -> int:
    """Where `piece` ends in `text`, if it stands at `at`; -1 when it does not."""
    if not text.startswith(piece.text, at):
        return -1
    at += len(piece.text)
    for part in piece.rest:
        if not text.startswith(part, at):
            return -1
        at += len(part)
    return at


def _shared(piece: _Piece, texts: list[str], at: int) -> int:
    """How many texts of `piece`, the first of which is known to be shared, stand in `texts` as well, up to `at`."""
    shared = 1
    for mine, theirs in zip(piece.rest, texts[at:], strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared


def _cut_ends(piece: _Piece, parts: int, encode: Encode) -> list[int]:
    """Where the ids of the first `parts` texts of `piece` end, in bytes. Raises SoftCut when the ids of one of them
    alone are not those at its place."""
    ends: list[int] = []
    at = 0
    for text in [piece.text, *piece.rest[: parts - 1]]:
        own = encode(text, False)
        if not piece.ids.startswith(own, at):
            raise SoftCut
        at += len(own)
        ends.append(at)
    return ends


def _grouped(texts: list[str], marks: list[list[TokenIds]], known: int) -> tuple[list[list[str]], list[list[TokenIds]]]:
    """(texts, marks) behind the known ones, those between words together with what they stand behind."""
    new_texts: list[list[str]] = []
    new_marks: list[list[TokenIds]] = []
    for index in range(known, len(texts)):
        if new_texts and marks[index][0] == SOFT:
            new_texts[-1].append(texts[index])
            new_marks[-1] += marks[index][1:]
        else:
            new_texts.append([texts[index]])
            new_marks.append(marks[index])
    return new_texts, new_marks
