"""The injection of the watch on a real API server: the table of pods by the policy, and by the webhook; the breaker."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pacekeeper_operator.api.names import LABEL_WATCH_RESTART, LABEL_WATCHED
from pacekeeper_operator.decide.injection_breaker import find_denial_failure
from pacekeeper_operator.decide.injection_gate import build_binding_patch
from pacekeeper_operator.pods.injection import WATCH_RESOURCES, build_injection_patch, find_injection_refusal
from testing.kubernetes.chart import RELEASE, SYSTEM, render_chart
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.injection_cases import (
    ADDRESS,
    INJECTION_CASES,
    RULES,
    InjectionCase,
    apply_json_patch,
    build_pod,
    check_injected_pod,
)
from testing.operators.operator_process import run_operator_process
from testing.operators.watch_installation import (
    FIRST_SECONDS,
    apply_watch,
    build_settings,
    labeled_namespace,
    read_state,
    run_injecting_operator,
    set_gate,
    watch_label,
    write_state,
)

pytestmark = pytest.mark.usefixtures("resources")

BY_NAME = {case.name: case for case in INJECTION_CASES}
NO_SUCH_IMAGE = "pacekeeper.dev/absent:dev"
RESTARTING_USER = "restarting-operator"


def create_pod(cluster: KubectlCluster, pod: dict[str, Any], namespace: str, *, dry_run: bool = True) -> dict[str, Any]:
    """Return the pod as the API server has created it."""
    arguments = ["--dry-run=server"] if dry_run else []
    text = cluster.kubectl("create", *arguments, "-n", namespace, "-o", "json", "-f", "-", stdin=json.dumps(pod))
    created: dict[str, Any] = json.loads(text)
    return created


def is_watched(cluster: KubectlCluster, namespace: str) -> bool:
    pod = create_pod(cluster, BY_NAME["indexed-job"].pod, namespace)
    return LABEL_WATCHED in (pod["metadata"].get("labels") or {})


def has_only_unwatched_pods(cluster: KubectlCluster, namespace: str) -> bool:
    pods = cluster.list("pod", namespace)
    return bool(pods) and not any(LABEL_WATCHED in (pod["metadata"].get("labels") or {}) for pod in pods)


def is_gate_closed(cluster: KubectlCluster) -> bool:
    """Return whether the policy's bindings exclude all pods."""
    bindings = cluster.list("mutatingadmissionpolicybinding")
    return all(build_binding_patch(binding, is_open=False) is None for binding in bindings)


