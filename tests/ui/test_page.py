"""The page as a document: self-contained, and locked to what it contains."""

from __future__ import annotations

import base64
import hashlib
import re

from router.observe.page import load_page

PAGE = load_page()
HTML = PAGE.body.decode()


def test_the_page_asks_for_nothing_outside() -> None:
    assert "/* style */" not in HTML
    assert "/* script */" not in HTML
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", HTML)
    assert not re.search(r"@import|\bimport\(", HTML)


def test_the_policy_allows_exactly_the_style_and_script_that_are_in_it() -> None:
    policy = PAGE.headers["Content-Security-Policy"]
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"\s(?:style|on[a-z]+)=", HTML.split("<script>")[0])


def test_the_page_never_writes_markup_from_data() -> None:
    """A model or worker name is a client's or an operator's text (case 105)."""
    script = HTML.split("<script>")[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
