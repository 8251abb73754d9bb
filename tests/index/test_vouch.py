"""Cold join: what was stored before the router listened is believed once something proves it, and never sooner."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.contract.events import Tier
from router.hashing import Namespace, Scheme, pack_ids, prompt_keys
from router.index import vouch
from router.index.prefix import PrefixIndex
from router.index.scheme import WorkerScheme
from router.index.vouch import Chains, Voucher
from tests.index.fleet import WIDTH, ModelFleet, deliver
from tests.index.streams import CHAIN, CLEARED, HASHES, Worker, hashes_of, other_store, removed, store

TAIL = [7, 7, 7, 7]
LONGER = [*CHAIN, *TAIL, 1]
TAIL_HASHES = hashes_of([*CHAIN, *TAIL])[6:]


def late(ranks: int = 1, **settings: object) -> Worker:
    """A worker whose ranks' history begins in the middle."""
    worker = Worker(ranks=ranks, **settings)  # type: ignore[arg-type]
    for ledger in worker.ledgers:
        ledger.set_history(complete=False)
    return worker


def route(worker: Worker, tokens: Sequence[int], rank: int = 0) -> None:
    """A prompt is sent: its chain is known from now on."""
    keys = hashes_of(tokens)[: (len(tokens) - 1) // 4]
    worker.chains.prompt(keys)


def test_a_store_below_an_unheard_parent_vouches_for_the_chain_of_a_routed_prompt() -> None:
    """Case 25, design section 5."""
    worker = late()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert worker.credit(LONGER) == 7
    assert worker.depths(LONGER) == (7, 7, 7, 7)
    assert worker.counters.vouched_blocks == 6
    assert worker.counters.orphans == 1


def test_the_chain_may_become_known_after_the_store() -> None:
    worker = late()
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert worker.credit(LONGER) == 0
    route(worker, CHAIN)  # a shorter prompt: its chain stops short of the parent
    assert worker.credit(LONGER) == 0
    route(worker, LONGER)
    assert worker.credit(LONGER) == 7


def test_chains_are_known_from_stores_of_any_rank() -> None:
    """Also in pieces, from before the history broke off, and when the last missing piece comes last."""
    worker = late(ranks=3)
    worker.feed(store(CHAIN[:8], HASHES[:2]), rank=1)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]), rank=0)
    assert worker.credit(LONGER, rank=0) == 0
    worker.feed(store(CHAIN[8:], HASHES[2:], parent=HASHES[1]), rank=2)
    assert worker.credit(LONGER, rank=0) == 7
    assert worker.credit(LONGER, rank=2) == 6, "its own parents were vouched for by the same links"
    assert worker.credit(LONGER, rank=1) == 2


def test_after_an_unfilled_gap_the_next_store_brings_back_what_is_above_it() -> None:
    worker = Worker()
    worker.feed(store(CHAIN, HASHES))
    worker.ledgers[0].reset()
    worker.ledgers[0].set_history(complete=False)
    assert worker.credit(LONGER) == 0
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert worker.credit(LONGER) == 7


def test_a_complete_history_needs_no_vouching_and_gets_none() -> None:
    worker = Worker()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert worker.credit(LONGER) == 0
    joined = late()
    joined.feed(CLEARED)
    joined.ledgers[0].set_history(complete=False)  # the stream's word; the clear says more
    route(joined, LONGER)
    joined.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert joined.credit(LONGER) == 0


@pytest.mark.parametrize("medium", ["GPU", "CPU_PINNED", None])
def test_an_announced_removal_undoes_it_whatever_tier_it_names(medium: str | None) -> None:
    worker = late()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    worker.feed(removed([*TAIL_HASHES, HASHES[5]], medium=medium))
    assert worker.credit(LONGER) == 5
    assert worker.blocks() == (5 if medium != "CPU_PINNED" else 6), "the tail itself went from the tier it named only"


def test_a_removed_block_is_vouched_for_only_after_it_was_stored_again() -> None:
    """An engine that evicts from the middle is believed, not the rule."""
    worker = late()
    route(worker, LONGER)
    worker.feed(removed(HASHES[2:3]), store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert worker.credit(LONGER) == 0
    worker.feed(store(CHAIN[8:12], HASHES[2:3], parent=HASHES[1]))
    assert worker.credit(LONGER) == 3
    worker.feed(store([8] * 4, hashes_of([*CHAIN, *TAIL, 8, 8, 8, 8])[7:], parent=TAIL_HASHES[0]))
    assert worker.credit(LONGER) == 3
    worker.feed(store([9] * 4, hashes_of([*CHAIN, 9, 9, 9, 9])[6:], parent=HASHES[5]))
    assert worker.credit(LONGER) == 7


def test_a_real_store_takes_the_place_of_a_vouched_copy() -> None:
    worker = late()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]), store(CHAIN, HASHES))
    assert worker.blocks() == 7
    worker.feed(removed(HASHES))
    assert worker.blocks() == 1


