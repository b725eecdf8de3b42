"""Names of all series that Pacekeeper exports or reads, taken from the code that does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from pacekeeper.runtime import RuntimeFolder
from pacekeeper.sidecar.connections import ConnectionSampler
from pacekeeper.sidecar.metrics import WorkerMetrics
from pacekeeper.sidecar.ranks import RankRings
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper_operator import metrics
from tests.support.chart import CHART

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def list_operator_metrics() -> frozenset[str]:
    wrapped = [found for found in vars(metrics).values() if isinstance(found, MetricWrapperBase)]
    return _collect_names(family for metric in wrapped for family in metric.describe())


def list_sidecar_metrics() -> frozenset[str]:
    with tempfile.TemporaryDirectory() as folder:
        runtime = RuntimeFolder(Path(folder)).create()
        settings = SidecarSettings(runtime, "j", "j-w0-0", "https://nobody", "", Path(folder, "token"))
        return _collect_names(WorkerMetrics(settings, RankRings(runtime, 8), ConnectionSampler(runtime)).collect())


def list_dcgm_metrics() -> frozenset[str]:
    lines = (CHART / "files/dcgm-counters.csv").read_text().splitlines()
    return frozenset(line.split(",")[0] for line in lines if line and not line.startswith("#"))


def _collect_names(families: Iterable[Metric]) -> frozenset[str]:
    return frozenset(family.name + suffix for family in families for suffix in _SUFFIXES[family.type])
