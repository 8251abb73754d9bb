"""The picker where Envoy's two protocols meet it."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.contract.url import WorkerUrl
from router.envoy.addresses import AddressBook
from tests.envoy.conftest import Pickers, StartEngine


async def test_a_pick_given_up_while_a_name_is_looked_up_leaves_no_load(
    pickers: Pickers, fake_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that is slow, and a client that does not wait for it."""
    engine = await fake_engine()
    running = await pickers(engine, envoy={"ext_authz": {"port": 0}})
    asked = asyncio.Event()

    async def silent(_: AddressBook, __: WorkerUrl) -> str | None:
        asked.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(AddressBook, "known", lambda _, __: None)
    monkeypatch.setattr(AddressBook, "find", silent)
    assert running.service.envoy is not None
    picker = running.service.envoy._picker
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
    pick = asyncio.create_task(picker.pick("/v1/completions", {}, body, "r-1"))
    await asyncio.wait_for(asked.wait(), 10)
    assert [rank["inflight_requests"] for rank in await running.ranks()] == [1]
    pick.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pick
    assert [rank["inflight_requests"] for rank in await running.ranks()] == [0]
