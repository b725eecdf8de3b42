"""The entry point: the objects of a manifest, or one of the cluster, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pacekeeper_analysis.errors import InputError

from ..api.names import LABEL_JOB, Object
from ..api.training_job import TrainingJob
from ..pods.manifests import find_template_refusal
from .draft import Conversion, ConversionRefused, Draft
from .fields import SourceFields
from .indexed_jobs import convert_indexed_job
from .jobsets import convert_jobset
from .pytorchjobs import convert_pytorchjob
from .trainjobs import CLUSTER_RUNTIME, RUNTIME, convert_trainjob, find_runtime_reference

PYTORCHJOB, TRAINJOB, JOBSET, JOB = "PyTorchJob", "TrainJob", "JobSet", "Job"
API_VERSIONS: Mapping[str, str] = {
    PYTORCHJOB: "kubeflow.org/v1",
    TRAINJOB: "trainer.kubeflow.org/v1alpha1",
    JOBSET: "jobset.x-k8s.io/v1alpha2",
    JOB: "batch/v1",
}
"""The kinds that can be converted."""
RUNTIME_KINDS = (CLUSTER_RUNTIME, RUNTIME)
_USE_TORCHRUN = "start the script by torchrun in a PyTorchJob or an Indexed Job, and convert that"
REFUSED_KINDS: Mapping[str, str] = {
    "TFJob": "Pacekeeper runs PyTorch; leave the job as it is",
    "JAXJob": "Pacekeeper runs PyTorch; leave the job as it is",
    "XGBoostJob": "Pacekeeper runs PyTorch; leave the job as it is",
    "PaddleJob": "Pacekeeper runs PyTorch; leave the job as it is",
    "MPIJob": f"ranks of mpirun cannot be converted; {_USE_TORCHRUN}",
    "RayJob": f"Ray has ranks of its own; {_USE_TORCHRUN}",
    "RayCluster": f"Ray has ranks of its own; {_USE_TORCHRUN}",
    "CronJob": "convert the Job in its spec.jobTemplate",
    "Pod": "give an Indexed Job with one completion, and convert that",
    "Deployment": "it is no job, and does not end; give an Indexed Job, and convert that",
    "StatefulSet": "it is no job, and does not end; give an Indexed Job, and convert that",
    "TrainingJob": "it is one already",
}
"""Kinds of jobs that cannot be converted, each with the remedy."""
UNNEEDED_KINDS: Mapping[str, str] = {
    "Service": "not needed if it only gave the pods of the job their names: workers reach each other by address",
    "NetworkPolicy": "not needed for traffic between workers: the operator gives each job a policy of its own "
    f"(label {LABEL_JOB})",
    "PodGroup": "not needed: all workers are placed, or none",
}


def convert_object(body: Object, runtime: Object | None = None, container: str = "") -> Conversion:
    """Convert a job to a TrainingJob.

    `runtime` is the runtime of a TrainJob. `container` is the container with the ranks; "": it is found.

    Raises ConversionRefused, which names the field and the remedy.
    """
    kind, version = str(body.get("kind")), str(body.get("apiVersion"))
    if kind in REFUSED_KINDS:
        raise ConversionRefused(f"kind {kind}: {REFUSED_KINDS[kind]}")
    if kind not in API_VERSIONS:
        raise ConversionRefused(f"kind {kind}: is not converted; give one of {', '.join(API_VERSIONS)}")
    if version != API_VERSIONS[kind]:
        raise ConversionRefused(
            f"apiVersion {version}: a {kind} of {API_VERSIONS[kind]} can be converted; update it first"
        )
    draft = Draft()
    try:
        source = SourceFields(body, "")
        _convert_kind(kind, draft, source, runtime, container)
    except ConversionRefused:
        raise
    except RecursionError as error:
        raise ConversionRefused(f"is nested too deeply for a {kind}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionRefused(
            f"is not a valid {kind} ({error!r}); compare it with `kubectl explain {kind.lower()}.spec`"
        ) from error
    for name in ("apiVersion", "kind"):
        source.take(name)
    if source.take("status"):
        draft.note_no_counterpart(
            "belongs to the object in the cluster; if a queue has admitted the job, Kueue has added node labels and "
            "tolerations to its template: remove those that are not yours",
            "status",
        )
    source.note_rest(draft)
    result = draft.finish()
    _require_accepted(result)
    return result


def find_runtime(body: Object, runtimes: Sequence[Object]) -> Object | None:
    """Return the runtime of a TrainJob; None: it is not among these, or the object is no TrainJob.

    Raises ConversionRefused if the TrainJob names none, or if one of these has no valid metadata.
    """
    if body.get("kind") != TRAINJOB:
        return None
    kind, name = find_runtime_reference(body)
    named = {
        (str(item.get("kind")), SourceFields(item, "").take_fields("metadata").take_text("name")): item
        for item in runtimes
    }
    return named.get((kind, name))


def _convert_kind(kind: str, draft: Draft, source: SourceFields, runtime: Object | None, container: str) -> None:
    if kind == PYTORCHJOB:
        convert_pytorchjob(draft, source, container)
    elif kind == TRAINJOB:
        convert_trainjob(draft, source, runtime, container)
    elif kind == JOBSET:
        convert_jobset(draft, source, container)
    else:
        convert_indexed_job(draft, source, container)


def _require_accepted(conversion: Conversion) -> None:
    """Raise ConversionRefused if the operator would refuse the job."""
    metadata = {"namespace": "", "uid": "", **conversion.job["metadata"]}
    try:
        job = TrainingJob.parse({**conversion.job, "metadata": metadata})
    except InputError as error:
        raise ConversionRefused(f"of the TrainingJob: {error}") from error
    if refusal := find_template_refusal(job):
        raise ConversionRefused(f"of the TrainingJob: {refusal}")
