"""Defects of the operator that were found by simulation, each with the shortest story that shows it.

`tests/unit/simulation/test_known_defects.py` plays each of them twice: as the operator is, and with its mend undone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..faults import control_plane, machines, operators, people, ranks, surroundings
from ..faults.fault import Fault, Role
from ..faults.moments import AfterFault, At, IncidentOpens, Moment, RankExits, WorkerExits
from ..faults.surroundings import Away, Loss
from ..generator import OPERATOR
from ..kubernetes.faults import Fate
from ..kubernetes.kubelet import Images
from ..schedule import Aim, JobSettings, Schedule, Stroke
from ..world import WorldSettings

CALM = 40.0
"""Virtual seconds at which a job has trained for a while."""


@dataclass(frozen=True)
class Scenario:
    """`words`: what went wrong."""

    words: str
    schedule: Schedule
    patience: float = 120.0
    """Seconds for which a job that could train may stand still."""
    restarts: float = math.inf
    """So many may count, at most."""


def _scenario(
    words: str,
    *strokes: Stroke,
    patience: float = Scenario.patience,
    restarts: float = Scenario.restarts,
    aim: Aim = Aim.SAFETY,
    jobs: tuple[JobSettings, ...] = (),
    seed: int = 1,
    nodes: int = 8,
    slots: int = 1,
    replicas: int = 2,
    spares: int = 1,
    old_errors: int = 0,
    **spec: Any,
) -> Scenario:
    spec = {"remediation": {"maxRestarts": 100}, "schedulingTimeout": "60s", **spec}
    world = WorldSettings(nodes=nodes, slots=slots, old_errors=old_errors, operator=OPERATOR)
    job = JobSettings(replicas=replicas, spares=spares, spec=spec)
    return Scenario(words, Schedule(seed, aim, world, jobs or (job,), strokes), patience, restarts)


def _at(when: float | Moment, what: Fault, seconds: float | None = 0.0) -> Stroke:
    return Stroke(At(when) if isinstance(when, float) else when, what, seconds)


_SHRINKS = JobSettings(replicas=3, spares=0, min_replicas=1, spec={"remediation": {"maxRestarts": 100}})


def _no_images(workers: int) -> tuple[Stroke, ...]:
    """For 80 s on any node: of the workers, and one more."""
    hang = [machines.ImagesDoNotCome(index=index, images=Images.HANG) for index in range(workers)]
    return tuple(
        _at(CALM - 1.0, fault, 80.0) for fault in (*hang, machines.ImagesDoNotCome(free=True, images=Images.HANG))
    )


SCENARIOS: dict[str, Scenario] = {
    # What is not known is no news.
    "failed-list": _scenario(
        "one failed list of pods when the operator restarts ends the workers of a healthy job",
        _at(CALM + 1.0, operators.OperatorKilled()),
        *[_at(CALM + 1.1, control_plane.NextRequest("GET", "/v1/pods", Fate.REFUSED, 503)) for _ in range(3)],
    ),
    # Crashes.
    "broken-gpu": _scenario(
        "a rank that ends with an error in each round on one worker fails the job, beside a warm spare",
        _at(CALM, ranks.ScriptFails(index=1), None),
        _at(CALM + 0.1, ranks.RankCrashes(index=1)),
        replicas=3,
    ),
    "two-signals": _scenario(
        "two ranks that are killed before their first step, one after the other, are taken for the script's fault",
        _at(CALM, ranks.RankCrashes(index=0, code=-9)),
        _at(AfterFault(0, 2.0), ranks.RankCrashes(index=1, code=-9)),
        _at(AfterFault(1, 3.0), ranks.RankCrashes(index=0, code=-9)),
    ),
    "peers-of-a-deleted-worker": _scenario(
        "a worker is deleted by force, and its peers, who die of it before it is replaced, cost a restart",
        _at(CALM, control_plane.WebhookIsSlow(by=25.0), 60.0),
        _at(CALM + 1.0, machines.PodDeleted(force=True, index=1)),
        spares=0,
        restarts=0,
    ),
    "peers-of-a-killed-launcher": _scenario(
        "a launcher is killed, which costs a restart, and its peers, who die of it, cost another",
        _at(CALM, ranks.ProcessKilled(index=1)),
        replicas=3,
        spares=0,
        restarts=1,
    ),
    # Beginnings.
    "hang-before-warm": _scenario(
        "a worker that hangs before it is warm keeps its job from beginning, beside a warm spare",
        _at(8.0, ranks.Frozen(role=Role.SPARE, index=1), 300.0),
    ),
    "older-job-cannot-begin": _scenario(
        "an older job whose template is refused keeps a younger one waiting",
        _at(0.0, control_plane.PodsAreDenied(status=422), 250.0),
        _at(70.0, machines.NodeAdded()),
        _at(200.0, machines.NodeAdded()),
        jobs=(
            JobSettings("old", replicas=1, spares=0),
            JobSettings("young", replicas=2, spares=0, begins=1.0, spec={"schedulingTimeout": "20s"}),
        ),
        nodes=1,
        patience=150.0,
    ),
    # Ends.
    "finished-and-lost": _scenario(
        "one trainer has come to its end, another worker is lost before: nobody ever finishes",
        _at(CALM, people.JobFinishes(steps=3)),
        _at(RankExits(1), machines.PowerFails(index=1), 100.0),
        replicas=4,
    ),
    "finished-unseen": _scenario(
        "the job finishes while the operator is away, and a pod that has ended is removed before it is back",
        _at(CALM, people.JobFinishes(steps=2)),
        _at(CALM + 1.0, operators.OperatorScaled(replicas=0), 100.0),
        _at(CALM + 8.0, machines.NodeVanishes(free=True, index=4), 200.0),
        spares=0,
    ),
    "finished-and-removed": _scenario(
        "a pod is removed between its trainer's end and its kubelet's report: its ranks never finish",
        _at(CALM, people.JobFinishes(steps=2)),
        _at(WorkerExits(1), machines.PodDeleted(force=True)),
    ),
    # Machines.
    "all-lose-power": _scenario(
        "all nodes of a job lose power at once: the job says Running for minutes, beside warm spares",
        _at(CALM, machines.PowerFails(index=0), 200.0),
        _at(CALM, machines.PowerFails(index=1), 200.0),
        patience=30.0,
        spares=2,
    ),
    "operator-cut-from-node": _scenario(
        "operator and node are cut from each other: a worker that trains is killed, and its node quarantined",
        _at(CALM, machines.NodeIsCutOff(index=1, beyond=machines.Beyond.OPERATOR), 60.0),
        replicas=3,
    ),
    "operator-cut-from-all": _scenario(
        "the operator reaches no node: the worker of a job that has but one is killed while it trains",
        _at(CALM, operators.OperatorIsCutOff(beyond=operators.Beyond.NODES), 60.0),
        replicas=1,
        spares=0,
    ),
    "silent-spare": _scenario(
        "a spare that nobody hears of any more is given the ranks of a lost worker",
        _at(CALM, machines.NodeIsCutOff(role=Role.SPARE, beyond=machines.Beyond.OPERATOR), 150.0),
        _at(CALM + 20.0, machines.PodDeleted(force=True)),
        patience=40.0,
    ),
    "dead-spare-and-resume": _scenario(
        "a spare whose node is dead keeps a job from being resumed",
        _at(CALM, machines.PowerFails(role=Role.SPARE), 280.0),
        _at(CALM + 20.0, people.JobSuspended(), 40.0),
        patience=60.0,
    ),
    "suspended-and-lost": _scenario(
        "a node that dies while its job is being suspended keeps it from being resumed",
        _at(CALM, people.JobSuspended(), 60.0),
        _at(CALM + 0.2, machines.PowerFails(), 280.0),
        spares=0,
        patience=120.0,
    ),
    # What all share.
    "outage-at-start": _scenario(
        "a node is lost while names cannot be resolved: rounds end by the same error, and the job fails for good",
        _at(CALM, surroundings.OutageAtStart(index=1), 60.0),
    ),
    "outage-at-import": _scenario(
        "a worker's successors end while storage is away, before they are ready: the job fails after two of them",
        _at(
            CALM,
            surroundings.OutageAtStart(index=1, away=Away.STORAGE, at_import=True, loss=Loss.WORKER),
            60.0,
        ),
        spares=0,
    ),
    "outage-spends-restarts": _scenario(
        "storage is away after a crash: rounds that end before their first step spend the restarts, and the job fails",
        _at(CALM, surroundings.OutageAtStart(away=Away.STORAGE, loss=Loss.RANK), 60.0),
        remediation={"maxRestarts": 2, "restartWindow": "90s"},
        patience=200.0,
    ),
    "probes-fail-alike": _scenario(
        "probe pods fail on all nodes, so a node is quarantined by the word of the job's own pods",
        _at(CALM, surroundings.ProbesFailAlike(index=1), 90.0),
    ),
    "exporter-is-back": _scenario(
        "the exporter of GPU series is away when a job begins, and what it comes back with is taken for new errors",
        _at(0.0, control_plane.ExporterIsAway(node=3), 150.0),
        old_errors=8,
    ),
    "rack-loses-power": _scenario(
        "three nodes lose power at once: the first one that is back is well, and the others, which boot, are tainted",
        _at(CALM, surroundings.RackLosesPower(nodes=3, apart=50.0), 60.0),
        replicas=3,
        spares=2,
    ),
    # Ranks.
    "hang-after-joining": _scenario(
        "a hang in the first steps after a spare has joined is found half an hour later",
        _at(CALM, machines.PodDeleted(force=True)),
        _at(CALM + 5.0, ranks.RankHangs(index=1)),
        patience=150.0,
    ),
    "frozen": _scenario(
        "a worker whose launcher stands still is never replaced",
        _at(CALM, ranks.Frozen(index=1), 250.0),
        _at(CALM + 0.1, ranks.RankHangs(index=1)),
        patience=60.0,
    ),
    "shares-outlive-a-straggler": _scenario(
        "shares that were made for a slow node stay uneven for ever after it has recovered",
        _at(90.0, ranks.NodeIsSlow(index=1, factor=2.5), 200.0),
        replicas=3,
        remediation={"allow": ["Rebalance"]},
    ),
    # Pods.
    "stray-pod": _scenario(
        "a pod that is made late, for a worker that is not wanted any more, stays for ever",
        _at(CALM, control_plane.WebhookIsSlow(by=20.0), 100.0),
        _at(CALM + 1.0, people.JobScaled(replicas=4)),
        _at(CALM + 15.0, people.JobScaled(replicas=2)),
        spares=0,
    ),
    "slow-creation": _scenario(
        "while the creation of a pod takes its time, nothing else is decided",
        _at(CALM, control_plane.WebhookIsSlow(by=14.0), 100.0),
        _at(CALM + 0.1, people.JobEdited(edit=people.Edit.SPARES)),
        _at(CALM + 2.0, machines.PodDeleted(force=True)),
        patience=12.0,
    ),
    "refused-by-kubelets": _scenario(
        "pods that kubelets refuse fail a job as if its script did not start",
        *[_at(CALM, machines.KubeletRefuses(index=index, free=True), 60.0) for index in range(4)],
        _at(CALM + 5.0, machines.PodDeleted(index=1)),
        spares=0,
        nodes=6,
    ),
    "no-room-for-a-spare": _scenario(
        "a quota without room for a spare keeps the operator busy",
        _at(CALM, control_plane.QuotaIsFull(room=-1), 40.0),
        _at(CALM + 1.0, machines.PodDeleted(force=True, role=Role.SPARE)),
    ),
    "kept-off-for-good": _scenario(
        "a pod that was kept off a suspect when it was made waits for ever for a place, though the suspect is cleared",
        _at(CALM, ranks.GpuFails(index=3)),
        _at(CALM + 5.5, ranks.GpuFails(index=2, xid=48)),
        seed=3780584162,
        nodes=4,
        replicas=3,
        spares=0,
    ),
    # Backups.
    "etcd-is-restored": _scenario(
        "etcd is restored from a backup of before a node was lost: the operator goes by what is no more",
        _at(CALM, control_plane.EtcdIsRestored(), 60.0),
        _at(CALM + 5.0, machines.PodDeleted(force=True, index=1)),
    ),
    "job-of-after-a-backup": _scenario(
        "etcd is restored from a backup of before a job was made: the operator makes it pods again and again",
        _at(CALM, control_plane.EtcdIsRestored(), 60.0),
        jobs=(JobSettings("old", replicas=1, spares=0), JobSettings("new", replicas=1, spares=0, begins=50.0)),
    ),
    # People.
    "created-anew": _scenario(
        "a job that is created anew after a forced removal inherits the end of the one before",
        _at(CALM, people.JobFinishes(steps=2)),
        _at(CALM + 30.0, people.JobDeleted(again=True, by_force=True)),
        seed=3,
    ),
    "more-is-allowed": _scenario(
        "what was only recommended is not done when more is allowed later",
        _at(CALM, people.JobEdited(edit=people.Edit.RECOMMEND), 40.0),
        _at(CALM + 5.0, ranks.RankStopped(index=1)),
        patience=60.0,
    ),
    "deleted-unattended": _scenario(
        "an incident of a job that is deleted while no operator runs stays open for ever",
        _at(CALM, machines.PodDeleted()),
        _at(IncidentOpens(later=0.5), operators.OperatorKilled()),
        _at(AfterFault(1, 0.1), people.JobDeleted()),
    ),
    "incident-written-late": _scenario(
        "an Incident's first write, given up and late, opens it again when it is closed already",
        _at(CALM, control_plane.NextRequest("PATCH", "/incidents/", Fate.LATE)),
        _at(CALM + 0.5, ranks.RankCrashes(index=1)),
        seed=2,
    ),
    "incident-without-bookkeeping": _scenario(
        "an incident that was open when its job's bookkeeping was lost stays open for ever",
        _at(CALM, machines.PodDeleted()),
        _at(IncidentOpens(later=0.5), people.StateOfOldOperator()),
    ),
    "bookkeeping-deleted": _scenario(
        "a bookkeeping that is deleted while nothing is to be written is missed by the next operator: all are replaced",
        _at(CALM, people.StateDeleted()),
        _at(CALM + 80.0, operators.OperatorKilled()),
        patience=4.0,
    ),
    "rounds-from-one": _scenario(
        "rounds are counted from one again when a bookkeeping is deleted and the operator that knew it is replaced",
        _at(CALM, people.StateDeleted()),
        _at(CALM + 0.2, operators.OperatorReplaced()),
        seed=3,
        nodes=4,
    ),
    # Fewer workers.
    "survivors-stand-still": _scenario(
        "a worker is lost, and while its successor's image is pulled the others stand still, which might train",
        *_no_images(3),
        _at(CALM, machines.PodDeleted(force=True, index=1)),
        jobs=(_SHRINKS,),
        nodes=4,
        patience=20.0,
    ),
    "whole-replicas": _scenario(
        "workers go on that cannot make whole replicas, and their script fails",
        *_no_images(4),
        _at(CALM, machines.PodDeleted(force=True, index=1)),
        jobs=(replace(_SHRINKS, replicas=4, replica_ranks=2),),
        nodes=5,
        patience=20.0,
        restarts=0,
    ),
    # Clocks and leadership.
    "clocks-differ": _scenario(
        "restarts are dated by the clocks of workers: two hours behind, none of them counts",
        _at(30.0, machines.ClockIsOff(index=1, hours=-2.0), 300.0),
        *[_at(CALM + 15.0 * i, ranks.RankCrashes(index=1)) for i in range(6)],
        remediation={"maxRestarts": 3},
    ),
    "clock-set-back": _scenario(
        "the operator's clock is set back by three hours, and for so long no figure of a status is written",
        _at(CALM, machines.ClockIsOff(hours=3.0, operators=True), 20.0),
    ),
    "clock-ahead": _scenario(
        "the operator's clock is a day ahead: a job fails by its deadline, which is an hour away",
        _at(CALM, operators.OperatorClockIsOff(hours=26.0), 100.0),
        runPolicy={"activeDeadlineSeconds": 3600},
    ),
    "clock-ahead-of-an-end": _scenario(
        "the operator's clock is a day ahead, and a job that has finished is deleted an hour before its time",
        _at(CALM, people.JobFinishes(steps=5)),
        _at(CALM + 30.0, operators.OperatorClockIsOff(hours=26.0), 100.0),
        runPolicy={"ttlSecondsAfterFinished": 3600},
    ),
    "clock-behind-at-an-end": _scenario(
        "a job finishes while the operator's clock is a day behind: it is deleted when the clock is set",
        _at(CALM, operators.OperatorClockIsOff(hours=-26.0), 60.0),
        _at(CALM + 5.0, people.JobFinishes(steps=5)),
        runPolicy={"ttlSecondsAfterFinished": 3600},
    ),
    "woken-without-the-lease": _scenario(
        "a job's loop that is woken while the Lease is not held turns without a pause",
        _at(CALM, operators.OperatorFrozen(), 60.0),
        _at(CALM + 10.0, machines.PodDeleted(force=True)),
    ),
    "lease-not-found": _scenario(
        "a 404 when the Lease is renewed ends its keeper, and a second operator acts beside the first",
        _at(CALM, control_plane.NextRequest("PUT", "/leases", Fate.REFUSED, 404)),
        _at(CALM + 20.0, operators.OperatorScaled(replicas=2), 200.0),
        _at(CALM + 40.0, machines.PodDeleted(force=True)),
    ),
}
