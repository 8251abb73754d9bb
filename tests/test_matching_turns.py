"""Block keys of one prompt, made in turns or at once, from what is kept or anew: always the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import Namespace, Scheme, creditable_blocks, pack_ids, prompt_keys
from router.matching import PromptKeys

SCHEMES = (Scheme("sglang-sha256", 4), Scheme("xxh3", 3), Scheme("sglang-sha256", 2, bigram=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=120), st.sampled_from(SCHEMES), st.integers(1, 9))
def test_keys_made_in_turns_are_the_keys_made_at_once(ids: list[int], scheme: Scheme, slice_blocks: int) -> None:
    packed = pack_ids(ids)
    creditable = creditable_blocks(scheme, len(ids))
    expected = (prompt_keys(scheme, packed) or [])[:creditable] if creditable else []
    at_once, in_turns = PromptKeys(packed, Namespace()), PromptKeys(packed, Namespace())
    assert at_once.under(scheme) == expected
    turns = sum(1 for _ in in_turns.steps([scheme], slice_blocks))
    assert in_turns.under(scheme) == expected
    assert turns >= len(expected) // slice_blocks


def test_no_ids_and_unreproducible_namespaces_have_no_keys() -> None:
    """cases 40, 41"""
    scheme = SCHEMES[0]
    for keys in (PromptKeys(None, Namespace()), PromptKeys(pack_ids(range(40)), Namespace(extra_key="k"))):
        assert list(keys.steps([scheme])) is not None
        assert keys.under(scheme) == []
