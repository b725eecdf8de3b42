"""From a recording to findings: the operator's own services and decisions, under the recording's clock.

What the workers told then they tell again; what the operator asks for it gets from what was recorded of the same
fault: the answer to a request for evidence with each worker's next words, a behaviour window once its steps would be
over, a probe once its turns would be. Nothing here judges anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

from pacekeeper_analysis.behaviour.localise import localize_fault
from pacekeeper_analysis.diagnose import link_probe
from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.plan import EvidencePart, Member, Plan, ProfileRequest
from pacekeeper_analysis.reports import Evidence, FaultReport, Heartbeat, LauncherState, LinkProbe
from pacekeeper_operator.api import IncidentCause, TrainingJob, JobSpec, RemediationMode, Remedy
from pacekeeper_operator.cluster import Cluster
from pacekeeper_operator.decide.straggler import MAX_NEGATIVE_CACHE_SECONDS
from pacekeeper_operator.decide.think import list_effects, evaluate_job
from pacekeeper_operator.effects import LocalizeProfile
from pacekeeper_operator.observation import LocalizedProfile, JobMetrics, Observation, PodView, Policy, ClusterView
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.memory import JobRegistry
from pacekeeper_operator.runtime import Result, OperatorRuntime
from pacekeeper_operator.services.reconcile import INVESTIGATION_POLL_SECONDS
from pacekeeper_operator.services.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state import Adaptation, DesiredState, GpuReadings, Incident, Lifecycle, Placement, State, FruitlessInvestigation
from pacekeeper_operator.state import WorkerRecord as Record

from .hosts import HOSTS, RANKS_A_HOST
from .record import Recording

JOB = TrainingJob("bench", "diagnosis", "uid", 1, JobSpec({}, HOSTS, spares=1, nproc_per_node=RANKS_A_HOST))
POLICY = Policy(RemediationMode.ACT, frozenset(Remedy), max_restarts=10, restart_window=3600.0)
SPARE = "host-spare"
FAULT_SECONDS = 0.5
"""Between two looks while something is not dealt with."""
TRANSIT_SECONDS = 0.5
"""What patterns and probes take from the worker to the operator."""
NO_PROMETHEUS = JobMetrics(unavailable="there is none")


@dataclass(frozen=True)
class IncidentVersion:
    """What an incident said from some moment on, seconds since the epoch."""

    reported_at: float
    incident: str
    cause: IncidentCause
    finding: Finding | None


class _Clock(OperatorRuntime):
    """The recording's. Nobody waits for anything."""

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
    """What its incidents say, one for each change; until a remedy would have begun a new round.

    `knows_the_job`: the operator has looked into the waits that the job always has, in vain, as it does in its first
    minutes.
    """
    return asyncio.run(_Operator(recording, knows_the_job).run())


