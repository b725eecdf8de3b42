"""Injection of the watch: which pods, what is added, and that nothing of the owner's changes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.pods.injection import (
    INJECTION_CHECKS,
    build_injection_patch,
    find_injection_refusal,
    parse_injection_rules,
)
from testing.kubernetes.injection_cases import (
    ADDRESS,
    INJECTION_CASES,
    RULES,
    InjectionCase,
    apply_json_patch,
    build_pod,
    check_injected_pod,
    compute_qos_class,
    use_gpus,
)

by_name = {case.name: case for case in INJECTION_CASES}


def inject(pod: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(pod)
    patched = apply_json_patch(pod, build_injection_patch(pod, RULES, ADDRESS))
    assert pod == before, "the pod that is passed in is not changed"
    return patched


@pytest.mark.parametrize("case", INJECTION_CASES, ids=lambda case: case.name)
def test_each_pod_of_the_table_is_watched_or_refused_by_the_named_check(case: InjectionCase) -> None:
    refusal = find_injection_refusal(case.pod, RULES)
    assert ("" if refusal is None else refusal.check) == case.refused_by
    check_injected_pod(case, case.pod if refusal else inject(case.pod))


@pytest.mark.parametrize("case", [case for case in INJECTION_CASES if not case.refused_by], ids=lambda case: case.name)
def test_the_qos_class_stays_the_same(case: InjectionCase) -> None:
    assert compute_qos_class(case.pod) == compute_qos_class(inject(case.pod)) == case.qos_class


@pytest.mark.parametrize("case", [case for case in INJECTION_CASES if not case.refused_by], ids=lambda case: case.name)
def test_a_second_invocation_changes_nothing(case: InjectionCase) -> None:
    injected = inject(case.pod)
    assert find_injection_refusal(injected, RULES) is None
    assert build_injection_patch(injected, RULES, ADDRESS) == []


@pytest.mark.parametrize(("spec", "names"), [({}, True), ({"hostNetwork": True}, False)])
def test_progress_is_received_on_the_loopback_unless_that_is_the_nodes(spec: dict[str, Any], *, names: bool) -> None:
    pod = build_pod(use_gpus(), **spec)
    rules = replace(RULES, kubeflow_progress=True)
    patched = apply_json_patch(pod, build_injection_patch(pod, rules, ADDRESS))
    (container,) = patched["spec"]["containers"]
    sidecar = next(each for each in patched["spec"]["initContainers"] if each["name"] == "pacekeeper-watch")
    added = [{each["name"]: each.get("value") for each in found["env"]} for found in (container, sidecar)]
    expected = ("http://127.0.0.1:9466", "9466") if names else (None, None)
    assert (added[0].get("PACEKEEPER_KUBEFLOW_URL"), added[1].get("PACEKEEPER_KUBEFLOW_PORT")) == expected
    assert not {name for name in added[0] if name.startswith("KUBEFLOW")}, "a process sets them, unless it has them"


def test_each_check_refuses_a_pod_of_the_table() -> None:
    assert {case.refused_by for case in INJECTION_CASES} - {""} == {name for name, _ in INJECTION_CHECKS}


def test_init_containers_need_no_more_than_the_watched_container() -> None:
    """They add nothing to the pod's requests, and a LimitRange that accepts the container accepts them."""
    injected = inject(by_name["guaranteed"].pod)
    for container in injected["spec"]["initContainers"][:2]:
        assert container["resources"] == {
            "requests": {"cpu": "1000m", "memory": "1Gi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        }


def test_the_recorder_runs_as_the_user_of_the_container() -> None:
    injected = inject(by_name["user-of-the-container"].pod)
    recorder = injected["spec"]["initContainers"][1]
    assert recorder["securityContext"]["runAsUser"] == 7
    assert recorder["imagePullPolicy"] == "Never"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "image"),
        ('{"image": "a", "kinds": "Job"}', "kinds"),
        ('{"image": "a", "pullPolicy": "Sometimes"}', "pullPolicy"),
        ('{"image": "a", "resources": {"requests": {"cpu": "1m"}, "limits": {}}}', "resources.requests.memory"),
        ('{"image": "a", "resources": {"requests": {"cpu": "x"}}}', "cpu"),
        ('{"image": "a", "links": "yes"}', "links"),
    ],
)
def test_rules_that_cannot_be_applied_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_injection_rules(text)


@pytest.mark.parametrize("links", [False, True])
def test_connections_are_sampled_only_if_the_rules_say_so(links: bool) -> None:
    patch = build_injection_patch(by_name["indexed-job"].pod, replace(RULES, links=links), ADDRESS)
    (sidecar,) = (each["value"] for each in patch if "pacekeeper.sidecar" in str(each["value"]))
    assert ({"name": "PACEKEEPER_WATCH_LINKS", "value": "1"} in sidecar["env"]) == links


def test_rules_are_those_of_the_settings() -> None:
    resources = {"requests": {"cpu": "2m", "memory": "8Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    rules = parse_injection_rules(
        json.dumps({"image": "a", "pullPolicy": "Always", "kinds": ["X"], "resources": resources})
    )
    assert (rules.image, rules.pull_policy, rules.kinds, rules.resources) == ("a", "Always", ("X",), resources)
