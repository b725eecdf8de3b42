"""Mortal runs: the operator is killed before and after every write of some base scenarios, one write a run.

Whatever it does takes several writes; it must be possible to go on from between any two of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .faults import machines, operators, people, ranks
from .faults.fault import Fault, Role
from .faults.moments import AfterWrite, At, BeforeWrite
from .generator import OPERATOR
from .kubernetes.kubelet import Images
from .schedule import JobSettings, Schedule, Stroke
from .world import WorldSettings

AT = At(40.0)


def killed_at_each_write(base: Schedule, writes: int) -> list[Schedule]:
    """`writes`: how many the operator sends in the base scenario."""
    moments = [moment for number in range(1, writes + 1) for moment in (BeforeWrite(number), AfterWrite(number))]
    return [replace(base, strokes=(*base.strokes, Stroke(moment, operators.OperatorKilled()))) for moment in moments]


def _scenario(*strokes: Stroke, replicas: int = 2, spares: int = 1, **spec: Any) -> Schedule:
    job = JobSettings(replicas=replicas, spares=spares, spec={"schedulingTimeout": "60s", **spec})
    return Schedule(1, world=WorldSettings(nodes=6, operator=OPERATOR), jobs=(job,), strokes=strokes)


def _one(what: Fault, seconds: float | None = 0.0) -> Schedule:
    return _scenario(Stroke(AT, what, seconds))


SCENARIOS: dict[str, Schedule] = {
    "crash": _one(ranks.RankCrashes()),
    "out-of-memory": _one(ranks.RankRunsOutOfMemory()),
    "hang": _one(ranks.RankHangs(index=1)),
    "frozen": _one(ranks.Frozen(index=1), None),
    "slow": _one(ranks.NodeIsSlow(factor=2.5), None),
    "pod-lost": _one(machines.PodDeleted(force=True)),
    "evicted": _one(machines.PodEvicted(index=1)),
    "node-lost": _one(machines.PowerFails(), 90.0),
    "survivors": _scenario(
        *[Stroke(AT, machines.ImagesDoNotCome(index=index, images=Images.HANG), 60.0) for index in range(2)],
        *[Stroke(AT, machines.ImagesDoNotCome(index=index, free=True, images=Images.HANG), 60.0) for index in range(4)],
        Stroke(At(40.1), machines.PodDeleted(force=True)),
        spares=0,
        minReplicas=1,
    ),
    "spare-lost": _one(machines.PodDeleted(role=Role.SPARE)),
    "quarantine": _one(people.QuarantineMade(), 60.0),
    "sick": _scenario(
        Stroke(AT, machines.NodeIsSick(fails=True, xid=79), 120.0), Stroke(At(60.0), ranks.RankCrashes())
    ),
    "scale": _scenario(Stroke(AT, people.JobScaled(replicas=4)), Stroke(At(90.0), people.JobScaled(replicas=2))),
    "suspend": _one(people.JobSuspended(edits=True), 40.0),
    "finish": _one(people.JobFinishes(steps=5)),
    "recreate": _one(people.JobDeleted(again=True)),
    "old-operator": _one(people.StateOfOldOperator()),
}
