"""From a seed to a disaster that both worlds can play. Each fault comes once the one before has healed, so that what
follows from it does not hang on how fast a world is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.api import Mode

from ..faults import machines, people, ranks
from ..faults.fault import Fault, Role
from ..faults.operators import OperatorKilled
from ..faults.values import kind, to_json
from ..schedule import JobSettings
from ..world import WorldSettings

Random = random.Random
NODES = 6
STEP_SECONDS = 0.05
GRACE_SECONDS = 10
"""Of a worker that is told to end."""
MOST_WORKERS = 4


class Dies(StrEnum):
    """When the operator is killed, beside what strikes the job."""

    NEVER = "never"
    WITH_THE_FAULT = "with the fault"
    AT_THE_INCIDENT = "at the incident"  # as soon as one is written
    AT_THE_ROUND = "at the round"  # as soon as the plan is a new one


class Sign(StrEnum):
    """By what one sees that a fault has come to the operator's notice."""

    INCIDENT = "incident"
    SPEC = "spec"  # the operator goes by the job's spec as it is now
    PODS = "pods"  # others than before
    END = "end"  # of the job
    NONE = "none"


@dataclass(frozen=True)
class Episode:
    """A fault, and what becomes of it."""

    what: Fault
    operator: Dies = Dies.NEVER

    @property
    def prelude(self) -> Fault | None:
        """What a person has done before. A node that is to be cut off is tainted: whether the next worker is bound to
        it before anybody knows would be the scheduler's dice. (From a cordoned one the workers would leave.)"""
        if isinstance(self.what, machines.NodeIsCutOff):
            return machines.NodeTainted(role=self.what.role, index=self.what.index)
        return None

    @property
    def wants_spare(self) -> bool:
        """Its worker's processes end some time after the operator has given it up. Whether its peers, who wait for a
        new worker, still see that depends on how long one takes to start; with a spare they are in the next round by
        then."""
        return isinstance(self.what, ranks.Frozen) or (isinstance(self.what, machines.PodDeleted) and self.what.force)

    @property
    def sign(self) -> Sign:
        return SIGNS[type(self.what)](self.what)

    @property
    def exclusive(self) -> bool:
        """It is about more than one job: no other may train in the same cluster."""
        return self.operator is not Dies.NEVER or isinstance(self.what, (machines.NodeIsCutOff, OperatorKilled))

    def __str__(self) -> str:
        content = to_json(self.what)
        words = [content.pop("kind"), *(f"{key}={value}" for key, value in content.items())]
        return " ".join(words) + ("" if self.operator is Dies.NEVER else f", the operator dies {self.operator}")


@dataclass(frozen=True)
class Disaster:
    """One job, and what strikes it, one after the other."""

    seed: int
    job: JobSettings
    episodes: tuple[Episode, ...]

    @property
    def exclusive(self) -> bool:
        return any(episode.exclusive for episode in self.episodes)

    @property
    def world(self) -> WorldSettings:
        """One slot a node: where its workers are does not hang on the scheduler's taste."""
        return WorldSettings(nodes=NODES, slots=1, operators=1, operator={"quarantine_mode": Mode.ACT})

    def __str__(self) -> str:
        return f"{self.job.replicas}+{self.job.spares}: " + "; ".join(map(str, self.episodes))


