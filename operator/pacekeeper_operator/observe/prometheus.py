"""Queries to Prometheus for the ranks of all jobs and for GPUs.

One query covers the ranks of all jobs and the errors of all GPUs; a rarer one covers the signs of all GPUs. If a query
is too much for Prometheus, it gets more time, and covers a part of the jobs at a time. The series were scraped from the
pod that they describe: Prometheus' service discovery sets `namespace`, `pod`, and `trainingjob` (the chart's
PodMonitors). If a worker exports these labels itself, they are renamed. An invalid row is skipped. A query has a
time-out and no retries, as the next sample comes soon. A slow Prometheus is not an unavailable one: the next query gets
more time, and earlier values count until they are stale. The connection to Prometheus is in prometheus_access.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.exceptions import RequestException

from pacekeeper_analysis.failures.gpu_health import (
    GPU_RATE_WINDOW_MINUTES,
    MAX_NVLINK_ERRORS_PER_MINUTE,
    MAX_PCIE_REPLAYS_PER_MINUTE,
    MAX_THROTTLED_MINUTES_SHARE,
    MIN_BLANK_VALUE,
    MIN_CLOCK_RATIO,
    GpuSign,
)

from ..formatting import shorten_text
from ..metrics import GPU_SERIES_TRUSTED, PROMETHEUS_BAD_ROWS
from ..prometheus_options import Matchers
from ..state.job_metrics import PROMETHEUS_NOT_QUERIED, GpuValue, JobMetrics
from ..state.network import JobName
from .prometheus_access import (
    MAX_QUERY_SECONDS,
    MIN_QUERY_SECONDS,
    PrometheusAccessDenied,
    QueryFunction,
    QueryRows,
    QueryTimedOut,
    QueryTooLarge,
    create_http_query,
)

MAX_UUID_CHARACTERS, MAX_LABEL_CHARACTERS = 96, 128
MAX_LINK_ROWS = 65536
MAX_LEAF_NAME_CHARACTERS, MAX_SPINE_CHARACTERS, MAX_LINK_ERROR_CHARACTERS = 512, 5, 500
"""Characters."""
GROUP_BY_JOB = "by (namespace, trainingjob)"
WORKER_MATCHERS = ('pod=~".+-w[0-9]+-[0-9]+"', 'rank=~"[0-9]{1,7}"')
"""Only a job's own pods report for it, and only about ranks."""
JOB_EXPRESSIONS: Mapping[str, str] = {
    "reporting_ranks": f"count {GROUP_BY_JOB} (%s)",
    "min_step": f"min {GROUP_BY_JOB} (%s)",
    "scrape_age": f"max {GROUP_BY_JOB} (clamp_min(time() - timestamp(%s), 0))",
}
"""One value for each job, from the steps of its ranks.

They show that ranks are alive whose sidecars do not reach the operator. How ranks train is in the sidecars' reports.
"""
GPU_ERROR_METRICS = "DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"
BUSY_GPU_SHARE = 0.5
"""Share of the time. A GPU whose cores work less lowers its clock by itself."""
MAX_QUERY_PARTS = 64
QUERY_EFFORT_EASE_SECONDS = 600.0
"""After this duration without failures, less effort is tried again."""
GPU_SIGNS_INTERVAL_SECONDS = 30.0
"""Interval of the query for signs of GPUs. It covers ten minutes, and every GPU of the cluster."""
GPU_ERROR_BASELINE_MINUTES = 2
"""Age of the value with which an error is compared if the job does not know an earlier one.

Errors are queried every few seconds, so an error that happens while an operator runs is younger, apart from a scrape.
An exporter that returns after this duration, or later, shows nothing new until it has been back for as long.
"""
_SAME_GPU = "on (node, UUID, gpu, GPU_I_ID)"
"""An exporter that has restarted has another pod and address."""

log = logging.getLogger(__name__)

