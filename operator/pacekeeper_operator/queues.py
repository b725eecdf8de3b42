"""Jobs that a queue admits, by Kueue's protocol for controllers of kinds of their own. Pure.

A job with the label `kueue.x-k8s.io/queue-name` has a Workload, which says how many pods of which form it needs. Kueue
reserves quota for it (condition Admitted, with a number of pods and flavours of nodes for each set of them) or takes it
away (Evicted). In between the job is held, as if it were suspended; its quota is given back when no pod of it is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pacekeeper_analysis.plan import Stop

from .api import GROUP, TrainingJob, JobPhase, JobStatus, Object, format_time
from .manifests import build_owner_reference
from .state import DesiredState

KUEUE = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Newest first. What is used of them here is the same in both, but for priorities."""
LABEL_JOB_UID = f"{KUEUE}/job-uid"
ANNOTATION_DIGEST = f"{GROUP}/digest"
"""Of what was asked for: the API server fills in defaults, and operators change."""
WORKERS_POD_SET, SPARES_POD_SET = "workers", "spares"
NOT_SERVED = "the job names a queue, and this cluster serves no Workloads: install Kueue, or remove the label"
NOT_SERVED_NOW = "this cluster serves no Workloads at the moment, so the queue's last word stands: look at Kueue"
NOT_MADE = "its Workload has not been made yet"
NOT_SENT = "the Workload that its label kueue.x-k8s.io/prebuilt-workload-name names has not come yet"
NOT_ITS_OWN = "the Workload of its name is another job's, or asks for other pods than this job has"
OTHER_PODS = "it asks for other pods than were admitted, and is queued anew"


@dataclass(frozen=True)
class NodePlacement:
    """Where the pods of a set may be, by the flavours that they were given."""

    labels: Mapping[str, str] = field(default_factory=dict)  # of nodes
    tolerations: tuple[Object, ...] = ()


@dataclass(frozen=True)
class PriorityClass:
    """By which a job stands in its queue."""

    name: str
    is_pod_class: bool  # a PriorityClass of Kubernetes; otherwise a WorkloadPriorityClass of Kueue


@dataclass(frozen=True)
class QueueDecision:
    """What the queue says of a job."""

    admitted: bool
    message: str = ""  # why it is not
    counts: Mapping[str, int] = field(default_factory=dict)  # pods, by set
    flavors: Mapping[str, frozenset[str]] = field(default_factory=dict)  # names, by set
    placements: Mapping[str, NodePlacement] = field(default_factory=dict)  # by flavour

    def find_placement(self, *, spare: bool) -> NodePlacement:
        """Of a worker's pod, or of a spare's."""
        of = sorted(self.flavors.get(SPARES_POD_SET if spare else WORKERS_POD_SET, ()))
        labels = {name: value for flavor in of for name, value in self.placements[flavor].labels.items()}
        return NodePlacement(labels, tuple(each for flavor in of for each in self.placements[flavor].tolerations))


@dataclass(frozen=True)
class WorkloadProgress:
    """How far the job is, as its queue is to know it."""

    pods_left: bool  # that have not ended
    ready: bool = False  # all of its ranks train
    finished: str = ""  # how it has ended, in words
    failed: bool = False


def apply_queue_decision(job: TrainingJob, decision: QueueDecision | None) -> TrainingJob:
    """The job as its queue lets it be: held, or with as many workers as were admitted."""
    if not job.queue or decision is None or job.spec.suspend:
        return job
    if not decision.admitted:
        return replace(job, spec=replace(job.spec, suspend=True), queued=decision.message)
    replicas, spares = decision.counts.get(WORKERS_POD_SET, job.spec.replicas), decision.counts.get(SPARES_POD_SET, 0)
    admitted = replace(job.spec, replicas=min(replicas, job.spec.replicas), spares=min(spares, job.spec.spares))
    return replace(job, spec=admitted)


def restore_queue_decision(draft: DesiredState) -> QueueDecision:
    """Return what a job's bookkeeping says of its queue, where that cannot be asked: whoever trains was admitted."""
    seats = len(draft.plan.members)
    if not seats or draft.plan.stop is not Stop.NO:
        return QueueDecision(admitted=False, message=NOT_SERVED)
    staying = sum(not worker.leaving for worker in draft.state.placement.workers)
    return QueueDecision(admitted=True, counts={WORKERS_POD_SET: seats, SPARES_POD_SET: max(0, staying - seats)})


