"""Real launchers and ranks under real sidecars and the operator's real decisions, in one process, without a cluster.

Between sidecar and operator there is no network, and what the operator decides is not written anywhere; pods are what
the test says. Everything else is as in a cluster with `prometheus.url` empty.
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

from pacekeeper.sidecar.client import OperatorClient, Unavailable
from pacekeeper.sidecar.connections import Connections
from pacekeeper.sidecar.ranks import RankRings
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import Sidecar
from pacekeeper_analysis.plan import Member, Plan, WorkerPlan
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat
from pacekeeper_operator.api import Job, JobPhase, JobStatus
from pacekeeper_operator.cluster import Cluster
from pacekeeper_operator.decide.status import report
from pacekeeper_operator.decide.think import think
from pacekeeper_operator.observation import Metrics, Observation, PodView, Surroundings
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.runtime import Runtime
from pacekeeper_operator.services.reconcile import SUSPECT_SECONDS
from pacekeeper_operator.services.sidecars import Caller, NotYet, Sidecars
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state import Draft, GpusSeen, Incident, Life, Placement, State
from pacekeeper_operator.state import Worker as Record
from tests.support.launchers import Team, Worker
from tests.support.worlds import job as job_of
from tests.support.worlds import policy

NO_PROMETHEUS = Metrics(unavailable="no Prometheus is configured (prometheus.url in the chart's values)")


class Deciding:
    """An operator with one job, whose workers are the team's."""

    def __init__(self, team: Team, job: Job) -> None:
        self.team = team
        self.runtime = Runtime()
        self.memory = Memory(self.runtime.now() - 100)
        self.job = job
        self.heartbeats = 0
        self.passes = 0
        self._jobs = self.memory.of(job)
        self.sidecars = Sidecars(cast(Cluster, None), self.memory, self.runtime)

    @property
    def observation(self) -> Observation:
        """As it is now."""
        now = self.runtime.now()
        metrics = gather.metrics(self._jobs, NO_PROMETHEUS, now)
        self._jobs.metrics = metrics
        workers = self.team.workers.values()
        found = [PodView(w.name, w.name, "Running", f"node-{w.name}", w.address, owner=self.job.uid) for w in workers]
        return gather.observe(self.memory.started_at, self._jobs, found, metrics, Surroundings(), now)

    @property
    def draft(self) -> Draft:
        assert self._jobs.draft is not None
        return self._jobs.draft

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return self.draft.state.incidents.current

    @property
    def status(self) -> JobStatus:
        return report(self.observation, policy(), JobStatus(phase=JobPhase.RUNNING))

    async def until(self, condition: Callable[[], object], what: str, seconds: float) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            if waited > seconds:
                said = [f"{incident.name}: {incident.message}" for incident in self.incidents]
                raise AssertionError(f"not within {seconds:g} s: {what}; {said}; {self.observation.metrics}")
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def begin(self) -> None:
        """The job as it is once its workers are seated."""
        names = list(self.team.workers)
        records = tuple(Record(w, n, 0, uid=w, node=f"node-{w}") for n, w in enumerate(names))
        members = tuple(Member(w, self.team.workers[w].address, (n,)) for n, w in enumerate(names))
        state = State(
            placement=Placement(
                workers=records, incarnations={str(n): 0 for n in range(len(names))}, template_accepted=1
            ),
            life=Life(start_time=self.runtime.now()),
            gpus=GpusSeen(nodes=tuple(record.node for record in records)),
        )
        band = (self.job.spec.detection.straggler_slowdown - 1) / 2
        self.team.give(Plan(version=1, membership=1, members=members, figures_band=band))
        self._jobs.publish(Draft(self.team.plan, state), "1")

    async def decide(self) -> None:
        """Passes, until cancelled."""
        while True:
            self._jobs.wake.clear()
            self.passes += 1
            thought = think(self.observation, policy())
            assert not thought.failures, thought.failures
            if thought.draft != self._jobs.draft:
                self._jobs.publish(thought.draft, "1")
            pause = SUSPECT_SECONDS if thought.draft.state.adaptation.suspicion else Settings.sample_seconds
            with suppress(TimeoutError):
                await asyncio.wait_for(self._jobs.wake.wait(), pause)


class Line:
    """A sidecar's way to the operator."""

    def __init__(self, operator: Deciding, worker: str) -> None:
        self._operator = operator
        self._caller = Caller(operator.job.namespace, operator.job.name, worker)

    async def plan(self, heartbeat: Heartbeat, after: int, wait: float, hold: float = 0.0) -> WorkerPlan | None:
        self._operator.heartbeats += 1
        said = Heartbeat.from_json(json.loads(json.dumps(replace(heartbeat, sent_at=time.time()).to_json())))
        said = replace(said, worker=self._caller.worker)
        return await self._operator.sidecars.poll(self._caller, said, after, wait, hold)

    async def fault(self, fault: Fault) -> None:
        try:
            await self._operator.sidecars.take_fault(self._caller, replace(fault, sent_at=time.time()))
        except NotYet as error:
            raise Unavailable(str(error)) from error

    async def evidence(self, evidence: Evidence) -> None:
        self._operator.sidecars.take_evidence(
            self._caller, Evidence.from_json(json.loads(json.dumps(evidence.to_json())))
        )

    async def pattern(self, window: str, rank: int, answer: bytes) -> None:
        if self._operator.sidecars.awaits_pattern(self._caller, window, rank):
            self._operator.sidecars.take_pattern(self._caller, window, rank, answer)


@asynccontextmanager
async def deciding(team: Team, job: Job | None = None) -> AsyncIterator[Deciding]:
    """The team's workers have been started."""
    operator = Deciding(team, job or job_of(len(team.workers), 0))
    await operator.begin()
    sidecars = [_sidecar(operator, worker) for worker in team.workers.values()]
    tasks = [asyncio.create_task(sidecar.run()) for sidecar in sidecars]
    tasks.append(asyncio.create_task(operator.decide()))
    try:
        yield operator
        for task in tasks:
            assert not task.done(), "".join(traceback.format_exception(task.exception()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sidecar(operator: Deciding, worker: Worker) -> Sidecar:
    window = operator.job.spec.detection.window_steps
    settings = SidecarSettings(worker.runtime, operator.job.name, worker.name, "", "", Path(), window_steps=window)
    line = cast(OperatorClient, Line(operator, worker.name))
    return Sidecar(settings, line, RankRings(worker.runtime, window), Connections(worker.runtime))
