"""Whom a job's NetworkPolicy lets in, judged by what such policies mean rather than by their text."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import LABEL_JOB, METRICS_PORT
from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
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


def pod(name: str, namespace: str, address: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "node-1", "containers": [{"name": "trainer"}]},
        "status": {"podIP": address, "phase": "Running"},
    }


WORKER = pod("gpt-w0-1", "team-a", "10.0.0.1", **{LABEL_JOB: "gpt"})
PODS = {
    "peer": pod("gpt-w1-1", "team-a", "10.0.0.2", **{LABEL_JOB: "gpt"}),
    "other job": pod("bert-w0-1", "team-a", "10.0.0.3", **{LABEL_JOB: "bert"}),
    "neighbor": pod("notebook", "team-a", "10.0.0.4"),
    "impostor": pod("gpt-w9-1", "team-b", "10.0.0.5", **{LABEL_JOB: "gpt"}),
    "operator": pod("operator", SYSTEM, "10.0.0.6"),
    "prometheus": pod("prometheus", "monitoring", "10.0.0.7"),
}
NAMESPACES = [
    {"metadata": {"name": name, "labels": {LABEL_NAMESPACE: name}}}
    for name in ("team-a", "team-b", SYSTEM, "monitoring")
]


def policy(*scrapers: dict[str, Any]) -> dict[str, Any]:
    return build_network_policy(JOB, SYSTEM, scrapers)


def let_in(port: int, *scrapers: dict[str, Any], beside: tuple[dict[str, Any], ...] = ()) -> set[str]:
    """Who may connect to this port of the worker."""
    world = PolicyWorld([WORKER, *PODS.values()], NAMESPACES, [policy(*scrapers), *beside])
    open_ways = list_open_routes(WORKER, INGRESS, world)
    return {name for name, found in PODS.items() if is_admitted(open_ways, found["status"]["podIP"], port)}


def test_training_ports_are_open_to_the_job_itself_only() -> None:
    assert let_in(ANY_PORT, MONITORING) == {"peer"}


def test_metrics_are_read_by_the_operator_and_by_the_scrapers_too() -> None:
    assert let_in(METRICS_PORT, MONITORING) == {"peer", "operator", "prometheus"}
    assert let_in(METRICS_PORT) == {"peer", "operator"}


def test_a_policy_of_the_users_own_adds_to_it() -> None:
    mine = {
        "metadata": {"name": "tensorboard", "namespace": "team-a"},
        "spec": {
            "podSelector": {"matchLabels": {LABEL_JOB: "gpt"}},
            "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": 6006}]}],
        },
    }
    assert let_in(6006, beside=(mine,)) == {"peer", "other job", "neighbor"}
    assert let_in(ANY_PORT, beside=(mine,)) == {"peer"}


def test_what_workers_ask_for_and_pods_of_others_are_left_alone() -> None:
    world = PolicyWorld([WORKER, *PODS.values()], NAMESPACES, [policy()])
    assert list_open_routes(WORKER, EGRESS, world) is None
    assert list_open_routes(PODS["other job"], INGRESS, world) is None
    assert list_open_routes(PODS["impostor"], INGRESS, world) is None


def test_it_goes_with_its_job() -> None:
    metadata = policy()["metadata"]
    assert metadata["namespace"] == "team-a"
    assert metadata["name"] == build_policy_name(JOB) != JOB.name
    assert [(owner["kind"], owner["uid"]) for owner in metadata["ownerReferences"]] == [("TrainingJob", "uid-of-gpt")]


def stored(wanted: dict[str, Any]) -> dict[str, Any]:
    """What the API server gives back."""
    found = copy.deepcopy(wanted)
    found["metadata"] |= {"uid": "1", "resourceVersion": "7", "generation": 1, "managedFields": []}
    found["metadata"]["labels"]["team"] = "a"
    return found


def test_what_was_written_so_is_not_written_again() -> None:
    everything: dict[str, Any] = {"matchLabels": {}, "matchExpressions": []}
    untidy = {"namespaceSelector": everything, "podSelector": {"matchLabels": {"a": "b"}}}
    wanted = policy(untidy, {"ipBlock": {"cidr": "10.200.0.1/32", "except": []}})
    assert wanted["spec"]["ingress"][1]["from"][1:] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"a": "b"}}},
        {"ipBlock": {"cidr": "10.200.0.1/32"}},
    ], "the API server leaves out what is empty, but not a selector of everything"
    assert is_same_policy(stored(wanted), wanted)


def test_what_somebody_has_changed_is_written_again() -> None:
    wanted = policy(MONITORING)
    everybody, unowned, unlabelled, other_job, empty = (stored(wanted) for _ in range(5))
    everybody["spec"]["ingress"].append({})
    del unowned["metadata"]["ownerReferences"]
    unlabelled["metadata"]["labels"] = None
    other_job["metadata"]["ownerReferences"][0]["uid"] = "of the job of this name before"
    empty["spec"] = None
    assert not any(is_same_policy(found, wanted) for found in (everybody, unowned, unlabelled, other_job, empty))
    assert not is_same_policy(stored(policy()), wanted), "the setting has changed"


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
def test_prometheus_url_tells_who_scrapes(url: str, peers: list[Any]) -> None:
    assert list(Settings(prometheus_url=url).scrapers) == peers


def test_where_it_does_not_tell_the_operator_asks_before_it_misses_metrics() -> None:
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
def test_peers_that_the_api_server_would_refuse_are_refused_at_the_start(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=f"PACEKEEPER_METRICS_FROM: .*{complaint}"):
        Settings.from_environment({"PACEKEEPER_METRICS_FROM": text})