def workload_name(job: TrainingJob) -> str:
    if job.prebuilt:
        return job.prebuilt
    digest = hashlib.sha256(f"{job.name}/{job.uid}".encode()).hexdigest()[:5]
    return f"trainingjob-{job.name[:200]}-{digest}"


def build_workload(job: TrainingJob, version: str, templates: Mapping[str, Object], value: int = 0) -> Object:
    """As it is to be. `templates`: pod templates, by set; `value`: of its priority class."""
    spec = {"queueName": job.queue, "podSets": list(_build_pod_sets(job, templates)), "active": not job.spec.suspend}
    spec |= {field: each for field, each in build_priority_fields(find_priority_class(job), version, value).items() if each is not None}
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
    spec = job.spec
    workers: Object = {"name": WORKERS_POD_SET, "count": spec.replicas, "template": templates[WORKERS_POD_SET]}
    if spec.effective_min_replicas < spec.replicas:
        workers["minCount"] = max(1, spec.effective_min_replicas)
    return [workers, {"name": SPARES_POD_SET, "count": spec.spares, "template": templates[SPARES_POD_SET]}][: 1 + bool(spec.spares)]


def find_priority_class(job: TrainingJob) -> PriorityClass | None:
    """None: it stands there as anybody."""
    if job.priority_class:
        return PriorityClass(job.priority_class, is_pod_class=False)
    name = (job.spec.template.get("spec") or {}).get("priorityClassName", "")
    return PriorityClass(str(name), is_pod_class=True) if name else None


def build_priority_fields(of: PriorityClass | None, version: str, value: int) -> Object:
    """Fields of a Workload's spec; what is None is not there."""
    if version == "v1beta1":
        source = "scheduling.k8s.io/priorityclass" if of and of.is_pod_class else f"{KUEUE}/workloadpriorityclass"
        named: Object = {"priorityClassName": of and of.name, "priorityClassSource": of and source}
    else:
        group, kind = ("scheduling.k8s.io", "PriorityClass") if of and of.is_pod_class else (KUEUE, "WorkloadPriorityClass")
        named = {"priorityClassRef": of and {"group": group, "kind": kind, "name": of.name}}
    return {**named, "priority": None if of is None else value}


def read_priority_class(found: Object) -> PriorityClass | None:
    """By which the Workload stands in its queue."""
    spec = found["spec"]
    reference = spec.get("priorityClassRef") or {}
    name = reference.get("name") or spec.get("priorityClassName")
    source = reference.get("group") or spec.get("priorityClassSource", "")
    return PriorityClass(name, is_pod_class=source.startswith("scheduling.k8s.io")) if name else None


def _compute_digest(job: TrainingJob) -> str:
    """Of what the user asks for: an operator that gives pods another sidecar must queue no job anew."""
    spec = job.spec
    asked = [job.queue, spec.replicas, spec.effective_min_replicas, spec.spares, spec.template]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def has_requested_pods(found: Object, job: TrainingJob) -> bool:
    """Whether the Workload has the pods and the queue that the job wants."""
    return bool(found["metadata"].get("annotations", {}).get(ANNOTATION_DIGEST, "") == _compute_digest(job))


def is_owned_by_other_job(found: Object, job: TrainingJob) -> bool:
    """Whoever is admitted by it must have asked for it."""
    owners = found["metadata"].get("ownerReferences", ())
    return any(owner["uid"] != job.uid for owner in owners) or (bool(job.prebuilt) and not has_requested_pods(found, job))


def build_adoption_patch(found: Object, job: TrainingJob) -> Object | None:
    """What makes a Workload that was sent the job's own, so that it goes with it; None: it is so already."""
    if not job.prebuilt or found["metadata"].get("ownerReferences"):
        return None
    return {"labels": {LABEL_JOB_UID: job.uid}, "ownerReferences": [build_owner_reference(job)]}


def read_remote_progress(status: JobStatus) -> WorkloadProgress:
    """Of a job that another controller runs, by the status which that one writes."""
    failed = status.phase is JobPhase.FAILED
    over = failed or status.phase is JobPhase.COMPLETE
    words = str(status.message or status.phase) if over else ""
    return WorkloadProgress(False, status.phase is JobPhase.RUNNING, words, failed)


