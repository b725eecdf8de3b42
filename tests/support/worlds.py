"""Worlds for tests of decisions: a job with its workers as the operator would see them, changed a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.plan import Member, Plan
from pacekeeper_analysis.reports import Evidence, FaultReport, FaultKind, Heartbeat, LauncherState, RankState, RankWindow
from pacekeeper_operator.api import TrainingJob, JobSpec, RemediationMode, RemediationSpec, Remedy
from pacekeeper_operator.decide.think import PassResult
from pacekeeper_operator.observation import JobMetrics, NodeView, Observation, PodView, Policy, ClusterView, WorkerView
from pacekeeper_operator.state import DesiredState, GpuReadings, Incident, Lifecycle, Placement, State, WorkerRecord

NOW = 1_000_000.0
TEMPLATE: Mapping[str, Any] = {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}


def build_evidence(request: str, windows: Iterable[RankWindow]) -> tuple[Evidence, ...]:
    """The answers of `training`'s workers to a request, one rank a worker."""
    return tuple(Evidence(request, f"j-w{window.rank}-0", 1, (window,)) for window in windows)


def build_job(replicas: int = 4, spares: int = 1, **changes: Any) -> TrainingJob:
    spec = JobSpec(template=TEMPLATE, replicas=replicas, spares=spares, **changes)
    return TrainingJob("ns", "j", "u1d2c3", 1, spec, created_at=NOW - 1000)


def build_policy(**changes: Any) -> Policy:
    values: dict[str, Any] = {
        "mode": RemediationMode.ACT,
        "allow": frozenset(Remedy),
        "max_restarts": 10,
        "restart_window": 3600.0,
    }
    return Policy(**(values | changes))


def build_training(replicas: int = 4, spares: int = 1, step: int = 500, **changes: Any) -> Observation:
    """A job in its first round, all members at `step`, all spares warm; worker i on node-i."""
    the_job = changes.pop("job", None) or build_job(replicas, spares)
    records = [WorkerRecord(f"j-w{n}-0", n, 0, uid=f"uid-{n}", node=f"node-{n}") for n in range(replicas + spares)]
    members = tuple(Member(records[n].name, f"10.0.0.{n}", (n,)) for n in range(replicas))
    plan = Plan(version=100, membership=1, round=1, members=members, restarts=10)
    state = State(
        placement=Placement(
            workers=tuple(records), incarnations={str(n): 0 for n in range(replicas + spares)}, template_accepted=1
        ),
        life=Lifecycle(training_since=NOW - 300, start_time=NOW - 400),
        gpus=GpuReadings(nodes=tuple(f"node-{n}" for n in range(replicas + spares))),
    )
    beat = Heartbeat(
        state=LauncherState.RUNNING,
        membership=1,
        round=1,
        step=step,
        steps_in_round=step,
        checkpoint_step=step - 10,
        restored_step=0,
        global_batch=32,
        round_started_at=NOW - 301,
        first_step_at=NOW - 300,
        steered=True,
        meeting_port=31000,
    )
    warm = Heartbeat(state=LauncherState.WARM, meeting_port=31000)
    views = tuple(
        WorkerView(
            record,
            PodView(record.name, record.uid, "Running", record.node, f"10.0.0.{n}", NOW - 400),
            replace(beat if n < replicas else warm, worker=record.name),
            silent_seconds=0.5,
        )
        for n, record in enumerate(records)
    )
    nodes = {f"node-{n}": NodeView(f"node-{n}", f"node-uid-{n}", address=f"192.0.2.{n}") for n in range(10)}
    world = Observation(
        now=NOW,
        operator_age=1000.0,
        job=the_job,
        desired=DesiredState(plan, state),
        workers=views,
        metrics=JobMetrics(step_seconds=0.1),
        cluster_view=ClusterView(nodes=nodes),
    )
    return replace(world, **changes)


def build_untrained(replicas: int = 4, spares: int = 1, **changes: Any) -> Observation:
    """The same in a job that has not completed a step so far."""
    world = change_members(build_training(replicas, spares, **changes), first_step_at=0.0, step=-1, steps_in_round=0)
    return world.with_desired(world.desired.with_lifecycle(training_since=0.0))


