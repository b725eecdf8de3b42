"""From a seed to a schedule. Swarm testing: each seed draws from a random part of the vocabulary only, since what
happens often together hides what happens rarely alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pacekeeper_operator.api import Cause, JobPhase, Mode

from .faults import control_plane as control
from .faults import machines, operators, people, ranks, surroundings
from .faults.fault import Fault, Role, Which
from .faults.moments import (
    AfterFault,
    AfterWrite,
    At,
    BeforeWrite,
    IncidentOpens,
    Moment,
    PhaseBegins,
    RoundGathers,
    WorkerExits,
)
from .faults.values import kind
from .kubernetes.faults import Fate
from .kubernetes.kubelet import Images
from .schedule import HEALED_AFTER, Aim, JobSettings, Schedule, Stroke
from .world import WorldSettings

Random = random.Random
Make = Callable[[Random], Fault]
LIVENESS_SHARE = 0.2
"""Of all seeds."""
ONE_VICTIM_SHARE = 0.3
"""Of all seeds: what befalls a worker or a node befalls the same one, as with a machine that is broken."""
BEGINS = (5.0, 60.0)
LAST_BEGINS = HEALED_AFTER - 60.0
MOST_FAULTS = 8
WORKERS = 4
OPERATOR: dict[str, Any] = {
    "quarantine_mode": Mode.ACT,
    "quarantine_expires_after": 60.0,
    "quarantine_max_nodes": 2,
    "dcgm_namespace": "gpu-operator",
}
"""Settings of the operator: quarantines end within a run."""


def generate(seed: int) -> Schedule:
    """The same seed gives the same schedule."""
    random = Random(f"schedule {seed}")
    jobs = _jobs(random)
    workers = sum(job.replicas + job.spares for job in jobs)
    asks_first = random.random() < 0.2
    world = WorldSettings(
        nodes=workers + random.randint(1, 6),
        slots=random.choice([1, 2]),
        operators=random.choice([1, 2, 2]),
        old_errors=random.choice([0, 0, 1, 3]),
        operator=OPERATOR | ({"quarantine_mode": Mode.RECOMMEND} if asks_first else {}),
    )
    schedule = Schedule(seed, Aim.SAFETY, world, jobs, _strokes(random, len(jobs)))
    if random.random() < LIVENESS_SHARE:
        return _never_healing(random, schedule)
    return schedule


def _jobs(random: Random) -> tuple[JobSettings, ...]:
    replicas = random.choice([1, 2, 2, 3, 3, 4])
    spares = random.choice([0, 1, 1, 2]) if replicas < WORKERS else 0
    first = JobSettings(
        "a",
        replicas=replicas,
        spares=min(spares, WORKERS - replicas),
        min_replicas=random.choice([None, None, 1]),
        ranks=random.choice([1, 1, 1, 2]),
        spec=_spec(random),
    )
    if random.random() > 0.15:
        return (first,)
    second = replace(first, name="b", replicas=random.choice([1, 2]), min_replicas=None, begins=random.uniform(0, 60))
    return (first, second)


def _spec(random: Random) -> dict[str, Any]:
    """Mostly what lets a job live through everything."""
    spec: dict[str, Any] = {
        "remediation": random.choice([{"maxRestarts": 100}] * 9 + [{"maxRestarts": 2, "restartWindow": "2m"}]),
        "schedulingTimeout": random.choice(["30s", "60s", "5m"]),
    }
    if random.random() < 0.15:
        spec["syncMode"] = random.choice(["Sync", "EDiT", "AsyncEDiT"])
    if random.random() < 0.2:
        spec["runPolicy"] = random.choice([{"ttlSecondsAfterFinished": 60}, {"activeDeadlineSeconds": 240}])
    return spec


def _strokes(random: Random, jobs: int) -> tuple[Stroke, ...]:
    swarm = random.sample(list(MENU), random.randint(2, 8))
    weights = [MENU[cls][0] for cls in swarm]
    at, strokes = random.uniform(*BEGINS), list[Stroke]()
    victim = {"role": Role.MEMBER, "index": random.randrange(4)} if random.random() < ONE_VICTIM_SHARE else {}
    for place in range(random.randint(1, MOST_FAULTS)):
        if at > LAST_BEGINS:
            break
        cls = random.choices(swarm, weights)[0]
        what = MENU[cls][1](random)
        if jobs > 1 and hasattr(what, "job"):
            what = replace(what, job=random.randrange(jobs))  # type: ignore[call-arg]  # it has one
        if hasattr(what, "role"):
            what = replace(what, **victim)
        seconds = round(what.at_least + _seconds(random), 1) if what.lasts() else 0.0
        strokes.append(Stroke(_moment(random, at, place), what, seconds))
        at = round(at + random.choice([random.uniform(0, 1), random.uniform(0, 10), random.uniform(5, 60)]), 2)
    return tuple(strokes)


def _moment(random: Random, at: float, place: int) -> Moment:
    """Mostly at a time."""
    later = random.choice([0.0, 0.0, round(random.uniform(0.0, 2.0), 3)])
    number = random.choice([1, 1, 2, 3])
    unusual: list[Callable[[], Moment]] = [
        lambda: AfterWrite(random.randint(1, 60), later),
        lambda: BeforeWrite(random.randint(1, 60), later),
        lambda: WorkerExits(number, later),
        lambda: PhaseBegins(number, later, phase=random.choice([JobPhase.STARTING, JobPhase.RECOVERING])),
        lambda: IncidentOpens(number, later, cause=random.choice(["", Cause.CRASH, Cause.NODE_LOST])),
        lambda: RoundGathers(number + 1, later),
    ]
    if place and random.random() < 0.2:
        return AfterFault(random.randrange(place), round(random.uniform(0.0, 5.0), 2))
    if random.random() < 0.25:
        return random.choice(unusual)()
    return At(round(at, 2))


def _seconds(random: Random) -> float:
    spans = [(0.5, 5.0), (5.0, 25.0), (25.0, 90.0)]
    return round(random.uniform(*random.choice(spans)), 1)


def _role(random: Random) -> dict[str, Any]:
    """Mostly a member."""
    return {"role": random.choice([Role.MEMBER] * 4 + [Role.SPARE]), "index": random.randrange(4)}


def _which(random: Random) -> dict[str, Any]:
    return {"which": random.choice([Which.LEADER] * 4 + [Which.STANDBY])}


MENU: dict[type[Fault], tuple[int, Make]] = {
    # How often, beside the others of a swarm, and with what parameters.
    ranks.RankCrashes: (6, lambda r: ranks.RankCrashes(**_role(r), code=r.choice([1, -9, -11]))),
    ranks.RankRunsOutOfMemory: (2, lambda r: ranks.RankRunsOutOfMemory(**_role(r))),
    ranks.RankHangs: (4, lambda r: ranks.RankHangs(**_role(r), where=r.choice(list(ranks.Stand)))),
    ranks.RankStopped: (1, lambda r: ranks.RankStopped(**_role(r))),
    ranks.RankCannotBeKilled: (1, lambda r: ranks.RankCannotBeKilled(**_role(r))),
    ranks.LossIsBad: (1, lambda r: ranks.LossIsBad(**_role(r))),
    ranks.GpuFails: (2, lambda r: ranks.GpuFails(**_role(r), xid=r.choice([13, 31, 48, 79, 94, 95]))),
    ranks.GpuWarns: (2, lambda r: ranks.GpuWarns(**_role(r))),
    ranks.ScriptFails: (1, lambda r: ranks.ScriptFails(**_role(r), mistake=r.random() < 0.3)),
    ranks.PlanIsRefused: (1, lambda r: ranks.PlanIsRefused(**_role(r))),
    ranks.CheckpointsFail: (1, lambda _: ranks.CheckpointsFail()),
    ranks.CheckpointIsTorn: (1, lambda _: ranks.CheckpointIsTorn()),
    ranks.VolumeIsSlow: (1, lambda r: ranks.VolumeIsSlow(by=r.choice([5.0, 20.0, 60.0]))),
    ranks.Frozen: (3, lambda r: ranks.Frozen(**_role(r), part=r.choice(list(ranks.Part)))),
    ranks.ProcessKilled: (
        2,
        lambda r: ranks.ProcessKilled(**_role(r), part=r.choice([ranks.Part.LAUNCHER, ranks.Part.SIDECAR])),
    ),
    ranks.FiguresLie: (1, lambda r: ranks.FiguresLie(**_role(r), lie=r.choice(list(ranks.Lie)))),
    ranks.NodeIsSlow: (3, lambda r: ranks.NodeIsSlow(**_role(r), factor=r.choice([1.3, 1.8, 2.5, 4.0]))),
    ranks.LinkFails: (
        2,
        lambda r: ranks.LinkFails(**_role(r), other=r.randrange(4), factor=r.choice([0.0, 3.0, 10.0])),
    ),
    machines.PowerFails: (4, lambda r: machines.PowerFails(**_role(r))),
    machines.KubeletStops: (2, lambda r: machines.KubeletStops(**_role(r))),
    machines.RuntimeHangs: (1, lambda r: machines.RuntimeHangs(**_role(r))),
    machines.NodeShutsDown: (1, lambda r: machines.NodeShutsDown(**_role(r), grace=r.choice([2.0, 20.0]))),
    machines.NodeIsCutOff: (4, lambda r: machines.NodeIsCutOff(**_role(r), beyond=r.choice(list(machines.Beyond)))),
    machines.NodeVanishes: (2, lambda r: machines.NodeVanishes(**_role(r))),
    machines.NodeDeleted: (1, lambda r: machines.NodeDeleted(**_role(r))),
    machines.NodeAdded: (1, lambda _: machines.NodeAdded()),
    machines.NodeCordoned: (1, lambda r: machines.NodeCordoned(**_role(r), free=r.random() < 0.5)),
    machines.NodeDrained: (2, lambda r: machines.NodeDrained(**_role(r))),
    machines.NodeTainted: (1, lambda r: machines.NodeTainted(**_role(r), effect=r.choice(["NoSchedule", "NoExecute"]))),
    machines.NodeOptedOut: (1, lambda r: machines.NodeOptedOut(**_role(r))),
    machines.NodeIsSick: (
        3,
        lambda r: machines.NodeIsSick(**_role(r), fails=r.random() < 0.7, xid=r.choice([0, 79, 95])),
    ),
    machines.ClockIsOff: (
        1,
        lambda r: machines.ClockIsOff(**_role(r), hours=r.choice([-30.0, -1.0, 0.1, 3.0]), operators=r.random() < 0.3),
    ),
    machines.ImagesDoNotCome: (
        1,
        lambda r: machines.ImagesDoNotCome(
            index=r.randrange(6), free=True, images=r.choice([Images.FAIL, Images.HANG])
        ),
    ),
    machines.KubeletRefuses: (1, lambda r: machines.KubeletRefuses(index=r.randrange(6), free=True)),
    machines.PodDeleted: (4, lambda r: machines.PodDeleted(**_role(r), force=r.random() < 0.3)),
    machines.PodEvicted: (2, lambda r: machines.PodEvicted(**_role(r))),
    machines.PodPreempted: (1, lambda r: machines.PodPreempted(**_role(r))),
    machines.PodKilledForMemory: (1, lambda r: machines.PodKilledForMemory(**_role(r))),
    control.ApiIsDown: (3, lambda r: control.ApiIsDown(silent=r.random() < 0.4)),
    control.ApiFails: (2, lambda r: control.ApiFails(rate=r.choice([0.1, 0.3, 0.6]))),
    control.AnswersAreLost: (3, lambda r: control.AnswersAreLost(rate=r.choice([0.1, 0.3]))),
    control.WritesAreLate: (2, lambda r: control.WritesAreLate(rate=r.choice([0.05, 0.2]))),
    control.ApiIsSlow: (1, lambda r: control.ApiIsSlow(by=r.choice([1.0, 4.0, 14.0]))),
    control.WatchesLag: (2, lambda r: control.WatchesLag(by=r.choice([2.0, 10.0, 40.0]))),
    control.HistoryIsShort: (1, lambda _: control.HistoryIsShort()),
    control.WatchesEnd: (2, lambda r: control.WatchesEnd(gone=r.random() < 0.5)),
    control.NextRequest: (
        2,
        lambda r: control.NextRequest(
            method=r.choice(["", "GET", "PUT", "POST", "PATCH", "DELETE"]),
            part=r.choice(["/pods", "/trainingjobstates", "/leases", "/incidents", "/nodes", "/nodequarantines"]),
            fate=r.choice(list(Fate)),
            status=r.choice([401, 403, 409, 429, 500, 503]),
        ),
    ),
    control.Conflicts: (
        1,
        lambda r: control.Conflicts(plural=r.choice(["trainingjobstates", "leases"]), number=r.choice([1, 5, 20])),
    ),
    control.EtcdIsRestored: (1, lambda _: control.EtcdIsRestored()),
    control.WebhookIsSlow: (1, lambda r: control.WebhookIsSlow(by=r.choice([3.0, 20.0]))),
    control.PodsAreDenied: (1, lambda r: control.PodsAreDenied(status=r.choice([403, 500]))),
    control.QuotaIsFull: (2, lambda r: control.QuotaIsFull(room=r.choice([0, 0, 1]))),
    control.PrometheusFails: (2, lambda r: control.PrometheusFails(how=r.choice(list(control.Silence)))),
    control.ExporterIsAway: (
        2,
        lambda r: control.ExporterIsAway(node=r.randrange(3), everywhere=r.random() < 0.5),
    ),
    control.PrometheusLies: (2, lambda r: control.PrometheusLies(lie=r.choice(list(control.Lie)))),
    operators.OperatorKilled: (6, lambda r: operators.OperatorKilled(**_which(r))),
    operators.OperatorFrozen: (3, lambda r: operators.OperatorFrozen(**_which(r))),
    operators.OperatorRemoved: (
        2,
        lambda r: operators.OperatorRemoved(**_which(r), runs_on=r.random() < 0.4),
    ),
    operators.OperatorReplaced: (3, lambda r: operators.OperatorReplaced(**_which(r))),
    operators.OperatorIsCutOff: (
        3,
        lambda r: operators.OperatorIsCutOff(**_which(r), beyond=r.choice(list(operators.Beyond))),
    ),
    operators.OperatorClockIsOff: (
        2,
        lambda r: operators.OperatorClockIsOff(
            **_which(r), hours=r.choice([-300.0, -26.0, -1.0, -0.05, 0.05, 1.0, 26.0, 960.0])
        ),
    ),
    operators.OperatorScaled: (1, lambda r: operators.OperatorScaled(replicas=r.choice([2, 3]))),
    operators.LeaseDeleted: (1, lambda _: operators.LeaseDeleted()),
    operators.LeaseEdited: (1, lambda r: operators.LeaseEdited(seconds=r.choice([1, 15, 3600]))),
    people.JobScaled: (3, lambda r: people.JobScaled(replicas=r.randint(1, 4))),
    people.JobSuspended: (3, lambda r: people.JobSuspended(edits=r.random() < 0.3)),
    people.JobEdited: (2, lambda r: people.JobEdited(edit=r.choice(list(people.Edit)))),
    people.InvalidEdit: (1, lambda r: people.InvalidEdit(number=r.randrange(len(people.INVALID)))),
    people.JobDeleted: (2, lambda r: people.JobDeleted(again=r.random() < 0.7, by_force=r.random() < 0.4)),
    people.JobFinishes: (2, lambda r: people.JobFinishes(steps=r.choice([1, 5, 40]))),
    people.IncidentsDeleted: (1, lambda _: people.IncidentsDeleted()),
    people.StateDeleted: (1, lambda _: people.StateDeleted()),
    people.StateEdited: (1, lambda r: people.StateEdited(edit=r.choice(list(people.StateEdit)))),
    people.StateOfOldOperator: (1, lambda _: people.StateOfOldOperator()),
    people.QuarantineMade: (1, lambda r: people.QuarantineMade(**_role(r))),
    people.QuarantineApproved: (1, lambda r: people.QuarantineApproved(index=r.randrange(2))),
    people.QuarantineDeleted: (1, lambda r: people.QuarantineDeleted(index=r.randrange(2))),
    people.RemediesPaused: (1, lambda _: people.RemediesPaused()),
    surroundings.OutageAtStart: (
        4,
        lambda r: surroundings.OutageAtStart(
            **_role(r),
            away=r.choice(list(surroundings.Away)),
            at_import=r.random() < 0.3,
            loss=r.choice(list(surroundings.Loss)),
        ),
    ),
    surroundings.ProbesFailAlike: (
        2,
        lambda r: surroundings.ProbesFailAlike(
            **_role(r), check=r.choice(list(surroundings.Check)), xid=r.choice([0, 48, 79])
        ),
    ),
    surroundings.RackLosesPower: (
        2,
        lambda r: surroundings.RackLosesPower(nodes=r.choice([2, 3, 3, 5]), apart=r.choice([0.0, 15.0, 40.0])),
    ),
}

SURVIVABLE: tuple[Make, ...] = (
    # What may stay broken for ever where a node and a spare are left, and the operator has a second replica.
    lambda r: machines.PowerFails(**_role(r)),
    lambda r: machines.NodeVanishes(**_role(r)),
    lambda r: machines.NodeIsCutOff(**_role(r), beyond=r.choice([machines.Beyond.ALL, machines.Beyond.API])),
    lambda r: machines.KubeletStops(**_role(r)),
    lambda r: machines.NodeTainted(**_role(r)),
    lambda r: machines.NodeIsSick(**_role(r), fails=True),
    lambda r: machines.ImagesDoNotCome(index=r.randrange(6), free=True),
    lambda r: ranks.Frozen(**_role(r), part=r.choice([ranks.Part.LAUNCHER, ranks.Part.POD])),
    lambda r: ranks.NodeIsSlow(**_role(r), factor=r.choice([1.5, 3.0])),
    lambda _: ranks.LinkFails(other=1, factor=5.0),
    lambda _: ranks.CheckpointsFail(),
    lambda r: ranks.FiguresLie(lie=r.choice(list(ranks.Lie))),
    lambda r: control.PrometheusFails(how=r.choice(list(control.Silence))),
    lambda r: control.PrometheusLies(lie=r.choice(list(control.Lie))),
    lambda r: control.ExporterIsAway(node=r.randrange(3), everywhere=r.random() < 0.5),
    lambda r: surroundings.ProbesFailAlike(**_role(r)),
    lambda _: control.ApiFails(rate=0.1),
    lambda _: control.AnswersAreLost(rate=0.05),
    lambda _: control.WatchesLag(by=5.0),
    lambda _: control.HistoryIsShort(),
    lambda _: operators.OperatorFrozen(),
    lambda _: operators.OperatorIsCutOff(beyond=operators.Beyond.API),
    lambda _: operators.OperatorIsCutOff(beyond=operators.Beyond.PROMETHEUS),
)


def _never_healing(random: Random, schedule: Schedule) -> Schedule:
    """With one thing that stays broken, and room to live with it; some of what heals comes, too."""
    job = schedule.jobs[0]
    job = replace(job, replicas=min(job.replicas, WORKERS - 1), spares=1, min_replicas=None)
    what = random.choice(SURVIVABLE)(random)
    broken = Stroke(At(round(random.uniform(20.0, 120.0), 2)), what, None)
    others = [stroke for stroke in schedule.strokes if not isinstance(stroke.when, AfterFault)][: random.randint(0, 3)]
    world = replace(schedule.world, nodes=job.replicas + job.spares + 3, operators=2)
    strokes = tuple(stroke for stroke in others if kind(type(stroke.what)) not in DEADLY)
    return replace(schedule, aim=Aim.LIVENESS, world=world, jobs=(job,), strokes=(broken, *strokes))


DEADLY = frozenset({"quota-is-full", "job-deleted", "job-finishes", "pods-are-denied"})
"""Beside what never heals these leave nothing to be judged, or too little room."""
