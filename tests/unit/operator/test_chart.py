"""The Helm chart: what it installs in each supported scenario, and what it refuses."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from pacekeeper_operator.services.leadership import LEASE
from pacekeeper_operator.settings import Settings
from tests.support.chart import CHART, RELEASE, REPOSITORY, SYSTEM, helm, helm_template

SCENARIOS = sorted(CHART.glob("ci/*-values.yaml"))
WATCHED = {"trainingjobs", "nodequarantines", "pods", "nodes", "namespaces", "customresourcedefinitions"}


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda path: path.name)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return helm_template("--values", str(request.param))


def one(objects: list[dict[str, Any]], kind: str, name: str = RELEASE) -> dict[str, Any]:
    (found,) = [found for found in objects if found["kind"] == kind and found["metadata"]["name"] == name]
    return found


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["spec"]["template"]["spec"] for found in objects if found["kind"] in ("Deployment", "Job")]


def environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    (operator,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    downward = {"PACEKEEPER_NAMESPACE": SYSTEM, "POD_NAME": "pacekeeper-0"}
    return {item["name"]: item.get("value", downward.get(item["name"], "")) for item in operator["env"]}


def test_there_are_scenarios() -> None:
    assert {path.name for path in SCENARIOS} >= {"dev-values.yaml", "minimal-values.yaml", "production-values.yaml"}


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.name)
def test_lint(values: Path) -> None:
    helm("lint", "--strict", str(CHART), "--values", str(values))


def test_definitions_are_the_canonical_ones(objects: list[dict[str, Any]]) -> None:
    rendered = {found["metadata"]["name"]: found for found in objects if found["kind"] == "CustomResourceDefinition"}
    canonical = [yaml.safe_load(path.read_text()) for path in REPOSITORY.glob("crds/*.yaml")]
    assert {name: found["spec"] for name, found in rendered.items()} == {
        definition["metadata"]["name"]: definition["spec"] for definition in canonical
    }
    assert len(canonical) == 4
    for found in rendered.values():
        assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_definitions_can_be_left_out_or_go_with_the_release() -> None:
    assert all(found["kind"] != "CustomResourceDefinition" for found in helm_template("--set", "crds.enabled=false"))
    unkept = one(helm_template("--set", "crds.keep=false"), "CustomResourceDefinition", "incidents.pacekeeper.dev")
    assert "helm.sh/resource-policy" not in unkept["metadata"]["annotations"]


def test_the_packed_chart_is_the_same(tmp_path: Path) -> None:
    """The definitions are links out of the chart: a package must hold what they point to."""
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("pacekeeper-*.tgz")
    assert helm_template(chart=package) == helm_template()


def test_settings_are_what_the_operator_reads(objects: list[dict[str, Any]]) -> None:
    """Each variable is a setting and holds a value that it takes."""
    given = environment(objects)
    known = {f"PACEKEEPER_{item.name.upper()}" for item in fields(Settings)}
    assert {name for name in given if name != "POD_NAME"} <= known
    settings = Settings.from_environment(given)
    assert settings.namespace == SYSTEM
    assert settings.identity == "pacekeeper-0"
    assert settings.service_name == one(objects, "Service")["metadata"]["name"]


def test_policy_reaches_the_operator() -> None:
    changes = {
        "policy.mode": "Recommend",
        "policy.pause": "true",
        "policy.quarantine.mode": "Act",
        "policy.quarantine.maxNodes": "7",
        "policy.quarantine.maxShare": "0.25",
        "policy.quarantine.breakerNodes": "4",
        "policy.quarantine.expiresAfter": "90m",
        "policy.incidentRetention": "24h",
        "prometheus.url": "http://prometheus:9090",
        "prometheus.dcgmNodeLabel": "node",
        "sidecarImage.repository": "sidecar",
        "sidecarImage.tag": "v2",
        "logLevel": "debug",
        "service.clusterIP": "10.96.0.50",
        "service.port": "9443",
    }
    rendered = helm_template("--set", ",".join(f"{name}={value}" for name, value in changes.items()))
    settings = Settings.from_environment(environment(rendered))
    assert (settings.mode, settings.paused, settings.quarantine_mode) == ("Recommend", True, "Act")
    assert (settings.quarantine_max_nodes, settings.quarantine_max_share, settings.breaker_nodes) == (7, 0.25, 4)
    assert (settings.quarantine_expires_after, settings.incident_retention) == (5400, 86400)
    assert (settings.prometheus_url, settings.dcgm_node_label) == ("http://prometheus:9090", "node")
    assert settings.sidecar_image == "sidecar:v2"
    assert settings.log_level == "DEBUG"
    assert settings.endpoint == "https://10.96.0.50:9443"
    assert one(rendered, "Service")["spec"]["clusterIP"] == "10.96.0.50"


def test_ports_are_those_of_the_settings(objects: list[dict[str, Any]]) -> None:
    settings = Settings.from_environment(environment(objects))
    (operator,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    assert ports == {
        "sidecars": settings.port,
        "pk-metrics": settings.metrics_port,
        "liveness": settings.liveness_port,
    }
    assert operator["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "liveness"}


def test_pods_pass_restricted_pod_security(objects: list[dict[str, Any]]) -> None:
    specs = pod_specs(objects)
    assert len(specs) == 2, "the operator, and the hook that releases nodes"
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all("emptyDir" in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_the_services_own_variables_do_not_reach_the_settings(objects: list[dict[str, Any]]) -> None:
    """A Service called pacekeeper would set PACEKEEPER_PORT=tcp://…"""
    assert all(spec["enableServiceLinks"] is False for spec in pod_specs(objects))


