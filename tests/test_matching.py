"""Prompt keys under a scheme, and the prefix each slot is credited with."""

from __future__ import annotations

from router.contract.events import Tier
from router.hashing import Namespace, Scheme, pack_ids, prompt_keys
from router.index.prefix import PrefixIndex
from router.matching import PromptKeys, prompt_credits
from router.policy.decide import NO_CREDIT, Credit
from router.policy.predicted import PredictedBlocks

SCHEME = Scheme("sglang-sha256", 4, False)
IDS = pack_ids(range(17))


def keys_of(scheme: Scheme = SCHEME, namespace: Namespace | None = None) -> list[int]:
    keys = prompt_keys(scheme, IDS, namespace or Namespace())
    assert keys is not None
    return keys


def credit(
    index: PrefixIndex,
    slot: int,
    predicted: PredictedBlocks | None = None,
    keys: PromptKeys | None = None,
    schemes: tuple[Scheme, ...] = (SCHEME,),
) -> Credit:
    found = prompt_credits(index, predicted or PredictedBlocks(10.0), keys or PromptKeys(IDS, Namespace()), schemes)
    return found.get(slot, NO_CREDIT)


def test_credit_is_in_tokens_by_tier_and_cumulative() -> None:
    index = PrefixIndex()
    slot, keys = index.open_slot(), keys_of()
    index.store(slot, Tier.GPU, keys[:2])
    index.store(slot, Tier.CPU_PINNED, keys[2:3])
    assert credit(index, slot) == (8, 12, 12, 12, 12)


def test_the_last_prompt_token_is_never_credited() -> None:
    """case 47"""
    index = PrefixIndex()
    slot, exact = index.open_slot(), PromptKeys(pack_ids(range(16)), Namespace())
    index.store(slot, Tier.GPU, keys_of())
    assert credit(index, slot, keys=exact)[0] == 12


def test_predicted_blocks_extend_the_belief_but_not_the_credit() -> None:
    index, predicted = PrefixIndex(), PredictedBlocks(10.0)
    slot, keys = index.open_slot(), keys_of()
    index.store(slot, Tier.GPU, keys[:1])
    predicted.add(slot, keys[1:3], 0.0)
    assert credit(index, slot, predicted) == (4, 4, 4, 4, 12)


def test_slots_of_one_depth_share_one_object_and_slots_of_others_do_not() -> None:
    index, predicted, keys = PrefixIndex(), PredictedBlocks(10.0), keys_of()
    expected: dict[int, Credit] = {}
    for held in (0, 1, 2, 3, 4):
        for hoped in (held, 4, 4):
            slot = index.open_slot()
            index.store(slot, Tier.GPU, keys[:held])
            predicted.add(slot, keys[held:hoped], 0.0)
            if hoped:
                expected[slot] = (4 * held, 4 * held, 4 * held, 4 * held, 4 * hoped)
    found = prompt_credits(index, predicted, PromptKeys(IDS, Namespace()), (SCHEME,))
    assert found == expected
    assert len({id(credit) for credit in found.values()}) == len(set(found.values()))


def test_each_scheme_of_the_fleet_has_its_own_keys_and_width() -> None:
    index = PrefixIndex()
    wide, own = Scheme("sglang-sha256", 8, False), Scheme("xxh3", 4, False)
    first, second = index.open_slot(), index.open_slot()
    index.store(first, Tier.GPU, keys_of(wide))
    index.store(second, Tier.GPU, keys_of(own)[:3])
    assert credit(index, first, schemes=(wide, own))[0] == 16
    assert credit(index, second, schemes=(wide, own))[0] == 12
    assert credit(index, first) == NO_CREDIT


def test_no_ids_and_namespaces_that_cannot_be_reproduced_earn_nothing() -> None:
    """cases 40 and 41"""
    assert PromptKeys(None, Namespace()).under(SCHEME) == []
    assert PromptKeys(IDS, Namespace(extra_key="x")).under(SCHEME) == []
    assert PromptKeys(IDS, Namespace(cache_salt="a")).under(SCHEME) != PromptKeys(IDS, Namespace()).under(SCHEME)
