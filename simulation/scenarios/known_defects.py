"""Defects of the operator that the simulation found, each with the shortest scenario that shows it.

`tests/unit/simulation/scenarios/test_known_defects.py` runs each of them twice: as the operator is, and with the fix
undone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..faults import control_plane, machines, operators, people, ranks, surroundings
from ..faults.fault import Fault
from ..faults.machines import NodePartition
from ..faults.surroundings import Away, Loss
from ..faults.targets import TargetRole
from ..faults.triggers import AfterFault, AtTime, IncidentOpens, RankExits, Trigger, WorkerExits
from ..generator import OPERATOR_SETTINGS
from ..kubernetes.api.api_faults import RequestOutcome
from ..kubernetes.machine import ImagePulls
from ..schedule import Aim, FaultInjection, Schedule
from ..simulated_job import SimulatedJob
from ..world import WorldSettings

WARMED_UP_SECONDS = 40.0
"""Virtual seconds after which a job has trained for a while."""


@dataclass(frozen=True)
class DefectScenario:
    """A scenario. `description`: what went wrong."""

    description: str
    schedule: Schedule
    patience: float = 120.0
    """Seconds for which a job that could train may make no progress."""
    restarts: float = math.inf
    """Maximum number of restarts that may count."""


def _build_scenario(  # noqa: PLR0913  # rows of a table: each names what it varies
    description: str,
    *injections: FaultInjection,
    patience: float = DefectScenario.patience,
    restarts: float = DefectScenario.restarts,
    aim: Aim = Aim.SAFETY,
    jobs: tuple[SimulatedJob, ...] = (),
    seed: int = 1,
    nodes: int = 8,
    slots: int = 1,
    replicas: int = 2,
    spares: int = 1,
    old_errors: int = 0,
    **spec: Any,
) -> DefectScenario:
    spec = {"remediation": {"maxRestarts": 100}, "schedulingTimeout": "60s", **spec}
    world = WorldSettings(nodes=nodes, slots=slots, old_errors=old_errors, operator=OPERATOR_SETTINGS)
    job = SimulatedJob(replicas=replicas, spares=spares, spec=spec)
    return DefectScenario(description, Schedule(seed, aim, world, jobs or (job,), injections), patience, restarts)


def _inject_at(when: float | Trigger, fault: Fault, seconds: float | None = 0.0) -> FaultInjection:
    return FaultInjection(AtTime(when) if isinstance(when, float) else when, fault, seconds)


_SHRINKABLE_JOB = SimulatedJob(replicas=3, spares=0, min_replicas=1, spec={"remediation": {"maxRestarts": 100}})


_PEERS_FIRST = ((NodePartition.API, 90.0), (NodePartition.OPERATOR, 90.0), (NodePartition.PEERS, 60.0))
"""How long a node is cut off from what: its peers come back before the operator."""


def _fail_image_pulls(workers: int) -> tuple[FaultInjection, ...]:
    """Make image pulls hang for 80 s on the nodes of the workers, and on one more."""
    hang = [machines.ImagesUnavailable(index=index, images=ImagePulls.HANG) for index in range(workers)]
    return tuple(
        _inject_at(WARMED_UP_SECONDS - 1.0, fault, 80.0)
        for fault in (*hang, machines.ImagesUnavailable(free=True, images=ImagePulls.HANG))
    )


DEFECT_SCENARIOS: dict[str, DefectScenario] = {
    # Missing information is no evidence.
    "failed-list": _build_scenario(
        "one failed list of pods when the operator restarts ends the workers of a healthy job",
        _inject_at(WARMED_UP_SECONDS + 1.0, operators.OperatorKilled()),
        *[
            _inject_at(
                WARMED_UP_SECONDS + 1.1, control_plane.NextRequest("GET", "/v1/pods", RequestOutcome.REFUSED, 503)
            )
            for _ in range(3)
        ],
    ),
    # Crashes.
    "broken-gpu": _build_scenario(
        "a rank that ends with an error in each round on one worker fails the job, despite a warm spare",
        _inject_at(WARMED_UP_SECONDS, ranks.ScriptFails(index=1), None),
        _inject_at(WARMED_UP_SECONDS + 0.1, ranks.RankCrashes(index=1)),
        replicas=3,
    ),
    "two-signals": _build_scenario(
        "two ranks that are killed before their first step, one after the other, are taken for the script's fault",
        _inject_at(WARMED_UP_SECONDS, ranks.RankCrashes(index=0, code=-9)),
        _inject_at(AfterFault(0, 2.0), ranks.RankCrashes(index=1, code=-9)),
        _inject_at(AfterFault(1, 3.0), ranks.RankCrashes(index=0, code=-9)),
    ),
    "peers-of-a-deleted-worker": _build_scenario(
        "a worker is deleted by force, and its peers, which die of it before it is replaced, cost a restart",
        _inject_at(WARMED_UP_SECONDS, control_plane.WebhookIsSlow(seconds=25.0), 60.0),
        _inject_at(WARMED_UP_SECONDS + 1.0, machines.PodDeleted(force=True, index=1)),
        spares=0,
        restarts=0,
    ),
    "peers-of-a-killed-launcher": _build_scenario(
        "a launcher is killed, which costs a restart, and its peers, which die of it, cost another",
        _inject_at(WARMED_UP_SECONDS, ranks.ProcessKilled(index=1)),
        replicas=3,
        spares=0,
        restarts=1,
    ),
    # Beginnings.
    "hang-before-warm": _build_scenario(
        "a worker that hangs before it is warm keeps its job from starting, despite a warm spare",
        _inject_at(8.0, ranks.ProcessPaused(role=TargetRole.SPARE, index=1), 300.0),
    ),
    "older-job-cannot-begin": _build_scenario(
        "an older job whose template is refused keeps a younger one waiting",
        _inject_at(0.0, control_plane.PodsAreDenied(status=422), 250.0),
        _inject_at(70.0, machines.NodeAdded()),
        _inject_at(200.0, machines.NodeAdded()),
        jobs=(
            SimulatedJob("old", replicas=1, spares=0),
            SimulatedJob("young", replicas=2, spares=0, start_seconds=1.0, spec={"schedulingTimeout": "20s"}),
        ),
        nodes=1,
        patience=150.0,
    ),
    # Ends.
    "finished-and-lost": _build_scenario(
        "one trainer has finished, another worker is lost before: the job never finishes",
        _inject_at(WARMED_UP_SECONDS, people.JobFinishes(steps=3)),
        _inject_at(RankExits(1), machines.PowerFails(index=1), 100.0),
        replicas=4,
    ),
    "finished-unseen": _build_scenario(
        "the job finishes while the operator is away, and a pod that has ended is removed before it is back",
        _inject_at(WARMED_UP_SECONDS, people.JobFinishes(steps=2)),
        _inject_at(WARMED_UP_SECONDS + 1.0, operators.OperatorScaled(replicas=0), 100.0),
        _inject_at(WARMED_UP_SECONDS + 8.0, machines.NodeVanishes(free=True, index=4), 200.0),
        spares=0,
    ),
    "finished-and-removed": _build_scenario(
        "a pod is removed between its trainer's end and its kubelet's report: its ranks never finish",
        _inject_at(WARMED_UP_SECONDS, people.JobFinishes(steps=2)),
        _inject_at(WorkerExits(1), machines.PodDeleted(force=True)),
    ),
    # Machines.
    "all-lose-power": _build_scenario(
        "all nodes of a job lose power at once: the job stays Running for minutes, despite warm spares",
        _inject_at(WARMED_UP_SECONDS, machines.PowerFails(index=0), 200.0),
        _inject_at(WARMED_UP_SECONDS, machines.PowerFails(index=1), 200.0),
        patience=30.0,
        spares=2,
    ),
    "operator-cut-from-node": _build_scenario(
        "operator and node are cut from each other: a worker that trains is killed, and its node quarantined",
        _inject_at(WARMED_UP_SECONDS, machines.NodeIsCutOff(index=1, partition=machines.NodePartition.OPERATOR), 60.0),
        replicas=3,
    ),
    "operator-cut-from-all": _build_scenario(
        "the operator reaches no node: the worker of a job that has but one is killed while it trains",
        _inject_at(WARMED_UP_SECONDS, operators.OperatorIsCutOff(partition=operators.OperatorPartition.NODES), 60.0),
        replicas=1,
        spares=0,
    ),
    "silent-spare": _build_scenario(
        "a spare without contact is given the ranks of a lost worker",
        _inject_at(
            WARMED_UP_SECONDS,
            machines.NodeIsCutOff(role=TargetRole.SPARE, partition=machines.NodePartition.OPERATOR),
            150.0,
        ),
        _inject_at(WARMED_UP_SECONDS + 20.0, machines.PodDeleted(force=True)),
        patience=40.0,
    ),
    "dead-spare-and-resume": _build_scenario(
        "a spare whose node is dead keeps a job from being resumed",
        _inject_at(WARMED_UP_SECONDS, machines.PowerFails(role=TargetRole.SPARE), 280.0),
        _inject_at(WARMED_UP_SECONDS + 20.0, people.JobSuspended(), 40.0),
        patience=60.0,
    ),
    "suspended-and-lost": _build_scenario(
        "a node that dies while its job is being suspended keeps it from being resumed",
        _inject_at(WARMED_UP_SECONDS, people.JobSuspended(), 60.0),
        _inject_at(WARMED_UP_SECONDS + 0.2, machines.PowerFails(), 280.0),
        spares=0,
        patience=120.0,
    ),
    # What all share.
    "outage-at-start": _build_scenario(
        "a node is lost while names cannot be resolved: rounds end by the same error, and the job fails for good",
        _inject_at(WARMED_UP_SECONDS, surroundings.OutageAtStart(index=1), 60.0),
    ),
    "outage-at-import": _build_scenario(
        "a worker's successors end while storage is away, before they are ready: the job fails after two of them",
        _inject_at(
            WARMED_UP_SECONDS,
            surroundings.OutageAtStart(index=1, away=Away.STORAGE, at_import=True, loss=Loss.WORKER),
            60.0,
        ),
        spares=0,
    ),
    "outage-spends-restarts": _build_scenario(
        "storage is away after a crash: rounds that end before their first step spend the restarts, and the job fails",
        _inject_at(WARMED_UP_SECONDS, surroundings.OutageAtStart(away=Away.STORAGE, loss=Loss.RANK), 60.0),
        remediation={"maxRestarts": 2, "restartWindow": "90s"},
        patience=200.0,
    ),
    "probes-fail-alike": _build_scenario(
        "probe pods fail on all nodes, so a node is quarantined by the evidence of the job's own pods",
        _inject_at(WARMED_UP_SECONDS, surroundings.ProbesFailAlike(index=1), 90.0),
    ),
    "exporter-is-back": _build_scenario(
        "the exporter of GPU series is away when a job begins, and its first samples after that count as new errors",
        _inject_at(0.0, control_plane.ExporterIsAway(node=3), 150.0),
        old_errors=8,
    ),
    "rack-loses-power": _build_scenario(
        "three nodes lose power at once: the first one that is back is well, and the others, which boot, are tainted",
        _inject_at(WARMED_UP_SECONDS, surroundings.RackLosesPower(nodes=3, apart=50.0), 60.0),
        replicas=3,
        spares=2,
    ),
    # Ranks.
    "hang-after-joining": _build_scenario(
        "a hang in the first steps after a spare has joined is found half an hour later",
        _inject_at(WARMED_UP_SECONDS, machines.PodDeleted(force=True)),
        _inject_at(WARMED_UP_SECONDS + 5.0, ranks.RankHangs(index=1)),
        patience=150.0,
    ),
    "unresponsive": _build_scenario(
        "a worker whose launcher is unresponsive is never replaced",
        _inject_at(WARMED_UP_SECONDS, ranks.ProcessPaused(index=1), 250.0),
        _inject_at(WARMED_UP_SECONDS + 0.1, ranks.RankHangs(index=1)),
        patience=60.0,
    ),
    "replaced-together": _build_scenario(
        "workers that were cut off and replaced together begin a round with a number that others train under",
        *(
            _inject_at(WARMED_UP_SECONDS, machines.NodeIsCutOff(index=index, partition=partition), seconds)
            for index in range(2)
            for partition, seconds in _PEERS_FIRST
        ),
        spares=2,
    ),
    "shares-outlive-a-straggler": _build_scenario(
        "shares that were made for a slow node stay uneven permanently after it has recovered",
        _inject_at(90.0, ranks.NodeIsSlow(index=1, factor=2.5), 200.0),
        replicas=3,
        remediation={"allow": ["Rebalance"]},
    ),
    # Pods.
    "stray-pod": _build_scenario(
        "a pod that is made late, for a worker that is not wanted any more, stays permanently",
        _inject_at(WARMED_UP_SECONDS, control_plane.WebhookIsSlow(seconds=20.0), 100.0),
        _inject_at(WARMED_UP_SECONDS + 1.0, people.JobScaled(replicas=4)),
        _inject_at(WARMED_UP_SECONDS + 15.0, people.JobScaled(replicas=2)),
        spares=0,
    ),
    "slow-creation": _build_scenario(
        "while the creation of a pod takes its time, nothing else is decided",
        _inject_at(WARMED_UP_SECONDS, control_plane.WebhookIsSlow(seconds=14.0), 100.0),
        _inject_at(WARMED_UP_SECONDS + 0.1, people.JobEdited(edit=people.JobEdit.SPARES)),
        _inject_at(WARMED_UP_SECONDS + 2.0, machines.PodDeleted(force=True)),
        patience=12.0,
    ),
    "refused-by-kubelets": _build_scenario(
        "pods that kubelets refuse fail a job as if its script did not start",
        *[_inject_at(WARMED_UP_SECONDS, machines.KubeletRefuses(index=index, free=True), 60.0) for index in range(4)],
        _inject_at(WARMED_UP_SECONDS + 5.0, machines.PodDeleted(index=1)),
        spares=0,
        nodes=6,
    ),
    "no-room-for-a-spare": _build_scenario(
        "a quota without room for a spare keeps the operator busy",
        _inject_at(WARMED_UP_SECONDS, control_plane.QuotaIsFull(free_pods=-1), 40.0),
        _inject_at(WARMED_UP_SECONDS + 1.0, machines.PodDeleted(force=True, role=TargetRole.SPARE)),
    ),
    "kept-off-for-good": _build_scenario(
        "a pod that was kept off a suspect when it was made stays pending permanently, though the suspect is cleared",
        _inject_at(WARMED_UP_SECONDS, ranks.GpuFails(index=3)),
        _inject_at(WARMED_UP_SECONDS + 5.5, ranks.GpuFails(index=2, xid=48)),
        seed=3780584162,
        nodes=4,
        replicas=3,
        spares=0,
    ),
    # Backups.
    "etcd-is-restored": _build_scenario(
        "etcd is restored from a backup from before a node was lost: the operator acts on outdated objects",
        _inject_at(WARMED_UP_SECONDS, control_plane.EtcdIsRestored(), 60.0),
        _inject_at(WARMED_UP_SECONDS + 5.0, machines.PodDeleted(force=True, index=1)),
        _inject_at(WARMED_UP_SECONDS + 30.0, machines.PodDeleted(force=True, index=0)),
    ),
    "job-of-after-a-backup": _build_scenario(
        "etcd is restored from a backup from before a job was created: the operator creates its pods again and again",
        _inject_at(WARMED_UP_SECONDS, control_plane.EtcdIsRestored(), 60.0),
        jobs=(SimulatedJob("old", replicas=1, spares=0), SimulatedJob("new", replicas=1, spares=0, start_seconds=50.0)),
    ),
    # People.
    "created-anew": _build_scenario(
        "a job that is recreated after a forced removal inherits the end of the previous one",
        _inject_at(WARMED_UP_SECONDS, people.JobFinishes(steps=2)),
        _inject_at(WARMED_UP_SECONDS + 30.0, people.JobDeleted(recreate=True, force=True)),
        seed=3,
    ),
    "more-is-allowed": _build_scenario(
        "what was only recommended is not done when more is allowed later",
        _inject_at(WARMED_UP_SECONDS, people.JobEdited(edit=people.JobEdit.RECOMMEND), 40.0),
        _inject_at(WARMED_UP_SECONDS + 5.0, ranks.RankStopped(index=1)),
        patience=60.0,
    ),
    "deleted-unattended": _build_scenario(
        "an incident of a job that is deleted while no operator runs stays open permanently",
        _inject_at(WARMED_UP_SECONDS, machines.PodDeleted()),
        _inject_at(IncidentOpens(delay=0.5), operators.OperatorKilled()),
        _inject_at(AfterFault(1, 0.1), people.JobDeleted()),
    ),
    "incident-written-late": _build_scenario(
        "an Incident's first write, given up and late, reopens it when it is closed already",
        _inject_at(WARMED_UP_SECONDS, control_plane.NextRequest("PATCH", "/incidents/", RequestOutcome.LATE)),
        _inject_at(WARMED_UP_SECONDS + 0.5, ranks.RankCrashes(index=1)),
        seed=2,
    ),
    "incident-without-bookkeeping": _build_scenario(
        "an incident that was open when its job's bookkeeping was lost stays open permanently",
        _inject_at(WARMED_UP_SECONDS, machines.PodDeleted()),
        _inject_at(IncidentOpens(delay=0.5), people.StateDeleted(unattended=True)),
    ),
    "bookkeeping-deleted": _build_scenario(
        "a bookkeeping that is deleted while nothing is to be written is missed by the next operator: all are replaced",
        _inject_at(WARMED_UP_SECONDS, people.StateDeleted()),
        _inject_at(WARMED_UP_SECONDS + 80.0, operators.OperatorKilled()),
        patience=4.0,
    ),
    "rounds-from-one": _build_scenario(
        "rounds are counted from one again when a bookkeeping is deleted and the operator that knew it is replaced",
        _inject_at(WARMED_UP_SECONDS, people.StateDeleted()),
        _inject_at(WARMED_UP_SECONDS + 0.2, operators.OperatorReplaced()),
        seed=3,
        nodes=4,
    ),
    # Fewer workers.
    "survivors-stand-still": _build_scenario(
        "a worker is lost, and while its successor's image is pulled the others do not train, although they could",
        *_fail_image_pulls(3),
        _inject_at(WARMED_UP_SECONDS, machines.PodDeleted(force=True, index=1)),
        jobs=(_SHRINKABLE_JOB,),
        nodes=4,
        patience=20.0,
    ),
    "whole-replicas": _build_scenario(
        "workers go on that cannot make whole replicas, and their script fails",
        *_fail_image_pulls(4),
        _inject_at(WARMED_UP_SECONDS, machines.PodDeleted(force=True, index=1)),
        jobs=(replace(_SHRINKABLE_JOB, replicas=4, replica_ranks=2),),
        nodes=5,
        patience=20.0,
        restarts=0,
    ),
    # Clocks and leadership.
    "clocks-differ": _build_scenario(
        "restarts are dated by the clocks of workers: two hours behind, none of them counts",
        _inject_at(30.0, machines.ClockIsOff(index=1, hours=-2.0), 300.0),
        *[_inject_at(WARMED_UP_SECONDS + 15.0 * i, ranks.RankCrashes(index=1)) for i in range(6)],
        remediation={"maxRestarts": 3},
    ),
    "clock-set-back": _build_scenario(
        "the operator's clock is set back by three hours, and for this time no metric of a status is written",
        _inject_at(WARMED_UP_SECONDS, machines.ClockIsOff(hours=3.0, operators=True), 20.0),
    ),
    "clock-ahead": _build_scenario(
        "the operator's clock is a day ahead: a job fails by its deadline, which is an hour away",
        _inject_at(WARMED_UP_SECONDS, operators.OperatorClockIsOff(hours=26.0), 100.0),
        runPolicy={"activeDeadlineSeconds": 3600},
    ),
    "clock-ahead-of-an-end": _build_scenario(
        "the operator's clock is a day ahead, and a job that has finished is deleted an hour before its time",
        _inject_at(WARMED_UP_SECONDS, people.JobFinishes(steps=5)),
        _inject_at(WARMED_UP_SECONDS + 30.0, operators.OperatorClockIsOff(hours=26.0), 100.0),
        runPolicy={"ttlSecondsAfterFinished": 3600},
    ),
    "clock-behind-at-an-end": _build_scenario(
        "a job finishes while the operator's clock is a day behind: it is deleted when the clock is set",
        _inject_at(WARMED_UP_SECONDS, operators.OperatorClockIsOff(hours=-26.0), 60.0),
        _inject_at(WARMED_UP_SECONDS + 5.0, people.JobFinishes(steps=5)),
        runPolicy={"ttlSecondsAfterFinished": 3600},
    ),
    "woken-without-the-lease": _build_scenario(
        "a job's loop that is woken while the Lease is not held runs without a pause",
        _inject_at(WARMED_UP_SECONDS, operators.OperatorPaused(), 60.0),
        _inject_at(WARMED_UP_SECONDS + 10.0, machines.PodDeleted(force=True)),
    ),
    "lease-not-found": _build_scenario(
        "a 404 when the Lease is renewed ends its renewal, and a second operator acts in addition to the first",
        _inject_at(WARMED_UP_SECONDS, control_plane.NextRequest("PUT", "/leases", RequestOutcome.REFUSED, 404)),
        _inject_at(WARMED_UP_SECONDS + 20.0, operators.OperatorScaled(replicas=2), 200.0),
        _inject_at(WARMED_UP_SECONDS + 40.0, machines.PodDeleted(force=True)),
    ),
}
