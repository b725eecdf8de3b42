"""Jobs that a queue admits, compared with the protocol of Kueue."""

from __future__ import annotations

import copy
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
RUNNING = WorkloadProgress(pods_left=True, ready=True)
FLAVORS = {
    "h100": NodePlacement({"pool": "h100"}, ({"key": "gpu", "operator": "Exists"},)),
    "cpus": NodePlacement({"zone": "a"}),
}


def build_queued_job(**changes: Any) -> TrainingJob:
    return replace(build_job(**changes), queue="team")


def build_condition(kind: str, status: str = "True", reason: str = "R", message: str = "m") -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(NOW - 60),
    }


def build_workload(
    *conditions: Object, assigned: Mapping[str, int] | None = None, job: TrainingJob | None = None
) -> Object:
    """Return the Workload of a job in the cluster. `assigned` counts pods by set, all of flavor h100."""
    body = queues.build_workload(job or build_queued_job(), "v1beta1", TEMPLATES)
    sets = [{"name": name, "count": n, "flavors": {"gpu": "h100"}} for name, n in (assigned or {}).items()]
    status: Object = {"conditions": list(conditions)}
    if assigned is not None:
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": sets}
    return {**body, "metadata": {**body["metadata"], "generation": 3}, "status": status}


def build_admitted_workload(**counts: int) -> Object:
    return build_workload(
        build_condition("QuotaReserved"),
        build_condition("Admitted"),
        assigned=counts or {WORKERS_POD_SET: 4, SPARES_POD_SET: 1},
    )


class TestWorkload:
    def test_a_workload_requests_workers_and_spares(self) -> None:
        body = queues.build_workload(build_queued_job(), "v1beta2", TEMPLATES)
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
        (workers,) = queues.build_workload(build_queued_job(spares=0, min_replicas=2), "v1beta1", TEMPLATES)["spec"][
            "podSets"
        ]
        assert workers["minCount"] == 2

    def test_another_job_of_the_same_name_has_another_workload(self) -> None:
        assert queues.workload_name(build_queued_job()) != queues.workload_name(
            replace(build_queued_job(), uid="another")
        )
        assert len(queues.workload_name(replace(build_queued_job(), name="j" * 253))) <= 253

    def test_other_pods_or_another_queue_need_another_workload(self) -> None:
        found = build_workload()
        assert queues.has_requested_pods(found, build_queued_job(suspend=True))
        for other in (build_queued_job(replicas=5), replace(build_queued_job(), queue="other")):
            assert not queues.has_requested_pods(found, other)
        assert queues.build_workload(build_queued_job(suspend=True), "v1beta1", TEMPLATES)["spec"]["active"] is False


