"""Reads what operators deploy: the dashboard's and the alerts' expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
RUNBOOK = DEPLOY / "README.md"
DASHBOARD = DEPLOY / "grafana" / "kv-router.json"
SELECTION = {"$job": ".*", "$instance": ".*", "$worker": ".*", "$__rate_interval": "20s"}


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    """(panel's title, expression) with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in SELECTION.items():
                text = text.replace(name, value)
            yield panel["title"], text


def metric_names(expression: str) -> set[str]:
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"kv_router_[a-z_]+", expression)}
