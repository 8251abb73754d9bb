"""Namespaces and page keys of the simulated engine (the bytes themselves: test_captures)."""

from __future__ import annotations

import msgspec
import pytest

from router.engine.radix import Stored
from router.engine.wire import PageHasher, encode_batch
from router.hashing import Namespace, Scheme, pack_ids, prompt_keys

IDS = pack_ids(range(64))
PLAIN = Namespace()


@pytest.mark.parametrize(("bigram", "pages"), [(False, [0, 0, 1, 1, 2]), (True, [0, 0, 0, 1, 1])])
def test_partial_pages_never_count(bigram: bool, pages: list[int]) -> None:
    hasher = PageHasher(4, bigram=bigram)
    assert [hasher.full_pages(tokens) for tokens in (0, 3, 4, 5, 8)] == pages
    assert [len(hasher.keys(IDS[: 4 * tokens], PLAIN)) for tokens in (0, 3, 4, 5, 8)] == pages


def test_in_the_default_format_the_salt_changes_the_hash_and_extra_key_does_not() -> None:
    """Case 40."""
    hasher = PageHasher(16)
    plain = hasher.keys(IDS, PLAIN)
    assert plain == prompt_keys(Scheme("sglang-sha256", 16), IDS, PLAIN)
    assert hasher.keys(IDS, Namespace(extra_key="x")) == plain
    salted = hasher.keys(IDS, Namespace(cache_salt="s"))
    assert salted == prompt_keys(Scheme("sglang-sha256", 16), IDS, Namespace(cache_salt="s"))
    assert not set(salted) & set(plain)


@pytest.mark.parametrize("format", ["default", "dynamo"])
def test_an_adapter_shares_no_block_with_the_base_model(format: str) -> None:
    hasher = PageHasher(16, format=format)
    assert not set(hasher.keys(IDS, Namespace(lora_name="a"))) & set(hasher.keys(IDS, PLAIN))


def test_in_the_dynamo_format_every_namespace_has_its_own_hashes() -> None:
    hasher = PageHasher(16, format="dynamo")
    spaces = [
        PLAIN,
        Namespace(cache_salt="a"),
        Namespace(extra_key="a"),
        Namespace(lora_name="a"),
        Namespace(cache_salt="a", extra_key="a"),
    ]
    roots = {hasher.keys(IDS, space)[0] for space in spaces}
    assert len(roots) == len(spaces)


def test_a_store_names_its_session_and_adapter_and_leaves_other_nil_fields_out() -> None:
    """Engine contract, section 2: maps omit nil fields, except parent_block_hash and lora_id."""
    event = Stored([1, 2], None, 0, Namespace(lora_name="ad"), pack_ids(range(8)), "talk")
    _, (plain,), rank = msgspec.msgpack.decode(encode_batch(1.5, [event], 3, Scheme("sglang-sha256", 4)))
    assert rank == 3
    assert plain == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "session_id": "talk",
        "lora_name": "ad",
    }
