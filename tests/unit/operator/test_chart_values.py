"""Each value of the chart: it changes what it says and nothing else, leaves nothing behind, and is refused if wrong."""

from __future__ import annotations

import functools
import json
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import describe
from testing.kubernetes import api_schema
from testing.kubernetes.chart import CHART, RELEASE, REPOSITORY, render_chart, run_helm

DIGEST = "sha256:" + 64 * "a"
DEPLOYMENT, HOOK = "Deployment spec.template.", "Job-release-nodes spec.template."
CONTAINER = "spec.containers.0."
ENV = f"{DEPLOYMENT}{CONTAINER}env."
IMAGE, SIDECAR = "pacekeeper.dev/operator", "sidecar:0.1.0"
ISSUER: dict[str, Any] = {"tls.certManager.enabled": True, "tls.certManager.issuerRef.name": "ours"}
EXPORTER: dict[str, Any] = {"dcgm.podMonitor.enabled": True, "dcgm.namespace": "gpu"}
POLICIES = ("owned", "pods", "nodes", "jobs", "secrets", "states")


@dataclass(frozen=True)
class Change:
    """`value`, in addition to `given`, changes only `expected`: by object and path; None: it is removed."""

    value: Any
    expected: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)


def expect_in_both_pods(path: str, value: Any) -> dict[str, Any]:
    """Expect `value` in the operator's pod and in the pod that releases nodes."""
    return {DEPLOYMENT + path: value, HOOK + path: value}


def expect_setting(name: str, value: str, **more: Any) -> dict[str, Any]:
    return {f"{ENV}PACEKEEPER_{name}": value, **more}


def expect_policy_change(name: str, path: str, value: Any) -> dict[str, Any]:
    return {f"ValidatingAdmissionPolicy-{name} spec.{path}": value}


TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
SPREAD_PATH = f"{DEPLOYMENT}spec.topologySpreadConstraints.0."
PEER = {"ipBlock": {"cidr": "10.0.0.1/32"}}

