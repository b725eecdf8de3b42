"""Which pods below one owner train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.watched_job import RootRef
from pacekeeper_operator.observe.watched_pods import (
    DescribedPod,
    KnownTraining,
    assign_pods,
    build_watched_name,
    view_watched_pod,
)
from testing.operators.watched_pods import build_pod_body, describe_ranks

ROOT = RootRef("RayCluster", "ray", "ray.io/v1", "ray-uid")
MAIN = build_watched_name(ROOT)


def build_pod(
    uid: str, ranks: Sequence[int], world_size: int = 4, created_at: float = 0.0, **changes: Any
) -> DescribedPod:
    return DescribedPod(uid, created_at, True, describe_ranks(ranks, world_size, **changes))


def group(names: dict[str, str]) -> set[frozenset[str]]:
    return {frozenset(uid for uid in names if names[uid] == name) for name in names.values()}


def test_ranks_with_one_rendezvous_are_one_training_in_any_order() -> None:
    first = [build_pod("a", [0, 1], rendezvous="x"), build_pod("c", [2, 3], rendezvous="x")]
    second = [build_pod("b", [0, 1], rendezvous="y"), build_pod("d", [2, 3], rendezvous="y")]
    together = {frozenset("ac"), frozenset("bd")}
    assert group(assign_pods(ROOT, [*first, *second], ())[0]) == together
    names, known = assign_pods(ROOT, [first[1], replace(second[0], created_at=1.0)], ())
    assert group(names) == {frozenset("c"), frozenset("b")}, "free ranks alone are no reason to join"
    assert group(assign_pods(ROOT, [*second, *first], known)[0]) == together


def test_a_restart_under_another_rendezvous_is_the_same_training() -> None:
    before = [build_pod("a", [0, 1]), build_pod("b", [2, 3])]
    names, known = assign_pods(ROOT, before, ())
    assert set(names.values()) == {MAIN}
    # A pod is replaced, and reports the next rendezvous before the other one does.
    names, known = assign_pods(ROOT, [before[0], build_pod("c", [2, 3], rendezvous="next:1")], known)
    assert set(names.values()) == {MAIN}
    # All pods are replaced.
    after = [build_pod("d", [0, 1], rendezvous="later:1"), build_pod("e", [2, 3], rendezvous="later:1")]
    assert set(assign_pods(ROOT, after, known)[0].values()) == {MAIN}


def test_a_pod_that_claims_ranks_of_a_running_one_is_a_training_of_its_own() -> None:
    pods = [build_pod("a", [0, 1]), build_pod("b", [2, 3])]
    names, known = assign_pods(ROOT, pods, ())
    names, _ = assign_pods(ROOT, [*pods, build_pod("c", [0, 1], created_at=1)], known)
    assert names["a"] == names["b"] == MAIN != names["c"]


def test_pods_without_ranks_belong_to_the_first_training_until_they_describe_some() -> None:
    names, known = assign_pods(ROOT, [DescribedPod("a", 0.0, True)], ())
    assert names == {"a": MAIN}
    assert known == (KnownTraining(MAIN),)
    names, _ = assign_pods(ROOT, [build_pod("b", [0, 1], 2), build_pod("a", [0, 1], 2, created_at=1)], known)
    assert names["b"] == MAIN != names["a"]


def test_names_fit_into_labels_and_differ_from_those_of_training_jobs() -> None:
    name = build_watched_name(replace(ROOT, name="r" * 253))
    assert len(name) <= 63
    assert "." in name
    assert build_watched_name(ROOT, "a") != MAIN


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [
        ([{"nvidia.com/gpu": "8"}], 8),
        ([{"nvidia.com/gpu": 2}, {"amd.com/gpu": "1"}, {}], 3),
        ([{"example.com/gpu": "1k"}], 1000),
        ([{"nvidia.com/mig-1g.5gb": "1", "cpu": "4"}], 0),
    ],
)
def test_whole_gpus_of_any_vendor_count_in_any_notation(limits: list[dict[str, Any]], gpus: int) -> None:
    body = build_pod_body("train")
    body["spec"]["containers"] = [
        {"name": str(index), "resources": {"limits": limit}} for index, limit in enumerate(limits)
    ]
    assert view_watched_pod(body).view.gpus == gpus
