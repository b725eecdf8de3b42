"""Generates a scenario that both worlds can run from a seed.

Each fault is injected after the previous one has healed, so that its consequences do not depend on a world's speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.api.training_job import RemediationMode

from ..faults import machines, people, ranks
from ..faults.fault import Fault
from ..faults.operators import OperatorKilled
from ..faults.targets import TargetRole
from ..faults.value_codec import derive_kind, to_json
from ..simulated_job import SimulatedJob
from ..world import WorldSettings

Random = random.Random
CONFORMANCE_NODES = 6
CONFORMANCE_STEP_SECONDS = 0.05
WORKER_GRACE_SECONDS = 10
"""Seconds for a worker to leave after SIGTERM."""
MAX_CONFORMANCE_WORKERS = 4


class OperatorDeath(StrEnum):
    """When the operator is killed, in addition to the job's fault."""

    NEVER = "never"
    AT_FAULT = "with the fault"
    AT_INCIDENT = "at the incident"  # as soon as one is written
    AT_ROUND = "at the round"  # as soon as there is a new plan


class ExpectedSign(StrEnum):
    """What shows that the operator has noticed a fault."""

    INCIDENT = "incident"
    SPEC = "spec"  # the operator has observed the present spec
    PODS = "pods"  # there are new pods
    END = "end"  # the job has ended
    NONE = "none"


@dataclass(frozen=True)
class Episode:
    """A fault, and what follows from it."""

    fault: Fault
    operator_death: OperatorDeath = OperatorDeath.NEVER

    @property
    def prelude(self) -> Fault | None:
        """A user's action before the fault.

        A node that will be cut off is tainted first. Otherwise, the scheduler could bind the next worker to it before
        the cut is noticed. (A cordon would make its workers leave.)
        """
        if isinstance(self.fault, machines.NodeIsCutOff):
            return machines.NodeTainted(role=self.fault.role, index=self.fault.index)
        return None

    @property
    def needs_spare(self) -> bool:
        """Whether the fault needs a spare for a deterministic result.

        Its worker's processes end some time after the operator has given it up. Whether the peers that wait for a new
        worker still see that depends on the worker's start time. With a spare, they are in the next round by then.
        """
        return isinstance(self.fault, ranks.ProcessPaused) or (
            isinstance(self.fault, machines.PodDeleted) and self.fault.force
        )

    @property
    def expected_sign(self) -> ExpectedSign:
        return EXPECTED_SIGNS[type(self.fault)](self.fault)

    @property
    def is_exclusive(self) -> bool:
        """Whether the fault affects more than one job: no other may train in the same cluster."""
        return self.operator_death is not OperatorDeath.NEVER or isinstance(
            self.fault, (machines.NodeIsCutOff, OperatorKilled)
        )

    def __str__(self) -> str:
        content = to_json(self.fault)
        parts = [content.pop("kind"), *(f"{key}={value}" for key, value in content.items())]
        return " ".join(parts) + (
            "" if self.operator_death is OperatorDeath.NEVER else f", the operator dies {self.operator_death}"
        )


@dataclass(frozen=True)
class ConformanceScenario:
    """One job, and the faults that are injected, one after the other."""

    seed: int
    job: SimulatedJob
    episodes: tuple[Episode, ...]

    @property
    def is_exclusive(self) -> bool:
        return any(episode.is_exclusive for episode in self.episodes)

    @property
    def world_settings(self) -> WorldSettings:
        """One slot per node: the workers' placement does not depend on the scheduler's preferences."""
        return WorldSettings(
            nodes=CONFORMANCE_NODES, slots=1, operators=1, operator={"quarantine_mode": RemediationMode.ACT}
        )

    def __str__(self) -> str:
        return f"{self.job.replicas}+{self.job.spares}: " + "; ".join(map(str, self.episodes))


