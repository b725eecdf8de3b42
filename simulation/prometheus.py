"""Prometheus, as far as the operator's queries need it: it scrapes sidecars, and computes metrics from the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.failures.gpu_health import GpuSign
from pacekeeper_operator.observe.prometheus import GPU_ERROR_BASELINE_MINUTES

from .network import PROMETHEUS_PLACE
from .ports import ScrapeTarget, SharedWorld

SCRAPE_INTERVAL_SECONDS = 5.0
"""Seconds between two scrapes of a pod."""
LOOKBACK_SECONDS = 300.0
"""Seconds for which a series without new samples is returned."""
XID_BASELINE_SECONDS = 60.0 * GPU_ERROR_BASELINE_MINUTES
XID_METRIC, MEMORY_METRIC = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
_OLD = {XID_METRIC: 79.0, MEMORY_METRIC: 2.0}
"""Values of old errors."""
EXPORTER_NAMESPACE = "gpu-operator"
JobLabels = tuple[str, str]
SeriesRow = dict[str, Any]


@dataclass(frozen=True)
class RankSeries:
    """What a sidecar exports about one rank."""

    scraped_at: float  # virtual seconds of the scrape
    step: float


class SimulatedPrometheus:
    """Answers the operator's queries. The network decides whether it is reachable.

    `nodes`: the names of all nodes, and `sidecars`: those to scrape, by their pods' UIDs. Both change during a run.
    """

    def __init__(self, world: SharedWorld, nodes: Collection[str], sidecars: Mapping[str, ScrapeTarget]) -> None:
        self.failure = ""
        """How it fails: "down", "silent", "empty", or "stale"; "": it does not."""
        self.wrong_series = ""
        """Which series are wrong: "foreign", "gpu", or "unknown-node"; "": none."""
        self.names_nodes = True
        """Whether the scrape adds the node of a GPU exporter as a label."""
        self._world = world
        self._nodes = nodes
        self._sidecars = sidecars
        self._targets: dict[str, tuple[JobLabels, list[RankSeries]]] = {}  # by pod uid
        self.last_error: dict[str, float] = {}
        """Node → when a series last showed a new error or a sign of its GPUs, true or not (virtual seconds)."""
        self._errors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        """(metric, node, GPU) → times and values of changes; 0 before the first."""
        self._absences: dict[str, list[float]] = {}
        """Node → times at which its exporter disappears and returns, alternately."""
        self._pending_rows: dict[tuple[str, str], None] = {}
        world.call_after(SCRAPE_INTERVAL_SECONDS, self._scrape_all)

    def add_exporter(self, node: str, *, old_error: str = "") -> None:
        """Add a node's exporter.

        `old_error`: metric of an error that its first GPU had long before the run; "": none.
        """
        if old_error:
            self._errors[old_error, node, "0"] = [(-math.inf, _OLD[old_error])]

    def show_exporter(self, node: str, present: bool) -> None:
        """Set whether there are series of this node's GPUs."""
        times = self._absences.setdefault(node, [])
        if present == bool(len(times) % 2):
            times.append(self._world.now())

    def show_pending_rows(self, node: str, gpu: str, pending: bool) -> None:
        """Set whether rows of a GPU's memory wait to be remapped."""
        self._pending_rows.pop((node, gpu), None)
        if pending:
            self._pending_rows[node, gpu] = None

    def count_xid(self, node: str, gpu: str, xid: int) -> None:
        """Set the newest XID of a GPU, as DCGM exports it."""
        self._errors.setdefault((XID_METRIC, node, gpu), []).append((self._world.now(), float(xid)))
        self.last_error[node] = self._world.now()

    def run_query(self, query: str) -> list[SeriesRow]:
        """Return the answer's `result`. Raises ConnectionRefusedError, or TimeoutError if there would be no answer."""
        if self.failure == "down":
            raise ConnectionRefusedError("Prometheus")
        if self.failure == "silent":
            raise TimeoutError("Prometheus")
        if self.failure == "empty":
            return []
        if f'"pacekeeper_query", "{GpuSign.ROWS_PENDING}"' in query:
            return list(self._iterate_sign_rows())
        now = self._world.now()
        rows = [
            self._build_row({"namespace": job[0], "trainingjob": job[1], "pacekeeper_query": name}, value)
            for job, series in (
                self._group_by_job(now).items() if '"pacekeeper_query", "reporting_ranks"' in query else ()
            )
            for name, value in compute_job_metrics(series, now)
        ]
        if '"pacekeeper_query", "gpu"' in query:
            rows += self._iterate_gpu_rows()
        return rows

    def _iterate_sign_rows(self) -> Iterator[SeriesRow]:
        now = self._world.now()
        for node, gpu in [key for key in self._pending_rows if self._is_there(key[0], now)]:
            self.last_error[node] = now
            yield self._build_row(self._build_gpu_labels(node, gpu, str(GpuSign.ROWS_PENDING)), 1)

    def _build_row(self, labels: dict[str, str], value: float) -> SeriesRow:
        return {"metric": labels, "value": [self._world.wall_time(PROMETHEUS_PLACE), repr(float(value))]}

    def _group_by_job(self, now: float) -> dict[JobLabels, list[RankSeries]]:
        by_job: dict[JobLabels, list[RankSeries]] = defaultdict(list)
        for job, series in self._targets.values():
            by_job[job] += [sample for sample in series if now - sample.scraped_at <= LOOKBACK_SECONDS]
        if self.wrong_series == "foreign" and len(by_job) > 1:
            jobs = list(by_job)
            return {job: by_job[other_job] for job, other_job in zip(jobs, jobs[1:] + jobs[:1], strict=True)}
        return by_job

    def _iterate_gpu_rows(self) -> Iterator[SeriesRow]:
        now = self._world.now()
        nodes = [node for node in self._nodes if self._is_there(node, now)]
        rows = {key: (self._value(*key, now), self._value(*key, now - XID_BASELINE_SECONDS)) for key in self._errors}
        wrong_node = {"gpu": next(iter(nodes), ""), "unknown-node": "node-that-is-not"}.get(self.wrong_series, "")
        if wrong_node:
            rows[XID_METRIC, wrong_node, "0"] = (79.0, 0.0)
            self.last_error[wrong_node] = now
        for (metric, node, gpu), (value, baseline) in rows.items():
            if value or (value is not None and baseline):
                yield self._build_row({"__name__": metric, **self._build_gpu_labels(node, gpu, "gpu")}, value)
            if value and baseline is not None:
                yield self._build_row(
                    {"__name__": metric, **self._build_gpu_labels(node, gpu, "gpu_baseline")}, baseline
                )
        if nodes:
            yield self._build_row(
                {"pacekeeper_query": "node_from_target" if self.names_nodes else "node_from_exporter"}, len(nodes)
            )

    def _is_there(self, node: str, at: float) -> bool:
        """Return whether the node's exporter was scraped at that time (virtual seconds)."""
        return bisect_right(self._absences.get(node, []), at) % 2 == 0

    def _value(self, metric: str, node: str, gpu: str, at: float) -> float | None:
        """Return a series' value at that time (virtual seconds); None: there was none."""
        if not self._is_there(node, at):
            return None
        return next((value for since, value in reversed(self._errors[metric, node, gpu]) if since <= at), 0.0)

    def _build_gpu_labels(self, node: str, gpu: str, query: str) -> dict[str, str]:
        """Build the labels of a series about a GPU."""
        node_label = "node" if self.names_nodes else "Hostname"
        return {"namespace": EXPORTER_NAMESPACE, node_label: node, "gpu": gpu, "pacekeeper_query": query}

    def _scrape_all(self) -> None:
        self._world.call_after(SCRAPE_INTERVAL_SECONDS, self._scrape_all)
        if self.failure == "stale":
            return
        now, can_reach = self._world.now(), self._world.network.can_reach
        # After a boot, the exporter has no past errors.
        for (_, node, _), changes in self._errors.items():
            if changes[-1][1] and not can_reach(node, node):
                changes.append((now, 0.0))
        self._pending_rows = {key: None for key in self._pending_rows if can_reach(key[0], key[0])}
        self._targets = {}
        for uid, sidecar in self._sidecars.items():
            steps = sidecar.export_steps() if can_reach(PROMETHEUS_PLACE, sidecar.node) else None
            if steps is not None:
                self._targets[uid] = (sidecar.namespace, sidecar.job), [RankSeries(now, step) for step in steps]


def compute_job_metrics(series: list[RankSeries], now: float) -> Iterator[tuple[str, float]]:
    """Yield name and value of each of the operator's metrics (`pacekeeper_operator.observe.prometheus`)."""
    if series:
        yield "reporting_ranks", len(series)
        yield "min_step", min(sample.step for sample in series)
        yield "scrape_age", max(now - sample.scraped_at for sample in series)
