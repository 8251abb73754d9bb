"""Answers of real SGLang 0.5.23 and vLLM 0.32 servers as they came off the socket (recorded.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recording:
    path: str
    raw: bytes

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    def body(self) -> bytes:
        """The body without its framing, by a reader of the test's own."""
        rest = self.raw.partition(b"\r\n\r\n")[2]
        if b"chunked" not in self.head.lower():
            return rest
        body = b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                return body
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]


RECORDINGS = {
    name: Recording(entry["path"], entry["raw"].encode())
    for name, entry in json.loads((Path(__file__).parent / "recorded.json").read_text()).items()
}
