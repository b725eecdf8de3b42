"""Queues that admit jobs, by Kueue's protocol for controllers of custom kinds. Pure.

A job with the label `kueue.x-k8s.io/queue-name` has a Workload, which lists its pods. Kueue reserves quota for it
(condition Admitted) or takes it away (Evicted). With the quota come the number of pods and the flavors of nodes of each
pod set. Until then, and after an eviction, the job is held as if it were suspended. Its quota is returned when none of
its pods is left.

If a flavor has a topology, the admission also assigns each pod to a part of it. The pods are created with a scheduling
gate. Kueue adds the node labels of its place to each pod, and removes the gate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pacekeeper_analysis.protocol.plan import Stop

from ..api.formats import format_time
from ..api.names import GROUP, LABEL_POD_SET, Object
from ..api.training_job import JobPhase, JobStatus, TrainingJob
from ..state.desired_state import DesiredState
from .manifests import build_owner_reference

KUEUE = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Newest first. The fields used here are the same in both, except for priorities."""
LABEL_JOB_UID = f"{KUEUE}/job-uid"
ANNOTATION_WORKLOAD = f"{KUEUE}/workload"
"""Name of the Workload of a pod whose place in a topology Kueue chooses."""
TOPOLOGY_GATE = f"{KUEUE}/topology"
ANNOTATION_UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"
_TOPOLOGY_LEVEL_ANNOTATIONS = {
    "required": f"{KUEUE}/podset-required-topology",
    "preferred": f"{KUEUE}/podset-preferred-topology",
}
_HOSTNAME_LEVEL = "kubernetes.io/hostname"
_REQUEUED_REASONS = frozenset({"Preempted", "NodeFailures"})
"""Evictions after which the job's controller queues the Workload again. After any other, Kueue does so itself."""
_WAIT_FOR_START = ("False", "WaitForStart", "Not all workers run yet")
ANNOTATION_DIGEST = f"{GROUP}/digest"
"""Digest of what was requested.

The object itself cannot be compared: the API server fills in defaults, and operators change.
"""
WORKERS_POD_SET, SPARES_POD_SET = "workers", "spares"
NOT_SERVED = "the job names a queue, and this cluster serves no Workloads: install Kueue, or remove the label"
NOT_SERVED_NOW = "this cluster serves no Workloads at the moment, so the queue's last decision stands: check Kueue"
NOT_MADE = "its Workload has not been created yet"
NOT_SENT = "the Workload that its label kueue.x-k8s.io/prebuilt-workload-name names has not arrived yet"
NOT_ITS_OWN = "the Workload of its name is another job's, or asks for other pods than this job has"
OTHER_PODS = "it asks for other pods than were admitted, and is queued again"


@dataclass(frozen=True)
class NodePlacement:
    """The node labels and tolerations of the pods of a set, from their flavors."""

    labels: Mapping[str, str] = field(default_factory=dict)  # of nodes
    tolerations: tuple[Object, ...] = ()


@dataclass(frozen=True)
class PriorityClass:
    """The priority class of a job in its queue."""

    name: str
    is_pod_class: bool  # a PriorityClass of Kubernetes; otherwise a WorkloadPriorityClass of Kueue


@dataclass(frozen=True)
class QueueDecision:
    """The queue's decision about a job."""

    admitted: bool
    message: str = ""  # why it is not admitted
    counts: Mapping[str, int] = field(default_factory=dict)  # number of pods, by pod set
    flavors: Mapping[str, frozenset[str]] = field(default_factory=dict)  # names of flavors, by pod set
    placements: Mapping[str, NodePlacement] = field(default_factory=dict)  # by flavor
    topology_levels: Mapping[str, frozenset[str]] = field(default_factory=dict)  # node labels, by pod set with topology

    def assigns_nodes(self, pod_set: str) -> bool:
        """Return whether the topology of the pod set has single nodes as its lowest level."""
        return _HOSTNAME_LEVEL in self.topology_levels.get(pod_set, ())

    def find_placement(self, pod_set: str) -> NodePlacement:
        """Return the placement of the pods of a set."""
        flavors = sorted(self.flavors.get(pod_set, ()))
        labels = {name: value for flavor in flavors for name, value in self.placements[flavor].labels.items()}
        return NodePlacement(
            labels, tuple(toleration for flavor in flavors for toleration in self.placements[flavor].tolerations)
        )


@dataclass(frozen=True)
class WorkloadProgress:
    """The progress of a job, as its queue has to see it."""

    pods_left: bool  # pods that have not ended
    ready: bool = False  # all of its workers run
    finished: str = ""  # how it has ended, as a message
    failed: bool = False


