"""A scripted worker that the whole router accepts as an engine: health, a description, and answers by a script."""

from __future__ import annotations

import json

from tests.support.http import HOST, Reply, Script, ScriptedWorker, Seen

INFO = {
    "model_path": "/models/tiny",
    "served_model_name": "tiny",
    "version": "0.5.23",
    "dp_size": 1,
    "max_total_num_tokens": 100_000,
    "startup_time": {"tokenizer_e2e": 1.5},
    "kv_events": None,
}


class ChaosEngine(ScriptedWorker):
    """`answer` is the script of every POST."""

    answer: Script

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @classmethod
    async def running(cls, answer: Script) -> ChaosEngine:
        engine = cls()
        engine.answer = answer
        engine.script = engine.dispatch
        await engine.start()
        return engine

    async def dispatch(self, seen: Seen, reply: Reply) -> None:
        self.requests.clear()  # a soak must not grow by what the test itself remembers
        if seen.target == "/server_info":
            await reply.whole(200, json.dumps(INFO).encode())
        elif seen.method == "GET":
            await reply.whole(200, b"{}")
        else:
            await self.answer(seen, reply)