CHANGES: dict[str, Change] = {
    "replicas": Change(3, {f"{DEPLOYMENT[: -len('spec.template.')]}spec.replicas": 3}),
    "image.repository": Change(
        "mine/it", expect_setting("IMAGE", "mine/it:0.1.0") | expect_in_both_pods(f"{CONTAINER}image", "mine/it:0.1.0")
    ),
    "image.tag": Change(
        "v2", expect_setting("IMAGE", f"{IMAGE}:v2") | expect_in_both_pods(f"{CONTAINER}image", f"{IMAGE}:v2")
    ),
    "image.digest": Change(
        DIGEST,
        expect_setting("IMAGE", f"{IMAGE}@{DIGEST}") | expect_in_both_pods(f"{CONTAINER}image", f"{IMAGE}@{DIGEST}"),
        given={"image.tag": "v2"},
    ),
    "image.pullPolicy": Change(
        "Always",
        expect_setting("IMAGE_PULL_POLICY", "Always") | expect_in_both_pods(f"{CONTAINER}imagePullPolicy", "Always"),
    ),
    "imagePullSecrets": Change(
        [{"name": "a"}],
        expect_in_both_pods("spec.imagePullSecrets.0.name", "a") | expect_setting("IMAGE_PULL_SECRETS", "a"),
    ),
    "sidecarImage.repository": Change("sidecar", expect_setting("SIDECAR_IMAGE", SIDECAR)),
    "sidecarImage.tag": Change(
        "v2", expect_setting("SIDECAR_IMAGE", "sidecar:v2"), given={"sidecarImage.repository": "sidecar"}
    ),
    "sidecarImage.digest": Change(
        DIGEST,
        expect_setting("SIDECAR_IMAGE", f"sidecar@{DIGEST}"),
        given={"sidecarImage.repository": "sidecar", "sidecarImage.tag": "v2"},
    ),
    "sidecarImage.pullPolicy": Change(
        "Never", expect_setting("SIDECAR_PULL_POLICY", "Never"), given={"sidecarImage.repository": "sidecar"}
    ),
    "sidecarResources.requests": Change(
        {"cpu": 1},
        expect_setting("SIDECAR_RESOURCES", '{"limits":{"memory":"256Mi"},"requests":{"cpu":1,"memory":"64Mi"}}'),
    ),
    "sidecarResources.limits": Change(
        {"cpu": "100m"},
        expect_setting(
            "SIDECAR_RESOURCES",
            '{"limits":{"cpu":"100m","memory":"256Mi"},"requests":{"cpu":"20m","memory":"64Mi"}}',
        ),
    ),
    "prometheus.url": Change(
        "http://prometheus:9095",
        expect_setting("PROMETHEUS_URL", "http://prometheus:9095") | {"NetworkPolicy spec.egress.2.ports.0.port": 9095},
        given={"prometheus.url": "http://prometheus:9090"},
    ),
    "prometheus.dcgmNodeLabel": Change("node", expect_setting("DCGM_NODE_LABEL", "node")),
    "dcgm.namespace": Change("gpu", expect_setting("DCGM_NAMESPACE", "gpu")),
    "dcgm.podMonitor.matchLabels": Change(
        {"app.kubernetes.io/name": "other"},
        {"PodMonitor-dcgm spec.selector.matchLabels.app.kubernetes.io/name": "other"},
        given=EXPORTER,
    ),
    "dcgm.podMonitor.port": Change("http", {"PodMonitor-dcgm spec.podMetricsEndpoints.0.port": "http"}, given=EXPORTER),
    "dcgm.podMonitor.interval": Change(
        "9s", {"PodMonitor-dcgm spec.podMetricsEndpoints.0.interval": "9s"}, given=EXPORTER
    ),
    "dcgm.podMonitor.labels": Change({"a": "b"}, {"PodMonitor-dcgm metadata.labels.a": "b"}, given=EXPORTER),
    "policy.mode": Change("Recommend", expect_setting("MODE", "Recommend")),
    "policy.pause": Change(True, expect_setting("PAUSED", "true")),
    "policy.quarantine.mode": Change("Act", expect_setting("QUARANTINE_MODE", "Act")),
    "policy.quarantine.maxNodes": Change(7, expect_setting("QUARANTINE_MAX_NODES", "7")),
    "policy.quarantine.maxShare": Change(0.25, expect_setting("QUARANTINE_MAX_SHARE", "0.25")),
    "policy.quarantine.breakerNodes": Change(4, expect_setting("BREAKER_NODES", "4")),
    "policy.quarantine.conditions": Change(
        ["GpuFault", "Gpu=False"], expect_setting("QUARANTINE_CONDITIONS", "GpuFault,Gpu=False")
    ),
    "policy.quarantine.expiresAfter": Change("90m", expect_setting("QUARANTINE_EXPIRES_AFTER", "90m")),
    "policy.quarantine.releaseProbes": Change(1, expect_setting("RELEASE_PROBES", "1")),
    "policy.nodeHealth.cordons": Change(False, expect_setting("LEAVE_CORDONED", "false")),
    "policy.nodeHealth.taints": Change(["a", "b=c:NoExecute"], expect_setting("LEAVE_TAINTS", "a,b=c:NoExecute")),
    "policy.nodeHealth.conditions": Change([], expect_setting("LEAVE_CONDITIONS", "")),
    "policy.diagnosis.linkProbesPerHour": Change(5, expect_setting("LINK_PROBES_PER_HOUR", "5")),
    "policy.diagnosis.profilesPerHour": Change(0, expect_setting("PROFILES_PER_HOUR", "0")),
    "policy.traffic.planning": Change(False, expect_setting("TRAFFIC_PLANNING", "false")),
    "policy.incidentRetention": Change("24h", expect_setting("INCIDENT_RETENTION", "24h")),
    "probe.runtimeClassName": Change("nvidia", expect_setting("PROBE_RUNTIME_CLASS", "nvidia")),
    "probe.tolerations": Change(
        [TOLERATION],
        expect_setting("PROBE_TOLERATIONS", json.dumps([TOLERATION], separators=(",", ":"), sort_keys=True)),
    ),
    "logLevel": Change("debug", expect_setting("LOG_LEVEL", "DEBUG")),
    "service.clusterIP": Change(
        "fd00::50", {"Service spec.clusterIP": "fd00::50"} | expect_setting("ADDRESS", "[fd00::50]:8443")
    ),
    "service.port": Change(
        9443,
        {"Service spec.ports.0.port": 9443, f"{DEPLOYMENT}{CONTAINER}ports.0.containerPort": 9443}
        | expect_setting("PORT", "9443"),
    ),
    "serviceAccount.annotations": Change({"a": "b"}, {"ServiceAccount metadata.annotations.a": "b"}),
    "tls.certManager.issuerRef.name": Change("other", {"Certificate spec.issuerRef.name": "other"}, given=ISSUER),
    "tls.certManager.issuerRef.kind": Change(
        "ClusterIssuer", {"Certificate spec.issuerRef.kind": "ClusterIssuer"}, given=ISSUER
    ),
    "tls.certManager.issuerRef.group": Change("g", {"Certificate spec.issuerRef.group": "g"}, given=ISSUER),
    "tls.certManager.duration": Change("1h", {"Certificate spec.duration": "1h"}, given=ISSUER),
    "tls.certManager.renewBefore": Change("1h", {"Certificate spec.renewBefore": "1h"}, given=ISSUER),
    "admissionPolicy.protectedNamespaces": Change(
        ["vault"], expect_policy_change("owned", "validations.0.expression", "!(request.namespace in ['vault'])")
    ),
    "resources.requests": Change({"cpu": "1"}, expect_in_both_pods(f"{CONTAINER}resources.requests.cpu", "1")),
    "resources.limits": Change({"memory": "1Gi"}, expect_in_both_pods(f"{CONTAINER}resources.limits.memory", "1Gi")),
    "extraEnv": Change(
        [{"name": "HTTPS_PROXY", "value": "http://p"}], expect_in_both_pods(f"{CONTAINER}env.HTTPS_PROXY", "http://p")
    ),
    "nodeSelector": Change({"pool": "infra"}, expect_in_both_pods("spec.nodeSelector.pool", "infra")),
    "tolerations": Change(
        [TOLERATION],
        {f"{DEPLOYMENT}spec.tolerations.2.{name}": value for name, value in TOLERATION.items()}
        | {f"{HOOK}spec.tolerations.0.{name}": value for name, value in TOLERATION.items()},
    ),
    "affinity": Change(
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}},
        expect_in_both_pods(
            "spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.topologyKey", "zone"
        ),
    ),
    "topologySpreadConstraints": Change(
        [SPREAD],
        {SPREAD_PATH + name: value for name, value in SPREAD.items()}
        | {
            f"{SPREAD_PATH}labelSelector.matchLabels.app.kubernetes.io/{part}": RELEASE for part in ("name", "instance")
        },
        given={"topologySpreadConstraints": []},
    ),
    "priorityClassName": Change("high", expect_in_both_pods("spec.priorityClassName", "high")),
    "podAnnotations": Change({"a": "b"}, expect_in_both_pods("metadata.annotations.a", "b")),
    "podLabels": Change({"a": "b"}, expect_in_both_pods("metadata.labels.a", "b")),
    "podDisruptionBudget.maxUnavailable": Change(
        0, {"PodDisruptionBudget spec.maxUnavailable": 0}, given={"podDisruptionBudget.enabled": True}
    ),
    "release.timeoutSeconds": Change(30, {"Job-release-nodes spec.activeDeadlineSeconds": 30}),
    "networkPolicy.jobs": Change(False, expect_setting("NETWORK_POLICIES", "false")),
    "networkPolicy.jobNamespaceSelector": Change(
        {"matchLabels": {"a": "b"}},
        {
            f"NetworkPolicy spec.{path}.namespaceSelector{more}": value
            for path in ("ingress.0.from.0", "egress.2.to.0")
            for more, value in {"": None, ".matchLabels.a": "b"}.items()
        },
    ),
    "networkPolicy.metricsFrom": Change(
        [PEER],
        {"NetworkPolicy spec.ingress.1.from.0.ipBlock.cidr": "10.0.0.1/32"}
        | expect_setting("METRICS_FROM", json.dumps([PEER], separators=(",", ":"))),
    ),
    "networkPolicy.nodeCIDRs": Change(
        ["10.0.0.0/16"],
        {
            f"NetworkPolicy spec.{path}.ipBlock.cidr": "10.0.0.0/16"
            for path in ("ingress.0.from.1", "egress.3.to.0", "egress.4.to.0")
        },
    ),
    "networkPolicy.egress.enabled": Change(
        False,
        {"NetworkPolicy spec.egress": None, "NetworkPolicy spec.policyTypes.1": None}
        | {f"NetworkPolicy-probes spec.egress.{rule}": None for rule in ("0.to", "0.ports", "1")}
        | {"NetworkPolicy-probes spec.egress.0": {}},
    ),
    "networkPolicy.egress.apiServerPorts": Change(
        [443, 6443, 16443], {f"NetworkPolicy{name} spec.egress.1.ports.2.port": 16443 for name in ("", "-probes")}
    ),
    "networkPolicy.egress.apiServerCIDRs": Change(
        ["10.0.0.1/32"],
        {f"NetworkPolicy{name} spec.egress.1.to.0.ipBlock.cidr": "10.0.0.1/32" for name in ("", "-probes")},
    ),
    "networkPolicy.egress.prometheusPorts": Change(
        [10902], {"NetworkPolicy spec.egress.2.ports.0.port": 10902}, given={"prometheus.url": "http://prometheus:9090"}
    ),
    "networkPolicy.egress.webhookPorts": Change(
        [8443],
        {"NetworkPolicy spec.egress.2.ports.0.port": 8443},
        given={"policy.incidentWebhook.secretName": "hook"},
    ),
    "podMonitor.interval": Change(
        "9s",
        {f"PodMonitor{name} spec.podMetricsEndpoints.0.interval": "9s" for name in ("", "-workers")},
        given={"podMonitor.enabled": True},
    ),
    "podMonitor.labels": Change(
        {"a": "b"},
        {f"PodMonitor{name} metadata.labels.a": "b" for name in ("", "-workers")},
        given={"podMonitor.enabled": True},
    ),
    "serviceMonitor.interval": Change(
        "9s", {"ServiceMonitor spec.endpoints.0.interval": "9s"}, given={"serviceMonitor.enabled": True}
    ),
    "serviceMonitor.labels": Change(
        {"a": "b"}, {"ServiceMonitor metadata.labels.a": "b"}, given={"serviceMonitor.enabled": True}
    ),
    "prometheusRule.labels": Change(
        {"a": "b"}, {"PrometheusRule metadata.labels.a": "b"}, given={"prometheusRule.enabled": True}
    ),
}


