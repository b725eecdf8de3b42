"""What one pass over a JobSet does to its TrainingJob: it creates it, or lets it follow the JobSet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...api.jobset import JOBSET_KIND, JobSetReason
from ...api.names import Object
from ...api.training_job import JobPhase
from ...convert.draft import ConversionRefused
from ...convert.merging import find_differences
from ...formatting import format_list
from ...pods.queues import ANNOTATION_DIGEST
from .conversion import (
    PLACEMENT_FIELDS,
    compute_digests,
    convert_managed_jobset,
    describe_losses,
    is_convertible_elsewhere,
    join_digests,
    read_digests,
)

RECREATE = "delete the JobSet, and apply it again"


@dataclass(frozen=True)
class SyncState:
    """Whether the TrainingJob is as the JobSet requests, for the condition SYNCED."""

    reason: JobSetReason = JobSetReason.IN_SYNC
    message: str = ""


@dataclass(frozen=True)
class JobSetDecision:
    """The result of a pass."""

    sync: SyncState
    created: Object | None = None  # TrainingJob to create
    patch: Object | None = None  # merge patch of the TrainingJob, by compare-and-swap
    has_failed: bool = False  # the JobSet fails without having had a TrainingJob


def decide_jobset(body: Object, job: Object | None) -> JobSetDecision:
    """Return what to do for a JobSet that the operator runs and that is not being deleted.

    `job` is the TrainingJob of its name; None: there is none.
    """
    has_ended = bool((body.get("status") or {}).get("terminalState"))
    if job is not None and not is_controlled_by(job, body):
        return JobSetDecision(SyncState(JobSetReason.NAME_TAKEN, _explain_taken_name(job, body)))
    if has_ended:
        return JobSetDecision(SyncState(), patch=None if job is None else _build_expiry_patch(body, job))
    try:
        conversion = convert_managed_jobset(body)
    except ConversionRefused as error:
        sync = SyncState(JobSetReason.CONVERSION_REFUSED, f"the operator cannot run this JobSet: {error}; {RECREATE}")
        if job is None:
            return JobSetDecision(sync, has_failed=not is_convertible_elsewhere(body))
        return JobSetDecision(sync, patch=_build_patch(body, job, None))
    if job is None:
        return JobSetDecision(SyncState(message=describe_losses(conversion)), created=conversion.job)
    refused = _list_refused_changes(body, job, conversion.job)
    sync = SyncState(message=describe_losses(conversion))
    if refused:
        sync = SyncState(
            JobSetReason.CHANGE_REFUSED,
            f"{format_list(refused)} of the TrainingJob stays as it is: after the creation of a JobSet, only "
            "spec.suspend and, while it is suspended, labels, annotations, nodeSelector, tolerations, and "
            f"schedulingGates of its pods may change; {RECREATE}",
        )
    return JobSetDecision(sync, patch=_build_patch(body, job, conversion.job))


def is_controlled_by(job: Object, jobset: Object) -> bool:
    """Return whether this very JobSet is the controller of the TrainingJob."""
    owner = _find_controller(job)
    return owner is not None and owner["uid"] == jobset["metadata"]["uid"]


def _find_controller(job: Object) -> Object | None:
    owners: Sequence[Object] = job["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def _explain_taken_name(job: Object, jobset: Object) -> str:
    owner, name = _find_controller(job), jobset["metadata"]["name"]
    if owner is not None and (owner["kind"], owner["name"]) == (JOBSET_KIND, name):
        return f"waits until the TrainingJob of a deleted JobSet {name} is gone: it checkpoints, and its pods leave"
    return (
        f"a TrainingJob {name} exists that is not this JobSet's, and is left alone: delete it, and this JobSet starts; "
        "or give the JobSet another name"
    )


def _list_refused_changes(body: Object, job: Object, desired: Object) -> list[str]:
    """Return the fields of the TrainingJob that differ because the JobSet's spec has changed, but for its placement."""
    _, fixed = read_digests(job)
    if fixed in ("", compute_digests(body)[1]):
        return []
    allowed = tuple(f"spec.template.{parent}.{name}" for parent, name in PLACEMENT_FIELDS)
    current, wanted = job["spec"], {name: value for name, value in desired["spec"].items() if name != "suspend"}
    removed = find_differences(current["template"], wanted["template"], "spec.template")
    found = dict.fromkeys([*find_differences(wanted, current, "spec"), *removed])
    return [path for path in found if not path.startswith(allowed)]


def _build_patch(body: Object, job: Object, desired: Object | None) -> Object | None:
    """Return the patch by which the TrainingJob follows the JobSet's suspension and placement; None: no change.

    The placement may change only while the job is suspended and has no pods. `desired` is None if the JobSet cannot be
    converted any more: the job then is suspended, and resumes where it was.
    """
    suspended, wanted = bool(job["spec"].get("suspend")), bool(body["spec"].get("suspend"))
    phase = (job.get("status") or {}).get("phase")
    is_at_rest = suspended and phase in (None, JobPhase.SUSPENDED)
    placed, fixed = read_digests(job)
    is_moved = placed not in ("", compute_digests(body)[0])
    template = {} if desired is None else _build_template_patch(job["spec"]["template"], desired["spec"]["template"])
    if (desired is None and is_moved) or (template and is_moved and not is_at_rest):
        wanted = wanted or suspended or desired is not None  # first leave the nodes, or stay where the job is
    spec: Object = {} if wanted == suspended else {"suspend": wanted}
    metadata: Object = {"resourceVersion": job["metadata"]["resourceVersion"]}
    if is_at_rest and desired is not None and (template or is_moved):
        spec |= {"template": template} if template else {}
        metadata["annotations"] = {ANNOTATION_DIGEST: join_digests(body, fixed)}
    return {"metadata": metadata, "spec": spec} if spec or len(metadata) > 1 else None


def _build_template_patch(current: Object, desired: Object) -> Object:
    """Return the merge patch of the placement in a pod template."""
    patch: Object = {}
    for parent, name in PLACEMENT_FIELDS:
        before, after = ((template.get(parent) or {}).get(name) for template in (current, desired))
        if (before or None) == (after or None):
            continue
        if isinstance(after, dict):
            after = {**dict.fromkeys(before or (), None), **after}
        patch.setdefault(parent, {})[name] = after or None
    return patch


def _build_expiry_patch(body: Object, job: Object) -> Object | None:
    """Return the patch by which the TrainingJob expires with the JobSet's TTL; None: no change.

    Before the JobSet's end is in its status, the TrainingJob has no TTL: a job that is gone would be created again.
    """
    ttl = body["spec"].get("ttlSecondsAfterFinished")
    if ttl in (None, (job["spec"].get("runPolicy") or {}).get("ttlSecondsAfterFinished")):
        return None
    metadata = {"resourceVersion": job["metadata"]["resourceVersion"]}
    return {"metadata": metadata, "spec": {"runPolicy": {"ttlSecondsAfterFinished": ttl}}}
