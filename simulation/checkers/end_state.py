"""The expected state after all faults have ended and time has passed: yields what differs from it.

Permanent faults may prevent parts of it: a schedule's `costs` name what a job may lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.formats import parse_duration, parse_time
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.names import LABEL_JOB
from pacekeeper_operator.api.training_job import JobPhase

from ..faults.fault import Cost
from ..kubernetes.machine import ImagePulls
from ..schedule import Schedule
from ..workers.training_round import TrainingRound
from ..world import World
from .cluster_history import ClusterHistory, JobHistory, is_cordoned, is_ready, is_refused, is_tainted

Object = Mapping[str, Any]
MAX_STEP_SECONDS = 40.0
"""Maximum duration of a step."""
DEGRADED_REASONS = (Reason.WORKERS_UNREACHABLE, Reason.FEWER_REPLICAS, Reason.NO_SPARE)
QUARANTINE_EXPIRY_SLACK_SECONDS = 360.0
"""How long a quarantine may outlast its expiry: a failed probe, its back-off, and three passed ones."""


def find_unsettled(world: World, history: ClusterHistory, schedule: Schedule) -> Iterator[str]:
    yield from _check_operators(world)
    for job in history.jobs.values():
        if job.body is not None:
            yield from _check_job(world, history, job, schedule)
    yield from _find_leftovers(world, history)
    for incident in world.api.list_all("incidents"):
        owner = history.jobs.get(incident["spec"]["jobRef"].get("uid", ""))
        if (owner is None or owner.body is None) and not incident.get("status", {}).get("outcome"):
            yield f"Incident {incident['metadata']['name']} is open, and its job is gone"
    for name, node in history.nodes.items():
        yield from _check_node(history, name, node)
    for name, quarantine in history.quarantines.items():
        yield from _check_quarantine(world, history, name, quarantine)


def _check_operators(world: World) -> Iterator[str]:
    serving = [
        pod.name
        for pod in world.deployment.pods
        if pod.operator is not None and not pod.process.dead and pod.operator.is_leader()
    ]
    if len(serving) != 1:
        yield f"{len(serving)} operators serve: {', '.join(serving) or 'none'}"


def _check_job(world: World, history: ClusterHistory, job: JobHistory, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    status, bookkeeping = job.body.get("status", {}), job.bookkeeping
    if job.is_deleted:
        yield f"{job.name} is being deleted, but still exists"
        return
    if bookkeeping is None:
        yield f"{job.name} has no bookkeeping"
        return
    lacks_spares = Cost.SPARES in schedule.costs
    open_incidents = [
        name
        for name, incident in bookkeeping.incidents.items()
        if not incident.get("outcome") and not (lacks_spares and _awaits_spare(incident))
    ]
    if open_incidents:
        yield f"{job.name}: {', '.join(open_incidents)} are open in its bookkeeping"
    for incident in world.api.list_all("incidents"):
        is_open = not incident.get("status", {}).get("outcome")
        if lacks_spares and _awaits_spare(incident["spec"]):
            continue
        if incident["spec"]["jobRef"].get("uid") == job.uid and is_open:
            yield f"Incident {incident['metadata']['name']} is open"
    yield from _check_conditions(world, job, status, schedule)
    pods = [body for body in history.pods.values() if history.find_job(body) is job]
    phase = status.get("phase")
    if job.body["spec"].get("suspend") and not bookkeeping.ended:
        if phase != JobPhase.SUSPENDED or pods:
            yield f"{job.name} is suspended: it is {phase}, with {len(pods)} pods"
    elif phase in (JobPhase.FAILED, JobPhase.COMPLETE) or (phase == JobPhase.PENDING and is_refused(job.body)):
        return
    elif phase != JobPhase.RUNNING:
        yield f"{job.name} is {phase}: {_format_conditions(status)}"
    else:
        needs_server = job.body["spec"]["checkpoint"]["accessMode"] == "ReadWriteOnce"
        if needs_server != any(
            job.is_checkpoint_server(body) and body["status"].get("phase") == "Running" for body in pods
        ):
            yield f"{job.name}: its checkpoint server {'does not run' if needs_server else 'still runs'}"
        yield from _check_running_job(world, job, status, schedule)


def _check_conditions(world: World, job: JobHistory, status: Object, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    blocked, degraded = conditions.get(JobCondition.ACTION_BLOCKED), conditions.get(JobCondition.DEGRADED)
    if blocked is not None and blocked["status"] == "True" and not schedule.costs:
        yield f"{job.name} is blocked: {blocked.get('message')}"
    has_places = job.body["spec"].get("replicas", 1) <= _count_places(world)
    lacks_workers = degraded is not None and degraded["status"] == "True" and degraded["reason"] in DEGRADED_REASONS
    if degraded is not None and lacks_workers and has_places and not schedule.costs:
        yield f"{job.name} is degraded: {degraded['reason']}: {degraded.get('message')}"


def _count_places(world: World) -> int:
    """Return how many workers fit. A job may be scaled to more."""
    return len(world.nodes) * world.settings.slots


def _count_ready_nodes(world: World) -> int:
    nodes = (world.api.get("nodes", name) for name in world.nodes)
    return sum(node is not None and is_ready(node) for node in nodes)


def _check_running_job(world: World, job: JobHistory, status: Object, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    assert job.bookkeeping is not None
    spec, bookkeeping, costs = job.body["spec"], job.bookkeeping, schedule.costs
    replicas, spares = spec.get("replicas", 1), spec.get("spares", 0)
    member_names = [worker for worker, _ in bookkeeping.rank_assignments]
    wanted = [name for name in bookkeeping.workers if bookkeeping.is_wanted(name)]
    members = min(replicas, _count_places(world))
    if len(member_names) != members and Cost.STRENGTH not in costs:
        yield f"{job.name}: {len(member_names)} members instead of {members}"
    if len(wanted) != replicas + spares and Cost.SPARES not in costs:
        yield f"{job.name}: {len(wanted)} workers instead of {replicas + spares}"
    counts = status.get("workers", {})
    if Cost.STATUS not in costs:
        # A spare needs a node without other workers of its job, and a job may be scaled to more workers than nodes.
        has_room = replicas + spares <= _count_ready_nodes(world)
        lacks_spares = counts.get("spare") != spares and has_room and Cost.SPARES not in costs
        if counts.get("ready") != len(member_names) or lacks_spares:
            yield f"{job.name}: its status counts {counts.get('summary')} workers"
        if status.get("restarts") != bookkeeping.total_restarts:
            yield f"{job.name}: its status counts {status.get('restarts')} restarts of {bookkeeping.total_restarts}"
        if not _is_ready(status) and len(member_names) == replicas:
            yield f"{job.name} trains, but its Ready, Reconciling, and Stalled conditions do not show it"
    yield from _check_training(world, job, member_names, schedule)


def _awaits_spare(incident: Object) -> bool:
    """Return whether an incident is about a worker without ranks: it is over once another one is ready."""
    return (
        incident.get("cause") in (IncidentCause.WORKER_LOST, IncidentCause.WORKER_UNRESPONSIVE)
        and incident.get("rank") is None
    )


def _is_ready(status: Object) -> bool:
    """Return whether the job is ready by the conditions that kubectl wait, Helm, and Argo CD use."""
    true_types = {condition["type"] for condition in status.get("conditions", ()) if condition["status"] == "True"}
    return true_types & {JobCondition.READY, JobCondition.RECONCILING, JobCondition.STALLED} == {JobCondition.READY}


def _check_training(world: World, job: JobHistory, member_names: list[str], schedule: Schedule) -> Iterator[str]:
    training = world.trainings.find_training(job.uid)
    if Cost.STEPS in schedule.costs:
        return
    if training is None or not training.rounds:
        yield f"{job.name} has never trained"
        return
    training_round = training.rounds[-1]
    names = list(dict.fromkeys(rank.worker.name for rank in training_round.assigned_ranks))
    if (
        training_round.over
        or not training_round.sync_points
        or world.now() - training_round.stepped_at > MAX_STEP_SECONDS
    ):
        yield f"{job.name} takes no step in round {training_round.round}, of {', '.join(names)}"
    elif names != member_names:
        yield f"{job.name}: {', '.join(names)} train, but by the plan it should be {', '.join(member_names)}"
    elif Cost.METRICS not in schedule.costs and not _is_slow(world, training_round):
        yield from _check_straggler_reverted(job, training_round)


def _is_slow(world: World, training_round: TrainingRound) -> bool:
    """Return whether one of its nodes or links is slow."""
    nodes = [rank.worker.node for rank in training_round.assigned_ranks]
    slow_link = any(world.network.get_slowdown(first, second) != 1.0 for first, second in combinations(nodes, 2))
    return slow_link or any(world.nodes[node].slow != 1.0 for node in nodes)


def _check_straggler_reverted(job: JobHistory, training_round: TrainingRound) -> Iterator[str]:
    """Yield what is left of remedies against a slow node once none is slow."""
    assert job.bookkeeping is not None
    shares = training_round.progress.training_config.shares
    if training_round.mode is SyncMode.SYNC and shares is not None and max(shares) - min(shares) > 1:
        yield f"{job.name} trains with shares {list(shares)}, but no node is slow"
    if any(rank.worker.folder.requests.evidence for rank in training_round.assigned_ranks):
        yield f"{job.name} has a request for evidence, but no node is slow"


def _format_conditions(status: Object) -> str:
    messages = [
        f"{condition['type']}: {condition['message']}"
        for condition in status.get("conditions", ())
        if condition.get("message")
    ]
    return "; ".join(messages)


def _find_leftovers(world: World, history: ClusterHistory) -> Iterator[str]:
    """Yield orphaned pods and bookkeeping, and pods that cannot be deleted."""
    for body in history.pods.values():
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata:
            yield f"pod {metadata['name']} is being deleted, but still exists"
        elif LABEL_JOB in metadata.get("labels", {}):
            job = history.find_job(body)
            if job is None or job.body is None:
                yield f"pod {metadata['name']} belongs to no job"
            elif job.is_checkpoint_server(body):
                if job.bookkeeping is not None and job.bookkeeping.ended:
                    yield f"pod {metadata['name']} has outlived the workers"
            elif job.bookkeeping is not None and metadata["name"] not in job.bookkeeping.workers:
                yield f"pod {metadata['name']} is in no bookkeeping"
    for plural in ("trainingjobstates", "networkpolicies"):
        for body in world.api.list_all(plural):
            job = history.find_job(body)
            if job is not None and job.body is None:
                yield f"{plural} {body['metadata']['name']} has outlived its job"


def _check_node(history: ClusterHistory, name: str, node: Object) -> Iterator[str]:
    quarantine = history.quarantines.get(name)
    if (is_tainted(node) or is_cordoned(node)) and not (quarantine and quarantine["spec"].get("approved")):
        yield f"{name} is held without an approved NodeQuarantine"


def _check_quarantine(world: World, history: ClusterHistory, name: str, quarantine: Object) -> Iterator[str]:
    if "deletionTimestamp" in quarantine["metadata"]:
        yield f"NodeQuarantine {name} is being deleted, but still exists"
    node, cordoned_at = history.nodes.get(name), quarantine.get("status", {}).get("cordonedAt")
    if node is None:
        yield f"NodeQuarantine {name} has outlived its node"
    elif (
        cordoned_at is not None
        and is_ready(node)
        and not world.nodes[name].fault_message
        and not world.nodes[name].shared_check
        and world.nodes[name].images is ImagePulls.SUCCEED
    ):
        duration = parse_duration(quarantine["spec"].get("expiresAfter", "1h"))
        if world.wall_time() > parse_time(cordoned_at) + duration + QUARANTINE_EXPIRY_SLACK_SECONDS:
            yield f"{name} is healthy, but its quarantine does not end"
