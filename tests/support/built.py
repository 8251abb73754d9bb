"""Marks for tests that only one of the two builds can run (`router.build`)."""

from __future__ import annotations

import pytest

from router import build

interpreted = pytest.mark.skipif(
    build.kind() == "compiled", reason="replaces a function that compiled code calls without looking it up"
)