def has_quota(found: Object) -> bool:
    return _is_condition_true(found, "QuotaReserved")


def read_queue_decision(found: Object, placements: Mapping[str, NodePlacement]) -> QueueDecision:
    """`placing`: of its flavours, by name."""
    words = _find_hold_reason(found)
    if words:
        return QueueDecision(admitted=False, message=words)
    counts = {each["name"]: int(each["count"]) for each in _read_assignments(found) if "count" in each}
    return QueueDecision(admitted=True, counts=counts, flavors=_read_flavors_by_set(found), placements=placements)


def read_flavors(found: Object) -> frozenset[str]:
    """Names, where it is admitted."""
    return frozenset[str]() if _find_hold_reason(found) else frozenset[str]().union(*_read_flavors_by_set(found).values())


def _read_flavors_by_set(found: Object) -> Mapping[str, frozenset[str]]:
    """By set."""
    return {each["name"]: frozenset(each.get("flavors", {}).values()) for each in _read_assignments(found)}


def _read_assignments(found: Object) -> Sequence[Object]:
    assigned: Sequence[Object] = (found["status"].get("admission") or {}).get("podSetAssignments", ())
    return assigned


def read_node_placement(flavor: Object) -> NodePlacement:
    """A ResourceFlavor."""
    spec = flavor.get("spec", {})
    return NodePlacement(spec.get("nodeLabels", {}), tuple(spec.get("tolerations", ())))


def _find_hold_reason(found: Object) -> str:
    """Why the job may not have pods now; "": it may."""
    evicted, finished = _find_condition(found, "Evicted"), _find_condition(found, "Finished")
    if finished.get("status") == "True":
        return f"its Workload is finished: {finished.get('message', '')}"
    if evicted.get("status") == "True":
        return f"evicted ({evicted.get('reason', '')}): {evicted.get('message', '')}"
    if _is_condition_true(found, "Admitted"):
        return ""
    reserved = _find_condition(found, "QuotaReserved")
    queue = found["spec"]["queueName"]
    said = f": {reserved['message']}" if reserved.get("message") else ""
    return f"waits in queue {queue}{said}"


def build_status_update(found: Object, progress: WorkloadProgress, now: float) -> Object | None:
    """The Workload's status as the job's controller has to make it; None: it is so already. `now`: seconds."""
    news: dict[str, tuple[str, str, str]] = {}
    given_back = False
    if progress.finished:
        if not progress.pods_left:
            news["Finished"] = ("True", "Failed" if progress.failed else "Succeeded", progress.finished)
    elif _is_condition_true(found, "Evicted") and has_quota(found) and not progress.pods_left:
        evicted, given_back = _find_condition(found, "Evicted"), True
        words, again = evicted.get("message", ""), evicted.get("reason") in ("Preempted", "AdmissionCheck")
        news["Requeued"] = ("True" if again else "False", evicted.get("reason", "Evicted"), words)
        news["QuotaReserved"] = ("False", "Pending", words)
        news["Admitted"] = ("False", "NoReservation", "The workload has no reservation")
    elif _is_condition_true(found, "Admitted") and not _is_condition_true(found, "Evicted"):
        ready = progress.ready
        news["PodsReady"] = (str(ready), "Started" if ready else "WaitForStart", "All ranks train" if ready else "")
    changed = {kind: said for kind, said in news.items() if _read_condition_state(found, kind) != said[:2]}
    if not changed and not given_back:
        return None
    before = {condition["type"]: condition for condition in found.get("status", {}).get("conditions", ())}
    for kind, (holds, reason, message) in changed.items():
        since = before.get(kind, {}).get("lastTransitionTime")
        same = before.get(kind, {}).get("status") == holds
        before[kind] = {
            "type": kind,
            "status": holds,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since if same and since else format_time(now),
            "observedGeneration": found["metadata"].get("generation", 0),
        }
    status: Object = {"conditions": list(before.values())}
    return status | {"admission": None} if given_back else status


def _read_condition_state(found: Object, kind: str) -> tuple[str, str]:
    condition = _find_condition(found, kind)
    return condition.get("status", ""), condition.get("reason", "")


def _is_condition_true(found: Object, kind: str) -> bool:
    return _find_condition(found, kind).get("status") == "True"


def _find_condition(found: Object, kind: str) -> Mapping[str, Any]:
    conditions = found.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})
