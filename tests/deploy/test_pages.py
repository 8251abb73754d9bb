"""README.md and deploy/README.md: links lead somewhere, pictures are there and small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.conftest import DEPLOY

ROOT = DEPLOY.parent
PAGES = [ROOT / "README.md", DEPLOY / "README.md"]
MAX_PICTURE_BYTES = 200_000


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor or "") of every link within the repository."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    return [((page.parent / file).resolve() if file else page, anchor) for file, anchor in found if ":" not in file]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "deploy/README.md"])
def test_every_link_leads_somewhere(page: Path) -> None:
    there = links(page)
    assert len(there) > 5
    for file, anchor in there:
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file.name}#{anchor}"


def test_every_picture_is_small_and_shown() -> None:
    pictures = set((DEPLOY / "screenshots").glob("*"))
    assert pictures
    assert pictures <= {file for page in PAGES for file, _ in links(page)}
    for picture in pictures:
        assert picture.stat().st_size <= MAX_PICTURE_BYTES, picture.name