def find_missing(expected: Any, found: Any, path: str = "") -> list[str]:
    """Return the paths at which `found` lacks something; the API server has added defaults to it."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            each for key, value in expected.items() for each in find_missing(value, found.get(key), f"{path}/{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [each for i, (one, other) in pairs for each in find_missing(one, other, f"{path}/{i}")]
    is_equal = expected == found or (found is None and expected in ({}, [], ""))
    return [] if is_equal else [f"{path}: {expected!r} is {found!r}"]


@pytest.fixture(scope="module")
def policy(cluster: KubectlCluster) -> Iterator[None]:
    with apply_watch(cluster, RULES.image, "Policy"):
        write_state(cluster, enabled="true", **{"ca.crt": ADDRESS.authority})
        yield


@pytest.fixture(scope="module")
def watched_namespace(cluster: KubectlCluster, policy: None) -> Iterator[str]:  # noqa: ARG001  # pods are watched by it
    with labeled_namespace(cluster, **watch_label("enabled")) as name:
        wait_for(lambda: is_watched(cluster, name), FIRST_SECONDS, "the policy is applied")
        yield name


@pytest.fixture(scope="module")
def other_namespace(cluster: KubectlCluster) -> Iterator[str]:
    with labeled_namespace(cluster, **watch_label("disabled")) as name:
        yield name


@pytest.mark.parametrize("case", INJECTION_CASES, ids=lambda case: case.name)
def test_the_policy_makes_of_each_pod_what_the_webhook_does(
    cluster: KubectlCluster, watched_namespace: str, other_namespace: str, case: InjectionCase
) -> None:
    plain = create_pod(cluster, case.pod, other_namespace)
    pod = create_pod(cluster, case.pod, watched_namespace)
    check_injected_pod(case, pod)
    if case.refused_by:
        refusal = find_injection_refusal(plain, RULES)
        assert refusal is not None
        assert refusal.check == case.refused_by
        return
    assert pod["status"]["qosClass"] == plain["status"]["qosClass"] == case.qos_class
    expected = apply_json_patch(plain, build_injection_patch(plain, RULES, ADDRESS))
    for spec in (expected["spec"], pod["spec"]):  # names of volumes that differ by chance
        spec.pop("volumes")
        for container in (*spec["containers"], *spec["initContainers"]):
            mounts = container.get("volumeMounts") or []
            container["volumeMounts"] = [each for each in mounts if "serviceaccount" not in each["mountPath"]]
    assert find_missing(expected["spec"], pod["spec"]) == []


@pytest.mark.usefixtures("watched_namespace")
def test_a_pod_requests_it_by_its_label_unless_its_namespace_forbids_that(
    cluster: KubectlCluster, other_namespace: str
) -> None:
    pod = BY_NAME["labeled"].pod
    assert LABEL_WATCHED not in create_pod(cluster, pod, other_namespace)["metadata"]["labels"]
    with scratch_namespace(cluster) as unlabeled:
        wait_for(lambda: cluster.get("serviceaccount", "default", unlabeled), 120, "the namespace is ready")
        assert LABEL_WATCHED in create_pod(cluster, pod, unlabeled)["metadata"]["labels"]
        assert not is_watched(cluster, unlabeled)


@pytest.mark.usefixtures("watched_namespace")
def test_a_restricted_namespace_admits_it(cluster: KubectlCluster) -> None:
    labels = watch_label("enabled") | {"pod-security.kubernetes.io/enforce": "restricted"}
    with labeled_namespace(cluster, **labels) as namespace:
        check_injected_pod(BY_NAME["restricted"], create_pod(cluster, BY_NAME["restricted"].pod, namespace))


def test_a_quota_on_limits_admits_it(cluster: KubectlCluster, watched_namespace: str) -> None:
    hard = {"limits.cpu": "3", "limits.memory": "2Gi", "requests.cpu": "1001m"}
    with apply_limits(cluster, watched_namespace, "ResourceQuota", {"hard": hard}):
        case = BY_NAME["limits-as-a-quota-requires-them"]
        check_injected_pod(case, create_pod(cluster, case.pod, watched_namespace))


@contextmanager
def apply_limits(cluster: KubectlCluster, namespace: str, kind: str, spec: dict[str, Any]) -> Iterator[None]:
    """Apply a ResourceQuota or LimitRange, which the API server enforces once it knows it."""
    cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": "limits"}, "spec": spec}, namespace)
    if kind == "ResourceQuota":
        wait_for(
            lambda: "hard" in (cluster.get("resourcequota", "limits", namespace).get("status") or {}),
            120,
            "quota known",
        )
    try:
        yield
    finally:
        cluster.kubectl("delete", kind.lower(), "limits", "-n", namespace)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("ResourceQuota", {"hard": {"requests.cpu": "1"}}),
        ("LimitRange", {"limits": [{"type": "Container", "min": {"memory": "32Mi"}}]}),
    ],
)
def test_denials_that_the_sidecar_causes_are_recognized(
    cluster: KubectlCluster, watched_namespace: str, other_namespace: str, kind: str, spec: dict[str, Any]
) -> None:
    resources = {"requests": {"cpu": "1", "memory": "64Mi"}}
    pod = build_pod({"resources": resources, "env": [{"name": "WORLD_SIZE", "value": "2"}]})
    with apply_limits(cluster, other_namespace, kind, spec):
        create_pod(cluster, pod, other_namespace)  # without the sidecar it is admitted
    with apply_limits(cluster, watched_namespace, kind, spec):

        def find_denial() -> str:
            try:
                create_pod(cluster, pod, watched_namespace)
            except subprocess.CalledProcessError as error:
                return str(error.stderr)
            return ""

        note = wait_for(find_denial, 120, "the limits are enforced")
    event = {
        "note": note,
        "regarding": {"kind": "Job", "namespace": "n", "name": "j"},
        "eventTime": "2026-01-01T00:00:00Z",
    }
    assert find_denial_failure([event], WATCH_RESOURCES, 0.0, lambda _: True) is not None, note


def test_it_is_switched_off_by_its_config_map(cluster: KubectlCluster, watched_namespace: str) -> None:
    write_state(cluster, enabled="false")
    wait_for(lambda: not is_watched(cluster, watched_namespace), FIRST_SECONDS, "pods are no longer watched")
    write_state(cluster, enabled="true")
    wait_for(lambda: is_watched(cluster, watched_namespace), FIRST_SECONDS, "pods are watched again")


def test_its_gate_switches_it_off_though_the_state_says_on(cluster: KubectlCluster, watched_namespace: str) -> None:
    """An API server may read an old ConfigMap once all bindings were deleted. It always reads the bindings."""
    set_gate(cluster, is_open=False)
    wait_for(lambda: not is_watched(cluster, watched_namespace), FIRST_SECONDS, "pods are no longer watched")
    assert read_state(cluster)["enabled"] == "true"
    set_gate(cluster, is_open=True)
    wait_for(lambda: is_watched(cluster, watched_namespace), FIRST_SECONDS, "pods are watched again")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
assert "/opt/pacekeeper/trainer" in os.environ["PYTHONPATH"].split(":"), "the image's own is restored"
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(20):
    dist.all_reduce(parameter.data)
    parameter.grad = torch.ones(4)
    optimizer.step()
if dist.get_rank() == 0:
    print("ranks:", sorted(os.listdir("/pacekeeper/runtime/ranks")), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("policy")
def test_a_running_pod_may_be_deleted_only_where_its_namespace_enables_restarts(cluster: KubectlCluster) -> None:
    """The chart's admission policy, under another name and for another user than the operator of this cluster."""
    values = json.dumps({"enabled": True, "restart": True})
    objects = render_chart("--kube-version", "1.36.0", "--set-json", f"watch={values}")
    policies = [found for found in objects if found["metadata"]["name"] == f"{RELEASE}-owned"]
    text = json.dumps(policies).replace(f"{RELEASE}-owned", "restart-owned")
    policies = json.loads(text.replace(f"system:serviceaccount:{SYSTEM}:{RELEASE}", RESTARTING_USER))
    identity = (f"--as={RESTARTING_USER}", "--as-group=system:masters")
    pod = {
        "metadata": {"name": "hanging", "labels": {LABEL_WATCHED: "true"}},
        "spec": {"schedulerName": "none", "containers": [{"name": "a", "image": "pacekeeper.dev/absent:dev"}]},
    }

    def find_refusal(namespace: str) -> str:
        try:
            cluster.kubectl("delete", "pod", "hanging", "-n", namespace, "--dry-run=server", *identity)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)
        return ""

    with labeled_namespace(cluster, **{LABEL_WATCH_RESTART: "enabled"}) as enabled, scratch_namespace(cluster) as other:
        wait_for(lambda: cluster.get("serviceaccount", "default", other), 120, "the namespace is ready")
        for namespace in (enabled, other):
            create_pod(cluster, {"apiVersion": "v1", "kind": "Pod", **pod}, namespace, dry_run=False)
            running = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": {"phase": "Running"}}))
            cluster.kubectl("patch", "pod", "hanging", "-n", namespace, *running)
        try:
            for policy in policies:
                cluster.apply(policy, "default")
            wait_for(lambda: "watch-restart" in find_refusal(other), FIRST_SECONDS, "the policy is applied")
            assert find_refusal(enabled) == ""
        finally:
            for policy in policies:
                cluster.kubectl("delete", policy["kind"].lower(), policy["metadata"]["name"], "--ignore-not-found")


