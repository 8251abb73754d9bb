from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from aiohttp import web_app


@pytest.fixture(scope="module", autouse=True)
def free_what_was_stopped() -> Iterator[None]:
    """aiohttp remembers the last 1,024 handlers of applications with middleware, for the life of the process: each
    keeps a stopped router or simulated engine with its tokenizers, 10 to 25 MB. A run of all tests came to 2 GB."""
    yield
    built = getattr(web_app, "_cached_build_middleware", None)  # private: other releases may have another name, or none
    if built is not None and built.cache_info().currsize:
        built.cache_clear()
        gc.collect()
