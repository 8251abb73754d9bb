"""The width and the hash kind a worker's streams show, and that nothing is lost or wrongly credited by deciding."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from router.hashing import Namespace, Scheme, bigrams, pack_ids, sglang_chain
from router.index.names import EMPTY_TUPLE_HASH
from tests.index.streams import (
    CHAIN,
    CLEARED,
    HASHES,
    PROMPT,
    Worker,
    hashes_of,
    other_store,
    removed,
    store,
)


def chains(number: int, width: int) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(number)
    made = []
    for _ in range(number):
        tokens = [rng.randrange(1000) for _ in range(2 * width)]
        made.append((tokens, hashes_of(tokens, width)))
    return made


@pytest.mark.parametrize("bad", [0, -4, 17, 128, 2**40])
def test_blocks_of_an_odd_width_are_skipped_and_counted(bad: int) -> None:
    """Case 11: never divided by, never sliced by guess."""
    worker = Worker()
    worker.feed(store(CHAIN, HASHES), store(CHAIN[:4], [77], width=bad), store(CHAIN[:4] * 4, [78]), store([1], [79]))
    assert worker.counters.odd_widths == 3
    assert worker.blocks() == 6


def test_a_consistent_other_width_is_adopted_and_nothing_is_lost() -> None:
    """Case 46, settled rule 7: advertised 4, the stream says 16 from the start: held, then applied in order."""
    worker = Worker(width=4)
    made = chains(9, 16)
    for tokens, hashes in made[:7]:
        worker.feed(store(tokens, hashes, width=16))
    worker.feed(removed(made[0][1][1:]))
    assert worker.blocks() == 0
    assert worker.scheme.scheme.width == 4
    worker.feed(store(*made[7], width=16))
    assert worker.scheme.scheme == Scheme("sglang-sha256", 16)
    assert [worker.credit([*tokens, 1]) for tokens, _ in made] == [1, 2, 2, 2, 2, 2, 2, 2, 0]
    (finding,) = worker.scheme.findings
    assert (finding.kind, finding.advertised, finding.observed) == ("block_size", 4, 16)
    assert "kv_events.block_size: 16" in finding.advice
    worker.feed(store(*made[8], width=16), store(CHAIN, HASHES, width=4))
    assert worker.credit([*made[8][0], 1]) == 2
    assert worker.counters.odd_widths == 1


def test_the_advertised_width_wins_when_it_appears() -> None:
    """Held stores of another width are dropped and counted, the rest is applied in order."""
    worker = Worker(width=4)
    for tokens, hashes in chains(7, 16):
        worker.feed(store(tokens, hashes, width=16))
    worker.feed(store(CHAIN, HASHES), removed(HASHES[5:]))
    for tokens, hashes in chains(9, 16):
        worker.feed(store(tokens, hashes, width=16))
    assert worker.scheme.scheme.width == 4
    assert worker.counters.odd_widths == 16
    assert worker.credit(PROMPT) == 5
    assert worker.scheme.findings == ()


def test_ranks_decide_the_width_together() -> None:
    worker = Worker(width=4, ranks=2)
    made = chains(8, 16)
    for number, (tokens, hashes) in enumerate(made):
        worker.feed(store(tokens, hashes, width=16), rank=number % 2)
    assert [worker.credit([*tokens, 1], rank=n % 2) for n, (tokens, _) in enumerate(made)] == [2] * 8


def test_a_clear_voids_what_is_held_and_impossible_widths_have_no_vote() -> None:
    worker = Worker(width=4)
    made = chains(8, 16)
    worker.feed(store(*made[0], width=16), CLEARED)
    for _ in range(20):
        worker.feed(store(made[0][0], made[0][1], width=0), store(made[0][0], made[0][1], width=17))
    for tokens, hashes in made[1:]:
        worker.feed(store(tokens, hashes, width=16))
    assert worker.scheme.scheme.width == 16
    assert worker.credit([*made[0][0], 1]) == 0
    assert worker.credit([*made[1][0], 1]) == 2


def test_mixed_odd_widths_leave_the_advertised_one() -> None:
    worker = Worker(width=4)
    for n in range(64):
        width = 5 + n % 16
        worker.feed(store(range(width), [n], width=width))
    worker.feed(store(CHAIN, HASHES))
    assert worker.scheme.scheme.width == 4
    assert worker.credit(PROMPT) == 6


def test_a_root_that_equals_proves_the_engines_hash() -> None:
    worker = Worker()
    assert not worker.scheme.proven
    worker.feed(store(CHAIN, HASHES))
    assert worker.scheme.proven
    # Later roots that differ belong to other namespaces: kept, removable, without credit.
    foreign = other_store(CHAIN[:8])
    worker.feed(foreign)
    assert (worker.kind, worker.credit(PROMPT), worker.blocks(), worker.counters.foreign) == ("sglang-sha256", 6, 8, 1)
    worker.feed(removed(foreign["block_hashes"]))
    assert worker.blocks() == 6


def test_unknown_hashes_are_replaced_by_our_own_and_nothing_before_is_lost() -> None:
    """Design section 4: what a late joiner saw before the first root is folded again under our own chain."""
    worker = Worker(ranks=2)
    known, late = other_store(CHAIN), other_store([5] * 8, parent=4711)
    worker.feed(late, rank=1)
    worker.feed(known)
    assert worker.kind == "xxh3"
    assert worker.credit(PROMPT) == 6
    (finding,) = worker.scheme.findings
    assert (finding.kind, finding.advertised, finding.observed) == ("hash", "sglang-sha256", "xxh3")
    assert worker.blocks(rank=1) == 2  # kept without credit: its parent is unknown
    assert worker.credit([5] * 9, rank=1) == 0
    worker.feed(removed(late["block_hashes"]), rank=1)
    assert worker.blocks(rank=1) == 0
    child = other_store([1, 2, 3, 4], parent=known["block_hashes"][-1])
    worker.feed(child)
    assert worker.credit([*CHAIN, 1, 2, 3, 4, 9]) == 7
    worker.feed(removed(known["block_hashes"][3:4]))
    assert worker.credit(PROMPT) == 3


def test_a_foreign_root_first_is_put_right_by_the_first_own_one() -> None:
    """A worker whose first prompts all carry an extra_key in the dynamo format: folded back, exactly."""
    worker = Worker()
    foreign = other_store(CHAIN)
    worker.feed(foreign)
    assert worker.kind == "xxh3"
    worker.feed(store([3] * 8, hashes_of([3] * 8)), removed(foreign["block_hashes"][5:]))
    assert (worker.kind, worker.scheme.proven, worker.scheme.findings) == ("sglang-sha256", True, ())
    assert worker.credit(PROMPT) == 0
    assert worker.credit([3] * 9) == 2
    assert worker.blocks() == 7
    assert worker.counters.switches == 2


def test_a_switch_after_too_much_was_kept_starts_empty_and_says_so() -> None:
    worker = Worker(width=1)
    for n in range(3):
        worker.feed(store([n] * 30_000, range(n * 30_000, (n + 1) * 30_000), parent=-1, width=1))
    worker.feed(other_store(range(4), width=1))
    assert worker.kind == "xxh3"
    assert worker.ledgers[0].degraded
    assert worker.blocks() == 4
    worker.feed(removed(range(90_000)))
    assert worker.credit([0, 1, 2, 3, 4]) == 4


def test_salted_stores_match_their_salt_only() -> None:
    """Case 41."""
    worker = Worker()
    worker.feed(store(CHAIN, hashes_of(CHAIN, salt="A"), cache_salt="A"))
    assert worker.scheme.proven  # a salted root proves the chain too
    assert worker.credit(PROMPT, Namespace("A")) == 6
    assert worker.credit(PROMPT) == worker.credit(PROMPT, Namespace("B")) == 0


@pytest.mark.parametrize("hashes", [HASHES, [h ^ 1 for h in HASHES]], ids=["the base model's hashes", "its own"])
def test_adapter_blocks_are_never_credited_to_the_base(hashes: list[int]) -> None:
    """Case 40: and an ambiguous removal takes the base's credit rather than leave too much."""
    worker = Worker()
    worker.feed(store(CHAIN[:4], HASHES[:1]), store(CHAIN, hashes, lora_name="ad"))
    assert worker.credit(PROMPT) == 1
    assert worker.credit(PROMPT, Namespace(lora_name="ad")) == 0
    assert worker.blocks() == 7
    worker.feed(removed(hashes))
    assert worker.credit(PROMPT) == (0 if hashes is HASHES else 1)
    worker.feed(removed(HASHES))
    assert worker.blocks() == 0