class TestQueueDecision:
    @pytest.mark.parametrize(
        ("found", "message"),
        [
            (build_workload(), "waits in queue team"),
            (
                build_workload(build_condition("QuotaReserved", "False", "Pending", "insufficient quota")),
                "waits in queue team: insufficient quota",
            ),
            (
                build_workload(build_condition("QuotaReserved"), build_condition("Admitted", "False")),
                "waits in queue team: m",
            ),
            (
                build_workload(
                    build_condition("Admitted"), build_condition("Evicted", reason="Preempted", message="for j2")
                ),
                "evicted (Preempted): for j2",
            ),
            (
                build_workload(
                    build_condition("QuotaReserved", "False", message="insufficient quota"),
                    build_condition("Admitted", "False"),
                    build_condition("Evicted", reason="Preempted", message="for j2"),
                ),
                "waits in queue team after an eviction (Preempted): insufficient quota",
            ),
            (build_workload(build_condition("Admitted"), build_condition("Finished")), "its Workload is finished: m"),
        ],
    )
    def test_a_job_without_admission_is_held(self, found: Object, message: str) -> None:
        assert queues.read_queue_decision(found, FLAVORS) == QueueDecision(admitted=False, message=message)
        assert queues.read_flavors(found) == frozenset()

    def test_the_decision_contains_admitted_counts_and_placement(self) -> None:
        found = build_admitted_workload(workers=3, spares=1)
        decision = queues.read_queue_decision(found, FLAVORS)
        assert (decision.admitted, decision.counts) == (True, {"workers": 3, "spares": 1})
        assert decision.find_placement(WORKERS_POD_SET) == decision.find_placement(SPARES_POD_SET) == FLAVORS["h100"]
        assert queues.read_flavors(found) == {"h100"}

    def test_kueue_places_the_pods_of_a_set_with_a_topology(self) -> None:
        """Kueue finds them by label and annotations. A pod that it does not find keeps its gate."""
        found = build_admitted_workload(workers=4, spares=1)
        found["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = {
            "levels": ["kubernetes.io/hostname"]
        }
        job, decision = build_queued_job(), queues.read_queue_decision(found, FLAVORS)
        assert decision.assigns_nodes(WORKERS_POD_SET)
        assert not decision.assigns_nodes(SPARES_POD_SET)
        worker: Object = {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}
        spare = copy.deepcopy(worker)
        queues.add_pod_set(worker, job, decision, WORKERS_POD_SET)
        queues.add_pod_set(spare, job, decision, SPARES_POD_SET)
        assert worker["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
        assert worker["metadata"] == {
            "labels": {"kueue.x-k8s.io/podset": "workers"},
            "annotations": {
                "kueue.x-k8s.io/workload": found["metadata"]["name"],
                "kueue.x-k8s.io/podset-unconstrained-topology": "true",
            },
        }
        assert spare == {"metadata": {"labels": {"kueue.x-k8s.io/podset": "spares"}, "annotations": {}}, "spec": {}}

    @pytest.mark.parametrize(
        ("annotation", "value", "request_"),
        [
            ("podset-required-topology", "rack", {"required": "rack"}),
            ("podset-preferred-topology", "rack", {"preferred": "rack"}),
            ("podset-unconstrained-topology", "true", {"unconstrained": True}),
            ("podset-unconstrained-topology", "false", None),
            ("other", "rack", None),
        ],
    )
    def test_the_template_requests_a_topology(self, annotation: str, value: str, request_: Object | None) -> None:
        job = build_queued_job()
        template = {**job.spec.template, "metadata": {"annotations": {f"kueue.x-k8s.io/{annotation}": value}}}
        job = replace(job, spec=replace(job.spec, template=template))
        for pod_set in queues.build_workload(job, "v1beta2", TEMPLATES)["spec"]["podSets"]:
            assert pod_set.get("topologyRequest") == request_

    def test_a_past_eviction_does_not_hold_a_job(self) -> None:
        found = build_workload(
            build_condition("Admitted"), build_condition("Evicted", "False"), assigned={WORKERS_POD_SET: 4}
        )
        assert queues.read_queue_decision(found, FLAVORS).admitted

    def test_quota_may_be_without_a_flavor(self) -> None:
        found = build_admitted_workload(workers=4)
        del found["status"]["admission"]["podSetAssignments"][0]["flavors"]
        assert queues.read_queue_decision(found, {}).find_placement(WORKERS_POD_SET) == NodePlacement()

    def test_a_pod_set_may_have_several_flavors(self) -> None:
        found = build_admitted_workload(workers=4)
        found["status"]["admission"]["podSetAssignments"][0]["flavors"]["cpu"] = "cpus"
        assert queues.read_queue_decision(found, FLAVORS).find_placement(WORKERS_POD_SET).labels == {
            "pool": "h100",
            "zone": "a",
        }

    def test_a_flavor_gives_the_node_placement(self) -> None:
        flavor = {"spec": {"nodeLabels": {"a": "b"}, "tolerations": [{"key": "k"}]}}
        assert queues.read_node_placement(flavor) == NodePlacement({"a": "b"}, ({"key": "k"},))
        assert queues.read_node_placement({"spec": {}}) == queues.read_node_placement({}) == NodePlacement()


class TestApplyQueueDecision:
    def test_a_job_without_a_queue_is_unchanged(self) -> None:
        assert queues.apply_queue_decision(build_job(), None) == build_job()
        assert queues.apply_queue_decision(build_job(), QueueDecision(admitted=False, message="waits")) == build_job()

    def test_a_waiting_job_is_suspended_with_a_reason(self) -> None:
        held = queues.apply_queue_decision(build_queued_job(), QueueDecision(admitted=False, message="waits"))
        assert (held.spec.suspend, held.queue_hold_reason) == (True, "waits")

    def test_a_job_that_its_user_suspended_is_not_held_by_its_queue(self) -> None:
        assert (
            queues.apply_queue_decision(
                build_queued_job(suspend=True), QueueDecision(admitted=False, message="waits")
            ).queue_hold_reason
            == ""
        )

    def test_an_admission_may_reduce_a_job_and_never_enlarge_it(self) -> None:
        smaller = queues.apply_queue_decision(
            build_queued_job(), QueueDecision(admitted=True, counts={WORKERS_POD_SET: 3})
        )
        assert (smaller.spec.replicas, smaller.spec.spares, smaller.spec.suspend, smaller.queue_hold_reason) == (
            3,
            0,
            False,
            "",
        )
        larger = queues.apply_queue_decision(
            build_queued_job(), QueueDecision(admitted=True, counts={WORKERS_POD_SET: 30, SPARES_POD_SET: 9})
        )
        assert (larger.spec.replicas, larger.spec.spares) == (4, 1)


class TestStatus:
    def read_status_update(self, found: Object, stage: WorkloadProgress) -> dict[str, tuple[str, str]] | None:
        status = queues.build_status_update(found, stage, NOW)
        if status is None:
            return None
        return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}

    def test_quota_is_returned_once_no_pod_is_left(self) -> None:
        evicted = build_condition("Evicted", reason="Preempted", message="for j2")
        found = build_workload(
            build_condition("QuotaReserved"), build_condition("Admitted"), evicted, assigned={WORKERS_POD_SET: 4}
        )
        assert self.read_status_update(found, RUNNING) is None
        status = queues.build_status_update(found, WorkloadProgress(pods_left=False), NOW)
        assert status is not None
        assert status["admission"] is None
        assert self.read_status_update(found, WorkloadProgress(pods_left=False)) == {
            "QuotaReserved": ("False", "Pending"),
            "Admitted": ("False", "NoReservation"),
            "Evicted": ("True", "Preempted"),
            "Requeued": ("True", "Preempted"),
            "PodsReady": ("False", "WaitForStart"),
        }

    @pytest.mark.parametrize(
        ("reason", "requeued"),
        [("Deactivated", "False"), ("AdmissionCheck", "False"), ("Preempted", "True"), ("NodeFailures", "True")],
    )
    def test_a_workload_is_requeued_where_kueue_does_not_do_it(self, reason: str, requeued: str) -> None:
        evicted = build_condition("Evicted", reason=reason)
        found = build_workload(build_condition("QuotaReserved"), evicted, assigned={WORKERS_POD_SET: 4})
        reported = self.read_status_update(found, WorkloadProgress(pods_left=False))
        assert reported is not None
        assert reported["Requeued"] == (requeued, reason)

    def test_quota_is_returned_once(self) -> None:
        found = build_workload(build_condition("QuotaReserved", "False"), build_condition("Evicted"))
        assert self.read_status_update(found, WorkloadProgress(pods_left=False)) is None

    def test_pods_ready_is_reported_once(self) -> None:
        found = build_admitted_workload()
        assert self.read_status_update(found, RUNNING) == {
            "QuotaReserved": ("True", "R"),
            "Admitted": ("True", "R"),
            "PodsReady": ("True", "Started"),
        }
        reported = build_workload(
            build_condition("Admitted"),
            build_condition("PodsReady", reason="Started"),
            assigned={WORKERS_POD_SET: 4, SPARES_POD_SET: 1},
        )
        assert self.read_status_update(reported, RUNNING) is None

    @pytest.mark.parametrize(
        ("before", "ready", "after"),
        [
            (None, False, ("False", "WaitForStart")),
            (("False", "WaitForStart"), False, None),
            (("True", "Started"), False, ("False", "WaitForRecovery")),
            (("True", "Recovered"), False, ("False", "WaitForRecovery")),
            (("False", "WaitForRecovery"), False, None),
            (("False", "WaitForRecovery"), True, ("True", "Recovered")),
            (("True", "Recovered"), True, None),
        ],
    )
    def test_a_worker_that_is_missing_later_is_no_start(
        self, before: tuple[str, str] | None, ready: bool, after: tuple[str, str] | None
    ) -> None:
        """Kueue evicts a job that waits for its start by the time since its admission."""
        conditions = [build_condition("PodsReady", *before)] if before else []
        found = build_workload(build_condition("Admitted"), *conditions, assigned={WORKERS_POD_SET: 4})
        reported = self.read_status_update(found, WorkloadProgress(pods_left=True, ready=ready))
        assert (None if reported is None else reported["PodsReady"]) == after

    def test_a_job_that_waits_again_is_not_ready(self) -> None:
        found = build_workload(build_condition("Admitted", "False"), build_condition("PodsReady"))
        reported = self.read_status_update(found, WorkloadProgress(pods_left=False))
        assert reported is not None
        assert reported["PodsReady"] == ("False", "WaitForStart")

    def test_the_end_is_reported_once_no_pod_runs(self) -> None:
        ended = WorkloadProgress(pods_left=True, finished="its ranks have finished")
        assert self.read_status_update(build_admitted_workload(), ended) is None
        reported = self.read_status_update(build_admitted_workload(), replace(ended, pods_left=False))
        assert reported is not None
        assert reported["Finished"] == ("True", "Succeeded")
        failed = self.read_status_update(
            build_admitted_workload(), WorkloadProgress(pods_left=False, finished="out of time", failed=True)
        )
        assert failed is not None
        assert failed["Finished"] == ("True", "Failed")

    def test_conditions_of_others_keep_their_time(self) -> None:
        status = queues.build_status_update(build_admitted_workload(), RUNNING, NOW)
        assert status is not None
        since = {each["type"]: each["lastTransitionTime"] for each in status["conditions"]}
        assert since == {
            "QuotaReserved": format_time(NOW - 60),
            "Admitted": format_time(NOW - 60),
            "PodsReady": format_time(NOW),
        }
