"""What tenants try through the API server, and what a stolen token of the operator's is still good for.

Rights are queried, and writes are dry runs, which go through authorization and admission: nothing here needs a pod.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from testcluster import release
from testing.kubernetes.chart import RELEASE, SYSTEM
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for

OPERATOR = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
API_VERSION = "pacekeeper.dev/v1alpha1"
DRY_RUN = "--dry-run=server"


@dataclass(frozen=True)
class Tenant:
    """A namespace with service accounts of different rights in it, and what stands in it."""

    cluster: KubectlCluster
    namespace: str

    def account(self, name: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{name}"

    def rights(self, user: str, questions: list[str]) -> list[str]:
        """Those of the questions that the API server answers with yes.

        A question is verb, resource and perhaps a namespace: "patch incidents.pacekeeper.dev/status", "get pods in x".
        """
        reviews = [build_access_review(user, question, self.namespace) for question in questions]
        body = json.dumps(build_list(reviews))
        lines = 'jsonpath={.status.allowed}{"\\n"}'
        answers = self.cluster.kubectl("create", "-f", "-", "-o", lines, stdin=body).split()
        return [question for question, answer in zip(questions, answers, strict=True) if answer == "true"]

    def write(self, user: str, *arguments: str, body: dict[str, Any] | None = None, namespace: str = "") -> str:
        where = ("--namespace", namespace or self.namespace, f"--as={user}")
        return self.cluster.kubectl(*arguments, *where, stdin=None if body is None else json.dumps(body))

    def refusal(self, user: str, *arguments: str, body: dict[str, Any] | None = None, namespace: str = "") -> str:
        """The API server's message; the test fails if it does not refuse."""
        with pytest.raises(subprocess.CalledProcessError) as refused:
            self.write(user, *arguments, DRY_RUN, body=body, namespace=namespace)
        return str(refused.value.stderr)


def build_access_review(user: str, question: str, namespace: str) -> dict[str, Any]:
    verb, what, *elsewhere = question.split()
    resource, _, subresource = what.partition("/")
    plural, _, group = resource.partition(".")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
        "namespace": elsewhere[1] if elsewhere else namespace,
    }
    groups = ["system:authenticated", "system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }


def build_list(bodies: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """For one call of kubectl, which tries each and prints all refusals."""
    return {"apiVersion": "v1", "kind": "List", "items": list(bodies)}


@pytest.fixture(scope="module")
def tenant(cluster: KubectlCluster, operator: None) -> Iterator[Tenant]:  # noqa: ARG001  # the chart must be installed
    with scratch_namespace(cluster) as namespace:
        found = Tenant(cluster, namespace)
        cluster.apply(JOB, namespace)
        wait_for(lambda: is_suspended(cluster, namespace), timeout=120, what="the operator has suspended the job")
        for body in (STRAY_POD, SETTINGS, *build_bindings(namespace)):
            cluster.apply(body, namespace)
        settings = build_owner(
            "ConfigMap", "settings", "v1", cluster.get("configmap", "settings", namespace)["metadata"]["uid"]
        )
        cluster.apply(STATE | {"metadata": {"name": "of-another", "ownerReferences": [settings]}}, namespace)
        wait_for(lambda: cluster.get("serviceaccount", "default", namespace), timeout=120, what="service account")
        yield found


def is_suspended(cluster: KubectlCluster, namespace: str) -> bool:
    return bool(cluster.get("tj", "gpt", namespace).get("status", {}).get("phase") == "Suspended")


JOB: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "TrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {"suspend": True, "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}}},
}
STATE: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "TrainingJobState",
    "metadata": {"name": "of-another"},
    "schemaVersion": 1,
    "plan": {"round": 1},
    "state": {},
}
SETTINGS: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
STRAY_POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "stray"},
    "spec": {"schedulerName": "none", "containers": [{"name": "main", "image": "x"}]},
}


def test_the_most_deeply_nested_object_is_refused_and_crashes_no_operator(tenant: Tenant) -> None:
    """kopf reads all of them, and every operator that follows reads them again."""
    levels = 9_900
    body = JOB | {"metadata": {"name": "deep"}, "spec": {"template": JOB["spec"]["template"] | {"x": "deep"}}}
    text = json.dumps(body).replace('"x": "deep"', f'"x": {"[" * levels}{"]" * levels}')
    before = wait_for(release.find_leading_pod, 120, "an operator leads, and is there to stay")["metadata"]["name"]
    tenant.cluster.kubectl("create", "-f", "-", "-n", tenant.namespace, stdin=text)
    where = ("get", "tj", "deep", "-n", tenant.namespace, "-o")
    invalid = 'jsonpath={.status.conditions[?(@.type=="InvalidTemplate")].message}'
    try:
        wait_for(
            lambda: "is nested in more than 64 levels" in tenant.cluster.kubectl(*where, invalid),
            timeout=120,
            what="refusal of a template that is nested deeply",
        )
        assert release.get_leader_name() == before
    finally:
        tenant.cluster.kubectl("delete", "tj", "deep", "-n", tenant.namespace, "--timeout=120s")