def apply_queue_decision(job: TrainingJob, decision: QueueDecision | None) -> TrainingJob:
    """Return the job as its queue admits it: held, or with as many workers as were admitted."""
    if not job.queue or decision is None or job.spec.suspend:
        return job
    if not decision.admitted:
        return replace(job, spec=replace(job.spec, suspend=True), queue_hold_reason=decision.message)
    replicas, spares = decision.counts.get(WORKERS_POD_SET, job.spec.replicas), decision.counts.get(SPARES_POD_SET, 0)
    admitted = replace(job.spec, replicas=min(replicas, job.spec.replicas), spares=min(spares, job.spec.spares))
    return replace(job, spec=admitted)


def restore_queue_decision(desired: DesiredState) -> QueueDecision:
    """Return the decision from the job's state, if the queue cannot be read: a job that trains was admitted."""
    slots = len(desired.plan.members)
    if not slots or desired.plan.stop is Stop.SUSPEND:
        return QueueDecision(admitted=False, message=NOT_SERVED)
    staying = sum(not worker.leaving for worker in desired.state.placement.workers)
    return QueueDecision(admitted=True, counts={WORKERS_POD_SET: slots, SPARES_POD_SET: max(0, staying - slots)})


def workload_name(job: TrainingJob) -> str:
    if job.prebuilt_workload:
        return job.prebuilt_workload
    digest = hashlib.sha256(f"{job.name}/{job.uid}".encode()).hexdigest()[:5]
    return f"trainingjob-{job.name[:200]}-{digest}"


def build_workload(job: TrainingJob, version: str, templates: Mapping[str, Object], value: int = 0) -> Object:
    """Build the job's Workload. `templates` are pod templates by pod set, and `value` is that of its priority class."""
    spec = {"queueName": job.queue, "podSets": list(_build_pod_sets(job, templates)), "active": not job.spec.suspend}
    spec |= {
        name: setting
        for name, setting in build_priority_fields(find_priority_class(job), version, value).items()
        if setting is not None
    }
    return {
        "apiVersion": f"{KUEUE}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job),
            "namespace": job.namespace,
            "labels": {LABEL_JOB_UID: job.uid},
            "annotations": {ANNOTATION_DIGEST: _compute_digest(job)},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": spec,
    }


def _build_pod_sets(job: TrainingJob, templates: Mapping[str, Object]) -> Sequence[Object]:
    spec, topology = job.spec, _build_topology_request(job)
    workers: Object = {"name": WORKERS_POD_SET, "count": spec.replicas, "template": templates[WORKERS_POD_SET]}
    if spec.effective_min_replicas < spec.replicas:
        workers["minCount"] = max(1, spec.effective_min_replicas)
    spares: Object = {"name": SPARES_POD_SET, "count": spec.spares, "template": templates[SPARES_POD_SET]}
    return [pod_set | topology for pod_set in ([workers, spares] if spec.spares else [workers])]


def _build_topology_request(job: TrainingJob) -> Object:
    """Return the field `topologyRequest` from the annotations of the job's template; {}: they request none."""
    annotations = _read_template_annotations(job)
    for name, annotation in _TOPOLOGY_LEVEL_ANNOTATIONS.items():
        if level := annotations.get(annotation):
            return {"topologyRequest": {name: str(level)}}
    if annotations.get(ANNOTATION_UNCONSTRAINED) == "true":
        return {"topologyRequest": {"unconstrained": True}}
    return {}


def _read_template_annotations(job: TrainingJob) -> Mapping[str, Any]:
    return (job.spec.template.get("metadata") or {}).get("annotations") or {}


def add_pod_set(pod: Object, job: TrainingJob, decision: QueueDecision, pod_set: str) -> None:
    """Assign the pod to a pod set of its job's Workload. With a topology, Kueue chooses its place before it starts."""
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"][LABEL_POD_SET] = pod_set
    if pod_set not in decision.topology_levels:
        return
    metadata["annotations"][ANNOTATION_WORKLOAD] = workload_name(job)
    if not _build_topology_request(job):  # Kueue counts a pod without such an annotation as one outside its quotas
        metadata["annotations"][ANNOTATION_UNCONSTRAINED] = "true"
    spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), {"name": TOPOLOGY_GATE}]


def find_priority_class(job: TrainingJob) -> PriorityClass | None:
    """Return the job's priority class; None: the default priority."""
    if job.priority_class:
        return PriorityClass(job.priority_class, is_pod_class=False)
    name = (job.spec.template.get("spec") or {}).get("priorityClassName", "")
    return PriorityClass(str(name), is_pod_class=True) if name else None


