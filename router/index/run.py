"""What a run is made of."""

from __future__ import annotations

from msgspec import Struct


class Run(Struct, gc=False, eq=False):
    """`is_chain`: its keys were found equal to a chain that was asked for. Unknown to the garbage collector, which need
    not walk through millions of these: a run refers to nothing but ints."""

    mask: int
    keys: tuple[int, ...]
    is_chain: bool = False
