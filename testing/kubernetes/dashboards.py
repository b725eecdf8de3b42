"""Grafana's dashboards of the chart, as tests read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from testing.kubernetes.chart import CHART

DASHBOARDS: Mapping[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(CHART.glob("files/dashboards/*.json"))
}
"""By their files' names."""


def list_panels(name: str) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = DASHBOARDS[name]["panels"]
    return panels


def list_queries(name: str, **variables: str) -> list[str]:
    """All its queries, with Grafana's variables and the dashboard's own filled in."""
    replacements = {"__rate_interval": "1m", "__range": "1h", **variables}
    queries = [target["expr"] for panel in list_panels(name) for target in panel.get("targets", ())]
    for variable, value in replacements.items():
        queries = [query.replace(f"${variable}", value) for query in queries]
    assert not [query for query in queries if "$" in query]
    return queries