MAX_OBJECT_NAME_CHARACTERS = 253
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class PrometheusSample:
    """The result of a query. `job_values` is by query and (namespace, job)."""

    queried_at: float | None = None
    job_values: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    gpu_values: tuple[GpuValue, ...] = ()
    gpu_signs: tuple[GpuValue, ...] = ()
    error: str = PROMETHEUS_NOT_QUERIED
    access_denied: bool = False  # Prometheus is reachable, but denies access
    timed_out: bool = False  # Prometheus is reachable, but did not answer in time, or the query is too large
    gpu_untrusted_reason: str = ""  # why GPU series are no witness against a node; "": they are

    def get_metrics(self, namespace: str, job: str) -> JobMetrics:
        key = (namespace, job)
        job_metrics: dict[str, Any] = {name: values[key] for name, values in self.job_values.items() if key in values}
        return JobMetrics(
            **job_metrics,
            gpu_values=self.gpu_values,
            gpu_signs=self.gpu_signs,
            gpu_untrusted_reason=self.gpu_untrusted_reason,
            prometheus_error=self.error,
            prometheus_denied=self.access_denied,
            queried_at=self.queried_at,
        )


@dataclass
class QueryEffort:
    """The time and the number of parts of a query.

    Both grow when a query is too much for Prometheus, and shrink again after a while.
    """

    seconds: float = MIN_QUERY_SECONDS
    parts: int = 1
    changed_at: float | None = None

    def __str__(self) -> str:
        return f"with {self.seconds:g} s" + (f" for each of {self.parts} parts" if self.parts > 1 else "")

    @property
    def is_strained(self) -> bool:
        return self.parts > 1 or self.seconds > MIN_QUERY_SECONDS

    def record_failure(self, now: float, *, more_time: bool) -> None:
        """Increase the effort. Time comes first if it may help: one query costs Prometheus less than many."""
        if more_time and self.seconds < MAX_QUERY_SECONDS:
            self.seconds = min(2 * self.seconds, MAX_QUERY_SECONDS)
        else:
            self.parts = min(2 * self.parts, MAX_QUERY_PARTS)
        self.changed_at = now

    def record_success(self, now: float) -> None:
        if self.changed_at is not None and 0 <= now - self.changed_at < QUERY_EFFORT_EASE_SECONDS:
            return
        self.parts = max(1, self.parts // 2)
        self.seconds = max(MIN_QUERY_SECONDS, self.seconds / 2)
        self.changed_at = now


@dataclass(frozen=True)
class LinkRatesResult:
    """Bits per second that links carry now, by leaf and spine.

    Of duplicates the lowest counts. `error` is why the result is incomplete; "": it is complete.
    """

    rates: Mapping[tuple[str, str], float]
    error: str = ""


class PrometheusClient:
    """A client of Prometheus at `url`; if it is empty, every sample has an error.

    GPU series are only taken from targets in `dcgm_namespace`, where the platform's exporter runs. They are trusted if
    the scrape sets the label `node` of a target. With `dcgm_node_label` alone, the target itself names its node.
    """

    def __init__(
        self,
        url: str,
        dcgm_namespace: str,
        dcgm_node_label: str,
        run_query: QueryFunction | None = None,
        matchers: Matchers = (),
    ) -> None:
        """Create a client. `run_query` runs a query; None: over HTTP, without credentials."""
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
        self._signs_at: float | None = None
        self._run_query = run_query or (create_http_query(url) if url else None)

    async def sample(self, now: float, jobs: Collection[JobName] = ()) -> PrometheusSample:
        """Query the values of all jobs and GPUs. `jobs` are the jobs that may be queried in parts.

        Errors of Prometheus never raise: they stand in the sample.
        """
        if self._run_query is None:
            return PrometheusSample(now, error="no Prometheus is configured (prometheus.url in the chart's values)")
        try:
            rows = [
                row for query in self._build_queries(jobs) for row in await self._run_query(query, self._effort.seconds)
            ]
            sample = self._parse_sample(rows, now)
            self._effort.record_success(now)
        except PrometheusAccessDenied as error:
            reason = f"Prometheus at {self._url} {error}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason, access_denied=True)
        except (QueryTimedOut, QueryTooLarge) as error:
            self._effort.record_failure(now, more_time=isinstance(error, QueryTimedOut))
            self._log_if_changed("effort", f"Prometheus at {self._url} {error}; retrying {self._effort}")
            reason = f"Prometheus at {self._url} {error}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason, timed_out=True)
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            reason = f"Prometheus at {self._url} does not answer: {type(error).__name__}"
            return PrometheusSample(now, gpu_signs=self._signs, error=reason)
        is_recent = self._signs_at is not None and 0 <= now - self._signs_at < GPU_SIGNS_INTERVAL_SECONDS
        if self._dcgm_namespace and not is_recent:
            self._signs, self._signs_at = await self._query_signs(self._run_query), now
        return replace(sample, gpu_signs=self._signs)

    async def read_gpu_errors(self) -> tuple[GpuValue, ...] | None:
        """Return the present GPU errors of a sample, which are worth a more frequent query.

        None: they are unavailable, or Prometheus is overloaded.
        """
        if self._run_query is None or not self._dcgm_namespace or self._effort.is_strained:
            return None
        result = _QueryResult(self._dcgm_node_label)
        try:
            self._parse_rows(result.add_row, await self._run_query(self._errors_query, MIN_QUERY_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError):
            return None  # the next sample says why
        return result.collect_errors()

    def _build_queries(self, jobs: Collection[JobName]) -> Sequence[str]:
        """Return one query for all jobs, or one for each part of them and one for the GPUs."""
        if self._effort.parts == 1 or not jobs:
            return [self._query]
        ordered = sorted(jobs)
        part_size = math.ceil(len(ordered) / self._effort.parts)
        groups = [ordered[start : start + part_size] for start in range(0, len(ordered), part_size)]
        queries = [build_query("", (*self._matchers, *_match_jobs(group))) for group in groups]
        return [*queries, build_gpu_query(self._dcgm_namespace, self._matchers)] if self._dcgm_namespace else queries

    async def read_link_rates(self, query: str) -> LinkRatesResult:
        """Return the result of a Fabric's query of its links. Errors of Prometheus never raise."""
        if self._run_query is None:
            return LinkRatesResult({}, "no Prometheus is configured (prometheus.url in the chart's values)")
        rates: dict[tuple[str, str], float] = {}

        def take(row: Mapping[str, Any]) -> None:
            series, value = _parse_measurement(row)
            link = (
                _check_length(series["leaf"], MAX_LEAF_NAME_CHARACTERS),
                _check_length(series["spine"], MAX_SPINE_CHARACTERS),
            )
            rates[link] = min(value, rates.get(link, math.inf))

        try:
            rows = await self._run_query(query, MIN_QUERY_SECONDS)
            self._parse_rows(take, rows[:MAX_LINK_ROWS])
        except PrometheusAccessDenied as error:
            return LinkRatesResult({}, f"Prometheus at {self._url} {error}")
        except (RequestException, PrometheusApiClientException, ValueError, KeyError, TypeError) as error:
            return LinkRatesResult(
                {}, shorten_text(f"Prometheus at {self._url} does not answer: {error}", MAX_LINK_ERROR_CHARACTERS)
            )
        if len(rows) > MAX_LINK_ROWS:
            return LinkRatesResult(rates, f"only {MAX_LINK_ROWS} of {len(rows)} rows are read: narrow the query")
        is_readable = len(rates) or not rows
        return LinkRatesResult(rates, "" if is_readable else f"none of {len(rows)} rows has a leaf, a spine and a rate")

    async def _query_signs(self, run_query: QueryFunction) -> tuple[GpuValue, ...]:
        """Return the signs of GPUs. If the query fails, the earlier ones stay."""
        result, problem = _QueryResult(self._dcgm_node_label), ""
        try:
            self._parse_rows(result.add_sign_row, await run_query(self._signs_query, MAX_QUERY_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            problem = f"Prometheus at {self._url} cannot be queried for signs of GPUs: {error}"
        self._log_if_changed("GPU series", problem)
        return self._signs if problem else tuple(result.gpu)

    def _parse_sample(self, rows: QueryRows, now: float) -> PrometheusSample:
        result = _QueryResult(self._dcgm_node_label)
        self._parse_rows(result.add_row, rows)
        untrusted_reason = _explain_untrusted(self._dcgm_namespace, result.gpu_series)
        GPU_SERIES_TRUSTED.set(not untrusted_reason)
        self._log_if_changed("witness", untrusted_reason)
        return PrometheusSample(
            now, result.job_values, result.collect_errors(), error="", gpu_untrusted_reason=untrusted_reason
        )

    def _parse_rows(self, add_row: Callable[[Mapping[str, Any]], None], rows: QueryRows) -> None:
        for row in rows:
            try:
                add_row(row)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                PROMETHEUS_BAD_ROWS.inc()
                log.debug("skipping a row of Prometheus' answer: %r: %s", row, error)

    def _log_if_changed(self, topic: str, problem: str) -> None:
        """Log a problem for the platform team when it changes; "": there is none."""
        if problem and problem != self._logged.get(topic):
            log.warning("%s", problem)
        self._logged[topic] = problem


def build_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Return one query for everything. The label `figure` distinguishes its parts."""
    steps = "pacekeeper_rank_step" + _build_selector(*WORKER_MATCHERS, *matchers)
    queries = {name: expression % steps for name, expression in JOB_EXPRESSIONS.items()}
    return _combine_queries(queries) + (f" or {build_gpu_query(dcgm_namespace, matchers)}" if dcgm_namespace else "")


def build_gpu_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Return the query for the errors of all GPUs, and for whether the scrape names their nodes."""
    gpu_matchers = _build_gpu_matchers(dcgm_namespace, matchers)
    counts = {
        "node_from_target": "count(" + _build_selector(*gpu_matchers, 'node!=""') + ")",
        "node_from_exporter": "count(" + _build_selector(*gpu_matchers, 'node=""') + ")",
    }
    return f"{build_gpu_errors_query(dcgm_namespace, matchers)} or {_combine_queries(counts)}"


def build_gpu_errors_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Return the query for GPU errors, with the values of the same GPUs' series a while ago, zero or not.

    It also returns the series that are zero now and were not then: an error after that is a new one, even if it is the
    same again. A series of another exporter, which may never have seen the error, does not count as zero.
    It returns few rows, as most GPUs have no errors.
    """
    series = _build_selector(*_build_gpu_matchers(dcgm_namespace, matchers))
    before = f"{series} offset {GPU_ERROR_BASELINE_MINUTES}m"
    baseline = f"({before} and {_SAME_GPU} ({series} > 0))"
    cleared = f"({series} == 0 and ({before} > 0))"
    return _combine_queries({"gpu": f"({series} > 0 or {cleared})", "gpu_baseline": baseline})


def _build_gpu_matchers(dcgm_namespace: str, matchers: Matchers) -> Matchers:
    return f'__name__=~"{GPU_ERROR_METRICS}"', f'namespace="{dcgm_namespace}"', *matchers


def build_gpu_signs_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Return the query for the signs of GPUs, by the policy of `pacekeeper_analysis.failures.gpu_health`.

    A counter that was reset in these ten minutes, by a driver or by a faulty exporter, is ignored.
    """

    def select_series(*names: str) -> str:
        return _build_selector(f'__name__=~"{"|".join(names)}"', f'namespace="{dcgm_namespace}"', *matchers)

    def risen(name: str, minimum: float) -> str:
        return (
            f"(increase({select_series(name)}[{GPU_RATE_WINDOW_MINUTES}m]) >= {minimum:g} unless "
            f"resets({select_series(name)}[{GPU_RATE_WINDOW_MINUTES}m]) > 0)"
        )

    # A blank value (see MIN_BLANK_VALUE) would have all bits set, and count as a usual clock.
    reasons = f"({select_series('DCGM_FI_DEV_CLOCKS_EVENT_REASONS')} < {MIN_BLANK_VALUE})"
    # MIG instances would count a GPU several times, and show its clock by a share of its work.
    clock_series = _build_selector(
        '__name__="DCGM_FI_DEV_SM_CLOCK"', f'namespace="{dcgm_namespace}"', 'GPU_I_ID=""', *matchers
    )
    clock = f"({clock_series} < {MIN_BLANK_VALUE})"
    busy = f"({select_series('DCGM_FI_PROF_SM_ACTIVE', 'DCGM_FI_PROF_GR_ENGINE_ACTIVE')} <= 1)"
    usual_clock = f"quantile by (modelName) (0.5, {clock})"
    # Bits 3 (slowdown), 6 (heat), and 7 (power brake). In the lowest eight bits, bit 6 or 7 makes 64 at least.
    throttled = f"floor({reasons} / 8) % 2 == 1 or {reasons} % 256 >= 64"
    replays = risen(
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", MAX_NVLINK_ERRORS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES
    )
    recoveries = risen(
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", MAX_NVLINK_ERRORS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES
    )
    return _combine_queries(
        {
            GpuSign.ROWS_PENDING: f"{select_series('DCGM_FI_DEV_ROW_REMAP_PENDING')} > 0",
            GpuSign.ROWS_FAILED: f"{select_series('DCGM_FI_DEV_ROW_REMAP_FAILURE')} > 0",
            GpuSign.PCIE_REPLAYS: risen(
                "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", MAX_PCIE_REPLAYS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES
            ),
            GpuSign.NVLINK_ERRORS: f"{replays} or {recoveries}",
            GpuSign.THROTTLED: (
                f"count_over_time(({throttled})[{GPU_RATE_WINDOW_MINUTES}m:1m]) >= "
                f"{MAX_THROTTLED_MINUTES_SHARE * GPU_RATE_WINDOW_MINUTES:g}"
            ),
            GpuSign.SLOW_CLOCK: f"{clock} < on (modelName) group_left () ({MIN_CLOCK_RATIO} * {usual_clock}) "
            f"and on (UUID) ({busy} > {BUSY_GPU_SHARE})",
        }
    )


def _match_jobs(jobs: Sequence[JobName]) -> Matchers:
    """Return matchers for these jobs. They also match jobs with the namespace of one and the name of another."""
    namespaces, names = ("|".join(sorted({job[index].replace(".", "[.]") for job in jobs})) for index in (0, 1))
    return f'namespace=~"{namespaces}"', f'trainingjob=~"{names}"'


def _build_selector(*matchers: str) -> str:
    return "{" + ",".join(matchers) + "}"


def _combine_queries(queries: Mapping[str, str]) -> str:
    return " or ".join(
        f'label_replace({expression}, "pacekeeper_query", "{name}", "", "")' for name, expression in queries.items()
    )


class _QueryResult:
    """The parsed rows of a result. The `add_` methods raise for an invalid row, which is then skipped."""

    def __init__(self, node_label: str) -> None:
        self.job_values: dict[str, dict[tuple[str, str], float]] = {name: {} for name in JOB_EXPRESSIONS}
        self.gpu: list[GpuValue] = []
        self.gpu_series = {"node_from_target": 0, "node_from_exporter": 0}
        self._before: dict[str, float] = {}  # earlier values of error series, by GpuValue.key
        self._node_label = node_label

    def add_row(self, row: Mapping[str, Any]) -> None:
        series, value = _parse_measurement(row)
        match series["pacekeeper_query"]:
            case "gpu":
                self.gpu.append(self._parse_gpu(series, series["__name__"], value))
            case "node_from_target" | "node_from_exporter" as name:
                self.gpu_series[name] = int(value)
            case "gpu_baseline":
                gpu_value = self._parse_gpu(series, series["__name__"], value)
                self._before[gpu_value.key] = max(value, self._before.get(gpu_value.key, 0.0))
            case query:
                self.job_values[query][_parse_job_name(series)] = value

    def collect_errors(self) -> tuple[GpuValue, ...]:
        """Return one error value for each key: the largest.

        Two exporters of the same GPU would otherwise appear as alternating changes.
        """
        values: dict[str, GpuValue] = {}
        for value in self.gpu:
            best = values.get(value.key, value)
            pods = value.pods | best.pods  # a GPU that pods share has a series for each
            largest = max(best, value, key=lambda item: (item.value, item.trusted))
            values[value.key] = replace(largest, pods=pods)
        return tuple(replace(value, previous_value=self._before.get(key)) for key, value in values.items())

    def add_sign_row(self, row: Mapping[str, Any]) -> None:
        series, value = _parse_measurement(row)
        self.gpu.append(self._parse_gpu(series, GpuSign(series["pacekeeper_query"]), value))

    def _parse_gpu(self, series: Mapping[str, str], metric: str, value: float) -> GpuValue:
        node = series.get("node", "")
        node_name = _check_object_name(node or series[self._node_label])
        uuid = series.get("UUID", "")[:MAX_UUID_CHARACTERS]
        gpu = series.get("gpu", "")
        instance = series.get("GPU_I_ID", "")
        if not all(
            isinstance(text, str) and len(text) <= MAX_LABEL_CHARACTERS for text in (gpu, metric, uuid, instance)
        ):
            raise ValueError("invalid name of a GPU or a metric")  # a job's bookkeeping would grow too large
        if value >= MIN_BLANK_VALUE:
            raise ValueError(f"{value:g} is a blank value")
        pods = frozenset(_find_gpu_user(series))
        return GpuValue(node_name, gpu, metric, value, trusted=bool(node), uuid=uuid, instance=instance, pods=pods)


def _find_gpu_user(series: Mapping[str, str]) -> Iterator[str]:
    """Yield the pod that uses the GPU of a series. The labels without a prefix are those of the exporter itself."""
    names = series.get("exported_namespace"), series.get("exported_pod")
    if all(isinstance(name, str) and 0 < len(name) <= MAX_OBJECT_NAME_CHARACTERS for name in names):
        yield "/".join(map(str, names))


def _parse_measurement(row: Mapping[str, Any]) -> tuple[Mapping[str, str], float]:
    """Return the labels and the value of a row.

    Raises ValueError if the value cannot be a measurement.
    """
    series, value = row["metric"], float(row["value"][1])
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a measurement")
    return series, value


def _check_length(text: object, limit: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= limit:
        raise ValueError("invalid name of a leaf or a spine")
    return text


def _parse_job_name(series: Mapping[str, str]) -> tuple[str, str]:
    return _check_object_name(series["namespace"]), _check_object_name(series["trainingjob"])


def _check_object_name(text: str) -> str:
    """Return the name of a Kubernetes object.

    Raises ValueError if it is not valid.
    """
    if len(text) > MAX_OBJECT_NAME_CHARACTERS or not _OBJECT_NAME.fullmatch(text):
        raise ValueError(f"{text[:300]!r} is not a name of a Kubernetes object")
    return text


def _explain_untrusted(namespace: str, series: Mapping[str, int]) -> str:
    """Return why GPU series are no witness; "" if they are."""
    if not namespace:
        return "GPU series are not read: set dcgm.namespace in the chart's values to the namespace of dcgm-exporter"
    if series["node_from_exporter"]:
        return (
            f"{series['node_from_exporter']} GPU series of namespace {namespace} name their node themselves, so they "
            "are no witness against it: scrape them with the chart's dcgm.podMonitor"
        )
    return "" if series["node_from_target"] else f"no GPU series come from targets in namespace {namespace}"
