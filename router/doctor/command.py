"""`kv-router doctor URL …`: the report a person reads, or `--json`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from router.config import Overrides, load_config
from router.doctor.examine import examine
from router.doctor.findings import Diagnosis, as_json, exit_code
from router.errors import ConfigError

SIGNS = {"error": "[bold red]✗[/]", "warning": "[yellow]![/]", "info": "[dim]·[/]"}


def doctor(urls: Sequence[str], *, config: Path | None, seconds: float, probe: bool, as_json_text: bool) -> int:
    """Exit code 0 all well, 1 something is wrong, 2 an engine could not be checked. Raises ConfigError."""
    settings = load_config(config, Overrides(workers=tuple(urls)))
    if not settings.workers:
        raise ConfigError("doctor: give at least one engine URL, or --config FILE with workers")
    logger = logging.getLogger("router")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the report says it better than the log
    try:
        diagnoses = asyncio.run(examine(settings, seconds=seconds, probe=probe))
    finally:
        logger.setLevel(level)
    if as_json_text:
        print(json.dumps(as_json(diagnoses), indent=2))
    else:
        report(diagnoses, Console())
    return exit_code(diagnoses)


def report(diagnoses: Sequence[Diagnosis], console: Console) -> None:
    """Every engine with its findings, each with what to do."""
    for diagnosis in diagnoses:
        verdict = "[green]all well[/]" if diagnosis.ok else "[bold red]not well[/]"
        if not diagnosis.checked:
            verdict = "[bold yellow]could not be checked[/]"
        console.print(f"[bold]{escape(diagnosis.url)}[/]  {verdict}")
        console.print(f"  {escape(diagnosis.summary)}", style="dim", highlight=False)
        for finding in diagnosis.findings:
            console.print(f"  {SIGNS[finding.severity]} [bold]{finding.kind}[/] {escape(finding.what)}")
            console.print(f"      → {escape(finding.advice)}", highlight=False)
