"""Prometheus: one query answers for all GPUs, and for all jobs and their ranks, at once.

What is counted was scraped from the pod that it speaks for: `namespace`, `pod` and `trainingjob` are set by Prometheus'
own service discovery (the chart's PodMonitors), and a worker that exports them, too, finds its own renamed. A row that
makes no sense costs that row.

The client is synchronous, so it works in a thread, with a time-out and without retries: the next look comes soon.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.exceptions import RequestException
from urllib3.util.retry import Retry

from ..metrics import GPU_SERIES_VOUCHED, PROMETHEUS_BAD_ROWS
from ..observation import NOT_ASKED, GpuValue, Metrics

TIMEOUT_SECONDS = 3
BY_JOB = "by (namespace, trainingjob)"
WORKERS = '{pod=~".+-w[0-9]+-[0-9]+",rank=~"[0-9]{1,7}"}'
"""Nobody else's pod speaks for a job, and only of ranks."""
LAST_STEP = f"pacekeeper_rank_step{WORKERS}"
FIGURES: Mapping[str, str] = {
    "ranks": f"count {BY_JOB} ({LAST_STEP})",
    "least_step": f"min {BY_JOB} ({LAST_STEP})",
    "scrape_age": f"max {BY_JOB} (clamp_min(time() - timestamp({LAST_STEP}), 0))",
}
"""One number a job: signs of life of ranks whose sidecars the operator does not hear. How they train, sidecars tell."""
GPU_NAMES = "DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"

log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Sample:
    """One look at Prometheus. `figures` are by query and (namespace, job)."""

    at: float = 0.0
    figures: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    gpu: tuple[GpuValue, ...] = ()
    unavailable: str = NOT_ASKED
    unvouched: str = ""  # why GPU series are no witness against a node; "": they are

    def of(self, namespace: str, job: str) -> Metrics:
        key = (namespace, job)
        figures: dict[str, Any] = {name: values[key] for name, values in self.figures.items() if key in values}
        return Metrics(**figures, gpu=self.gpu, gpu_unvouched=self.unvouched, unavailable=self.unavailable, at=self.at)


Rows = Sequence[Mapping[str, Any]]
"""Of an answer's `result`: each the labels of a series and its value."""
Ask = Callable[[str], Awaitable[Rows]]
"""Raises requests' RequestException, or PrometheusApiClientException."""


class Prometheus:
    """Asks Prometheus at `url`; an empty one is always away.

    GPU series are taken from targets in `dcgm_namespace` only, where the platform's exporter runs. They are vouched for
    if the scrape says on which `node` a target is; with `dcgm_node_label` alone, the target does.
    """

    def __init__(self, url: str, dcgm_namespace: str, dcgm_node_label: str, ask: Ask | None = None) -> None:
        """`ask`: how a query gets its rows; None: over HTTP."""
        self._url = url
        self._dcgm_namespace = dcgm_namespace
        self._dcgm_node_label = dcgm_node_label
        self._query = query(dcgm_namespace)
        self._said = ""
        self._ask = ask or (_over_http(url) if url else None)

    async def sample(self, now: float) -> Sample:
        """Never raises for Prometheus' sake: what is wrong stands in the sample."""
        if self._ask is None:
            return Sample(now, unavailable="no Prometheus is configured (prometheus.url in the chart's values)")
        try:
            return self._read(await self._ask(self._query), now)
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            reason = f"Prometheus at {self._url} does not answer: {type(error).__name__}"
            return Sample(now, unavailable=reason)

    def _read(self, rows: Rows, now: float) -> Sample:
        answer = _Answer(self._dcgm_node_label)
        for row in rows:
            try:
                answer.take(row)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                PROMETHEUS_BAD_ROWS.inc()
                log.debug("a row of Prometheus' answer is passed over: %r: %s", row, error)
        unvouched = self._say(_unvouched(self._dcgm_namespace, answer.gpu_series))
        return Sample(now, answer.figures, tuple(answer.gpu), unavailable="", unvouched=unvouched)

    def _say(self, unvouched: str) -> str:
        """For the platform team, whenever it changes."""
        GPU_SERIES_VOUCHED.set(not unvouched)
        if unvouched and unvouched != self._said:
            log.warning("%s", unvouched)
        self._said = unvouched
        return unvouched


def _over_http(url: str) -> Ask:
    client = PrometheusConnect(url=url, retry=Retry(total=0), timeout=TIMEOUT_SECONDS)

    async def ask(text: str) -> Rows:
        return await asyncio.to_thread(client.custom_query, text)

    return ask


def query(dcgm_namespace: str) -> str:
    """All of it in one request; the label `figure` tells the answers apart."""
    asked = dict(FIGURES)
    if dcgm_namespace:
        place = f'{{__name__=~"{GPU_NAMES}", namespace="{dcgm_namespace}"'
        asked["gpu"] = f"{place}}} > 0"
        asked["named"] = f'count({place}, node!=""}})'
        asked["unnamed"] = f'count({place}, node=""}})'
    return " or ".join(f'label_replace({expression}, "figure", "{name}", "", "")' for name, expression in asked.items())


class _Answer:
    """The rows of an answer, put in their places. Whatever a row lacks is raised by `take`, and costs that row."""

    def __init__(self, node_label: str) -> None:
        self.figures: dict[str, dict[tuple[str, str], float]] = {name: {} for name in FIGURES}
        self.gpu: list[GpuValue] = []
        self.gpu_series = {"named": 0, "unnamed": 0}
        self._node_label = node_label

    def take(self, row: Mapping[str, Any]) -> None:
        series, value = row["metric"], float(row["value"][1])
        if not 0 <= value < math.inf:
            raise ValueError(f"{value} can be no measurement")
        match series["figure"]:
            case "gpu":
                self.gpu.append(self._gpu(series, value))
            case "named" | "unnamed" as name:
                self.gpu_series[name] = int(value)
            case figure:
                self.figures[figure][_job(series)] = value

    def _gpu(self, series: Mapping[str, str], value: float) -> GpuValue:
        node = series.get("node", "")
        known = _name(node or series[self._node_label])
        return GpuValue(known, series.get("gpu", ""), series["__name__"], value, vouched=bool(node))


def _job(series: Mapping[str, str]) -> tuple[str, str]:
    return _name(series["namespace"]), _name(series["trainingjob"])


def _name(text: str) -> str:
    """Of an object of Kubernetes."""
    if len(text) > 253 or not _NAME.fullmatch(text):
        raise ValueError(f"{text[:300]!r} is no name")
    return text


def _unvouched(namespace: str, series: Mapping[str, int]) -> str:
    """Why GPU series are no witness; "": they are."""
    if not namespace:
        return "GPU series are not read: say where dcgm-exporter runs (dcgm.namespace in the chart's values)"
    if series["unnamed"]:
        return (
            f"{series['unnamed']} GPU series of namespace {namespace} name their node themselves, so they are no "
            "witness against it: scrape them with the chart's dcgm.podMonitor"
        )
    return "" if series["named"] else f"no GPU series come from targets in namespace {namespace}"
