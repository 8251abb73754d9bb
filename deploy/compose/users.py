"""Users in multi-turn chats, without end: something for the dashboard to show. `python3 users.py http://router:8080`"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

from router.demo.workload import Conversation, User, make_workload

ENGINES = 4
ROUND_S = 60.0


async def ask(session: aiohttp.ClientSession, messages: list[dict[str, str]], max_tokens: int) -> str:
    """One streamed turn; the answer's text."""
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "stream": True}
    text: list[str] = []
    async with session.post("/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                text += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    return "".join(text)


async def talk(session: aiohttp.ClientSession, conversation: Conversation, started_s: float) -> None:
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        await asyncio.sleep(max(0.0, started_s + turn.at_s - time.monotonic()))
        messages.append({"role": "user", "content": turn.message})
        try:
            messages.append({"role": "assistant", "content": await ask(session, messages, turn.max_tokens)})
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return


async def use(session: aiohttp.ClientSession, user: User, started_s: float) -> None:
    for conversation in user.conversations:
        await talk(session, conversation, started_s)


async def main(base: str) -> None:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(base, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        seed = 0
        while True:
            seed += 1
            started_s = time.monotonic()
            await asyncio.gather(*(use(session, user, started_s) for user in make_workload(ENGINES, ROUND_S, seed)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
