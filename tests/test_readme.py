"""The README's tables and commands hold: reasons and error codes are complete, the commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.cli import main
from router.errors import ERRORS
from router.policy.decide import REASONS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def rows(columns: int) -> dict[str, tuple[str, ...]]:
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", README, re.MULTILINE)
    cells = {name: tuple(cell.strip() for cell in rest.split("|")) for name, rest in found}
    return {name: row for name, row in cells.items() if len(row) == columns}


def test_every_decision_reason_is_explained_as_the_code_means_it() -> None:
    assert rows(1) == {name: (meaning,) for name, meaning in REASONS.items()}


def test_every_error_code_is_listed_with_its_status() -> None:
    assert rows(2) == {code: (str(kind.status), kind.meaning) for code, kind in ERRORS.items()}


@pytest.mark.parametrize(
    "command", [["serve", "--help"], ["demo", "--help"], ["engine", "--help"], ["bench", "index", "--help"]]
)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 0
    assert "usage: kv-router" in capsys.readouterr().out