def test_a_host_copy_vouches_in_the_slower_tier() -> None:
    worker = late()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5], medium="CPU_PINNED"))
    assert worker.depths(LONGER) == (0, 7, 7, 7)


def test_clear_reset_and_close_end_it() -> None:
    for end in ("clear", "reset", "close"):
        worker = late()
        route(worker, LONGER)
        worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
        if end == "clear":
            worker.feed(CLEARED)
        else:
            getattr(worker.ledgers[0], end)()
        assert worker.blocks() == 0
        assert not worker.chains.schemes() or end == "reset"


def test_reported_tokens_vouch_the_same_way() -> None:
    """Engines that stored nothing new: the whole prompt was there."""
    worker = late()
    worker.feed(store([9] * 4, hashes_of([9] * 4)))  # settles width and hash kind
    routed = worker.ledgers[0].routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert routed is not None
    worker.ledgers[0].served(routed, 20)
    assert worker.credit(LONGER) == 5
    worker.ledgers[0].served(routed, None)
    assert worker.credit(LONGER) == 5
    worker.feed(removed(HASHES[4:5]))
    assert worker.credit(LONGER) == 4


def test_a_report_is_worth_only_what_was_not_taken_back_meanwhile() -> None:
    """Usage comes when the answer is complete, and blocks go as soon as the request is over."""
    worker = late()
    ledger = worker.ledgers[0]
    worker.feed(store([9] * 4, hashes_of([9] * 4)))
    routed = ledger.routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert routed is not None
    worker.feed(removed([HASHES[5], HASHES[4]]))
    ledger.served(routed, 28)
    assert worker.credit(LONGER) == 4
    again = ledger.routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert again is not None
    worker.feed(CLEARED)
    ledger.set_history(complete=False)
    ledger.served(again, 28)
    assert worker.credit(LONGER) == 0
    ledger.reset()
    before_reset = ledger.routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert before_reset is not None
    ledger.reset()
    ledger.served(before_reset, 28)
    assert worker.credit(LONGER) == 0
    third = ledger.routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert third is not None
    for start in range(0, 2 * vouch.MAX_GONE, 1000):
        worker.feed(removed(range(start, start + 1000)))
    ledger.served(third, 28)
    assert worker.credit(LONGER) == 0, "more was removed since than is remembered"


def test_a_key_computed_from_a_prompt_proves_the_hash_kind() -> None:
    """A late joiner may not see a root for hours."""
    worker = late()
    route(worker, LONGER)
    routed = worker.ledgers[0].routed(pack_ids(LONGER), [*HASHES, *TAIL_HASHES], None)
    assert routed is not None
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5]))
    assert not worker.scheme.proven
    worker.ledgers[0].served(routed, None)
    assert worker.scheme.proven
    assert worker.credit(LONGER) == 7


def test_salted_prompts_vouch_in_their_own_namespace() -> None:
    """Case 41."""
    worker = late()
    salted = hashes_of([*CHAIN, *TAIL], salt="A")
    worker.chains.prompt(salted)
    worker.feed(store(TAIL, salted[6:], parent=salted[5], cache_salt="A"))
    assert worker.credit(LONGER, Namespace("A")) == 7
    assert worker.credit(LONGER) == 0


def test_adapters_are_never_vouched_for() -> None:
    """Case 40."""
    worker = late()
    route(worker, LONGER)
    worker.feed(store(TAIL, TAIL_HASHES, parent=HASHES[5], lora_name="ad"))
    assert worker.credit(LONGER) == worker.credit(LONGER, Namespace(lora_name="ad")) == 0


def test_circles_and_self_parents_end() -> None:
    """Case 29."""
    worker = late(ranks=2)
    worker.feed(store([1] * 4, [6], parent=7), store([2] * 4, [7], parent=6), store([1] * 4, [5], parent=5), rank=1)
    worker.feed(store([1] * 4, [8], parent=7), store([1] * 4, [9], parent=5))
    assert worker.credit([1] * 9) == 0
    assert worker.blocks() == 2


# ---- bounded memory


def voucher(index: PrefixIndex, chains: Chains) -> Voucher:
    made = Voucher(index, index.open_slot(), chains, lambda: Scheme("sglang-sha256", 4))
    made.set_partial(True)
    return made


