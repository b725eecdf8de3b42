"""Grafana's dashboards in the chart: they query series that exist, in valid PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pacekeeper_operator.api.conditions import JobCondition
from testing.kubernetes.chart import RELEASE, render_chart
from testing.kubernetes.dashboards import DASHBOARDS, list_panels, list_queries
from testing.operators import metric_names
from testing.operators.prometheus import run_prometheus

each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_prometheus(Path(tmp_path_factory.mktemp("prometheus")), "127.0.0.1:9") as found:
        yield found


@each_dashboard
def test_prometheus_accepts_every_query(name: str, url: str) -> None:
    for query in list_queries(name, namespace="team-a", trainingjob="gpt"):
        answer = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=60)
        assert answer.ok, f"{query}: {answer.text}"


@each_dashboard
def test_every_series_exists(name: str) -> None:
    known = (
        metric_names.list_operator_metrics() | metric_names.list_sidecar_metrics() | metric_names.list_dcgm_metrics()
    )
    text = " ".join(list_queries(name, namespace="ns", trainingjob="j"))
    assert set(re.findall(r"\b(?:pacekeeper_|DCGM_)\w+", text)) <= known
    conditions = re.findall(r'\bcondition(?:=|!=|=~|!~)"([^"]*)"', text)
    assert {value for values in conditions for value in values.split("|")} <= {*JobCondition}


@each_dashboard
def test_panels_do_not_overlap(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in list_panels(name):
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({panel["id"] for panel in list_panels(name)}) == len(list_panels(name))


@each_dashboard
def test_every_panel_queries_the_selected_prometheus(name: str) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in list_panels(name):
        if panel["type"] != "row":
            assert panel["datasource"] == source
            assert all(target["datasource"] == source for target in panel["targets"])
    assert DASHBOARDS[name]["templating"]["list"][0]["type"] == "datasource"


def test_dashboards_link_to_each_other() -> None:
    uids = {board["uid"] for board in DASHBOARDS.values()}
    assert {link["url"] for board in DASHBOARDS.values() for link in board["links"]} == {f"/d/{uid}" for uid in uids}


def test_the_chart_installs_the_dashboards_unchanged() -> None:
    assert list_config_maps() == []
    found = list_config_maps("--set", "monitoring.dashboards=true,monitoring.dashboardLabels.team=platform")
    assert {item["metadata"]["name"] for item in found} == {f"{RELEASE}-dashboard-{name}" for name in DASHBOARDS}
    for item in found:
        labels = item["metadata"]["labels"]
        assert (labels["grafana_dashboard"], labels["team"]) == ("1", "platform")
        ((file, text),) = item["data"].items()
        assert json.loads(text) == DASHBOARDS[file.removeprefix("pacekeeper-").removesuffix(".json")]


def list_config_maps(*arguments: str) -> list[dict[str, Any]]:
    found = [item for item in render_chart(*arguments) if item["kind"] == "ConfigMap"]
    return [item for item in found if "-dashboard-" in item["metadata"]["name"]]
