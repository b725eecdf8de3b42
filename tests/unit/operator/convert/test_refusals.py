"""What cannot be converted: each refusal names the field and the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_operator.api.names import Object
from pacekeeper_operator.convert.draft import Conversion, ConversionRefused
from pacekeeper_operator.convert.objects import API_VERSIONS, REFUSED_KINDS, convert_object

POD: Object = {"spec": {"containers": [{"name": "pytorch", "image": "i", "command": ["torchrun", "t.py"]}]}}


def build_object(kind: str, version: str, **spec: Any) -> Object:
    return copy.deepcopy({"apiVersion": version, "kind": kind, "metadata": {"name": "j"}, "spec": spec})


def build_pytorchjob(**spec: Any) -> Object:
    replicas = {
        name: {"replicas": number, "template": copy.deepcopy(POD)} for name, number in (("Master", 1), ("Worker", 2))
    }
    return build_object("PyTorchJob", "kubeflow.org/v1", **{"pytorchReplicaSpecs": replicas, **spec})


def build_job(**spec: Any) -> Object:
    defaults = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "template": POD}
    return build_object("Job", "batch/v1", **{**defaults, **spec})


def build_jobset(*names: str, **changes: Any) -> Object:
    template = {"spec": {"parallelism": 2, "completions": 2, "template": POD}}
    jobs = [{"name": name, "template": template} for name in names]
    return build_object("JobSet", "jobset.x-k8s.io/v1alpha2", replicatedJobs=jobs, **changes)


def build_trainjob(**spec: Any) -> Object:
    return build_object("TrainJob", "trainer.kubeflow.org/v1alpha1", **{"runtimeRef": {"name": "r"}, **spec})


def build_runtime(**policy: Any) -> Object:
    job = {"name": "node", "template": {"spec": {"template": POD}}}
    spec = {"mlPolicy": policy or {"torch": {}}, "template": {"spec": {"replicatedJobs": [job]}}}
    return copy.deepcopy({"kind": "ClusterTrainingRuntime", "metadata": {"name": "r"}, "spec": spec})


def change_worker(**changes: Any) -> Object:
    job = build_pytorchjob()
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].update(changes)
    return job


def change_pod(**changes: Any) -> Object:
    job = build_job()
    job["spec"]["template"]["spec"].update(changes)
    return job


def build_idle_jobset() -> Object:
    jobset = build_jobset("a")
    jobset["spec"]["replicatedJobs"][0]["replicas"] = 0
    return jobset


CASES: list[tuple[Object, str, str]] = [
    (build_object("CronJob", "batch/v1"), "kind CronJob", "spec.jobTemplate"),
    (build_object("Secret", "v1"), "kind Secret", "PyTorchJob, TrainJob, JobSet, Job"),
    ({**build_pytorchjob(), "apiVersion": "kubeflow.org/v1beta2"}, "kubeflow.org/v1beta2", "kubeflow.org/v1 can be"),
    ({**build_job(), "metadata": {}}, "metadata.name", "give the job a name"),
    (build_job(template=None), "spec.template", "give a pod template"),
    (build_job(completionMode="NonIndexed"), "spec.completionMode", "set completionMode: Indexed"),
    (build_job(completions=9), "spec.completions", "set both to the number of pods"),
    (build_job(parallelism="2"), "spec.parallelism", "must be a whole number"),
    (build_job(parallelism=True), "spec.parallelism", "must be a whole number"),
    (build_job(suspend="yes"), "spec.suspend", "must be true or false"),
    (build_job(template={"spec": {}}), "spec.template.spec.containers", "give the container"),
    (change_pod(nodeName="n"), "nodeName", "nodeSelector"),
    (change_pod(hostPID=True), "hostPID", "remove it"),
    (change_pod(containers=[{"name": "a"}, {"name": "b"}]), "each of a, b", "--container"),
    (change_pod(containers=[{"name": "a", "command": "torchrun"}]), "containers[a].command", "must be a list"),
    (change_pod(containers=[{"image": "a"}]), "containers[0].name", "must be a text"),
    (build_pytorchjob(pytorchReplicaSpecs={}), "pytorchReplicaSpecs", "Master nor Worker"),
    (build_pytorchjob(pytorchReplicaSpecs={"PS": {"template": POD}}), "PS", "no parameter servers"),
    (build_pytorchjob(pytorchReplicaSpecs={"Worker": {"replicas": 1}}), "Worker.template", "give a pod template"),
    (
        build_pytorchjob(elasticPolicy={"minReplicas": 1}, pytorchReplicaSpecs={"Worker": {"template": POD}}),
        "Worker.replicas",
        "set it to the number of workers",
    ),
    (build_pytorchjob(runPolicy={"cleanPodPolicy": "Some"}), "cleanPodPolicy", "Running, All, None"),
    (change_worker(image="other"), "differ in their image", "give them the same"),
    (change_worker(command=["torchrun", "other.py"]), "differ in their command", "give them the same"),
    (change_worker(resources={"limits": {"nvidia.com/gpu": 1}}), "number of GPUs", "give them the same"),
    (change_worker(name="main"), "no container pytorch, but main", "--container"),
    (build_jobset(), "spec.replicatedJobs", "give the replicated job"),
    (build_idle_jobset(), "replicatedJobs[a].replicas", "set those of the one that trains"),
    (build_jobset("ps", "worker"), "replicatedJobs[ps]", "no parameter servers"),
    (build_trainjob(), "spec.runtimeRef", "give its manifest by -f"),
]


@pytest.mark.parametrize(("body", "field", "remedy"), CASES)
def test_a_refusal_names_field_and_remedy(body: Object, field: str, remedy: str) -> None:
    with pytest.raises(ConversionRefused) as raised:
        convert_object(body)
    assert field in str(raised.value)
    assert remedy in str(raised.value)


def test_the_page_about_conversion_names_all_kinds() -> None:
    page = (Path(__file__).parents[4] / "docs/convert.md").read_text()
    assert [kind for kind in (*API_VERSIONS, *REFUSED_KINDS) if kind not in page] == []
    assert [version for version in API_VERSIONS.values() if version not in page] == []


@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_a_kind_that_is_refused_has_a_remedy(kind: str) -> None:
    with pytest.raises(ConversionRefused, match=f"kind {kind}: .{{15}}"):
        convert_object(build_object(kind, "v1"))


@pytest.mark.parametrize(
    ("body", "runtime", "field", "remedy"),
    [
        (build_trainjob(), build_runtime(mpi={}), "runtime.spec.mlPolicy.mpi", "use a runtime with mlPolicy.torch"),
        (build_trainjob(), build_runtime(jax={}), "runtime.spec.mlPolicy.jax", "use a runtime with mlPolicy.torch"),
        (
            build_trainjob(),
            build_runtime(torch={"elasticPolicy": {"minNodes": 2}}),
            "spec.trainer.numNodes",
            "set it to the number of workers",
        ),
        (
            build_trainjob(trainer={"numNodes": 1}),
            build_runtime(torch={"elasticPolicy": {"minNodes": 2}}),
            "minNodes",
            "raise spec.trainer.numNodes",
        ),
        (
            build_trainjob(trainer={"command": ["mpirun", "t"]}),
            build_runtime(),
            "containers[pytorch].command",
            "torchrun",
        ),
        (
            build_trainjob(podTemplateOverrides=[{"targetJobs": [{"name": "nodes"}], "spec": {}}]),
            build_runtime(),
            "spec.podTemplateOverrides[0]",
            "'nodes', but node",
        ),
        (build_trainjob(), {**build_runtime(), "spec": {}}, "replicatedJobs", "is this the job's runtime?"),
    ],
)
def test_a_runtime_that_cannot_be_converted(body: Object, runtime: Object, field: str, remedy: str) -> None:
    with pytest.raises(ConversionRefused) as raised:
        convert_object(body, runtime)
    assert field in str(raised.value)
    assert remedy in str(raised.value)


def test_an_object_that_is_nested_too_deeply_is_refused() -> None:
    deep: Object = {}
    for _ in range(100_000):
        deep = {"x": deep}
    with pytest.raises(ConversionRefused, match="nested"):
        convert_object(build_job() | {"spec": deep})


def list_notes(conversion: Conversion, field: str) -> str:
    return "\n".join(str(note) for note in conversion.notes if field in note.fields)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        (lambda job: job["spec"].update(backoffLimit=0), "spec.backoffLimit", "Set spec.remediation.maxRestarts: 0"),
        (lambda job: job["spec"]["template"]["spec"].update(subdomain="s"), "spec.template.spec.subdomain", "Service"),
        (lambda job: job["metadata"].update(name="3D_seg"), "metadata.name", "job-3d-seg"),
        (lambda job: job["spec"].update(completions=1), "spec.completions", "spec.replicas: 1"),
    ],
)
def test_a_change_is_explained(change: Callable[[Object], None], field: str, text: str) -> None:
    job = build_job()
    change(job)
    assert text in list_notes(convert_object(job), field)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({"matchLabels": {"job-name": "j", "app": "a"}}, {"matchLabels": {"app": "a", "pacekeeper.dev/job": "j"}}),
        (
            {"matchExpressions": [{"key": "batch.kubernetes.io/job-name", "operator": "NotIn", "values": ["j"]}]},
            {"matchExpressions": [{"key": "pacekeeper.dev/job", "operator": "NotIn", "values": ["j"]}]},
        ),
        (
            {"matchExpressions": [{"key": "controller-uid", "operator": "Exists"}, {"key": "a", "operator": "Exists"}]},
            {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
        ),
    ],
)
def test_selectors_of_the_pods_of_the_job_select_its_workers(selector: Object, expected: Object) -> None:
    """A required affinity to pods that never exist would keep the job from starting."""
    node = {"matchExpressions": [{"key": "job-name", "operator": "Exists"}]}  # the label of a node
    affinity = {"podAffinity": {"required": [{"labelSelector": selector}]}, "nodeAffinity": {"terms": [node]}}
    conversion = convert_object(copy.deepcopy(change_pod(affinity=affinity)))
    found = conversion.job["spec"]["template"]["spec"]["affinity"]
    assert found == {"podAffinity": {"required": [{"labelSelector": expected}]}, "nodeAffinity": {"terms": [node]}}
    assert "instead of" in list_notes(conversion, "spec.template.spec.affinity")


def test_variables_of_the_former_controller_are_added_where_commands_refer_to_them() -> None:
    shell = {"command": ["sh", "-c", "cp /data/$JOB_COMPLETION_INDEX /scratch; nc $MASTER_ADDR"]}
    spec = change_pod(initContainers=[{"name": "i", **shell}])["spec"]["template"]["spec"]
    replicas = {"Worker": {"replicas": 3, "template": {"spec": spec}}}
    spec["containers"][0]["command"] = ["torchrun", "--nnodes=$(WORLD_SIZE)", "--master-addr=$(MASTER_ADDR)", "t.py"]
    spec["containers"].append({"name": "side", "command": ["echo", "$(RANK)"]})
    template = convert_object(build_pytorchjob(pytorchReplicaSpecs=replicas)).job["spec"]["template"]["spec"]
    index = {"fieldRef": {"fieldPath": "metadata.labels['pacekeeper.dev/worker']"}}
    assert [container.get("env") for container in (*template["containers"], *template["initContainers"])] == [
        [{"name": "MASTER_ADDR", "value": "localhost"}, {"name": "WORLD_SIZE", "value": "3"}],
        [{"name": "RANK", "valueFrom": index}],
        None,
    ]
    job = convert_object(change_pod(initContainers=[{"name": "i", **shell}]))
    assert job.job["spec"]["template"]["spec"]["initContainers"][0]["env"] == [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index}
    ]
    assert "remove the container" in list_notes(job, "spec.template.spec.initContainers[i].command")


def test_the_container_with_the_ranks_may_be_named() -> None:
    job = change_pod(
        containers=[{"name": "a", "command": ["python", "a.py"]}, {"name": "b", "command": ["python", "b.py"]}]
    )
    assert convert_object(job, container="b").job["spec"]["trainerContainer"] == "b"
