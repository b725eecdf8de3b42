"""Names of all series that Pacekeeper exports or reads, taken from the code that does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.connection_sampler import ConnectionSampler
from pacekeeper.sidecar.prometheus_metrics import WorkerMetrics
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper_operator import metrics
from testing.kubernetes.chart import CHART

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def list_operator_metrics() -> frozenset[str]:
    wrappers = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return _collect_names(family for metric in wrappers for family in metric.describe())


def list_sidecar_metrics() -> frozenset[str]:
    with tempfile.TemporaryDirectory() as folder:
        runtime = RuntimeFolder(Path(folder)).create()
        settings = SidecarSettings(runtime, "j", "j-w0-0", "https://unused", "", Path(folder, "token"))
        return _collect_names(WorkerMetrics(settings, RankRings(runtime, 8), ConnectionSampler(runtime)).collect())


def list_dcgm_metrics() -> frozenset[str]:
    lines = (CHART / "files/dcgm-counters.csv").read_text().splitlines()
    return frozenset(line.split(",")[0] for line in lines if line and not line.startswith("#"))


def _collect_names(families: Iterable[Metric]) -> frozenset[str]:
    return frozenset(family.name + suffix for family in families for suffix in _SUFFIXES[family.type])
