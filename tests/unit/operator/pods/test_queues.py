"""Jobs that a queue admits, held against Kueue's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import Object
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods import queues
from pacekeeper_operator.pods.queues import (
    SPARES_POD_SET,
    WORKERS_POD_SET,
    NodePlacement,
    QueueDecision,
    WorkloadProgress,
)
from testing.operators.observations import NOW, build_job

TEMPLATES: Mapping[str, Object] = {WORKERS_POD_SET: {"spec": {"w": 1}}, SPARES_POD_SET: {"spec": {"s": 1}}}
RUNS = WorkloadProgress(pods_left=True, ready=True)
FLAVORS = {
    "h100": NodePlacement({"pool": "h100"}, ({"key": "gpu", "operator": "Exists"},)),
    "cpus": NodePlacement({"zone": "a"}),
}


def queued(**changes: Any) -> TrainingJob:
    return replace(build_job(**changes), queue="team")


def condition(kind: str, status: str = "True", reason: str = "R", message: str = "m") -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(NOW - 60),
    }


def written(*conditions: Object, assigned: Mapping[str, int] | None = None, of: TrainingJob | None = None) -> Object:
    """The job's Workload in the cluster. `assigned`: pods by set, all of flavor h100."""
    body = queues.build_workload(of or queued(), "v1beta1", TEMPLATES)
    sets = [{"name": name, "count": n, "flavors": {"gpu": "h100"}} for name, n in (assigned or {}).items()]
    status: Object = {"conditions": list(conditions)}
    if assigned is not None:
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": sets}
    return {**body, "metadata": {**body["metadata"], "generation": 3}, "status": status}


def admitted(**counts: int) -> Object:
    return written(
        condition("QuotaReserved"), condition("Admitted"), assigned=counts or {WORKERS_POD_SET: 4, SPARES_POD_SET: 1}
    )


class TestWorkload:
    def test_it_asks_for_workers_and_spares(self) -> None:
        body = queues.build_workload(queued(), "v1beta2", TEMPLATES)
        assert body["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        assert body["spec"]["queueName"] == "team"
        assert body["spec"]["podSets"] == [
            {"name": "workers", "count": 4, "template": TEMPLATES[WORKERS_POD_SET]},
            {"name": "spares", "count": 1, "template": TEMPLATES[SPARES_POD_SET]},
        ]
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["name"], owner["uid"], owner["controller"]) == ("j", "u1d2c3", True)
        assert body["metadata"]["labels"] == {"kueue.x-k8s.io/job-uid": "u1d2c3"}

    def test_fewer_workers_may_be_admitted_where_the_job_allows_it(self) -> None:
        (workers,) = queues.build_workload(queued(spares=0, min_replicas=2), "v1beta1", TEMPLATES)["spec"]["podSets"]
        assert workers["minCount"] == 2

    def test_a_job_of_the_same_name_has_another_one(self) -> None:
        assert queues.workload_name(queued()) != queues.workload_name(replace(queued(), uid="another"))
        assert len(queues.workload_name(replace(queued(), name="j" * 253))) <= 253

    def test_other_pods_or_another_queue_are_another_workload_and_a_pause_is_not(self) -> None:
        found = written()
        assert queues.has_requested_pods(found, queued(suspend=True))
        for other in (queued(replicas=5), replace(queued(), queue="other")):
            assert not queues.has_requested_pods(found, other)
        assert queues.build_workload(queued(suspend=True), "v1beta1", TEMPLATES)["spec"]["active"] is False


class TestTurn:
    @pytest.mark.parametrize(
        ("found", "words"),
        [
            (written(), "waits in queue team"),
            (
                written(condition("QuotaReserved", "False", "Pending", "insufficient quota")),
                "waits in queue team: insufficient quota",
            ),
            (written(condition("QuotaReserved"), condition("Admitted", "False")), "waits in queue team: m"),
            (
                written(condition("Admitted"), condition("Evicted", reason="Preempted", message="for j2")),
                "evicted (Preempted): for j2",
            ),
            (written(condition("Admitted"), condition("Finished")), "its Workload is finished: m"),
        ],
    )
    def test_it_is_held(self, found: Object, words: str) -> None:
        assert queues.read_queue_decision(found, FLAVORS) == QueueDecision(admitted=False, message=words)
        assert queues.read_flavors(found) == frozenset()

    def test_what_was_admitted_and_where(self) -> None:
        found = admitted(workers=3, spares=1)
        turn = queues.read_queue_decision(found, FLAVORS)
        assert (turn.admitted, turn.counts) == (True, {"workers": 3, "spares": 1})
        assert turn.find_placement(spare=False) == turn.find_placement(spare=True) == FLAVORS["h100"]
        assert queues.read_flavors(found) == {"h100"}

    def test_an_eviction_that_is_over_holds_nothing(self) -> None:
        found = written(condition("Admitted"), condition("Evicted", "False"), assigned={WORKERS_POD_SET: 4})
        assert queues.read_queue_decision(found, FLAVORS).admitted

    def test_quota_need_not_be_of_any_flavour(self) -> None:
        found = admitted(workers=4)
        del found["status"]["admission"]["podSetAssignments"][0]["flavors"]
        assert queues.read_queue_decision(found, {}).find_placement(spare=False) == NodePlacement()

    def test_a_set_may_have_several_flavours(self) -> None:
        found = admitted(workers=4)
        found["status"]["admission"]["podSetAssignments"][0]["flavors"]["cpu"] = "cpus"
        assert queues.read_queue_decision(found, FLAVORS).find_placement(spare=False).labels == {
            "pool": "h100",
            "zone": "a",
        }

    def test_a_flavour_says_where(self) -> None:
        flavor = {"spec": {"nodeLabels": {"a": "b"}, "tolerations": [{"key": "k"}]}}
        assert queues.read_node_placement(flavor) == NodePlacement({"a": "b"}, ({"key": "k"},))
        assert queues.read_node_placement({"spec": {}}) == queues.read_node_placement({}) == NodePlacement()


