"""Dashboard and alerts name only metrics there are, and every alert has its paragraph in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from router.observe.metrics import Metrics
from tests.observe.deployed import RULES, RUNBOOK, SELECTION, alerts, dashboard, metric_names, panel_queries
from tests.observe.test_metrics import worker


def exported() -> set[str]:
    page = Metrics().render([worker()], ("live",), ("hash",)).decode()
    return set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported() -> None:
    there = exported()
    for title, expression in panel_queries():
        assert metric_names(expression) <= there, title
    for alert in alerts():
        assert metric_names(alert["expr"]) <= there, alert["alert"]


def test_no_variable_of_the_dashboard_is_left_unknown() -> None:
    known = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert {"$" + name for name in known} >= SELECTION.keys() - {"$__rate_interval"}
    for title, expression in panel_queries():
        assert "$" not in expression, title
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))


def test_the_first_row_answers_whether_it_works() -> None:
    panels = dashboard()["panels"]
    assert (panels[0]["type"], panels[0]["title"]) == ("row", "Is it working?")
    first = {panel["title"] for panel in panels if panel["gridPos"]["y"] == 1}
    wanted = {"Hit rate, as engines report", "Predicted", "Best possible", "TTFT saved a request"}
    assert wanted | {"Streams not live", "Contract drift"} <= first


def test_every_alert_links_to_its_paragraph() -> None:
    headings = {line[4:].lower() for line in RUNBOOK.read_text().splitlines() if line.startswith("### KvRouter")}
    linked = set()
    for alert in alerts():
        file, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert RUNBOOK.match(file)
        assert anchor == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("critical", "warning")
        linked.add(anchor)
    assert linked == headings


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_rules_and_their_unit_tests_pass() -> None:
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules.test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
