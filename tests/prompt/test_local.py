"""Where a prompt with media may end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.local import _SAFE_END, _safe_end

texts = st.lists(st.sampled_from(["a", " ", "  ", "\n", ".", "a b", "." * 9]), max_size=30).map("".join)


@given(texts, st.integers(3, 12))
def test_the_safe_end_is_the_last_one_of_the_whole_text(text: str, chars: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.prompt.local._END_CHARS", chars)
        assert _safe_end(text) == max((match.end() for match in _SAFE_END.finditer(text)), default=0)
