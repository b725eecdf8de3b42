"""From a seed to a disaster that both worlds can play. Each fault comes once the one before has healed, so that what
follows from it does not hang on how fast a world is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.api import RemediationMode

from ..faults import machines, people, ranks
from ..faults.fault import Fault, TargetRole
from ..faults.operators import OperatorKilled
from ..faults.values import derive_kind, to_json
from ..schedule import SimulatedJob
from ..world import WorldSettings

Random = random.Random
CONFORMANCE_NODES = 6
CONFORMANCE_STEP_SECONDS = 0.05
WORKER_GRACE_SECONDS = 10
"""Of a worker that is told to end."""
MAX_CONFORMANCE_WORKERS = 4


class OperatorDeath(StrEnum):
    """When the operator is killed, beside what strikes the job."""

    NEVER = "never"
    AT_FAULT = "with the fault"
    AT_INCIDENT = "at the incident"  # as soon as one is written
    AT_ROUND = "at the round"  # as soon as the plan is a new one


class ExpectedSign(StrEnum):
    """By what one sees that a fault has come to the operator's notice."""

    INCIDENT = "incident"
    SPEC = "spec"  # the operator goes by the job's spec as it is now
    PODS = "pods"  # others than before
    END = "end"  # of the job
    NONE = "none"


@dataclass(frozen=True)
class Episode:
    """A fault, and what becomes of it."""

    fault: Fault
    operator_death: OperatorDeath = OperatorDeath.NEVER

    @property
    def prelude(self) -> Fault | None:
        """What a person has done before. A node that is to be cut off is tainted: whether the next worker is bound to
        it before anybody knows would be the scheduler's dice. (From a cordoned one the workers would leave.)"""
        if isinstance(self.fault, machines.NodeIsCutOff):
            return machines.NodeTainted(role=self.fault.role, index=self.fault.index)
        return None

    @property
    def needs_spare(self) -> bool:
        """Its worker's processes end some time after the operator has given it up. Whether its peers, who wait for a
        new worker, still see that depends on how long one takes to start; with a spare they are in the next round by
        then."""
        return isinstance(self.fault, ranks.ProcessPaused) or (isinstance(self.fault, machines.PodDeleted) and self.fault.force)

    @property
    def expected_sign(self) -> ExpectedSign:
        return EXPECTED_SIGNS[type(self.fault)](self.fault)

    @property
    def is_exclusive(self) -> bool:
        """It is about more than one job: no other may train in the same cluster."""
        return self.operator_death is not OperatorDeath.NEVER or isinstance(self.fault, (machines.NodeIsCutOff, OperatorKilled))

    def __str__(self) -> str:
        content = to_json(self.fault)
        words = [content.pop("kind"), *(f"{key}={value}" for key, value in content.items())]
        return " ".join(words) + ("" if self.operator_death is OperatorDeath.NEVER else f", the operator dies {self.operator_death}")


@dataclass(frozen=True)
class ConformanceScenario:
    """One job, and what strikes it, one after the other."""

    seed: int
    job: SimulatedJob
    episodes: tuple[Episode, ...]

    @property
    def is_exclusive(self) -> bool:
        return any(episode.is_exclusive for episode in self.episodes)

    @property
    def world_settings(self) -> WorldSettings:
        """One slot a node: where its workers are does not hang on the scheduler's taste."""
        return WorldSettings(nodes=CONFORMANCE_NODES, slots=1, operators=1, operator={"quarantine_mode": RemediationMode.ACT})

    def __str__(self) -> str:
        return f"{self.job.replicas}+{self.job.spares}: " + "; ".join(map(str, self.episodes))


