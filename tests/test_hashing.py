"""Check values of the contract, and what must hold for any prompt."""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import (
    Namespace,
    Scheme,
    bigrams,
    creditable_blocks,
    pack_ids,
    prompt_keys,
    sglang_chain,
    token_count,
    xxh3_chain,
    xxh3_root,
)

TOKEN = st.integers(0, 2**32 - 1)
WIDTH = st.integers(1, 5)
FIELD = st.none() | st.text(max_size=3)
NAMESPACES = st.builds(Namespace, FIELD, FIELD, FIELD)


def test_contract_check_values() -> None:
    """Case 45: the second value's digest chain has its top bit set, little-endian tokens, full digests chained."""
    assert prompt_keys(Scheme("sglang-sha256", 4), pack_ids([1, 2, 3, 4])) == [-3488128144981237669]
    assert prompt_keys(Scheme("sglang-sha256", 2), pack_ids(range(10, 90, 10))) == [
        978178666101069530,
        -895308556211281782,
        -8033692805846017938,
        835415944263129316,
    ]


def test_values_of_a_real_salted_stream() -> None:
    """Case 41: sgl_radix_page16_namespaces_default, cache_salt "saltA" and "saltB" over the same tokens."""
    scheme, ids = Scheme("sglang-sha256", 16), pack_ids(range(100, 164))
    salted = {salt: prompt_keys(scheme, ids, Namespace(salt)) for salt in (None, "saltA", "saltB")}
    assert salted[None] == [3783480490812179100, -5523102609743566000, 8220981200828417142, 4172160871627067949]
    assert salted["saltA"] == [-3872688764659480148, 2162863005988884197, -3386053367740085919, -2534247228284290735]
    assert salted["saltB"] == [6679124503831114958, 109519952015754520, -5033221614845032417, -2134180664903222443]


def test_values_of_a_real_bigram_stream() -> None:
    """Case 5: sgl_radix_page4_eagle; a page of four pairs spans five tokens."""
    tokens = [*range(1000, 1012), *range(2000, 2009)]
    assert prompt_keys(Scheme("sglang-sha256", 4, bigram=True), pack_ids(tokens)) == [
        9198482225452606037,
        5849813026473158476,
        2796705996942516944,
        3658515285983261204,
        -2778287095939676342,
    ]


@pytest.mark.parametrize("namespace", [Namespace(lora_name="a"), Namespace(extra_key="x"), Namespace("s", None, "x")])
def test_namespaces_the_engine_does_not_tell_have_no_keys(namespace: Namespace) -> None:
    """Case 40: better no credit than another tenant's."""
    assert prompt_keys(Scheme("sglang-sha256", 1), pack_ids([1, 2]), namespace) is None
    assert prompt_keys(Scheme("xxh3", 1), pack_ids([1, 2]), namespace) is not None


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (63, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_the_last_token_is_always_recomputed(tokens: int, blocks: int) -> None:
    """Case 47."""
    assert creditable_blocks(Scheme("xxh3", 64), tokens) == blocks
    assert creditable_blocks(Scheme("xxh3", 64, bigram=True), tokens + 1) == blocks


@pytest.mark.parametrize("bad", [[-5], [2**40], [1.0], ["1"], [None]])
def test_unusual_ids_are_refused_in_words(bad: list[int]) -> None:
    """Case 48."""
    with pytest.raises(ValueError, match=r"0 to 2\^32-1"):
        pack_ids(bad)


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=40), WIDTH, st.text(max_size=4) | st.none())
def test_sglang_chain_is_its_definition(tokens: list[int], width: int, salt: str | None) -> None:
    digest = b"" if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    want = []
    for start in range(0, len(tokens) - width + 1, width):
        page = b"".join(struct.pack("<I", token) for token in tokens[start : start + width])
        digest = hashlib.sha256(digest + page).digest()
        want.append(struct.unpack(">q", digest[:8])[0])
    assert sglang_chain(pack_ids(tokens), 4 * width, salt) == want


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=30))
def test_bigrams_are_neighbouring_pairs(tokens: list[int]) -> None:
    flat = [token for pair in pairwise(tokens) for token in pair]
    assert bigrams(pack_ids(tokens)) == pack_ids(flat)


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=40), WIDTH, NAMESPACES, st.booleans())
def test_every_full_block_has_a_key_and_prefixes_share_theirs(
    tokens: list[int], width: int, namespace: Namespace, bigram: bool
) -> None:
    scheme = Scheme("xxh3", width, bigram)
    ids = pack_ids(tokens)
    keys = prompt_keys(scheme, ids, namespace)
    assert keys is not None
    assert len(keys) == max(0, token_count(ids) - bigram) // width
    assert prompt_keys(scheme, ids + pack_ids([7]), namespace)[: len(keys)] == keys  # type: ignore[index]
    assert all(-(2**63) <= key < 2**63 for key in keys)


@settings(deadline=None)
@given(st.lists(TOKEN, min_size=8, max_size=24), st.integers(0, 3))
def test_our_chain_continues_from_any_of_its_keys(tokens: list[int], split: int) -> None:
    """A ledger knows a parent's key only: from there it must get what a prompt gets from the root."""
    ids = pack_ids(tokens)
    whole = xxh3_chain(xxh3_root(), ids, 8)
    parent = whole[split - 1] if split else xxh3_root()
    assert xxh3_chain(parent, ids[8 * split :], 8) == whole[split:]


@settings(deadline=None)
@given(NAMESPACES, NAMESPACES)
def test_namespaces_never_share_a_root(one: Namespace, other: Namespace) -> None:
    assert (xxh3_root(one) == xxh3_root(other)) == (one == other)
