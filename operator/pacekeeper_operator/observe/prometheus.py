"""Prometheus: one query answers for all jobs and all their ranks at once.

The client is synchronous, so it works in a thread, with a time-out and without retries: the next look comes soon.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.exceptions import RequestException
from urllib3.util.retry import Retry

from ..observation import NOT_ASKED, GpuValue, Metrics

TIMEOUT_SECONDS = 3
BY_JOB = "by (namespace, trainingjob)"


COMPUTE = "pacekeeper_rank_compute_seconds"
PER_SAMPLE = "pacekeeper_rank_compute_seconds_per_sample"
SHARE = "pacekeeper_rank_share"
STEP = "pacekeeper_rank_step_seconds"
WAIT = "pacekeeper_rank_wait_seconds"
FIRST_STEPS = "pacekeeper_rank_first_steps_seconds"
FIGURES: Mapping[str, str] = {
    "slowdown": f"max {BY_JOB} ({COMPUTE}) / avg {BY_JOB} ({COMPUTE})",
    "pace": f"max {BY_JOB} ({PER_SAMPLE}) / quantile {BY_JOB} (0.5, {PER_SAMPLE})",
    "behind": f"max {BY_JOB} ({COMPUTE}) / (quantile {BY_JOB} (0.5, {PER_SAMPLE}) * avg {BY_JOB} ({SHARE}))",
    "waiting": f"min {BY_JOB} ({WAIT} / {STEP})",
    "throughput": f"sum {BY_JOB} ({SHARE} / {STEP})",
    "step_seconds": f"quantile {BY_JOB} (0.5, {STEP})",
    "uniform": f"min {BY_JOB} ({STEP} / {FIRST_STEPS})",
    "ranks": f"count {BY_JOB} (pacekeeper_rank_step)",
    "least_step": f"min {BY_JOB} (pacekeeper_rank_step)",
    "scrape_age": f"max {BY_JOB} (time() - timestamp(pacekeeper_rank_step))",
}
"""One number a job."""
SLOWEST = f"topk {BY_JOB} (1, {PER_SAMPLE})"
"""The series of the slowest rank of each job."""
GPU = '{__name__=~"DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"} > 0'
"""The GPUs of the cluster that have something to say."""
QUERY = " or ".join(
    f'label_replace({expression}, "figure", "{name}", "", "")'
    for name, expression in {**FIGURES, "slowest": SLOWEST, "gpu": GPU}.items()
)
"""All of it in one request; the label `figure` tells the answers apart."""


@dataclass(frozen=True)
class Sample:
    """One look at Prometheus. `figures` are by query and (namespace, job)."""

    at: float = 0.0
    figures: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    slowest: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gpu: tuple[GpuValue, ...] = ()
    unavailable: str = NOT_ASKED

    def of(self, namespace: str, job: str) -> Metrics:
        key = (namespace, job)
        figures: dict[str, Any] = {name: values[key] for name, values in self.figures.items() if key in values}
        return Metrics(
            **figures, slowest_rank=self.slowest.get(key), gpu=self.gpu, unavailable=self.unavailable, at=self.at
        )


class Prometheus:
    """Asks Prometheus at `url`; an empty one is always away."""

    def __init__(self, url: str, dcgm_node_label: str) -> None:
        self._url = url
        self._dcgm_node_label = dcgm_node_label
        self._client = PrometheusConnect(url=url, retry=Retry(total=0), timeout=TIMEOUT_SECONDS) if url else None

    async def sample(self, now: float) -> Sample:
        """Never raises for Prometheus' sake: what is wrong stands in the sample."""
        if self._client is None:
            return Sample(now, unavailable="no Prometheus is configured (prometheus.url in the chart's values)")
        try:
            return await asyncio.to_thread(self._ask, now)
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            reason = f"Prometheus at {self._url} does not answer: {type(error).__name__}"
            return Sample(now, unavailable=reason)

    def _ask(self, now: float) -> Sample:
        assert self._client is not None
        figures: dict[str, dict[tuple[str, str], float]] = {name: {} for name in FIGURES}
        slowest: dict[tuple[str, str], int] = {}
        gpu = []
        rows: list[dict[str, Any]] = self._client.custom_query(QUERY)
        for row in rows:
            series, value = row["metric"], float(row["value"][1])
            job = series.get("namespace", ""), series.get("trainingjob", "")
            match series["figure"]:
                case "gpu":
                    gpu.append(self._gpu(series, value))
                case "slowest":
                    slowest[job] = int(series["rank"])
                case figure if math.isfinite(value):
                    figures[figure][job] = value
        return Sample(now, figures, slowest, tuple(gpu), unavailable="")

    def _gpu(self, series: Mapping[str, str], value: float) -> GpuValue:
        node = series.get(self._dcgm_node_label) or series.get("node", "")
        return GpuValue(node, series.get("gpu", ""), series["__name__"], value)