def rules(objects: list[dict[str, Any]], kind: str) -> dict[tuple[str, str, str], set[str]]:
    """(group, resource, name) → verbs"""
    return {
        (group, resource, name): set(rule["verbs"])
        for rule in one(objects, kind)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def test_rights_name_everything(objects: list[dict[str, Any]]) -> None:
    for found in objects:
        if "rules" in found and found["kind"] in ("Role", "ClusterRole"):
            assert "*" not in yaml.safe_dump(found)


def test_rights_in_the_whole_cluster(objects: list[dict[str, Any]]) -> None:
    given = rules(objects, "ClusterRole")
    resources = {resource for _, resource, _ in given}
    assert not resources & {"secrets", "leases", "services", "roles", "clusterroles", "pods/exec", "deployments"}
    assert {resource for (_, resource, _), verbs in given.items() if "watch" in verbs} == WATCHED
    assert given["", "nodes", ""] == {"get", "list", "watch", "patch"}
    assert "patch" not in given["", "pods", ""] | given["", "configmaps", ""]
    assert "delete" not in given["", "configmaps", ""]


def test_rights_in_its_own_namespace(objects: list[dict[str, Any]]) -> None:
    given = rules(objects, "Role")
    assert one(objects, "Role")["metadata"]["namespace"] == SYSTEM
    assert given["", "secrets", "pacekeeper-ca"] == {"get"}
    assert given["coordination.k8s.io", "leases", LEASE] == {"get", "update"}
    assert given["", "secrets", ""] == given["coordination.k8s.io", "leases", ""] == {"create"}


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_rights_go_to_the_operators_account(objects: list[dict[str, Any]], kind: str) -> None:
    binding = one(objects, f"{kind}Binding")
    assert binding["roleRef"]["name"] == one(objects, kind)["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": RELEASE, "namespace": SYSTEM}]
    assert all(spec["serviceAccountName"] == RELEASE for spec in pod_specs(objects))


def test_nodes_are_released_before_uninstalling(objects: list[dict[str, Any]]) -> None:
    job = one(objects, "Job", f"{RELEASE}-release-nodes")
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
        ("logLevel=loud", "logLevel"),
        ("crds.kept=true", "kept"),
    ],
)
def test_misspelt_values_are_refused_by_name(change: str, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm_template("--set", change)
    assert re.search(re.escape(message).replace(r"\.", r"[./]"), refused.value.stderr)


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    assert schema["additionalProperties"] is False