def test_a_salted_root_that_differs_decides_nothing() -> None:
    """The dynamo format salts by another rule; its unsalted roots are still SGLang's."""
    worker = Worker()
    worker.feed(other_store(CHAIN, cache_salt="A"))
    assert (worker.kind, worker.scheme.proven, worker.counters.switches) == ("sglang-sha256", False, 0)
    worker.feed(store(CHAIN, HASHES))
    assert (worker.credit(PROMPT), worker.credit(PROMPT, Namespace("A")), worker.blocks()) == (6, 0, 12)


def test_a_bigram_stream_is_recognised_by_its_pairs() -> None:
    """Case 5: also where the descriptor did not say so."""
    worker = Worker()
    tokens = list(range(13))
    pairs = [[a, b] for a, b in pairwise(tokens)]
    worker.feed(store(pairs, sglang_chain(bigrams(pack_ids(tokens)), 32)))
    assert worker.scheme.scheme == Scheme("sglang-sha256", 4, bigram=True)
    assert worker.credit(tokens) == 2  # of 13 tokens, 11 pairs can be reused
    assert worker.credit([*tokens, 1]) == 3


def test_the_parent_of_an_empty_tuple_is_a_root() -> None:
    """SGLang 0.4.10."""
    assert hash(()) == EMPTY_TUPLE_HASH
    worker = Worker()
    worker.feed(store(CHAIN[:4], [hash(tuple(CHAIN[:4]))], parent=EMPTY_TUPLE_HASH))
    assert (worker.kind, worker.scheme.content_hashes, worker.credit(PROMPT)) == ("xxh3", True, 1)


