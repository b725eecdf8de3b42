"""The breaker of the injection: what switches it off, and what does not since it is the owner's own fault."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.decide.injection_breaker import (
    BLOCKED_POD_SECONDS,
    BlockedPod,
    JobOutcome,
    can_replace_pod,
    compute_fisher_probability,
    find_blocking_failure,
    find_denial_failure,
    find_excess_failure,
    find_suspicious_failures,
    list_blocked_pods,
    read_outcome,
)
from pacekeeper_operator.pods.injection import WATCH_RESOURCES

BACK_OFF = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
CREATING = {"state": {"waiting": {"reason": "PodInitializing"}}}
PULLING_AGAIN = {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}, "restartCount": 1}
DONE = {"state": {"terminated": {"exitCode": 0}}, "lastState": {"terminated": {"exitCode": 1}}}
RUN_ERROR = {"state": {"waiting": {"reason": "RunContainerError", "message": "no such file"}}}
FAILED = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
STARTED = {"state": {"running": {}}, "started": True, "lastState": {"terminated": {"exitCode": 1}}}


def build_pod(*containers: tuple[str, dict[str, Any]], phase: str = "Pending", **status: Any) -> dict[str, Any]:
    statuses = [{"name": name, **state} for name, state in containers]
    owners = [{"kind": "Job", "name": "gpt", "uid": "uid-job", "controller": True}]
    return {
        "metadata": {"namespace": "team", "name": "gpt-0", "uid": "uid-1", "ownerReferences": owners},
        "status": {"phase": phase, "initContainerStatuses": statuses, **status},
    }


@pytest.mark.parametrize(
    ("pod", "container"),
    [
        (build_pod(("pacekeeper-payload", BACK_OFF)), "pacekeeper-payload"),
        (build_pod(("pacekeeper-payload", PULLING_AGAIN)), "pacekeeper-payload"),
        (build_pod(("pacekeeper-payload", DONE), ("pacekeeper-environment", RUN_ERROR)), "pacekeeper-environment"),
        (build_pod(("pacekeeper-watch", BACK_OFF)), "pacekeeper-watch"),
        (build_pod(("pacekeeper-payload", FAILED), phase="Failed"), "pacekeeper-payload"),
        # Their own faults: the image of the container, their init containers, an eviction.
        (build_pod(("pacekeeper-environment", BACK_OFF)), ""),
        (build_pod(("data", BACK_OFF)), ""),
        (build_pod(("pacekeeper-payload", FAILED), phase="Failed", reason="Evicted"), ""),
        (
            build_pod(
                ("pacekeeper-payload", FAILED),
                phase="Failed",
                conditions=[{"type": "DisruptionTarget", "status": "True"}],
            ),
            "",
        ),
        # Nothing is wrong yet, or no longer.
        (build_pod(("pacekeeper-payload", CREATING)), ""),
        (build_pod(("pacekeeper-payload", DONE), ("pacekeeper-watch", STARTED)), ""),
        # The sidecar of a pod that has ended.
        (build_pod(("pacekeeper-payload", DONE), ("pacekeeper-watch", FAILED), phase="Failed"), ""),
    ],
)
def test_pods_that_the_injection_blocks_are_found(pod: dict[str, Any], container: str) -> None:
    assert [found.container for found in list_blocked_pods([pod])] == ([container] if container else [])


def test_a_pod_that_is_being_deleted_is_not_blocked() -> None:
    pod = build_pod(("pacekeeper-payload", BACK_OFF))
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not list(list_blocked_pods([pod]))


def test_a_blocked_pod_counts_after_a_while_and_a_failed_one_at_once() -> None:
    (blocked,) = list_blocked_pods([build_pod(("pacekeeper-payload", BACK_OFF))])
    assert find_blocking_failure({blocked: 100.0}, 100.0 + BLOCKED_POD_SECONDS - 1) is None
    failure = find_blocking_failure({blocked: 100.0}, 100.0 + BLOCKED_POD_SECONDS)
    assert failure is not None
    assert (failure.kind, failure.namespace, failure.name, failure.uid) == ("Pod", "team", "gpt-0", "uid-1")
    assert "pacekeeper-payload: ImagePullBackOff: no such image" in failure.message
    failed = BlockedPod("team", "gpt-0", "uid-1", "pacekeeper-payload", "it ended with exit code 1", has_failed=True)
    assert find_blocking_failure({failed: 100.0}, 100.0) is not None


def quota(requested: str, used: str, limited: str) -> str:
    return f'pods "gpt-0" is forbidden: exceeded quota: q, requested: {requested}, used: {used}, limited: {limited}'


@pytest.mark.parametrize(
    ("note", "counts"),
    [
        ('violates PodSecurity "restricted": seccompProfile (container "pacekeeper-watch" must set …)', True),
        ("failed quota: q: must specify limits.cpu for: pacekeeper-watch", True),
        ("minimum memory usage per Container is 32Mi, but request is 16Mi", True),
        (quota("requests.cpu=8001m", "requests.cpu=0", "requests.cpu=8"), True),
        (quota("requests.cpu=8001m,requests.memory=9Gi", "requests.cpu=0,requests.memory=0",
               "requests.cpu=8,requests.memory=8Gi"), False),
        (quota("requests.cpu=9", "requests.cpu=0", "requests.cpu=8"), False),
        (quota("pods=1", "pods=8", "pods=8"), False),
        ("minimum memory usage per Container is 32Mi, but request is 4Mi", False),
        ("failed quota: q: must specify limits.cpu for: pytorch", False),
    ],
)  # fmt: skip
def test_denials_count_if_they_are_about_what_is_injected(note: str, counts: bool) -> None:
    event = {
        "regarding": {"kind": "Job", "namespace": "team", "name": "gpt", "uid": "uid-job"},
        "note": note,
        "deprecatedLastTimestamp": "2026-01-01T00:00:00Z",
    }
    failure = find_denial_failure([event], WATCH_RESOURCES, 0.0, {"team"}.__contains__)
    assert (failure is not None) == counts
    later = 1_800_000_000.0
    assert find_denial_failure([event], WATCH_RESOURCES, later, {"team"}.__contains__) is None, "from before"
    if counts and "pacekeeper-" not in note:
        elsewhere = find_denial_failure([event], WATCH_RESOURCES, 0.0, {"other"}.__contains__)
        assert elsewhere is None, "pods of this namespace are not watched"


def outcomes(prefix: str, failed: int, total: int, failure: str = "Error 1", *, watched: bool) -> list[JobOutcome]:
    return [JobOutcome(f"{prefix}{i}", watched, failure if i < failed else "") for i in range(total)]


def test_watched_jobs_that_fail_where_others_do_not_count() -> None:
    others = outcomes("o", 1, 40, watched=False)
    found = find_excess_failure([*outcomes("w", 6, 10, watched=True), *others])
    assert found is not None
    assert "6 of 10 watched jobs have failed with Error 1, and 1 of 40" in found.message
    assert find_excess_failure([*outcomes("w", 1, 10, watched=True), *others]) is None
    assert find_excess_failure(outcomes("w", 10, 10, watched=True)) is None, "nothing to compare with"
    alike = outcomes("o", 20, 40, watched=False)
    assert find_excess_failure([*outcomes("w", 6, 10, watched=True), *alike]) is None
    otherwise = outcomes("o", 20, 40, "Error 2", watched=False)
    assert find_excess_failure([*outcomes("w", 6, 10, watched=True), *otherwise]) is not None


def test_two_failed_jobs_are_not_enough_however_improbable() -> None:
    others = outcomes("o", 0, 1000, watched=False)
    assert compute_fisher_probability(2, 2, 0, 1000) < 1e-5
    assert find_excess_failure([*outcomes("w", 2, 2, watched=True), *others]) is None
    assert find_excess_failure([*outcomes("w", 3, 3, watched=True), *others]) is not None


def test_many_failed_pods_of_one_job_are_one_failure() -> None:
    pods = [JobOutcome("one", True, "Error 1")] * 64
    assert not find_suspicious_failures(pods)
    assert find_excess_failure([*pods, *outcomes("o", 0, 1000, watched=False)]) is None


def test_fishers_probability() -> None:
    assert compute_fisher_probability(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert compute_fisher_probability(0, 4, 0, 4) == 1.0


@pytest.mark.parametrize(
    ("ended", "failure"),
    [
        ({"exitCode": 1, "reason": "Error"}, "Error 1"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled 137"),
        ({"exitCode": 137, "reason": "Error"}, None),
        ({"exitCode": 143, "reason": "Error"}, None),
    ],
)
def test_the_outcome_of_a_pod_is_how_its_container_has_ended(ended: dict[str, Any], failure: str | None) -> None:
    pod = build_pod(phase="Failed", containerStatuses=[{"name": "pytorch", "state": {"terminated": ended}}])
    outcome = read_outcome(pod, is_watched=True)
    assert outcome == (None if failure is None else JobOutcome("uid-job", True, failure))
    assert read_outcome(build_pod(phase="Succeeded"), is_watched=True) == JobOutcome("uid-job", True, "")
    assert read_outcome(build_pod(phase="Running"), is_watched=True) is None
    deleted = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert read_outcome(deleted, is_watched=True) is None


@pytest.mark.parametrize(
    ("spec", "status", "can"),
    [
        ({}, {}, True),
        ({"backoffLimit": 0}, {}, False),
        ({"backoffLimit": 2}, {"failed": 2}, False),
        ({"backoffLimit": 2147483647, "backoffLimitPerIndex": 0}, {}, False),
        ({"backoffLimit": 2147483647, "backoffLimitPerIndex": 1}, {}, True),
        ({"backoffLimitPerIndex": 1}, {"failedIndexes": "1"}, False),
    ],
)
def test_a_pod_is_replaced_only_if_its_job_survives_that(spec: Any, status: Any, can: bool) -> None:
    assert can_replace_pod({"spec": spec, "status": status}) == can
