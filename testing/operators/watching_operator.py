"""An operator that watches pods of a fake API server, with its sidecars' endpoint, a pass at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pacekeeper.sidecar.operator_client import OperatorUnavailable
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.watched_report import ReportedRank
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.endpoint.token_review import PodIdentity
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime.watched_jobs import (
    WatchedJobContext,
    create_watched_context,
    reconcile_watched_job,
)
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.watched_pods import build_watched_heartbeat


class WatchingOperator:
    """An operator, with its sidecars' endpoint, over a fake API server."""

    def __init__(self, cluster: FakeCluster, runtime: OperatorRuntime | None = None, **settings: Any) -> None:
        """`settings`: of the operator, in addition to the watch."""
        self.cluster = cluster
        self.runtime = runtime or FixedTimeRuntime()
        self.operator = Operator(
            Settings(watch_enabled=True, **settings),
            cluster,
            JobRegistry(self.runtime.now() - 100),
            INSTALLATION,
            PrometheusClient("", "", ""),
            self.runtime,
            paused="",
        )
        self.sidecars = SidecarService(cluster, self.operator.jobs, self.runtime, watched=self.operator.watched)
        self.contexts: dict[str, WatchedJobContext] = {}

    async def start(self) -> None:
        await self.operator.watched.load()
        await self.run_pass()

    async def run_pass(self) -> list[TrainingJob]:
        """List the pods, assign them, and run one pass over each job."""
        await self.operator.watched.pods.refresh(self.cluster, ())
        jobs = list(await self.operator.watched.refresh())
        for job in jobs:
            context = self.contexts.setdefault(job.name, create_watched_context(self.operator, job))
            await reconcile_watched_job(self.operator, context)
            await context.base.effect_runner.wait_until_idle()
        return jobs

    def identify(self, pod: str) -> Caller:
        return self.sidecars._identify_worker(PodIdentity("ns", pod, f"uid-{pod}"))

    def move_time(self, seconds: float) -> None:
        """Set the time that has passed since the start. The operator's time must stand still otherwise."""
        assert isinstance(self.runtime, FixedTimeRuntime)
        self.runtime.passed = seconds

    async def report(self, pod: str, ranks: Sequence[ReportedRank], step: int = 500, **changes: Any) -> None:
        heartbeat = build_watched_heartbeat(pod, ranks, step, sent_at=self.runtime.now(), **changes)
        await self.sidecars.poll(self.identify(pod), heartbeat, 0, 0.0)

    async def report_fault(self, fault: FaultReport) -> None:
        with suppress(RetryLater):  # until a pass has decided
            await self.sidecars.receive_fault(self.identify(fault.worker), fault)


class DirectClient:
    """The connection of a watched pod's sidecar to the operator."""

    def __init__(self, watching: WatchingOperator, pod: str) -> None:
        self._watching = watching
        self._pod = pod

    async def poll(
        self, heartbeat: Heartbeat, after: int | None, received: str, wait: float, hold: float = 0.0
    ) -> PollAnswer | None:
        sent = json.loads(json.dumps(replace(heartbeat, sent_at=time.time()).to_json()))
        after = -1 if after is None else after
        return await self._watching.sidecars.poll(
            self._identify(), Heartbeat.from_json(sent), after, wait, hold, received=received
        )

    async def send_fault(self, fault: FaultReport) -> None:
        sent = json.loads(json.dumps(replace(fault, sent_at=time.time()).to_json()))
        try:
            await self._watching.sidecars.receive_fault(self._identify(), FaultReport.from_json(sent))
        except RetryLater as error:
            raise OperatorUnavailable(str(error)) from error

    async def send_evidence(self, evidence: Evidence) -> None:
        sent = json.loads(json.dumps(evidence.to_json()))
        self._watching.sidecars.receive_evidence(self._identify(), Evidence.from_json(sent))

    async def send_pattern(self, window: str, rank: int, answer: bytes) -> None:
        caller = self._identify()
        if self._watching.sidecars.needs_profile_answer(caller, window, rank):
            self._watching.sidecars.receive_profile_answer(caller, window, rank, answer)

    def _identify(self) -> Caller:
        try:
            return self._watching.identify(self._pod)
        except RetryLater as error:
            raise OperatorUnavailable(str(error)) from error
