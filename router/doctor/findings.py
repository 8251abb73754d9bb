"""What doctor found, its JSON shape (interface.md), and the exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
ALL_WELL, SOMETHING_WRONG, COULD_NOT_CHECK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: hits are lost or requests fail; `warning`: the router is blind or slow to recover; `info`: good to know.

    `advice` says what to do, with the engine flag or configuration key.
    """

    severity: Severity
    kind: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One engine. `checked` is false when it never described itself: then only the reason is known."""

    url: str
    checked: bool
    findings: tuple[Finding, ...]
    summary: str
    """One line: what the engine is and what was heard."""

    @property
    def ok(self) -> bool:
        return self.checked and all(finding.severity != "error" for finding in self.findings)


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Something wrong beats could-not-check: it is the surer knowledge."""
    if any(d.checked and not d.ok for d in diagnoses):
        return SOMETHING_WRONG
    return COULD_NOT_CHECK if any(not d.checked for d in diagnoses) else ALL_WELL


def as_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    return {
        "engines": [
            {
                "url": d.url,
                "ok": d.ok,
                "checked": d.checked,
                "summary": d.summary,
                "findings": [
                    {"severity": f.severity, "kind": f.kind, "what": f.what, "advice": f.advice} for f in d.findings
                ],
            }
            for d in diagnoses
        ]
    }