@dataclass(frozen=True)
class Switch:
    """The objects that exist only with it, where the chart has `given`, and what else it changes."""

    objects: frozenset[str]
    touches: frozenset[str] = frozenset()
    given: Mapping[str, Any] = field(default_factory=dict)


def define_switch(*objects: str, touches: tuple[str, ...] = (), given: Mapping[str, Any] | None = None) -> Switch:
    return Switch(frozenset(objects), frozenset(touches), given or {})


def name_policies(*names: str) -> tuple[str, ...]:
    return tuple(f"ValidatingAdmissionPolicy{part}-{name}" for name in names for part in ("", "Binding"))


SWITCHES: dict[str, Switch] = {
    "admissionPolicy.enabled": define_switch(*name_policies(*POLICIES)),
    "crds.enabled": define_switch(
        *(
            f"CustomResourceDefinition {yaml.safe_load(path.read_text())['metadata']['name']}"
            for path in REPOSITORY.glob("crds/*.yaml")
        )
    ),
    "dcgm.podMonitor.enabled": define_switch("PodMonitor-dcgm", given={"dcgm.namespace": "gpu"}),
    "jobSets.enabled": define_switch(touches=("ClusterRole-jobs", "Deployment", "ValidatingAdmissionPolicy-jobs")),
    "monitoring.dashboards": define_switch("ConfigMap-dashboard-job", "ConfigMap-dashboard-platform"),
    "networkPolicy.enabled": define_switch("NetworkPolicy", "NetworkPolicy-probes"),
    "podDisruptionBudget.enabled": define_switch("PodDisruptionBudget"),
    "podMonitor.enabled": define_switch("PodMonitor", "PodMonitor-workers"),
    "prometheusRule.enabled": define_switch("PrometheusRule"),
    "serviceAccount.create": define_switch("ServiceAccount mine", given={"serviceAccount.name": "mine"}),
    "serviceMonitor.enabled": define_switch("ServiceMonitor"),
    "watch.enabled": define_switch(
        *("MutatingAdmissionPolicy-watch", "MutatingAdmissionPolicy-watch-pods"),
        *("MutatingAdmissionPolicyBinding-watch", "MutatingAdmissionPolicyBinding-watch-pods"),
        touches=("ClusterRole", "ClusterRole-jobs", "Deployment", "Role", "ValidatingAdmissionPolicy-owned"),
        given={"watch.mode": "Policy"},
    ),
    "watch.prePull.enabled": define_switch(
        "DaemonSet-watch-image", touches=("Deployment", "Role"), given={"watch.enabled": True}
    ),
    "tls.certManager.enabled": define_switch(
        "Certificate", touches=("Deployment", "Role"), given={"tls.certManager.issuerRef.name": "ours"}
    ),
}

