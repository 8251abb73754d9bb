"""On the path of test_disaggregation's engines. SGLang 0.5.23 hands KV over from pinned memory and waits for events;
on a machine without an accelerator memory is ordinary here, and every event has happened already."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


class _Happened:
    """A CUDA event, or stream, where everything is done when the call returns."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


if os.environ.get("SGLANG_USE_CPU_ENGINE"):
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
            setattr(torch, name, _unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda tensor, *args, **options: tensor
        torch.cuda.Event = _Happened
        torch.cuda.current_stream = _Happened