def build_fresh(replicas: int = 2, spares: int = 1, **changes: Any) -> Observation:
    """A job that has no plan yet but an empty one, and no pods."""
    the_job = changes.pop("job", None) or build_job(replicas, spares)
    nodes = {f"node-{n}": NodeView(f"node-{n}", f"node-uid-{n}") for n in range(10)}
    draft = DesiredState(Plan(version=100), State(placement=Placement(template_accepted=1)))
    world = Observation(NOW, 1000.0, the_job, draft, cluster_view=ClusterView(nodes=nodes))
    return replace(world, **changes)


def with_pods(world: Observation, *, state: LauncherState | None = None, placed: bool = True) -> Observation:
    """Every worker that is promised has its pod; `state`: what its launcher says, None: nothing yet."""
    views = []
    for record in world.state.placement.workers:
        node = f"node-{record.ordinal}" if placed else ""
        pod = PodView(record.name, f"uid-{record.name}", "Running" if placed else "Pending", node, created_at=world.now)
        pod = replace(pod, address=f"10.0.0.{record.ordinal}" if placed else "")
        beat = None if state is None else Heartbeat(worker=record.name, state=state)
        views.append(WorkerView(record, pod, beat))
    return replace(world, workers=tuple(views))


def list_decisions(result: PassResult) -> tuple[Incident, ...]:
    """What this pass has decided, in order."""
    return tuple(i for i in result.desired.state.incidents.current if i.decided == result.observation.now)


def change_worker(
    world: Observation,
    name: str,
    *,
    pod: Mapping[str, Any] | None = None,
    heartbeat: Mapping[str, Any] | None = None,
    gone: bool = False,
    **changes: Any,
) -> Observation:
    """`pod`, `heartbeat`: fields to change; `gone`: its pod is; other changes are of the view."""
    views = []
    for view in world.workers:
        if view.name == name:
            new = replace(view, **changes)
            if pod and new.pod is not None:
                new = replace(new, pod=replace(new.pod, **pod))
            if heartbeat and new.heartbeat is not None:
                new = replace(new, heartbeat=replace(new.heartbeat, **heartbeat))
            view = replace(new, pod=None) if gone else new
        views.append(view)
    return replace(world, workers=tuple(views))


def change_members(world: Observation, **heartbeat: Any) -> Observation:
    for member in world.plan.members:
        world = change_worker(world, member.worker, heartbeat=heartbeat)
    return world


def build_crash(worker: str, rank: int, round_: int = 1, **changes: Any) -> FaultReport:
    values: dict[str, Any] = {
        "exit_code": -9,
        "completed_step": True,
        "step": 500,
        "noticed_at": NOW - 0.2,
        "membership": 1,
    }
    name = f"{worker}-rank-{rank}-round-{round_}"
    return FaultReport(name, FaultKind.RANK_FAILED, worker, round_, rank=rank, **(values | changes))


def build_stall(worker: str, rank: int, *, culprit: bool = False, round_: int = 1, **changes: Any) -> FaultReport:
    """What a worker says when its rank waits in a collective, or (`culprit`) never came to it."""
    state = RankState(
        rank=rank,
        phase="TRAIN",
        phase_seconds=100.0,
        step=500,
        collective="NONE" if culprit else "ALL_REDUCE",
        group=1,
        sequence=41 if culprit else 42,
        collectives_entered=41 if culprit else 42,
        waiting_seconds=3.0,
        process_state="T" if culprit else "S",
        moving=False,
        stack="" if culprit else "wait()",
    )
    values: dict[str, Any] = {"noticed_at": NOW - 0.1, "membership": 1, "step": 500}
    return FaultReport(f"{worker}-stall-{round_}", FaultKind.STALLED, worker, round_, ranks=(state,), **(values | changes))


def build_stalls(world: Observation, culprit: int) -> tuple[FaultReport, ...]:
    """Of all members; rank `culprit` holds the others."""
    return tuple(
        build_stall(m.worker, m.ranks[0], culprit=m.ranks[0] == culprit, round_=world.round, membership=world.plan.membership)
        for m in world.plan.members
    )


def build_remediation(**changes: Any) -> RemediationSpec:
    return RemediationSpec(**changes)