ELSEWHERE = {
    "global": "nothing of it is read",
    "nameOverride": "test_names_can_be_chosen",
    "fullnameOverride": "test_names_can_be_chosen",
    "commonLabels": "test_common_labels_are_everywhere",
    "serviceAccount.name": "test_another_account_gets_all_that_the_operators_would",
    "watch.retention": "test_chart.py",
    "watch.teamLabel": "test_chart.py",
    "watchNamespaces": "test_chart.py",
    "tls.existingSecret": "test_chart.py",
    "admissionPolicy.hostAccess": "test_chart.py",
    "admissionPolicy.hostNetwork": "test_chart.py",
    "admissionPolicy.stateWriters.users": "test_state_writers_are_exempt",
    "admissionPolicy.stateWriters.groups": "test_state_writers_are_exempt",
    "crds.keep": "test_chart.py",
    "policy.quarantine.condition": "test_chart.py",
    "monitoring.dashboardLabels": "test_dashboards.py",
    "prometheus.secretName": "test_chart.py",
    "policy.incidentWebhook.secretName": "test_chart.py",
    "prometheus.headers": "test_chart.py",
    "prometheus.matchers": "test_chart.py",
    "prometheusRule.runbookUrl": "test_alerts.py",
    "watch.mode": "test_watch_chart.py",
    "watch.image.repository": "test_watch_chart.py",
    "watch.image.tag": "test_watch_chart.py",
    "watch.image.digest": "test_watch_chart.py",
    "watch.image.pullPolicy": "test_watch_chart.py",
    "watch.prePull.nodeSelector": "test_watch_chart.py",
    "watch.prePull.tolerations": "test_watch_chart.py",
    "watch.namespaceSelector": "test_watch_chart.py",
    "watch.kinds": "test_watch_chart.py",
    "watch.resources.requests": "test_watch_chart.py",
    "watch.resources.limits": "test_watch_chart.py",
    "watch.restart": "test_watch_chart.py",
    "watch.kubeflowProgress": "test_watch_chart.py",
    "watch.links": "test_watch_chart.py",
    "watch.profiles": "test_watch_chart.py",
    "watch.webhookPort": "test_watch_chart.py",
}
"""Values with too many effects for one line, and where they are tested."""


