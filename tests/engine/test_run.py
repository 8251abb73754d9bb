"""The engine as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

import aiohttp

from tests.engine.support import TIMEOUT_S

PROGRAM = """
import argparse, sys
from router.engine.options import add_engine_arguments, options_from
from router.engine.run import run_engine
parser = argparse.ArgumentParser()
add_engine_arguments(parser)
sys.exit(run_engine(options_from(parser.parse_args())))
"""


async def spawn(*flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *flags, stdout=pipe, stderr=pipe)


async def test_sigterm_lets_the_running_stream_finish_and_exits_with_0(http: aiohttp.ClientSession) -> None:
    process = await spawn("--port", "0", "--decode-ms", "10")
    try:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)).decode()
        url = next(word for word in ready.split() if word.startswith("http://"))
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 20}, "stream": True}
        async with http.post(f"{url}/generate", json=body) as response:
            process.send_signal(signal.SIGTERM)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_is_said_and_exits_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await spawn("--port", str(port))
        _, stderr = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 1
    assert str(port) in stderr.decode()
    assert "Traceback" not in stderr.decode()
