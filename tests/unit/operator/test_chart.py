"""The Helm chart: what it installs in each supported scenario, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from pacekeeper_operator.api.names import LABEL_JOB, METRICS_PORT, PAUSE_CONFIG_MAP
from pacekeeper_operator.endpoint.certificates import AUTHORITY_SECRET_NAME
from pacekeeper_operator.kube.leader_election import LEASE_NAME
from pacekeeper_operator.observe.owners import READABLE_KINDS
from pacekeeper_operator.observe.reachability import KUBELET_PORT
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.settings import Settings, WatchMode
from testcluster import programs
from testing.kubernetes.chart import CHART, RELEASE, REPOSITORY, SYSTEM, render_chart, run_helm
from testing.readme import read_commands

AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"
SUBJECTS = [{"kind": "ServiceAccount", "name": RELEASE, "namespace": SYSTEM}]
SCENARIOS = sorted(CHART.glob("ci/*-values.yaml"))
WATCHED = {
    "": {"nodequarantines", "fabrics", "nodes", "namespaces", "customresourcedefinitions"},
    "-jobs": {"trainingjobs", "trainingjobstates", "incidents", "pods", "networkpolicies"},
}
"""What each namespaced role may watch, by the role's name without the release's."""


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda path: path.name)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render_chart("--values", str(request.param))


def find_object(objects: list[dict[str, Any]], kind: str, name: str = RELEASE) -> dict[str, Any]:
    (found,) = [found for found in objects if found["kind"] == kind and found["metadata"]["name"] == name]
    return found


def list_pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["spec"]["template"]["spec"] for found in objects if found["kind"] in ("Deployment", "Job")]


def read_environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    (operator,) = find_object(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    downward = {"PACEKEEPER_NAMESPACE": SYSTEM, "POD_NAME": "pacekeeper-0"}
    return {item["name"]: item.get("value", downward.get(item["name"], "")) for item in operator["env"]}


def test_the_readmes_command_installs_an_operator_that_only_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    program, install, *arguments = shlex.split(read_commands("Install it")[0])
    assert (program, install) == ("helm", "install")
    monkeypatch.chdir(REPOSITORY)
    rendered = list(yaml.safe_load_all(run_helm("template", *arguments)))
    settings = Settings.from_environment(read_environment([found for found in rendered if found]))
    assert settings.mode == "Recommend"
    assert settings.image.startswith("registry.example/pacekeeper/operator:")


def test_each_supported_kubernetes_scenario_has_values() -> None:
    assert {path.name for path in SCENARIOS} >= {"dev-values.yaml", "minimal-values.yaml", "production-values.yaml"}


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.name)
def test_helm_lint_passes(values: Path) -> None:
    run_helm("lint", "--strict", str(CHART), "--values", str(values))


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.name)
def test_helm_3_renders_the_same(values: Path) -> None:
    run_helm("lint", "--strict", str(CHART), "--values", str(values), program=programs.find_helm_3())
    by_helm_3, by_helm = (
        {
            (found["kind"], found["metadata"]["name"]): found
            for found in render_chart("--values", str(values), **program)
        }
        for program in ({"program": programs.find_helm_3()}, {})
    )
    assert by_helm_3 == by_helm, "they may differ in the order of kinds"


def test_helm_3_refuses_the_same() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render_chart("--set", "policy.mode=Observe", program=programs.find_helm_3())
    assert "policy.mode" in refused.value.stderr.replace("/", ".")


def test_definitions_are_the_canonical_ones(objects: list[dict[str, Any]]) -> None:
    rendered = {found["metadata"]["name"]: found for found in objects if found["kind"] == "CustomResourceDefinition"}
    canonical = [yaml.safe_load(path.read_text()) for path in REPOSITORY.glob("crds/*.yaml")]
    assert {name: found["spec"] for name, found in rendered.items()} == {
        definition["metadata"]["name"]: definition["spec"] for definition in canonical
    }
    assert len(canonical) == 9
    for found in rendered.values():
        assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_definitions_can_be_left_out_or_deleted_with_the_release() -> None:
    assert all(found["kind"] != "CustomResourceDefinition" for found in render_chart("--set", "crds.enabled=false"))
    unkept = find_object(
        render_chart("--set", "crds.keep=false"), "CustomResourceDefinition", "incidents.pacekeeper.dev"
    )
    assert "helm.sh/resource-policy" not in unkept["metadata"]["annotations"]


def test_the_packed_chart_is_the_same(tmp_path: Path) -> None:
    """The definitions are links out of the chart: a package must hold what they point to."""
    run_helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("pacekeeper-*.tgz")
    assert render_chart(chart=package) == render_chart()


def test_settings_are_what_the_operator_reads(objects: list[dict[str, Any]]) -> None:
    """Each variable is a setting and holds a valid value."""
    given = read_environment(objects)
    known = {f"PACEKEEPER_{item.name.upper()}" for item in fields(Settings)}
    assert {name for name in given if name.startswith("PACEKEEPER_")} <= known
    settings = Settings.from_environment(given)
    assert settings.namespace == SYSTEM
    assert settings.identity == "pacekeeper-0"
    assert settings.service_name == find_object(objects, "Service")["metadata"]["name"]


def test_policy_reaches_the_operator() -> None:
    changes = {
        "policy.mode": "Recommend",
        "policy.pause": "true",
        "policy.quarantine.mode": "Act",
        "policy.quarantine.maxNodes": "7",
        "policy.quarantine.maxShare": "0.25",
        "policy.quarantine.breakerNodes": "4",
        "policy.quarantine.expiresAfter": "90m",
        "policy.nodeHealth.cordons": "false",
        "policy.nodeHealth.taints": "{a=b:NoSchedule,c}",
        "policy.nodeHealth.conditions": "{GpuHealthy=False}",
        "policy.diagnosis.linkProbesPerHour": "5",
        "policy.diagnosis.profilesPerHour": "0",
        "policy.traffic.planning": "false",
        "policy.incidentRetention": "24h",
        "prometheus.url": "http://prometheus:9090",
        "prometheus.dcgmNodeLabel": "node",
        "sidecarImage.repository": "sidecar",
        "sidecarImage.tag": "v2",
        "logLevel": "debug",
        "service.clusterIP": "10.96.0.50",
        "service.port": "9443",
    }
    rendered = render_chart("--set", ",".join(f"{name}={value}" for name, value in changes.items()))
    settings = Settings.from_environment(read_environment(rendered))
    assert (settings.mode, settings.paused, settings.quarantine_mode) == ("Recommend", True, "Act")
    assert (settings.quarantine_max_nodes, settings.quarantine_max_share, settings.breaker_nodes) == (7, 0.25, 4)
    assert (settings.quarantine_expires_after, settings.incident_retention) == (5400, 86400)
    assert (settings.link_probes_per_hour, settings.profiles_per_hour) == (5, 0)
    assert settings.node_health == NodeHealthRules(
        cordons=False, taints=("a=b:NoSchedule", "c"), conditions=("GpuHealthy=False",)
    )
    assert not settings.traffic_planning
    assert (settings.prometheus_url, settings.dcgm_node_label) == ("http://prometheus:9090", "node")
    assert settings.sidecar_image == "sidecar:v2"
    assert settings.log_level == "DEBUG"
    assert settings.endpoint == "https://10.96.0.50:9443"
    assert find_object(rendered, "Service")["spec"]["clusterIP"] == "10.96.0.50"


def test_ports_are_those_of_the_settings(objects: list[dict[str, Any]]) -> None:
    settings = Settings.from_environment(read_environment(objects))
    (operator,) = find_object(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    assert ports == {
        "sidecars": settings.port,
        "pk-metrics": settings.metrics_port,
        "liveness": settings.liveness_port,
        **({"watch": settings.watch_port} if settings.watch_mode is WatchMode.WEBHOOK else {}),
    }
    assert operator["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "liveness"}


def test_pods_pass_restricted_pod_security(objects: list[dict[str, Any]]) -> None:
    specs = list_pod_specs(objects)
    assert len(specs) == 2, "the operator, and the hook that releases nodes"
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all({"emptyDir", "secret"} & set(volume) for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_the_services_own_variables_do_not_reach_the_settings(objects: list[dict[str, Any]]) -> None:
    """A Service called pacekeeper would set PACEKEEPER_PORT=tcp://…"""
    assert all(spec["enableServiceLinks"] is False for spec in list_pod_specs(objects))