def test_links_parents_and_removals_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 24: a flood of removals of unknown hashes; and orphans without end."""
    for name, limit in {"MAX_LINKS": 100, "MAX_TOLD_BLOCKS": 50, "MAX_WAITING": 30, "MAX_GONE": 20}.items():
        monkeypatch.setattr(vouch, name, limit)
    index = PrefixIndex()
    chains = Chains(index.discard)
    one = voucher(index, chains)
    for n in range(0, 10_000, 10):
        chains.prompt(range(n, n + 10))
        chains.stored(n - 1, range(-n - 10, -n))
        one.removed(range(50_000 + n, 50_010 + n), Tier.GPU)
        one.orphan(100_000 + n, Tier.GPU)
        one.orphan(-n - 1, Tier.GPU)
    links = [len(part._young) + len(part._old) for part in (chains._prompts, chains._events, one._gone)]
    assert links <= [220, 220, 60], links
    assert chains._told_blocks <= 50
    assert len(one._origins) <= 30
    assert chains._waiting_count == sum(map(len, chains._waiting.values())) <= 30
    assert len(one) <= 10_000


PARENTS = (None, 0, 1, 2, 3, 2, 5, 6, None, 8, 9, 8)
"""A forest: each key is a block that follows its parent, so that a key names its whole prefix."""


def chain_of(end: int) -> list[int]:
    above = PARENTS[end]
    return [*chain_of(above), end] if above is not None else [end]


@given(limit=st.integers(1, 30), ends=st.lists(st.integers(0, len(PARENTS) - 1), max_size=30))
def test_of_a_prompt_whose_beginning_is_known_only_the_rest_is_learnt_and_nothing_is_missed(
    limit: int, ends: list[int]
) -> None:
    quick, plain = vouch._Recent(limit, lambda old: None), vouch._Recent(limit, lambda old: None)
    for end in ends:
        keys = chain_of(end)
        known = [key for key in keys if key in quick._young]
        assert list(quick.learn_chain(keys)) == keys[len(known) :]
        plain.update(zip(keys, (None, *keys), strict=False))
        assert (quick._young, quick._old) == (plain._young, plain._old)


def test_a_scheme_that_becomes_another_is_learnt_for_from_then_on() -> None:
    index = PrefixIndex()
    chains = Chains(index.discard)
    worker = WorkerScheme(4, "sglang")
    made = Voucher(index, index.open_slot(), chains, lambda: worker.scheme)
    assert chains.schemes() == set()
    made.set_partial(True)
    assert chains.schemes() == {Scheme("sglang-sha256", 4)}
    worker.saw_root(False, True, False, False)
    assert chains.schemes() == {Scheme("xxh3", 4)}
    made.set_partial(False)
    assert chains.schemes() == set()


def test_what_waits_in_vain_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouch, "MAX_WAITING", 10)
    index = PrefixIndex()
    chains = Chains(index.discard)
    one = voucher(index, chains)
    for n in range(100):
        one.orphan(n, Tier.GPU)
        one.removed((n,), Tier.GPU)
    one.orphan(200, Tier.GPU)
    chains.prompt([198, 199, 200])
    assert len(one) == 3


def test_a_full_index_ends_the_vouching_until_the_next_clear() -> None:
    index = PrefixIndex(max_blocks_per_slot=2)
    chains = Chains(index.discard)
    one = voucher(index, chains)
    chains.prompt([1, 2, 3, 4])
    one.orphan(4, Tier.GPU)
    assert len(one) == 2
    one.removed([2], Tier.GPU)
    index.remove(one._slot, Tier.GPU, [2])
    one.orphan(4, Tier.GPU)
    assert len(one) == 1
    index.clear(one._slot)
    one.clear()
    one.orphan(2, Tier.GPU)
    assert len(one) == 2


# ---- never too much, and all of it within one request per conversation


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(10, 60), st.integers(0, 40))
@example(12540, 2, 10, 5)
@settings(max_examples=150, deadline=None)
def test_credit_is_never_above_the_truth_and_equals_it_after_one_request(
    seed: int, ranks: int, capacity: int, joins_at: int
) -> None:
    """Modelled radix caches, leaf-first eviction, a router that joins at any time; reports come late or never."""
    rng = random.Random(seed)
    fleet = ModelFleet(rng)
    fleet.populate(ranks, capacity, talks=6)
    under_way = []
    for step in range(joins_at + 40):
        if step == joins_at:
            for rank in fleet.ranks:
                rank.publish()
                rank.join()
        number, rank = rng.randrange(6), rng.choice(fleet.ranks)
        report = fleet.turn(number, rank)
        if step < joins_at:
            rank.publish()
            continue
        if rng.random() < 0.5:
            deliver(report)
            prompt = fleet.prompt(number)
            credit = rank.credit(prompt)
            # A last token is always computed, so a report never tells of a block that ends with the prompt.
            untold = report.prompt_tokens % WIDTH == 0 and credit == report.prompt_tokens // WIDTH - 1
            assert credit == rank.truth(prompt) or untold
        else:
            under_way.append(report)
        if under_way and rng.random() < 0.3:
            deliver(under_way.pop(rng.randrange(len(under_way))))
        for each in fleet.ranks:
            for talk in range(6):
                prompt = fleet.prompt(talk)
                assert each.credit(prompt) <= each.truth(prompt)


@given(st.integers(0, 2**32), st.integers(10, 60), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_our_own_chain_is_never_credited_too_much_either(seed: int, capacity: int, joins_at: int) -> None:
    rng = random.Random(seed)
    fleet = ModelFleet(rng, "vllm")
    fleet.populate(2, capacity, talks=5)
    under_way = []
    for step in range(joins_at + 40):
        if step == joins_at:
            for rank in fleet.ranks:
                rank.publish()
                rank.join()
        number, rank = rng.randrange(5), rng.choice(fleet.ranks)
        under_way.append(fleet.turn(number, rank, may_report=rng.random() < 0.8))
        if rng.random() < 0.8:
            deliver(under_way.pop(rng.randrange(len(under_way))))
        for each in fleet.ranks if step >= joins_at else ():
            for talk in range(5):
                prompt = fleet.prompt(talk)
                assert each.credit(prompt) <= each.truth(prompt)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_after_one_request_a_conversation_is_known_again(engine: str) -> None:
    """Roomy caches, one sequential request per conversation, on the rank it always went to."""
    fleet = ModelFleet(random.Random(4), engine)
    fleet.question_tokens = (4, 9)  # two blocks: a store below an unheard parent begins inside the prompt
    fleet.populate(2, 2000, talks=20)
    for _ in range(5):
        for number in range(20):
            fleet.turn(number, fleet.ranks[number % 2])
    for rank in fleet.ranks:
        rank.publish()
        rank.join()
    for round_number in range(3):
        exact = wanted = believed = 0
        for number in range(20):
            rank, prompt = fleet.ranks[number % 2], fleet.prompt(number)
            exact += rank.credit(prompt) == rank.truth(prompt)
            wanted += rank.truth(prompt)
            believed += rank.credit(prompt)
            deliver(fleet.turn(number, rank))
        if round_number == 0:
            assert believed < wanted / 2
        elif engine == "sglang":
            assert exact == 20
        else:
            assert believed >= 0.95 * wanted


def test_one_store_that_two_prompts_could_have_made_is_placed_in_neither() -> None:
    """Our own chain: the same question after different system prompts."""
    worker = late(engine="vllm")
    ledger = worker.ledgers[0]
    other = [*[3] * 24, *TAIL, 1]
    scheme = worker.scheme.scheme
    ours, theirs = (prompt_keys(scheme, pack_ids(tokens)) or [] for tokens in (LONGER, other))
    routed = ledger.routed(pack_ids(LONGER), ours, None)
    assert routed is not None
    assert ledger.routed(pack_ids(other), theirs, None) is not None
    worker.feed(other_store(TAIL, parent=555))
    ledger.served(routed, 24)
    assert worker.credit(LONGER) == worker.credit(other) == 0


def test_a_placed_store_earns_nothing_until_the_engine_reports_what_is_above_it() -> None:
    worker = late(engine="vllm")
    ledger = worker.ledgers[0]
    keys = prompt_keys(worker.scheme.scheme, pack_ids(LONGER)) or []
    for reported, credit in ((20, 0), (24, 7)):
        routed = ledger.routed(pack_ids(LONGER), keys, None)
        assert routed is not None
        ledger.reset()
        routed = ledger.routed(pack_ids(LONGER), keys, None)
        assert routed is not None
        event = other_store(TAIL, parent=555)
        worker.feed(event)
        assert worker.credit(LONGER) == 0
        ledger.served(routed, reported)
        assert worker.credit(LONGER) == credit
    worker.feed(removed([event["block_hashes"][0], 555]))
    assert worker.blocks() == 0, "with the parent goes all that only it stood for"


def test_two_claims_to_one_place_settle_nothing() -> None:
    """Our own chain: equal content below two unknown parents."""
    worker = late(engine="vllm")
    ledger = worker.ledgers[0]
    keys = [101, 102, 103, 104, 105, 106, 107]
    routed = ledger.routed(pack_ids(LONGER), keys, None)
    assert routed is not None
    first, second = other_store(TAIL, parent=555), other_store(TAIL, parent=666)
    worker.feed(first, second)
    ledger.served(routed, 24)
    assert worker.counters.vouched_blocks == 0
    assert worker.counters.orphans == 2
