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
    BLANK,
    MINUTES,
    NVLINK_ERRORS_A_MINUTE,
    REPLAYS_A_MINUTE,
    SLOW_CLOCK,
    THROTTLED_A_MINUTE,
    Sign,
)

from ..metrics import GPU_SERIES_VOUCHED, PROMETHEUS_BAD_ROWS
from ..network import JobName
from ..observation import NOT_ASKED, GpuValue, Metrics
from ..prometheus_options import Matchers
from ..words import shortened
from .prometheus_access import LEAST_SECONDS, MOST_SECONDS, Ask, NotAdmitted, Rows, Slow, TooMuch, over_http

MAX_UUID, MAX_LABEL = 96, 128
MAX_LINK_ROWS = 65536
MAX_LEAF, MAX_SPINE, MAX_WORDS = 512, 5, 500
"""Characters."""
BY_JOB = "by (namespace, trainingjob)"
WORKERS = ('pod=~".+-w[0-9]+-[0-9]+"', 'rank=~"[0-9]{1,7}"')
"""Nobody else's pod speaks for a job, and only of ranks."""
FIGURES: Mapping[str, str] = {
    "ranks": f"count {BY_JOB} (%s)",
    "least_step": f"min {BY_JOB} (%s)",
    "scrape_age": f"max {BY_JOB} (clamp_min(time() - timestamp(%s), 0))",
}
"""One number a job, of its ranks' steps: signs of life of ranks whose sidecars the operator does not hear. How they
train, sidecars tell."""
GPU_NAMES = "DCGM_FI_DEV_XID_ERRORS|DCGM_FI_DEV_ECC_DBE_VOL_TOTAL|DCGM_FI_DEV_ROW_REMAP_FAILURE"
BUSY = 0.5
"""Of the time: a GPU whose cores work less lets its clock fall by itself."""
MOST_PARTS = 64
EASES_SECONDS = 600.0
"""After so long without trouble it is tried with less effort again."""
GPU_SIGNS_SECONDS = 30.0
"""Between two questions for the signs of GPUs: they look back ten minutes, at every GPU of the cluster."""
BEFORE_MINUTES = 2
"""So far back an error is held against what its series was then, where the job does not know. Errors are asked for
every few seconds, so what happens while an operator looks is younger, but for a scrape. An exporter that is back after
such a time, or later, shows nothing new until it has been back for as long."""
_SAME_GPU = "on (node, UUID, gpu, GPU_I_ID)"
"""An exporter that has restarted has another pod and address."""

log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Sample:
    """One look at Prometheus. `figures` are by query and (namespace, job)."""

    at: float = 0.0
    figures: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    gpu: tuple[GpuValue, ...] = ()
    gpu_signs: tuple[GpuValue, ...] = ()
    unavailable: str = NOT_ASKED
    refused: bool = False  # Prometheus is there, but does not answer us
    slow: bool = False  # Prometheus is there, but has not answered in time, or not so much at once
    unvouched: str = ""  # why GPU series are no witness against a node; "": they are

    def of(self, namespace: str, job: str) -> Metrics:
        key = (namespace, job)
        figures: dict[str, Any] = {name: values[key] for name, values in self.figures.items() if key in values}
        return Metrics(
            **figures,
            gpu=self.gpu,
            gpu_signs=self.gpu_signs,
            gpu_unvouched=self.unvouched,
            unavailable=self.unavailable,
            refused=self.refused,
            at=self.at,
        )