def collect_rules(
    objects: list[dict[str, Any]], kind: str, name: str = RELEASE
) -> dict[tuple[str, str, str], set[str]]:
    """(group, resource, name) → verbs"""
    return {
        (group, resource, name): set(rule["verbs"])
        for rule in find_object(objects, kind, name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def test_rights_contain_no_wildcard(objects: list[dict[str, Any]]) -> None:
    for found in objects:
        if "rules" in found and found["kind"] in ("Role", "ClusterRole"):
            assert "*" not in yaml.safe_dump(found)


@pytest.mark.parametrize("role", WATCHED)
def test_rights_of_the_operator(objects: list[dict[str, Any]], role: str) -> None:
    given = collect_rules(objects, "ClusterRole", RELEASE + role)
    resources = {resource for _, resource, _ in given}
    assert not resources & {"secrets", "leases", "services", "roles", "clusterroles", "pods/exec", "deployments"}
    assert {resource for (_, resource, _), verbs in given.items() if "watch" in verbs} == WATCHED[role]


def test_far_reaching_rights_are_few() -> None:
    objects = render_chart()
    assert collect_rules(objects, "ClusterRole")["", "nodes", ""] == {"get", "list", "watch", "patch"}
    jobs = collect_rules(objects, "ClusterRole", f"{RELEASE}-jobs")
    assert "patch" not in jobs["", "pods", ""]
    assert ("", "configmaps", "") not in jobs
    assert "create" not in jobs["pacekeeper.dev", "trainingjobs", ""]
    everywhere = collect_rules(objects, "ClusterRole")
    assert everywhere["pacekeeper.dev", "fabrics", ""] == READ, "only the platform team defines the network"
    assert everywhere["pacekeeper.dev", "fabrics/status", ""] == {"patch"}


def test_rights_in_its_own_namespace(objects: list[dict[str, Any]]) -> None:
    given = collect_rules(objects, "Role")
    assert find_object(objects, "Role")["metadata"]["namespace"] == SYSTEM
    assert given["coordination.k8s.io", "leases", LEASE_NAME] == {"get", "update"}
    assert given["coordination.k8s.io", "leases", ""] == {"create"}
    assert given["", "configmaps", PAUSE_CONFIG_MAP] == {"get"}
    assert given["", "pods", ""] == {"get", "list", "watch", "create", "delete"}


def test_rights_on_secrets_are_those_on_the_certificates() -> None:
    given = collect_rules(render_chart(), "Role")
    assert given["", "secrets", AUTHORITY_SECRET_NAME] == {"get", "update"}
    assert given["", "secrets", ""] == {"create"}
    given = collect_rules(render_chart("--set", "tls.existingSecret=mine"), "Role")
    assert {key: verbs for key, verbs in given.items() if "secrets" in key} == {("", "secrets", "mine"): {"get"}}


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_rights_are_bound_to_the_operators_account(objects: list[dict[str, Any]], kind: str) -> None:
    binding = find_object(objects, f"{kind}Binding")
    assert binding["roleRef"]["name"] == find_object(objects, kind)["metadata"]["name"]
    assert binding["subjects"] == SUBJECTS
    assert all(spec["serviceAccountName"] == RELEASE for spec in list_pod_specs(objects))


def list_bindings(objects: list[dict[str, Any]], role: str) -> list[tuple[str, str]]:
    """Return (kind, namespace) of the bindings that grant `role` to the operator."""
    found = [item for item in objects if item["kind"].endswith("RoleBinding") and item["roleRef"]["name"] == role]
    assert all(binding["subjects"] == SUBJECTS for binding in found)
    return [(binding["kind"], binding["metadata"].get("namespace", "")) for binding in found]


def test_without_named_namespaces_the_operator_serves_all() -> None:
    rendered = render_chart()
    assert list_bindings(rendered, f"{RELEASE}-jobs") == [("ClusterRoleBinding", "")]
    assert Settings.from_environment(read_environment(rendered)).watch_namespaces == ()


def test_with_named_namespaces_the_operator_has_no_rights_in_others() -> None:
    rendered = render_chart("--set", "watchNamespaces={team-a,team-b}")
    assert list_bindings(rendered, f"{RELEASE}-jobs") == [("RoleBinding", "team-a"), ("RoleBinding", "team-b")]
    assert list_bindings(rendered, f"{RELEASE}-events") == [("RoleBinding", "default")], (
        "events about nodes are kept there"
    )
    assert {frozenset(verbs) for verbs in collect_rules(rendered, "Role", f"{RELEASE}-events").values()} == {
        frozenset({"create"})
    }
    assert Settings.from_environment(read_environment(rendered)).watch_namespaces == ("team-a", "team-b")
    callers = find_object(rendered, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
    assert callers[0]["namespaceSelector"] == {"matchExpressions": [names]}


def test_namespace_lists_may_contain_spaces() -> None:
    assert Settings.from_environment({"PACEKEEPER_WATCH_NAMESPACES": " team-a, team-b,"}).watch_namespaces == (
        "team-a",
        "team-b",
    )


READ = {"get", "list", "watch"}


def test_roles_aggregate_into_the_roles_of_every_tenant() -> None:
    rendered = render_chart()
    view, edit = (find_object(rendered, "ClusterRole", f"{RELEASE}-{name}") for name in ("view", "edit"))
    aggregated = {
        found["metadata"]["name"]: {
            label.rsplit("-", 1)[1] for label in found["metadata"]["labels"] if label.startswith(AGGREGATE)
        }
        for found in rendered
        if found["kind"] == "ClusterRole"
    }
    assert {name: to for name, to in aggregated.items() if to} == {
        view["metadata"]["name"]: {"view"},
        edit["metadata"]["name"]: {"edit", "admin"},
    }
    for found in (view, edit):
        given = collect_rules(rendered, "ClusterRole", found["metadata"]["name"])
        assert not [
            resource for _, resource, _ in given if resource in ("nodequarantines", "fabrics", "nodes", "configmaps")
        ]
        written = {resource for (_, resource, _), verbs in given.items() if verbs - READ}
        assert written <= {"trainingjobs", "trainingjobs/scale", "incidents"}
        assert given["pacekeeper.dev", "incidents", ""] <= READ | {"delete"}
    assert collect_rules(rendered, "ClusterRole", f"{RELEASE}-edit")["pacekeeper.dev", "trainingjobstates", ""] == READ


def test_viewers_cannot_read_plans() -> None:
    """It contains a secret of the job's workers."""
    given = collect_rules(render_chart(), "ClusterRole", f"{RELEASE}-view")
    assert set().union(*given.values()) == READ
    assert "trainingjobstates" not in {resource for _, resource, _ in given}


def test_the_platforms_role_approves_quarantines_and_pauses() -> None:
    rendered = render_chart()
    cluster = collect_rules(rendered, "ClusterRole", f"{RELEASE}-platform")
    assert {"create", "update", "patch", "delete"} < cluster["pacekeeper.dev", "nodequarantines", ""]
    assert {"create", "update", "patch", "delete"} < cluster["pacekeeper.dev", "fabrics", ""]
    assert cluster["", "nodes", ""] == READ, "nodes are touched through NodeQuarantines"
    own = collect_rules(rendered, "Role", f"{RELEASE}-platform")
    assert {resource for _, resource, _ in own} == {"configmaps"}
    assert own["", "configmaps", PAUSE_CONFIG_MAP] == {"get", "update", "patch", "delete"}


def index_policies(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specs of the admission policies by their names without the release's."""
    found = [item for item in objects if item["kind"] == "ValidatingAdmissionPolicy"]
    return {item["metadata"]["name"].removeprefix(f"{RELEASE}-"): item["spec"] for item in found}


def test_policies_bind_and_deny(objects: list[dict[str, Any]]) -> None:
    found = index_policies(objects)
    assert set(found) >= {"owned", "pods", "nodes", "jobs", "secrets", "states"}
    for name, spec in found.items():
        binding = find_object(objects, "ValidatingAdmissionPolicyBinding", f"{RELEASE}-{name}")["spec"]
        assert binding == {"policyName": f"{RELEASE}-{name}", "validationActions": ["Deny"]}, "in all namespaces"
        assert spec["failurePolicy"] == "Fail"


def test_policies_bind_only_the_operators_account(objects: list[dict[str, Any]]) -> None:
    account = f"'system:serviceaccount:{SYSTEM}:{RELEASE}'"
    for name, spec in index_policies(objects).items():
        (condition,) = spec["matchConditions"]
        if name == "states":  # binds all other accounts
            assert condition["expression"].startswith(f"request.userInfo.username != {account}")
        else:
            assert condition["expression"] == f"request.userInfo.username == {account}"


def test_every_kind_that_the_operator_writes_has_a_policy() -> None:
    """A right to write objects that others may own comes with a policy that limits it."""
    rendered = render_chart()
    bound = {
        resource
        for name, spec in index_policies(rendered).items()
        for rule in spec["matchConstraints"]["resourceRules"]
        for resource in rule["resources"]
        if name != "states"
    }
    everywhere = collect_rules(rendered, "ClusterRole") | collect_rules(rendered, "ClusterRole", f"{RELEASE}-jobs")
    written = {resource for (_, resource, _), verbs in everywhere.items() if verbs - READ and "/" not in resource}
    harmless = {
        "events",
        "tokenreviews",
        "incidents",
        "profilewindows",
        "nodequarantines",
        "nodeprobes",
        "nodehistories",
    }
    assert written - harmless <= bound


def test_the_operator_may_write_node_status_only_if_a_repair_condition_is_set() -> None:
    usual = render_chart()
    assert ("", "nodes/status", "") not in collect_rules(usual, "ClusterRole")
    assert index_policies(usual)["nodes"]["matchConstraints"]["resourceRules"][0]["resources"] == ["nodes"]
    assert Settings.from_environment(read_environment(usual)).repair_condition == ""

    flagging = render_chart("--set", "policy.quarantine.condition=PacekeeperFaulty")
    assert collect_rules(flagging, "ClusterRole")["", "nodes/status", ""] == {"patch"}
    policy = index_policies(flagging)["nodes"]
    assert policy["matchConstraints"]["resourceRules"][0]["resources"] == ["nodes", "nodes/status"]
    assert len(policy["validations"]) == len(index_policies(usual)["nodes"]["validations"]) + 2
    assert "condition.type == 'PacekeeperFaulty'" in policy["validations"][-1]["expression"]
    assert Settings.from_environment(read_environment(flagging)).repair_condition == "PacekeeperFaulty"
    (release,) = find_object(flagging, "Job", f"{RELEASE}-release-nodes")["spec"]["template"]["spec"]["containers"]
    assert {"name": "PACEKEEPER_REPAIR_CONDITION", "value": "PacekeeperFaulty"} in release["env"]


def test_only_a_chart_that_watches_jobs_gives_rights_on_their_owners() -> None:
    """Owners are read, and nothing else. The readable kinds are those that `observe.owners` follows."""
    owners = {(group, plural, "") for (group, _), plural in READABLE_KINDS.items()}
    usual = collect_rules(render_chart(), "ClusterRole", f"{RELEASE}-jobs")
    assert not [key for key in usual if key in owners or key[1].startswith("watchedjobs")]
    rendered = render_chart("--set", "watch.enabled=true,watch.retention=24h,watch.teamLabel=org/team")
    watching = collect_rules(rendered, "ClusterRole", f"{RELEASE}-jobs")
    assert {key for key, verbs in watching.items() if verbs == {"get"}} - set(usual) == owners
    assert {key[1] for key in set(watching) - set(usual) - owners} == {
        "watchedjobs",
        "watchedjobs/status",
        "watchedjobs/finalizers",
    }
    settings = Settings.from_environment(read_environment(rendered))
    assert (settings.watch_enabled, settings.watch_retention, settings.watch_team_label) == (True, 86400, "org/team")


def test_only_a_chart_that_runs_jobsets_lets_the_operator_create_jobs() -> None:
    """It may create and change jobs that a JobSet controls, and write no more of a JobSet than its status."""
    usual, running = render_chart(), render_chart("--set", "jobSets.enabled=true")
    before, after = (collect_rules(objects, "ClusterRole", f"{RELEASE}-jobs") for objects in (usual, running))
    assert {key: verbs - before.get(key, set()) for key, verbs in after.items() if verbs != before.get(key)} == {
        ("jobset.x-k8s.io", "jobsets", ""): READ,
        ("jobset.x-k8s.io", "jobsets/status", ""): {"patch"},
        ("pacekeeper.dev", "trainingjobs", ""): {"create"},
    }
    rules = [index_policies(objects)["jobs"]["validations"] for objects in (usual, running)]
    ((denying,), (allowing,)) = rules
    assert denying["expression"] == "request.operation == 'UPDATE' && object.spec == oldObject.spec"
    assert "owner.?controller.orValue(false) && owner.kind == 'JobSet'" in allowing["expression"]
    assert "[object, oldObject]" in allowing["expression"], "a job that a user has created is not made a JobSet's"
    settings = [Settings.from_environment(read_environment(objects)) for objects in (usual, running)]
    assert [each.jobsets_enabled for each in settings] == [False, True]


def test_policies_follow_the_values() -> None:
    changes = "admissionPolicy.protectedNamespaces={kube-system,vault},admissionPolicy.stateWriters.groups={restorers}"
    found = index_policies(render_chart("--set", changes))
    assert "['kube-system','vault']" in found["owned"]["validations"][0]["expression"]
    assert "group in ['restorers']" in found["states"]["matchConditions"][0]["expression"]
    assert len(index_policies(render_chart())["pods"]["validations"]) == 2
    hosts = index_policies(render_chart("--set", "admissionPolicy.hostAccess=true"))["pods"]["validations"]
    assert [rule["message"] for rule in hosts] == ["a probe needs nothing of its node, and no service account"]
    network = index_policies(render_chart("--set", "admissionPolicy.hostNetwork=false"))["pods"]["validations"]
    assert [rule["expression"] for rule in network if "admissionPolicy.hostNetwork" in rule["message"]] == [
        "!object.spec.?hostNetwork.orValue(false)"
    ]
    assert index_policies(render_chart("--set", "admissionPolicy.enabled=false")) == {}


def test_an_older_cluster_gets_no_policies_that_it_does_not_serve() -> None:
    assert index_policies(render_chart("--kube-version", "1.29.4")) == {}
    assert index_policies(render_chart("--kube-version", "1.30.0")), "v1 since then"
    assert index_policies(render_chart("--kube-version", "v1.31.2-gke.100"))


def render_network_policy(*changes: str) -> dict[str, Any]:
    arguments = [argument for change in changes for argument in ("--set-json", change)]
    spec: dict[str, Any] = find_object(render_chart(*arguments), "NetworkPolicy")["spec"]
    return spec


def list_ports(rules: list[dict[str, Any]]) -> set[int | str]:
    return {port["port"] for rule in rules for port in rule.get("ports", [{"port": "all"}])}


def test_only_workers_call_the_operator() -> None:
    spec = render_network_policy()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert list_ports(spec["ingress"]) == {"sidecars", "pk-metrics", "liveness"}
    (sidecars,) = [rule for rule in spec["ingress"] if rule["ports"] == [{"port": "sidecars"}]]
    workers = {"matchExpressions": [{"key": LABEL_JOB, "operator": "Exists"}]}
    assert sidecars["from"] == [{"podSelector": workers, "namespaceSelector": {}}]


def test_metrics_can_be_limited_to_scrapers() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    (metrics,) = [
        rule
        for rule in render_network_policy(f"networkPolicy.metricsFrom={json.dumps([peer])}")["ingress"]
        if rule["ports"] == [{"port": "pk-metrics"}]
    ]
    assert metrics["from"] == [peer]


def test_workers_on_the_host_network_are_admitted_by_address() -> None:
    spec = render_network_policy('networkPolicy.nodeCIDRs=["10.0.0.0/16"]')
    block = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    assert block in spec["ingress"][0]["from"]
    assert {"to": [block]} in spec["egress"], "their sidecars' ports are free ones"


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://prometheus.monitoring:9090", 9090),
        ("http://prometheus.monitoring:9090/prefix", 9090),
        ("http://prometheus.monitoring", 80),
        ("https://prometheus.example", 443),
        ("http://[fd00::1]:9091", 9091),
    ],
)
def test_egress_covers_all_services_that_the_operator_calls(url: str, port: int) -> None:
    spec = render_network_policy(f'prometheus.url="{url}"', "networkPolicy.egress.apiServerPorts=[6443]")
    assert list_ports(spec["egress"]) == {53, 6443, port, METRICS_PORT, KUBELET_PORT}


def test_egress_can_be_open_or_narrower() -> None:
    assert "egress" not in render_network_policy("networkPolicy.egress.enabled=false")
    assert render_network_policy("networkPolicy.egress.enabled=false")["policyTypes"] == ["Ingress"]
    changes = ("networkPolicy.egress.prometheusPorts=[10902]", 'prometheus.url="http://prometheus:80"')
    narrow = render_network_policy('networkPolicy.egress.apiServerCIDRs=["10.0.0.1/32"]', *changes)["egress"]
    assert {port for port in list_ports(narrow) if port in (80, 10902)} == {10902}
    (api_server,) = [rule for rule in narrow if {"port": 6443} in rule["ports"]]
    assert api_server["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]


def test_network_policies_can_be_left_out() -> None:
    rendered = render_chart("--set", "networkPolicy.enabled=false,networkPolicy.jobs=false")
    assert all(found["kind"] != "NetworkPolicy" for found in rendered)
    assert read_environment(rendered)["PACEKEEPER_NETWORK_POLICIES"] == "false"


def test_cert_manager_makes_the_certificate_that_the_operator_reads() -> None:
    changes = "tls.certManager.enabled=true,tls.certManager.issuerRef.name=ours,service.clusterIP=10.96.0.50"
    rendered = render_chart("--set", changes)
    spec = find_object(rendered, "Certificate")["spec"]
    given = read_environment(rendered)
    assert spec["secretName"] == given["PACEKEEPER_TLS_SECRET"]
    assert collect_rules(rendered, "Role")["", "secrets", spec["secretName"]] == {"get"}
    assert spec["issuerRef"] == {"name": "ours", "kind": "Issuer", "group": "cert-manager.io"}
    names = {*spec["dnsNames"], *spec["ipAddresses"]}
    assert names >= set(Settings.from_environment(given).hosts) - {"localhost", "127.0.0.1"}


def test_two_sources_of_certificates_are_refused() -> None:
    changes = "tls.certManager.enabled=true,tls.certManager.issuerRef.name=ours,tls.existingSecret=mine"
    with pytest.raises(subprocess.CalledProcessError, match="returned non-zero") as refused:
        render_chart("--set", changes)
    assert "tls.existingSecret and tls.certManager.enabled exclude one another" in refused.value.stderr


def test_other_values_reach_the_operator() -> None:
    changes = "imagePullSecrets[0].name=a,imagePullSecrets[1].name=b,dcgm.namespace=gpu,image.pullPolicy=Always"
    given = read_environment(render_chart("--set", changes))
    assert given["PACEKEEPER_IMAGE_PULL_SECRETS"] == "a,b"
    assert given["PACEKEEPER_IMAGE_PULL_POLICY"] == "Always"
    assert given["PACEKEEPER_DCGM_NAMESPACE"] == "gpu"
    assert "PACEKEEPER_TLS_SECRET" not in given
    peers = '[{"ipBlock":{"cidr":"10.0.0.1/32"}}]'
    given = read_environment(render_chart("--set-json", f"networkPolicy.metricsFrom={peers}"))
    assert json.loads(given["PACEKEEPER_METRICS_FROM"]) == json.loads(peers)


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("https://metrics.platform.example.com/prometheus", True),
        ("http://prometheus:9090", False),
        ("http://prometheus.monitoring.svc.cluster.local:9090", False),
        ("http://prometheus.monitoring.SVC:9090", False),
        ("http://10.200.0.1:9090", False),
        ("http://[fd00::1]:9090", False),
    ],
)
def test_a_prometheus_without_known_scrapers_is_refused_before_installation(url: str, refused: bool) -> None:
    if refused:
        with pytest.raises(subprocess.CalledProcessError) as failed:
            render_chart("--set", f"prometheus.url={url}")
        assert "networkPolicy.metricsFrom: metrics.platform.example.com is neither" in failed.value.stderr
        render_chart("--set", f"prometheus.url={url},networkPolicy.jobs=false")
        render_chart("--set", f"prometheus.url={url},networkPolicy.metricsFrom[0].ipBlock.cidr=10.0.0.1/32")
    else:
        Settings.from_environment(read_environment(render_chart("--set", f"prometheus.url={url}")))


def test_reused_values_of_an_older_chart_have_no_sidecar_resources() -> None:
    given = read_environment(render_chart("--set", "sidecarResources=null"))
    assert "PACEKEEPER_SIDECAR_RESOURCES" not in given
    assert Settings.from_environment(given).sidecar_resources == Settings().sidecar_resources


def test_prometheus_settings_reach_the_operator() -> None:
    rendered = render_chart(
        "--set",
        "prometheus.secretName=access",
        "--set-json",
        r"""prometheus={"headers": {"X-Scope-OrgID": "a, b"},
        "matchers": ["cluster=\"a\"", "region=~\"eu|us\\\\.\""]}""",
    )
    settings = Settings.from_environment(read_environment(rendered))
    assert settings.prometheus_headers == (("X-Scope-OrgID", "a, b"),)
    assert settings.prometheus_matchers == ('cluster="a"', r'region=~"eu|us\\."')
    (pod,) = [spec for spec in list_pod_specs(rendered) if len(spec["volumes"]) > 1]
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    (secret,) = [volume for volume in pod["volumes"] if "secret" in volume]
    assert mounts[secret["name"]] == {
        "name": secret["name"],
        "mountPath": settings.prometheus_credentials,
        "readOnly": True,
    }
    assert secret["secret"] == {"secretName": "access", "optional": True, "defaultMode": 0o440}
    unset = read_environment(render_chart())
    assert not [name for name in unset if name.startswith("PACEKEEPER_PROMETHEUS_") and not name.endswith("_URL")]


def test_webhook_settings_reach_the_operator() -> None:
    rendered = render_chart("--set", "policy.incidentWebhook.secretName=hook")
    settings = Settings.from_environment(read_environment(rendered))
    (pod,) = [spec for spec in list_pod_specs(rendered) if len(spec["volumes"]) > 1]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
    assert mounts[volume["name"]] == settings.incident_webhook
    assert volume["secret"] == {"secretName": "hook", "optional": True, "defaultMode": 0o440}
    assert Settings.from_environment(read_environment(render_chart())).incident_webhook == ""


def test_nodes_are_released_before_uninstalling(objects: list[dict[str, Any]]) -> None:
    job = find_object(objects, "Job", f"{RELEASE}-release-nodes")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pacekeeper_operator", "release-all"]
    assert job["spec"]["activeDeadlineSeconds"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("polcy.mode=Act", "polcy"),
        ("policy.quarantine.maxNode=3", "maxNode"),
        ("policy.mode=Observe", "policy.mode"),
        ("policy.quarantine.maxShare=5", "policy.quarantine.maxShare"),
        ("policy.quarantine.expiresAfter=1d", "policy.quarantine.expiresAfter"),
        ("image.repository=", "image.repository"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy"),
        ("prometheus.url=prometheus:9090", "prometheus.url"),
        ("prometheus.url=http://me:secret@prometheus", "prometheus.url"),
        ("prometheus.secretName=My_Secret", "prometheus.secretName"),
        ("prometheus.headers.X Scope=a", "prometheus.headers"),
        ("prometheus.matchers={cluster}", "prometheus.matchers"),
        ("logLevel=loud", "logLevel"),
        ("crds.kept=true", "kept"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("admissionPolicy.protectedNamespace={x}", "protectedNamespace"),
        ("admissionPolicy.stateWriters.group={x}", "group"),
        ("tls.certManager.enabled=true", "tls.certManager.issuerRef.name"),
        ("tls.existingSecret=My_Secret", "tls.existingSecret"),
        ("networkPolicy.nodeCIDRs={10.0.0.0}", "networkPolicy.nodeCIDRs"),
        ("networkPolicy.egress.apiServerPorts={http}", "networkPolicy.egress.apiServerPorts"),
        ("dcgm.namespace=a/b", "dcgm.namespace"),
        ("serviceMonitor.enable=true", "enable"),
    ],
)
def test_misspelled_values_are_refused_by_name(change: str, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render_chart("--set", change)
    assert re.search(re.escape(message).replace(r"\.", r"[./]"), refused.value.stderr)


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]
    assert find_differences(values, schema, "") == []


def find_differences(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Return where a default or its schema is missing, or the schema accepts a misspelled name."""
    if "properties" not in schema:
        return []
    faults = [f"{path}.{name}" for name in set(value) ^ set(schema["properties"])]
    faults += [] if schema.get("additionalProperties") is False else [f"{path} is not strict"]
    known = set(value) & set(schema["properties"])
    return faults + [
        d for name in known for d in find_differences(value[name], schema["properties"][name], f"{path}.{name}")
    ]
