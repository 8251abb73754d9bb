"""Which build runs: a wheel's hot path may be compiled (.build/hatch_build.py)."""

from __future__ import annotations

from importlib.util import find_spec


def kind() -> str:
    """ "compiled" or "pure Python"."""
    found = find_spec("router.hashing")
    return "pure Python" if found is None or found.origin is None or found.origin.endswith(".py") else "compiled"