def test_large_objects_of_one_tenant_crash_no_operator(tenant: Tenant) -> None:
    """200 MB of pods that carry the label of a job, under the memory limit of the chart: bodies are taken in by bytes.

    Each operator begins again, and so lists them all."""
    cluster = tenant.cluster
    with scratch_namespace(cluster) as namespace, create_large_pods(cluster, namespace):
        deployment = f"deployment/{RELEASE}"
        cluster.kubectl("rollout", "restart", deployment, "-n", SYSTEM)
        cluster.kubectl("rollout", "status", deployment, "-n", SYSTEM, "--timeout=120s")
        cluster.apply(JOB, namespace)
        wait_for(lambda: is_suspended(cluster, namespace), timeout=120, what="an operator has taken up a job")
        statuses = [each for pod in release.list_operator_pods() for each in pod["status"]["containerStatuses"]]
        assert [(each["name"], each["restartCount"]) for each in statuses] == [("operator", 0)] * len(statuses)


@contextmanager
def create_large_pods(
    cluster: KubectlCluster, namespace: str, count: int = 160, size: int = 5 * 2**18
) -> Iterator[None]:
    """`size`: bytes of each. The cluster makes and deletes them itself: kubectl waits between its requests."""
    labels = {"pacekeeper.dev/job": "none"}
    pod = {"schedulerName": "none", "containers": [{"name": "main", "image": "x", "args": ["x" * size]}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": count, "selector": {"matchLabels": labels}, "template": template}
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "large"}, "spec": spec}
    cluster.kubectl("create", "-f", "-", "-n", namespace, stdin=json.dumps(body))

    def are_all_present() -> bool:
        return bool(cluster.get("replicaset", "large", namespace)["status"].get("replicas") == count)

    try:
        wait_for(are_all_present, timeout=120, what=f"{count} pods")
        yield
    finally:
        cluster.kubectl("delete", "replicaset", "large", "-n", namespace, "--cascade=orphan")
        wait_for(lambda: delete_pods(cluster, namespace), timeout=300, what=f"{count} pods are deleted")


def delete_pods(cluster: KubectlCluster, namespace: str) -> bool:
    """Return whether all are deleted: the API server gives a request a minute, and a slow one deletes only some."""
    with suppress(subprocess.CalledProcessError):
        cluster.kubectl("delete", "--raw", f"/api/v1/namespaces/{namespace}/pods", timeout=300)
        return True
    return False


def build_owner(kind: str, name: str = "gpt", api_version: str = API_VERSION, uid: str = "u") -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": True}


def build_owned_pod(name: str, *owners: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(STRAY_POD)
    body["metadata"] = {"name": name, "ownerReferences": list(owners)}
    return body


def build_worker(**spec: Any) -> dict[str, Any]:
    body = build_owned_pod("gpt-w0-0", build_owner("TrainingJob"))
    return body | {"spec": body["spec"] | spec}


def build_containers(**security_context: Any) -> list[dict[str, Any]]:
    return [{"name": "trainer", "image": "x", "securityContext": security_context}]


def build_bindings(namespace: str) -> Iterator[dict[str, Any]]:
    """`editor` and `viewer` as platform teams bind their tenants; `careless` may do all that a role can grant."""
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["pacekeeper.dev"], "resources": ["*"], "verbs": ["*"]}
    yield {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "all"}, "rules": [rule]}
    for name, kind, role in (
        ("editor", "ClusterRole", "edit"),
        ("viewer", "ClusterRole", "view"),
        ("careless", "Role", "all"),
    ):
        yield {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }


