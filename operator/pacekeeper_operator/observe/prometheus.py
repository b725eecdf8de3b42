"""Prometheus: one query answers for all jobs and their ranks and for GPUs' errors at once, and another one, asked
seldom, for the signs of all GPUs. Where that is too much for it, it is given more time, and asked for a part of the
jobs at a time.

What is counted was scraped from the pod that it speaks for: `namespace`, `pod` and `trainingjob` are set by Prometheus'
own service discovery (the chart's PodMonitors), and a worker that exports them, too, finds its own renamed. A row that
makes no sense costs that row.

A question has a time-out and no retries: the next look comes soon. Slow is not away: who has not answered in time is
asked again with more of it, and what was heard before counts as long as it is not stale. How it
reaches Prometheus is prometheus_access's.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.exceptions import RequestException

from pacekeeper_analysis.diagnose.gpu_health import (
    MIN_BLANK_VALUE,
    GPU_RATE_WINDOW_MINUTES,
    MAX_NVLINK_ERRORS_PER_MINUTE,
    MAX_PCIE_REPLAYS_PER_MINUTE,
    MIN_CLOCK_RATIO,
    MAX_THROTTLED_MINUTES_SHARE,
    GpuSign,
)

from ..metrics import GPU_SERIES_TRUSTED, PROMETHEUS_BAD_ROWS
from ..network import JobName
from ..observation import PROMETHEUS_NOT_QUERIED, GpuValue, JobMetrics
from ..prometheus_options import Matchers
from ..words import shorten_text
from .prometheus_access import MIN_QUERY_SECONDS, MAX_QUERY_SECONDS, QueryFunction, PrometheusAccessDenied, QueryRows, QueryTimedOut, QueryTooLarge, create_http_query

MAX_UUID_CHARACTERS, MAX_LABEL_CHARACTERS = 96, 128
MAX_LINK_ROWS = 65536
MAX_LEAF_NAME_CHARACTERS, MAX_SPINE_CHARACTERS, MAX_LINK_ERROR_CHARACTERS = 512, 5, 500
"""Characters."""
GROUP_BY_JOB = "by (namespace, trainingjob)"
WORKER_MATCHERS = ('pod=~".+-w[0-9]+-[0-9]+"', 'rank=~"[0-9]{1,7}"')
"""Nobody else's pod speaks for a job, and only of ranks."""
JOB_EXPRESSIONS: Mapping[str, str] = {
    "ranks": f"count {GROUP_BY_JOB} (%s)",
    "least_step": f"min {GROUP_BY_JOB} (%s)",
    "scrape_age": f"max {GROUP_BY_JOB} (clamp_min(time() - timestamp(%s), 0))",
}
"""One number a job, of its ranks' steps: signs of life of ranks whose sidecars the operator does not hear. How they
train, sidecars tell."""
GPU_ERROR_METRICS = "DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"
BUSY_GPU_SHARE = 0.5
"""Of the time: a GPU whose cores work less lets its clock fall by itself."""
MAX_QUERY_PARTS = 64
QUERY_EFFORT_EASE_SECONDS = 600.0
"""After so long without trouble it is tried with less effort again."""
GPU_SIGNS_INTERVAL_SECONDS = 30.0
"""Between two questions for the signs of GPUs: they look back ten minutes, at every GPU of the cluster."""
GPU_ERROR_BASELINE_MINUTES = 2
"""So far back an error is held against what its series was then, where the job does not know. Errors are asked for
every few seconds, so what happens while an operator looks is younger, but for a scrape. An exporter that is back after
such a time, or later, shows nothing new until it has been back for as long."""
_SAME_GPU = "on (node, UUID, gpu, GPU_I_ID)"
"""An exporter that has restarted has another pod and address."""

log = logging.getLogger(__name__)

_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class PrometheusSample:
    """One look at Prometheus. `figures` are by query and (namespace, job)."""

    queried_at: float = 0.0
    job_values: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    gpu_values: tuple[GpuValue, ...] = ()
    gpu_signs: tuple[GpuValue, ...] = ()
    error: str = PROMETHEUS_NOT_QUERIED
    access_denied: bool = False  # Prometheus is there, but does not answer us
    timed_out: bool = False  # Prometheus is there, but has not answered in time, or not so much at once
    gpu_untrusted_reason: str = ""  # why GPU series are no witness against a node; "": they are

    def get_metrics(self, namespace: str, job: str) -> JobMetrics:
        key = (namespace, job)
        figures: dict[str, Any] = {name: values[key] for name, values in self.job_values.items() if key in values}
        return JobMetrics(
            **figures,
            gpu=self.gpu_values,
            gpu_signs=self.gpu_signs,
            gpu_unvouched=self.gpu_untrusted_reason,
            unavailable=self.error,
            refused=self.access_denied,
            at=self.queried_at,
        )


