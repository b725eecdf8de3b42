"""Crash tests: the operator is killed before and after every write of some base scenarios, one write per run.

Its actions take several writes. It must be able to continue from between any two of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .faults import machines, operators, people, ranks
from .faults.fault import Fault
from .faults.targets import TargetRole
from .faults.triggers import AfterWrite, AtTime, BeforeWrite
from .generator import OPERATOR_SETTINGS
from .kubernetes.machine import ImagePulls
from .schedule import FaultInjection, Schedule
from .simulated_job import SimulatedJob
from .world import WorldSettings

CRASH_TEST_TRIGGER = AtTime(40.0)


def build_crash_tests(base: Schedule, writes: int) -> list[Schedule]:
    """Build the crash tests of a scenario. `writes`: the number of writes that the operator sends in it."""
    triggers = [trigger for number in range(1, writes + 1) for trigger in (BeforeWrite(number), AfterWrite(number))]
    return [
        replace(base, injections=(*base.injections, FaultInjection(trigger, operators.OperatorKilled())))
        for trigger in triggers
    ]


def _build_schedule(*injections: FaultInjection, replicas: int = 2, spares: int = 1, **spec: Any) -> Schedule:
    job = SimulatedJob(replicas=replicas, spares=spares, spec={"schedulingTimeout": "60s", **spec})
    return Schedule(1, world=WorldSettings(nodes=6, operator=OPERATOR_SETTINGS), jobs=(job,), injections=injections)


def _inject_one(fault: Fault, seconds: float | None = 0.0) -> Schedule:
    return _build_schedule(FaultInjection(CRASH_TEST_TRIGGER, fault, seconds))


CRASH_TEST_SCENARIOS: dict[str, Schedule] = {
    "crash": _inject_one(ranks.RankCrashes()),
    "out-of-memory": _inject_one(ranks.RankRunsOutOfMemory()),
    "hang": _inject_one(ranks.RankHangs(index=1)),
    "paused": _inject_one(ranks.ProcessPaused(index=1), None),
    "slow": _inject_one(ranks.NodeIsSlow(factor=2.5), None),
    "pod-lost": _inject_one(machines.PodDeleted(force=True)),
    "evicted": _inject_one(machines.PodEvicted(index=1)),
    "node-lost": _inject_one(machines.PowerFails(), 90.0),
    "survivors": _build_schedule(
        *[
            FaultInjection(CRASH_TEST_TRIGGER, machines.ImagesUnavailable(index=index, images=ImagePulls.HANG), 60.0)
            for index in range(2)
        ],
        *[
            FaultInjection(
                CRASH_TEST_TRIGGER, machines.ImagesUnavailable(index=index, free=True, images=ImagePulls.HANG), 60.0
            )
            for index in range(4)
        ],
        FaultInjection(AtTime(40.1), machines.PodDeleted(force=True)),
        spares=0,
        minReplicas=1,
    ),
    "spare-lost": _inject_one(machines.PodDeleted(role=TargetRole.SPARE)),
    "quarantine": _inject_one(people.QuarantineMade(), 60.0),
    "sick": _build_schedule(
        FaultInjection(CRASH_TEST_TRIGGER, machines.NodeIsSick(fails=True, xid=79), 120.0),
        FaultInjection(AtTime(60.0), ranks.RankCrashes()),
    ),
    "scale": _build_schedule(
        FaultInjection(CRASH_TEST_TRIGGER, people.JobScaled(replicas=4)),
        FaultInjection(AtTime(90.0), people.JobScaled(replicas=2)),
    ),
    "suspend": _inject_one(people.JobSuspended(edits=True), 40.0),
    "finish": _inject_one(people.JobFinishes(steps=5)),
    "recreate": _inject_one(people.JobDeleted(recreate=True)),
    "state-lost": _inject_one(people.StateDeleted(unattended=True)),
}
