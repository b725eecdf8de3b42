"""Generates a schedule from a seed.

Swarm testing: each seed draws from a random part of the vocabulary only, because frequent combinations hide rare
faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import JobPhase, RemediationMode

from .faults import control_plane as control
from .faults import machines, operators, people, ranks, surroundings
from .faults.fault import Fault
from .faults.targets import OperatorTarget, TargetRole
from .faults.triggers import (
    AfterFault,
    AfterWrite,
    AtTime,
    BeforeWrite,
    IncidentOpens,
    PhaseBegins,
    RoundGathers,
    Trigger,
    WorkerExits,
)
from .faults.value_codec import derive_kind
from .kubernetes.api.api_faults import RequestOutcome
from .kubernetes.machine import ImagePulls
from .schedule import HEALED_BY_SECONDS, Aim, FaultInjection, Schedule
from .simulated_job import SimulatedJob
from .world import WorldSettings

Random = random.Random
FaultFactory = Callable[[Random], Fault]
LIVENESS_SHARE = 0.2
"""Share of seeds that test liveness."""
ONE_VICTIM_SHARE = 0.3
"""Share of seeds whose faults all affect the same worker or node, as with a broken machine."""
FIRST_INJECTION_SECONDS = (5.0, 60.0)
LAST_INJECTION_SECONDS = HEALED_BY_SECONDS - 60.0
MAX_GENERATED_FAULTS = 8
MAX_GENERATED_WORKERS = 4
OPERATOR_SETTINGS: dict[str, Any] = {
    "quarantine_mode": RemediationMode.ACT,
    "quarantine_expires_after": 60.0,
    "quarantine_max_nodes": 2,
    "dcgm_namespace": "gpu-operator",
}
"""Settings of the operator with which quarantines end within a run."""


def generate_schedule(seed: int) -> Schedule:
    """Generate a schedule. The same seed gives the same schedule."""
    random = Random(f"schedule {seed}")
    jobs = _draw_jobs(random)
    workers = sum(job.replicas + job.spares for job in jobs)
    recommends_only = random.random() < 0.2
    world = WorldSettings(
        nodes=workers + random.randint(1, 6),
        slots=random.choice([1, 2]),
        operators=random.choice([1, 2, 2]),
        old_errors=random.choice([0, 0, 1, 3]),
        operator=OPERATOR_SETTINGS | ({"quarantine_mode": RemediationMode.RECOMMEND} if recommends_only else {}),
    )
    schedule = Schedule(seed, Aim.SAFETY, world, jobs, _draw_injections(random, len(jobs)))
    if random.random() < LIVENESS_SHARE:
        return _add_permanent_fault(random, schedule)
    return schedule


def _draw_jobs(random: Random) -> tuple[SimulatedJob, ...]:
    replicas = random.choice([1, 2, 2, 3, 3, 4])
    spares = random.choice([0, 1, 1, 2]) if replicas < MAX_GENERATED_WORKERS else 0
    first = SimulatedJob(
        "a",
        replicas=replicas,
        spares=min(spares, MAX_GENERATED_WORKERS - replicas),
        min_replicas=random.choice([None, None, 1]),
        ranks=random.choice([1, 1, 1, 2]),
        spec=_draw_spec(random),
    )
    if random.random() > 0.15:
        return (first,)
    second = replace(
        first, name="b", replicas=random.choice([1, 2]), min_replicas=None, start_seconds=random.uniform(0, 60)
    )
    return (first, second)


def _draw_spec(random: Random) -> dict[str, Any]:
    """Draw fields of a spec. Most values let a job survive everything."""
    spec: dict[str, Any] = {
        "remediation": random.choice([{"maxRestarts": 100}] * 9 + [{"maxRestarts": 2, "restartWindow": "2m"}]),
        "schedulingTimeout": random.choice(["30s", "60s", "5m"]),
    }
    if random.random() < 0.15:
        spec["syncMode"] = random.choice(["Sync", "EDiT", "AsyncEDiT"])
    if random.random() < 0.2:
        spec["runPolicy"] = random.choice([{"ttlSecondsAfterFinished": 60}, {"activeDeadlineSeconds": 240}])
    return spec


def _draw_injections(random: Random, jobs: int) -> tuple[FaultInjection, ...]:
    swarm = random.sample(list(FAULT_MENU), random.randint(2, 8))
    weights = [FAULT_MENU[cls][0] for cls in swarm]
    at, injections = random.uniform(*FIRST_INJECTION_SECONDS), list[FaultInjection]()
    victim = {"role": TargetRole.MEMBER, "index": random.randrange(4)} if random.random() < ONE_VICTIM_SHARE else {}
    for index in range(random.randint(1, MAX_GENERATED_FAULTS)):
        if at > LAST_INJECTION_SECONDS:
            break
        cls = random.choices(swarm, weights)[0]
        fault = FAULT_MENU[cls][1](random)
        if jobs > 1 and hasattr(fault, "job"):
            fault = replace(fault, job=random.randrange(jobs))  # type: ignore[call-arg]  # it has one
        if hasattr(fault, "role"):
            fault = replace(fault, **victim)
        seconds = round(fault.at_least + _draw_seconds(random), 1) if fault.can_heal() else 0.0
        injections.append(FaultInjection(_draw_trigger(random, at, index), fault, seconds))
        at = round(at + random.choice([random.uniform(0, 1), random.uniform(0, 10), random.uniform(5, 60)]), 2)
    return tuple(injections)


def _draw_trigger(random: Random, at: float, index: int) -> Trigger:
    """Draw a trigger, usually a time."""
    delay = random.choice([0.0, 0.0, round(random.uniform(0.0, 2.0), 3)])
    number = random.choice([1, 1, 2, 3])
    unusual: list[Callable[[], Trigger]] = [
        lambda: AfterWrite(random.randint(1, 60), delay),
        lambda: BeforeWrite(random.randint(1, 60), delay),
        lambda: WorkerExits(number, delay),
        lambda: PhaseBegins(number, delay, phase=random.choice([JobPhase.STARTING, JobPhase.RECOVERING])),
        lambda: IncidentOpens(number, delay, cause=random.choice(["", IncidentCause.CRASH, IncidentCause.NODE_LOST])),
        lambda: RoundGathers(number + 1, delay),
    ]
    if index and random.random() < 0.2:
        return AfterFault(random.randrange(index), round(random.uniform(0.0, 5.0), 2))
    if random.random() < 0.25:
        return random.choice(unusual)()
    return AtTime(round(at, 2))


def _draw_seconds(random: Random) -> float:
    spans = [(0.5, 5.0), (5.0, 25.0), (25.0, 90.0)]
    return round(random.uniform(*random.choice(spans)), 1)


def _draw_role(random: Random) -> dict[str, Any]:
    """Draw a target, usually a member."""
    return {"role": random.choice([TargetRole.MEMBER] * 4 + [TargetRole.SPARE]), "index": random.randrange(4)}


def _draw_operator_target(random: Random) -> dict[str, Any]:
    return {"which": random.choice([OperatorTarget.LEADER] * 4 + [OperatorTarget.STANDBY])}


FAULT_MENU: dict[type[Fault], tuple[int, FaultFactory]] = {
    # Frequency relative to the other faults of a swarm, and parameters.
    ranks.RankCrashes: (6, lambda r: ranks.RankCrashes(**_draw_role(r), code=r.choice([1, -9, -11]))),
    ranks.RankRunsOutOfMemory: (2, lambda r: ranks.RankRunsOutOfMemory(**_draw_role(r))),
    ranks.RankHangs: (4, lambda r: ranks.RankHangs(**_draw_role(r), where=r.choice(list(ranks.HangPoint)))),
    ranks.RankStopped: (1, lambda r: ranks.RankStopped(**_draw_role(r))),
    ranks.RankCannotBeKilled: (1, lambda r: ranks.RankCannotBeKilled(**_draw_role(r))),
    ranks.LossIsBad: (1, lambda r: ranks.LossIsBad(**_draw_role(r))),
    ranks.GpuFails: (2, lambda r: ranks.GpuFails(**_draw_role(r), xid=r.choice([13, 31, 48, 79, 94, 95]))),
    ranks.GpuWarns: (2, lambda r: ranks.GpuWarns(**_draw_role(r))),
    ranks.ScriptFails: (1, lambda r: ranks.ScriptFails(**_draw_role(r), mistake=r.random() < 0.3)),
    ranks.PlanIsRefused: (1, lambda r: ranks.PlanIsRefused(**_draw_role(r))),
    ranks.CheckpointsFail: (1, lambda _: ranks.CheckpointsFail()),
    ranks.CheckpointIsTorn: (1, lambda _: ranks.CheckpointIsTorn()),
    ranks.VolumeIsSlow: (1, lambda r: ranks.VolumeIsSlow(seconds=r.choice([5.0, 20.0, 60.0]))),
    ranks.ProcessPaused: (3, lambda r: ranks.ProcessPaused(**_draw_role(r), part=r.choice(list(ranks.WorkerProcess)))),
    ranks.ProcessKilled: (
        2,
        lambda r: ranks.ProcessKilled(
            **_draw_role(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.SIDECAR])
        ),
    ),
    ranks.MetricsAreWrong: (
        1,
        lambda r: ranks.MetricsAreWrong(**_draw_role(r), metrics=r.choice(list(ranks.WrongMetrics))),
    ),
    ranks.NodeIsSlow: (3, lambda r: ranks.NodeIsSlow(**_draw_role(r), factor=r.choice([1.3, 1.8, 2.5, 4.0]))),
    ranks.LinkFails: (
        2,
        lambda r: ranks.LinkFails(**_draw_role(r), other=r.randrange(4), factor=r.choice([0.0, 3.0, 10.0])),
    ),
    machines.PowerFails: (4, lambda r: machines.PowerFails(**_draw_role(r))),
    machines.KubeletStops: (2, lambda r: machines.KubeletStops(**_draw_role(r))),
    machines.RuntimeHangs: (1, lambda r: machines.RuntimeHangs(**_draw_role(r))),
    machines.NodeShutsDown: (1, lambda r: machines.NodeShutsDown(**_draw_role(r), grace=r.choice([2.0, 20.0]))),
    machines.NodeIsCutOff: (
        4,
        lambda r: machines.NodeIsCutOff(**_draw_role(r), partition=r.choice(list(machines.NodePartition))),
    ),
    machines.NodeVanishes: (2, lambda r: machines.NodeVanishes(**_draw_role(r))),
    machines.NodeDeleted: (1, lambda r: machines.NodeDeleted(**_draw_role(r))),
    machines.NodeAdded: (1, lambda _: machines.NodeAdded()),
    machines.NodeCordoned: (1, lambda r: machines.NodeCordoned(**_draw_role(r), free=r.random() < 0.5)),
    machines.NodeDrained: (2, lambda r: machines.NodeDrained(**_draw_role(r))),
    machines.NodeTainted: (
        1,
        lambda r: machines.NodeTainted(**_draw_role(r), effect=r.choice(["NoSchedule", "NoExecute"])),
    ),
    machines.NodeOptedOut: (1, lambda r: machines.NodeOptedOut(**_draw_role(r))),
    machines.NodeIsSick: (
        3,
        lambda r: machines.NodeIsSick(**_draw_role(r), fails=r.random() < 0.7, xid=r.choice([0, 79, 95])),
    ),
    machines.ClockIsOff: (
        1,
        lambda r: machines.ClockIsOff(
            **_draw_role(r), hours=r.choice([-30.0, -1.0, 0.1, 3.0]), operators=r.random() < 0.3
        ),
    ),
    machines.ImagesUnavailable: (
        1,
        lambda r: machines.ImagesUnavailable(
            index=r.randrange(6), free=True, images=r.choice([ImagePulls.FAIL, ImagePulls.HANG])
        ),
    ),
    machines.KubeletRefuses: (1, lambda r: machines.KubeletRefuses(index=r.randrange(6), free=True)),
    machines.PodDeleted: (4, lambda r: machines.PodDeleted(**_draw_role(r), force=r.random() < 0.3)),
    machines.PodEvicted: (2, lambda r: machines.PodEvicted(**_draw_role(r))),
    machines.PodPreempted: (1, lambda r: machines.PodPreempted(**_draw_role(r))),
    machines.PodKilledForMemory: (1, lambda r: machines.PodKilledForMemory(**_draw_role(r))),
    control.ApiIsDown: (3, lambda r: control.ApiIsDown(silent=r.random() < 0.4)),
    control.ApiFails: (2, lambda r: control.ApiFails(rate=r.choice([0.1, 0.3, 0.6]))),
    control.AnswersAreLost: (3, lambda r: control.AnswersAreLost(rate=r.choice([0.1, 0.3]))),
    control.WritesAreLate: (2, lambda r: control.WritesAreLate(rate=r.choice([0.05, 0.2]))),
    control.ApiIsSlow: (1, lambda r: control.ApiIsSlow(max_seconds=r.choice([1.0, 4.0, 14.0]))),
    control.WatchesLag: (2, lambda r: control.WatchesLag(max_seconds=r.choice([2.0, 10.0, 40.0]))),
    control.HistoryIsShort: (1, lambda _: control.HistoryIsShort()),
    control.WatchesEnd: (2, lambda r: control.WatchesEnd(history_lost=r.random() < 0.5)),
    control.NextRequest: (
        2,
        lambda r: control.NextRequest(
            method=r.choice(["", "GET", "PUT", "POST", "PATCH", "DELETE"]),
            part=r.choice(["/pods", "/trainingjobstates", "/leases", "/incidents", "/nodes", "/nodequarantines"]),
            outcome=r.choice(list(RequestOutcome)),
            status=r.choice([401, 403, 409, 429, 500, 503]),
        ),
    ),
    control.WriteConflicts: (
        1,
        lambda r: control.WriteConflicts(plural=r.choice(["trainingjobstates", "leases"]), number=r.choice([1, 5, 20])),
    ),
    control.EtcdIsRestored: (1, lambda _: control.EtcdIsRestored()),
    control.WebhookIsSlow: (1, lambda r: control.WebhookIsSlow(seconds=r.choice([3.0, 20.0]))),
    control.PodsAreDenied: (1, lambda r: control.PodsAreDenied(status=r.choice([403, 500]))),
    control.QuotaIsFull: (2, lambda r: control.QuotaIsFull(free_pods=r.choice([0, 0, 1]))),
    control.PrometheusFails: (2, lambda r: control.PrometheusFails(how=r.choice(list(control.PrometheusFailure)))),
    control.ExporterIsAway: (
        2,
        lambda r: control.ExporterIsAway(node=r.randrange(3), everywhere=r.random() < 0.5),
    ),
    control.PrometheusIsWrong: (2, lambda r: control.PrometheusIsWrong(series=r.choice(list(control.WrongSeries)))),
    operators.OperatorKilled: (6, lambda r: operators.OperatorKilled(**_draw_operator_target(r))),
    operators.OperatorPaused: (3, lambda r: operators.OperatorPaused(**_draw_operator_target(r))),
    operators.OperatorRemoved: (
        2,
        lambda r: operators.OperatorRemoved(**_draw_operator_target(r), runs_on=r.random() < 0.4),
    ),
    operators.OperatorReplaced: (3, lambda r: operators.OperatorReplaced(**_draw_operator_target(r))),
    operators.OperatorIsCutOff: (
        3,
        lambda r: operators.OperatorIsCutOff(
            **_draw_operator_target(r), partition=r.choice(list(operators.OperatorPartition))
        ),
    ),
    operators.OperatorClockIsOff: (
        2,
        lambda r: operators.OperatorClockIsOff(
            **_draw_operator_target(r), hours=r.choice([-300.0, -26.0, -1.0, -0.05, 0.05, 1.0, 26.0, 960.0])
        ),
    ),
    operators.OperatorScaled: (1, lambda r: operators.OperatorScaled(replicas=r.choice([2, 3]))),
    operators.LeaseDeleted: (1, lambda _: operators.LeaseDeleted()),
    operators.LeaseEdited: (1, lambda r: operators.LeaseEdited(seconds=r.choice([1, 15, 3600]))),
    people.JobScaled: (3, lambda r: people.JobScaled(replicas=r.randint(1, 4))),
    people.JobSuspended: (3, lambda r: people.JobSuspended(edits=r.random() < 0.3)),
    people.JobEdited: (2, lambda r: people.JobEdited(edit=r.choice(list(people.JobEdit)))),
    people.InvalidEdit: (1, lambda r: people.InvalidEdit(number=r.randrange(len(people.INVALID_SPECS)))),
    people.JobDeleted: (2, lambda r: people.JobDeleted(recreate=r.random() < 0.7, force=r.random() < 0.4)),
    people.JobFinishes: (2, lambda r: people.JobFinishes(steps=r.choice([1, 5, 40]))),
    people.IncidentsDeleted: (1, lambda _: people.IncidentsDeleted()),
    people.StateDeleted: (2, lambda r: people.StateDeleted(unattended=r.random() < 0.5)),
    people.StateEdited: (1, lambda r: people.StateEdited(edit=r.choice(list(people.StateEdit)))),
    people.QuarantineMade: (1, lambda r: people.QuarantineMade(**_draw_role(r))),
    people.QuarantineApproved: (1, lambda r: people.QuarantineApproved(index=r.randrange(2))),
    people.QuarantineDeleted: (1, lambda r: people.QuarantineDeleted(index=r.randrange(2))),
    people.RemediesPaused: (1, lambda _: people.RemediesPaused()),
    surroundings.OutageAtStart: (
        4,
        lambda r: surroundings.OutageAtStart(
            **_draw_role(r),
            away=r.choice(list(surroundings.Away)),
            at_import=r.random() < 0.3,
            loss=r.choice(list(surroundings.Loss)),
        ),
    ),
    surroundings.ProbesFailAlike: (
        2,
        lambda r: surroundings.ProbesFailAlike(
            **_draw_role(r), check=r.choice(list(surroundings.Check)), xid=r.choice([0, 48, 79])
        ),
    ),
    surroundings.RackLosesPower: (
        2,
        lambda r: surroundings.RackLosesPower(nodes=r.choice([2, 3, 3, 5]), apart=r.choice([0.0, 15.0, 40.0])),
    ),
}

SURVIVABLE_FAULTS: tuple[FaultFactory, ...] = (
    # Faults that may be permanent if a node and a spare are left, and the operator has a second replica.
    lambda r: machines.PowerFails(**_draw_role(r)),
    lambda r: machines.NodeVanishes(**_draw_role(r)),
    lambda r: machines.NodeIsCutOff(
        **_draw_role(r), partition=r.choice([machines.NodePartition.ALL, machines.NodePartition.API])
    ),
    lambda r: machines.KubeletStops(**_draw_role(r)),
    lambda r: machines.NodeTainted(**_draw_role(r)),
    lambda r: machines.NodeIsSick(**_draw_role(r), fails=True),
    lambda r: machines.ImagesUnavailable(index=r.randrange(6), free=True),
    lambda r: ranks.ProcessPaused(
        **_draw_role(r), part=r.choice([ranks.WorkerProcess.LAUNCHER, ranks.WorkerProcess.POD])
    ),
    lambda r: ranks.NodeIsSlow(**_draw_role(r), factor=r.choice([1.5, 3.0])),
    lambda _: ranks.LinkFails(other=1, factor=5.0),
    lambda _: ranks.CheckpointsFail(),
    lambda r: ranks.MetricsAreWrong(metrics=r.choice(list(ranks.WrongMetrics))),
    lambda r: control.PrometheusFails(how=r.choice(list(control.PrometheusFailure))),
    lambda r: control.PrometheusIsWrong(series=r.choice(list(control.WrongSeries))),
    lambda r: control.ExporterIsAway(node=r.randrange(3), everywhere=r.random() < 0.5),
    lambda r: surroundings.ProbesFailAlike(**_draw_role(r)),
    lambda _: control.ApiFails(rate=0.1),
    lambda _: control.AnswersAreLost(rate=0.05),
    lambda _: control.WatchesLag(max_seconds=5.0),
    lambda _: control.HistoryIsShort(),
    lambda _: operators.OperatorPaused(),
    lambda _: operators.OperatorIsCutOff(partition=operators.OperatorPartition.API),
    lambda _: operators.OperatorIsCutOff(partition=operators.OperatorPartition.PROMETHEUS),
)


def _add_permanent_fault(random: Random, schedule: Schedule) -> Schedule:
    """Add one permanent fault, with enough spare capacity, and keep some of the temporary ones."""
    job = schedule.jobs[0]
    job = replace(job, replicas=min(job.replicas, MAX_GENERATED_WORKERS - 1), spares=1, min_replicas=None)
    fault = random.choice(SURVIVABLE_FAULTS)(random)
    permanent = FaultInjection(AtTime(round(random.uniform(20.0, 120.0), 2)), fault, None)
    retained = [injection for injection in schedule.injections if not isinstance(injection.trigger, AfterFault)][
        : random.randint(0, 3)
    ]
    world = replace(schedule.world, nodes=job.replicas + job.spares + 3, operators=2)
    injections = tuple(
        injection for injection in retained if derive_kind(type(injection.fault)) not in LIVENESS_EXCLUDED_KINDS
    )
    return replace(schedule, aim=Aim.LIVENESS, world=world, jobs=(job,), injections=(permanent, *injections))


LIVENESS_EXCLUDED_KINDS = frozenset({"quota-is-full", "job-deleted", "job-finishes", "pods-are-denied"})
"""Next to a permanent fault, these leave nothing to check, or too little capacity."""