def build_priority_fields(priority_class: PriorityClass | None, version: str, value: int) -> Object:
    """Return the priority fields of a Workload's spec. A field that is None is left out."""
    if version == "v1beta1":
        source = (
            "scheduling.k8s.io/priorityclass"
            if priority_class and priority_class.is_pod_class
            else f"{KUEUE}/workloadpriorityclass"
        )
        reference: Object = {
            "priorityClassName": priority_class and priority_class.name,
            "priorityClassSource": priority_class and source,
        }
    else:
        group, kind = (
            ("scheduling.k8s.io", "PriorityClass")
            if priority_class and priority_class.is_pod_class
            else (KUEUE, "WorkloadPriorityClass")
        )
        reference = {"priorityClassRef": priority_class and {"group": group, "kind": kind, "name": priority_class.name}}
    return {**reference, "priority": None if priority_class is None else value}


def read_priority_class(workload: Object) -> PriorityClass | None:
    """Return the priority class of a Workload."""
    spec = workload["spec"]
    reference = spec.get("priorityClassRef") or {}
    name = reference.get("name") or spec.get("priorityClassName")
    source = reference.get("group") or spec.get("priorityClassSource", "")
    return PriorityClass(name, is_pod_class=source.startswith("scheduling.k8s.io")) if name else None


def _compute_digest(job: TrainingJob) -> str:
    """Return the digest of what the user requests.

    It excludes the sidecar: an operator that changes the sidecar must not queue any job again.
    """
    spec = job.spec
    requested = [job.queue, spec.replicas, spec.effective_min_replicas, spec.spares, spec.template]
    return hashlib.sha256(json.dumps(requested, sort_keys=True).encode()).hexdigest()[:16]


def has_requested_pods(workload: Object, job: TrainingJob) -> bool:
    """Return whether the Workload has the pods and the queue that the job requests."""
    return bool(workload["metadata"].get("annotations", {}).get(ANNOTATION_DIGEST, "") == _compute_digest(job))


def is_owned_by_other_job(workload: Object, job: TrainingJob) -> bool:
    """Return whether the Workload belongs to another job, or was not made for what this job requests."""
    owners = workload["metadata"].get("ownerReferences", ())
    return any(owner["uid"] != job.uid for owner in owners) or (
        bool(job.prebuilt_workload) and not has_requested_pods(workload, job)
    )


def build_adoption_patch(workload: Object, job: TrainingJob) -> Object | None:
    """Return the patch that makes a Workload from another cluster the job's own.

    None: it is already, or was created here.
    """
    if not job.prebuilt_workload or workload["metadata"].get("ownerReferences"):
        return None
    return {"labels": {LABEL_JOB_UID: job.uid}, "ownerReferences": [build_owner_reference(job)]}


def read_remote_progress(status: JobStatus) -> WorkloadProgress:
    """Return the progress of a job that another controller runs, from the status that it writes."""
    failed = status.phase is JobPhase.FAILED
    ended = failed or status.phase is JobPhase.COMPLETE
    message = str(status.message or status.phase) if ended else ""
    return WorkloadProgress(False, status.phase is JobPhase.RUNNING, message, failed)


def has_quota(workload: Object) -> bool:
    return _is_condition_true(workload, "QuotaReserved")


def read_queue_decision(workload: Object, placements: Mapping[str, NodePlacement]) -> QueueDecision:
    """Return the queue's decision. `placements` are those of the Workload's flavors, by name."""
    hold_reason = _find_hold_reason(workload)
    if hold_reason:
        return QueueDecision(admitted=False, message=hold_reason)
    counts = {
        assignment["name"]: int(assignment["count"])
        for assignment in _read_assignments(workload)
        if "count" in assignment
    }
    levels = {
        assignment["name"]: frozenset(topology.get("levels", ()))
        for assignment in _read_assignments(workload)
        if (topology := assignment.get("topologyAssignment"))
    }
    return QueueDecision(
        admitted=True,
        counts=counts,
        flavors=_read_flavors_by_set(workload),
        placements=placements,
        topology_levels=levels,
    )


def read_flavors(workload: Object) -> frozenset[str]:
    """Return the names of the flavors, if the Workload is admitted."""
    return (
        frozenset[str]()
        if _find_hold_reason(workload)
        else frozenset[str]().union(*_read_flavors_by_set(workload).values())
    )


def _read_flavors_by_set(workload: Object) -> Mapping[str, frozenset[str]]:
    """Return the names of the flavors by pod set."""
    return {
        assignment["name"]: frozenset(assignment.get("flavors", {}).values())
        for assignment in _read_assignments(workload)
    }


