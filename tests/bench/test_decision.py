"""`bench decision` gives the promised shape; its speed is for people to judge."""

from __future__ import annotations

import io

from rich.console import Console

from router.bench.decision import measure, print_table


def test_every_row_has_its_parts_and_is_printed() -> None:
    row = measure(16, 4, rounds=5)
    assert row.keys() == {"ranks", "holders", "match_us", "policy_us", "total_us"}
    assert 0 < row["policy_us"] <= row["total_us"]
    out = io.StringIO()
    print_table({"blocks": 512, "decisions": [row]}, Console(file=out, width=100))
    assert f"{row['total_us']:,}" in out.getvalue()
