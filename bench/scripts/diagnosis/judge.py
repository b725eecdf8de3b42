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

from pacekeeper_analysis.behaviour.localise import localise
from pacekeeper_analysis.diagnose import link_probe
from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.plan import EvidencePart, Member, Plan, Profile
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat, LauncherState, LinkProbe
from pacekeeper_operator.api import Cause, Job, JobSpec, Mode, Remedy
from pacekeeper_operator.cluster import Cluster
from pacekeeper_operator.decide.straggler import LONGEST_HOLD_SECONDS
from pacekeeper_operator.decide.think import effects, think
from pacekeeper_operator.effects import Localise
from pacekeeper_operator.observation import Localised, Metrics, Observation, PodView, Policy, Surroundings
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.runtime import Result, Runtime
from pacekeeper_operator.services.reconcile import SUSPECT_SECONDS
from pacekeeper_operator.services.sidecars import Caller, NotYet, Sidecars
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state import Adaptation, Draft, GpusSeen, Incident, Life, Placement, State, Vain
from pacekeeper_operator.state import Worker as Record

from .hosts import HOSTS, RANKS_A_HOST
from .record import Recording

JOB = Job("bench", "diagnosis", "uid", 1, JobSpec({}, HOSTS, spares=1, nproc_per_node=RANKS_A_HOST))
POLICY = Policy(Mode.ACT, frozenset(Remedy), max_restarts=10, restart_window=3600.0)
SPARE = "host-spare"
FAULT_SECONDS = 0.5
"""Between two looks while something is not dealt with."""
TRANSIT_SECONDS = 0.5
"""What patterns and probes take from the worker to the operator."""
NO_PROMETHEUS = Metrics(unavailable="there is none")


@dataclass(frozen=True)
class Told:
    """What an incident said from some moment on, seconds since the epoch."""

    at: float
    incident: str
    cause: Cause
    finding: Finding | None


class _Clock(Runtime):
    """The recording's. Nobody waits for anything."""

    def __init__(self, now: float) -> None:
        super().__init__(seed=0)
        self.at = now

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    async def within(self, _seconds: float, work: Awaitable[Result]) -> Result:
        cast(Any, work).close()
        raise TimeoutError