def test_a_job_of_an_image_with_its_own_python_path_runs_watched_to_its_end(cluster: KubectlCluster) -> None:
    """In a restricted namespace, as a user that no image knows, with a read-only root, and without an operator."""
    spec = copy.deepcopy(BY_NAME["restricted"].pod["spec"])
    command = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "/tmp/script.py"]
    shell = f"printf '%s' \"$SCRIPT\" > /tmp/script.py && exec {' '.join(command)}"
    spec["containers"][0] |= {
        "image": RULES.image,
        "command": ["sh", "-c", shell],
        "env": [
            {"name": "SCRIPT", "value": SCRIPT},
            {"name": "WORLD_SIZE", "value": "2"},
            {"name": "GLOO_SOCKET_IFNAME", "value": "lo"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "HOME", "value": "/tmp"},
        ],
        "resources": {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gpt"},
        "spec": {"backoffLimit": 0, "template": {"spec": spec}},
    }
    labels = watch_label("enabled") | {"pod-security.kubernetes.io/enforce": "restricted"}
    with labeled_namespace(cluster, **labels) as namespace:
        wait_for(lambda: is_watched_restricted(cluster, namespace), FIRST_SECONDS, "the policy is applied")
        cluster.apply(job, namespace)
        ended = ("job/gpt", "--for=jsonpath={.status.succeeded}=1", "-n", namespace, "--timeout=180s")
        cluster.kubectl("wait", *ended, timeout=190)
        (pod,) = cluster.list("pod", namespace)
        assert LABEL_WATCHED in pod["metadata"]["labels"]
        log = cluster.kubectl("logs", pod["metadata"]["name"], "-c", "pytorch", "-n", namespace)
        assert "ranks: ['0.json', '1.json']" in log


def is_watched_restricted(cluster: KubectlCluster, namespace: str) -> bool:
    pod = create_pod(cluster, BY_NAME["restricted"].pod, namespace)
    return LABEL_WATCHED in (pod["metadata"].get("labels") or {})


@pytest.mark.usefixtures("policy")
def test_pods_that_cannot_start_switch_it_off_and_the_next_runs(cluster: KubectlCluster) -> None:
    """The policy is changed in place: an API server may read an old ConfigMap once all bindings were deleted."""
    if not cluster.is_testcluster:
        pytest.skip("the operator runs as a process on the test cluster's machine")
    with (
        apply_watch(cluster, NO_SUCH_IMAGE, "Policy"),
        run_operator_process(cluster, settings=build_settings("Policy", NO_SUCH_IMAGE)),
        labeled_namespace(cluster, **watch_label("enabled")) as namespace,
    ):
        wait_for(lambda: is_watched(cluster, namespace), 2 * FIRST_SECONDS, "pods are watched")
        template = build_pod(owner=None)
        spec = copy.deepcopy(template["spec"])
        spec["containers"][0] |= {
            "image": RULES.image,
            "command": ["true"],
            "env": [{"name": "WORLD_SIZE", "value": "1"}],
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "gpt"},
            "spec": {"backoffLimit": 3, "template": {"spec": spec}},
        }
        cluster.apply(job, namespace)
        state = wait_for(
            lambda: read_state(cluster) if read_state(cluster).get("enabled") == "false" else None,
            120,
            "the injection switches itself off",
        )
        assert "pacekeeper-payload" in state["reason"]
        wait_for(lambda: is_gate_closed(cluster), 120, "bindings that exclude all pods")
        wait_for(
            lambda: has_only_unwatched_pods(cluster, namespace), 180, "the Job has its pod again, without the watch"
        )


