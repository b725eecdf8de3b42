"""How everything shall be once all faults are over and time has passed: what is not so, in words.

What never heals may keep some of it from becoming so: a schedule's `costs` say what a job may lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pacekeeper_analysis.plan import SyncMode
from pacekeeper_operator.api import LABEL_JOB, IncidentCause, JobCondition, JobPhase, Reason, parse_duration, parse_time

from ..faults.fault import Cost
from ..kubernetes.kubelet import ImagePulls
from .record import JobHistory, ClusterHistory, is_cordoned, is_ready, is_refused, is_tainted

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..workers.run import TrainingRound
    from ..world import World

Object = Mapping[str, Any]
MAX_STEP_SECONDS = 40.0
"""A step takes no longer."""
DEGRADED_REASONS = (Reason.WORKERS_UNREACHED, Reason.FEWER_REPLICAS, Reason.NO_SPARE)
QUARANTINE_EXPIRY_SLACK_SECONDS = 360.0
"""So long after its time is over a quarantine may last: a probe that fails, its back-off, and three that pass."""


def find_unsettled(world: World, record: ClusterHistory, schedule: Schedule) -> Iterator[str]:
    yield from _check_operators(world)
    for job in record.jobs.values():
        if job.body is not None:
            yield from _check_job(world, record, job, schedule)
    yield from _find_leftovers(world, record)
    for incident in world.api.list_all("incidents"):
        owner = record.jobs.get(incident["spec"]["jobRef"].get("uid", ""))
        if (owner is None or owner.body is None) and not incident.get("status", {}).get("outcome"):
            yield f"Incident {incident['metadata']['name']} is open, and its job is gone"
    for name, node in record.nodes.items():
        yield from _check_node(record, name, node)
    for name, quarantine in record.quarantines.items():
        yield from _check_quarantine(world, record, name, quarantine)


def _check_operators(world: World) -> Iterator[str]:
    serving = [
        pod.name
        for pod in world.deployment.pods
        if pod.operator is not None and not pod.process.dead and pod.operator.is_leader()
    ]
    if len(serving) != 1:
        yield f"{len(serving)} operators serve: {', '.join(serving) or 'none'}"


def _check_job(world: World, record: ClusterHistory, job: JobHistory, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    status, books = job.body.get("status", {}), job.bookkeeping
    if job.is_deleted:
        yield f"{job.name} is to be deleted, and is still there"
        return
    if books is None:
        yield f"nothing is written of {job.name}"
        return
    lacks_spares = Cost.SPARES in schedule.costs
    wanting = [
        name
        for name, incident in books.incidents.items()
        if not incident.get("outcome") and not (lacks_spares and _awaits_spare(incident))
    ]
    if wanting:
        yield f"{job.name}: {', '.join(wanting)} are open in its bookkeeping"
    for incident in world.api.list_all("incidents"):
        is_open = not incident.get("status", {}).get("outcome")
        if lacks_spares and _awaits_spare(incident["spec"]):
            continue
        if incident["spec"]["jobRef"].get("uid") == job.uid and is_open:
            yield f"Incident {incident['metadata']['name']} is open"
    yield from _check_conditions(job, status, schedule)
    pods = [body for body in record.pods.values() if record.find_job(body) is job]
    phase = status.get("phase")
    if job.body["spec"].get("suspend") and not books.ended:
        if phase != JobPhase.SUSPENDED or pods:
            yield f"{job.name} is suspended: it is {phase}, with {len(pods)} pods"
    elif phase in (JobPhase.FAILED, JobPhase.COMPLETE) or (phase == JobPhase.PENDING and is_refused(job.body)):
        return
    elif phase != JobPhase.RUNNING:
        yield f"{job.name} is {phase}: {_format_conditions(status)}"
    else:
        yield from _check_running_job(world, job, status, schedule)


def _check_conditions(job: JobHistory, status: Object, schedule: Schedule) -> Iterator[str]:
    found = {condition["type"]: condition for condition in status.get("conditions", ())}
    hindered, degraded = found.get(JobCondition.HINDERED), found.get(JobCondition.DEGRADED)
    if hindered is not None and hindered["status"] == "True" and not schedule.costs:
        yield f"{job.name} is hindered: {hindered.get('message')}"
    if degraded is not None and degraded["status"] == "True" and degraded["reason"] in DEGRADED_REASONS and not schedule.costs:
        yield f"{job.name} is degraded: {degraded['reason']}: {degraded.get('message')}"


def _check_running_job(world: World, job: JobHistory, status: Object, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    assert job.bookkeeping is not None
    spec, books, costs = job.body["spec"], job.bookkeeping, schedule.costs
    replicas, spares = spec.get("replicas", 1), spec.get("spares", 0)
    seats = [worker for worker, _ in books.rank_assignments]
    staying = [name for name in books.workers if books.is_wanted(name)]
    if len(seats) != replicas and Cost.STRENGTH not in costs:
        yield f"{job.name}: {len(seats)} members instead of {replicas}"
    if len(staying) != replicas + spares and Cost.SPARES not in costs:
        yield f"{job.name}: {len(staying)} workers instead of {replicas + spares}"
    counts = status.get("workers", {})
    if Cost.STATUS not in costs:
        # A spare has a node without other workers of its job, and a job may be scaled to more than there are nodes.
        has_room = replicas + spares <= len(world.nodes)
        lacks_spares = counts.get("spare") != spares and has_room and Cost.SPARES not in costs
        if counts.get("ready") != len(seats) or lacks_spares:
            yield f"{job.name}: its status counts {counts.get('summary')} workers"
        if status.get("restarts") != books.total_restarts:
            yield f"{job.name}: its status counts {status.get('restarts')} restarts of {books.total_restarts}"
        if not _is_ready(status) and len(seats) == replicas:
            yield f"{job.name} trains, and tools do not find it Ready"
    yield from _check_training(world, job, seats, schedule)


def _awaits_spare(incident: Object) -> bool:
    """It is about a worker without ranks, and over once another one is ready."""
    return incident.get("cause") in (IncidentCause.WORKER_LOST, IncidentCause.WORKER_FROZEN) and incident.get("rank") is None


def _is_ready(status: Object) -> bool:
    """By what kubectl wait, Helm and Argo CD look at."""
    true = {condition["type"] for condition in status.get("conditions", ()) if condition["status"] == "True"}
    return true & {JobCondition.READY, JobCondition.RECONCILING, JobCondition.STALLED} == {JobCondition.READY}


def _check_training(world: World, job: JobHistory, seats: list[str], schedule: Schedule) -> Iterator[str]:
    training = world.trainings.find_training(job.uid)
    if Cost.STEPS in schedule.costs:
        return
    if training is None or not training.rounds:
        yield f"{job.name} has never trained"
        return
    run = training.rounds[-1]
    names = list(dict.fromkeys(rank.worker.name for rank in run.assigned_ranks))
    if run.over or not run.sync_points or world.now() - run.stepped_at > MAX_STEP_SECONDS:
        yield f"{job.name} takes no step in round {run.round}, of {', '.join(names)}"
    elif names != seats:
        yield f"{job.name}: {', '.join(names)} train, and by the plan it should be {', '.join(seats)}"
    elif Cost.METRICS not in schedule.costs and not _is_slow(world, run):
        yield from _check_straggler_reverted(job, run)


def _is_slow(world: World, run: TrainingRound) -> bool:
    """Some node of its, or some link."""
    nodes = [rank.worker.node for rank in run.assigned_ranks]
    slow_link = any(world.network.get_slowdown(one, other) != 1.0 for one, other in combinations(nodes, 2))
    return slow_link or any(world.nodes[node].slow != 1.0 for node in nodes)


def _check_straggler_reverted(job: JobHistory, run: TrainingRound) -> Iterator[str]:
    """Nothing is left of what was done about a slow node once none is."""
    assert job.bookkeeping is not None
    shares = run.progress.training_config.shares
    if run.mode is SyncMode.SYNC and shares is not None and max(shares) - min(shares) > 1:
        yield f"{job.name} trains with shares {list(shares)}, and no node is slow"
    if job.bookkeeping.plan["evidence_request"]:
        yield f"{job.name} is asked for evidence, and no node is slow"


def _format_conditions(status: Object) -> str:
    said = [f"{c['type']}: {c['message']}" for c in status.get("conditions", ()) if c.get("message")]
    return "; ".join(said)


def _find_leftovers(world: World, record: ClusterHistory) -> Iterator[str]:
    """Pods and bookkeeping that belong to nobody, and what cannot be deleted."""
    for body in record.pods.values():
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata:
            yield f"pod {metadata['name']} is to be deleted, and is still there"
        elif LABEL_JOB in metadata.get("labels", {}):
            job = record.find_job(body)
            if job is None or job.body is None:
                yield f"pod {metadata['name']} belongs to no job"
            elif job.bookkeeping is not None and metadata["name"] not in job.bookkeeping.workers:
                yield f"pod {metadata['name']} is in no bookkeeping"
    for plural in ("trainingjobstates", "networkpolicies"):
        for body in world.api.list_all(plural):
            job = record.find_job(body)
            if job is not None and job.body is None:
                yield f"{plural} {body['metadata']['name']} has outlived its job"


def _check_node(record: ClusterHistory, name: str, node: Object) -> Iterator[str]:
    quarantine = record.quarantines.get(name)
    if (is_tainted(node) or is_cordoned(node)) and not (quarantine and quarantine["spec"].get("approved")):
        yield f"{name} is held without an approved NodeQuarantine"


def _check_quarantine(world: World, record: ClusterHistory, name: str, quarantine: Object) -> Iterator[str]:
    if "deletionTimestamp" in quarantine["metadata"]:
        yield f"NodeQuarantine {name} is to be deleted, and is still there"
    node, since = record.nodes.get(name), quarantine.get("status", {}).get("cordonedAt")
    if node is None:
        yield f"NodeQuarantine {name} has outlived its node"
    elif (
        since is not None
        and is_ready(node)
        and not world.nodes[name].fault_message
        and not world.nodes[name].shared_check
        and world.nodes[name].images is ImagePulls.SUCCEED
    ):
        lasts = parse_duration(quarantine["spec"].get("expiresAfter", "1h"))
        if world.wall_time() > parse_time(since) + lasts + QUARANTINE_EXPIRY_SLACK_SECONDS:
            yield f"{name} is well, and its quarantine does not end"
