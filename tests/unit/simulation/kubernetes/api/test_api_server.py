"""The simulated API server beyond what probes ask of the real one, too: the operator's rights, and errors as it sees
them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import kopf
import pytest
import yaml

from pacekeeper_operator.kube.client import (
    NODE_OBJECTS,
    PODS,
    SECRETS,
    TRAINING_JOB_STATES,
    TRAINING_JOBS,
    Cluster,
    Conflict,
    Denied,
    NotFound,
    ObjectRejected,
)
from simulation.kubernetes.api import admission, cel_rules
from simulation.kubernetes.api.api_faults import Denial
from simulation.kubernetes.api.changes import ObjectChange
from simulation.kubernetes.api.connection import SimulatedApiConnection
from simulation.kubernetes.api.errors import ApiError
from simulation.kubernetes.api.objects import KINDS, apply_merge_patch
from simulation.kubernetes.api.schema import CRD_FOLDER
from simulation.loop import Process
from testing.kubernetes.api_probes import build_bound_pod, build_config_map, build_job, build_pod
from testing.kubernetes.chart import CHART
from testing.simulated.simulated_api import NAMESPACE, ApiServerOnlyWorld

Object = dict[str, Any]


def in_team(body: Object, **metadata: Any) -> Object:
    return {**body, "metadata": {**body["metadata"], "namespace": NAMESPACE, **metadata}}


@pytest.fixture
def world() -> ApiServerOnlyWorld:
    return ApiServerOnlyWorld()


@pytest.fixture
def operator(world: ApiServerOnlyWorld) -> Cluster:
    return Cluster(SimulatedApiConnection(world.api, "operator-0-0", Process(world.loop, "operator-0-0")))


def run(world: ApiServerOnlyWorld, work: Any) -> Any:
    return world.loop.run(work)


def owned(world: ApiServerOnlyWorld, body: Object, *, controller: bool = True) -> Object:
    """By a job."""
    found = world.api.get("trainingjobs", "owner", NAMESPACE)
    found = found or world.api.create("trainingjobs", in_team(build_job("owner")))
    reference = {
        "apiVersion": found["apiVersion"],
        "kind": "TrainingJob",
        "name": "owner",
        "uid": found["metadata"]["uid"],
        "controller": controller,
    }
    return in_team(body, ownerReferences=[reference])


# What is simulated


def test_every_rule_of_the_custom_resources_is_simulated_or_argued() -> None:
    written = {rule for path in CRD_FOLDER.glob("*.yaml") for rule in _rules(yaml.safe_load(path.read_text()))}
    assert written == {*cel_rules.CEL_RULES, *cel_rules.RULES_NOT_SIMULATED}
    assert not set(cel_rules.CEL_RULES) & set(cel_rules.RULES_NOT_SIMULATED)


def _rules(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        for rule in part.get("x-kubernetes-validations", ()):
            yield " ".join(rule["rule"].split())
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _rules(inner)


def test_every_custom_resource_is_served() -> None:
    assert {path.stem for path in CRD_FOLDER.glob("*.yaml")} == {kind.plural for kind in KINDS.values() if kind.custom}


def test_every_admission_policy_of_the_chart_is_simulated_or_argued() -> None:
    text = (CHART / "templates/admission.yaml").read_text()
    written = set(re.findall(r'\(printf "%s-(\w+)" \(include "pacekeeper.fullname" .\)\)', text))
    simulated = {policy for policies in admission.ADMISSION_POLICIES.values() for policy in policies}
    assert written == simulated | set(admission.POLICIES_NOT_SIMULATED)


# Whose rights


def test_the_operator_makes_only_pods_that_a_job_controls(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    for body in (in_team(build_pod("a")), owned(world, build_pod("a"), controller=False)):
        with pytest.raises(ObjectRejected, match="may touch only what a TrainingJob controls"):
            run(world, operator.create(PODS, body))
    run(world, operator.create(PODS, owned(world, build_pod("a"))))
    world.api.create("pods", in_team(build_pod("tenants")), manager="tenant")
    with pytest.raises(ObjectRejected, match="may touch only"):
        run(world, operator.delete(PODS, "tenants", NAMESPACE))


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"metadata": {"labels": {"a": "b"}}}, "labels, annotations"),
        ({"spec": {"providerID": "a"}}, "only the cordon"),
        ({"spec": {"taints": None}}, "no taint of a node but"),
        ({"spec": {"taints": [{"key": "pacekeeper.dev/quarantine", "effect": "NoExecute"}]}}, "no taint|effect"),
    ],
)
def test_of_nodes_the_operator_writes_its_marks_alone(
    world: ApiServerOnlyWorld, operator: Cluster, patch: Object, words: str
) -> None:
    theirs = {"key": "theirs", "effect": "NoSchedule"}
    world.api.create("nodes", {"metadata": {"name": "n"}, "spec": {"taints": [theirs]}})
    with pytest.raises(ObjectRejected, match=words):
        run(world, operator.patch(NODE_OBJECTS, "n", patch))
    ours = {"key": "pacekeeper.dev/quarantine", "effect": "NoSchedule"}
    run(world, operator.patch(NODE_OBJECTS, "n", {"spec": {"taints": [theirs, ours]}}))
    with pytest.raises(ObjectRejected, match="NoSchedule"):
        run(world, operator.patch(NODE_OBJECTS, "n", {"spec": {"taints": [theirs, {**ours, "effect": "NoExecute"}]}}))
    world.api.patch("nodes", "n", "", patch)  # others may


def test_the_operator_changes_no_jobs_and_makes_no_tokens(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    world.api.create("trainingjobs", in_team(build_job("a")))
    with pytest.raises(ObjectRejected, match="neither create jobs nor change their spec"):
        run(world, operator.patch(TRAINING_JOBS, "a", {"spec": {"replicas": 3}}, NAMESPACE))
    run(world, operator.patch(TRAINING_JOBS, "a", {"metadata": {"finalizers": ["pacekeeper.dev/job"]}}, NAMESPACE))
    secret = {"metadata": {"name": "s", "namespace": NAMESPACE}, "type": "kubernetes.io/service-account-token"}
    with pytest.raises(ObjectRejected, match="makes no tokens"):
        run(world, operator.create(SECRETS, secret))


def test_tenants_write_neither_nodes_nor_the_operators_books(world: ApiServerOnlyWorld) -> None:
    world.api.create("nodes", {"metadata": {"name": "n"}, "spec": {}})
    made = world.api.create(
        "trainingjobstates",
        {"metadata": {"name": "a", "namespace": NAMESPACE}, "schemaVersion": 1, "plan": {}, "state": {}},
    )
    tries = (
        lambda: world.api.patch("nodes", "n", "", {"spec": {"unschedulable": True}}, manager="tenant-a"),
        lambda: world.api.patch("trainingjobstates", "a", NAMESPACE, {"plan": {"a": 1}}, manager="tenant-a"),
        lambda: world.api.delete("trainingjobstates", "a", NAMESPACE, manager="tenant-a"),
        lambda: world.api.create("nodequarantines", {"metadata": {"name": "n"}}, manager="tenant-a"),
    )
    for attempt in tries:
        with pytest.raises(ApiError, match="403 Forbidden"):
            attempt()
    assert world.api.get("trainingjobstates", "a", NAMESPACE) == made
    world.api.create("trainingjobs", in_team(build_job("theirs")), manager="tenant-a")


# Errors, as the operator's Cluster understands them


def test_errors_have_the_operators_classes(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    body = owned(world, build_pod("a"))
    run(world, operator.create(PODS, body))
    with pytest.raises(Conflict):
        run(world, operator.create(PODS, body))
    with pytest.raises(NotFound):
        run(world, operator.get(PODS, "b", NAMESPACE))
    with pytest.raises(ObjectRejected, match=re.escape("spec.containers: Required value")):
        run(world, operator.create(PODS, owned(world, build_pod("b", containers=[])), dry_run=True))
    with pytest.raises(ObjectRejected, match="unknown field"):
        run(world, operator.create(PODS, owned(world, build_pod("b", color="red")), dry_run=True))
    with pytest.raises(Conflict, match="has been modified"):
        run(
            world,
            operator.patch(
                TRAINING_JOBS, "owner", {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}, NAMESPACE
            ),
        )


def test_quota_is_about_the_moment_and_policies_are_not(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    quota = {"metadata": {"name": "none", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "0"}}}
    world.api.create("resourcequotas", quota)
    with pytest.raises(Denied, match="status unknown for quota"):
        run(world, operator.create(PODS, owned(world, build_pod("a"))))
    world.pass_time(1.0)
    with pytest.raises(Denied, match="exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0"):
        run(world, operator.create(PODS, owned(world, build_pod("a"))))
    denials = world.api.faults.denials
    denials.append(Denial("pods", "a", 403, 'violates PodSecurity "restricted:latest": privileged'))
    with pytest.raises(ObjectRejected, match='pods "a" is forbidden: violates PodSecurity'):
        run(world, operator.create(PODS, owned(world, build_pod("a"))))
    denials[:] = [Denial("pods", "a", 500, 'failed calling webhook "a": context deadline exceeded')]
    with pytest.raises(kopf.TemporaryError, match="failed calling webhook"):
        run(world, operator.create(PODS, owned(world, build_pod("a"))))
    with pytest.raises(Denied, match="exceeded quota"):
        run(world, operator.create(PODS, owned(world, build_pod("other"))))


# Objects


def test_what_is_answered_can_be_changed(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    world.api.create("trainingjobs", in_team(build_job("a")))
    found = run(world, operator.get(TRAINING_JOBS, "a", NAMESPACE))
    listed = run(world, operator.list(TRAINING_JOBS, NAMESPACE))
    found["spec"]["replicas"] = listed[0]["spec"]["replicas"] = 99
    stored = world.api.get("trainingjobs", "a", NAMESPACE)
    assert stored is not None
    assert stored["spec"]["replicas"] == 1


def test_what_is_sent_is_the_servers_own(world: ApiServerOnlyWorld) -> None:
    body = in_team(build_config_map("a", {"a": "1"}))
    world.api.create("configmaps", body)
    body["data"]["a"] = "2"
    stored = world.api.get("configmaps", "a", NAMESPACE)
    assert stored is not None
    assert stored["data"] == {"a": "1"}


def test_changes_are_told_at_once_with_what_was_before(world: ApiServerOnlyWorld) -> None:
    told: list[ObjectChange] = []
    world.api.create("configmaps", in_team(build_config_map("a", {"a": "1"})))
    world.api.subscribe(told.append)
    world.api.patch("configmaps", "a", NAMESPACE, {"data": {"b": "2"}}, manager="somebody")
    world.api.patch("configmaps", "a", NAMESPACE, {"data": {"b": "2"}})
    world.api.delete("configmaps", "a", NAMESPACE)
    assert [(change.type, change.actor, change.verb) for change in told] == [
        ("MODIFIED", "somebody", "patch"),
        ("DELETED", "world", "delete"),
    ]
    assert told[0].previous is not None
    assert (told[0].previous["data"], told[0].object["data"]) == ({"a": "1"}, {"a": "1", "b": "2"})
    assert told[1].previous == told[0].object
    assert told[1].version > told[0].version == int(told[0].object["metadata"]["resourceVersion"])


def test_everything_goes_back_to_a_backup_and_the_worlds_own_machines_are_told(world: ApiServerOnlyWorld) -> None:
    api = world.api
    stays, goes = (api.create("configmaps", in_team(build_config_map(name))) for name in ("stays", "goes"))
    backup, told = api.backup(), list[tuple[str, str]]()
    api.patch("configmaps", "stays", NAMESPACE, {"data": {"a": "new"}})
    api.delete("configmaps", "goes", NAMESPACE)
    api.create("configmaps", in_team(build_config_map("comes")))
    api.subscribe(lambda change: told.append((change.type, change.object["metadata"]["name"])))
    api.restore(backup)
    assert sorted(told) == [("ADDED", "goes"), ("DELETED", "comes"), ("MODIFIED", "stays")]
    assert api.get("configmaps", "stays", NAMESPACE) == stays
    assert api.get("configmaps", "goes", NAMESPACE) == goes
    assert api.version == backup.version
    assert not api.history["configmaps"], "no watch may resume from a version that never existed"


def test_a_merge_that_changes_nothing_is_the_object_itself() -> None:
    value = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    assert apply_merge_patch(value, {"a": {"b": 1, "c": [1, 2]}, "e": None}) is value
    other = apply_merge_patch(value, {"a": {"b": 2, "x": {"y": None, "z": 1}}})
    assert other == {"a": {"b": 2, "c": [1, 2], "x": {"z": 1}}, "d": None}
    assert other["a"]["c"] is value["a"]["c"]
    assert apply_merge_patch({"a": 1}, {"a": {"b": {"c": None}}}) == {"a": {"b": {}}}


def test_a_number_that_json_does_not_know_is_not_sent(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    world.api.create("trainingjobs", in_team(build_job("a")))
    with pytest.raises(ValueError, match="is not JSON"):
        run(
            world,
            operator.patch(TRAINING_JOBS, "a", {"status": {"slowdown": float("inf")}}, NAMESPACE, subresource="status"),
        )


def test_a_pod_is_bound_once(world: ApiServerOnlyWorld) -> None:
    world.api.create("pods", in_team(build_pod("a")))
    binding = {"spec": {"nodeName": "n"}}
    bound = world.api.patch("pods", "a", NAMESPACE, binding, subresource="binding")
    assert bound["spec"]["nodeName"] == "n"
    assert {condition["type"] for condition in bound["status"]["conditions"]} == {"PodScheduled"}
    for name in ("a", "deleted"):
        body = in_team(build_bound_pod("deleted"), finalizers=["pacekeeper.dev/a"])
        if name == "deleted":
            world.api.create("pods", body)
            world.api.delete("pods", "deleted", NAMESPACE)
        with pytest.raises(ApiError, match="409 Conflict"):
            world.api.patch("pods", name, NAMESPACE, binding, subresource="binding")


def test_an_owner_that_comes_too_late_finds_no_dependant(world: ApiServerOnlyWorld) -> None:
    """The collector looks whether the owner is there a while after it has heard that it is not."""
    body = in_team(
        build_config_map("a"), ownerReferences=[{"apiVersion": "v1", "kind": "ConfigMap", "name": "b", "uid": "u"}]
    )
    world.api.create("configmaps", body)
    world.pass_time(0.04)
    assert world.api.get("configmaps", "a", NAMESPACE) is not None
    world.pass_time(1.5)
    assert world.api.get("configmaps", "a", NAMESPACE) is None


def test_a_job_deleted_in_the_foreground_waits_for_its_pods(world: ApiServerOnlyWorld) -> None:
    body = owned(world, build_bound_pod("w"))
    body["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] = True
    world.api.create("pods", body)
    world.api.delete("trainingjobs", "owner", NAMESPACE, propagation="Foreground")
    world.pass_time(10.0)
    found = world.api.get("pods", "w", NAMESPACE)
    assert found is not None
    assert "deletionTimestamp" in found["metadata"]
    assert world.api.get("trainingjobs", "owner", NAMESPACE) is not None
    world.api.delete("pods", "w", NAMESPACE, grace=0)
    world.pass_time(3.0)
    assert world.api.get("trainingjobs", "owner", NAMESPACE) is None


def test_a_double_charge_is_given_back_by_the_next_count(world: ApiServerOnlyWorld) -> None:
    quota = {"metadata": {"name": "few", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "5"}}}
    world.api.create("resourcequotas", quota)
    world.pass_time(1.0)
    world.api.create("pods", in_team(build_pod("a")))
    with pytest.raises(ApiError, match="409 AlreadyExists"):
        world.api.create("pods", in_team(build_pod("a")))
    assert _used(world) == "2"
    world.pass_time(300.0)
    assert _used(world) == "1"


def _used(world: ApiServerOnlyWorld) -> str:
    found = world.api.get("resourcequotas", "few", NAMESPACE)
    assert found is not None
    return str(found["status"]["used"]["pods"])


def test_tokens_run_out_and_are_their_pods_own(world: ApiServerOnlyWorld) -> None:
    made = world.api.create("pods", in_team(build_pod("a")))
    token = world.api.mint_token(made, seconds=600.0)

    def review() -> Object:
        body = {"metadata": {}, "spec": {"token": token, "audiences": ["pacekeeper"]}}
        status: Object = world.api.create("tokenreviews", body)["status"]
        return status

    assert review()["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [made["metadata"]["uid"]]
    world.api.delete("pods", "a", NAMESPACE)
    world.api.create("pods", in_team(build_pod("a")))
    assert review()["authenticated"]  # remembered
    world.pass_time(11.0)
    assert "invalidated" in review()["error"]
    other = world.api.create("pods", in_team(build_pod("b")))
    token = world.api.mint_token(other, seconds=600.0)
    world.pass_time(601.0)
    assert "expired" in review()["error"]


def test_a_run_follows_from_its_seed() -> None:
    def uids(seed: int) -> list[str]:
        world = ApiServerOnlyWorld(seed)
        for name in ("a", "b"):
            world.api.create("configmaps", in_team(build_config_map(name)))
        return [body["metadata"]["uid"] for body in world.api.list_all("configmaps")]

    assert uids(1) == uids(1) != uids(2)


def test_the_servers_own_version_counts_every_change(world: ApiServerOnlyWorld, operator: Cluster) -> None:
    before = world.api.version
    world.api.create("configmaps", in_team(build_config_map("a")))
    listing = run(world, operator.list_with_version(TRAINING_JOB_STATES, NAMESPACE))
    assert listing.items == []
    assert listing.version == world.api.version == before + 1


def test_time_at_the_server_is_its_own_clocks(world: ApiServerOnlyWorld) -> None:
    world.clock_offset = 3600.0
    made = world.api.create("configmaps", in_team(build_config_map("a")))
    assert made["metadata"]["creationTimestamp"] == "2027-01-15T09:00:00Z"
    world.loop.run(asyncio.sleep(61))
    made = world.api.create("configmaps", in_team(build_config_map("b")))
    assert made["metadata"]["creationTimestamp"] == "2027-01-15T09:01:01Z"
