"""How everything shall be once all faults are over and time has passed: what is not so, in words.

What never heals may keep some of it from becoming so: a schedule's `costs` say what a job may lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pacekeeper_analysis.plan import SyncMode
from pacekeeper_operator.api import LABEL_JOB, Cause, Condition, JobPhase, Reason, parse_duration, parse_time

from ..faults.fault import Cost
from ..kubernetes.kubelet import Images
from .record import JobRecord, Record, is_cordoned, is_ready, is_refused, is_tainted

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..workers.run import Run
    from ..world import World

Object = Mapping[str, Any]
STEP_SECONDS = 40.0
"""A step takes no longer."""
LACKS = (Reason.WORKERS_UNREACHED, Reason.FEWER_REPLICAS, Reason.NO_SPARE)
EXPIRY_SECONDS = 360.0
"""So long after its time is over a quarantine may last: a probe that fails, its back-off, and three that pass."""


def unsettled(world: World, record: Record, schedule: Schedule) -> Iterator[str]:
    yield from _operators(world)
    for job in record.jobs.values():
        if job.body is not None:
            yield from _job(world, record, job, schedule)
    yield from _leftovers(world, record)
    for incident in world.api.all("incidents"):
        owner = record.jobs.get(incident["spec"]["jobRef"].get("uid", ""))
        if (owner is None or owner.body is None) and not incident.get("status", {}).get("outcome"):
            yield f"Incident {incident['metadata']['name']} is open, and its job is gone"
    for name, node in record.nodes.items():
        yield from _node(record, name, node)
    for name, quarantine in record.quarantines.items():
        yield from _quarantine(world, record, name, quarantine)


def _operators(world: World) -> Iterator[str]:
    serving = [
        pod.name
        for pod in world.deployment.pods
        if pod.operator is not None and not pod.process.dead and pod.operator.leads()
    ]
    if len(serving) != 1:
        yield f"{len(serving)} operators serve: {', '.join(serving) or 'none'}"


def _job(world: World, record: Record, job: JobRecord, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    status, books = job.body.get("status", {}), job.books
    if job.deleted:
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
    for incident in world.api.all("incidents"):
        is_open = not incident.get("status", {}).get("outcome")
        if lacks_spares and _awaits_spare(incident["spec"]):
            continue
        if incident["spec"]["jobRef"].get("uid") == job.uid and is_open:
            yield f"Incident {incident['metadata']['name']} is open"
    yield from _conditions(job, status, schedule)
    pods = [body for body in record.pods.values() if record.job_of(body) is job]
    phase = status.get("phase")
    if job.body["spec"].get("suspend") and not books.over:
        if phase != JobPhase.SUSPENDED or pods:
            yield f"{job.name} is suspended: it is {phase}, with {len(pods)} pods"
    elif phase in (JobPhase.FAILED, JobPhase.COMPLETE) or (phase == JobPhase.PENDING and is_refused(job.body)):
        return
    elif phase != JobPhase.RUNNING:
        yield f"{job.name} is {phase}: {_said(status)}"
    else:
        yield from _running(world, job, status, schedule)


def _conditions(job: JobRecord, status: Object, schedule: Schedule) -> Iterator[str]:
    found = {condition["type"]: condition for condition in status.get("conditions", ())}
    hindered, degraded = found.get(Condition.HINDERED), found.get(Condition.DEGRADED)
    if hindered is not None and hindered["status"] == "True" and not schedule.costs:
        yield f"{job.name} is hindered: {hindered.get('message')}"
    if degraded is not None and degraded["status"] == "True" and degraded["reason"] in LACKS and not schedule.costs:
        yield f"{job.name} is degraded: {degraded['reason']}: {degraded.get('message')}"


def _running(world: World, job: JobRecord, status: Object, schedule: Schedule) -> Iterator[str]:
    assert job.body is not None
    assert job.books is not None
    spec, books, costs = job.body["spec"], job.books, schedule.costs
    replicas, spares = spec.get("replicas", 1), spec.get("spares", 0)
    seats = [worker for worker, _ in books.seats]
    staying = [name for name in books.hands if books.wants(name)]
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
        if status.get("restarts") != books.total:
            yield f"{job.name}: its status counts {status.get('restarts')} restarts of {books.total}"
        if not _is_ready(status) and len(seats) == replicas:
            yield f"{job.name} trains, and tools do not find it Ready"
    yield from _training(world, job, seats, schedule)


def _awaits_spare(incident: Object) -> bool:
    """It is about a worker without ranks, and over once another one is ready."""
    return incident.get("cause") in (Cause.WORKER_LOST, Cause.WORKER_FROZEN) and incident.get("rank") is None


def _is_ready(status: Object) -> bool:
    """By what kubectl wait, Helm and Argo CD look at."""
    true = {condition["type"] for condition in status.get("conditions", ()) if condition["status"] == "True"}
    return true & {Condition.READY, Condition.RECONCILING, Condition.STALLED} == {Condition.READY}


def _training(world: World, job: JobRecord, seats: list[str], schedule: Schedule) -> Iterator[str]:
    training = world.trainings.of_job(job.uid)
    if Cost.STEPS in schedule.costs:
        return
    if training is None or not training.runs:
        yield f"{job.name} has never trained"
        return
    run = training.runs[-1]
    names = list(dict.fromkeys(rank.worker.name for rank in run.seated))
    if run.over or not run.ordinals or world.now() - run.stepped_at > STEP_SECONDS:
        yield f"{job.name} takes no step in round {run.round}, of {', '.join(names)}"
    elif names != seats:
        yield f"{job.name}: {', '.join(names)} train, and by the plan it should be {', '.join(seats)}"
    elif Cost.FIGURES not in schedule.costs and not _is_slow(world, run):
        yield from _no_straggler(job, run)


def _is_slow(world: World, run: Run) -> bool:
    """Some node of its, or some link."""
    nodes = [rank.worker.node for rank in run.seated]
    slow_link = any(world.network.slowness(one, other) != 1.0 for one, other in combinations(nodes, 2))
    return slow_link or any(world.nodes[node].slow != 1.0 for node in nodes)


def _no_straggler(job: JobRecord, run: Run) -> Iterator[str]:
    """Nothing is left of what was done about a slow node once none is."""
    assert job.books is not None
    shares = run.progress.course.shares
    if run.mode is SyncMode.SYNC and shares is not None and max(shares) - min(shares) > 1:
        yield f"{job.name} trains with shares {list(shares)}, and no node is slow"
    if job.books.plan["evidence_request"]:
        yield f"{job.name} is asked for evidence, and no node is slow"


def _said(status: Object) -> str:
    said = [f"{c['type']}: {c['message']}" for c in status.get("conditions", ()) if c.get("message")]
    return "; ".join(said)


def _leftovers(world: World, record: Record) -> Iterator[str]:
    """Pods and bookkeeping that belong to nobody, and what cannot be deleted."""
    for body in record.pods.values():
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata:
            yield f"pod {metadata['name']} is to be deleted, and is still there"
        elif LABEL_JOB in metadata.get("labels", {}):
            job = record.job_of(body)
            if job is None or job.body is None:
                yield f"pod {metadata['name']} belongs to no job"
            elif job.books is not None and metadata["name"] not in job.books.hands:
                yield f"pod {metadata['name']} is in no bookkeeping"
    for plural in ("trainingjobstates", "networkpolicies"):
        for body in world.api.all(plural):
            job = record.job_of(body)
            if job is not None and job.body is None:
                yield f"{plural} {body['metadata']['name']} has outlived its job"


def _node(record: Record, name: str, node: Object) -> Iterator[str]:
    quarantine = record.quarantines.get(name)
    if (is_tainted(node) or is_cordoned(node)) and not (quarantine and quarantine["spec"].get("approved")):
        yield f"{name} is held without an approved NodeQuarantine"


def _quarantine(world: World, record: Record, name: str, quarantine: Object) -> Iterator[str]:
    if "deletionTimestamp" in quarantine["metadata"]:
        yield f"NodeQuarantine {name} is to be deleted, and is still there"
    node, since = record.nodes.get(name), quarantine.get("status", {}).get("cordonedAt")
    if node is None:
        yield f"NodeQuarantine {name} has outlived its node"
    elif (
        since is not None
        and is_ready(node)
        and not world.nodes[name].sick
        and not world.nodes[name].shared_check
        and world.nodes[name].images is Images.COME
    ):
        lasts = parse_duration(quarantine["spec"].get("expiresAfter", "1h"))
        if world.wall() > parse_time(since) + lasts + EXPIRY_SECONDS:
            yield f"{name} is well, and its quarantine does not end"
