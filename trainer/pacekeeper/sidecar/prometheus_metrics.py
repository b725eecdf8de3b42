"""The worker's Prometheus metrics, computed at each scrape: nothing runs between two scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pacekeeper.health.rank_rings import ObservedRank, RankRings

from .connection_sampler import ConnectionSampler
from .settings import SidecarSettings

RANK_METRIC_LABELS = ("trainingjob", "worker", "rank")
"""Prometheus adds namespace, pod, and node by service discovery. It uses `job` itself, so ours is `trainingjob`."""

_RANK_GAUGES: dict[str, tuple[str, Callable[[ObservedRank], float | None]]] = {
    "step": ("Last completed optimizer step.", lambda rank: float(rank.state["step"])),
    "round": ("Round that the rank belongs to.", lambda rank: float(rank.state["round"])),
    "phase": ("What the rank is busy with, as a number of records.Phase.", lambda rank: float(rank.state["phase"])),
    "step_seconds": ("Mean time of a step over the window.", lambda rank: rank.history.step_seconds),
    "compute_seconds": (
        "Mean own work in a step, excluding waits for peers.",
        lambda rank: rank.history.compute_seconds,
    ),
    "wait_seconds": ("Mean wait for peers in a step.", lambda rank: rank.history.wait_seconds),
    "compute_seconds_per_sample": ("Mean own work a sample.", lambda rank: rank.history.compute_seconds_per_sample),
    "first_steps_seconds": (
        "Median time of the first steady steps seen here.",
        lambda rank: rank.history.first_steps_seconds,
    ),
    "sync_mode": (
        "Mode in force: 0 Sync, 1 EDiT, 2 AsyncEDiT.",
        lambda rank: None if rank.state["sync_mode"] < 0 else float(rank.state["sync_mode"]),
    ),
    "synchronization_seconds": (
        "Mean time that a synchronization in Local-SGD modes blocked the rank.",
        lambda rank: rank.history.synchronization_seconds,
    ),
    "share": ("Samples of this rank in a step.", lambda rank: float(rank.state["share"]) or None),
    "loss": ("Training loss of the last step.", lambda rank: float(rank.state["loss"]) or None),
    "checkpoint_step": ("Last step whose checkpoint is published.", lambda rank: float(rank.state["checkpoint_step"])),
    "snapshot_step": ("Last step held in shared memory.", lambda rank: float(rank.state["snapshot_step"])),
}
_RANK_COUNTERS: dict[str, tuple[str, Callable[[ObservedRank], float]]] = {
    "steps": ("Optimizer steps.", lambda rank: rank.history.steps_total),
    "samples": ("Samples trained on.", lambda rank: rank.history.samples_total),
    "gc_seconds": ("Time in Python garbage collections.", lambda rank: rank.history.gc_seconds_total),
    "collective_seconds": ("Time inside collectives.", lambda rank: rank.history.collective_seconds_total),
    "lost_records": ("Records that were overwritten before they were read.", lambda rank: rank.lost_records),
}


class WorkerMetrics(Collector):
    """Collects the metrics for a prometheus_client registry."""

    def __init__(self, settings: SidecarSettings, ranks: RankRings, connections: ConnectionSampler) -> None:
        self._settings = settings
        self._ranks = ranks
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance: collecting reads files."""
        return ()

    def collect(self) -> Iterator[Metric]:
        ranks = self._ranks.refresh()
        for name, (text, gauge) in _RANK_GAUGES.items():
            family = GaugeMetricFamily(f"pacekeeper_rank_{name}", text, labels=RANK_METRIC_LABELS)
            for rank in ranks:
                value = gauge(rank)
                if value is not None:
                    family.add_metric(self._labels(rank), value)
            yield family
        for name, (text, counter) in _RANK_COUNTERS.items():
            total = CounterMetricFamily(f"pacekeeper_rank_{name}", text, labels=RANK_METRIC_LABELS)
            for rank in ranks:
                total.add_metric(self._labels(rank), counter(rank))
            yield total
        yield from self._collect_sent_bytes()
        contact = GaugeMetricFamily(
            "pacekeeper_worker_operator_contact_seconds",
            "Age of the operator's last answer.",
            labels=("trainingjob", "worker"),
        )
        path = self._settings.runtime.operator_contact
        if path.exists():
            age = max(0.0, time.time() - path.stat().st_mtime)  # the node's clock may have been set back
            contact.add_metric((self._settings.job, self._settings.worker), age)
        yield contact

    def _collect_sent_bytes(self) -> Iterator[Metric]:
        """Yield sums over the open connections.

        They decrease when a rank closes connections, which is a counter reset.
        """
        acked = CounterMetricFamily(
            "pacekeeper_rank_sent_bytes",
            "Bytes sent to other ranks and acknowledged, by the kernel.",
            labels=RANK_METRIC_LABELS,
        )
        busy = CounterMetricFamily(
            "pacekeeper_rank_sending_seconds",
            "Time with something to send or unacknowledged.",
            labels=RANK_METRIC_LABELS,
        )
        for rank, (sent, seconds) in self._connections.sum_by_rank().items():
            labels = (self._settings.job, self._settings.worker, str(rank))
            acked.add_metric(labels, sent)
            busy.add_metric(labels, seconds)
        yield acked
        yield busy

    def _labels(self, rank: ObservedRank) -> tuple[str, str, str]:
        return (self._settings.job, self._settings.worker, str(rank.state["rank"]))
