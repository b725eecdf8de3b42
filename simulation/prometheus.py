"""Prometheus, as far as the operator's queries go: what sidecars export is scraped, and figures follow from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacekeeper_analysis.diagnose.gpu_health import GpuSign
from pacekeeper_operator.observe.prometheus import GPU_ERROR_BASELINE_MINUTES

from .network import PROMETHEUS_PLACE

if TYPE_CHECKING:
    from .workers.worker import SimulatedWorker
    from .world import World

SCRAPE_INTERVAL_SECONDS = 5.0
"""Seconds between two scrapes of a pod."""
LOOKBACK_SECONDS = 300.0
"""So many seconds a series without news is answered with."""
XID_BASELINE_SECONDS = 60.0 * GPU_ERROR_BASELINE_MINUTES
XID_METRIC, MEMORY_METRIC = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
_OLD = {XID_METRIC: 79.0, MEMORY_METRIC: 2.0}
"""Values of old errors."""
EXPORTER_NAMESPACE = "gpu-operator"
JobLabels = tuple[str, str]
SeriesRow = dict[str, Any]


@dataclass(frozen=True)
class RankSeries:
    """What a sidecar says of one rank."""

    scraped_at: float  # virtual seconds of the scrape
    step: float


class SimulatedPrometheus:
    """Answers the operator's queries. Unreachable it is by the network."""

    def __init__(self, world: World) -> None:
        self.failure = ""
        """How it fails: "down", "silent", "empty" or "stale"; "": it does not."""
        self.wrong_series = ""
        """Which series lie: "foreign", "gpu" or "unknown-node"; "": none."""
        self.names_nodes = True
        """Whether the scrape says on which node an exporter of GPU figures is."""
        self._world = world
        self._targets: dict[str, tuple[JobLabels, list[RankSeries]]] = {}  # by pod uid
        self.last_error: dict[str, float] = {}
        """Node → when a series last showed a new error or a sign of its GPUs, true or not (virtual seconds)."""
        self._errors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        """(metric, node, GPU) → since when it has which value; 0 before."""
        self._absences: dict[str, list[float]] = {}
        """Node → moments at which its exporter goes away and comes back, in turns."""
        self._pending_rows: dict[tuple[str, str], None] = {}
        world.call_after(SCRAPE_INTERVAL_SECONDS, self._scrape_all)

    def add_exporter(self, node: str, *, old_error: str = "") -> None:
        """On a node whose first GPU has had an error long before the run; `old_error`: the metric, "": it has not."""
        if old_error:
            self._errors[old_error, node, "0"] = [(-math.inf, _OLD[old_error])]

    def show_exporter(self, node: str, there: bool) -> None:
        """Whether there are series of this node's GPUs."""
        moments = self._absences.setdefault(node, [])
        if there == bool(len(moments) % 2):
            moments.append(self._world.now())

    def show_pending_rows(self, node: str, gpu: str, pending: bool) -> None:
        """Whether rows of a GPU's memory wait to be remapped."""
        self._pending_rows.pop((node, gpu), None)
        if pending:
            self._pending_rows[node, gpu] = None

    def count_xid(self, node: str, gpu: str, xid: int) -> None:
        """The newest one of a GPU, as DCGM tells it."""
        self._errors.setdefault((XID_METRIC, node, gpu), []).append((self._world.now(), float(xid)))
        self.last_error[node] = self._world.now()

    def run_query(self, query: str) -> list[SeriesRow]:
        """The answer's `result`. Raises ConnectionRefusedError, or TimeoutError where none would come."""
        if self.failure == "down":
            raise ConnectionRefusedError("Prometheus")
        if self.failure == "silent":
            raise TimeoutError("Prometheus")
        if self.failure == "empty":
            return []
        if f'"figure", "{GpuSign.ROWS_PENDING}"' in query:
            return list(self._iterate_sign_rows())
        now = self._world.now()
        rows = [
            self._build_row({"namespace": job[0], "trainingjob": job[1], "figure": name}, value)
            for job, series in (self._group_by_job(now).items() if '"figure", "ranks"' in query else ())
            for name, value in compute_job_metrics(series, now)
        ]
        if '"figure", "gpu"' in query:
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
        found: dict[JobLabels, list[RankSeries]] = defaultdict(list)
        for job, series in self._targets.values():
            found[job] += [each for each in series if now - each.scraped_at <= LOOKBACK_SECONDS]
        if self.wrong_series == "foreign" and len(found) > 1:
            jobs = list(found)
            return {job: found[other] for job, other in zip(jobs, jobs[1:] + jobs[:1], strict=True)}
        return found

    def _iterate_gpu_rows(self) -> Iterator[SeriesRow]:
        now = self._world.now()
        there = [node for node in self._world.nodes if self._is_there(node, now)]
        rows = {key: (self._value(*key, now), self._value(*key, now - XID_BASELINE_SECONDS)) for key in self._errors}
        liar = {"gpu": next(iter(there), ""), "unknown-node": "node-that-is-not"}.get(self.wrong_series, "")
        if liar:
            rows[XID_METRIC, liar, "0"] = (79.0, 0.0)
            self.last_error[liar] = now
        for (metric, node, gpu), (value, before) in rows.items():
            if value:
                yield self._build_row({"__name__": metric, **self._build_gpu_labels(node, gpu, "gpu")}, value)
            if value and before is not None:
                yield self._build_row({"__name__": metric, **self._build_gpu_labels(node, gpu, "gpu_before")}, before)
        if there:
            yield self._build_row({"figure": "named" if self.names_nodes else "unnamed"}, len(there))

    def _is_there(self, node: str, at: float) -> bool:
        """Whether the node's exporter was scraped at that moment (virtual seconds)."""
        return bisect_right(self._absences.get(node, []), at) % 2 == 0

    def _value(self, metric: str, node: str, gpu: str, at: float) -> float | None:
        """Of a series at that moment (virtual seconds); None: there was none."""
        if not self._is_there(node, at):
            return None
        return next((value for since, value in reversed(self._errors[metric, node, gpu]) if since <= at), 0.0)

    def _build_gpu_labels(self, node: str, gpu: str, figure: str) -> dict[str, str]:
        """Labels of a series about it."""
        place = "node" if self.names_nodes else "Hostname"
        return {"namespace": EXPORTER_NAMESPACE, place: node, "gpu": gpu, "figure": figure}

    def _scrape_all(self) -> None:
        self._world.call_after(SCRAPE_INTERVAL_SECONDS, self._scrape_all)
        if self.failure == "stale":
            return
        now, reaches = self._world.now(), self._world.network.can_reach
        # A machine that boots has an exporter that knows of nothing.
        for (_, node, _), changes in self._errors.items():
            if changes[-1][1] and not reaches(node, node):
                changes.append((now, 0.0))
        self._pending_rows = {key: None for key in self._pending_rows if reaches(key[0], key[0])}
        self._targets = {
            uid: ((worker.namespace, worker.job), list(_scrape_ranks(worker, now)))
            for uid, worker in self._world.workers.items()
            if self._can_scrape(worker)
        }

    def _can_scrape(self, worker: SimulatedWorker) -> bool:
        sidecar = worker.sidecar
        up = sidecar.serves and not sidecar.dead and not sidecar.paused
        return up and self._world.network.can_reach(PROMETHEUS_PLACE, worker.node)


def _scrape_ranks(worker: SimulatedWorker, now: float) -> Iterator[RankSeries]:
    return (RankSeries(now, rank.step) for rank in worker.launcher.ranks if rank.training_round is not None)


def compute_job_metrics(series: list[RankSeries], now: float) -> Iterator[tuple[str, float]]:
    """Name and value of each of the operator's figures (`pacekeeper_operator.observe.prometheus`)."""
    if series:
        yield "ranks", len(series)
        yield "least_step", min(each.step for each in series)
        yield "scrape_age", max(now - each.scraped_at for each in series)
