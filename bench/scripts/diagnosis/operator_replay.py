"""From a recording to findings: the operator's own services and decisions, under the recording's clock.

What the workers reported then they report again; what the operator requests it gets from what was recorded of the
same fault: the answer to a request for evidence with each worker's next report, a profile once its steps would be
over, a probe once its turns would be. No code here decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

from pacekeeper_analysis.failures.finding import Finding
from pacekeeper_analysis.network import link_probe
from pacekeeper_analysis.profiling.localize import localize_fault
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat, LauncherState, LinkProbe
from pacekeeper_analysis.protocol.requests import EvidencePart, ProfileRequest
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import JobSpec, RemediationMode, Remedy, TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime, Result
from pacekeeper_operator.decide.effects import LocalizeProfile
from pacekeeper_operator.decide.evaluate import evaluate_job, list_effects
from pacekeeper_operator.decide.stragglers.straggler import MAX_NEGATIVE_CACHE_SECONDS
from pacekeeper_operator.endpoint.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.runtime.reconcile import INVESTIGATION_POLL_SECONDS
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.cluster_view import ClusterView, PodView
from pacekeeper_operator.state.desired_state import (
    Adaptation,
    DesiredState,
    FruitlessInvestigation,
    GpuReadings,
    Incident,
    Lifecycle,
    Placement,
    State,
)
from pacekeeper_operator.state.desired_state import WorkerRecord as Record
from pacekeeper_operator.state.effect_results import LocalizedProfile
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy

from .hosts import HOSTS, RANKS_A_HOST
from .record import Recording

JOB = TrainingJob("bench", "diagnosis", "uid", 1, JobSpec({}, replicas=HOSTS, spares=1, nproc_per_node=RANKS_A_HOST))
POLICY = Policy(RemediationMode.ACT, frozenset(Remedy), max_restarts=10, restart_window=3600.0)
SPARE = "host-spare"
FAULT_PASS_INTERVAL_SECONDS = 0.5
"""Between two polls while something is not dealt with."""
TRANSIT_SECONDS = 0.5
"""What patterns and probes take from the worker to the operator."""
NO_PROMETHEUS = JobMetrics(prometheus_error="there is none")


@dataclass(frozen=True)
class IncidentVersion:
    """An incident's content from some time on, seconds since the epoch."""

    reported_at: float
    incident: str
    cause: IncidentCause
    finding: Finding | None


class _Clock(OperatorRuntime):
    """The recording's. No call waits."""

    def __init__(self, now: float) -> None:
        super().__init__(seed=0)
        self.at = now

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    async def run_with_timeout(self, _seconds: float, work: Awaitable[Result]) -> Result:
        cast(Any, work).close()
        raise TimeoutError


def replay_operator(recording: Recording, *, knows_the_job: bool = True) -> list[IncidentVersion]:
    """The content of its incidents, one for each change; until a remedy would have begun a new round.

    `knows_the_job`: the operator has investigated the waits that the job always has, without result, as it does in its
    first minutes.
    """
    return asyncio.run(_Operator(recording, knows_the_job).run())


