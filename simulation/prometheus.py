"""Prometheus, as far as the operator's queries go: what sidecars export is scraped, and figures follow from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacekeeper_analysis.diagnose.gpu_health import Sign
from pacekeeper_operator.observe.prometheus import BEFORE_MINUTES

from .network import PROMETHEUS

if TYPE_CHECKING:
    from .workers.worker import Worker
    from .world import World

SCRAPES = 5.0
"""Seconds between two scrapes of a pod."""
LOOKBACK = 300.0
"""So many seconds a series without news is answered with."""
BEFORE_SECONDS = 60.0 * BEFORE_MINUTES
XID_METRIC, MEMORY_METRIC = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
_OLD = {XID_METRIC: 79.0, MEMORY_METRIC: 2.0}
"""Values of old errors."""
EXPORTER = "gpu-operator"
Job = tuple[str, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """What a sidecar says of one rank."""

    at: float  # virtual seconds of the scrape
    step: float


class Prometheus:
    """Answers the operator's queries. Unreachable it is by the network."""

    def __init__(self, world: World) -> None:
        self.silence = ""
        """How it fails: "down", "silent", "empty" or "stale"; "": it does not."""
        self.lie = ""
        """Which series lie: "foreign", "gpu" or "unknown-node"; "": none."""
        self.names_nodes = True
        """Whether the scrape says on which node an exporter of GPU figures is."""
        self._world = world
        self._targets: dict[str, tuple[Job, list[Series]]] = {}  # by pod uid
        self.last_error: dict[str, float] = {}
        """Node → when a series last showed a new error or a sign of its GPUs, true or not (virtual seconds)."""
        self._errors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        """(metric, node, GPU) → since when it has which value; 0 before."""
        self._absences: dict[str, list[float]] = {}
        """Node → moments at which its exporter goes away and comes back, in turns."""
        self._pending_rows: dict[tuple[str, str], None] = {}
        world.after(SCRAPES, self._scrape_all)

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

    def rows(self, query: str) -> list[Row]:
        """The answer's `result`. Raises ConnectionRefusedError, or TimeoutError where none would come."""
        if self.silence == "down":
            raise ConnectionRefusedError("Prometheus")
        if self.silence == "silent":
            raise TimeoutError("Prometheus")
        if self.silence == "empty":
            return []
        if f'"figure", "{Sign.ROWS_PENDING}"' in query:
            return list(self._sign_rows())
        now = self._world.now()
        rows = [
            self._row({"namespace": job[0], "trainingjob": job[1], "figure": name}, value)
            for job, series in (self._by_job(now).items() if '"figure", "ranks"' in query else ())
            for name, value in figures(series, now)
        ]
        if '"figure", "gpu"' in query:
            rows += self._gpu_rows()
        return rows

    def _sign_rows(self) -> Iterator[Row]:
        now = self._world.now()
        for node, gpu in [key for key in self._pending_rows if self._is_there(key[0], now)]:
            self.last_error[node] = now
            yield self._row(self._of_gpu(node, gpu, str(Sign.ROWS_PENDING)), 1)

    def _row(self, labels: dict[str, str], value: float) -> Row:
        return {"metric": labels, "value": [self._world.wall(PROMETHEUS), repr(float(value))]}

    def _by_job(self, now: float) -> dict[Job, list[Series]]:
        found: dict[Job, list[Series]] = defaultdict(list)
        for job, series in self._targets.values():
            found[job] += [each for each in series if now - each.at <= LOOKBACK]
        if self.lie == "foreign" and len(found) > 1:
            jobs = list(found)
            return {job: found[other] for job, other in zip(jobs, jobs[1:] + jobs[:1], strict=True)}
        return found

    def _gpu_rows(self) -> Iterator[Row]:
        now = self._world.now()
        there = [node for node in self._world.nodes if self._is_there(node, now)]
        rows = {key: (self._value(*key, now), self._value(*key, now - BEFORE_SECONDS)) for key in self._errors}
        liar = {"gpu": next(iter(there), ""), "unknown-node": "node-that-is-not"}.get(self.lie, "")
        if liar:
            rows[XID_METRIC, liar, "0"] = (79.0, 0.0)
            self.last_error[liar] = now
        for (metric, node, gpu), (value, before) in rows.items():
            if value:
                yield self._row({"__name__": metric, **self._of_gpu(node, gpu, "gpu")}, value)
            if value and before is not None:
                yield self._row({"__name__": metric, **self._of_gpu(node, gpu, "gpu_before")}, before)
        if there:
            yield self._row({"figure": "named" if self.names_nodes else "unnamed"}, len(there))

    def _is_there(self, node: str, at: float) -> bool:
        """Whether the node's exporter was scraped at that moment (virtual seconds)."""
        return bisect_right(self._absences.get(node, []), at) % 2 == 0

    def _value(self, metric: str, node: str, gpu: str, at: float) -> float | None:
        """Of a series at that moment (virtual seconds); None: there was none."""
        if not self._is_there(node, at):
            return None
        return next((value for since, value in reversed(self._errors[metric, node, gpu]) if since <= at), 0.0)

    def _of_gpu(self, node: str, gpu: str, figure: str) -> dict[str, str]:
        """Labels of a series about it."""
        place = "node" if self.names_nodes else "Hostname"
        return {"namespace": EXPORTER, place: node, "gpu": gpu, "figure": figure}

    def _scrape_all(self) -> None:
        self._world.after(SCRAPES, self._scrape_all)
        if self.silence == "stale":
            return
        now, reaches = self._world.now(), self._world.network.reaches
        # A machine that boots has an exporter that knows of nothing.
        for (_, node, _), changes in self._errors.items():
            if changes[-1][1] and not reaches(node, node):
                changes.append((now, 0.0))
        self._pending_rows = {key: None for key in self._pending_rows if reaches(key[0], key[0])}
        self._targets = {
            uid: ((worker.namespace, worker.job), list(_scrape(worker, now)))
            for uid, worker in self._world.workers.items()
            if self._answers(worker)
        }

    def _answers(self, worker: Worker) -> bool:
        sidecar = worker.sidecar
        up = sidecar.serves and not sidecar.dead and not sidecar.paused
        return up and self._world.network.reaches(PROMETHEUS, worker.node)


def _scrape(worker: Worker, now: float) -> Iterator[Series]:
    return (Series(now, rank.step) for rank in worker.launcher.ranks if rank.run is not None)


def figures(series: list[Series], now: float) -> Iterator[tuple[str, float]]:
    """Name and value of each of the operator's figures (`pacekeeper_operator.observe.prometheus`)."""
    if series:
        yield "ranks", len(series)
        yield "least_step", min(each.step for each in series)
        yield "scrape_age", max(now - each.at for each in series)
