"""What Prometheus last answered about jobs and GPUs, and the queries for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from ... import metrics
from ...api.training_job import JobPhase, TrainingJob
from ...async_runtime import OperatorRuntime
from ...kube.store import ResourceStore
from ...observe.job_cache import JobRegistry
from ...observe.prometheus import PrometheusClient, PrometheusSample
from ...state.cluster_view import PodView
from ...state.job_metrics import PROMETHEUS_NOT_QUERIED, GpuValue, JobMetrics
from ...state.network import JobName
from .passes import PassScheduler

GPU_ERROR_POLL_SECONDS = 0.5
"""Seconds between two queries for GPU errors."""
MONITORED_PHASES = frozenset({JobPhase.PENDING, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING})
MAX_SAMPLE_AGE_SECONDS = 30.0
"""Older Prometheus samples are not used. They become that old only if no job was active in between."""


@dataclass
class PrometheusPoller:
    """Queries Prometheus while a job is active, and wakes the jobs on nodes with new GPU errors."""

    client: PrometheusClient
    runtime: OperatorRuntime
    jobs: JobRegistry
    pods: ResourceStore[PodView]
    passes: PassScheduler
    sample: PrometheusSample = field(default_factory=PrometheusSample)
    has_watched_jobs: Callable[[], bool] = lambda: False
    """Returns whether jobs are watched, for which the series of GPUs are read."""
    wake_watched_jobs: Callable[[Collection[str]], None] = lambda _nodes: None
    """Starts a pass over the watched jobs on these nodes."""
    _gpu_values: tuple[GpuValue, ...] = field(default=(), init=False)  # of the last answer
    _query_task: asyncio.Task[None] | None = field(default=None, init=False)

    def get_metrics(self, job: TrainingJob, now: float) -> JobMetrics:
        """Return the job's metrics of the last sample."""
        if not self._is_sample_recent(now):
            return JobMetrics(prometheus_error=PROMETHEUS_NOT_QUERIED)
        return self.sample.get_metrics(job.namespace, job.name)

    async def poll_gpu_errors(self) -> None:
        """Query GPU errors, more often than all other metrics, while Prometheus answers; until cancelled."""
        while True:
            await self.runtime.sleep(GPU_ERROR_POLL_SECONDS)
            if not (self.passes.active_jobs or self.has_watched_jobs()) or self.sample.error:
                continue
            gpu_values = await self.client.read_gpu_errors()
            if gpu_values is not None and not self.sample.error:
                self._on_gpu_errors(gpu_values)
                self.sample = replace(self.sample, gpu_values=gpu_values)

    def start_query(self) -> None:
        """Start a query in the background: it may take long, and counts from its start."""
        if self._query_task is None or self._query_task.done():
            active = tuple(name for name, job in self.jobs if job.phase in MONITORED_PHASES)
            is_needed = bool(active) or self.has_watched_jobs()
            self._query_task = self.runtime.start_task(self._query(active), "Prometheus query") if is_needed else None

    async def _query(self, jobs: Sequence[JobName]) -> None:
        now = self.runtime.now()
        sample = await self.client.sample(now, jobs)
        if sample.timed_out and not self.sample.error and self._is_sample_recent(now):
            return  # the last sample is still valid
        if not sample.error:  # a failed query says nothing about GPUs
            self._on_gpu_errors(sample.gpu_values)
        self.sample = sample
        metrics.PROMETHEUS_UP.set(not sample.error)

    def _is_sample_recent(self, now: float) -> bool:
        queried_at = self.sample.queried_at
        return queried_at is not None and now - queried_at <= MAX_SAMPLE_AGE_SECONDS

    def _on_gpu_errors(self, gpu_values: tuple[GpuValue, ...]) -> None:
        """Wake the jobs on nodes whose GPUs report new errors."""
        changed_nodes = {value.node for value in {*gpu_values} ^ {*self._gpu_values}}
        self._gpu_values = gpu_values
        for (namespace, _), pod in self.pods.items() if changed_nodes else ():
            if pod.node in changed_nodes and self.jobs.wake(namespace, pod.job) is not None:
                self.passes.jobs_with_new_gpu_errors.add((namespace, pod.job))
        if changed_nodes:
            self.wake_watched_jobs(changed_nodes)
