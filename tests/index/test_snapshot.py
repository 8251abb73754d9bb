"""A rank's blocks as bytes and back: another index answers the same, and goes on with the same stream."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.snapshot import Facts, Piece, Restoring, SnapshotRefused, facts_of, told
from tests.index.streams import Worker, hashes_of, store

WIDTH = 4


def removal(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes)}


def prompt(number: int, blocks: int) -> list[int]:
    """Prompts share their first two blocks."""
    return [1, 2, 3, 4, 5, 6, 7, 8, *(number + 10 for _ in range(WIDTH * blocks))]


def stored(tokens: list[int]) -> dict[str, Any]:
    return store(tokens, hashes_of(tokens, WIDTH), None, WIDTH)


def copied(source: Worker, target: Worker) -> None:
    facts = facts_of(source.ledgers[0])
    restoring = Restoring(target.ledgers[0], facts)
    restoring.begin()
    for piece in told(source.ledgers[0]):
        if piece is not None:
            for _ in restoring.take(piece):
                pass
    restoring.end()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["sglang", "vllm"]),
    st.lists(st.sampled_from(["store", "again", "other rank", "remove"]), max_size=40),
)
def test_the_copy_answers_and_goes_on_as_the_original(seed: int, engine: str, actions: list[str]) -> None:
    rng = random.Random(seed)
    one, two = Worker(WIDTH, engine, ranks=2), Worker(WIDTH, engine, ranks=2)
    one.feed({"type": "AllBlocksCleared"})
    one.feed(stored(prompt(0, 1)))
    two.feed(stored(prompt(0, 1)), rank=1)  # which also proves the hash there

    def act(what: str, workers: tuple[Worker, ...]) -> None:
        tokens = prompt(rng.randrange(6), rng.randrange(1, 5))
        rank = int(what == "other rank")
        event = removal(*hashes_of(tokens, WIDTH)[::-1][:2]) if what == "remove" else stored(tokens)
        for worker in workers:
            worker.feed(event, rank=rank)

    for what in actions[::2]:
        act(what, (one,))
    copied(one, two)
    for what in actions[1::2]:
        act(what, (one, two))
    assert two.ledgers[0].is_history_complete
    assert two.index.blocks(two.slots[0]) == one.index.blocks(one.slots[0])
    for number in range(6):
        assert two.depths([*prompt(number, 6), 1]) == one.depths([*prompt(number, 6), 1])


def warm() -> Worker:
    worker = Worker(WIDTH)
    worker.feed({"type": "AllBlocksCleared"})
    worker.feed(stored(prompt(1, 3)))
    return worker


def test_a_block_held_twice_survives_one_removal_in_the_copy_too() -> None:
    """case 23"""
    one, two = warm(), Worker(WIDTH)
    one.feed(stored(prompt(1, 3)))
    copied(one, two)
    last = hashes_of(prompt(1, 3), WIDTH)[-1]
    two.feed(removal(last))
    assert two.credit([*prompt(1, 3), 1]) == 5
    two.feed(removal(last))
    assert two.credit([*prompt(1, 3), 1]) == 4


def test_large_states_come_in_pieces_and_keep_their_runs() -> None:
    one, two = warm(), Worker(WIDTH)
    for number in range(300):
        one.feed(stored(prompt(100 + number, 60)))
    pieces = [piece for piece in told(one.ledgers[0]) if piece is not None]
    assert len(pieces) > 1
    assert max(len(piece.keys) for piece in pieces) < 100_000
    copied(one, two)
    assert len(two.index._tables[0]._runs) <= len(one.index._tables[0]._runs)
    assert two.credit([*prompt(150, 60), 1]) == 62


def test_what_was_there_before_is_replaced() -> None:
    one, two = warm(), Worker(WIDTH)
    two.feed(stored(prompt(7, 3)))
    copied(one, two)
    assert two.credit([*prompt(7, 3), 1]) == 2, "of which two blocks are the other's as well"


def inexact(worker: Worker) -> str:
    with pytest.raises(SnapshotRefused) as refused:
        facts_of(worker.ledgers[0])
    return str(refused.value)


def test_a_state_that_is_not_exact_is_not_told() -> None:
    partial = Worker(WIDTH)
    partial.ledgers[0].set_history(complete=False)
    partial.feed(stored(prompt(1, 3)))
    assert "partial" in inexact(partial)
    doubtful = warm()
    doubtful.ledgers[0].degraded = True
    assert "removal" in inexact(doubtful)
    unproven = Worker(WIDTH)
    unproven.feed({"type": "AllBlocksCleared"})
    assert "hash or width" in inexact(unproven)


def test_a_missing_piece_is_noticed() -> None:
    one, two = warm(), Worker(WIDTH)
    restoring = Restoring(two.ledgers[0], facts_of(one.ledgers[0]))
    restoring.begin()
    with pytest.raises(SnapshotRefused, match="missing"):
        restoring.end()


def test_a_piece_that_came_twice_counts_once() -> None:
    one, two = warm(), Worker(WIDTH)
    restoring = Restoring(two.ledgers[0], facts_of(one.ledgers[0]))
    restoring.begin()
    for piece in told(one.ledgers[0]):
        for _ in range(2):
            if piece is not None:
                list(restoring.take(piece))
    restoring.end()
    two.feed(removal(*hashes_of(prompt(1, 3), WIDTH)))
    assert two.blocks() == 0


def test_another_scheme_is_refused_before_anything_is_lost() -> None:
    one, two = warm(), Worker(8)
    two.feed({"type": "AllBlocksCleared"})
    with pytest.raises(SnapshotRefused, match="4 tokens"):
        Restoring(two.ledgers[0], facts_of(one.ledgers[0])).begin()
    assert two.ledgers[0].is_history_complete


@pytest.mark.parametrize(
    "piece", [Piece(0, [1], b"1234567"), Piece(0, [2], bytes(8)), Piece(0, [0, 1], bytes(8)), Piece(4, [], bytes(8))]
)
def test_pieces_that_are_not_well_formed_are_refused(piece: Piece) -> None:
    facts: Facts = facts_of(warm().ledgers[0])
    with pytest.raises(SnapshotRefused):
        list(Restoring(Worker(WIDTH).ledgers[0], facts).take(piece))
