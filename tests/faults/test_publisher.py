"""Faults of the publisher, over real sockets through the whole service: killed, restarted, paused, dropping, lying."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.faults.conftest import MakeScene, Scene
from tests.support.cache import prompts
from tests.support.wire import Wire

MakeWire = Callable[[int], Awaitable[Wire]]
REPLAY = pytest.mark.parametrize("replay", [0, 1000], ids=["no_replay", "replay"])


@REPLAY
async def test_a_killed_publisher_costs_the_trust_and_its_successor_begins_with_nothing(
    replay: int, scene: MakeScene
) -> None:
    """Case 18: HTTP goes on, ZMQ is down."""
    at = await scene(replay=replay)
    at.engine.close_publisher()
    await at.state("unreachable", "no publisher answered")
    await at.serve(1)
    at.cache.died()
    await at.engine.open_publisher()
    await at.engine.listened()
    at.cache.clear()
    at.cache.store(at.prompts[5])
    await at.exact()
    await at.no_drift()


@REPLAY
@pytest.mark.parametrize("next_seq", [0, 3, 900])
async def test_a_restart_is_forgotten_whatever_number_the_new_process_is_at(
    next_seq: int, replay: int, scene: MakeScene
) -> None:
    """Case 18; and forward over the reconnect, where only the lost connection tells. 3 is the very next number."""
    at = await scene(replay=replay)
    at.engine.close_publisher()
    at.cache.died(next_seq)
    await at.engine.open_publisher()
    if replay:
        at.cache.store(at.prompts[5])
    await at.engine.listened()
    at.engine.info["startup_time"] = {"tokenizer_e2e": 7.5}
    if not replay:
        await at.router.until(lambda: _incarnation(at, 2), "the new startup_time is seen")
        await at.subscribed(2)
    at.cache.store(at.prompts[4])
    at.cache.store(at.prompts[0])
    await at.exact()


@REPLAY
async def test_a_paused_line_loses_nothing_and_a_cut_one_is_asked_for_what_was_missed(
    replay: int, scene: MakeScene, wire: MakeWire
) -> None:
    at = await scene(replay=replay)
    line = await wire(at.engine.kv_base)
    at.engine.info["kv_events"]["endpoint_port_base"] = line.port
    await at.router.until(lambda: _listens_at(at, line.port), "the wire is used")
    await at.subscribed(2)
    at.cache.clear()
    at.cache.store(*at.prompts[:2])
    await at.exact()
    line.pause()
    at.cache.evict(at.prompts[0], 1)
    at.cache.store(*at.prompts[2:4])
    await at.router.session.get(f"{at.router.base}/health")
    line.resume()
    await at.exact()
    line.pause()
    at.cache.store(at.prompts[4])
    await line.cut()
    line.resume()
    if replay:
        await at.exact()
    else:
        await at.subscribed(3)
        at.cache.store(at.prompts[0])
        fresh = prompts(2)
        at.cache.store(*fresh)
        await at.exact(asked=fresh)
        truth = [at.cache.truth(p) for p in at.prompts]
        assert all(c <= t for c, t in zip(await at.credits(), truth, strict=True))


async def _listens_at(at: Scene, port: int) -> bool:
    return bool((await at.rank())["endpoint"].endswith(f":{port}"))


@pytest.mark.parametrize("dropped", [1, 3, 40])
async def test_dropped_batches_are_replayed_in_order(dropped: int, scene: MakeScene) -> None:
    """Case 20: the missing ones hold stores and removals."""
    at = await scene(replay=1000)
    for turn in range(dropped):
        at.cache.store(at.prompts[4 + turn % 2], dropped=True)
        at.cache.evict(at.prompts[4 + turn % 2], turn % 5, dropped=True)
    at.cache.store(at.prompts[5])
    await at.exact()
    rank = await at.rank()
    assert (rank["history"], rank["batches_lost"], rank["gaps"] >= 1) == ("complete", 0, True)


async def test_dropped_batches_that_nobody_has_cost_what_was_held_before_them(scene: MakeScene) -> None:
    """Settled rule 1: and what comes after is exact again."""
    at = await scene()
    at.cache.evict(at.prompts[0], 0, dropped=True)
    at.cache.store(at.prompts[5])
    await at.exact(asked=[at.prompts[0]])
    rank = await at.rank()
    assert (rank["history"], rank["batches_lost"]) == ("partial", 1)
    at.cache.clear()
    at.cache.store(*at.prompts[:2])
    await at.exact()


async def test_a_number_that_was_never_sent_is_given_up_within_bounded_time(scene: MakeScene) -> None:
    """Case 21: SGLang counts before it encodes, so a failure burns a number that no replay has."""
    at = await scene(replay=1000)
    at.engine.next_seq[0] += 1
    at.cache.clear()
    at.cache.store(at.prompts[2])
    await at.exact()
    assert (await at.rank())["replays"]["unfilled"] == 1


async def test_a_replay_socket_that_does_not_answer_is_given_up_and_the_stream_goes_on(scene: MakeScene) -> None:
    at = await scene(replay=1000)
    await at.engine.close_replay()
    at.cache.clear(dropped=True)
    at.cache.store(at.prompts[2])
    await at.state("gapped", "asked replay")
    at.cache.store(at.prompts[5])
    await at.exact(timeout_s=12)


async def test_batches_delivered_again_or_out_of_order_count_once(scene: MakeScene) -> None:
    """Case 23: each BATCH applied once, or counts drift."""
    at = await scene(replay=1000)
    at.cache.store(at.prompts[4])
    await at.exact()
    for seq, payload in list(at.engine.buffers[0]):
        at.engine.send(seq, payload)
    at.cache.evict(at.prompts[4], 2)
    at.cache.store(at.prompts[5], dropped=True)
    late = at.engine.buffers[0][-1]
    at.cache.evict(at.prompts[5], 3)
    at.engine.send(*late)
    await at.exact()
    rank = await at.rank()
    assert (rank["restarts"], rank["history"]) == (0, "complete")


async def test_a_message_too_large_to_read_is_a_hole_and_not_the_end_of_the_stream(scene: MakeScene) -> None:
    """Case 9: libzmq drops the connection before it allocates the frame."""
    at = await scene()
    at.engine.publish_raw(b"\x00" * (33 << 20))
    await at.subscribed(2)
    at.cache.clear()
    at.cache.store(at.prompts[1])
    await at.exact()


async def _incarnation(at: Scene, number: int) -> bool:
    return bool((await at.worker())["incarnation"] == number)


async def test_garbage_between_sound_batches_is_skipped_and_shown(scene: MakeScene) -> None:
    """Cases 7, 10."""
    at = await scene()
    for rubbish in (b"", b"\xc1", b"\x93\x01", b"not msgpack"):
        at.engine.publish_raw(rubbish)
    at.cache.store(at.prompts[5])
    await at.exact()
    rank = await at.rank()
    assert (rank["degraded"], rank["rejected"]["payload"]) == (True, 4)


async def test_removals_of_what_was_never_stored_change_nothing(scene: MakeScene) -> None:
    """Case 24."""
    at = await scene()
    at.engine.publish(*({"type": "BlockRemoved", "block_hashes": list(range(k, k + 500))} for k in range(1, 9000, 500)))
    at.cache.store(at.prompts[5])
    await at.exact()
