"""Prometheus: a few queries answer for all jobs and all their ranks at once.

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
SLOWER_THAN_AT_FIRST = "(pacekeeper_rank_step_seconds / pacekeeper_rank_first_steps_seconds)"
QUERIES: Mapping[str, str] = {
    "slowdown": f"max {BY_JOB} ({COMPUTE}) / avg {BY_JOB} ({COMPUTE})",
    "pace": f"max {BY_JOB} ({PER_SAMPLE}) / quantile {BY_JOB} (0.5, {PER_SAMPLE})",
    "behind": f"max {BY_JOB} ({COMPUTE}) / (quantile {BY_JOB} (0.5, {PER_SAMPLE}) * avg {BY_JOB} ({SHARE}))",
    "step_seconds": f"quantile {BY_JOB} (0.5, {STEP})",
    "slowest_rank": f"topk {BY_JOB} (1, {PER_SAMPLE})",
    "uniform": f"min {BY_JOB} ({SLOWER_THAN_AT_FIRST})",
}
"""One number a job, by namespace and job."""
GPU_METRICS = "DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"
GPU_QUERY = f'{{__name__=~"{GPU_METRICS}"}} > 0'


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
        return Metrics(
            slowdown=self.figures.get("slowdown", {}).get(key),
            behind=self.figures.get("behind", {}).get(key),
            pace=self.figures.get("pace", {}).get(key),
            step_seconds=self.figures.get("step_seconds", {}).get(key),
            slowest_rank=self.slowest.get(key),
            uniform=self.figures.get("uniform", {}).get(key),
            gpu=self.gpu,
            unavailable=self.unavailable,
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
        results = {name: self._query(query) for name, query in QUERIES.items()}
        figures = {
            name: {_job(series): value for series, value in rows if math.isfinite(value)}
            for name, rows in results.items()
            if name != "slowest_rank"
        }
        slowest = {_job(series): int(series.get("rank", -1)) for series, _ in results["slowest_rank"]}
        gpu = tuple(
            GpuValue(
                node=series.get(self._dcgm_node_label) or series.get("node", ""),
                gpu=series.get("gpu", ""),
                metric=series["__name__"],
                value=value,
            )
            for series, value in self._query(GPU_QUERY)
        )
        return Sample(now, figures, slowest, gpu, unavailable="")

    def _query(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        assert self._client is not None
        rows: list[dict[str, Any]] = self._client.custom_query(query)
        return [(row["metric"], float(row["value"][1])) for row in rows]


def _job(series: Mapping[str, str]) -> tuple[str, str]:
    return series.get("namespace", ""), series.get("trainingjob", "")
