"""The soak, one minute of it: `pytest -m soak`. The half hour is `python -m tests.soak --minutes 30`."""

from __future__ import annotations

import pytest

from tests.soak import soak


@pytest.mark.soak
async def test_a_minute_of_load_and_faults_loses_no_count_and_leaves_nothing_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases 30, 32, 98 and 99. A minute is too short for flat memory: bounded caches still fill up."""
    made = await soak(1.0, tolerance=0.3)
    with capsys.disabled():
        print("\n" + made.report())
    assert made.tally.problems == []
    assert made.tally.sent["200"] > 0
