"""Manifests of public shape: what they become, that the API server takes it, and that no field is lost silently."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pacekeeper_operator.api.names import Object
from pacekeeper_operator.convert.draft import Conversion, ConversionRefused, NoteKind
from pacekeeper_operator.convert.objects import API_VERSIONS, RUNTIME_KINDS, convert_object, find_runtime
from simulation.kubernetes.api.schema import load_schema

MANIFESTS = Path(__file__).parent / "manifests"
EXPECTED: dict[str, dict[str, Any]] = {
    "pytorchjob-master-worker": {"replicas": 4, "nprocPerNode": 1},
    "pytorchjob-torchrun": {
        "replicas": 4,
        "nprocPerNode": 8,
        "remediation": {"maxRestarts": 3},
        "runPolicy": {"cleanPodPolicy": "All", "activeDeadlineSeconds": 86400, "ttlSecondsAfterFinished": 3600},
        "schedulingTimeout": "10m",
    },
    "pytorchjob-elastic": {
        "replicas": 4,
        "minReplicas": 2,
        "nprocPerNode": 2,
        "remediation": {"maxRestarts": 100},
    },
    "pytorchjob-host-network": {
        "replicas": 16,
        "nprocPerNode": 8,
        "runPolicy": {"cleanPodPolicy": "Running"},
        "trainerContainer": "pytorch",
    },
    "pytorchjob-accelerate": {"replicas": 2, "nprocPerNode": 4},
    "pytorchjob-shell": {"replicas": 3, "nprocPerNode": 1},
    "pytorchjob-of-cluster": {"replicas": 2, "nprocPerNode": 4},
    "trainjob-torch-distributed": {"replicas": 4, "nprocPerNode": 8},
    "trainjob-overrides": {"replicas": 2, "nprocPerNode": 2, "schedulingTimeout": "2m"},
    "trainjob-patches": {
        "replicas": 3,
        "nprocPerNode": 2,
        "remediation": {"maxRestarts": 5},
        "runPolicy": {"activeDeadlineSeconds": 7200},
    },
    "trainjob-elastic": {"replicas": 6, "minReplicas": 2, "nprocPerNode": 4, "remediation": {"maxRestarts": 20}},
    "jobset-workers": {"replicas": 4, "nprocPerNode": 4, "remediation": {"maxRestarts": 4}},
    "jobset-leader-workers": {
        "replicas": 4,
        "nprocPerNode": 2,
        "suspend": True,
        "runPolicy": {"ttlSecondsAfterFinished": 600},
    },
    "jobset-groups": {"replicas": 8, "nprocPerNode": 8, "managedBy": "kueue.x-k8s.io/multikueue"},
    "jobset-initializer": {"replicas": 2, "nprocPerNode": 1},
    "jobset-sidecars": {"replicas": 2, "nprocPerNode": 4, "trainerContainer": "learner"},
    "job-failure-policy": {
        "replicas": 3,
        "nprocPerNode": 1,
        "remediation": {"exitCodes": {"doNotRetry": [42, 43]}},
    },
    "job-headless-service": {"replicas": 2, "nprocPerNode": 2, "remediation": {"maxRestarts": 5}},
    "job-one-pod": {"replicas": 1, "nprocPerNode": 4},
    "job-shell": {"replicas": 4, "nprocPerNode": 1},
    "job-accelerate": {
        "replicas": 2,
        "nprocPerNode": 8,
        "managedBy": "kueue.x-k8s.io/multikueue",
        "trainerContainer": "sdxl",
    },
    "job-queued": {
        "replicas": 2,
        "nprocPerNode": 1,
        "runPolicy": {"activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 60},
    },
}
"""The spec of each TrainingJob, without its template."""
TEMPLATE_PATHS = (
    "spec.pytorchReplicaSpecs.Master.template",
    "spec.pytorchReplicaSpecs.Worker.template",
    *(
        f"{prefix}spec.replicatedJobs[{name}].template.spec.template"
        for prefix in ("", "runtime.spec.template.")
        for name in ("node", "workers", "leader", "rack", "train", "learners", "download", "dataset-initializer")
    ),
    "spec.template",
)


def read_manifest(name: str) -> tuple[Object, Object | None]:
    """Return the manifest's job, and its runtime."""
    bodies = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    (job,) = (body for body in bodies if body["kind"] in API_VERSIONS)
    return copy.deepcopy((job, find_runtime(job, [body for body in bodies if body["kind"] in RUNTIME_KINDS])))


def convert_manifest(name: str) -> tuple[Conversion, Object, Object | None]:
    """Return the conversion of the manifest's job, the job, and its runtime."""
    job, runtime = read_manifest(name)
    given = copy.deepcopy((job, runtime))
    conversion = convert_object(job, runtime)
    assert (job, runtime) == given, "a conversion changes nothing of its source"
    return conversion, job, runtime


