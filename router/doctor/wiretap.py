"""Hears everything on one event port, whatever its topic: what the router's own subscription would filter away."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from router.stream.sockets import speaks_ipv6_only
from router.stream.zmtp import MAX_FRAME_BYTES

RECEIVE_LIMIT = 1000
MAX_TOPICS = 16


@dataclass(slots=True)
class Heard:
    """Messages by topic on one port, and those that were not three frames."""

    topics: Counter[str] = field(default_factory=Counter)
    misshapen: int = 0


async def listen(context: zmq.asyncio.Context, endpoint: str, heard: Heard) -> None:
    """Fills `heard` until cancelled. An endpoint that cannot be resolved or connected leaves it empty."""
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_LIMIT)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            socket.setsockopt(zmq.IPV6, await speaks_ipv6_only(endpoint))
        except (OSError, UnicodeError):
            return
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                heard.misshapen += 1
            elif (topic := frames[0].decode("utf-8", "backslashreplace")) in heard.topics or (
                len(heard.topics) < MAX_TOPICS
            ):
                heard.topics[topic] += 1
    except asyncio.CancelledError:
        return
    finally:
        socket.close(linger=0)
