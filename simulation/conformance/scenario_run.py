"""Runs a scenario in either world: inject, wait until the operator has noticed and the job is calm again, record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.state.desired_state import DesiredState

from ..faults.fault import Fault, HealCallback
from ..faults.targets import TargetMissing
from .scenario import ConformanceScenario, Episode, ExpectedSign, OperatorDeath

Object = Mapping[str, Any]
CALM_POLL_SECONDS = 0.5
OPERATOR_DEATH_POLL_SECONDS = 0.1
"""Seconds between two polls for the time at which the operator is killed."""
CALM_SECONDS = 8.0
"""Seconds of calm before the next fault: by then spares are warm, and rounds have trained."""
NOTICE_TIMEOUT_SECONDS = 240.0
"""Until a fault is noticed, and until the job is calm again."""
UNNOTICED_FAULT_SECONDS = 5.0
"""Wait after a fault that is not expected to be noticed."""


class ConformanceTarget(Protocol):
    """A world with one job in it."""

    def create_job(self) -> None: ...

    def strike(self, fault: Fault) -> HealCallback | None:
        """Inject a fault. Raises TargetMissing if there is nothing to inject it into."""

    def kill_operator(self) -> None:
        """Kill the operator. It restarts by itself, now or with `restart_operator`."""

    def restart_operator(self) -> None: ...

    def read_job(self) -> Object:
        """Return the stored job."""

    def read_desired(self) -> DesiredState | None:
        """Return plan and bookkeeping as the operator has written them; None: not yet."""

    def list_incidents(self) -> list[Object]:
        """Return the job's stored incidents."""

    def list_pods(self) -> frozenset[str]:
        """Return the names of the job's pods."""


@dataclass(frozen=True)
class IncidentSummary:
    """An incident as it is compared.

    Times, messages, pod, and node are left out: among equal ones, they are the scheduler's choice.
    """

    cause: str
    class_: str
    rank: int | None  # only of the first incident after a fault: which rank is affected by its consequences is random
    remedy: str
    outcome: str

    def __str__(self) -> str:
        rank_text = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.cause}{rank_text} ({self.class_}): {self.remedy or 'no remedy'}, {self.outcome or 'open'}"


@dataclass(frozen=True)
class JobSnapshot:
    """The job's state when it is calm."""

    phase: str
    membership: int
    round: int
    restarts: int
    workers: str
    pods_created: int  # number of pods so far

    def __str__(self) -> str:
        return (
            f"{self.phase}, membership {self.membership}, round {self.round}, restarts {self.restarts}, "
            f"workers {self.workers}, {self.pods_created} made"
        )


SequenceEntry = str
"""One line of a sequence."""


async def run_scenario(
    target: ConformanceTarget, scenario: ConformanceScenario, on_entry: Callable[[str], None] = lambda _: None
) -> tuple[SequenceEntry, ...]:
    """Run a scenario, and return its entries in an order that both worlds share.

    If the job does not become calm, the sequence ends early with an entry about that.
    """
    runner = _ScenarioRun(target, on_entry)
    try:
        await runner.run(scenario)
    except _NotReached as error:
        runner.add_entry(f"NOT WITHIN {NOTICE_TIMEOUT_SECONDS:.0f} s: {error}")
    return tuple(runner.entries)


class _NotReached(Exception):
    """A condition was not reached in time."""


