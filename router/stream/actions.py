"""What the sequence tracker wants done, in order. The subscriber does it."""

from __future__ import annotations

from typing import NamedTuple


class Apply(NamedTuple):
    """Give this batch to the sink."""

    seq: int
    payload: bytes


class Reset(NamedTuple):
    """Whatever the rank was believed to hold is void."""

    reason: str


class AskReplay(NamedTuple):
    """Ask the replay socket for every batch from `start`; answers carry `ask`, so that late ones are told apart."""

    ask: int
    start: int


class CancelReplay(NamedTuple):
    """The answer to `ask` is no longer wanted."""

    ask: int


class StateChanged(NamedTuple):
    """The stream's state, why, and how far back its history reaches: complete or partial."""

    state: str
    reason: str
    history: str


class Gap(NamedTuple):
    """A hole was seen."""


class Lost(NamedTuple):
    """So many batches will never be had."""

    batches: int


class Restarted(NamedTuple):
    """The publisher process is another one, or said that it ends."""


class Replayed(NamedTuple):
    """A replay effort is over: filled, partial, unfilled, timeout, empty or cancelled."""

    outcome: str


class Rejected(NamedTuple):
    """A message was dropped whole."""

    why: str


Action = Apply | Reset | AskReplay | CancelReplay | StateChanged | Gap | Lost | Restarted | Replayed | Rejected
