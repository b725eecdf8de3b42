"""The metrics of a job, from its ranks' reports and from Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes

MIN_WAITING_SHARE = 0.1
"""Least share of a step, spent in waits in which no rank works, that is investigated."""
PROMETHEUS_NOT_QUERIED = "Prometheus has not been asked lately"


@dataclass(frozen=True)
class GpuValue:
    """One of DCGM's counters that is not zero, or has just become zero; or a sign, by the policy of GPU health."""

    node: str
    gpu: str
    metric: str  # name in DCGM; or a gpu_health.Sign, with its number as `value`
    value: float
    trusted: bool = False  # Prometheus' own service discovery names the node, not the exporter
    uuid: str = ""  # UUID of the GPU; "": the exporter does not report it
    instance: str = ""  # MIG instance; "": the whole GPU
    pods: frozenset[str] = frozenset()  # namespace/name of the pods that use it, by the exporter; (): not reported
    previous_value: float | None = 0.0  # value of the same series two minutes ago; None: it did not exist

    @property
    def key(self) -> str:
        gpu = self.gpu or self.uuid
        return f"{self.node}/{gpu}{f':{self.instance}' if self.instance else ''}/{self.metric}"

    @property
    def gpu_key(self) -> tuple[str, str]:
        """Node and number of the GPU."""
        return self.node, self.gpu


@dataclass(frozen=True)
class PersistentSlowness:
    """Ranks so little slower than their peers that the detection takes several windows."""

    relative_times: KnownRelativeTimes
    since: float  # seconds since the epoch: the end of the first window that shows one of them


@dataclass(frozen=True)
class JobMetrics:
    """A job's metrics, from its ranks' reports and from Prometheus. None: not known (yet)."""

    # From the statistics in its workers' heartbeats.

    slowdown: float | None = None  # S of own work: slowest rank over the mean
    peer_slowdown: float | None = None  # S against its peers: slowest rank's own work over an equal share at their pace
    relative_time: float | None = None  # slowest rank's own work per sample over its peers' median
    step_seconds: float | None = None  # median of the ranks' means
    seconds_per_sample: float | None = None  # median of the own work per sample of all ranks but the slowest
    slowest_rank: int | None = None
    wait_share: float | None = None  # share of a step in which even the rank that waits least waits
    least_waiting_rank: int | None = None  # that rank
    steps: int = 0  # steps with the plan's shares that all ranks' statistics cover; 0: some cover other shares
    throughput: float | None = None  # samples a second of the whole job; None: the script does not report its shares
    uniform_slowdown: float | None = (
        None  # step time of the least slowed rank over that of the job's own first steady steps
    )
    unreported_members: tuple[str, ...] = ()  # members whose ranks' statistics are missing now
    persistent_slowness: PersistentSlowness | None = None
    needs_more_windows: bool = False  # it takes some more windows to be sure that there is none
    # From Prometheus.
    gpu_values: tuple[GpuValue, ...] = ()  # counters of all nodes
    gpu_signs: tuple[GpuValue, ...] = ()  # signs of the GPUs of all nodes
    gpu_untrusted_reason: str = ""  # why GPU series cannot be a witness against a node; "": they can
    prometheus_error: str = ""  # why Prometheus does not answer; "": it does
    prometheus_denied: bool = False  # it is reachable, but refuses the operator's queries
    reporting_ranks: float | None = None  # ranks of the job that export their steps
    min_step: float | None = None  # the least step of these ranks
    scrape_age: float | None = None  # seconds since all of these ranks were scraped, at the time of the query
    queried_at: float | None = None  # time of the query; None: there was none
