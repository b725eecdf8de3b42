"""The chart's alerts name only what exists: series, values of labels, runbooks. tests/cluster covers when they fire."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineVerdict
from pacekeeper_operator.api.training_job import JobPhase
from testing.kubernetes.chart import CHART, REPOSITORY, render_chart
from testing.operators import metric_names

GROUPS = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ON_CALL = (REPOSITORY / "docs/on-call.md").read_text()
VALUES = {
    "phase": {*JobPhase, *QuarantinePhase},
    "reason": {*Reason, *QuarantineVerdict},
    "condition": {*JobCondition},
}
"""Values of the labels that a rule may select."""

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


@each_rule
def test_the_series_of_a_rule_exist(rule: dict[str, Any]) -> None:
    queried_values = set(re.findall(r"\b(?:pacekeeper_|DCGM_)\w+", rule["expr"]))
    known = (
        metric_names.list_operator_metrics() | metric_names.list_sidecar_metrics() | metric_names.list_dcgm_metrics()
    )
    assert queried_values
    assert queried_values <= known


@each_rule
def test_label_values_in_a_rule_exist(rule: dict[str, Any]) -> None:
    for label, values in re.findall(r'\b(phase|reason|condition)(?:=|!=|=~|!~)"([^"]*)"', rule["expr"]):
        assert set(values.split("|")) <= VALUES[label]


@each_rule
def test_a_rule_has_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "docs/on-call.md"
    assert anchor == rule["alert"].lower(), "GitHub's anchor of the section with its name"
    section = re.search(rf"^### {rule['alert']}\n(.+?)(?=^##|\Z)", ON_CALL, re.MULTILINE | re.DOTALL)
    assert section
    assert re.search(r"^kubectl ", section[1], re.MULTILINE), "the runbook begins with what to check"


def test_each_rule_has_test_cases() -> None:
    cases = {path.stem for path in (REPOSITORY / "tests/cluster/alerts").glob("*.yaml")}
    assert cases == {rule["alert"] for rule in RULES}
    assert len(RULES) == len(cases)


def test_the_docs_list_all_alerts() -> None:
    page = (REPOSITORY / "docs/monitoring.md").read_text()
    in_table = set(re.findall(r"^\| `(Pacekeeper\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert in_table == {(rule["alert"], rule["labels"]["severity"]) for rule in RULES}


def test_the_chart_installs_the_rules_with_the_platforms_runbook_url() -> None:
    page = "https://git.example/pacekeeper/docs/on-call.md"
    values = ("--set", f"prometheusRule.enabled=true,prometheusRule.runbookUrl={page}")
    (found,) = [item for item in render_chart(*values) if item["kind"] == "PrometheusRule"]
    text = (CHART / "files/alerts.yaml").read_text().replace("docs/on-call.md#", f"{page}#")
    assert found["spec"] == yaml.safe_load(text)
    assert not [item for item in render_chart() if item["kind"] == "PrometheusRule"]
