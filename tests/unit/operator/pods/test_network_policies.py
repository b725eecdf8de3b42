"""Which pods the NetworkPolicy of a job admits, by the meaning of such policies rather than their text."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import CHECKPOINT_SERVER_PORT
from pacekeeper_operator.api.names import LABEL_JOB, METRICS_PORT
from pacekeeper_operator.api.training_job import AccessMode, CheckpointSpec, JobSpec, TrainingJob
from pacekeeper_operator.pods.network_policies import (
    LABEL_NAMESPACE,
    build_network_policy,
    build_policy_name,
    derive_peers_from_url,
    is_same_policy,
    parse_peers,
)
from pacekeeper_operator.settings import Settings
from testcluster.firewall import EGRESS, INGRESS, PolicyWorld, is_admitted, list_open_routes

JOB = TrainingJob("team-a", "gpt", "uid-of-gpt", 1, JobSpec({}))
SYSTEM = "pacekeeper-system"
MONITORING = {"namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: "monitoring"}}}
ANY_PORT = 31337


def build_pod(name: str, namespace: str, address: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "node-1", "containers": [{"name": "trainer"}]},
        "status": {"podIP": address, "phase": "Running"},
    }


WORKER = build_pod("gpt-w0-1", "team-a", "10.0.0.1", **{LABEL_JOB: "gpt"})
PODS = {
    "peer": build_pod("gpt-w1-1", "team-a", "10.0.0.2", **{LABEL_JOB: "gpt"}),
    "other job": build_pod("bert-w0-1", "team-a", "10.0.0.3", **{LABEL_JOB: "bert"}),
    "neighbor": build_pod("notebook", "team-a", "10.0.0.4"),
    "impostor": build_pod("gpt-w9-1", "team-b", "10.0.0.5", **{LABEL_JOB: "gpt"}),
    "operator": build_pod("operator", SYSTEM, "10.0.0.6"),
    "prometheus": build_pod("prometheus", "monitoring", "10.0.0.7"),
}
NAMESPACES = [
    {"metadata": {"name": name, "labels": {LABEL_NAMESPACE: name}}}
    for name in ("team-a", "team-b", SYSTEM, "monitoring")
]


def test_workers_with_their_nodes_addresses_reach_the_checkpoint_server() -> None:
    """No selector matches them, and the server authenticates its callers."""
    for host_network in (True, False):
        checkpoint = CheckpointSpec(volume_claim_name="claim", access_mode=AccessMode.READ_WRITE_ONCE)
        job = replace(JOB, spec=JobSpec({"spec": {"hostNetwork": host_network}}, checkpoint=checkpoint))
        rules = build_network_policy(job, SYSTEM, ())["spec"]["ingress"]
        assert ({"ports": [{"protocol": "TCP", "port": CHECKPOINT_SERVER_PORT}]} in rules) == host_network


def build_policy(*scrapers: dict[str, Any]) -> dict[str, Any]:
    return build_network_policy(JOB, SYSTEM, scrapers)


def list_admitted_pods(
    port: int, *scrapers: dict[str, Any], other_policies: tuple[dict[str, Any], ...] = ()
) -> set[str]:
    """Return the pods that may connect to this port of the worker."""
    cluster = PolicyWorld([WORKER, *PODS.values()], NAMESPACES, [build_policy(*scrapers), *other_policies])
    open_routes = list_open_routes(WORKER, INGRESS, cluster)
    return {name for name, found in PODS.items() if is_admitted(open_routes, found["status"]["podIP"], port)}


def test_training_ports_are_open_to_the_job_itself_only() -> None:
    assert list_admitted_pods(ANY_PORT, MONITORING) == {"peer"}


def test_metrics_are_read_by_the_operator_and_by_the_scrapers_too() -> None:
    assert list_admitted_pods(METRICS_PORT, MONITORING) == {"peer", "operator", "prometheus"}
    assert list_admitted_pods(METRICS_PORT) == {"peer", "operator"}


def test_a_policy_of_the_user_admits_more_pods() -> None:
    own_policy = {
        "metadata": {"name": "tensorboard", "namespace": "team-a"},
        "spec": {
            "podSelector": {"matchLabels": {LABEL_JOB: "gpt"}},
            "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": 6006}]}],
        },
    }
    assert list_admitted_pods(6006, other_policies=(own_policy,)) == {"peer", "other job", "neighbor"}
    assert list_admitted_pods(ANY_PORT, other_policies=(own_policy,)) == {"peer"}


def test_egress_of_workers_and_other_pods_are_not_restricted() -> None:
    cluster = PolicyWorld([WORKER, *PODS.values()], NAMESPACES, [build_policy()])
    assert list_open_routes(WORKER, EGRESS, cluster) is None
    assert list_open_routes(PODS["other job"], INGRESS, cluster) is None
    assert list_open_routes(PODS["impostor"], INGRESS, cluster) is None


def test_the_policy_is_owned_by_its_job() -> None:
    metadata = build_policy()["metadata"]
    assert metadata["namespace"] == "team-a"
    assert metadata["name"] == build_policy_name(JOB) != JOB.name
    assert [(owner["kind"], owner["uid"]) for owner in metadata["ownerReferences"]] == [("TrainingJob", "uid-of-gpt")]


def read_stored(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a policy as the API server returns it."""
    found = copy.deepcopy(wanted)
    found["metadata"] |= {"uid": "1", "resourceVersion": "7", "generation": 1, "managedFields": []}
    found["metadata"]["labels"]["team"] = "a"
    return found


