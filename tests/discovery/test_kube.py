"""The stand-in API server against the real client: what `kubectl get --watch` accepts is near enough."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.kube import FakeKube, pod
from tests.support.waiting import until

KUBECTL = shutil.which("kubectl")


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
async def test_kubectl_lists_and_watches_the_stand_in(kube: FakeKube, tmp_path: Path) -> None:
    assert KUBECTL is not None
    kube.page_limit = 2
    for number in range(3):
        kube.put(pod(f"p{number}", f"10.0.0.{number}"))
    output = (tmp_path / "out").open("wb")
    running = await asyncio.create_subprocess_exec(
        *(KUBECTL, "--server", kube.url, "get", "pods", "-n", "default", "-l", "app=sglang"),
        *("--watch", "--output-watch-events", "-o", "json", "--chunk-size", "2"),
        stdout=output,
        stderr=output,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    output.close()

    def seen() -> list[list[str | None]]:
        text, decoder, found = (tmp_path / "out").read_text(), json.JSONDecoder(), []
        while text.strip():
            try:
                event, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                break  # still being written
            for thing in event["object"].get("items", [event["object"]]):  # kubectl shows each page of the list whole
                found.append([event["type"], thing["metadata"].get("name")])
            text = text[end:].lstrip()
        return found

    try:
        await until(lambda: kube.watching, "kubectl watches", 20)
        kube.bookmark()
        kube.put(pod("p1", "10.0.0.1", ready=False))
        kube.delete("p2")
        await until(lambda: len(seen()) >= 6, "six events")
    finally:
        running.terminate()
        await running.wait()
    assert seen() == [
        ["ADDED", "p0"],
        ["ADDED", "p1"],
        ["ADDED", "p2"],
        ["BOOKMARK", None],
        ["MODIFIED", "p1"],
        ["DELETED", "p2"],
    ]
