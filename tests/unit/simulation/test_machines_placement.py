"""The simulated scheduler, with the pods that the operator makes."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.observe.views import view_pod
from pacekeeper_operator.pods.manifests import SchedulingConstraints
from simulation.kubernetes.placement import (
    NodeOffer,
    PodNeeds,
    compute_toleration_seconds,
    find_obstacle,
    parse_quantity,
)
from testing.simulated.simulated_machines import NAMESPACE, TRAINER, MachinesHarness

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"
GPU = "nvidia.com/gpu"
WITH_GPU = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
ONE_CORE = {"name": "first", "resources": {"requests": {"cpu": "1"}}}


def build_needs(**spec: Any) -> PodNeeds:
    metadata = {"uid": "uid", "namespace": "n", "name": "p", "labels": {"app": "a"}}
    return PodNeeds.parse({"metadata": metadata, "spec": {"containers": [{"name": "c"}], **spec}})


def build_offer(name: str = "node-0", *pods: PodNeeds, labels: dict[str, str] | None = None, **spec: Any) -> NodeOffer:
    status = {"allocatable": {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1", "pods": "3"}}
    node = {"metadata": {"name": name, "labels": {HOST: name, **(labels or {})}}, "spec": spec, "status": status}
    return NodeOffer(node, {str(number): pod for number, pod in enumerate(pods)})


def find_reason(pod: PodNeeds, node: NodeOffer) -> str:
    return find_obstacle(pod, node, {node.name: node})


def build_spec(**requests: str) -> dict[str, Any]:
    return {"containers": [{"name": "c", "resources": {"requests": requests}}]}


@pytest.mark.parametrize(("text", "value"), [("250m", 0.25), ("64Mi", 64 * 2**20), ("8", 8.0), (8, 8.0), ("2G", 2e9)])
def test_quantities_are_parsed(text: object, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (build_spec(cpu="2"), ""),
        (build_spec(cpu="2001m"), "Insufficient cpu"),
        ({"containers": [{"name": "c", "resources": {"limits": {GPU: 2}}}]}, f"Insufficient {GPU}"),
        ({"initContainers": [ONE_CORE | {"restartPolicy": "Always"}], **build_spec(cpu="1500m")}, "Insufficient cpu"),
        ({"initContainers": [ONE_CORE], **build_spec(cpu="1500m")}, ""),
        ({"nodeSelector": {"zone": "b"}}, "node(s) didn't match Pod's node affinity/selector"),
        ({"nodeSelector": {HOST: "node-0"}}, ""),
    ],
)  # fmt: skip
def test_a_pod_needs_resources_and_labels(spec: dict[str, Any], message: str) -> None:
    assert find_reason(build_needs(**spec), build_offer()) == message


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-0"]}]}], False),
        ([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]}], True),
        ([{"matchExpressions": [{"key": HOST, "operator": "In", "values": ["node-0"]}]}], True),
        ([WITH_GPU, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-0"]}]}], True),
        ([WITH_GPU], False),
        ([{}], False),
    ],
)  # fmt: skip
def test_a_pod_needs_its_node_affinity(terms: list[dict[str, Any]], fits: bool) -> None:
    pod = build_needs(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}})
    assert (find_reason(pod, build_offer()) == "") is fits


@pytest.mark.parametrize(
    ("taint", "toleration", "fits"),
    [
        ({"key": "k", "effect": "NoSchedule"}, None, False),
        ({"key": "k", "effect": "NoExecute"}, None, False),
        ({"key": "k", "effect": "PreferNoSchedule"}, None, True),
        ({"key": "k", "effect": "NoSchedule"}, {"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "effect": "NoSchedule"}, {"operator": "Exists"}, True),
        ({"key": "k", "effect": "NoSchedule"}, {"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "k", "effect": "NoSchedule", "value": "v"}, {"key": "k", "value": "v"}, True),
        ({"key": "k", "effect": "NoSchedule", "value": "v"}, {"key": "k", "value": "w"}, False),
    ],
)  # fmt: skip
def test_taints_need_tolerations(taint: dict[str, str], toleration: dict[str, str] | None, fits: bool) -> None:
    pod = build_needs(tolerations=[toleration] if toleration else [])
    assert (find_reason(pod, build_offer(taints=[taint])) == "") is fits


def test_the_shortest_toleration_counts() -> None:
    taint = {"key": "k", "effect": "NoExecute"}
    short, always = {"key": "k", "operator": "Exists", "tolerationSeconds": 30}, {"key": "k", "operator": "Exists"}
    assert compute_toleration_seconds(taint, []) is None
    assert compute_toleration_seconds(taint, [always]) == float("inf")
    assert compute_toleration_seconds(taint, [always, short]) == 30.0


def test_pods_are_counted_and_a_port_of_the_nodes_network_is_taken_once() -> None:
    host = {"hostNetwork": True, "containers": [{"name": "c", "ports": [{"containerPort": 20_001}]}]}
    one = build_needs(**host)
    assert (
        find_reason(build_needs(**host), build_offer("node-0", one))
        == "node(s) didn't have free ports for the requested pod ports"
    )
    full = build_offer()
    for number in range(3):
        full.add(PodNeeds.parse({"metadata": {"uid": str(number), "namespace": "n"}, "spec": {"containers": []}}))
    assert find_reason(build_needs(), full) == "Too many pods"


def test_resources_of_an_ended_pod_are_free_again() -> None:
    one = build_needs(**build_spec(cpu="2"))
    node = build_offer("node-0", one)
    assert find_reason(build_needs(**build_spec(cpu="1")), node) == "Insufficient cpu"
    assert node.remove(one.uid)
    assert find_reason(build_needs(**build_spec(cpu="1")), node) == ""


def test_pod_anti_affinity_applies_in_both_directions() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "zone"}
    lonely, plain = build_needs(affinity={"podAntiAffinity": {REQUIRED: [term]}}), build_needs()
    one, other, far = (build_offer(f"node-{i}", labels={"zone": zone}) for i, zone in enumerate("aab"))
    nodes = {node.name: node for node in (one, other, far)}
    one.add(plain)
    assert find_obstacle(lonely, other, nodes) == "node(s) didn't match pod anti-affinity rules"
    assert find_obstacle(lonely, far, nodes) == ""
    one.remove(plain.uid)
    one.add(lonely)
    assert find_obstacle(plain, other, nodes) == "node(s) didn't satisfy existing pods anti-affinity rules"
    assert find_obstacle(plain, far, nodes) == ""


def test_pods_with_affinity_go_to_its_nodes() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": HOST}
    social = build_needs(affinity={"podAffinity": {REQUIRED: [term]}})
    one, other = build_offer("node-0", build_needs()), build_offer("node-1")
    nodes = {"node-0": one, "node-1": other}
    assert find_obstacle(social, one, nodes) == ""
    assert find_obstacle(social, other, nodes) == "node(s) didn't match pod affinity rules"


def test_workers_are_spread_and_a_spare_is_on_another_node() -> None:
    machines = MachinesHarness(nodes=3)
    names = [machines.create_worker_pod(0), machines.create_worker_pod(1), machines.create_worker_pod(2, spare=True)]
    for name in names:
        machines.is_running(name)
    assert sorted(machines.get_node_name(name) for name in names) == ["node-0", "node-1", "node-2"]
    late = machines.create_worker_pod(3, spare=True)
    machines.wait_until(lambda: view_pod(machines.get_pod(late)).unschedulable_message)
    assert "anti-affinity" in view_pod(machines.get_pod(late)).unschedulable_message


def test_a_worker_is_not_placed_next_to_a_spare() -> None:
    machines = MachinesHarness(nodes=1)
    machines.is_running(machines.create_worker_pod(0, spare=True))
    name = machines.create_worker_pod(1)
    machines.wait_until(lambda: view_pod(machines.get_pod(name)).unschedulable_message)
    assert "existing pods anti-affinity" in view_pod(machines.get_pod(name)).unschedulable_message


def test_suspects_are_avoided() -> None:
    machines = MachinesHarness(nodes=3)
    names = [
        machines.create_worker_pod(ordinal, scheduling=SchedulingConstraints(avoid_nodes=["node-0", "node-2"]))
        for ordinal in range(3)
    ]
    for name in names:
        machines.is_running(name)
    assert [machines.get_node_name(name) for name in names] == ["node-1"] * 3


def test_an_unschedulable_pod_is_placed_when_a_node_is_uncordoned() -> None:
    machines = MachinesHarness(nodes=1)
    machines.get_node(0).cordon()
    name = machines.create_worker_pod()
    machines.wait_until(lambda: view_pod(machines.get_pod(name)).unschedulable_message)
    assert (
        view_pod(machines.get_pod(name)).unschedulable_message
        == "0/1 nodes are available: 1 node(s) were unschedulable."
    )
    machines.wait(30.0)
    machines.get_node(0).uncordon()
    machines.is_running(name)
    assert not view_pod(machines.get_pod(name)).unschedulable_message


def test_a_terminating_pod_keeps_its_room_until_it_is_gone() -> None:
    machines = MachinesHarness(nodes=1, cpu=2)
    spec = {"containers": [{**TRAINER, "resources": {"requests": {"cpu": "1900m"}}}]}
    first = machines.create_worker_pod(0, spec=spec)
    old = machines.is_running(first)
    old.takes = 8.0
    machines.api.delete("pods", first, NAMESPACE)
    second = machines.create_worker_pod(1, spec=spec)
    machines.wait(6.0)
    assert machines.get_node_name(second) == ""
    machines.wait_until(lambda: machines.find_pod(first) is None)
    machines.is_running(second)


def test_an_ended_pod_frees_its_room() -> None:
    machines = MachinesHarness(nodes=1, cpu=2)
    spec = {"containers": [{**TRAINER, "resources": {"requests": {"cpu": "1900m"}}}]}
    first, second = machines.create_worker_pod(0, spec=spec), machines.create_worker_pod(1, spec=spec)
    machines.is_running(first).end(1)
    machines.is_running(second)
    assert machines.get_phase(first) == "Failed"


def test_an_unschedulable_pod_delays_no_other_pod() -> None:
    machines = MachinesHarness(nodes=1)
    large = machines.create_worker_pod(0, spec={"containers": [{**TRAINER, "resources": {"requests": {"cpu": "64"}}}]})
    small = machines.create_worker_pod(1)
    machines.wait_until(lambda: machines.get_node_name(small), 1.0)
    assert machines.get_node_name(large) == ""


def test_only_a_pod_that_has_waited_for_long_backs_off() -> None:
    machines = MachinesHarness(nodes=1)
    machines.get_node(0).cordon()
    name = machines.create_worker_pod()
    for _ in range(6):  # each change is a failed attempt
        machines.wait(15.0)
        machines.get_node(0).taint("example.com/x", "NoSchedule")
        machines.wait(15.0)
        machines.get_node(0).untaint("example.com/x")
    machines.get_node(0).uncordon()
    machines.wait(0.5)
    late = machines.create_worker_pod(1)
    machines.wait_until(lambda: machines.get_node_name(late), 1.0)
    assert machines.get_node_name(name) == ""
    machines.wait_until(lambda: machines.get_node_name(name), 10.0)


def test_affinity_ignores_pods_in_other_namespaces() -> None:
    term = {"labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}, "topologyKey": HOST}
    shy = build_needs(affinity={"podAntiAffinity": {REQUIRED: [term]}})
    stranger = PodNeeds.parse(
        {"metadata": {"uid": "other", "namespace": "m", "labels": {"app": "a"}}, "spec": {"containers": []}}
    )
    assert find_reason(shy, build_offer("node-0", stranger)) == ""
    assert find_reason(shy, build_offer("node-0", build_needs())) == "node(s) didn't match pod anti-affinity rules"


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("Gt", ["7"], True),
        ("Gt", ["8"], False),
        ("Lt", ["9"], True),
        ("Lt", ["8"], False),
        ("DoesNotExist", [], False),
        ("Exists", [], True),
    ],
)
def test_selector_operators_match(operator: str, values: list[str], fits: bool) -> None:
    for key, there in (("gpus", True), ("disks", False)):
        terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]
        pod = build_needs(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}})
        expected = fits if there else operator == "DoesNotExist"
        assert (find_reason(pod, build_offer(labels={"gpus": "8"})) == "") is expected


def test_a_new_node_takes_waiting_pods() -> None:
    machines = MachinesHarness(nodes=0)
    name = machines.create_worker_pod()
    machines.wait(5.0)
    assert view_pod(machines.get_pod(name)).unschedulable_message == "no nodes available to schedule pods"
    machines.world.add_node()
    machines.is_running(name)


def test_a_gated_pod_is_not_scheduled() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod(spec={"schedulingGates": [{"name": "quota"}]})
    machines.wait(5.0)
    assert machines.get_node_name(name) == ""
    machines.api.patch("pods", name, NAMESPACE, {"spec": {"schedulingGates": None}})
    machines.is_running(name)