@dataclass
class Effort:
    """What is asked for at once, and how long that may take: more time and smaller parts where it was too much, and
    back again after a while."""

    seconds: float = LEAST_SECONDS
    parts: int = 1
    changed_at: float = 0.0

    def __str__(self) -> str:
        return f"with {self.seconds:g} s" + (f" for each of {self.parts} parts" if self.parts > 1 else "")

    @property
    def strained(self) -> bool:
        return self.parts > 1 or self.seconds > LEAST_SECONDS

    def failed(self, now: float, *, more_time: bool) -> None:
        """Time first, where it may help: one question costs Prometheus less than many."""
        if more_time and self.seconds < MOST_SECONDS:
            self.seconds = min(2 * self.seconds, MOST_SECONDS)
        else:
            self.parts = min(2 * self.parts, MOST_PARTS)
        self.changed_at = now

    def succeeded(self, now: float) -> None:
        if 0 <= now - self.changed_at < EASES_SECONDS:
            return
        self.parts = max(1, self.parts // 2)
        self.seconds = max(LEAST_SECONDS, self.seconds / 2)
        self.changed_at = now


@dataclass(frozen=True)
class LinkAnswer:
    """Bits a second that links carry now, by leaf and spine: the least, where it is told twice. `trouble`: why this is
    not all; "": it is."""

    rates: Mapping[tuple[str, str], float]
    trouble: str = ""


class Prometheus:
    """Asks Prometheus at `url`; an empty one is always away.

    GPU series are taken from targets in `dcgm_namespace` only, where the platform's exporter runs. They are vouched for
    if the scrape says on which `node` a target is; with `dcgm_node_label` alone, the target does.
    """

    def __init__(
        self, url: str, dcgm_namespace: str, dcgm_node_label: str, ask: Ask | None = None, matchers: Matchers = ()
    ) -> None:
        """`ask`: how a query gets its rows; None: over HTTP, without credentials."""
        self._url = url
        self._matchers = matchers
        self._effort = Effort()
        self._dcgm_namespace = dcgm_namespace
        self._dcgm_node_label = dcgm_node_label
        self._query = query(dcgm_namespace, matchers)
        self._errors_query = gpu_errors_query(dcgm_namespace, matchers)
        self._signs_query = gpu_signs_query(dcgm_namespace, matchers)
        self._said: dict[str, str] = {}
        self._signs: tuple[GpuValue, ...] = ()
        self._signs_at = -math.inf
        self._ask = ask or (over_http(url) if url else None)

    async def sample(self, now: float, jobs: Collection[JobName] = ()) -> Sample:
        """`jobs`: that are asked about part by part where that must be. Never raises for Prometheus' sake: what is
        wrong stands in the sample."""
        if self._ask is None:
            return Sample(now, unavailable="no Prometheus is configured (prometheus.url in the chart's values)")
        try:
            rows = [row for query in self._queries(jobs) for row in await self._ask(query, self._effort.seconds)]
            sample = self._read(rows, now)
            self._effort.succeeded(now)
        except NotAdmitted as error:
            reason = f"Prometheus at {self._url} {error}"
            return Sample(now, gpu_signs=self._signs, unavailable=reason, refused=True)
        except (Slow, TooMuch) as error:
            self._effort.failed(now, more_time=isinstance(error, Slow))
            self._say("effort", f"Prometheus at {self._url} {error}: it is asked again, {self._effort}")
            reason = f"Prometheus at {self._url} {error}"
            return Sample(now, gpu_signs=self._signs, unavailable=reason, slow=True)
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            reason = f"Prometheus at {self._url} does not answer: {type(error).__name__}"
            return Sample(now, gpu_signs=self._signs, unavailable=reason)
        if self._dcgm_namespace and not 0 <= now - self._signs_at < GPU_SIGNS_SECONDS:
            self._signs, self._signs_at = await self._ask_for_signs(self._ask), now
        return replace(sample, gpu_signs=self._signs)

    async def gpu_errors(self) -> tuple[GpuValue, ...] | None:
        """Those of a sample, as they are now: the little of it that is worth asking for more often. None: they cannot
        be had, or Prometheus has enough to do."""
        if self._ask is None or not self._dcgm_namespace or self._effort.strained:
            return None
        answer = _Answer(self._dcgm_node_label)
        try:
            self._take(answer.take, await self._ask(self._errors_query, LEAST_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError):
            return None  # the next sample says why
        return answer.errors()

    def _queries(self, jobs: Collection[JobName]) -> Sequence[str]:
        """For all jobs in one; in parts, the GPUs in one of their own."""
        if self._effort.parts == 1 or not jobs:
            return [self._query]
        known = sorted(jobs)
        each = math.ceil(len(known) / self._effort.parts)
        groups = [known[start : start + each] for start in range(0, len(known), each)]
        about = [query("", (*self._matchers, *_any_of(group))) for group in groups]
        return [*about, gpu_query(self._dcgm_namespace, self._matchers)] if self._dcgm_namespace else about

    async def link_rates(self, query: str) -> LinkAnswer:
        """What a Fabric's query says of its links. Never raises for Prometheus' sake."""
        if self._ask is None:
            return LinkAnswer({}, "no Prometheus is configured (prometheus.url in the chart's values)")
        rates: dict[tuple[str, str], float] = {}

        def take(row: Mapping[str, Any]) -> None:
            series, value = _measured(row)
            link = _short(series["leaf"], MAX_LEAF), _short(series["spine"], MAX_SPINE)
            rates[link] = min(value, rates.get(link, math.inf))

        try:
            rows = await self._ask(query, LEAST_SECONDS)
            self._take(take, rows[:MAX_LINK_ROWS])
        except NotAdmitted as error:
            return LinkAnswer({}, f"Prometheus at {self._url} {error}")
        except (RequestException, PrometheusApiClientException, ValueError, KeyError, TypeError) as error:
            return LinkAnswer({}, shortened(f"Prometheus at {self._url} does not answer: {error}", MAX_WORDS))
        if len(rows) > MAX_LINK_ROWS:
            return LinkAnswer(rates, f"only {MAX_LINK_ROWS} of {len(rows)} rows are read: ask for less")
        told = len(rates) or not rows
        return LinkAnswer(rates, "" if told else f"none of {len(rows)} rows has a leaf, a spine and a rate")

    async def _ask_for_signs(self, ask: Ask) -> tuple[GpuValue, ...]:
        """That they cannot be had, for whatever the exporters show, costs nothing else: what was known stays."""
        answer, trouble = _Answer(self._dcgm_node_label), ""
        try:
            self._take(answer.take_sign, await ask(self._signs_query, MOST_SECONDS))
        except (RequestException, PrometheusApiClientException, ValueError, KeyError) as error:
            trouble = f"Prometheus at {self._url} does not tell the signs of GPUs: {error}"
        self._say("signs", trouble)
        return self._signs if trouble else tuple(answer.gpu)

    def _read(self, rows: Rows, now: float) -> Sample:
        answer = _Answer(self._dcgm_node_label)
        self._take(answer.take, rows)
        unvouched = _unvouched(self._dcgm_namespace, answer.gpu_series)
        GPU_SERIES_VOUCHED.set(not unvouched)
        self._say("witness", unvouched)
        return Sample(now, answer.figures, answer.errors(), unavailable="", unvouched=unvouched)

    def _take(self, take: Callable[[Mapping[str, Any]], None], rows: Rows) -> None:
        for row in rows:
            try:
                take(row)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                PROMETHEUS_BAD_ROWS.inc()
                log.debug("a row of Prometheus' answer is passed over: %r: %s", row, error)

    def _say(self, about: str, trouble: str) -> None:
        """For the platform team, whenever it changes; "": there is none."""
        if trouble and trouble != self._said.get(about):
            log.warning("%s", trouble)
        self._said[about] = trouble


def query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """All of it in one request; the label `figure` tells the answers apart."""
    steps = "pacekeeper_rank_step" + _selector(*WORKERS, *matchers)
    asked = {name: expression % steps for name, expression in FIGURES.items()}
    return _together(asked) + (f" or {gpu_query(dcgm_namespace, matchers)}" if dcgm_namespace else "")


def gpu_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """The errors of all GPUs, and whether the scrape says on which node they are."""
    place = _of_gpus(dcgm_namespace, matchers)
    counts = {
        "named": "count(" + _selector(*place, 'node!=""') + ")",
        "unnamed": "count(" + _selector(*place, 'node=""') + ")",
    }
    return f"{gpu_errors_query(dcgm_namespace, matchers)} or {_together(counts)}"


def gpu_errors_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """Few rows: most GPUs have none. What the same GPUs' series were a while ago comes with them, zero or not."""
    series = _selector(*_of_gpus(dcgm_namespace, matchers))
    before = f"({series} offset {BEFORE_MINUTES}m and {_SAME_GPU} ({series} > 0))"
    return _together({"gpu": f"{series} > 0", "gpu_before": before})


def _of_gpus(dcgm_namespace: str, matchers: Matchers) -> Matchers:
    return f'__name__=~"{GPU_NAMES}"', f'namespace="{dcgm_namespace}"', *matchers


def gpu_signs_query(dcgm_namespace: str, matchers: Matchers = ()) -> str:
    """The signs that GPUs show, by the policy of `pacekeeper_analysis.diagnose.gpu_health`.

    A counter that was reset in these ten minutes, by a driver or by an exporter that has slipped, says nothing.
    """

    def of(*names: str) -> str:
        return _selector(f'__name__=~"{"|".join(names)}"', f'namespace="{dcgm_namespace}"', *matchers)

    def risen(name: str, least: float) -> str:
        return f"(increase({of(name)}[{MINUTES}m]) >= {least:g} unless resets({of(name)}[{MINUTES}m]) > 0)"

    # What is no figure (see BLANK) would have all bits, and be somebody's usual clock.
    reasons = f"({of('DCGM_FI_DEV_CLOCKS_EVENT_REASONS')} < {BLANK})"
    # MIG instances would count a GPU as often as it is cut, and have its clock by a share of its work.
    whole = _selector('__name__="DCGM_FI_DEV_SM_CLOCK"', f'namespace="{dcgm_namespace}"', 'GPU_I_ID=""', *matchers)
    clock = f"({whole} < {BLANK})"
    busy = f"({of('DCGM_FI_PROF_SM_ACTIVE', 'DCGM_FI_PROF_GR_ENGINE_ACTIVE')} <= 1)"
    usual = f"quantile by (modelName) (0.5, {clock})"
    # Bits 3 (slowdown), 6 (heat) and 7 (power brake); of the lower eight, 6 or 7 make 64 at least.
    throttled = f"floor({reasons} / 8) % 2 == 1 or {reasons} % 256 >= 64"
    replays = risen("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", NVLINK_ERRORS_A_MINUTE * MINUTES)
    recoveries = risen("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", NVLINK_ERRORS_A_MINUTE * MINUTES)
    return _together(
        {
            Sign.ROWS_PENDING: f"{of('DCGM_FI_DEV_ROW_REMAP_PENDING')} > 0",
            Sign.ROWS_FAILED: f"{of('DCGM_FI_DEV_ROW_REMAP_FAILURE')} > 0",
            Sign.PCIE_REPLAYS: risen("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", REPLAYS_A_MINUTE * MINUTES),
            Sign.NVLINK_ERRORS: f"{replays} or {recoveries}",
            Sign.THROTTLED: f"count_over_time(({throttled})[{MINUTES}m:1m]) >= {THROTTLED_A_MINUTE * MINUTES:g}",
            Sign.SLOW_CLOCK: f"{clock} < on (modelName) group_left () ({SLOW_CLOCK} * {usual}) "
            f"and on (UUID) ({busy} > {BUSY})",
        }
    )


def _any_of(jobs: Sequence[JobName]) -> Matchers:
    """Selects these jobs, and those that have the namespace of one and the name of another."""
    namespaces, names = ("|".join(sorted({job[place].replace(".", "[.]") for job in jobs})) for place in (0, 1))
    return f'namespace=~"{namespaces}"', f'trainingjob=~"{names}"'


def _selector(*matchers: str) -> str:
    return "{" + ",".join(matchers) + "}"


def _together(asked: Mapping[str, str]) -> str:
    return " or ".join(f'label_replace({expression}, "figure", "{name}", "", "")' for name, expression in asked.items())


class _Answer:
    """The rows of an answer, put in their places. Whatever a row lacks is raised by `take`, and costs that row."""

    def __init__(self, node_label: str) -> None:
        self.figures: dict[str, dict[tuple[str, str], float]] = {name: {} for name in FIGURES}
        self.gpu: list[GpuValue] = []
        self.gpu_series = {"named": 0, "unnamed": 0}
        self._before: dict[str, float] = {}  # what series of errors were a while ago, by GpuValue.key
        self._node_label = node_label

    def take(self, row: Mapping[str, Any]) -> None:
        series, value = _measured(row)
        match series["figure"]:
            case "gpu":
                self.gpu.append(self._gpu(series, series["__name__"], value))
            case "named" | "unnamed" as name:
                self.gpu_series[name] = int(value)
            case "gpu_before":
                found = self._gpu(series, series["__name__"], value)
                self._before[found.key] = max(value, self._before.get(found.key, 0.0))
            case figure:
                self.figures[figure][_job(series)] = value

    def errors(self) -> tuple[GpuValue, ...]:
        """One of each key: two exporters that tell of the same GPU would else take turns in being news."""
        values: dict[str, GpuValue] = {}
        for value in self.gpu:
            known = values.get(value.key)
            if known is None or (value.value, value.vouched) > (known.value, known.vouched):
                values[value.key] = value
        return tuple(replace(value, before=self._before.get(key)) for key, value in values.items())

    def take_sign(self, row: Mapping[str, Any]) -> None:
        series, value = _measured(row)
        self.gpu.append(self._gpu(series, Sign(series["figure"]), value))

    def _gpu(self, series: Mapping[str, str], metric: str, value: float) -> GpuValue:
        node = series.get("node", "")
        known = _name(node or series[self._node_label])
        uuid = series.get("UUID", "")[:MAX_UUID]
        gpu = series.get("gpu", "")
        instance = series.get("GPU_I_ID", "")
        if not all(isinstance(word, str) and len(word) <= MAX_LABEL for word in (gpu, metric, uuid, instance)):
            raise ValueError("no name of a GPU or a metric")  # jobs' bookkeeping would be full of it
        if value >= BLANK:
            raise ValueError(f"{value:g} means that there is no figure")
        return GpuValue(known, gpu, metric, value, vouched=bool(node), uuid=uuid, instance=instance)


def _measured(row: Mapping[str, Any]) -> tuple[Mapping[str, str], float]:
    """Its labels and its value. Raises ValueError where that can be no measurement."""
    series, value = row["metric"], float(row["value"][1])
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} can be no measurement")
    return series, value


def _short(text: object, limit: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= limit:
        raise ValueError("no name of a leaf or a spine")
    return text


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
