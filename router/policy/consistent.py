"""Where an unseen prefix goes among ranks that cost the same: to the one every router of the fleet would choose. Pure.

Rendezvous hashing over (block of the prompt, rank): routers that know nothing of each other, or have just started, put
the prompts of one conversation or burst on one rank instead of scattering them over the engines' caches. Different
prompts still spread evenly (public case 50).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

AHEAD_TOKENS = 2048
"""The block so far beyond the cached prefix is looked at: system prompts are shared by unlike conversations."""
_MASK = (1 << 64) - 1


def anchor(worker: str, rank: int) -> int:
    """64 bits that stand for a rank of the worker with this URL, the same in every process."""
    return int.from_bytes(blake2b(f"{worker} {rank}".encode(), digest_size=8).digest(), "big")


def meeting_key(chain: Sequence[int], width: int, held_tokens: int) -> int:
    """The block that decides, of a prompt's block keys (never empty) of which `held_tokens` are cached somewhere."""
    return chain[min((held_tokens + AHEAD_TOKENS) // width, len(chain)) - 1]


def meeting_place(key: int, anchors: Sequence[int]) -> int:
    """Where the mix of key and anchor is highest: each as likely as any other, whoever else comes or goes."""
    return max(range(len(anchors)), key=lambda position: _mixed(key ^ anchors[position]))


def _mixed(value: int) -> int:
    """splitmix64's finaliser: every bit of the input moves every bit of the output."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
