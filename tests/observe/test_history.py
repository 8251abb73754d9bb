from __future__ import annotations

from router.observe.history import FIELDS, POINTS, History
from router.observe.tally import Tally


def test_a_point_holds_what_came_since_the_one_before() -> None:
    history, tally = History(), Tally()
    tally.placed(100, 60, 80, 20.5)
    tally.reported(100, 55)
    first = history.sample(1000.0, tally, 1, [0.1, 0.2, 0.9])
    tally.placed(50, 50, 50, 0.0)
    second = history.sample(1002.0, tally, 1, [])
    assert dict(zip(FIELDS, first, strict=True)) == {
        "at": 1000.0,
        "requests": 1,
        "failed": 1,
        "prompt": 100,
        "predicted": 60,
        "best": 80,
        "blind": 20.5,
        "reported_prompt": 100,
        "reported_cached": 55,
        "ttft_p50_s": 0.2,
        "ttft_p95_s": 0.9,
    }
    assert second == [1002.0, 1, 0, 50, 50, 50, 0.0, 0, 0, None, None]
    assert history.points() == [first, second]


def test_the_curves_are_bounded() -> None:
    history = History()
    for step in range(POINTS + 50):
        history.sample(float(step), Tally(), 0, [])
    assert len(history.points()) == POINTS
    assert history.points()[0][0] == 50.0
