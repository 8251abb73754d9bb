"""`bench index` gives the promised shape; its speed is for people to judge."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from router.bench.index import LOOKUP_BLOCKS, print_table, run


def test_result_has_the_promised_shape_and_is_printed() -> None:
    result = run(16_384, 3)
    assert {
        "blocks",
        "ranks",
        "ingest_events_per_s",
        "ingest_blocks_per_s",
        "remove_blocks_per_s",
        "lookup_us",
        "lookup_us_with_holes",
        "first_lookup_us",
        "clear_us",
        "sweep_slice_ms",
        "bytes_per_block",
    } <= result.keys()
    assert result["blocks"] >= 16_384
    assert result["ranks"] == 3
    for lookups in (result["lookup_us"], result["lookup_us_with_holes"]):
        assert list(lookups) == [str(blocks) for blocks in LOOKUP_BLOCKS]
        assert 0 < lookups["128"] < lookups["2048"]
    assert result["first_lookup_us"] > 0
    assert 0 < result["sweep_slice_ms"]["median"] <= result["sweep_slice_ms"]["worst"]
    assert result["ingest_events_per_s"] > 1000
    out = io.StringIO()
    print_table(result, Console(file=out, width=120))
    assert f"{result['ingest_events_per_s']:,} events/s" in out.getvalue()


@pytest.mark.parametrize(("blocks", "ranks"), [(10, 1), (100_000, 0)])
def test_numbers_that_leave_nothing_to_measure_are_refused(blocks: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="--blocks"):
        run(blocks, ranks)
