"""The recorded bytes of real publishers (shared/captures/wire, made for this project), kept as one small archive."""

from __future__ import annotations

import functools
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parent / "data" / "wire.tar.xz"


@dataclass(frozen=True)
class Frame:
    """One SUB message: topic, sequence number, msgpack payload."""

    topic: str
    seq: int
    payload: bytes


@dataclass(frozen=True)
class Reply:
    """One ROUTER reply as a DEALER sees it: every frame, the empty delimiter included."""

    request_seq: int
    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Capture:
    """`side` is the sidecar JSON: settings, `ops` and `truth`. `frames` is the live stream, `replies` the replay's."""

    name: str
    side: dict[str, Any]
    frames: tuple[Frame, ...]
    replies: tuple[Reply, ...]


@functools.cache
def _files() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        members = [m for m in archive.getmembers() if m.isfile()]
        return {m.name: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def names(prefix: str = "") -> list[str]:
    """Captures that have a live stream, sorted."""
    return sorted(n[:-6] for n in _files() if n.endswith(".jsonl") and ".replay." not in n and n.startswith(prefix))


@functools.cache
def capture(name: str) -> Capture:
    files = _files()
    frames = [json.loads(line) for line in files[f"{name}.jsonl"].splitlines()]
    replies = [json.loads(line) for line in files.get(f"{name}.replay.jsonl", b"").splitlines()]
    return Capture(
        name,
        json.loads(files[f"{name}.json"]),
        tuple(Frame(f["topic"], f["seq"], bytes.fromhex(f["payload_hex"])) for f in frames),
        tuple(Reply(r["request_seq"], tuple(bytes.fromhex(h) for h in r["frames_hex"])) for r in replies),
    )


def describe_matrix() -> list[dict[str, Any]]:
    """116 server settings → the descriptor SGLang 0.5.23 gave. Rows named "dp-attention" are not real set-ups."""
    rows: list[dict[str, Any]] = json.loads(_files()["describe_matrix.json"])
    return rows
