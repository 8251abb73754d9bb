"""Puts the live page together: one HTML document with its style and script inside, and the policy that allows no
others. The parts are files of `ui/`, so that each can be read."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

SCRIPTS = ("text.js", "state.js", "charts.js", "fleet.js", "worker.js", "decisions.js", "page.js")


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    headers: dict[str, str]


def load_page() -> Page:
    folder = files("router.observe") / "ui"
    style = (folder / "style.css").read_text("utf-8")
    script = "".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    script = '"use strict";\n' + script
    html = (folder / "page.html").read_text("utf-8")
    html = html.replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(
        html.encode(),
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
