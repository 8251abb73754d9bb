"""What the page says of our counters is what prometheus_client's own would have said."""

from __future__ import annotations

import prometheus_client as theirs
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.observe import counters as ours

BUCKETS = (0.005, 0.1, 1, 2.5e-5 + 10)


def page(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(
    st.lists(st.tuples(st.sampled_from(("a", "b")), st.integers(0, 9)), max_size=8),
    st.lists(st.tuples(st.sampled_from(("a", "b")), st.floats(0, 20)), max_size=8),
)
def test_the_page_is_the_librarys(counted: list[tuple[str, int]], observed: list[tuple[str, float]]) -> None:
    mine, other = CollectorRegistry(), CollectorRegistry()
    one, its_one = ours.Counter("one", "text", registry=mine), theirs.Counter("one", "text", registry=other)
    many = ours.Children("many", "text", ["kind"], registry=mine)
    its_many = theirs.Counter("many", "text", ["kind"], registry=other)
    seconds = ours.HistogramChildren("seconds", "text", ["kind"], registry=mine, buckets=BUCKETS)
    its_seconds = theirs.Histogram("seconds", "text", ["kind"], registry=other, buckets=BUCKETS)
    alone = ours.HistogramChildren("alone", "text", (), registry=mine, buckets=BUCKETS)
    its_alone = theirs.Histogram("alone", "text", registry=other, buckets=BUCKETS)
    for kind, by in counted:
        one.inc(by)
        its_one.inc(by)
        many.inc(kind, by=by)
        its_many.labels(kind).inc(by)
    for kind, value in observed:
        seconds.observe(value, kind)
        its_seconds.labels(kind).observe(value)
        alone.observe(value)
        its_alone.observe(value)
    assert page(mine) == page(other)


def test_series_end_by_their_leading_labels() -> None:
    """Case 98."""
    registry = CollectorRegistry()
    family = ours.Children("many", "text", ["worker", "rank"], registry=registry)
    for worker in ("w1", "w2"):
        family.inc(worker, "0")
        family.inc(worker, "1", by=0)
    family.remove("w1")
    family.remove("w2", "1")
    assert [line for line in page(registry) if not line.startswith("#")] == ['many_total{rank="0",worker="w2"} 1.0']