def _read_assignments(workload: Object) -> Sequence[Object]:
    assignments: Sequence[Object] = (workload["status"].get("admission") or {}).get("podSetAssignments", ())
    return assignments


def read_node_placement(flavor: Object) -> NodePlacement:
    """Return the placement of a ResourceFlavor."""
    spec = flavor.get("spec", {})
    return NodePlacement(spec.get("nodeLabels", {}), tuple(spec.get("tolerations", ())))


def _find_hold_reason(workload: Object) -> str:
    """Return why the job may not have pods now; "" if it may."""
    evicted, finished = _find_condition(workload, "Evicted"), _find_condition(workload, "Finished")
    if finished.get("status") == "True":
        return f"its Workload is finished: {finished.get('message', '')}"
    is_evicted = evicted.get("status") == "True"
    is_admitted = _is_condition_true(workload, "Admitted")
    if is_evicted and (is_admitted or has_quota(workload) or not workload["spec"].get("active", True)):
        return f"evicted ({evicted.get('reason', '')}): {evicted.get('message', '')}"
    if is_admitted:
        return ""
    reserved = _find_condition(workload, "QuotaReserved")
    queue = workload["spec"]["queueName"]
    detail = f": {reserved['message']}" if reserved.get("message") else ""
    eviction = f" after an eviction ({evicted.get('reason', '')})" if is_evicted else ""  # True until it is admitted
    return f"waits in queue {queue}{eviction}{detail}"


def build_status_update(workload: Object, progress: WorkloadProgress, now: float) -> Object | None:
    """Return the Workload's status that the job's controller has to write; None: no change. `now` is in seconds."""
    changes: dict[str, tuple[str, str, str]] = {}
    quota_released = False
    if progress.finished:
        if not progress.pods_left:
            changes["Finished"] = ("True", "Failed" if progress.failed else "Succeeded", progress.finished)
    elif _is_condition_true(workload, "Evicted") and has_quota(workload) and not progress.pods_left:
        evicted, quota_released = _find_condition(workload, "Evicted"), True
        eviction_message, requeue = evicted.get("message", ""), evicted.get("reason") in _REQUEUED_REASONS
        changes["Requeued"] = ("True" if requeue else "False", evicted.get("reason", "Evicted"), eviction_message)
        changes["QuotaReserved"] = ("False", "Pending", eviction_message)
        changes["Admitted"] = ("False", "NoReservation", "The workload has no reservation")
        changes["PodsReady"] = _WAIT_FOR_START
    elif _is_condition_true(workload, "Admitted") and not _is_condition_true(workload, "Evicted"):
        changes["PodsReady"] = _choose_ready_condition(workload, ready=progress.ready)
    elif not _is_condition_true(workload, "Admitted") and _find_condition(workload, "PodsReady"):
        changes["PodsReady"] = _WAIT_FOR_START  # otherwise Kueue takes it as ready at its next admission
    changed = {kind: change for kind, change in changes.items() if _read_condition_state(workload, kind) != change[:2]}
    if not changed and not quota_released:
        return None
    conditions = {condition["type"]: condition for condition in workload.get("status", {}).get("conditions", ())}
    for kind, (state, reason, message) in changed.items():
        since = conditions.get(kind, {}).get("lastTransitionTime")
        unchanged = conditions.get(kind, {}).get("status") == state
        conditions[kind] = {
            "type": kind,
            "status": state,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since if unchanged and since else format_time(now),
            "observedGeneration": workload["metadata"].get("generation", 0),
        }
    status: Object = {"conditions": list(conditions.values())}
    return status | {"admission": None} if quota_released else status


def _choose_ready_condition(workload: Object, *, ready: bool) -> tuple[str, str, str]:
    """Return the condition PodsReady of an admitted job.

    Kueue's `waitForPodsReady` evicts a job with the reason WaitForStart by the time since its admission. A job that has
    trained for longer than this timeout must never have that reason: a rank's restart would evict it at once.
    """
    status, reason = _read_condition_state(workload, "PodsReady")
    if ready:
        return "True", "Recovered" if reason in ("WaitForRecovery", "Recovered") else "Started", "All workers run"
    if status == "True" or reason == "WaitForRecovery":
        return "False", "WaitForRecovery", "A worker is missing"
    return _WAIT_FOR_START


def _read_condition_state(workload: Object, kind: str) -> tuple[str, str]:
    condition = _find_condition(workload, kind)
    return condition.get("status", ""), condition.get("reason", "")


def _is_condition_true(workload: Object, kind: str) -> bool:
    return _find_condition(workload, kind).get("status") == "True"


def _find_condition(workload: Object, kind: str) -> Mapping[str, Any]:
    conditions = workload.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})