class _Operator:
    """With one job, whose workers are the recording's."""

    def __init__(self, recording: Recording, knows_the_job: bool) -> None:
        self._recording, self._knows_the_job = recording, knows_the_job
        first = recording.reports[0]["at"]
        self._clock = _Clock(first)
        self._memory = JobRegistry(first - 1000)
        self._sidecars = SidecarService(cast(Cluster, None), self._memory, self._clock)
        self._job = self._memory.get_or_create(JOB)
        self._due = first
        self._versions: list[IncidentVersion] = []
        self._last_incidents: dict[str, Incident] = {}
        self._answered: dict[str, str] = {}  # worker → request
        self._operations: dict[str, Evidence] = {}  # worker → the newest answer that has them
        self._profile: tuple[ProfileRequest, float] | None = None  # that is out, and by when its time is over
        self._probes = _collect_probes(recording.reports)
        self._probed: tuple[str, float] | None = None

    async def run(self) -> list[IncidentVersion]:
        await self._publish_initial_state()
        membership = self._plan.membership
        for report in self._recording.reports:
            while self._due < report["at"]:
                await self._run_pass(self._due)
                if self._plan.membership != membership:
                    return self._versions
            self._clock.at = report["at"]
            await self._receive_report(report)
            if self._job.wake.is_set():
                await self._run_pass(report["at"])
            if self._plan.membership != membership:
                return self._versions
        return self._versions

    @property
    def _plan(self) -> Plan:
        assert self._job.plan is not None
        return self._job.plan

    async def _publish_initial_state(self) -> None:
        """As it is once its workers train."""
        heartbeats = {
            report["worker"]: report["heartbeat"]
            for report in reversed(self._recording.reports)
            if "heartbeat" in report
        }
        names = sorted(heartbeats)
        members = tuple(
            Member(name, f"10.214.0.{index + 1}", tuple(range(RANKS_A_HOST * index, RANKS_A_HOST * (index + 1))))
            for index, name in enumerate(names)
        )
        records = tuple(
            Record(name, index, 0, uid=name, node=f"node-{index}") for index, name in enumerate([*names, SPARE])
        )
        started_at = min(heartbeat["start"]["first_step_at"] for heartbeat in heartbeats.values())
        fruitless = (
            FruitlessInvestigation(
                self._clock.at, MAX_NEGATIVE_CACHE_SECONDS, _compute_usual_step_seconds(self._recording)
            )
            if self._knows_the_job
            else None
        )
        state = State(
            adaptation=Adaptation(fruitless_investigation=fruitless),
            placement=Placement(
                workers=records,
                incarnations={str(worker_record.ordinal): 0 for worker_record in records},
                template_accepted=1,
            ),
            lifecycle=Lifecycle(training_since=started_at, start_time=started_at - 10),
            gpus=GpuReadings(nodes=tuple(record.node for record in records)),
        )
        heartbeat = heartbeats[names[0]]
        plan = Plan(
            version=1, membership=heartbeat["membership"], round=heartbeat["round"], members=members, restarts=10
        )
        self._job.publish(DesiredState(plan, state), "1")

    async def _receive_report(self, report: Mapping[str, Any]) -> None:
        caller = Caller(JOB.namespace, JOB.name, report["worker"])
        sent_at = report["at"] + report.get("clock", 0.0)  # by its own clock
        if "heartbeat" in report:
            heartbeat = replace(Heartbeat.from_json(report["heartbeat"]), worker=caller.worker, sent_at=sent_at)
            await self._sidecars.poll(caller, heartbeat, -1, 0)
            spare_heartbeat = Heartbeat(worker=SPARE, state=LauncherState.WARM, rendezvous_port=1, sent_at=report["at"])
            await self._sidecars.poll(replace(caller, worker=SPARE), spare_heartbeat, -1, 0)
        if "fault" in report:
            try:
                fault = replace(FaultReport.from_json(report["fault"]), sent_at=sent_at)
                await self._sidecars.receive_fault(caller, fault)
            except RetryLater:
                pass
        if "evidence" in report:
            self._receive_evidence(caller, report["evidence"])

    def _receive_evidence(self, caller: Caller, document: Mapping[str, Any]) -> None:
        if document["operations"]:
            self._operations[caller.worker] = Evidence.from_json({**document, "windows": (), "links": ()})
        request = self._job.requests.evidence_name
        if not request or self._answered.get(caller.worker) == request:
            return
        self._answered[caller.worker] = request
        parts = self._job.requests.evidence_parts
        no_operations = {"communicators": (), "operations": ()}
        links = {} if EvidencePart.LINKS in parts else {"links": ()}
        evidence = Evidence.from_json({**document, **no_operations, **links, "request": request})
        operations = self._operations.get(caller.worker)
        if EvidencePart.OPERATIONS in parts and operations is not None:
            evidence = replace(evidence, operations=operations.operations, communicators=operations.communicators)
        self._sidecars.receive_evidence(caller, evidence)

    async def _run_pass(self, now: float) -> None:
        """One pass."""
        self._clock.at = now
        self._job.wake.clear()
        self._deliver_answers(now)
        observation = self._observe(now)
        result = evaluate_job(observation, POLICY)
        if result.failed_steps:
            raise RuntimeError("; ".join(result.failed_steps))
        if result.desired != self._job.desired:
            self._job.publish(result.desired, "1")
        for effect in list_effects(result.observation, POLICY, {}):
            if isinstance(effect, LocalizeProfile):
                localization = localize_fault(sorted(self._job.profile.by_rank.items()), effect.expected)
                self._job.profile.localized = LocalizedProfile(effect.window, localization)
                self._job.wake.set()
        self._record_versions(now)
        is_investigating = self._job.faults or result.desired.state.adaptation.investigation is not None
        pause = (
            min(FAULT_PASS_INTERVAL_SECONDS, INVESTIGATION_POLL_SECONDS)
            if is_investigating
            else Settings.sample_seconds
        )
        self._due = now + (0.05 if self._job.wake.is_set() else pause)

    def _observe(self, now: float) -> Observation:
        self._job.metrics = gather.collect_metrics(self._job, NO_PROMETHEUS, now)
        desired = self._job.desired
        assert desired is not None
        pods = [
            PodView(record.name, record.uid, "Running", record.node, f"10.214.0.{record.ordinal + 1}", owner=JOB.uid)
            for record in desired.state.placement.workers
        ]
        return gather.build_observation(self._memory.started_at, self._job, pods, ClusterView(), now)

    def _deliver_answers(self, now: float) -> None:
        """Patterns and probes that would be there by now."""
        profile, probe = self._job.requests.profile, self._job.requests.probe
        if profile is None:
            self._profile = None
        elif self._profile is None or self._profile[0] != profile:
            ahead_seconds = (profile.first_step - self._step) * (self._job.metrics.step_seconds or 0.0)
            self._profile = profile, now + ahead_seconds + profile.seconds
        elif self._recording.profiled and not self._job.profile.by_rank:
            is_over = self._step >= profile.first_step + profile.steps or now >= self._profile[1]
            if is_over and now >= self._recording.profiled + TRANSIT_SECONDS:
                self._job.profile.by_rank.update(self._recording.patterns)
                self._job.profile.newest_at = now
        if probe is not None and (self._probed is None or self._probed[0] != probe.name):
            self._probed = probe.name, now + link_probe.estimate_probe_seconds(probe) + TRANSIT_SECONDS
        elif probe is not None and self._probed is not None and now >= self._probed[1]:
            for source, targets in zip(probe.sources, probe.targets, strict=True):
                link_probes = [
                    self._probes[source, target.worker] for target in targets if (source, target.worker) in self._probes
                ]
                self._job.probes[source] = Evidence(probe.name, source, self._plan.round, probes=tuple(link_probes))

    @property
    def _step(self) -> int:
        return max(contact.heartbeat.progress.step or 0 for contact in self._job.contacts.values())

    def _record_versions(self, now: float) -> None:
        assert self._job.desired is not None
        for incident in self._job.desired.state.incidents.current:
            previous = self._last_incidents.get(incident.name)
            if previous is None or previous.finding != incident.finding:
                self._last_incidents[incident.name] = incident
                self._versions.append(IncidentVersion(now, incident.name, incident.cause, incident.finding))


def _compute_usual_step_seconds(recording: Recording) -> float:
    """A step's length in the job's first steady steps, seconds."""
    evidence = (report["evidence"] for report in recording.reports if "evidence" in report)
    return float(median(window["baseline_seconds"] for answer in evidence for window in answer["windows"]))


def _collect_probes(reports: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], LinkProbe]:
    """By source and target."""
    return dict(_iterate_probes(reports))


def _iterate_probes(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], LinkProbe]]:
    for report in reports:
        for probe in report.get("probe", {}).get("probes", ()):
            yield (report["worker"], probe["target"]), LinkProbe(**probe)
