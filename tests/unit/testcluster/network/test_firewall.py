"""What NetworkPolicies mean: the API's own rules, one by one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from testcluster.firewall import (
    EGRESS,
    INGRESS,
    PolicyWorld,
    build_ruleset,
    is_admitted,
    list_open_routes,
    matches_selector,
)


def pod(name: str, address: str, *, namespace: str = "a", node: str = "node-1", **labels: str) -> dict[str, Any]:
    ports = [{"name": "web", "containerPort": 8080}, {"name": "dns", "containerPort": 53, "protocol": "UDP"}]
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "main", "ports": ports}]},
        "status": {"podIP": address, "phase": "Running"},
    }


def namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def policy(*, where: str = "a", name: str = "policy", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": where}, "spec": {"podSelector": {}, **spec}}


SERVER = pod("server", "10.244.1.2", app="server")
FRIEND = pod("friend", "10.244.1.3", app="friend")
FAR = pod("far", "10.244.2.3", namespace="b", node="node-2", app="friend")
OTHER = pod("other", "10.244.2.4", namespace="b", node="node-2")
PODS = (SERVER, FRIEND, FAR, OTHER)
NAMESPACES = (namespace("a"), namespace("b", team="b"))


def world(*policies: dict[str, Any], pods: tuple[dict[str, Any], ...] = PODS) -> PolicyWorld:
    return PolicyWorld(pods, NAMESPACES, policies)


def open_to_server(*policies: dict[str, Any], port: int = 8080, protocol: str = "tcp") -> set[str]:
    open_ways = list_open_routes(SERVER, INGRESS, world(*policies))
    return {p["metadata"]["name"] for p in PODS[1:] if is_admitted(open_ways, p["status"]["podIP"], port, protocol)}


def from_peer(**peer: Any) -> dict[str, Any]:
    return policy(ingress=[{"from": [peer]}])


EVERYBODY = {"friend", "far", "other"}
IS_FRIEND = {"matchLabels": {"app": "friend"}}
TEAM_B = {"matchLabels": {"team": "b"}}


def test_a_pod_without_a_policy_is_open_both_ways() -> None:
    elsewhere = policy(where="b", policyTypes=["Ingress", "Egress"])
    unselected = policy(podSelector=IS_FRIEND)
    assert list_open_routes(SERVER, INGRESS, world(elsewhere, unselected)) is None
    assert open_to_server(elsewhere, unselected) == EVERYBODY


@pytest.mark.parametrize(
    ("found", "reached_by"),
    [
        (policy(), set()),
        (policy(ingress=[]), set()),
        (policy(ingress=[{}]), EVERYBODY),
        (from_peer(podSelector={}), {"friend"}),
        (from_peer(podSelector=IS_FRIEND), {"friend"}),
        (from_peer(namespaceSelector={}), EVERYBODY),
        (from_peer(namespaceSelector=TEAM_B), {"far", "other"}),
        (from_peer(namespaceSelector=TEAM_B, podSelector=IS_FRIEND), {"far"}),
        (policy(ingress=[{"from": [{"namespaceSelector": TEAM_B}, {"podSelector": IS_FRIEND}]}]), EVERYBODY),
        (from_peer(ipBlock={"cidr": "10.244.2.0/24"}), {"far", "other"}),
        (from_peer(ipBlock={"cidr": "0.0.0.0/0", "except": ["10.244.2.4/32", "10.244.1.0/24"]}), {"far"}),
    ],
)
def test_peers(found: dict[str, Any], reached_by: set[str]) -> None:
    assert open_to_server(found) == reached_by


def test_policies_add_up() -> None:
    assert open_to_server(policy(), from_peer(podSelector=IS_FRIEND), from_peer(namespaceSelector=TEAM_B)) == EVERYBODY


@pytest.mark.parametrize(
    ("entry", "open_ports"),
    [
        ({"port": 8080}, {("tcp", 8080)}),
        ({"port": 53, "protocol": "UDP"}, {("udp", 53)}),
        ({"port": 53, "endPort": 8080}, {("tcp", 53), ("tcp", 8080)}),
        ({"port": "web"}, {("tcp", 8080)}),
        ({"port": "dns", "protocol": "UDP"}, {("udp", 53)}),
        ({"port": "dns"}, set()),
        ({"port": "unknown"}, set()),
        ({"protocol": "UDP"}, {("udp", 53), ("udp", 8080)}),
    ],
)
def test_ports(entry: dict[str, Any], open_ports: set[tuple[str, int]]) -> None:
    open_ways = list_open_routes(SERVER, INGRESS, world(policy(ingress=[{"ports": [entry]}])))
    asked = [(protocol, port) for protocol in ("tcp", "udp") for port in (53, 8080)]
    assert {(w, p) for w, p in asked if is_admitted(open_ways, "10.244.2.4", p, w)} == open_ports


def test_a_port_of_a_native_sidecar_has_its_name_and_that_of_an_init_container_is_gone() -> None:
    server = copy.deepcopy(SERVER)
    ports = [{"name": "metrics", "containerPort": 9464}]
    server["spec"]["initContainers"] = [{"name": "sidecar", "restartPolicy": "Always", "ports": ports}]
    found = policy(ingress=[{"ports": [{"port": "metrics"}]}])
    assert is_admitted(list_open_routes(server, INGRESS, world(found)), "10.0.0.1", 9464)
    del server["spec"]["initContainers"][0]["restartPolicy"]
    assert not is_admitted(list_open_routes(server, INGRESS, world(found)), "10.0.0.1", 9464)


def test_egress_isolates_only_where_a_policy_says_so() -> None:
    found = policy(egress=[{"to": [{"podSelector": IS_FRIEND}], "ports": [{"port": 80}, {"port": "web"}]}])
    open_ways = list_open_routes(SERVER, EGRESS, world(found))
    assert [p["metadata"]["name"] for p in PODS if is_admitted(open_ways, p["status"]["podIP"], 80)] == ["friend"]
    assert not is_admitted(open_ways, "10.244.1.3", 8080), "names of ports in egress rules are not understood"
    assert list_open_routes(SERVER, EGRESS, world(policy(ingress=[]))) is None
    assert list_open_routes(SERVER, INGRESS, world(policy(policyTypes=["Egress"]))) is None


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"hostNetwork": True}},  # its address is the node's
        {"status": {"phase": "Succeeded"}},  # its address may be another's by now
        {"status": {"phase": "Failed"}},
        {"status": {"podIP": None}},
    ],
)
def test_a_pod_without_an_address_of_its_own_is_nobody(change: dict[str, Any]) -> None:
    friend = copy.deepcopy(FRIEND)
    for part, fields in change.items():
        friend[part].update(fields)
    found = world(from_peer(podSelector=IS_FRIEND), pods=(SERVER, friend))
    assert not is_admitted(list_open_routes(SERVER, INGRESS, found), "10.244.1.3", 80)
    assert "friend" not in build_ruleset("node-1", found)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ({"key": "app", "operator": "In", "values": ["server", "x"]}, True),
        ({"key": "app", "operator": "In", "values": ["x"]}, False),
        ({"key": "app", "operator": "NotIn", "values": ["server"]}, False),
        ({"key": "none", "operator": "NotIn", "values": ["server"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "none", "operator": "Exists"}, False),
        ({"key": "app", "operator": "DoesNotExist"}, False),
        ({"key": "none", "operator": "DoesNotExist"}, True),
    ],
)
def test_expressions_of_selectors(expression: dict[str, Any], holds: bool) -> None:
    assert matches_selector({"matchExpressions": [expression]}, {"app": "server"}) == holds
    assert not matches_selector({"matchExpressions": [expression], "matchLabels": {"app": "y"}}, {"app": "server"})


class TestRuleset:
    """The text for nft. That the kernel does by it what it should, tests/cluster/test_network_policies.py shows."""

    def test_isolated_pods_of_the_node_have_a_chain_that_ends_in_a_drop(self) -> None:
        rules = build_ruleset("node-1", world(policy(podSelector=IS_FRIEND, ingress=[{"ports": [{"port": 80}]}])))
        chain = re.search(r"chain ingress-10\.244\.1\.3 \{\n(.*?)\n\}", rules, re.DOTALL)
        assert chain is not None
        assert chain[1].splitlines() == [
            "ip saddr 10.244.1.3 return",
            "ip saddr { 0.0.0.0/0 } tcp dport 80-80 return",
            'counter drop comment "a/friend"',
        ]
        assert "ip daddr 10.244.1.3 jump ingress-10.244.1.3" in rules.splitlines()
        assert "10.244.1.2" not in rules, "the server is not selected"

    def test_other_nodes_pods_are_none_of_its_business(self) -> None:
        empty = build_ruleset("node-1", world())
        assert build_ruleset("node-1", world(policy(where="b"))) == empty
        assert build_ruleset("node-2", world(policy(where="b"))) != empty

    def test_the_order_in_which_pods_became_known_does_not_matter(self) -> None:
        found = (from_peer(podSelector={}), from_peer(namespaceSelector=TEAM_B))
        assert build_ruleset("node-1", world(*found)) == build_ruleset("node-1", world(*found[::-1], pods=PODS[::-1]))

    def test_both_directions_are_asked(self) -> None:
        lines = build_ruleset("node-1", world(policy(policyTypes=["Ingress", "Egress"]))).splitlines()
        jumps = [line for line in lines if " jump " in line and "10.244.1.2" in line]
        assert jumps == [
            "ip saddr 10.244.1.2 jump egress-10.244.1.2",
            "ip daddr 10.244.1.2 jump ingress-10.244.1.2",
        ]
        assert lines.index("ct state established,related accept") < lines.index(jumps[0])