def generate_scenario(seed: int) -> ConformanceScenario:
    """Generate a scenario. The same seed gives the same scenario."""
    random = Random(f"two worlds {seed}")
    replicas = random.choice([2, 2, 3])
    spares = random.choice([0, 1, 1, 2][: 2 + MAX_CONFORMANCE_WORKERS - replicas])
    episodes, present = list[Episode](), replicas
    classes = [list(CONFORMANCE_FAULTS)[seed % len(CONFORMANCE_FAULTS)]]  # consecutive seeds cover all faults
    classes += random.choices(
        list(CONFORMANCE_FAULTS), [weight for weight, _ in CONFORMANCE_FAULTS.values()], k=random.randrange(3)
    )
    for cls in classes:
        fault = CONFORMANCE_FAULTS[cls][1](random)
        if isinstance(fault, people.JobScaled):
            present = 3 if present == 2 else 2
            fault = people.JobScaled(replicas=present)
        if isinstance(fault, machines.PodDeleted) and fault.role is TargetRole.SPARE and not spares:
            fault = machines.PodDeleted(index=fault.index)
        operator_death = (
            random.choice(list(OperatorDeath))
            if EXPECTED_SIGNS[cls](fault) is ExpectedSign.INCIDENT and random.random() < 0.25
            else OperatorDeath.NEVER
        )
        episodes.append(Episode(fault, operator_death))
    if random.random() < 0.4:
        episodes.append(Episode(people.JobFinishes()))
    if any(episode.needs_spare for episode in episodes):
        spares = max(1, spares)
    spec = {"remediation": {"maxRestarts": 100}, "detection": {"stragglerSlowdown": 10}}
    return ConformanceScenario(
        seed, SimulatedJob(f"seed-{seed}", replicas=replicas, spares=spares, spec=spec), tuple(episodes)
    )


def _draw_member_index(random: Random) -> int:
    """Draw a member's index. There are always at least two members."""
    return random.randrange(2)


CONFORMANCE_FAULTS: dict[type[Fault], tuple[int, Callable[[Random], Fault]]] = {
    # Frequency and parameters.
    ranks.RankCrashes: (4, lambda r: ranks.RankCrashes(index=_draw_member_index(r), code=r.choice([1, -9]))),
    ranks.RankRunsOutOfMemory: (2, lambda r: ranks.RankRunsOutOfMemory(index=_draw_member_index(r))),
    ranks.RankHangs: (2, lambda r: ranks.RankHangs(index=_draw_member_index(r))),
    ranks.RankStopped: (2, lambda r: ranks.RankStopped(index=_draw_member_index(r))),
    ranks.ProcessPaused: (
        3,
        lambda r: ranks.ProcessPaused(
            index=_draw_member_index(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.POD])
        ),
    ),
    ranks.ProcessKilled: (
        2,
        lambda r: ranks.ProcessKilled(
            index=_draw_member_index(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.SIDECAR])
        ),
    ),
    machines.PodDeleted: (
        4,
        lambda r: machines.PodDeleted(
            role=r.choice([TargetRole.MEMBER, TargetRole.MEMBER, TargetRole.SPARE]),
            index=_draw_member_index(r),
            force=r.random() < 0.4,
        ),
    ),
    machines.NodeDrained: (2, lambda r: machines.NodeDrained(index=_draw_member_index(r))),
    machines.NodeIsCutOff: (
        3,
        lambda r: machines.NodeIsCutOff(index=_draw_member_index(r), partition=machines.NodePartition.ALL),
    ),
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
    ranks.ProcessKilled: lambda fault: (
        ExpectedSign.NONE
        if isinstance(fault, ranks.ProcessKilled) and fault.part is ranks.WorkerProcess.SIDECAR
        else ExpectedSign.INCIDENT
    ),
    machines.PodDeleted: lambda fault: (
        ExpectedSign.PODS
        if isinstance(fault, machines.PodDeleted) and fault.role is TargetRole.SPARE
        else ExpectedSign.INCIDENT
    ),
    OperatorKilled: lambda _: ExpectedSign.NONE,
    people.JobSuspended: lambda _: ExpectedSign.SPEC,
    people.JobScaled: lambda _: ExpectedSign.SPEC,
    people.JobFinishes: lambda _: ExpectedSign.END,
}


def list_fault_kinds(scenario: ConformanceScenario) -> tuple[str, ...]:
    """Return the kinds of a scenario's faults."""
    return tuple(derive_kind(type(episode.fault)) for episode in scenario.episodes)