def test_all_manifests_are_in_the_table() -> None:
    assert sorted(path.stem for path in MANIFESTS.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_job_is_as_expected(name: str) -> None:
    conversion, _, _ = convert_manifest(name)
    assert {field: value for field, value in conversion.job["spec"].items() if field != "template"} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_api_server_takes_the_job(name: str) -> None:
    conversion, _, _ = convert_manifest(name)
    schema, unknown = load_schema("trainingjobs"), list[str]()
    stored = schema.prune(conversion.job, unknown)
    assert unknown == []
    assert schema.find_errors(stored) == []
    assert schema.find_broken_rules(stored) == []


@pytest.mark.parametrize(("name", "script"), [("pytorchjob-shell", "train.py"), ("job-shell", "forecast.train")])
def test_the_script_behind_a_shell_is_named_in_the_template(name: str, script: str) -> None:
    conversion, _, _ = convert_manifest(name)
    env = conversion.job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PACEKEEPER_LAUNCH_SCRIPT", "value": script} in env
    assert [note.text for note in conversion.notes if "env[PACEKEEPER_LAUNCH_SCRIPT]" in note.fields[0]] != []


@pytest.mark.parametrize("name", EXPECTED)
def test_no_field_is_lost_silently(name: str) -> None:
    conversion, job, runtime = convert_manifest(name)
    assert list(find_lost_fields(conversion, job, "")) == []
    if runtime is not None:
        assert list(find_lost_fields(conversion, {"spec": runtime["spec"]}, "runtime")) == []


@pytest.mark.parametrize("name", ["pytorchjob-torchrun", "trainjob-elastic", "jobset-workers", "job-queued"])
def test_a_field_that_is_lost_is_found(name: str) -> None:
    conversion, job, runtime = convert_manifest(name)
    del conversion.job["spec"]["template"]["spec"]["containers"][0]["image"]
    sources = [(job, "")] if runtime is None else [(job, ""), ({"spec": runtime["spec"]}, "runtime")]
    lost = [path for source, prefix in sources for path in find_lost_fields(conversion, source, prefix)]
    assert [path.rpartition(".")[2] for path in lost] == ["image"]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("trainjob")])
def test_what_a_train_job_changes_in_its_runtime_is_in_the_template(name: str) -> None:
    conversion, job, _ = convert_manifest(name)
    trainer = {"command", "args", "image", "env", "resourcesPerNode"}
    changes = [value for field, value in job["spec"].get("trainer", {}).items() if field in trainer]
    changes += [item for field in ("podTemplateOverrides", "podSpecOverrides") for item in job["spec"].get(field, [])]
    for patch in job["spec"].get("runtimePatches", []):
        changes += patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    kept = [value for _, value in iterate_values(conversion.job["spec"]["template"], "")]
    assert changes
    assert [value for _, value in iterate_values(changes, "") if value not in (*kept, "node")] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_no_unknown_field_is_lost_silently(name: str) -> None:
    """A version of a kind that is newer than this code has more fields, at any place."""
    job, runtime = read_manifest(name)
    for body in (job, runtime or {}):
        for value in list(iterate_objects(body)):
            value["newField"] = "here"
    conversion = convert_object(job, runtime)
    assert list(find_lost_fields(conversion, job, "")) == []
    if runtime is not None:
        assert list(find_lost_fields(conversion, {"spec": runtime["spec"]}, "runtime")) == []


@pytest.mark.parametrize("name", ["pytorchjob-torchrun", "trainjob-overrides", "jobset-leader-workers", "job-queued"])
def test_a_field_of_any_other_type_is_refused_or_kept(name: str) -> None:
    job, runtime = read_manifest(name)
    for body in (job, runtime or {}):
        for part in [*iterate_objects(body)]:
            for field in list(part):
                for value in (7, ["x"]):
                    before, part[field] = part[field], value
                    with contextlib.suppress(ConversionRefused):
                        convert_object(job, find_runtime(job, [runtime] if runtime else []))
                    part[field] = before


def iterate_objects(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from iterate_objects(part)


def find_lost_fields(conversion: Conversion, source: Object, prefix: str) -> Iterator[str]:
    """Yield the paths of values that are neither in the TrainingJob's template nor named by a note.

    The note that the template was taken over counts for no field of it.
    """
    kept = dict(iterate_values(conversion.job["spec"]["template"], ""))
    values = {path.lstrip("."): value for path, value in iterate_values(source, prefix)}
    for path, value in values.items():
        if path in ("apiVersion", "kind"):
            continue
        template = next((template for template in TEMPLATE_PATHS if is_below(path, template)), None)
        rest = path.removeprefix(template or "")
        if template is not None and kept.get(rest) == value:
            continue
        # Where two templates have the same value, a note names the one that all workers have.
        others = [f"{other}{rest}" for other in TEMPLATE_PATHS if template is not None]
        paths = [path, *(other for other in others if values.get(other) == value)]
        named = [
            field
            for note in conversion.notes
            for field in note.fields
            if any(is_below(candidate, field) for candidate in paths)
            and not (note.kind is NoteKind.TAKEN and field in TEMPLATE_PATHS)
        ]
        if not named:
            yield path


def is_below(path: str, field: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))


def iterate_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each value that is no object or list, with its path as notes write it."""
    if isinstance(value, dict):
        for name, part in value.items():
            keyed = path.rpartition(".")[2] in ("labels", "annotations")
            yield from iterate_values(part, f"{path}[{name}]" if keyed else f"{path}.{name}")
    elif isinstance(value, list):
        named = all(isinstance(item, dict) and "name" in item and "mountPath" not in item for item in value)
        for i, item in enumerate(value):
            yield from iterate_values(item, f"{path}[{item['name'] if named else i}]")
    elif value is not None:
        yield path, value