def judge(recording: Recording, *, knows_the_job: bool = True) -> list[Told]:
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
        self._memory = Memory(first - 1000)
        self._sidecars = Sidecars(cast(Cluster, None), self._memory, self._clock)
        self._job = self._memory.of(JOB)
        self._due = first
        self._told: list[Told] = []
        self._said: dict[str, Incident] = {}
        self._answered: dict[str, str] = {}  # worker → request
        self._operations: dict[str, Evidence] = {}  # worker → the newest answer that has them
        self._profile: tuple[Profile, float] | None = None  # that is out, and by when its time is over
        self._probes = _probes(recording.told)
        self._probed: tuple[str, float] | None = None

    async def run(self) -> list[Told]:
        await self._begin()
        membership = self._plan.membership
        for words in self._recording.told:
            while self._due < words["at"]:
                await self._look(self._due)
                if self._plan.membership != membership:
                    return self._told
            self._clock.at = words["at"]
            await self._hear(words)
            if self._job.wake.is_set():
                await self._look(words["at"])
            if self._plan.membership != membership:
                return self._told
        return self._told

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
        vain = Vain(self._clock.at, LONGEST_HOLD_SECONDS, _usual(self._recording)) if self._knows_the_job else None
        state = State(
            adaptation=Adaptation(vain=vain),
            placement=Placement(
                workers=records, incarnations={str(r.ordinal): 0 for r in records}, template_accepted=1
            ),
            life=Life(training_since=begun, start_time=begun - 10),
            gpus=GpusSeen(nodes=tuple(record.node for record in records)),
        )
        beat = beats[names[0]]
        plan = Plan(version=1, membership=beat["membership"], round=beat["round"], members=members, restarts=10)
        self._job.publish(Draft(plan, state), "1")

    async def _hear(self, words: Mapping[str, Any]) -> None:
        caller = Caller(JOB.namespace, JOB.name, words["worker"])
        sent = words["at"] + words.get("clock", 0.0)  # by its own clock
        if "heartbeat" in words:
            said = replace(Heartbeat.from_json(words["heartbeat"]), worker=caller.worker, sent_at=sent)
            await self._sidecars.poll(caller, said, -1, 0)
            spare = Heartbeat(worker=SPARE, state=LauncherState.WARM, meeting_port=1, sent_at=words["at"])
            await self._sidecars.poll(replace(caller, worker=SPARE), spare, -1, 0)
        if "fault" in words:
            try:
                fault = replace(Fault.from_json(words["fault"]), sent_at=sent)
                await self._sidecars.take_fault(caller, fault)
            except NotYet:
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
        self._sidecars.take_evidence(caller, evidence)

    async def _look(self, now: float) -> None:
        """One pass."""
        self._clock.at = now
        self._job.wake.clear()
        self._bring(now)
        observation = self._observe(now)
        thought = think(observation, POLICY)
        if thought.failures:
            raise RuntimeError("; ".join(thought.failures))
        if thought.draft != self._job.draft:
            self._job.publish(thought.draft, "1")
        for effect in effects(thought.observation, POLICY, {}):
            if isinstance(effect, Localise):
                found = localise(sorted(self._job.patterns.items()), effect.expected)
                self._job.localised = Localised(effect.window, found)
                self._job.wake.set()
        self._remember(now)
        suspicious = self._job.faults or thought.draft.state.adaptation.suspicion is not None
        pause = min(FAULT_SECONDS, SUSPECT_SECONDS) if suspicious else Settings.sample_seconds
        self._due = now + (0.05 if self._job.wake.is_set() else pause)

    def _observe(self, now: float) -> Observation:
        metrics = gather.metrics(self._job, NO_PROMETHEUS, now)
        self._job.metrics = metrics
        draft = self._job.draft
        assert draft is not None
        found = [
            PodView(r.name, r.uid, "Running", r.node, f"10.214.0.{r.ordinal + 1}", owner=JOB.uid)
            for r in draft.state.placement.workers
        ]
        return gather.observe(self._memory.started_at, self._job, found, metrics, Surroundings(), now)

    def _bring(self, now: float) -> None:
        """Patterns and probes that would be there by now."""
        profile, probe = self._plan.profile, self._plan.probe
        if profile is None:
            self._profile = None
        elif self._profile is None or self._profile[0] != profile:
            ahead = (profile.first_step - self._step) * (self._job.metrics.step_seconds or 0.0)
            self._profile = profile, now + ahead + profile.seconds
        elif self._recording.profiled and not self._job.patterns:
            over = self._step >= profile.first_step + profile.steps or now >= self._profile[1]
            if over and now >= self._recording.profiled + TRANSIT_SECONDS:
                self._job.patterns.update(self._recording.patterns)
                self._job.patterns_at = now
        if probe is not None and (self._probed is None or self._probed[0] != probe.name):
            self._probed = probe.name, now + link_probe.seconds(probe) + TRANSIT_SECONDS
        elif probe is not None and self._probed is not None and now >= self._probed[1]:
            for source, targets in zip(probe.sources, probe.targets, strict=True):
                known = [self._probes[source, t.worker] for t in targets if (source, t.worker) in self._probes]
                self._job.probes[source] = Evidence(probe.name, source, self._plan.round, probes=tuple(known))

    @property
    def _step(self) -> int:
        return max(contact.heartbeat.step for contact in self._job.contacts.values())

    def _remember(self, now: float) -> None:
        assert self._job.draft is not None
        for incident in self._job.draft.state.incidents.current:
            before = self._said.get(incident.name)
            if before is None or before.finding != incident.finding:
                self._said[incident.name] = incident
                self._told.append(Told(now, incident.name, incident.cause, incident.finding))


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