@dataclass
class QueryEffort:
    """What is asked for at once, and how long that may take: more time and smaller parts where it was too much, and
    back again after a while."""

    seconds: float = MIN_QUERY_SECONDS
    parts: int = 1
    changed_at: float = 0.0

    def __str__(self) -> str:
        return f"with {self.seconds:g} s" + (f" for each of {self.parts} parts" if self.parts > 1 else "")

    @property
    def is_strained(self) -> bool:
        return self.parts > 1 or self.seconds > MIN_QUERY_SECONDS

    def record_failure(self, now: float, *, more_time: bool) -> None:
        """Time first, where it may help: one question costs Prometheus less than many."""
        if more_time and self.seconds < MAX_QUERY_SECONDS:
            self.seconds = min(2 * self.seconds, MAX_QUERY_SECONDS)
        else:
            self.parts = min(2 * self.parts, MAX_QUERY_PARTS)
        self.changed_at = now

    def record_success(self, now: float) -> None:
        if 0 <= now - self.changed_at < QUERY_EFFORT_EASE_SECONDS:
            return
        self.parts = max(1, self.parts // 2)
        self.seconds = max(MIN_QUERY_SECONDS, self.seconds / 2)
        self.changed_at = now


@dataclass(frozen=True)
class LinkRatesResult:
    """Bits a second that links carry now, by leaf and spine: the least, where it is told twice. `trouble`: why this is
    not all; "": it is."""

    rates: Mapping[tuple[str, str], float]
    error: str = ""


class PrometheusClient:
    """Asks Prometheus at `url`; an empty one is always away.

    GPU series are taken from targets in `dcgm_namespace` only, where the platform's exporter runs. They are vouched for
    if the scrape says on which `node` a target is; with `dcgm_node_label` alone, the target does.
    """

    def __init__(
        self, url: str, dcgm_namespace: str, dcgm_node_label: str, run_query: QueryFunction | None = None, matchers: Matchers = ()
    ) -> None:
        """`ask`: how a query gets its rows; None: over HTTP, without credentials."""
        self._url = url
        self._matchers = matchers
        self._effort = QueryEffort()
        self._dcgm_namespace = dcgm_namespace
        self._dcgm_node_label = dcgm_node_label
        self._query = build_query(dcgm_namespace, matchers)
        self._errors_query = build_gpu_errors_query(dcgm_namespace, matchers)
        self._signs_query = build_gpu_signs_query(dcgm_namespace, matchers)
        self._logged: dict[str, str] = {}
        self._signs: tuple[GpuValue, ...] = ()
        self._signs_at = -math.inf
        self._run_query = run_query or (create_http_query(url) if url else None)

    async def sample(self, now: float, jobs: Collection[JobName] = ()) -> PrometheusSample:
        """`jobs`: that are asked about part by part where that must be. Never raises for Prometheus' sake: what is
        wrong stands in the sample."""
        if self._run_query is None:
            return PrometheusSample(now, error="no Prometheus is configured (prometheus.url in the chart's values)")
        try:
            rows = [row for query in self._build_queries(jobs) for row in await self._run_query(query, self._effort.seconds)]
            sample = self._parse_sample(rows, now)
            self._effort.record_success(now)
        except PrometheusAccessDenied as error:
            reason = f"Prometheus at {self._url} {error}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason, access_denied=True)
        except (QueryTimedOut, QueryTooLarge) as error:
            self._effort.record_failure(now, more_time=isinstance(error, QueryTimedOut))
            self._log_if_changed("effort", f"Prometheus at {self._url} {error}: it is asked again, {self._effort}")
            reason = f"Prometheus at {self._url} {error}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason, timed_out=True)
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            reason = f"Prometheus at {self._url} does not answer: {type(error).__name__}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason)
        if self._dcgm_namespace and not 0 <= now - self._signs_at < GPU_SIGNS_INTERVAL_SECONDS:
            self._signs, self._signs_at = await self._query_signs(self._run_query), now
        return replace(sample, gpu_signs=self._signs)

    async def read_gpu_errors(self) -> tuple[GpuValue, ...] | None:
        """Those of a sample, as they are now: the little of it that is worth asking for more often. None: they cannot
        be had, or Prometheus has enough to do."""
        if self._run_query is None or not self._dcgm_namespace or self._effort.is_strained:
            return None
        answer = _QueryResult(self._dcgm_node_label)
        try:
            self._parse_rows(answer.add_row, await self._run_query(self._errors_query, MIN_QUERY_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError):
            return None  # the next sample says why
        return answer.collect_errors()

    def _build_queries(self, jobs: Collection[JobName]) -> Sequence[str]:
        """For all jobs in one; in parts, the GPUs in one of their own."""
        if self._effort.parts == 1 or not jobs:
            return [self._query]
        known = sorted(jobs)
        each = math.ceil(len(known) / self._effort.parts)
        groups = [known[start : start + each] for start in range(0, len(known), each)]
        about = [build_query("", (*self._matchers, *_match_jobs(group))) for group in groups]
        return [*about, build_gpu_query(self._dcgm_namespace, self._matchers)] if self._dcgm_namespace else about

    async def read_link_rates(self, query: str) -> LinkRatesResult:
        """What a Fabric's query says of its links. Never raises for Prometheus' sake."""
        if self._run_query is None:
            return LinkRatesResult({}, "no Prometheus is configured (prometheus.url in the chart's values)")
        rates: dict[tuple[str, str], float] = {}

        def take(row: Mapping[str, Any]) -> None:
            series, value = _parse_measurement(row)
            link = _check_length(series["leaf"], MAX_LEAF_NAME_CHARACTERS), _check_length(series["spine"], MAX_SPINE_CHARACTERS)
            rates[link] = min(value, rates.get(link, math.inf))

        try:
            rows = await self._run_query(query, MIN_QUERY_SECONDS)
            self._parse_rows(take, rows[:MAX_LINK_ROWS])
        except PrometheusAccessDenied as error:
            return LinkRatesResult({}, f"Prometheus at {self._url} {error}")
        except (RequestException, PrometheusApiClientException, ValueError, KeyError, TypeError) as error:
            return LinkRatesResult({}, shorten_text(f"Prometheus at {self._url} does not answer: {error}", MAX_LINK_ERROR_CHARACTERS))
        if len(rows) > MAX_LINK_ROWS:
            return LinkRatesResult(rates, f"only {MAX_LINK_ROWS} of {len(rows)} rows are read: ask for less")
        told = len(rates) or not rows
        return LinkRatesResult(rates, "" if told else f"none of {len(rows)} rows has a leaf, a spine and a rate")

    async def _query_signs(self, ask: QueryFunction) -> tuple[GpuValue, ...]:
        """That they cannot be had, for whatever the exporters show, costs nothing else: what was known stays."""
        answer, trouble = _QueryResult(self._dcgm_node_label), ""
        try:
            self._parse_rows(answer.add_sign_row, await ask(self._signs_query, MAX_QUERY_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            trouble = f"Prometheus at {self._url} does not tell the signs of GPUs: {error}"
        self._log_if_changed("signs", trouble)
        return self._signs if trouble else tuple(answer.gpu)

    def _parse_sample(self, rows: QueryRows, now: float) -> PrometheusSample:
        answer = _QueryResult(self._dcgm_node_label)
        self._parse_rows(answer.add_row, rows)
        unvouched = _explain_untrusted(self._dcgm_namespace, answer.gpu_series)
        GPU_SERIES_TRUSTED.set(not unvouched)
        self._log_if_changed("witness", unvouched)
        return PrometheusSample(now, answer.job_values, answer.collect_errors(), error="", gpu_untrusted_reason=unvouched)

    def _parse_rows(self, take: Callable[[Mapping[str, Any]], None], rows: QueryRows) -> None:
        for row in rows:
            try:
                take(row)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                PROMETHEUS_BAD_ROWS.inc()
                log.debug("a row of Prometheus' answer is passed over: %r: %s", row, error)

    def _log_if_changed(self, about: str, trouble: str) -> None:
        """For the platform team, whenever it changes; "": there is none."""
        if trouble and trouble != self._logged.get(about):
            log.warning("%s", trouble)
        self._logged[about] = trouble


def build_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """All of it in one request; the label `figure` tells the answers apart."""
    steps = "pacekeeper_rank_step" + _build_selector(*WORKER_MATCHERS, *matchers)
    asked = {name: expression % steps for name, expression in JOB_EXPRESSIONS.items()}
    return _combine_queries(asked) + (f" or {build_gpu_query(dcgm_namespace, matchers)}" if dcgm_namespace else "")


def build_gpu_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """The errors of all GPUs, and whether the scrape says on which node they are."""
    place = _build_gpu_matchers(dcgm_namespace, matchers)
    counts = {
        "named": "count(" + _build_selector(*place, 'node!=""') + ")",
        "unnamed": "count(" + _build_selector(*place, 'node=""') + ")",
    }
    return f"{build_gpu_errors_query(dcgm_namespace, matchers)} or {_combine_queries(counts)}"


def build_gpu_errors_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Few rows: most GPUs have none. What the same GPUs' series were a while ago comes with them, zero or not."""
    series = _build_selector(*_build_gpu_matchers(dcgm_namespace, matchers))
    before = f"({series} offset {GPU_ERROR_BASELINE_MINUTES}m and {_SAME_GPU} ({series} > 0))"
    return _combine_queries({"gpu": f"{series} > 0", "gpu_before": before})


def _build_gpu_matchers(dcgm_namespace: str, matchers: Matchers) -> Matchers:
    return f'__name__=~"{GPU_ERROR_METRICS}"', f'namespace="{dcgm_namespace}"', *matchers


def build_gpu_signs_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """The signs that GPUs show, by the policy of `pacekeeper_analysis.diagnose.gpu_health`.

    A counter that was reset in these ten minutes, by a driver or by an exporter that has slipped, says nothing.
    """

    def of(*names: str) -> str:
        return _build_selector(f'__name__=~"{"|".join(names)}"', f'namespace="{dcgm_namespace}"', *matchers)

    def risen(name: str, least: float) -> str:
        return f"(increase({of(name)}[{GPU_RATE_WINDOW_MINUTES}m]) >= {least:g} unless resets({of(name)}[{GPU_RATE_WINDOW_MINUTES}m]) > 0)"

    # What is no figure (see BLANK) would have all bits, and be somebody's usual clock.
    reasons = f"({of('DCGM_FI_DEV_CLOCKS_EVENT_REASONS')} < {MIN_BLANK_VALUE})"
    # MIG instances would count a GPU as often as it is cut, and have its clock by a share of its work.
    whole = _build_selector('__name__="DCGM_FI_DEV_SM_CLOCK"', f'namespace="{dcgm_namespace}"', 'GPU_I_ID=""', *matchers)
    clock = f"({whole} < {MIN_BLANK_VALUE})"
    busy = f"({of('DCGM_FI_PROF_SM_ACTIVE', 'DCGM_FI_PROF_GR_ENGINE_ACTIVE')} <= 1)"
    usual = f"quantile by (modelName) (0.5, {clock})"
    # Bits 3 (slowdown), 6 (heat) and 7 (power brake); of the lower eight, 6 or 7 make 64 at least.
    throttled = f"floor({reasons} / 8) % 2 == 1 or {reasons} % 256 >= 64"
    replays = risen("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", MAX_NVLINK_ERRORS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES)
    recoveries = risen("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", MAX_NVLINK_ERRORS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES)
    return _combine_queries(
        {
            GpuSign.ROWS_PENDING: f"{of('DCGM_FI_DEV_ROW_REMAP_PENDING')} > 0",
            GpuSign.ROWS_FAILED: f"{of('DCGM_FI_DEV_ROW_REMAP_FAILURE')} > 0",
            GpuSign.PCIE_REPLAYS: risen("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", MAX_PCIE_REPLAYS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES),
            GpuSign.NVLINK_ERRORS: f"{replays} or {recoveries}",
            GpuSign.THROTTLED: f"count_over_time(({throttled})[{GPU_RATE_WINDOW_MINUTES}m:1m]) >= {MAX_THROTTLED_MINUTES_SHARE * GPU_RATE_WINDOW_MINUTES:g}",
            GpuSign.SLOW_CLOCK: f"{clock} < on (modelName) group_left () ({MIN_CLOCK_RATIO} * {usual}) "
            f"and on (UUID) ({busy} > {BUSY_GPU_SHARE})",
        }
    )


def _match_jobs(jobs: Sequence[JobName]) -> Matchers:
    """Selects these jobs, and those that have the namespace of one and the name of another."""
    namespaces, names = ("|".join(sorted({job[place].replace(".", "[.]") for job in jobs})) for place in (0, 1))
    return f'namespace=~"{namespaces}"', f'trainingjob=~"{names}"'


def _build_selector(*matchers: str) -> str:
    return "{" + ",".join(matchers) + "}"


def _combine_queries(asked: Mapping[str, str]) -> str:
    return " or ".join(f'label_replace({expression}, "figure", "{name}", "", "")' for name, expression in asked.items())


class _QueryResult:
    """The rows of an answer, put in their places. Whatever a row lacks is raised by `take`, and costs that row."""

    def __init__(self, node_label: str) -> None:
        self.job_values: dict[str, dict[tuple[str, str], float]] = {name: {} for name in JOB_EXPRESSIONS}
        self.gpu: list[GpuValue] = []
        self.gpu_series = {"named": 0, "unnamed": 0}
        self._before: dict[str, float] = {}  # what series of errors were a while ago, by GpuValue.key
        self._node_label = node_label

    def add_row(self, row: Mapping[str, Any]) -> None:
        series, value = _parse_measurement(row)
        match series["figure"]:
            case "gpu":
                self.gpu.append(self._parse_gpu(series, series["__name__"], value))
            case "named" | "unnamed" as name:
                self.gpu_series[name] = int(value)
            case "gpu_before":
                found = self._parse_gpu(series, series["__name__"], value)
                self._before[found.key] = max(value, self._before.get(found.key, 0.0))
            case figure:
                self.job_values[figure][_parse_job_name(series)] = value

    def collect_errors(self) -> tuple[GpuValue, ...]:
        """One of each key: two exporters that tell of the same GPU would else take turns in being news."""
        values: dict[str, GpuValue] = {}
        for value in self.gpu:
            known = values.get(value.key)
            if known is None or (value.value, value.trusted) > (known.value, known.trusted):
                values[value.key] = value
        return tuple(replace(value, before=self._before.get(key)) for key, value in values.items())

    def add_sign_row(self, row: Mapping[str, Any]) -> None:
        series, value = _parse_measurement(row)
        self.gpu.append(self._parse_gpu(series, GpuSign(series["figure"]), value))

    def _parse_gpu(self, series: Mapping[str, str], metric: str, value: float) -> GpuValue:
        node = series.get("node", "")
        known = _check_object_name(node or series[self._node_label])
        uuid = series.get("UUID", "")[:MAX_UUID_CHARACTERS]
        gpu = series.get("gpu", "")
        instance = series.get("GPU_I_ID", "")
        if not all(isinstance(word, str) and len(word) <= MAX_LABEL_CHARACTERS for word in (gpu, metric, uuid, instance)):
            raise ValueError("no name of a GPU or a metric")  # jobs' bookkeeping would be full of it
        if value >= MIN_BLANK_VALUE:
            raise ValueError(f"{value:g} means that there is no figure")
        return GpuValue(known, gpu, metric, value, trusted=bool(node), uuid=uuid, instance=instance)


def _parse_measurement(row: Mapping[str, Any]) -> tuple[Mapping[str, str], float]:
    """Its labels and its value. Raises ValueError where that can be no measurement."""
    series, value = row["metric"], float(row["value"][1])
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} can be no measurement")
    return series, value


def _check_length(text: object, limit: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= limit:
        raise ValueError("no name of a leaf or a spine")
    return text


def _parse_job_name(series: Mapping[str, str]) -> tuple[str, str]:
    return _check_object_name(series["namespace"]), _check_object_name(series["trainingjob"])


def _check_object_name(text: str) -> str:
    """Of an object of Kubernetes."""
    if len(text) > 253 or not _OBJECT_NAME.fullmatch(text):
        raise ValueError(f"{text[:300]!r} is no name")
    return text


def _explain_untrusted(namespace: str, series: Mapping[str, int]) -> str:
    """Why GPU series are no witness; "": they are."""
    if not namespace:
        return "GPU series are not read: say where dcgm-exporter runs (dcgm.namespace in the chart's values)"
    if series["unnamed"]:
        return (
            f"{series['unnamed']} GPU series of namespace {namespace} name their node themselves, so they are no "
            "witness against it: scrape them with the chart's dcgm.podMonitor"
        )
    return "" if series["named"] else f"no GPU series come from targets in namespace {namespace}"
