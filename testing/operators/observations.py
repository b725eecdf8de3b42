"""Worlds for tests of decisions: a job with its workers as the operator would see them, changed a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import (
    CheckpointReport,
    Evidence,
    FaultKind,
    FaultReport,
    Heartbeat,
    LauncherState,
    RankState,
    RankWindow,
    RoundStart,
    StepProgress,
    TrainingReport,
)
from pacekeeper_operator.api.training_job import JobSpec, RemediationMode, RemediationSpec, Remedy, TrainingJob
from pacekeeper_operator.decide.evaluate import PassResult
from pacekeeper_operator.state.cluster_view import ClusterView, NodeView, PodView, WorkerView
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    GpuReadings,
    Incident,
    Lifecycle,
    Placement,
    State,
    WorkerRecord,
)
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy

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
    job = changes.pop("job", None) or build_job(replicas, spares)
    records = [WorkerRecord(f"j-w{n}-0", n, 0, uid=f"uid-{n}", node=f"node-{n}") for n in range(replicas + spares)]
    members = tuple(Member(records[n].name, f"10.0.0.{n}", (n,)) for n in range(replicas))
    plan = Plan(version=100, membership=1, round=1, members=members, restarts=10)
    state = State(
        placement=Placement(
            workers=tuple(records), incarnations={str(n): 0 for n in range(replicas + spares)}, template_accepted=1
        ),
        lifecycle=Lifecycle(training_since=NOW - 300, start_time=NOW - 400),
        gpus=GpuReadings(nodes=tuple(f"node-{n}" for n in range(replicas + spares))),
    )
    heartbeat = Heartbeat(
        state=LauncherState.RUNNING,
        membership=1,
        round=1,
        progress=StepProgress(step=step, steps_in_round=step),
        checkpoint=CheckpointReport(step=step - 10),
        start=RoundStart(restored_step=0, started_at=NOW - 301, first_step_at=NOW - 300),
        training=TrainingReport(global_batch=32, managed=True),
        rendezvous_port=31000,
    )
    warm_heartbeat = Heartbeat(state=LauncherState.WARM, rendezvous_port=31000)
    views = tuple(
        WorkerView(
            record,
            PodView(record.name, record.uid, "Running", record.node, f"10.0.0.{n}", NOW - 400),
            replace(heartbeat if n < replicas else warm_heartbeat, worker=record.name),
            silent_seconds=0.5,
        )
        for n, record in enumerate(records)
    )
    nodes = {f"node-{n}": NodeView(f"node-{n}", f"node-uid-{n}", address=f"192.0.2.{n}") for n in range(10)}
    observation = Observation(
        now=NOW,
        operator_age=1000.0,
        job=job,
        desired=DesiredState(plan, state),
        workers=views,
        metrics=JobMetrics(step_seconds=0.1),
        cluster_view=ClusterView(nodes=nodes),
    )
    return replace(observation, **changes)


def build_untrained(replicas: int = 4, spares: int = 1, **changes: Any) -> Observation:
    """The same in a job that has not completed a step so far."""
    observation = change_members(
        build_training(replicas, spares, **changes),
        start={"first_step_at": None},
        progress={"step": None, "steps_in_round": 0},
    )
    return observation.with_desired(observation.desired.with_lifecycle(training_since=None))


def build_fresh(replicas: int = 2, spares: int = 1, **changes: Any) -> Observation:
    """A job that has no plan yet but an empty one, and no pods."""
    job = changes.pop("job", None) or build_job(replicas, spares)
    nodes = {f"node-{n}": NodeView(f"node-{n}", f"node-uid-{n}") for n in range(10)}
    desired = DesiredState(Plan(version=100), State(placement=Placement(template_accepted=1)))
    observation = Observation(NOW, 1000.0, job, desired, cluster_view=ClusterView(nodes=nodes))
    return replace(observation, **changes)


def with_pods(observation: Observation, *, state: LauncherState | None = None, placed: bool = True) -> Observation:
    """Every planned worker has its pod; `state`: what its launcher reports, None: nothing yet."""
    views = []
    for record in observation.state.placement.workers:
        node = f"node-{record.ordinal}" if placed else ""
        pod = PodView(
            record.name, f"uid-{record.name}", "Running" if placed else "Pending", node, created_at=observation.now
        )
        pod = replace(pod, address=f"10.0.0.{record.ordinal}" if placed else "")
        heartbeat = None if state is None else Heartbeat(record.name, state, commands_may_follow=False)
        views.append(WorkerView(record, pod, heartbeat))
    return replace(observation, workers=tuple(views))


def list_decisions(result: PassResult) -> tuple[Incident, ...]:
    """What this pass has decided, in order."""
    return tuple(i for i in result.desired.state.incidents.current if i.decided == result.observation.now)


def change_worker(
    observation: Observation,
    name: str,
    *,
    pod: Mapping[str, Any] | None = None,
    heartbeat: Mapping[str, Any] | None = None,
    gone: bool = False,
    **changes: Any,
) -> Observation:
    """`pod`, `heartbeat`: fields to change (`change_heartbeat`); `gone`: its pod is; other changes are of the view."""
    views = []
    for view in observation.workers:
        if view.name == name:
            changed = replace(view, **changes)
            if pod and changed.pod is not None:
                changed = replace(changed, pod=replace(changed.pod, **pod))
            if heartbeat and changed.heartbeat is not None:
                changed = replace(changed, heartbeat=change_heartbeat(changed.heartbeat, heartbeat))
            view = replace(changed, pod=None) if gone else changed
        views.append(view)
    return replace(observation, workers=tuple(views))


def change_heartbeat(heartbeat: Heartbeat, changes: Mapping[str, Any]) -> Heartbeat:
    """Returns it with these fields. A mapping has the fields to change in a part: `{"progress": {"step": 7}}`."""
    return replace(
        heartbeat,
        **{
            name: replace(getattr(heartbeat, name), **value) if isinstance(value, Mapping) else value
            for name, value in changes.items()
        },
    )


def change_members(observation: Observation, **heartbeat: Any) -> Observation:
    """Returns it with these fields of all members' heartbeats (`change_heartbeat`)."""
    for member in observation.plan.members:
        observation = change_worker(observation, member.worker, heartbeat=heartbeat)
    return observation


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
    """What a worker reports when its rank waits in a collective, or (`culprit`) never came to it."""
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
    return FaultReport(
        f"{worker}-stall-{round_}", FaultKind.STALLED, worker, round_, ranks=(state,), **(values | changes)
    )


def build_stalls(observation: Observation, culprit: int) -> tuple[FaultReport, ...]:
    """Of all members; rank `culprit` holds the others."""
    return tuple(
        build_stall(
            member.worker,
            member.ranks[0],
            culprit=member.ranks[0] == culprit,
            round_=observation.progress.round,
            membership=observation.plan.membership,
        )
        for member in observation.plan.members
    )


def build_remediation(**changes: Any) -> RemediationSpec:
    return RemediationSpec(**changes)
