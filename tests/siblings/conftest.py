from __future__ import annotations

from tests.e2e.conftest import context, fake_engine, start_router

__all__ = ["context", "fake_engine", "start_router"]
