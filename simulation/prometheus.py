"""Prometheus, as far as the operator's queries go: what sidecars export is scraped, and figures follow from it."""

from __future__ import annotations

import math
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
XID_METRIC = "DCGM_FI_DEV_XID_ERRORS"
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
        self._xids: dict[tuple[str, str], int] = {}  # by node and GPU
        self._xids_before: dict[tuple[str, str], tuple[float, int]] = {}  # until when, in virtual seconds; and which
        self._pending_rows: dict[tuple[str, str], None] = {}
        world.after(SCRAPES, self._scrape_all)

    def show_pending_rows(self, node: str, gpu: str, pending: bool) -> None:
        """Whether rows of a GPU's memory wait to be remapped."""
        self._pending_rows.pop((node, gpu), None)
        if pending:
            self._pending_rows[node, gpu] = None

    def count_xid(self, node: str, gpu: str, xid: int) -> None:
        """The newest one of a GPU, as DCGM tells it."""
        self._xids_before[node, gpu] = self._world.now(), self._xids.get((node, gpu), 0)
        self._xids[node, gpu] = xid

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
        for node, gpu in self._pending_rows:
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
        nodes = list(self._world.nodes)
        xids = dict(self._xids)
        if self.lie == "gpu":
            xids[nodes[0], "0"] = 79
        elif self.lie == "unknown-node":
            xids["node-that-is-not", "0"] = 79
        for (node, gpu), xid in xids.items():
            yield self._row({"__name__": XID_METRIC, **self._of_gpu(node, gpu, "gpu")}, xid)
            changed, earlier = self._xids_before.get((node, gpu), (math.inf, 0))
            before = xid if self._world.now() - changed > BEFORE_SECONDS else earlier
            yield self._row({"__name__": XID_METRIC, **self._of_gpu(node, gpu, "gpu_before")}, before)
        yield self._row({"figure": "named" if self.names_nodes else "unnamed"}, len(nodes))

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
        self._xids = {key: xid for key, xid in self._xids.items() if reaches(key[0], key[0])}
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