class TestUnder:
    def test_who_names_no_queue_is_let_be(self) -> None:
        assert queues.apply_queue_decision(build_job(), None) == build_job()
        assert queues.apply_queue_decision(build_job(), QueueDecision(admitted=False, message="waits")) == build_job()

    def test_who_waits_is_as_if_suspended_and_says_why(self) -> None:
        held = queues.apply_queue_decision(queued(), QueueDecision(admitted=False, message="waits"))
        assert (held.spec.suspend, held.queue_hold_reason) == (True, "waits")

    def test_who_is_suspended_by_its_user_is_not_held_by_its_queue(self) -> None:
        assert (
            queues.apply_queue_decision(
                queued(suspend=True), QueueDecision(admitted=False, message="waits")
            ).queue_hold_reason
            == ""
        )

    def test_fewer_may_be_admitted_than_were_asked_for_and_never_more(self) -> None:
        few = queues.apply_queue_decision(queued(), QueueDecision(admitted=True, counts={WORKERS_POD_SET: 3}))
        assert (few.spec.replicas, few.spec.spares, few.spec.suspend, few.queue_hold_reason) == (3, 0, False, "")
        many = queues.apply_queue_decision(
            queued(), QueueDecision(admitted=True, counts={WORKERS_POD_SET: 30, SPARES_POD_SET: 9})
        )
        assert (many.spec.replicas, many.spec.spares) == (4, 1)


class TestStatus:
    def due(self, found: Object, stage: WorkloadProgress) -> dict[str, tuple[str, str]] | None:
        status = queues.build_status_update(found, stage, NOW)
        if status is None:
            return None
        return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}

    def test_quota_is_kept_until_no_pod_is_left(self) -> None:
        evicted = condition("Evicted", reason="Preempted", message="for j2")
        found = written(condition("QuotaReserved"), condition("Admitted"), evicted, assigned={WORKERS_POD_SET: 4})
        assert self.due(found, RUNS) is None
        status = queues.build_status_update(found, WorkloadProgress(pods_left=False), NOW)
        assert status is not None
        assert status["admission"] is None
        assert self.due(found, WorkloadProgress(pods_left=False)) == {
            "QuotaReserved": ("False", "Pending"),
            "Admitted": ("False", "NoReservation"),
            "Evicted": ("True", "Preempted"),
            "Requeued": ("True", "Preempted"),
        }

    def test_who_was_deactivated_does_not_ask_to_be_queued_again(self) -> None:
        evicted = condition("Evicted", reason="Deactivated")
        found = written(condition("QuotaReserved"), evicted, assigned={WORKERS_POD_SET: 4})
        told = self.due(found, WorkloadProgress(pods_left=False))
        assert told is not None
        assert told["Requeued"] == ("False", "Deactivated")

    def test_it_is_given_back_once(self) -> None:
        found = written(condition("QuotaReserved", "False"), condition("Evicted"))
        assert self.due(found, WorkloadProgress(pods_left=False)) is None

    def test_whether_its_ranks_train(self) -> None:
        found = admitted()
        assert self.due(found, RUNS) == {
            "QuotaReserved": ("True", "R"),
            "Admitted": ("True", "R"),
            "PodsReady": ("True", "Started"),
        }
        told = written(
            condition("Admitted"),
            condition("PodsReady", reason="Started"),
            assigned={WORKERS_POD_SET: 4, SPARES_POD_SET: 1},
        )
        assert self.due(told, RUNS) is None

    def test_its_end_is_told_when_no_pod_runs_any_more(self) -> None:
        ended = WorkloadProgress(pods_left=True, finished="its ranks have finished")
        assert self.due(admitted(), ended) is None
        told = self.due(admitted(), replace(ended, pods_left=False))
        assert told is not None
        assert told["Finished"] == ("True", "Succeeded")
        failed = self.due(admitted(), WorkloadProgress(pods_left=False, finished="out of time", failed=True))
        assert failed is not None
        assert failed["Finished"] == ("True", "Failed")

    def test_what_others_have_said_stays_with_its_time(self) -> None:
        status = queues.build_status_update(admitted(), RUNS, NOW)
        assert status is not None
        since = {each["type"]: each["lastTransitionTime"] for each in status["conditions"]}
        assert since == {
            "QuotaReserved": format_time(NOW - 60),
            "Admitted": format_time(NOW - 60),
            "PodsReady": format_time(NOW),
        }
