"""One table of pods for the injection of the watch: the unit tests and the cluster tests go through it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_operator.api.names import LABEL_JOB, LABEL_WATCH, LABEL_WATCHED
from pacekeeper_operator.pods.injection import BOOT_PATH, INJECTED_CONTAINERS, InjectionRules, OperatorAddress

Pod = dict[str, Any]
RULES = InjectionRules("pacekeeper.dev/trainer:dev", "Never")
ADDRESS = OperatorAddress("https://pacekeeper.pacekeeper-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")
GPUS = {"nvidia.com/gpu": "8"}
OWN_PATH = "/opt/otel:/app"
RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class InjectionCase:
    """A pod as its controller creates it, and what has to become of it."""

    name: str
    pod: Pod
    refused_by: str = ""  # name of the check; "": the pod is watched
    container: int = 0  # index of the container that is watched
    python_path: str = BOOT_PATH
    restores_image: bool = True  # whether the PYTHONPATH of the image is recorded and restored
    qos_class: str = "Burstable"
    sidecar_resources: Mapping[str, Any] = field(default_factory=lambda: {"requests": RULES.resources["requests"]})
    user: int | None = None  # runAsUser of the containers with Pacekeeper's image


def build_pod(
    container: Mapping[str, Any] | None = None,
    *,
    owner: str | None = "batch/v1 Job",
    labels: Mapping[str, str] | None = None,
    more: Sequence[Mapping[str, Any]] = (),
    **spec: Any,
) -> Pod:
    """Build a pod of a controller; `more`: containers in addition to the first."""
    version, _, kind = (owner or "").rpartition(" ")
    reference = {"apiVersion": version, "kind": kind, "name": "gpt", "uid": "11111111", "controller": True}
    first = {"name": "pytorch", "image": "pacekeeper.dev/dev:dev", "imagePullPolicy": "Never"} | dict(container or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "gpt-0",
            **({"labels": dict(labels)} if labels else {}),
            **({"ownerReferences": [reference]} if owner else {}),
        },
        "spec": {"restartPolicy": "Never", "containers": [first, *(dict(each) for each in more)], **spec},
    }


def use_gpus(**more: Any) -> dict[str, Any]:
    """Return a container with GPUs, whose requests and limits are those that the API server sets."""
    return {"resources": {"requests": {"cpu": "8", **GPUS}, "limits": dict(GPUS)}, **more}


def limit_resources(requests: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, Any]:
    return {"resources": {"requests": {**requests, **GPUS}, "limits": {**limits, **GPUS}}}


def _build_after_opentelemetry() -> Pod:
    """Build a pod that is watched already, and whose PYTHONPATH another mutator has prefixed since."""
    injected = build_pod(
        use_gpus(
            env=[{"name": "PYTHONPATH", "value": f"/opt/otel:{BOOT_PATH}"}],
            volumeMounts=[{"name": "pacekeeper-payload", "mountPath": "/pacekeeper/payload", "readOnly": True}],
        ),
        labels={LABEL_WATCHED: "true"},
        initContainers=[{"name": "pacekeeper-watch", "image": RULES.image, "restartPolicy": "Always"}],
        volumes=[{"name": "pacekeeper-payload", "emptyDir": {}}],
    )
    return copy.deepcopy(injected)


_VALUE_FROM = {"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}
_SLICES = {"nvidia.com/mig-1g.5gb": "1"}
_SIDECAR_LIMITS = RULES.resources["limits"]
_PLAIN_PATH = {"name": "PYTHONPATH", "value": OWN_PATH}
_PREFIXED_PATH = f"{BOOT_PATH}:{OWN_PATH}"

INJECTION_CASES = (
    InjectionCase("indexed-job", build_pod(use_gpus(env=[{"name": "JOB_COMPLETION_INDEX", "value": "0"}]))),
    InjectionCase("pytorchjob", build_pod(use_gpus(), owner="kubeflow.org/v1 PyTorchJob")),
    InjectionCase("volcano", build_pod(use_gpus(), owner="batch.volcano.sh/v1alpha1 Job")),
    InjectionCase(
        "guaranteed",
        build_pod(limit_resources({"cpu": "1000m", "memory": "1Gi"}, {"cpu": "1", "memory": "1Gi"})),
        qos_class="Guaranteed",
        sidecar_resources={"requests": _SIDECAR_LIMITS, "limits": _SIDECAR_LIMITS},
    ),
    InjectionCase(
        "limits-as-a-quota-requires-them",
        build_pod(limit_resources({"cpu": "1", "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"})),
        sidecar_resources={"requests": RULES.resources["requests"], "limits": _SIDECAR_LIMITS},
    ),
    InjectionCase(
        "limit-of-memory",
        build_pod(limit_resources({"cpu": "1", "memory": "1Gi"}, {"memory": "1Gi"})),
        sidecar_resources={
            "requests": RULES.resources["requests"],
            "limits": {"memory": _SIDECAR_LIMITS["memory"]},
        },
    ),
    InjectionCase(
        "best-effort",
        build_pod({"env": [{"name": "WORLD_SIZE", "value": "2"}]}),
        qos_class="BestEffort",
        sidecar_resources={},
    ),
    InjectionCase(
        "resources-of-the-pod",
        build_pod(
            {"env": [{"name": "WORLD_SIZE", "value": "2"}]},
            resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
        ),
        sidecar_resources={},
    ),
    InjectionCase(
        "restricted",
        build_pod(
            use_gpus(securityContext=RESTRICTED),
            securityContext={
                "runAsNonRoot": True,
                "runAsUser": 4242,
                "fsGroup": 4242,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        ),
        user=4242,
    ),
    InjectionCase("root", build_pod(use_gpus(), securityContext={"runAsUser": 0}), user=65532),
    InjectionCase("user-of-the-container", build_pod(use_gpus(securityContext={"runAsUser": 7})), user=7),
    InjectionCase("host-network", build_pod(use_gpus(), hostNetwork=True)),
    InjectionCase(
        "own-python-path",
        build_pod(use_gpus(env=[{"name": "A", "value": "1"}, _PLAIN_PATH])),
        python_path=_PREFIXED_PATH,
        restores_image=False,
    ),
    InjectionCase(
        "empty-python-path",
        build_pod(use_gpus(env=[{"name": "PYTHONPATH", "value": ""}])),
        restores_image=False,
    ),
    InjectionCase("python-path-by-value-from", build_pod(use_gpus(env=[_VALUE_FROM])), "python-path-is-plain"),
    InjectionCase(
        "variables-of-a-config-map",
        build_pod(use_gpus(envFrom=[{"configMapRef": {"name": "variables", "optional": True}}])),
    ),
    InjectionCase(
        "before-us-opentelemetry",
        build_pod(
            use_gpus(env=[_PLAIN_PATH], volumeMounts=[{"name": "otel", "mountPath": "/opt/otel"}]),
            initContainers=[{"name": "otel-python", "image": "pacekeeper.dev/dev:dev", "imagePullPolicy": "Never"}],
            volumes=[{"name": "otel", "emptyDir": {}}],
        ),
        python_path=_PREFIXED_PATH,
        restores_image=False,
    ),
    InjectionCase(
        "after-us-opentelemetry",
        _build_after_opentelemetry(),
        python_path=f"{BOOT_PATH}:/opt/otel",
        restores_image=False,
    ),
    InjectionCase(
        "second-container",
        build_pod(
            {"name": "logs", "env": [_VALUE_FROM]},
            more=[use_gpus(name="train", image="pacekeeper.dev/trainer:dev", env=[_PLAIN_PATH])],
        ),
        container=1,
        python_path=_PREFIXED_PATH,
        restores_image=False,
    ),
    InjectionCase(
        "slice-of-a-gpu",
        build_pod({"resources": {"requests": _SLICES, "limits": _SLICES}}),
        qos_class="BestEffort",
        sidecar_resources={},
    ),
    InjectionCase(
        "labeled",
        build_pod({}, labels={LABEL_WATCH: "enabled"}, owner="apps/v1 StatefulSet"),
        qos_class="BestEffort",
        sidecar_resources={},
    ),
    InjectionCase("without-ranks", build_pod({"env": [{"name": "A", "value": "1"}]}), "may-have-ranks"),
    InjectionCase("server", build_pod(use_gpus(), owner="apps/v1 ReplicaSet"), "trains"),
    InjectionCase("worker", build_pod(use_gpus(), labels={LABEL_JOB: "gpt"}), "not-a-worker"),
    InjectionCase("probe", build_pod(use_gpus(), owner="pacekeeper.dev/v1alpha1 NodeProbe"), "not-a-worker"),
    InjectionCase("disabled", build_pod(use_gpus(), labels={LABEL_WATCH: "disabled"}), "not-disabled"),
    InjectionCase("without-controller", build_pod(use_gpus(), owner=None), "has-a-controller"),
    InjectionCase("shared-processes", build_pod(use_gpus(), shareProcessNamespace=True), "has-own-processes"),
    InjectionCase("processes-of-the-node", build_pod(use_gpus(), hostPID=True), "has-own-processes"),
    InjectionCase("windows", build_pod(use_gpus(), os={"name": "windows"}), "on-linux"),
    InjectionCase("windows-node", build_pod(use_gpus(), nodeSelector={"kubernetes.io/os": "windows"}), "on-linux"),
    InjectionCase(
        "taken-name",
        build_pod(use_gpus(), volumes=[{"name": "pacekeeper-runtime", "emptyDir": {}}]),
        "names-are-free",
    ),
    InjectionCase(
        "taken-path",
        build_pod(
            use_gpus(volumeMounts=[{"name": "data", "mountPath": "/pacekeeper/payload/x"}]),
            volumes=[{"name": "data", "emptyDir": {}}],
        ),
        "paths-are-free",
    ),
)


def check_injected_pod(case: InjectionCase, pod: Pod) -> None:
    """Assert what has become of the case's pod, which the API server may have completed by defaults."""
    spec, original = pod["spec"], case.pod["spec"]
    added = {each["name"]: each for each in spec.get("initContainers") or () if each["name"] in INJECTED_CONTAINERS}
    if case.refused_by:
        assert not added, f"{case.name}: {case.refused_by} must refuse it"
        assert LABEL_WATCHED not in (pod["metadata"].get("labels") or {})
        return
    assert pod["metadata"]["labels"][LABEL_WATCHED] == "true"
    container = spec["containers"][case.container]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["PYTHONPATH"] == case.python_path
    # Nothing that the owner wrote is lost, and no other container has changed.
    for place, written in enumerate(original["containers"]):
        now = spec["containers"][place]
        assert [each["name"] for each in now.get("env") or ()][: len(written.get("env") or ())] == [
            each["name"] for each in written.get("env") or ()
        ]
        if place != case.container:
            mounts = [each for each in now.get("volumeMounts") or () if "serviceaccount" not in each["mountPath"]]
            assert len(mounts) == len(written.get("volumeMounts") or ())
            assert now.get("env") == written.get("env")
    names = [each["name"] for each in spec["initContainers"]]
    own = [each["name"] for each in original.get("initContainers") or ()]
    assert names[len(names) - len(own) :] == own
    if "pacekeeper-watch" in own:
        return  # only its PYTHONPATH is corrected
    expected = ["pacekeeper-payload", *(["pacekeeper-environment"] if case.restores_image else []), "pacekeeper-watch"]
    assert names == [*expected, *own]
    assert ("PACEKEEPER_IMAGE_PYTHONPATH" in values) == case.restores_image
    sidecar = added["pacekeeper-watch"]
    assert sidecar["resources"] == case.sidecar_resources
    assert sidecar["securityContext"].get("runAsUser") == case.user
    assert not sidecar.keys() & {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
    assert {mount["name"] for mount in container["volumeMounts"]} >= {"pacekeeper-payload", "pacekeeper-runtime"}
    assert "pacekeeper-token" not in {mount["name"] for mount in container["volumeMounts"]}
    if case.restores_image:
        assert added["pacekeeper-environment"]["image"] == container["image"]
        assert added["pacekeeper-environment"].get("envFrom") == container.get("envFrom")


def compute_qos_class(pod: Pod) -> str:
    """Return the QoS class as Kubernetes computes it; request and limit of a resource are written alike or not."""
    spec = pod["spec"]
    groups = [spec] if spec.get("resources") else [*spec["containers"], *(spec.get("initContainers") or ())]
    resources = [group.get("resources") or {} for group in groups]
    used = [{"cpu", "memory"} & {*(kinds.get("requests") or ()), *(kinds.get("limits") or ())} for kinds in resources]
    if not any(used):
        return "BestEffort"
    alike = {"1000m": "1"}
    is_guaranteed = all(
        len(names) == 2
        and all(
            alike.get(kinds["requests"].get(name), kinds["requests"].get(name)) == kinds.get("limits", {}).get(name)
            for name in names
        )
        for names, kinds in zip(used, resources, strict=True)
    )
    return "Guaranteed" if is_guaranteed else "Burstable"


def apply_json_patch(document: Pod, operations: Sequence[Mapping[str, Any]]) -> Pod:
    """Return the document with the operations `add` and `replace` applied (RFC 6902)."""
    patched = copy.deepcopy(document)
    for operation in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent: Any = patched
        for part in path:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        value = copy.deepcopy(operation["value"])
        if isinstance(parent, dict):
            assert operation["op"] == "add" or last in parent
            parent[last] = value
        elif operation["op"] == "replace":
            parent[int(last)] = value
        else:
            parent.insert(len(parent) if last == "-" else int(last), value)
    return patched