class _ScenarioRun:
    def __init__(self, target: ConformanceTarget, on_entry: Callable[[str], None]) -> None:
        self.entries: list[SequenceEntry] = []
        self._target = target
        self._on_entry = on_entry
        self._known: dict[str, None] = {}  # names of incidents in the sequence

    def add_entry(self, entry: SequenceEntry) -> None:
        self.entries.append(entry)
        self._on_entry(entry)

    async def run(self, scenario: ConformanceScenario) -> None:
        self._target.create_job()
        await self._wait_until_calm()
        self._record_state()
        for episode in scenario.episodes:
            self.add_entry(f"→ {episode}")
            await self._run_episode(episode)

    async def _run_episode(self, episode: Episode) -> None:
        target, noticed = self._target, self._build_notice_check(episode.expected_sign)
        membership = self._read_membership()
        undo = None if episode.prelude is None else target.strike(episode.prelude)
        if episode.operator_death is OperatorDeath.AT_FAULT:
            target.kill_operator()
        try:
            heal = target.strike(episode.fault)
        except TargetMissing as error:
            self.add_entry(f"misses: {error}")
            heal = None
            noticed = lambda: True  # noqa: E731
        finally:
            if episode.operator_death is OperatorDeath.AT_FAULT:
                target.restart_operator()
        if episode.operator_death is OperatorDeath.AT_INCIDENT:
            await self._wait_until(
                lambda: len(target.list_incidents()) > len(self._known), "an incident", OPERATOR_DEATH_POLL_SECONDS
            )
            self._kill_operator()
        elif episode.operator_death is OperatorDeath.AT_ROUND:
            await self._wait_until(
                lambda: self._read_membership() > membership or noticed(), "a new plan", OPERATOR_DEATH_POLL_SECONDS
            )
            self._kill_operator()
        await self._wait_until(noticed, f"{episode.expected_sign} that reports it")
        if episode.expected_sign is ExpectedSign.NONE:
            await asyncio.sleep(UNNOTICED_FAULT_SECONDS)
        await self._wait_until_calm()
        self._record_state()
        if heal is not None:
            heal()
            if undo is not None:
                undo()
            self.add_entry("is healed")
            await asyncio.sleep(UNNOTICED_FAULT_SECONDS)
            await self._wait_until_calm()
            self._record_state()

    def _kill_operator(self) -> None:
        self._target.kill_operator()
        self._target.restart_operator()

    def _build_notice_check(self, sign: ExpectedSign) -> Callable[[], bool]:
        """Return a check whether the fault is noticed. Call this before the fault."""
        target, pods = self._target, self._target.list_pods()
        match sign:
            case ExpectedSign.INCIDENT:
                return lambda: len(target.list_incidents()) > len(self._known)
            case ExpectedSign.SPEC:
                return lambda: _is_generation_observed(target.read_job())
            case ExpectedSign.PODS:
                return lambda: bool(target.list_pods() - pods)
            case ExpectedSign.END:
                return lambda: _get_phase(target.read_job()) in (JobPhase.COMPLETE, JobPhase.FAILED)
        return lambda: True

    async def _wait_until_calm(self) -> None:
        calm_seconds = 0.0
        waited = 0.0
        while calm_seconds < CALM_SECONDS:
            if waited > NOTICE_TIMEOUT_SECONDS:
                self._record_state()
                raise _NotReached("calm")
            await asyncio.sleep(CALM_POLL_SECONDS)
            waited += CALM_POLL_SECONDS
            calm_seconds = (
                calm_seconds + CALM_POLL_SECONDS
                if is_job_calm(self._target.read_job(), self._target.list_incidents())
                else 0.0
            )

    async def _wait_until(
        self, condition: Callable[[], bool], description: str, pause: float = CALM_POLL_SECONDS
    ) -> None:
        waited = 0.0
        while not condition():
            if waited > NOTICE_TIMEOUT_SECONDS:
                raise _NotReached(description)
            await asyncio.sleep(pause)
            waited += pause

    def _record_state(self) -> None:
        incidents = self._target.list_incidents()
        new = [body for body in incidents if _get_name(body) not in self._known]
        for index, body in enumerate(sorted(new, key=_build_sort_key)):
            self._known[_get_name(body)] = None
            self.add_entry(str(_summarize_incident(body, consequence=index > 0)))
            self._on_entry(f"    {_get_name(body)}: {body['spec'].get('message', '')}")
        job, desired = self._target.read_job(), self._target.read_desired()
        if desired is not None:
            self.add_entry(str(_take_snapshot(job, desired)))

    def _read_membership(self) -> int:
        desired = self._target.read_desired()
        return 0 if desired is None else desired.plan.membership


def is_job_calm(job: Object, incidents: list[Object]) -> bool:
    """Return whether the job's status matches its spec, and no incident is open."""
    if not _is_generation_observed(job) or not all(body.get("status", {}).get("outcome") for body in incidents):
        return False
    spec, status = job["spec"], job["status"]
    phase = _get_phase(job)
    if phase in (JobPhase.COMPLETE, JobPhase.FAILED):
        return True
    if spec.get("suspend"):
        conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
        return phase == JobPhase.SUSPENDED and conditions.get(JobCondition.SUSPENDED) == "True"
    workers = status.get("workers", {})
    is_full = workers.get("ready", 0) == spec["replicas"] and workers.get("spare", 0) == spec.get("spares", 0)
    return phase == JobPhase.RUNNING and is_full


def _is_generation_observed(job: Object) -> bool:
    return bool(job.get("status", {}).get("observedGeneration") == job["metadata"]["generation"])


def _get_phase(job: Object) -> str:
    return str(job.get("status", {}).get("phase", ""))


def _get_name(body: Object) -> str:
    return str(body["metadata"]["name"])


def _build_sort_key(incident: Object) -> tuple[str, str]:
    return str(incident.get("status", {}).get("detected", "~")), _get_name(incident)


def _summarize_incident(incident: Object, *, consequence: bool) -> IncidentSummary:
    spec, status = incident["spec"], incident.get("status", {})
    return IncidentSummary(
        cause=spec["cause"],
        class_=spec["class"],
        rank=None if consequence else spec.get("rank"),
        remedy=status.get("remedy") or "",
        outcome=status.get("outcome") or "",
    )


def _take_snapshot(job: Object, desired: DesiredState) -> JobSnapshot:
    return JobSnapshot(
        phase=_get_phase(job),
        membership=desired.plan.membership,
        round=desired.state.placement.highest_round,
        restarts=desired.state.budget.total_restarts,
        workers=str(job.get("status", {}).get("workers", {}).get("summary", "")),
        pods_created=sum(highest + 1 for highest in desired.state.placement.incarnations.values()),
    )