def render_with_values(values: Mapping[str, Any], *arguments: str) -> list[dict[str, Any]]:
    """Render the chart without the resource definitions, unless `values` include them."""
    return render_chart(*set_json({"crds.enabled": False, **values}), *arguments)


def set_json(values: Mapping[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]


@functools.cache
def flatten_rendered(given: str) -> dict[str, Any]:
    """Render with values in JSON, and return the leaves of all objects."""
    return dict(list_leaves(render_with_values(json.loads(given))))


def list_leaves(objects: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each leaf by its object's kind, its object's name without the chart's, and its path."""
    for found in objects:
        yield from _leaves(found, f"{name_object(found)} ")


def name_object(found: dict[str, Any]) -> str:
    kind, name = found["kind"], found["metadata"]["name"]
    return f"{kind}{name.removeprefix(RELEASE)}" if name.startswith(RELEASE) else f"{kind} {name}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(part, f"{path}{name}.")
    elif isinstance(value, list) and value:
        for i, part in enumerate(value):
            variable = path.endswith(".env.") and set(part) == {"name", "value"}
            yield from [(f"{path}{part['name']}", part["value"])] if variable else _leaves(part, f"{path}{i}.")
    else:
        yield path.rstrip("."), value


def find_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {path: after.get(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


@pytest.mark.parametrize("path", CHANGES)
def test_a_value_changes_only_what_it_describes(path: str) -> None:
    change = CHANGES[path]
    before = flatten_rendered(json.dumps(change.given))
    found = find_differences(before, dict(list_leaves(render_with_values({**change.given, path: change.value}))))
    gone = {name for name, value in change.expected.items() if value is None}
    under = {name for name in found if any(name.startswith(parent) for parent in gone) and found[name] is None}
    assert {name: value for name, value in found.items() if name not in under} == {
        name: value for name, value in change.expected.items() if value is not None
    }
    assert all(any(name.startswith(parent) for name in before) for parent in gone)


@pytest.mark.parametrize("path", SWITCHES)
def test_a_switch_that_is_off_leaves_nothing_behind(path: str) -> None:
    one = SWITCHES[path]
    on, off = (
        {name_object(found): found for found in render_with_values({**one.given, path: value})}
        for value in (True, False)
    )
    assert on.keys() - off.keys() == one.objects
    assert off.keys() - on.keys() == set()
    assert {name for name in off if on[name] != off[name]} == one.touches


def test_every_value_is_tested() -> None:
    known = {".".join(path) for path, _ in describe.iterate_leaves(json.loads(describe.SCHEMA.read_text()))}
    assert CHANGES.keys() | SWITCHES.keys() | ELSEWHERE.keys() == known
    assert len(CHANGES) + len(SWITCHES) + len(ELSEWHERE) == len(known), "each in one place"


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("training", {}, "training-pacekeeper"),
        ("my-pacekeeper", {}, "my-pacekeeper"),
        ("training", {"nameOverride": "training"}, "training"),
        ("training", {"nameOverride": "pace"}, "training-pace"),
        ("training", {"fullnameOverride": "keeper"}, "keeper"),
        ("a" * 53, {}, "a" * 48),
    ],
)
def test_release_and_chart_names_can_be_overridden(release: str, values: dict[str, Any], name: str) -> None:
    """All objects and all references between them use the chosen name."""
    values = {"crds.enabled": False, "podMonitor.enabled": True, **ISSUER, **values}
    text = run_helm("template", release, str(CHART), "--namespace", "pacekeeper-system", *set_json(values))
    objects = [found for found in yaml.safe_load_all(text) if found]
    names = {found["metadata"]["name"] for found in objects}
    assert {found for found in names if found != name and not found.startswith(f"{name}-")} == {"pacekeeper-pause"}
    assert max(len(found) for found in names) <= 63, "a Job has it as a label, too"
    for found in objects:
        assert found.get("roleRef", {"name": name})["name"] in names
        assert [subject["name"] for subject in found.get("subjects", ())] in ([], [name])
        if found["kind"] == "ValidatingAdmissionPolicyBinding":
            assert found["spec"]["policyName"] in names
        if found["kind"] == "ValidatingAdmissionPolicy":
            assert f"'system:serviceaccount:pacekeeper-system:{name}'" in json.dumps(found)
    (deployment,) = [found for found in objects if found["kind"] == "Deployment"]
    (service,) = [found for found in objects if found["kind"] == "Service"]
    variables = {
        item["name"]: item.get("value") for item in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert variables["PACEKEEPER_SERVICE_NAME"] == service["metadata"]["name"] == name
    assert variables["PACEKEEPER_TLS_SECRET"] == f"{name}-tls"
    selector = {
        "app.kubernetes.io/name": values.get("nameOverride", "pacekeeper"),
        "app.kubernetes.io/instance": release,
    }
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == selector
    assert deployment["spec"]["template"]["metadata"]["labels"] == selector


def test_common_labels_are_on_all_objects() -> None:
    """An object's own labels take precedence."""
    on = {
        "podMonitor.enabled": True,
        "serviceMonitor.enabled": True,
        "prometheusRule.enabled": True,
        "crds.enabled": True,
    }
    values = {
        "commonLabels": {"team": "platform"},
        "podMonitor.labels": {"team": "metrics"},
        "podLabels": {"team": "pods"},
    }
    objects = render_with_values({**on, **ISSUER, **EXPORTER, "podDisruptionBudget.enabled": True, **values})
    own = {f"{RELEASE}-workers": "metrics"}
    for found in objects:
        assert found["metadata"]["labels"]["team"] == own.get(found["metadata"]["name"], "platform"), name_object(found)
        if found["kind"] in ("Deployment", "Job"):
            assert found["spec"]["template"]["metadata"]["labels"]["team"] == "pods"
    (deployment,) = [
        found for found in render_with_values({"commonLabels": {"team": "platform"}}) if found["kind"] == "Deployment"
    ]
    assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "platform"
    assert "team" not in deployment["spec"]["selector"]["matchLabels"], "a selector never changes"


def test_another_account_gets_all_rights_of_the_operators() -> None:
    before, after = (json.dumps(render_with_values(values)) for values in ({}, {"serviceAccount.name": "mine"}))
    assert json.loads(
        before.replace('"serviceAccountName": "pacekeeper"', '"serviceAccountName": "mine"')
        .replace('"kind": "ServiceAccount", "name": "pacekeeper"', '"kind": "ServiceAccount", "name": "mine"')
        .replace(
            '"kind": "ServiceAccount", "metadata": {"name": "pacekeeper"',
            '"kind": "ServiceAccount", "metadata": {"name": "mine"',
        )
        .replace("system:serviceaccount:pacekeeper-system:pacekeeper'", "system:serviceaccount:pacekeeper-system:mine'")
    ) == json.loads(after)
    assert before.count("system:serviceaccount:pacekeeper-system:pacekeeper'") == len(POLICIES)


@pytest.mark.parametrize("account", ["users", "groups"])
def test_state_writers_are_exempt(account: str) -> None:
    found = find_differences(
        flatten_rendered("{}"),
        dict(list_leaves(render_with_values({f"admissionPolicy.stateWriters.{account}": ["restorer"]}))),
    )
    ((path, expression),) = found.items()
    assert path == "ValidatingAdmissionPolicy-states spec.matchConditions.0.expression"
    assert f"{'username' if account == 'users' else 'group'} in ['restorer']" in expression


def test_the_service_monitor_replaces_the_pod_monitor() -> None:
    both = {
        name_object(found) for found in render_with_values({"podMonitor.enabled": True, "serviceMonitor.enabled": True})
    }
    assert {name for name in both if "Monitor" in name} == {"ServiceMonitor", "PodMonitor-workers"}


def test_a_spread_by_other_labels_is_left_alone() -> None:
    other = SPREAD | {"labelSelector": {"matchLabels": {"a": "b"}}}
    none = dict(list_leaves(render_with_values({"topologySpreadConstraints": []})))
    found = find_differences(none, dict(list_leaves(render_with_values({"topologySpreadConstraints": [other]}))))
    assert {path for path in found if "labelSelector" in path} == {f"{SPREAD_PATH}labelSelector.matchLabels.a"}


@pytest.mark.parametrize("values", sorted(CHART.glob("ci/*-values.yaml")), ids=lambda path: path.name)
def test_objects_pass_the_api_servers_own_schemas(values: Path) -> None:
    objects = render_chart("--values", str(values))
    assert [
        fault for found in objects if api_schema.is_known(found) for fault in api_schema.find_schema_errors(found)
    ] == []
    foreign = {found["apiVersion"] for found in objects if not api_schema.is_known(found)}
    assert foreign <= {"monitoring.coreos.com/v1", "cert-manager.io/v1"}, "kinds of other operators have no schema here"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda spec: spec.update(replica=1), "spec.replica"),
        (lambda spec: spec.update(replicas="1"), "spec.replicas"),
        (lambda spec: spec.pop("selector"), "spec.selector"),
        (lambda spec: spec["template"]["spec"].update(tolerations={}), "spec.template.spec.tolerations"),
        (lambda spec: spec["selector"].update(matchLabels={"a": 1}), "spec.selector.matchLabels.a"),
    ],
)
def test_the_schemas_refuse_what_the_api_server_refuses(change: Callable[[Any], None], fault: str) -> None:
    (deployment,) = [found for found in render_with_values({}) if found["kind"] == "Deployment"]
    change(deployment["spec"])
    (found,) = api_schema.find_schema_errors(deployment)
    assert found.startswith(f"{fault}: ")