def test_the_webhook_of_an_operator_makes_the_same_of_each_pod(cluster: KubectlCluster) -> None:
    """The last test here: the policy must be gone."""
    if not cluster.is_testcluster:
        pytest.skip("the operator runs as a process on the test cluster's machine")
    cluster.kubectl("delete", "mutatingadmissionpolicybinding", "--all")
    with (
        run_injecting_operator(cluster, RULES.image) as operator,
        labeled_namespace(cluster, **watch_label("enabled")) as namespace,
    ):
        wait_for(lambda: is_watched(cluster, namespace), FIRST_SECONDS, "the webhook is called")
        for case in INJECTION_CASES:
            check_injected_pod(case, create_pod(cluster, case.pod, namespace))
        for state in ("false", "true"):
            write_state(cluster, enabled=state)
            wait_for(
                lambda: has_closing_condition(cluster) != (state == "true"),  # noqa: B023  # called at once
                FIRST_SECONDS,
                "the operator adds the webhooks' condition, and removes it",
            )
            wait_for(lambda: is_watched(cluster, namespace) == (state == "true"), FIRST_SECONDS, state)  # noqa: B023
        operator.kill()
        wait_for(lambda: not is_watched(cluster, namespace), FIRST_SECONDS, "pods start without an operator")


def has_closing_condition(cluster: KubectlCluster) -> bool:
    (configuration,) = cluster.list("mutatingwebhookconfiguration")
    return all("matchConditions" in webhook for webhook in configuration["webhooks"])
