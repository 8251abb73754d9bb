"""Made-up answers and the shipped tiny tokenizer."""

from __future__ import annotations

import json
import struct

from router.engine.text import TextCodec
from router.hashing import pack_ids, token_count


def test_equal_prompts_get_equal_answers_and_others_do_not(codec: TextCodec) -> None:
    def words(text: str, choice: int = 0) -> list[int]:
        sample = codec.answer(codec.encode(text), choice)
        return [sample(i) for i in range(32)]

    assert words("one") == words("one")
    assert words("one") != words("two")
    assert words("one") != words("one", 1)


def test_an_answers_text_sent_back_is_the_same_ids_again(codec: TextCodec) -> None:
    """So that a conversation's next prompt hits the output pages too, as with a real model."""
    for prompt in range(50):
        sample = codec.answer(pack_ids([prompt]), 0)
        answer = [sample(i) for i in range(64)]
        assert codec.encode("".join(map(codec.text_of, answer))) == pack_ids(answer)


def test_the_next_turns_prompt_begins_with_this_turns_prompt_and_answer(codec: TextCodec) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page?"}]
    first = codec.render_chat("/v1/chat/completions", json.dumps({"messages": messages}).encode())
    sample = codec.answer(first, 0)
    answer = [sample(i) for i in range(40)]
    messages += [
        {"role": "assistant", "content": "".join(map(codec.text_of, answer))},
        {"role": "user", "content": "And a block?"},
    ]
    second = codec.render_chat("/v1/chat/completions", json.dumps({"messages": messages}).encode())
    assert second.startswith(first + pack_ids(answer))


def test_tokenize_obeys_add_generation_prompt_and_chat_does_not(codec: TextCodec) -> None:
    """Captures, fact 7."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}).encode()
    assert token_count(codec.render_chat("/v1/tokenize", body)) < token_count(
        codec.render_chat("/v1/chat/completions", body)
    )


def test_ids_are_little_endian_u32(codec: TextCodec) -> None:
    ids = codec.encode("hello world")
    assert all(token < codec.vocabulary_size for token in struct.unpack(f"<{token_count(ids)}I", ids))