def test_an_unchanged_policy_is_not_written_again() -> None:
    everything: dict[str, Any] = {"matchLabels": {}, "matchExpressions": []}
    untidy = {"namespaceSelector": everything, "podSelector": {"matchLabels": {"a": "b"}}}
    wanted = build_policy(untidy, {"ipBlock": {"cidr": "10.200.0.1/32", "except": []}})
    assert wanted["spec"]["ingress"][1]["from"][1:] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"a": "b"}}},
        {"ipBlock": {"cidr": "10.200.0.1/32"}},
    ], "the API server leaves out what is empty, but not a selector of everything"
    assert is_same_policy(read_stored(wanted), wanted)


def test_a_changed_policy_is_written_again() -> None:
    wanted = build_policy(MONITORING)
    open_to_all, unowned, unlabeled, other_job, empty = (read_stored(wanted) for _ in range(5))
    open_to_all["spec"]["ingress"].append({})
    del unowned["metadata"]["ownerReferences"]
    unlabeled["metadata"]["labels"] = None
    other_job["metadata"]["ownerReferences"][0]["uid"] = "uid of an earlier job"
    empty["spec"] = None
    assert not any(is_same_policy(found, wanted) for found in (open_to_all, unowned, unlabeled, other_job, empty))
    assert not is_same_policy(read_stored(build_policy()), wanted), "the setting has changed"


@pytest.mark.parametrize(
    ("url", "peers"),
    [
        ("", []),
        ("http://prometheus:9090", []),
        ("http://localhost:9090", []),
        ("http://127.0.0.1:9090", []),
        ("http://prometheus.monitoring:9090/path", [MONITORING]),
        ("http://prometheus.monitoring.svc.cluster.local:9090", [MONITORING]),
        ("http://10.200.0.1:9090", [{"ipBlock": {"cidr": "10.200.0.1/32"}}]),
        ("http://[fd00::1]:9090", [{"ipBlock": {"cidr": "fd00::1/128"}}]),
    ],
)
def test_scrapers_are_derived_from_the_prometheus_url(url: str, peers: list[Any]) -> None:
    assert list(Settings(prometheus_url=url).scrapers) == peers


def test_a_prometheus_url_without_a_known_scraper_requires_a_setting() -> None:
    elsewhere = "https://metrics.platform.example.com"
    with pytest.raises(InputError, match=r"PACEKEEPER_METRICS_FROM: .*does not show which pods scrape"):
        derive_peers_from_url(elsewhere)
    with pytest.raises(InputError, match="PACEKEEPER_METRICS_FROM"):
        Settings(prometheus_url=elsewhere)
    assert Settings(prometheus_url=elsewhere, metrics_from=(MONITORING,)).scrapers == (MONITORING,)
    assert not Settings(prometheus_url=elsewhere, network_policies=False).network_policies


def test_peers_are_read_from_the_environment() -> None:
    text = json.dumps([MONITORING])
    assert Settings.from_environment({"PACEKEEPER_METRICS_FROM": text}).metrics_from == (MONITORING,)
    assert parse_peers("[]") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("monitoring", "is not JSON"),
        ('{"podSelector": {}}', "is not a list"),
        ("[{}]", "is not a list of NetworkPolicy peers; an empty peer admits nothing"),
        ('["monitoring"]', "is not a list"),
        ('[{"namespace": "monitoring"}]', "'namespace': a peer has only ipBlock, namespaceSelector, podSelector"),
    ],
)
def test_invalid_peers_are_refused_at_the_start(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=f"PACEKEEPER_METRICS_FROM: .*{complaint}"):
        Settings.from_environment({"PACEKEEPER_METRICS_FROM": text})
