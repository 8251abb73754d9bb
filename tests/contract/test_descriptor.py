from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import KvEventsConfig, RankConfig
from router.contract.descriptor import Descriptor, RankEndpoints, parse_descriptor
from router.contract.url import WorkerUrl
from router.errors import ContractError
from tests.captures import describe_matrix

WORKER = WorkerUrl.parse("http://worker-0:30000")
IPV6_WORKER = WorkerUrl.parse("http://[fd00::5]:30000/")


def advertised(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 16,
        "dp_size": 1,
    }
    return base | changes


def refusal(kv_events: object, override: KvEventsConfig | None = None) -> str:
    with pytest.raises(ContractError) as refused:
        parse_descriptor(kv_events, WORKER, override)
    return str(refused.value)


REAL_ROWS = [row for row in describe_matrix() if "dp-attention" not in row["case"]]
REFUSED = {"publisher_other": "only zmq can be subscribed to", "endpoint tcp://a b:5557": "neither a DNS name"}


def expected_ranks(said: dict[str, Any]) -> list[tuple[str | None, str | None, str | None]]:
    """Written apart from the parser: (events, replay, load) of every rank at the worker's own host."""
    base, count = said["endpoint_port_base"], said["dp_size"]

    def at(start: int | None, rank: int, forbidden: range) -> str | None:
        usable = start is not None and start + rank <= 65535 and start + rank not in forbidden
        return f"tcp://worker-0:{start + rank}" if usable and start is not None else None

    events = range(base, base + count)
    rows = []
    for rank in range(count):
        heard = at(base, rank, range(0))
        replay = at(said.get("replay_endpoint_port_base"), rank, events) if heard else None
        rows.append((heard, replay, at(said.get("load_endpoint_port_base"), rank, events)))
    return rows


@pytest.mark.parametrize("row", REAL_ROWS, ids=lambda row: row["case"])
def test_every_descriptor_of_a_real_server_is_accepted_or_refused_for_a_stated_reason(row: dict[str, Any]) -> None:
    """Cases 14 to 17: 112 settings of SGLang 0.5.23 and the descriptors it gave."""
    said = row["descriptor"]
    if said is None or row["case"] in REFUSED:
        assert REFUSED.get(row["case"], "describes no KV events") in refusal(said)
        return
    descriptor = parse_descriptor(said, WORKER)
    assert (descriptor.block_size, descriptor.dp_size, descriptor.topic) == (
        said["block_size"],
        said["dp_size"],
        said["topic"],
    )
    assert descriptor.load_topic == said.get("load_topic", "load")
    assert [rank.rank for rank in descriptor.ranks] == list(range(said["dp_size"]))
    assert [(rank.events, rank.replay, rank.load) for rank in descriptor.ranks] == expected_ranks(said)
    assert all((rank.events is None) == (rank.problem is not None) for rank in descriptor.ranks)


def test_the_matrix_is_tabulated_whole() -> None:
    outcomes = {"accepted": 0, "noted": 0, "refused": 0, "partly impossible": 0}
    for row in REAL_ROWS:
        try:
            descriptor = parse_descriptor(row["descriptor"], WORKER)
        except ContractError:
            outcomes["refused"] += 1
            continue
        kind = "partly impossible" if any(rank.problem for rank in descriptor.ranks) else "accepted"
        outcomes["noted" if descriptor.notes and kind == "accepted" else kind] += 1
    assert len(describe_matrix()) == 116
    assert sum(outcomes.values()) == len(REAL_ROWS) == 112
    assert outcomes == {"accepted": 58, "noted": 24, "refused": 29, "partly impossible": 1}


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "[::]"])
def test_wildcard_hosts_mean_the_workers_host(host: str) -> None:
    """Case 15."""
    assert parse_descriptor(advertised(endpoint_host=host), IPV6_WORKER) == Descriptor(
        16, 1, "", "load", (RankEndpoints(0, "tcp://[fd00::5]:5557", None, None, None),), ()
    )


def test_another_concrete_host_is_not_dialled_unless_configured() -> None:
    """Cases 17 and 102."""
    said = advertised(endpoint_host="10.0.0.5")
    descriptor = parse_descriptor(said, WORKER)
    assert descriptor.ranks[0].events == "tcp://worker-0:5557"
    (note,) = descriptor.notes
    assert "10.0.0.5" in note
    assert "workers[].kv_events.host" in note
    configured = parse_descriptor(said, WORKER, KvEventsConfig(host="10.0.0.5"))
    assert configured.ranks[0].events == "tcp://10.0.0.5:5557"
    assert configured.notes == ()


