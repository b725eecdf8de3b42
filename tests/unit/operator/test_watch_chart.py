"""The chart's watch: which objects each mode has, and that the policy has the rules of the webhook.

Whether the policy adds the same to each pod is tested on a real API server (tests/cluster/test_watch_injection.py).
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from pacekeeper_operator.api.names import WATCH_CONFIG_MAP
from pacekeeper_operator.endpoint.admission_webhook import WEBHOOK_PATH
from pacekeeper_operator.pods import injection
from pacekeeper_operator.pods.injection import INJECTION_CHECKS, InjectionRules
from pacekeeper_operator.settings import Settings, WatchMode
from testing.kubernetes import api_schema
from testing.kubernetes.chart import RELEASE, SYSTEM, render_chart

BY_SELECTOR = {"not-disabled"}
"""Checks that the policy makes by its objectSelector."""
VALUES: dict[str, Any] = {
    "image": {"repository": "mine/watch", "tag": "v2", "pullPolicy": "Always"},
    "kinds": ["Job", "Mine"],
    "resources": {"requests": {"cpu": "2m", "memory": "8Mi"}, "limits": {"cpu": 1, "memory": "1Gi"}},
    "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]},
}


def render_watch(version: str = "1.36.0", /, *arguments: str, **values: Any) -> dict[str, dict[str, Any]]:
    """Return the objects of the chart by kind and name, with the watch enabled."""
    given = ["--kube-version", version, "--set-json", f"watch={json.dumps({'enabled': True, **values})}"]
    return {f"{found['kind']} {found['metadata']['name']}": found for found in render_chart(*given, *arguments)}


def read_settings(objects: dict[str, dict[str, Any]]) -> Settings:
    (container,) = objects[f"Deployment {RELEASE}"]["spec"]["template"]["spec"]["containers"]
    return Settings.from_environment({item["name"]: item.get("value", "") for item in container["env"]})


@pytest.mark.parametrize(
    ("version", "mode", "rendered"),
    [
        ("1.29.0", "Auto", WatchMode.WEBHOOK),
        ("1.35.4", "Auto", WatchMode.WEBHOOK),
        ("v1.36.1-gke.5", "Auto", WatchMode.POLICY),
        ("1.36.0", "Webhook", WatchMode.WEBHOOK),
        ("1.35.0", "Policy", WatchMode.POLICY),
    ],
)
def test_the_mode_follows_from_the_version(version: str, mode: str, rendered: WatchMode) -> None:
    objects = render_watch(version, mode=mode)
    policies = {name.partition(" ")[0] for name in objects} & {"MutatingAdmissionPolicy"}
    webhooks = {name.partition(" ")[0] for name in objects} & {"MutatingWebhookConfiguration"}
    assert bool(policies) == (rendered is WatchMode.POLICY)
    assert bool(webhooks) == (rendered is WatchMode.WEBHOOK)
    assert read_settings(objects).watch_mode is rendered


@pytest.mark.parametrize("mode", ["Policy", "Webhook"])
def test_objects_pass_the_api_servers_own_schemas(mode: str) -> None:
    objects = render_watch(mode=mode, **VALUES, prePull={"enabled": True}).values()
    assert [
        fault for found in objects if api_schema.is_known(found) for fault in api_schema.find_schema_errors(found)
    ] == []


def test_by_default_nothing_is_watched() -> None:
    objects = render_chart("--kube-version", "1.36.0")
    assert not [found for found in objects if "-watch" in found["metadata"]["name"]]
    assert not [found for found in objects if found["kind"].startswith("Mutating")]


def test_the_policy_has_the_checks_of_the_webhook() -> None:
    spec = render_watch()[f"MutatingAdmissionPolicy {RELEASE}-watch"]["spec"]
    names = [condition["name"] for condition in spec["matchConditions"]]
    assert names == ["enabled", *(name for name, _ in INJECTION_CHECKS if name not in BY_SELECTOR)]
    assert spec["failurePolicy"] == "Ignore"
    assert spec["reinvocationPolicy"] == "IfNeeded"
    (mutation,) = spec["mutations"]
    assert mutation["patchType"] == "JSONPatch", "several mutations could be applied in part"
    text = json.dumps(spec)
    for name in injection.RANK_VARIABLES | injection.INJECTED_CONTAINERS | {*injection.COPIED_RESOURCES}:
        assert f"'{name}'" in text or f'\\"{name}\\"' in text
    for path in (injection.BOOT_PATH, injection.RECORDER_PATH, injection.IMAGE_PYTHONPATH_FILE):
        assert path in text


def test_the_rules_reach_policy_and_webhook() -> None:
    objects = render_watch(**VALUES)
    assert read_settings(objects).watch_rules == InjectionRules(
        "mine/watch:v2",
        "Always",
        ("Job", "Mine"),
        {"requests": {"cpu": "2m", "memory": "8Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "team in (a,b)",
    )
    spec = objects[f"MutatingAdmissionPolicy {RELEASE}-watch"]["spec"]
    text = json.dumps(spec)
    variables = {variable["name"]: variable["expression"] for variable in spec["variables"]}
    assert variables["requests"] == "{'cpu': '2m', 'memory': '8Mi'}"
    assert variables["limits"] == "{'cpu': '1', 'memory': '1Gi'}"
    assert text.count("mine/watch:v2") == 2
    assert '[\\"Job\\",\\"Mine\\"]' in text
    pinned = render_watch(image={"repository": "a", "digest": f"sha256:{64 * 'a'}"})
    assert f"a@sha256:{64 * 'a'}" in json.dumps(pinned[f"MutatingAdmissionPolicy {RELEASE}-watch"])


@pytest.mark.parametrize("mode", ["Policy", "Webhook"])
def test_a_pod_is_selected_by_its_namespace_or_by_its_label_but_never_where_the_system_runs(mode: str) -> None:
    objects = render_watch("1.36.0", "--set", "watchNamespaces={team-a}", mode=mode)
    if mode == "Policy":
        names = [f"{RELEASE}-watch{end}" for end in ("", "-pods")]
        policies = [objects[f"MutatingAdmissionPolicy {name}"]["spec"] for name in names]
        by_namespace, by_pod = (policy["matchConstraints"] for policy in policies)
        assert len({json.dumps({**policy, "matchConstraints": {}}) for policy in policies}) == 1
        for name in names:
            binding = objects[f"MutatingAdmissionPolicyBinding {name}"]["spec"]
            assert binding["policyName"] == name
            assert binding["paramRef"]["parameterNotFoundAction"] == "Allow"
            assert binding["paramRef"]["name"] == WATCH_CONFIG_MAP
            assert "matchResources" not in binding, "the operator's, with which an upgrade would conflict"
    else:
        by_namespace, by_pod = objects[f"MutatingWebhookConfiguration {RELEASE}-watch"]["webhooks"]
    assert by_namespace["namespaceSelector"]["matchLabels"] == {"pacekeeper.dev/watch": "enabled"}
    assert by_pod["objectSelector"]["matchLabels"] == {"pacekeeper.dev/watch": "enabled"}
    opted = {"key": "pacekeeper.dev/watch", "operator": "NotIn", "values": ["enabled", "disabled"]}
    assert opted in by_pod["namespaceSelector"]["matchExpressions"]
    for selected in (by_namespace, by_pod):
        first, second = selected["namespaceSelector"]["matchExpressions"][-2:]
        assert {SYSTEM, "kube-system"} <= set(first["values"])
        assert first["operator"] == "NotIn"
        assert second == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]}


def test_the_webhook_never_holds_up_a_pod() -> None:
    objects = render_watch(mode="Webhook", webhookPort=9999)
    for webhook in objects[f"MutatingWebhookConfiguration {RELEASE}-watch"]["webhooks"]:
        assert webhook["failurePolicy"] == "Ignore"
        assert webhook["timeoutSeconds"] <= 2
        assert webhook["sideEffects"] == "None"
        service = {"name": RELEASE, "namespace": SYSTEM, "path": WEBHOOK_PATH, "port": 9999}
        assert webhook["clientConfig"] == {"service": service}, (
            "the operator writes the caBundle, and an upgrade keeps it"
        )
    assert read_settings(objects).watch_port == 9999
    assert {"name": "watch", "port": 9999, "targetPort": "watch"} in objects[f"Service {RELEASE}"]["spec"]["ports"]
    assert {"ports": [{"port": "watch"}]} in objects[f"NetworkPolicy {RELEASE}"]["spec"]["ingress"]


def test_no_upgrade_touches_what_the_operator_and_a_person_have_decided() -> None:
    assert f"ConfigMap {WATCH_CONFIG_MAP}" not in render_watch(), "the operator creates it"


def test_the_image_is_pulled_where_the_values_say() -> None:
    selected, tolerated = {"gpu": "yes"}, [{"key": "gpu", "operator": "Exists"}]
    values = {"enabled": True, "nodeSelector": selected, "tolerations": tolerated}
    objects = render_watch(image={"repository": "mine/watch", "tag": "v2"}, prePull=values)
    daemon_set = objects[f"DaemonSet {RELEASE}-watch-image"]["spec"]
    pod = daemon_set["template"]
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == (selected, tolerated)
    assert pod["spec"]["containers"][0]["image"] == "mine/watch:v2"
    assert daemon_set["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    service = objects[f"Service {RELEASE}"]["spec"]["selector"]
    assert not service.items() <= pod["metadata"]["labels"].items(), "these pods serve nothing"
    assert read_settings(objects).watch_pre_pull
    unused = render_watch()
    assert f"DaemonSet {RELEASE}-watch-image" not in unused
    assert not read_settings(unused).watch_pre_pull


@pytest.mark.parametrize("mode", ["Policy", "Webhook"])
def test_the_operator_gets_no_more_rights_than_the_watch_needs(mode: str) -> None:
    before = {f"{found['kind']} {found['metadata']['name']}": found for found in render_chart()}
    after = render_watch(mode=mode, prePull={"enabled": True})
    added = {
        (resource, verb, *rule.get("resourceNames", ()))
        for role in (f"Role {RELEASE}", f"ClusterRole {RELEASE}", f"ClusterRole {RELEASE}-jobs")
        for rule in after[role]["rules"]
        if rule not in before[role]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    state: set[tuple[str, ...]] = {("configmaps", verb, WATCH_CONFIG_MAP) for verb in ("get", "patch")}
    state |= {("configmaps", "create"), ("daemonsets", "get", f"{RELEASE}-watch-image")}
    webhook = {("mutatingwebhookconfigurations", verb, f"{RELEASE}-watch") for verb in ("get", "patch")}
    names = (f"{RELEASE}-watch", f"{RELEASE}-watch-pods")
    bindings = {("mutatingadmissionpolicybindings", verb, *names) for verb in ("get", "patch")}
    owners = ("jobs", "jobsets", "trainjobs", "pytorchjobs", "mpijobs", "rayclusters")
    watched = {("watchedjobs", verb) for verb in ("get", "list", "create", "patch", "delete")}
    needed = {
        ("events", "list"),
        ("events", "create"),
        ("watchedjobs/status", "patch"),
        ("watchedjobs/finalizers", "update"),
        *((kind, "get") for kind in owners),
    }
    assert added == needed | watched | state | (webhook if mode == "Webhook" else bindings)
    assert not {name for name in after.keys() - before.keys() if "Role" in name}


def test_restarts_need_no_more_rights_and_only_the_namespaces_label_lets_running_pods_be_deleted() -> None:
    before, after = render_watch(), render_watch(restart=True)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {f"Deployment {RELEASE}", f"ValidatingAdmissionPolicy {RELEASE}-owned"}
    assert (read_settings(before).watch_restart, read_settings(after).watch_restart) == (False, True)
    spec = after[f"ValidatingAdmissionPolicy {RELEASE}-owned"]["spec"]
    (expression,) = (rule["expression"] for rule in spec["validations"] if "watch-restart" in rule["expression"])
    assert "label == 'pacekeeper.dev/watch-restart'" in expression
    assert not [found for found in render_chart("--set", "watch.restart=true") if "watch-restart" in json.dumps(found)]


def test_progress_reaches_the_sidecar_by_policy_and_webhook() -> None:
    objects = render_watch(kubeflowProgress=True)
    rules = read_settings(objects).watch_rules
    assert rules is not None
    assert rules.kubeflow_progress
    mutations = json.dumps(objects[f"MutatingAdmissionPolicy {RELEASE}-watch"]["spec"]["mutations"])
    assert f"'http://127.0.0.1:{injection.KUBEFLOW_PROGRESS_PORT}'" in mutations
    assert f"? '' : '{injection.KUBEFLOW_PROGRESS_PORT}'" in mutations
    assert "KUBEFLOW" not in json.dumps(render_watch()[f"MutatingAdmissionPolicy {RELEASE}-watch"])


@pytest.mark.parametrize("links", [False, True])
def test_links_and_profiles_are_each_enabled_by_their_value(links: bool) -> None:
    objects = render_watch(links=links, profiles=not links)
    settings = read_settings(objects)
    assert settings.watch_rules is not None
    assert (settings.watch_links, settings.watch_rules.links, settings.watch_profiles) == (links, links, not links)
    policy = json.dumps(objects[f"MutatingAdmissionPolicy {RELEASE}-watch"])
    assert ("PACEKEEPER_WATCH_LINKS" in policy) == links


def test_the_sidecar_calls_the_operators_address() -> None:
    def find_address(*arguments: str) -> str:
        expression = render_watch("1.36.0", *arguments)[f"MutatingAdmissionPolicy {RELEASE}-watch"]["spec"]
        text: str = expression["mutations"][0]["jsonPatch"]["expression"]
        return text.partition('"PACEKEEPER_OPERATOR"), "value": dyn("')[2].partition('"')[0]

    assert find_address() == f"https://{RELEASE}.{SYSTEM}.svc:8443"
    assert find_address("--set", "service.clusterIP=10.0.0.9") == "https://10.0.0.9:8443"
    assert find_address("--set", "service.clusterIP=fd00::50") == "https://[fd00::50]:8443"


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "Off"},
        {"kinds": ["job"]},
        {"resources": {"limits": {"gpu": "1"}}},
        {"image": {"repository": ""}},
        {"webhookPort": 0},
        {"namespaceSelector": {"team": "a"}},
        {"prePull": True},
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        render_watch(**values)
