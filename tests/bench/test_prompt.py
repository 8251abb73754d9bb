"""`bench prompt` gives the promised shape; its speed is for people to judge."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from router.bench.prompt import print_table, run


def test_result_has_the_promised_shape_and_is_printed() -> None:
    result = run(None, repeats=3)
    assert {"tokenizer", "cold_8k_us", "cold_8k_hf_us", "turn_32k_text_to_decision_us"} <= result.keys()
    assert 31_000 < result["turn_32k_tokens"] < 34_500
    assert result["cold_8k_us"] > 0
    assert result["turn_32k_text_to_decision_us"] < result["turn_32k_unseen_us"]
    out = io.StringIO()
    print_table(result, Console(file=out, width=120))
    assert f"{result['turn_32k_text_to_decision_us']:,} µs" in out.getvalue()


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "router" / "engine" / "data" / "tiny"
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="renders chats"):
        run(tmp_path)