def disaster(seed: int) -> Disaster:
    """The same seed gives the same one."""
    random = Random(f"two worlds {seed}")
    replicas = random.choice([2, 2, 3])
    spares = random.choice([0, 1, 1, 2][: 2 + MOST_WORKERS - replicas])
    episodes, present = list[Episode](), replicas
    classes = [list(MENU)[seed % len(MENU)]]  # so that seeds in a row leave nothing out
    classes += random.choices(list(MENU), [weight for weight, _ in MENU.values()], k=random.randrange(3))
    for cls in classes:
        what = MENU[cls][1](random)
        if isinstance(what, people.JobScaled):
            present = 3 if present == 2 else 2
            what = people.JobScaled(replicas=present)
        if isinstance(what, machines.PodDeleted) and what.role is Role.SPARE and not spares:
            what = machines.PodDeleted(index=what.index)
        dies = random.choice(list(Dies)) if SIGNS[cls](what) is Sign.INCIDENT and random.random() < 0.25 else Dies.NEVER
        episodes.append(Episode(what, dies))
    if random.random() < 0.4:
        episodes.append(Episode(people.JobFinishes()))
    if any(episode.wants_spare for episode in episodes):
        spares = max(1, spares)
    spec = {"remediation": {"maxRestarts": 100}, "detection": {"stragglerSlowdown": 10}}
    return Disaster(seed, JobSettings(f"seed-{seed}", replicas=replicas, spares=spares, spec=spec), tuple(episodes))


def _index(random: Random) -> int:
    """Of a member; at least two are there at any time."""
    return random.randrange(2)


MENU: dict[type[Fault], tuple[int, Callable[[Random], Fault]]] = {
    # How often, and with what parameters.
    ranks.RankCrashes: (4, lambda r: ranks.RankCrashes(index=_index(r), code=r.choice([1, -9]))),
    ranks.RankRunsOutOfMemory: (2, lambda r: ranks.RankRunsOutOfMemory(index=_index(r))),
    ranks.RankHangs: (2, lambda r: ranks.RankHangs(index=_index(r))),
    ranks.RankStopped: (2, lambda r: ranks.RankStopped(index=_index(r))),
    ranks.Frozen: (3, lambda r: ranks.Frozen(index=_index(r), part=r.choice([ranks.Part.LAUNCHER, ranks.Part.POD]))),
    ranks.ProcessKilled: (
        2,
        lambda r: ranks.ProcessKilled(index=_index(r), part=r.choice([ranks.Part.LAUNCHER, ranks.Part.SIDECAR])),
    ),
    machines.PodDeleted: (
        4,
        lambda r: machines.PodDeleted(
            role=r.choice([Role.MEMBER, Role.MEMBER, Role.SPARE]), index=_index(r), force=r.random() < 0.4
        ),
    ),
    machines.NodeDrained: (2, lambda r: machines.NodeDrained(index=_index(r))),
    machines.NodeIsCutOff: (3, lambda r: machines.NodeIsCutOff(index=_index(r), beyond=machines.Beyond.ALL)),
    OperatorKilled: (1, lambda _: OperatorKilled()),
    people.JobSuspended: (2, lambda _: people.JobSuspended()),
    people.JobScaled: (2, lambda _: people.JobScaled()),
}

SIGNS: dict[type[Fault], Callable[[Fault], Sign]] = {
    **dict.fromkeys(
        (
            ranks.RankCrashes,
            ranks.RankRunsOutOfMemory,
            ranks.RankHangs,
            ranks.RankStopped,
            ranks.Frozen,
            machines.NodeDrained,
            machines.NodeIsCutOff,
        ),
        lambda _: Sign.INCIDENT,
    ),
    ranks.ProcessKilled: lambda what: (
        Sign.NONE if isinstance(what, ranks.ProcessKilled) and what.part is ranks.Part.SIDECAR else Sign.INCIDENT
    ),
    machines.PodDeleted: lambda what: (
        Sign.PODS if isinstance(what, machines.PodDeleted) and what.role is Role.SPARE else Sign.INCIDENT
    ),
    OperatorKilled: lambda _: Sign.NONE,
    people.JobSuspended: lambda _: Sign.SPEC,
    people.JobScaled: lambda _: Sign.SPEC,
    people.JobFinishes: lambda _: Sign.END,
}


def kinds(found: Disaster) -> tuple[str, ...]:
    """Of its faults."""
    return tuple(kind(type(episode.what)) for episode in found.episodes)