def generate_scenario(seed: int) -> ConformanceScenario:
    """The same seed gives the same one."""
    random = Random(f"two worlds {seed}")
    replicas = random.choice([2, 2, 3])
    spares = random.choice([0, 1, 1, 2][: 2 + MAX_CONFORMANCE_WORKERS - replicas])
    episodes, present = list[Episode](), replicas
    classes = [list(CONFORMANCE_FAULTS)[seed % len(CONFORMANCE_FAULTS)]]  # so that seeds in a row leave nothing out
    classes += random.choices(list(CONFORMANCE_FAULTS), [weight for weight, _ in CONFORMANCE_FAULTS.values()], k=random.randrange(3))
    for cls in classes:
        what = CONFORMANCE_FAULTS[cls][1](random)
        if isinstance(what, people.JobScaled):
            present = 3 if present == 2 else 2
            what = people.JobScaled(replicas=present)
        if isinstance(what, machines.PodDeleted) and what.role is TargetRole.SPARE and not spares:
            what = machines.PodDeleted(index=what.index)
        dies = random.choice(list(OperatorDeath)) if EXPECTED_SIGNS[cls](what) is ExpectedSign.INCIDENT and random.random() < 0.25 else OperatorDeath.NEVER
        episodes.append(Episode(what, dies))
    if random.random() < 0.4:
        episodes.append(Episode(people.JobFinishes()))
    if any(episode.needs_spare for episode in episodes):
        spares = max(1, spares)
    spec = {"remediation": {"maxRestarts": 100}, "detection": {"stragglerSlowdown": 10}}
    return ConformanceScenario(seed, SimulatedJob(f"seed-{seed}", replicas=replicas, spares=spares, spec=spec), tuple(episodes))


def _draw_member_index(random: Random) -> int:
    """Of a member; at least two are there at any time."""
    return random.randrange(2)


CONFORMANCE_FAULTS: dict[type[Fault], tuple[int, Callable[[Random], Fault]]] = {
    # How often, and with what parameters.
    ranks.RankCrashes: (4, lambda r: ranks.RankCrashes(index=_draw_member_index(r), code=r.choice([1, -9]))),
    ranks.RankRunsOutOfMemory: (2, lambda r: ranks.RankRunsOutOfMemory(index=_draw_member_index(r))),
    ranks.RankHangs: (2, lambda r: ranks.RankHangs(index=_draw_member_index(r))),
    ranks.RankStopped: (2, lambda r: ranks.RankStopped(index=_draw_member_index(r))),
    ranks.ProcessPaused: (3, lambda r: ranks.ProcessPaused(index=_draw_member_index(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.POD]))),
    ranks.ProcessKilled: (
        2,
        lambda r: ranks.ProcessKilled(index=_draw_member_index(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.SIDECAR])),
    ),
    machines.PodDeleted: (
        4,
        lambda r: machines.PodDeleted(
            role=r.choice([TargetRole.MEMBER, TargetRole.MEMBER, TargetRole.SPARE]), index=_draw_member_index(r), force=r.random() < 0.4
        ),
    ),
    machines.NodeDrained: (2, lambda r: machines.NodeDrained(index=_draw_member_index(r))),
    machines.NodeIsCutOff: (3, lambda r: machines.NodeIsCutOff(index=_draw_member_index(r), partition=machines.NodePartition.ALL)),
    OperatorKilled: (1, lambda _: OperatorKilled()),
    people.JobSuspended: (2, lambda _: people.JobSuspended()),
    people.JobScaled: (2, lambda _: people.JobScaled()),
}

EXPECTED_SIGNS: dict[type[Fault], Callable[[Fault], ExpectedSign]] = {
    **dict.fromkeys(
        (
            ranks.RankCrashes,
            ranks.RankRunsOutOfMemory,
            ranks.RankHangs,
            ranks.RankStopped,
            ranks.ProcessPaused,
            machines.NodeDrained,
            machines.NodeIsCutOff,
        ),
        lambda _: ExpectedSign.INCIDENT,
    ),
    ranks.ProcessKilled: lambda what: (
        ExpectedSign.NONE if isinstance(what, ranks.ProcessKilled) and what.part is ranks.WorkerProcess.SIDECAR else ExpectedSign.INCIDENT
    ),
    machines.PodDeleted: lambda what: (
        ExpectedSign.PODS if isinstance(what, machines.PodDeleted) and what.role is TargetRole.SPARE else ExpectedSign.INCIDENT
    ),
    OperatorKilled: lambda _: ExpectedSign.NONE,
    people.JobSuspended: lambda _: ExpectedSign.SPEC,
    people.JobScaled: lambda _: ExpectedSign.SPEC,
    people.JobFinishes: lambda _: ExpectedSign.END,
}


def list_fault_kinds(found: ConformanceScenario) -> tuple[str, ...]:
    """Of its faults."""
    return tuple(derive_kind(type(episode.fault)) for episode in found.episodes)