def read_helm_error(*arguments: str) -> str:
    """Return the error of Helm; paths as Helm 3 writes them: with dots, where Helm 4 has slashes."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render_chart(*arguments)
    return str(refused.value.stderr).replace("/", ".")


def test_a_value_of_a_wrong_type_is_refused_by_name(tmp_path: Path) -> None:
    """Helm names all of them at once."""
    schema = json.loads(describe.SCHEMA.read_text())
    paths = [path for path, _ in describe.iterate_leaves(schema) if path != ("global",)]
    text = read_helm_error("--values", str(write_values(tmp_path, {path: {"no such thing!": [1]} for path in paths})))
    assert [".".join(path) for path in paths if ".".join(path) not in text] == []


def test_an_unknown_value_is_refused(tmp_path: Path) -> None:
    """One stands in each group, and Helm names all of them."""
    schema = json.loads(describe.SCHEMA.read_text())
    groups = {path[:-1] for path, _ in describe.iterate_leaves(schema)}
    text = read_helm_error("--values", str(write_values(tmp_path, {(*path, "unheardOf"): 1 for path in groups})))
    assert text.count("unheardOf") == len(groups)


def write_values(folder: Path, values: Mapping[tuple[str, ...], Any]) -> Path:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    (folder / "values.yaml").write_text(yaml.safe_dump(tree))
    return folder / "values.yaml"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ('image.digest="sha256:abc"', "image.digest"),
        ('image.repository="operator@sha256:abc"', "image.repository"),
        ('image.tag="a b"', "image.tag"),
        ('fullnameOverride="Pace_Keeper"', "fullnameOverride"),
        (f'fullnameOverride="{49 * "a"}"', "fullnameOverride"),
        ('commonLabels={"app.kubernetes.io/name": "x"}', "app.kubernetes.io.name"),
        ('podLabels={"pacekeeper.dev/job": "x"}', "pacekeeper.dev.job"),
        ('podLabels={"a": "not a label"}', "podLabels.a"),
        ("serviceAccount.create=false", "serviceAccount.name"),
        ('serviceAccount.name="default"', "serviceAccount.name"),
        ('service.clusterIP="none"', "service.clusterIP"),
        ('extraEnv=[{"name": "PACEKEEPER_MODE", "value": "Act"}]', "extraEnv.0.name"),
        ('extraEnv=[{"value": "Act"}]', "extraEnv.0"),
        ('extraEnv=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]', "extraEnv: A is there twice"),
        ('tolerations=[{"key": "a", "effects": "NoSchedule"}]', "tolerations.0"),
        ('tolerations=[{"effect": "Never"}]', "tolerations.0.effect"),
        ('affinity={"podAffinty": {}}', "podAffinty"),
        ('topologySpreadConstraints=[{"maxSkew": 1}]', "topologySpreadConstraints.0"),
        ("podDisruptionBudget.maxUnavailable=2", "podDisruptionBudget.maxUnavailable"),
        ('networkPolicy.metricsFrom=[{"podSelecter": {}}]', "networkPolicy.metricsFrom.0"),
        ("networkPolicy.metricsFrom=[{}]", "networkPolicy.metricsFrom.0"),
        ('imagePullSecrets=["registry"]', "imagePullSecrets.0"),
        ('resources.limit={"memory": "1Gi"}', "limit"),
        ('sidecarResources.limits={"memory": ["1Gi"]}', "sidecarResources.limits"),
        ('priorityClassName="Very High"', "priorityClassName"),
    ],
)
def test_bad_values_are_refused_by_name(change: str, name: str) -> None:
    assert name in read_helm_error("--set-json", change)


def test_the_schema_is_strict_at_every_level() -> None:
    schema = json.loads(describe.SCHEMA.read_text())
    del schema["properties"]["global"]  # defined by an enclosing chart
    assert list(_lenient(schema, "")) == []


def _lenient(schema: Any, path: str) -> Iterator[str]:
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            yield from _lenient(part, f"{path}[{i}]")
    elif isinstance(schema, dict):
        if schema.get("type") == "object" and schema.get("additionalProperties", True) is True:
            yield path
        for name, part in schema.items():
            yield from _lenient(part, f"{path}.{name}")


def test_every_value_is_described() -> None:
    schema = json.loads(describe.SCHEMA.read_text())
    assert [
        path for path, part in describe.iterate_leaves(schema) if not part.get("description", "").endswith(".")
    ] == []


def test_schema_and_readme_match_the_values_file() -> None:
    """`python charts/describe.py` brings them up to date."""
    text, schema = describe.VALUES.read_text(), json.loads(describe.SCHEMA.read_text())
    comments = describe.comments_of(text)
    assert describe.add_descriptions(schema, comments) == schema
    written = describe.README.read_text()
    assert describe.render_readme(written, yaml.safe_load(text), schema, comments) == written


def test_a_value_without_a_comment_stops_the_description(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(describe, "comments_of", lambda _text: {})
    before = describe.README.read_text()
    assert describe.main() == 1
    assert "image.repository" in capsys.readouterr().err
    assert describe.README.read_text() == before


def test_versions_are_the_packages_own() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == package


def test_artifact_hub_annotations_list_what_the_chart_contains() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    listed_images = {name.removeprefix("artifacthub.io/"): value for name, value in chart["annotations"].items()}
    canonical = [yaml.safe_load(path.read_text()) for path in REPOSITORY.glob("crds/*.yaml")]
    assert {(one["name"], one["kind"], one["version"]) for one in yaml.safe_load(listed_images["crds"])} == {
        (found["metadata"]["name"], found["spec"]["names"]["kind"], found["spec"]["versions"][0]["name"])
        for found in canonical
    }
    (operator,) = [found for found in render_with_values({}) if found["kind"] == "Deployment"]
    images = [container["image"] for container in operator["spec"]["template"]["spec"]["containers"]]
    assert [one["image"] for one in yaml.safe_load(listed_images["images"])] == images
    (example,) = yaml.safe_load(listed_images["crdsExamples"])
    assert example["kind"] == "TrainingJob"