def test_a_tenant_runs_its_own_jobs(tenant: Tenant) -> None:
    user = tenant.account("editor")
    tenant.write(user, "create", DRY_RUN, "-f", "-", body=JOB | {"metadata": {"name": "other"}})
    tenant.write(user, "patch", "tj", "gpt", DRY_RUN, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    tenant.write(user, "patch", "tj", "gpt", DRY_RUN, "--type=merge", "-p", '{"spec": {"syncMode": "Sync"}}')
    tenant.write(user, "scale", "tj", "gpt", DRY_RUN, "--replicas=3")
    tenant.write(user, "delete", "tj", "gpt", DRY_RUN)


def test_a_tenant_has_no_right_to_job_states_nodes_and_the_operators_namespace(tenant: Tenant) -> None:
    forbidden = [
        *[f"{verb} trainingjobstates.pacekeeper.dev" for verb in ("create", "update", "patch", "delete")],
        *[f"{verb} incidents.pacekeeper.dev" for verb in ("create", "update", "patch")],
        *[f"{verb} nodequarantines.pacekeeper.dev" for verb in ("create", "update", "patch", "delete")],
        "patch incidents.pacekeeper.dev/status",
        "patch trainingjobs.pacekeeper.dev/status",
        "patch nodes",
        *[f"get {resource} in {SYSTEM}" for resource in ("secrets", "configmaps", "pods", "pods/log")],
        f"get leases.coordination.k8s.io in {SYSTEM}",
        f"create configmaps in {SYSTEM}",
        f"create serviceaccounts/token in {SYSTEM}",
        f"impersonate serviceaccounts in {SYSTEM}",
    ]
    assert tenant.rights(tenant.account("editor"), forbidden) == []


def test_a_tenant_has_the_rights_that_jobs_need(tenant: Tenant) -> None:
    needed = [
        *[f"{verb} trainingjobs.pacekeeper.dev" for verb in ("get", "watch", "create", "update", "patch", "delete")],
        "patch trainingjobs.pacekeeper.dev/scale",
        "delete incidents.pacekeeper.dev",
        "get trainingjobstates.pacekeeper.dev",
    ]
    assert tenant.rights(tenant.account("editor"), needed) == needed


def test_a_viewer_reads_jobs_but_no_plan(tenant: Tenant) -> None:
    user = tenant.account("viewer")
    allowed = ["list trainingjobs.pacekeeper.dev", "watch incidents.pacekeeper.dev"]
    a_secret_of_the_job_stands_there = ["get trainingjobstates.pacekeeper.dev"]
    assert (
        tenant.rights(user, [*allowed, *a_secret_of_the_job_stands_there, "patch trainingjobs.pacekeeper.dev"])
        == allowed
    )


def test_a_role_that_grants_everything_still_writes_no_state(tenant: Tenant) -> None:
    user = tenant.account("careless")
    forged = STATE | {"metadata": {"name": "forged"}}
    patch = ("patch", "tjs", "of-another", "--type=merge", "-p", '{"state": {"quarantines": ["node-1"]}}')
    for response in (
        tenant.refusal(user, "create", "-f", "-", body=forged),
        tenant.refusal(user, *patch),
        tenant.refusal(user, "delete", "tjs", "of-another"),
    ):
        assert "TrainingJobStates and WatchedJobs are the operator's own" in response


def test_the_operator_has_the_rights_that_it_needs(tenant: Tenant) -> None:
    rdma = build_worker(hostNetwork=True, containers=build_containers(capabilities={"add": ["IPC_LOCK"]}))
    tenant.write(OPERATOR, "create", DRY_RUN, "-f", "-", body=rdma)
    for kind in ("NodeQuarantine", "NodeProbe"):
        probe = build_owned_pod("probe", build_owner(kind, "node-1"))
        tenant.write(OPERATOR, "create", DRY_RUN, "-f", "-", body=probe, namespace=SYSTEM)
    state = STATE | {"metadata": {"name": "books", "ownerReferences": [build_owner("TrainingJob")]}}
    tenant.write(OPERATOR, "create", DRY_RUN, "-f", "-", body=state)
    tenant.write(OPERATOR, *build_node_patch(tenant, {"unschedulable": True}, build_taint(OURS)), DRY_RUN)
    finalizers = '{"metadata": {"finalizers": ["pacekeeper.dev/job"]}}'
    tenant.write(OPERATOR, "patch", "tj", "gpt", DRY_RUN, "--type=merge", "-p", finalizers)


FOREIGN_PODS = (
    build_owned_pod("without-owner"),
    build_owned_pod("of-another-controller", build_owner("Job", api_version="batch/v1")),
    build_owned_pod("of-a-look-alike", build_owner("TrainingJob", api_version="example.com/v1")),
    build_owned_pod("owned-but-not-controlled", build_owner("TrainingJob") | {"controller": False}),
    build_owned_pod("probe-outside-of-its-namespace", build_owner("NodeQuarantine")),
)


def test_a_compromised_operator_creates_no_pod(tenant: Tenant) -> None:
    response = tenant.refusal(OPERATOR, "create", "-f", "-", body=build_list(FOREIGN_PODS))
    assert response.count("only what a TrainingJob controls") == len(FOREIGN_PODS)


def test_a_compromised_operator_gains_no_access_to_a_node(tenant: Tenant) -> None:
    pods = (
        build_worker(volumes=[{"name": "root", "hostPath": {"path": "/"}}]),
        build_worker(hostPID=True),
        build_worker(hostIPC=True),
        build_worker(containers=build_containers(privileged=True)),
        build_worker(containers=build_containers(capabilities={"add": ["SYS_ADMIN"]})),
        build_worker(initContainers=[{"name": "first", "image": "x", "securityContext": {"privileged": True}}]),
        build_worker(hostNetwork=True, securityContext={"windowsOptions": {"hostProcess": True}}),
        build_worker(hostUsers=False, containers=build_containers(procMount="Unmasked")),
        build_worker(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        build_worker(containers=build_containers(seccompProfile={"type": "Unconfined"})),
        build_worker(containers=build_containers(appArmorProfile={"type": "Unconfined"})),
    )
    response = tenant.refusal(OPERATOR, "create", "-f", "-", body=build_list(pods))
    assert response.count("admissionPolicy.hostAccess") == len(pods), response


def test_a_probe_mounts_nothing_of_the_operators_namespace(tenant: Tenant) -> None:
    probes = [build_owned_pod("probe", build_owner(kind)) for kind in ("NodeQuarantine", "NodeProbe")]
    probes[0]["spec"]["hostNetwork"] = True
    probes[1]["spec"]["serviceAccountName"] = RELEASE
    response = tenant.refusal(OPERATOR, "create", "-f", "-", body=build_list(probes), namespace=SYSTEM)
    assert response.count("a probe needs nothing of its node") == len(probes), response


def test_a_compromised_operator_writes_into_no_system_namespace(tenant: Tenant) -> None:
    for namespace in ("kube-system", "kube-public", "kube-node-lease"):
        response = tenant.refusal(OPERATOR, "create", "-f", "-", body=build_worker(), namespace=namespace)
        assert "nothing to do in this namespace" in response


OURS = "pacekeeper.dev/quarantine"


def build_taint(key: str, effect: str = "NoSchedule") -> dict[str, Any]:
    return {"key": key, "effect": effect}


def build_node_patch(tenant: Tenant, spec: dict[str, Any], *taints: dict[str, Any], **metadata: Any) -> list[str]:
    """kubectl's arguments. The API server takes taints as a whole list: those that are there are repeated."""
    node = tenant.cluster.list("node")[0]
    if taints:
        spec = spec | {"taints": [*node["spec"].get("taints", []), *taints]}
    change = json.dumps({"metadata": metadata, "spec": spec})
    return ["patch", "node", node["metadata"]["name"], "--type=merge", "-p", change]


def test_a_compromised_operator_changes_only_the_cordon_of_a_node(tenant: Tenant) -> None:
    changes = {
        "labels, annotations or any other": build_node_patch(tenant, {}, labels={"trusted": "true"}),
        "or any other metadata": build_node_patch(tenant, {}, annotations={"a": "b"}),
        "may change no taint of a node but": build_node_patch(tenant, {}, build_taint("other")),
        "the effect of the operator's taint is": build_node_patch(
            tenant, {}, build_taint(OURS, "NoExecute")
        ),  # would evict
        "may change only the cordon": build_node_patch(tenant, {"providerID": "stolen://1"}),
    }
    for message, arguments in changes.items():
        assert message in tenant.refusal(OPERATOR, *arguments)


def test_a_compromised_operator_deletes_no_objects_of_others(tenant: Tenant) -> None:
    assert "only what a TrainingJob controls" in tenant.refusal(OPERATOR, "delete", "pod", "stray")
    assert "only what a TrainingJob controls" in tenant.refusal(OPERATOR, "delete", "tjs", "of-another")


def test_a_compromised_operator_changes_no_job(tenant: Tenant) -> None:
    patch = json.dumps({"spec": {"template": {"spec": {"containers": [{"name": "trainer", "image": "evil"}]}}}})
    refused = tenant.refusal(OPERATOR, "patch", "tj", "gpt", "--type=merge", "-p", patch)
    assert "neither create jobs nor change their spec" in refused


def test_a_compromised_operator_creates_no_long_lived_token(tenant: Tenant) -> None:
    annotations = {"kubernetes.io/service-account.name": RELEASE}
    token = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {"name": "kept", "annotations": annotations},
    }
    assert "makes no tokens" in tenant.refusal(OPERATOR, "create", "-f", "-", body=token, namespace=SYSTEM)


def test_the_operator_has_no_further_rights(tenant: Tenant) -> None:
    beyond = [
        "get secrets",
        f"list secrets in {SYSTEM}",
        *[f"{verb} configmaps" for verb in ("get", "list", "create", "update", "patch", "delete")],
        *[f"{verb} pods" for verb in ("update", "patch")],
        *[f"create pods/{subresource}" for subresource in ("exec", "eviction", "attach", "portforward")],
        "get pods/log",
        "create trainingjobs.pacekeeper.dev",
        "create rolebindings.rbac.authorization.k8s.io",
        *[f"{verb} nodes" for verb in ("create", "delete")],
        "patch nodes/status",
        f"create serviceaccounts/token in {SYSTEM}",
        "delete validatingadmissionpolicies.admissionregistration.k8s.io",
    ]
    assert tenant.rights(OPERATOR, beyond) == []
