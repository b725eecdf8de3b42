"""Real launchers and ranks under real sidecars and the operator's real decisions, in one process, without a cluster.

Between sidecar and operator there is no network, and what the operator decides is not written anywhere; pods are what
the test sets. Everything else is as in a cluster with `prometheus.url` empty.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.sidecar.connection_sampler import ConnectionSampler
from pacekeeper.sidecar.operator_client import OperatorClient, OperatorUnavailable
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import Sidecar
from pacekeeper.sidecar.worker_monitor import WorkerMonitor
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat
from pacekeeper_operator.api.training_job import JobPhase, JobStatus, TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.endpoint.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.runtime.reconcile import INVESTIGATION_POLL_SECONDS
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.cluster_view import ClusterView, PodView
from pacekeeper_operator.state.desired_state import DesiredState, GpuReadings, Incident, Lifecycle, Placement, State
from pacekeeper_operator.state.desired_state import WorkerRecord as Record
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import build_job as job_of
from testing.operators.observations import build_policy
from testing.training.launchers import LaunchedWorker, LauncherTeam

NO_PROMETHEUS = JobMetrics(prometheus_error="no Prometheus is configured (prometheus.url in the chart's values)")


class OperatorHarness:
    """An operator with one job, whose workers are the team's."""

    def __init__(self, team: LauncherTeam, job: TrainingJob) -> None:
        self.team = team
        self.runtime = OperatorRuntime()
        self.cache = JobRegistry(self.runtime.now() - 100)
        self.job = job
        self.heartbeats = 0
        self.passes = 0
        self._jobs = self.cache.get_or_create(job)
        self.sidecars = SidecarService(cast(Cluster, None), self.cache, self.runtime)

    @property
    def observation(self) -> Observation:
        """As it is now."""
        now = self.runtime.now()
        self._jobs.metrics = gather.collect_metrics(self._jobs, NO_PROMETHEUS, now)
        workers = self.team.workers.values()
        pods = [PodView(w.name, w.name, "Running", f"node-{w.name}", w.address, owner=self.job.uid) for w in workers]
        return gather.build_observation(self.cache.started_at, self._jobs, pods, ClusterView(), now)

    @property
    def desired(self) -> DesiredState:
        assert self._jobs.desired is not None
        return self._jobs.desired

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return self.desired.state.incidents.current

    @property
    def status(self) -> JobStatus:
        return build_job_status(self.observation, build_policy(), JobStatus(phase=JobPhase.RUNNING))

    async def wait_until(self, condition: Callable[[], object], what: str, seconds: float) -> float:
        """Seconds that it took."""
        start = time.monotonic()
        while not condition():
            elapsed = time.monotonic() - start
            if elapsed > seconds:
                messages = [f"{incident.name}: {incident.message}" for incident in self.incidents]
                raise AssertionError(f"not within {seconds:g} s: {what}; {messages}; {self.observation.metrics}")
            await asyncio.sleep(0.1)
        return time.monotonic() - start

    async def assign_ranks(self) -> None:
        """The job as it is once its ranks are assigned."""
        names = list(self.team.workers)
        records = tuple(Record(w, n, 0, uid=w, node=f"node-{w}") for n, w in enumerate(names))
        members = tuple(Member(w, self.team.workers[w].address, (n,)) for n, w in enumerate(names))
        state = State(
            placement=Placement(
                workers=records, incarnations={str(n): 0 for n in range(len(names))}, template_accepted=1
            ),
            lifecycle=Lifecycle(start_time=self.runtime.now()),
            gpus=GpuReadings(nodes=tuple(record.node for record in records)),
        )
        deadband = (self.job.spec.detection.straggler_slowdown - 1) / 2
        self.team.give_plan(Plan(version=1, membership=1, members=members, metrics_deadband=deadband))
        self._jobs.publish(DesiredState(self.team.plan, state), "1")

    async def run_passes(self) -> None:
        """Passes, until cancelled."""
        while True:
            self._jobs.wake.clear()
            self.passes += 1
            result = evaluate_job(self.observation, build_policy())
            assert not result.failed_steps, result.failed_steps
            if result.desired != self._jobs.desired:
                self._jobs.publish(result.desired, "1")
            pause = (
                INVESTIGATION_POLL_SECONDS if result.desired.state.adaptation.investigation else Settings.sample_seconds
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._jobs.wake.wait(), pause)


class DirectOperatorClient:
    """A sidecar's connection to the operator."""

    def __init__(self, operator: OperatorHarness, worker: str) -> None:
        self._operator = operator
        self._caller = Caller(operator.job.namespace, operator.job.name, worker)

    async def poll(
        self, heartbeat: Heartbeat, after: int, received_requests: str, wait: float, hold: float = 0.0
    ) -> PollAnswer | None:
        self._operator.heartbeats += 1
        received = Heartbeat.from_json(json.loads(json.dumps(replace(heartbeat, sent_at=time.time()).to_json())))
        received = replace(received, worker=self._caller.worker)
        return await self._operator.sidecars.poll(self._caller, received, after, wait, hold, received=received_requests)

    async def send_fault(self, fault: FaultReport) -> None:
        try:
            await self._operator.sidecars.receive_fault(self._caller, replace(fault, sent_at=time.time()))
        except RetryLater as error:
            raise OperatorUnavailable(str(error)) from error

    async def send_evidence(self, evidence: Evidence) -> None:
        self._operator.sidecars.receive_evidence(
            self._caller, Evidence.from_json(json.loads(json.dumps(evidence.to_json())))
        )

    async def send_pattern(self, window: str, rank: int, answer: bytes) -> None:
        if self._operator.sidecars.needs_profile_answer(self._caller, window, rank):
            self._operator.sidecars.receive_profile_answer(self._caller, window, rank, answer)


@asynccontextmanager
async def run_operator_harness(team: LauncherTeam, job: TrainingJob | None = None) -> AsyncIterator[OperatorHarness]:
    """The team's workers have been started."""
    operator = OperatorHarness(team, job or job_of(len(team.workers), 0))
    await operator.assign_ranks()
    sidecars = [_create_sidecar(operator, worker) for worker in team.workers.values()]
    tasks = [asyncio.create_task(sidecar.run()) for sidecar in sidecars]
    tasks.append(asyncio.create_task(operator.run_passes()))
    try:
        yield operator
        for task in tasks:
            assert not task.done(), "".join(traceback.format_exception(task.exception()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _create_sidecar(operator: OperatorHarness, worker: LaunchedWorker) -> Sidecar:
    window = operator.job.spec.detection.window_steps
    settings = SidecarSettings(worker.runtime, operator.job.name, worker.name, "", "", Path(), window_steps=window)
    client = cast(OperatorClient, DirectOperatorClient(operator, worker.name))
    ranks, connections = RankRings(worker.runtime, window), ConnectionSampler(worker.runtime)
    return Sidecar(settings, client, WorkerMonitor(settings, ranks, connections))