def test_the_workers_own_concrete_host_is_noted_as_a_publisher_that_may_connect() -> None:
    """Case 17."""
    (note,) = parse_descriptor(advertised(endpoint_host="WORKER-0"), WORKER).notes
    assert "bind" in note
    assert "kv_events.host" not in note


def test_ranks_past_the_last_port_are_impossible_and_the_others_work() -> None:
    """Case 16: port base 65533 with dp_size 8."""
    ranks = parse_descriptor(
        advertised(endpoint_port_base=65533, dp_size=8, load_endpoint_port_base=7000), WORKER
    ).ranks
    assert [rank.events for rank in ranks[:4]] == [*(f"tcp://worker-0:{port}" for port in (65533, 65534, 65535)), None]
    assert [rank.problem is None for rank in ranks] == [True] * 3 + [False] * 5
    assert "65528 or less" in str(ranks[7].problem)
    assert ranks[7].load == "tcp://worker-0:7007"


@pytest.mark.parametrize("base", [5556, 5557, 5558])
def test_a_replay_range_over_the_event_range_costs_only_the_ranks_concerned(base: int) -> None:
    """SGLang 0.5.23 advertises such ranges when replay_endpoint is the next port and dp_size is 2."""
    descriptor = parse_descriptor(advertised(dp_size=2, replay_endpoint_port_base=base), WORKER)
    for rank in descriptor.ranks:
        port = base + rank.rank
        assert rank.replay == (None if port in (5557, 5558) else f"tcp://worker-0:{port}")
        assert rank.problem is None
    assert "overlaps the event ports 5557-5558" in descriptor.notes[0]


@pytest.mark.parametrize("value", [0, -1, 65536, "7000", True, 7000.0, [], {}])
def test_an_unusable_optional_port_is_noted_and_left_out(value: object) -> None:
    descriptor = parse_descriptor(advertised(load_endpoint_port_base=value, replay_endpoint_port_base=value), WORKER)
    assert descriptor.ranks == (RankEndpoints(0, "tcp://worker-0:5557", None, None, None),)
    assert len(descriptor.notes) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 0}, "kv_events.block_size is 0"),
        ({"block_size": "64"}, "kv_events.block_size is '64'"),
        ({"block_size": None}, "kv_events.block_size is None"),
        ({"block_size": True}, "kv_events.block_size is True"),
        ({"block_size": 16.0}, "kv_events.block_size is 16.0"),
        ({"block_size": 65537}, "from 1 to 65536"),
        ({"dp_size": 0}, "kv_events.dp_size is 0"),
        ({"dp_size": 1000000}, "from 1 to 4096"),
        ({"dp_size": "2"}, "kv_events.dp_size is '2'"),
        ({"endpoint_port_base": 0}, "kv_events.endpoint_port_base is 0"),
        ({"endpoint_port_base": 70000}, "from 1 to 65535"),
        ({"publisher": "nats"}, "kv_events.publisher is 'nats'"),
        ({"publisher": None}, "only zmq"),
        ({"topic": 5}, "kv_events.topic is 5"),
        ({"topic": "\ud800"}, "kv_events.topic"),
        ({"topic": "x" * 1025}, "1024 UTF-8 bytes"),
        ({"endpoint_host": "a b"}, "neither a DNS name nor an IP address"),
        ({"endpoint_host": None}, "kv_events.endpoint_host is None"),
        ({"endpoint_host": "user@host"}, "neither a DNS name"),
        ({"endpoint_host": "h:1"}, "neither a DNS name"),
    ],
)
def test_a_malformed_descriptor_is_refused_with_the_key_and_what_it_said(
    changes: dict[str, object], reason: str
) -> None:
    """Case 14."""
    assert reason in refusal(advertised(**changes))


@pytest.mark.parametrize("value", ["zmq", 5, True, [], [1]])
def test_a_descriptor_that_is_no_object_is_refused(value: object) -> None:
    """Case 14."""
    assert "not an object" in refusal(value)


@pytest.mark.parametrize("key", ["block_size", "dp_size", "endpoint_port_base"])
def test_a_missing_key_is_named_with_the_setting_that_supplies_it(key: str) -> None:
    """Case 14."""
    said = advertised()
    del said[key]
    assert f"set workers[].kv_events.{key}" in refusal(said)
    assert parse_descriptor(said, WORKER, msgspec.structs.replace(KvEventsConfig(), **{key: 7})).ranks


