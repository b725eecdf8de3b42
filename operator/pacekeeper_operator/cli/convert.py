"""`convert`: reads jobs of other kinds from files or the cluster, and writes TrainingJobs. It changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper_analysis.errors import InputError

from ..api.names import Object
from ..convert.draft import Conversion, ConversionRefused
from ..convert.objects import (
    API_VERSIONS,
    REFUSED_KINDS,
    RUNTIME_KINDS,
    UNNEEDED_KINDS,
    convert_object,
    find_runtime,
)
from ..convert.trainjobs import CLUSTER_RUNTIME, find_runtime_reference
from .kubectl import Kubectl, KubectlError
from .text import strip_control_characters

_RESOURCES: Mapping[str, str] = {
    "pytorchjob": "pytorchjobs.v1.kubeflow.org",
    "trainjob": "trainjobs.v1alpha1.trainer.kubeflow.org",
    "jobset": "jobsets.v1alpha2.jobset.x-k8s.io",
    "job": "jobs.v1.batch",
}
"""Kinds that a user may name, and their full names: other groups may have kinds of the same name."""
_RUNTIME_RESOURCES: Mapping[str, str] = {
    kind: f"{kind.lower()}s.v1alpha1.trainer.kubeflow.org" for kind in RUNTIME_KINDS
}


@dataclass(frozen=True)
class Report:
    """TrainingJobs, and the text about them."""

    jobs: tuple[Object, ...]
    text: str


def convert_sources(kubectl: Kubectl, files: Sequence[str], target: str, container: str) -> Report:
    """Convert all jobs of the files, and `target` (KIND/NAME) of the cluster.

    Raises InputError if a job cannot be converted, or if there is none.
    """
    bodies = [body for file in files for body in kubectl.read_manifests(file)]
    if target:
        bodies.append(_read_target(kubectl, target))
    runtimes = [body for body in bodies if body.get("kind") in RUNTIME_KINDS]
    jobs: list[Object] = []
    lines: list[str] = []
    refusals: list[str] = []
    for body in bodies:
        if body in runtimes:
            continue
        if not _is_job(body):
            lines.append(strip_control_characters(_describe_other(body)))
            continue
        try:
            conversion = convert_object(body, _find_runtime(kubectl, body, runtimes), container)
        except ConversionRefused as error:
            refusals.append(f"{_name_object(body)}: {error}")
            continue
        jobs.append(conversion.job)
        lines.append(_format_notes(body, conversion))
    if refusals:
        raise InputError("\n".join(refusals))
    if not jobs:
        found = ", ".join(map(_name_object, bodies)) or "nothing"
        raise InputError(f"there is no job to convert, but {found}; give one of {', '.join(API_VERSIONS)}")
    return Report(tuple(jobs), "\n".join(lines))


def _read_target(kubectl: Kubectl, target: str) -> Object:
    kind, _, name = target.partition("/")
    resource = _RESOURCES.get(kind.partition(".")[0].lower().removesuffix("s"))
    if resource is None or not name:
        raise InputError(f"{target!r} must be KIND/NAME, where KIND is one of {', '.join(_RESOURCES)}")
    return kubectl.get(resource, name)


def _find_runtime(kubectl: Kubectl, body: Object, runtimes: Sequence[Object]) -> Object | None:
    """Return the runtime of a TrainJob from the files or else the cluster; None for other kinds.

    Raises ConversionRefused if there is none.
    """
    if body.get("kind") != "TrainJob" or (found := find_runtime(body, runtimes)) is not None:
        return found if body.get("kind") == "TrainJob" else None
    kind, name = find_runtime_reference(body)
    namespace = kubectl.namespace or (body.get("metadata") or {}).get("namespace") or ""
    reader = replace(kubectl, namespace="" if kind == CLUSTER_RUNTIME else namespace)
    try:
        return reader.get(_RUNTIME_RESOURCES[kind], name)
    except KubectlError as error:
        raise ConversionRefused(
            f"spec.runtimeRef: the {kind} {name} is in none of the files, and cannot be read from the cluster "
            f"({error}); give its manifest by -f"
        ) from error


def _is_job(body: Object) -> bool:
    kind = str(body.get("kind"))
    return kind in API_VERSIONS or kind in REFUSED_KINDS


def _describe_other(body: Object) -> str:
    text = UNNEEDED_KINDS.get(str(body.get("kind")), "is not converted; apply it as before")
    return f"{_name_object(body)}: {text}"


def _format_notes(body: Object, conversion: Conversion) -> str:
    title = f"{_name_object(body)} is now TrainingJob {conversion.job['metadata']['name']}"
    return "\n".join([title, *(f"  {strip_control_characters(str(note))}" for note in conversion.notes)])


def _name_object(body: Object) -> str:
    metadata = body.get("metadata") or {}
    name = metadata.get("name") or metadata.get("generateName") or "without a name"
    return f"{body.get('kind')} {name}"
