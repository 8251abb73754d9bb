"""Keys and tokens: held so that nothing prints them by accident (case 103)."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path

MAX_SECRET_BYTES = 8192
MASK = "********"
_HEADER_SAFE = re.compile(r"[!-~]+")


class Secret:
    """One secret text. `repr`, `str` and formatting show a mask; only `reveal()` gives it away."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not _HEADER_SAFE.fullmatch(value) or len(value) > MAX_SECRET_BYTES:
            raise ValueError(f"a secret is 1 to {MAX_SECRET_BYTES} printable ASCII characters without spaces")
        self._value = value

    def reveal(self) -> str:
        return self._value

    def matches(self, candidate: bytes) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self._value.encode(), candidate)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._value.encode())

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    __str__ = __repr__

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not serialised")


def resolve_secret(value: object, env: Mapping[str, str], folder: Path) -> Secret:
    """Text, `{file: PATH}` (relative to `folder`, one trailing line end dropped) or `{env: NAME}` → Secret.

    Raises ValueError whose text never contains the secret.
    """
    if isinstance(value, str):
        return Secret(value)
    match value:
        case {"file": str(path), **rest} if not rest and "\0" not in path:
            return _named(f"file {path}", _read(folder / path))
        case {"env": str(name), **rest} if not rest:
            if name not in env:
                raise ValueError(f"environment variable {name} is not set")
            return _named(f"environment variable {name}", env[name])
    raise ValueError("write the secret as quoted text, or as {file: PATH} or {env: NAME}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 3)
    except OSError as error:
        raise ValueError(f"file {path} cannot be read: {error.strerror}") from None
    return data.decode("latin-1").removesuffix("\n").removesuffix("\r")


def _named(origin: str, text: str) -> Secret:
    try:
        return Secret(text)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