class _Operator:
    """With one job, whose workers are the recording's."""

    def __init__(self, recording: Recording, knows_the_job: bool) -> None:
        self._recording, self._knows_the_job = recording, knows_the_job
        first = recording.told[0]["at"]
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
        self._probes = _probes(recording.told)
        self._probed: tuple[str, float] | None = None

    async def run(self) -> list[IncidentVersion]:
        await self._begin()
        membership = self._plan.membership
        for words in self._recording.told:
            while self._due < words["at"]:
                await self._run_pass(self._due)
                if self._plan.membership != membership:
                    return self._versions
            self._clock.at = words["at"]
            await self._receive_report(words)
            if self._job.wake.is_set():
                await self._run_pass(words["at"])
            if self._plan.membership != membership:
                return self._versions
        return self._versions

    @property
    def _plan(self) -> Plan:
        assert self._job.plan is not None
        return self._job.plan

    async def _begin(self) -> None:
        """As it is once its workers train."""
        beats = {w["worker"]: w["heartbeat"] for w in reversed(self._recording.told) if "heartbeat" in w}
        names = sorted(beats)
        members = tuple(
            Member(name, f"10.214.0.{n + 1}", tuple(range(RANKS_A_HOST * n, RANKS_A_HOST * (n + 1))))
            for n, name in enumerate(names)
        )
        records = tuple(Record(name, n, 0, uid=name, node=f"node-{n}") for n, name in enumerate([*names, SPARE]))
        begun = min(beat["first_step_at"] for beat in beats.values())
        vain = FruitlessInvestigation(self._clock.at, MAX_NEGATIVE_CACHE_SECONDS, _usual(self._recording)) if self._knows_the_job else None
        state = State(
            adaptation=Adaptation(vain=vain),
            placement=Placement(
                workers=records, incarnations={str(r.ordinal): 0 for r in records}, template_accepted=1
            ),
            life=Lifecycle(training_since=begun, start_time=begun - 10),
            gpus=GpuReadings(nodes=tuple(record.node for record in records)),
        )
        beat = beats[names[0]]
        plan = Plan(version=1, membership=beat["membership"], round=beat["round"], members=members, restarts=10)
        self._job.publish(DesiredState(plan, state), "1")

    async def _receive_report(self, words: Mapping[str, Any]) -> None:
        caller = Caller(JOB.namespace, JOB.name, words["worker"])
        sent = words["at"] + words.get("clock", 0.0)  # by its own clock
        if "heartbeat" in words:
            said = replace(Heartbeat.from_json(words["heartbeat"]), worker=caller.worker, sent_at=sent)
            await self._sidecars.poll(caller, said, -1, 0)
            spare = Heartbeat(worker=SPARE, state=LauncherState.WARM, meeting_port=1, sent_at=words["at"])
            await self._sidecars.poll(replace(caller, worker=SPARE), spare, -1, 0)
        if "fault" in words:
            try:
                fault = replace(FaultReport.from_json(words["fault"]), sent_at=sent)
                await self._sidecars.receive_fault(caller, fault)
            except RetryLater:
                pass
        if "evidence" in words:
            self._answer(caller, words["evidence"])

    def _answer(self, caller: Caller, written: Mapping[str, Any]) -> None:
        if written["operations"]:
            self._operations[caller.worker] = Evidence.from_json({**written, "windows": (), "links": ()})
        request = self._plan.evidence_request
        if not request or self._answered.get(caller.worker) == request:
            return
        self._answered[caller.worker] = request
        parts = self._plan.evidence_parts
        empty = {"communicators": (), "operations": ()}
        links = {} if EvidencePart.LINKS in parts else {"links": ()}
        evidence = Evidence.from_json({**written, **empty, **links, "request": request})
        last = self._operations.get(caller.worker)
        if EvidencePart.OPERATIONS in parts and last is not None:
            evidence = replace(evidence, operations=last.operations, communicators=last.communicators)
        self._sidecars.receive_evidence(caller, evidence)

    async def _run_pass(self, now: float) -> None:
        """One pass."""
        self._clock.at = now
        self._job.wake.clear()
        self._bring(now)
        observation = self._observe(now)
        thought = evaluate_job(observation, POLICY)
        if thought.failed_steps:
            raise RuntimeError("; ".join(thought.failed_steps))
        if thought.desired != self._job.desired:
            self._job.publish(thought.desired, "1")
        for effect in list_effects(thought.observation, POLICY, {}):
            if isinstance(effect, LocalizeProfile):
                found = localize_fault(sorted(self._job.profile_answers.items()), effect.expected)
                self._job.localized_profile = LocalizedProfile(effect.window, found)
                self._job.wake.set()
        self._remember(now)
        suspicious = self._job.faults or thought.desired.state.adaptation.suspicion is not None
        pause = min(FAULT_SECONDS, INVESTIGATION_POLL_SECONDS) if suspicious else Settings.sample_seconds
        self._due = now + (0.05 if self._job.wake.is_set() else pause)

    def _observe(self, now: float) -> Observation:
        metrics = gather.collect_metrics(self._job, NO_PROMETHEUS, now)
        self._job.metrics = metrics
        draft = self._job.desired
        assert draft is not None
        found = [
            PodView(r.name, r.uid, "Running", r.node, f"10.214.0.{r.ordinal + 1}", owner=JOB.uid)
            for r in draft.state.placement.workers
        ]
        return gather.build_observation(self._memory.started_at, self._job, found, metrics, ClusterView(), now)

    def _bring(self, now: float) -> None:
        """Patterns and probes that would be there by now."""
        profile, probe = self._plan.profile, self._plan.probe
        if profile is None:
            self._profile = None
        elif self._profile is None or self._profile[0] != profile:
            ahead = (profile.first_step - self._step) * (self._job.metrics.step_seconds or 0.0)
            self._profile = profile, now + ahead + profile.seconds
        elif self._recording.profiled and not self._job.profile_answers:
            over = self._step >= profile.first_step + profile.steps or now >= self._profile[1]
            if over and now >= self._recording.profiled + TRANSIT_SECONDS:
                self._job.profile_answers.update(self._recording.patterns)
                self._job.last_profile_answer_at = now
        if probe is not None and (self._probed is None or self._probed[0] != probe.name):
            self._probed = probe.name, now + link_probe.estimate_probe_seconds(probe) + TRANSIT_SECONDS
        elif probe is not None and self._probed is not None and now >= self._probed[1]:
            for source, targets in zip(probe.sources, probe.targets, strict=True):
                known = [self._probes[source, t.worker] for t in targets if (source, t.worker) in self._probes]
                self._job.probes[source] = Evidence(probe.name, source, self._plan.round, probes=tuple(known))

    @property
    def _step(self) -> int:
        return max(contact.heartbeat.step for contact in self._job.contacts.values())

    def _remember(self, now: float) -> None:
        assert self._job.desired is not None
        for incident in self._job.desired.state.incidents.current:
            before = self._last_incidents.get(incident.name)
            if before is None or before.finding != incident.finding:
                self._last_incidents[incident.name] = incident
                self._versions.append(IncidentVersion(now, incident.name, incident.cause, incident.finding))


def _usual(recording: Recording) -> float:
    """A step's length in the job's first steady steps, seconds."""
    evidence = (words["evidence"] for words in recording.told if "evidence" in words)
    return float(median(window["baseline_seconds"] for answer in evidence for window in answer["windows"]))


def _probes(told: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], LinkProbe]:
    """By source and target."""
    return dict(_each_probe(told))


def _each_probe(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], LinkProbe]]:
    for words in told:
        for probe in words.get("probe", {}).get("probes", ()):
            yield (words["worker"], probe["target"]), LinkProbe(**probe)
