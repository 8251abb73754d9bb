"""Turns for other threads, above all the event loop, between the steps of a long loop.

CPython gives the interpreter's lock away when a Python function is entered, or at the end of a loop's round: neither
happens in compiled code, which would keep the lock for as long as a prompt of millions of characters takes. So this
module is never compiled (see pyproject.toml). Not to be called with a lock of our own held, which the loop may want.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import TypeVar

_Item = TypeVar("_Item")

AT_ONCE = 256
"""Of what takes up to some microseconds each."""


def give_way() -> None:
    """Being called is all it takes."""


def in_turns(items: Collection[_Item]) -> Iterable[_Item]:
    """The items themselves, with a turn in front and after every `AT_ONCE` of them."""
    return items if len(items) <= AT_ONCE else chain.from_iterable(_slices(iter(items)))


def _slices(items: Iterator[_Item]) -> Iterator[list[_Item]]:
    while some := list(islice(items, AT_ONCE)):
        yield some