def test_one_content_hash_under_two_parents_is_never_followed() -> None:
    """Case 29 (sglang#13488): hashes of page contents alone; removing one takes all it may mean."""
    worker = Worker()
    a, b, page = [1] * 4, [2] * 4, [3] * 4
    ha, hb, hp = (hash(tuple(tokens)) for tokens in (a, b, page))
    worker.feed(store(a, [ha]), store(page, [hp], parent=ha), store(b, [hb]), store(page, [hp], parent=hb))
    assert worker.credit([*a, *page, 9]) == worker.credit([*b, *page, 9]) == 2
    worker.feed(store([4] * 4, [hash((4,) * 4)], parent=hp))
    assert worker.credit([*a, *page, *[4] * 4, 9]) == 2
    assert worker.counters.orphans == 1
    worker.feed(removed([hp]))
    assert worker.credit([*a, *page, 9]) == worker.credit([*b, *page, 9]) == 1


def roots(worker: Worker, number: int, *, foreign: bool) -> None:
    rng = random.Random(repr((number, foreign)))
    for _ in range(number):
        tokens = [rng.randrange(1000) for _ in range(4)]
        worker.feed(other_store(tokens) if foreign else store(tokens, hashes_of(tokens)))


def test_roots_that_keep_differing_after_the_proof_are_a_finding_until_they_agree_again() -> None:
    """Design section 4: in the dynamo format extra_key is in the hash, so that its prompts silently earn nothing."""
    worker = Worker()
    worker.feed(store(CHAIN, HASHES))
    roots(worker, 30, foreign=True)
    (finding,) = worker.scheme.findings
    assert (finding.kind, finding.advertised) == ("hash", "sglang-sha256")
    assert "extra_key" in finding.advice
    assert (worker.kind, worker.credit(PROMPT)) == ("sglang-sha256", 6), "the proven namespace keeps its credit"
    roots(worker, 64 * 14, foreign=False)
    assert worker.scheme.findings == ()


def test_a_few_roots_of_other_namespaces_are_no_finding() -> None:
    worker = Worker()
    worker.feed(store(CHAIN, HASHES))
    for _ in range(100):
        roots(worker, 1, foreign=True)
        roots(worker, 3, foreign=False)
    assert worker.scheme.findings == ()


def test_checking_goes_on_by_sample() -> None:
    """One in 64 after the first few, and everything as long as the samples differ."""
    worker = Worker()
    roots(worker, 1, foreign=False)
    roots(worker, 6 * 64, foreign=False)
    assert worker.counters.foreign == 0
    roots(worker, 64, foreign=True)
    assert worker.counters.foreign == 1
    roots(worker, 64 + 20, foreign=True)
    assert 12 <= worker.counters.foreign <= 16, "and no further once that is said"
    assert [finding.kind for finding in worker.scheme.findings] == ["hash"]


@pytest.mark.parametrize("advertised", [True, False])
def test_pairs_against_the_descriptor_are_a_finding(advertised: bool) -> None:
    """Case 5: the stream decides, and what was advertised is named."""
    worker = Worker(bigram=advertised)
    tokens = list(range(13))
    pairs = store([[a, b] for a, b in pairwise(tokens)], sglang_chain(bigrams(pack_ids(tokens)), 32))
    plain = store(CHAIN, HASHES)
    worker.feed(plain if advertised else pairs)
    (finding,) = worker.scheme.findings
    assert (finding.kind, worker.scheme.scheme.bigram) == ("hash", not advertised)
    assert "speculative_algorithm" in finding.advice
    agreeing = Worker(bigram=advertised)
    agreeing.feed(pairs if advertised else plain)
    assert agreeing.scheme.findings == ()