def test_unknown_keys_and_an_unusable_load_topic_do_no_harm() -> None:
    """Case 14."""
    said = advertised(foo=1, load_endpoint_port_base=7000, load_topic=None)
    descriptor = parse_descriptor(said, WORKER)
    assert descriptor.load_topic == "load"
    assert descriptor.ranks[0].load == "tcp://worker-0:7000"
    assert "load_topic" in descriptor.notes[0]


def test_the_advertised_width_is_used_as_it_is() -> None:
    """Case 46: page_size 16, dcp_size 4, descriptor 64."""
    assert parse_descriptor(advertised(block_size=64, page_size=16, dcp_size=4), WORKER).block_size == 64


def test_vllm_is_described_by_the_configuration_alone() -> None:
    settings = KvEventsConfig(
        endpoint_port_base=5557, dp_size=2, block_size=32, topic="kv", replay_endpoint_port_base=6000
    )
    assert parse_descriptor(None, IPV6_WORKER, settings) == Descriptor(
        32,
        2,
        "kv",
        "load",
        (
            RankEndpoints(0, "tcp://[fd00::5]:5557", "tcp://[fd00::5]:6000", None, None),
            RankEndpoints(1, "tcp://[fd00::5]:5558", "tcp://[fd00::5]:6001", None, None),
        ),
        (),
    )
    assert "set workers[].kv_events.block_size" in refusal(None, KvEventsConfig(endpoint_port_base=5557))
    assert "describes no KV events" in refusal(None, KvEventsConfig(block_size=16))


def test_configured_values_beat_the_engines_and_the_difference_is_noted() -> None:
    descriptor = parse_descriptor(advertised(), WORKER, KvEventsConfig(block_size=64, endpoint_port_base=5557))
    assert descriptor.block_size == 64
    assert descriptor.notes == ("kv_events.block_size: 64 is configured, the engine says 16",)


def test_an_endpoint_list_reaches_ranks_on_other_hosts() -> None:
    """Case 16."""
    endpoints = (
        RankConfig(events="tcp://node-0:5557", replay="tcp://node-0:5600"),
        RankConfig(events="tcp://[FD00::7]:5557", load="tcp://[fd00::7]:5700"),
    )
    descriptor = parse_descriptor(advertised(dp_size=3), WORKER, KvEventsConfig(endpoints=endpoints))
    assert descriptor.ranks[0] == RankEndpoints(0, "tcp://node-0:5557", "tcp://node-0:5600", None, None)
    assert descriptor.ranks[1] == RankEndpoints(1, "tcp://[fd00::7]:5557", None, "tcp://[fd00::7]:5700", None)
    assert descriptor.ranks[2].events is None
    assert "not listed" in str(descriptor.ranks[2].problem)
    fewer = parse_descriptor(advertised(dp_size=1), WORKER, KvEventsConfig(endpoints=endpoints))
    assert len(fewer.ranks) == 1
    assert "lists 2 ranks" in fewer.notes[0]
    alone = parse_descriptor(None, WORKER, KvEventsConfig(endpoints=endpoints, block_size=16))
    assert alone.dp_size == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = ["publisher", "endpoint_host", "endpoint_port_base", "topic", "block_size", "dp_size", "load_topic"]
keys += ["load_endpoint_port_base", "replay_endpoint_port_base", "other"]


@given(
    st.one_of(
        json_values,
        st.dictionaries(st.sampled_from(keys), json_values),
        st.dictionaries(st.sampled_from(keys), json_values).map(lambda changes: advertised(**changes)),
        st.tuples(st.integers(1, 65535), st.integers(1, 40), st.integers(-5, 70000)).map(
            lambda n: advertised(endpoint_port_base=n[0], dp_size=n[1], replay_endpoint_port_base=n[2])
        ),
    )
)
def test_any_descriptor_is_usable_or_a_contract_error(value: object) -> None:
    """Case 14."""
    try:
        descriptor = parse_descriptor(value, IPV6_WORKER)
    except ContractError:
        return
    assert len(descriptor.ranks) == descriptor.dp_size <= 4096
    for rank in descriptor.ranks:
        for endpoint in (rank.events, rank.replay, rank.load):
            assert endpoint is None or 1 <= int(endpoint.removeprefix("tcp://[fd00::5]:")) <= 65535
