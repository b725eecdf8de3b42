"""Which pods a job has and which leave, by the phase of the job and the reasons for which workers leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState
from pacekeeper_operator.api.training_job import CleanPodPolicy, RemediationMode, RunPolicySpec
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.decide.placement.workforce import (
    POD_DELETION_OVERDUE_SECONDS,
    UNPLACED_POD_SECONDS,
    WORKER_LEAVE_SECONDS,
    assign_pod_sets,
    list_missing_workers,
    list_surplus_workers,
    runs_completely,
)
from pacekeeper_operator.pods.queues import SPARES_POD_SET, WORKERS_POD_SET
from pacekeeper_operator.state.cluster_view import FRESH_WORKER_SECONDS, NodeView, PodView, WorkerView
from pacekeeper_operator.state.desired_state import DesiredState, WorkerRecord
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_job,
    build_policy,
    build_training,
    change_members,
    change_worker,
    with_pods,
)


def apply_step(observation: Observation) -> Observation:
    """Return the observation with the desired state of the step."""
    return observation.with_desired(workforce.update_workforce(observation, build_policy()))


def list_names(workers: tuple[WorkerRecord, ...]) -> list[str]:
    return [worker.name for worker in workers]


def list_leaving(observation: Observation) -> list[str]:
    return [view.name for view in list_surplus_workers(observation)]


def find_record(observation: Observation, name: str) -> WorkerRecord:
    found = observation.state.placement.find_worker(name)
    assert found is not None
    return found


def change_record(observation: Observation, name: str, **changes: object) -> Observation:
    """Change the record of a worker."""
    return observation.with_desired(observation.desired.with_worker(replace(find_record(observation, name), **changes)))  # type: ignore[arg-type]


def build_reserved(replicas: int = 2, spares: int = 1) -> Observation:
    """Build a job whose workers are recorded, but have no pods."""
    start = apply_step(build_fresh(replicas, spares))
    return apply_step(start)


class TestMissing:
    def test_no_worker_is_reserved_or_created_before_the_template_is_accepted(self) -> None:
        observation = build_fresh()
        refused = observation.with_desired(observation.desired.with_placement(template_accepted=None))
        assert apply_step(refused).state.placement == refused.state.placement
        not_created = build_reserved()
        assert list_names(list_missing_workers(not_created)) == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert not list_missing_workers(
            not_created.with_desired(not_created.desired.with_placement(template_accepted=None))
        )

    def test_a_job_that_trains_continues_with_its_accepted_template(self) -> None:
        observation = change_worker(build_training(), "j-w4-0", gone=True)
        edited = observation.with_desired(observation.desired.with_placement(template_accepted=None))
        assert list_names(list_missing_workers(apply_step(edited))) == ["j-w4-1"]

    @pytest.mark.parametrize("end", ["suspend", "stop", "failed", "complete"])
    def test_no_worker_is_created_for_a_job_that_ends(self, end: str) -> None:
        observation = build_reserved()
        ending = {
            "suspend": replace(
                observation, job=replace(observation.job, spec=replace(observation.job.spec, suspend=True))
            ),
            "stop": observation.with_desired(observation.desired.with_plan(stop=Stop.SUSPEND)),
            "failed": observation.with_desired(observation.desired.with_lifecycle(failed_reason="ScriptFailed")),
            "complete": observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW)),
        }[end]
        assert not list_missing_workers(ending)
        assert list_names(list_missing_workers(observation)) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_a_worker_that_had_a_pod_or_is_leaving_is_not_created_again(self) -> None:
        observation = build_reserved()
        assert "j-w0-0" not in list_names(list_missing_workers(change_record(observation, "j-w0-0", uid="uid-0")))
        assert "j-w0-0" not in list_names(
            list_missing_workers(change_record(observation, "j-w0-0", leaving="it is not wanted"))
        )

    def test_free_ordinals_are_used_again_by_later_incarnations(self) -> None:
        observation = build_training(2, 2)
        observation = change_worker(change_worker(observation, "j-w2-0", gone=True), "j-w3-0", gone=True)
        assert list_names(list_missing_workers(apply_step(observation))) == ["j-w2-1", "j-w3-1"]

    def test_after_a_scale_down_surplus_workers_leave_and_none_is_created(self) -> None:
        observation = build_training(2, 2, job=build_job(2, 1))
        assert not list_missing_workers(apply_step(observation))
        assert list_leaving(apply_step(observation)) == ["j-w3-0"], "the newest of those without ranks"


class TestQueuedPods:
    def build_queued(self, *pod_sets: str | None) -> Observation:
        """Build a job of two workers and a spare, with the pod sets of their pods; None: there is no pod."""
        observation = build_training(2, 1)
        workers = tuple(
            replace(view, pod=None if pod_set is None or view.pod is None else replace(view.pod, pod_set=pod_set))
            for view, pod_set in zip(observation.workers, pod_sets, strict=True)
        )
        return replace(observation, job=replace(observation.job, queue="team"), workers=workers)

    @pytest.mark.parametrize(
        ("pod_sets", "spares", "expected"),
        [
            ((None, None, None), [False, False, True], [WORKERS_POD_SET, WORKERS_POD_SET, SPARES_POD_SET]),
            ((WORKERS_POD_SET, WORKERS_POD_SET, None), [True], [SPARES_POD_SET]),
            ((None, WORKERS_POD_SET, SPARES_POD_SET), [False], [WORKERS_POD_SET]),
            ((None, WORKERS_POD_SET, SPARES_POD_SET), [True], [WORKERS_POD_SET]),  # the spare has become a member
            ((WORKERS_POD_SET, WORKERS_POD_SET, SPARES_POD_SET), [False], [WORKERS_POD_SET]),  # more than were admitted
            (("", "", None), [True], [SPARES_POD_SET]),  # an older operator created the others
        ],
    )
    def test_a_new_pod_belongs_to_the_set_with_a_free_place(
        self, pod_sets: tuple[str | None, ...], spares: list[bool], expected: list[str]
    ) -> None:
        assert assign_pod_sets(self.build_queued(*pod_sets), spares) == expected

    def test_a_job_in_no_queue_has_no_pod_sets(self) -> None:
        assert assign_pod_sets(build_training(2, 1), [False]) == [""]

    @pytest.mark.parametrize(
        ("pod", "complete"),
        [({}, True), ({"started": False}, False), ({"deleting": True}, False), ({"exit_code": 1}, False)],
    )
    def test_a_job_runs_completely_with_as_many_workers_as_replicas(self, pod: dict[str, Any], complete: bool) -> None:
        observation = with_pods(build_training(2, 0))
        for view in observation.workers:
            observation = change_worker(observation, view.name, pod={"started": True})
        assert runs_completely(change_worker(observation, "j-w0-0", pod=pod)) is complete


class TestRecords:
    def test_the_recorded_node_stays_if_the_pod_has_none(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"node": ""})
        assert find_record(apply_step(observation), "j-w1-0").node == "node-1"

    def test_the_node_of_the_pod_replaces_the_recorded_one(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"node": "node-9"})
        assert find_record(apply_step(observation), "j-w1-0").node == "node-9"

    def test_a_member_has_no_starting_time(self) -> None:
        observation = change_members(build_training(), state=LauncherState.STARTING)
        for view in observation.workers:
            observation = change_worker(observation, view.name, pod={"started": True})
        spare = change_worker(observation, "j-w4-0", heartbeat={"state": LauncherState.STARTING})
        starting_times = {worker.name: worker.starting_since for worker in apply_step(spare).state.placement.workers}
        assert starting_times == {"j-w0-0": None, "j-w1-0": None, "j-w2-0": None, "j-w3-0": None, "j-w4-0": NOW}

    def test_a_leaving_worker_without_a_pod_is_removed_once_it_holds_no_ranks(self) -> None:
        observation = change_record(build_training(), "j-w1-0", leaving="x", dead=True)
        observation = change_record(change_worker(observation, "j-w1-0", gone=True), "j-w4-0", leaving="x")
        observation = change_worker(observation, "j-w4-0", gone=True)
        assert "j-w1-0" in list_names(apply_step(observation).state.placement.workers), (
            "its ranks are not assigned to another worker yet"
        )
        assert "j-w4-0" not in list_names(apply_step(observation).state.placement.workers)

    @pytest.mark.parametrize(
        ("late", "forced"),
        [
            (POD_DELETION_OVERDUE_SECONDS - 1, False),
            (POD_DELETION_OVERDUE_SECONDS, False),
            (POD_DELETION_OVERDUE_SECONDS + 1, True),
        ],
    )
    def test_an_overdue_deletion_is_forced(self, late: float, forced: bool) -> None:
        observation = change_worker(build_training(), "j-w4-0", pod={"deleting": True, "delete_by": NOW - late})
        observation = apply_step(observation)
        assert find_record(observation, "j-w4-0").force is forced
        assert list_leaving(observation) == (["j-w4-0"] if forced else []), (
            "the pod is already being deleted, unless the deletion is forced"
        )

    @pytest.mark.parametrize(
        ("node", "forced"),
        [("node-4", True), ("gone", True), ("node-3", False), ("", False)],
        ids=["not ready", "no such node", "ready", "not placed"],
    )
    def test_a_deletion_on_a_lost_node_is_forced_at_once(self, node: str, forced: bool) -> None:
        observation = build_training()
        nodes = {**observation.cluster_view.nodes, "node-4": NodeView("node-4", "node-uid-4", ready=False)}
        observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))
        observation = change_worker(observation, "j-w4-0", pod={"deleting": True, "delete_by": NOW + 30, "node": node})
        assert find_record(apply_step(observation), "j-w4-0").force is forced

    def test_without_known_nodes_no_deletion_is_forced(self) -> None:
        observation = build_training()
        observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes={}))
        observation = change_worker(observation, "j-w4-0", pod={"deleting": True, "delete_by": NOW + 30})
        assert not find_record(apply_step(observation), "j-w4-0").force


class TestPlacing:
    def build_placing(self, seconds: float, unplaced: int) -> Observation:
        """Build a job of two workers and a spare of which `unplaced` pods are not placed after `seconds`."""
        observation = build_fresh(2, 1, job=build_job(2, 1, scheduling_timeout=60.0))
        observation = with_pods(apply_step(apply_step(observation)))
        for ordinal in range(3 - unplaced, 3):
            observation = change_worker(observation, f"j-w{ordinal}-0", pod={"node": ""})
        return apply_step(replace(observation, now=NOW + seconds))

    @pytest.mark.parametrize(("seconds", "unplaced"), [(59, 3), (600, 0), (600, 1)])
    def test_pods_stay_if_enough_are_placed_or_the_timeout_has_not_passed(self, seconds: float, unplaced: int) -> None:
        observation = self.build_placing(seconds, unplaced)
        assert not list_leaving(observation)
        assert observation.state.placement.attempts == 0

    @pytest.mark.parametrize("unplaced", [2, 3])
    def test_all_pods_leave_if_too_few_are_placed_in_time(self, unplaced: int) -> None:
        observation = self.build_placing(60, unplaced)
        assert list_leaving(observation) == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert observation.state.placement.placing_since is None
        assert not list_missing_workers(apply_step(observation)), "the job waits for its next attempt"

    def test_a_job_that_trains_is_not_being_placed(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"node": ""})
        later = apply_step(replace(apply_step(observation), now=NOW + 10_000))
        assert later.state.placement.placing_since is None
        assert not list_leaving(later)

    def test_the_timeout_does_not_run_while_pods_are_gated(self) -> None:
        observation = with_pods(
            apply_step(apply_step(build_fresh(1, 0, job=build_job(1, 0, scheduling_timeout=60.0)))), placed=False
        )
        gated = apply_step(change_worker(replace(observation, now=NOW + 50), "j-w0-0", pod={"scheduling_gated": True}))
        assert not list_leaving(apply_step(replace(gated, now=NOW + 1000)))
        released = apply_step(change_worker(replace(gated, now=NOW + 1000), "j-w0-0", pod={"scheduling_gated": False}))
        assert not list_leaving(apply_step(replace(released, now=NOW + 1059)))
        assert list_leaving(apply_step(replace(released, now=NOW + 1060))) == ["j-w0-0"]


class TestSpares:
    def test_a_silent_spare_on_a_lost_node_is_replaced_at_once(self) -> None:
        observation = build_training()
        nodes = {**observation.cluster_view.nodes, "node-4": NodeView("node-4", "node-uid-4", ready=False)}
        observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))
        reporting = change_worker(observation, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS - 1)
        assert not find_record(apply_step(reporting), "j-w4-0").leaving, "a worker that reports exists"
        silent = apply_step(change_worker(observation, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS + 1))
        assert find_record(silent, "j-w4-0").leaving
        assert list_names(list_missing_workers(silent)) == ["j-w4-1"]
        assert list_leaving(silent) == ["j-w4-0"]

    def test_a_spare_that_succeeded_or_is_already_leaving_is_unchanged(self) -> None:
        ended = apply_step(change_worker(build_training(), "j-w4-0", pod={"exit_code": 0, "phase": "Succeeded"}))
        assert not find_record(ended, "j-w4-0").leaving
        leaving = change_record(
            change_worker(build_training(), "j-w4-0", pod={"exit_code": 1}), "j-w4-0", leaving="before"
        )
        assert find_record(apply_step(leaving), "j-w4-0").leaving == "before"

    def test_the_successor_of_a_spare_waits_unless_ranks_are_vacant(self) -> None:
        observation = change_worker(build_training(), "j-w4-0", gone=True)
        waiting = observation.with_desired(observation.desired.with_placement(retry_at=NOW + 5))
        assert not list_missing_workers(apply_step(waiting))
        needed = waiting.with_desired(waiting.desired.with_placement(vacant_since=NOW - 1))
        assert list_names(list_missing_workers(apply_step(needed))) == ["j-w4-1"]
        assert list_names(list_missing_workers(apply_step(replace(waiting, now=NOW + 5)))) == ["j-w4-1"]

    def test_the_successor_of_a_missing_worker_waits_while_the_others_train(self) -> None:
        observation = build_training(3, 0, job=build_job(4, 0, min_replicas=2))
        assert list_names(list_missing_workers(apply_step(observation))) == ["j-w3-0"]
        waiting = observation.with_desired(observation.desired.with_placement(retry_at=NOW + 5))
        assert not list_missing_workers(apply_step(waiting))
        assert list_names(list_missing_workers(apply_step(replace(waiting, now=NOW + 5)))) == ["j-w3-0"]


class TestLeavingWorkers:
    def test_a_leaving_worker_that_still_trains_keeps_its_pod(self) -> None:
        observation = change_record(build_training(), "j-w1-0", leaving="its GPU fails")
        assert not list_leaving(observation)
        assert list_leaving(change_record(observation, "j-w1-0", dead=True)) == ["j-w1-0"]
        assert not list_leaving(change_worker(change_record(observation, "j-w1-0", dead=True), "j-w1-0", gone=True))

    def test_a_deletion_is_requested_once_and_again_if_it_is_forced(self) -> None:
        observation = change_record(build_training(), "j-w4-0", leaving="x")
        assert list_leaving(observation) == ["j-w4-0"]
        deleting = change_worker(observation, "j-w4-0", pod={"deleting": True})
        assert not list_leaving(deleting)
        assert list_leaving(change_record(deleting, "j-w4-0", force=True)) == ["j-w4-0"]


def build_stopping(stopped_at: float = NOW) -> Observation:
    """Build a job of two workers and a spare that is being suspended; all pods exist, and two hold ranks."""
    observation = build_training(2, 1)
    desired = observation.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=stopped_at)
    return observation.with_desired(desired)


class TestSuspending:
    def test_a_worker_without_ranks_is_deleted_at_once(self) -> None:
        assert list_leaving(build_stopping()) == ["j-w2-0"]
        gathering = change_worker(build_stopping(), "j-w2-0", heartbeat={"state": LauncherState.GATHERING, "round": 0})
        assert list_leaving(gathering) == ["j-w2-0"]
        assert list_leaving(change_worker(build_stopping(), "j-w0-0", heartbeat=None)) == ["j-w2-0"]

    def test_a_worker_that_has_never_reported_is_deleted_at_once(self) -> None:
        observation = build_stopping()
        silent = replace(
            observation,
            workers=tuple(
                replace(view, heartbeat=None) if view.name == "j-w1-0" else view for view in observation.workers
            ),
        )
        assert list_leaving(silent) == ["j-w1-0", "j-w2-0"]

    def test_a_worker_that_has_left_is_deleted(self) -> None:
        finished = change_worker(build_stopping(), "j-w0-0", pod={"exit_code": 0, "phase": "Succeeded"})
        assert list_leaving(finished) == ["j-w0-0", "j-w2-0"]

    def test_workers_are_deleted_after_the_time_to_leave(self) -> None:
        assert list_leaving(build_stopping(NOW - WORKER_LEAVE_SECONDS + 1)) == ["j-w2-0"]
        assert list_leaving(build_stopping(NOW - WORKER_LEAVE_SECONDS - 1)) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_a_deleted_or_missing_pod_is_not_deleted_again(self) -> None:
        late = build_stopping(NOW - WORKER_LEAVE_SECONDS - 1)
        late = change_worker(change_worker(late, "j-w0-0", pod={"deleting": True}), "j-w1-0", gone=True)
        assert list_leaving(late) == ["j-w2-0"]

    def test_a_worker_on_a_lost_node_is_deleted_by_force(self) -> None:
        forced = change_worker(change_record(build_stopping(), "j-w0-0", force=True), "j-w0-0", pod={"deleting": True})
        assert list_leaving(forced) == ["j-w0-0", "j-w2-0"]


def build_ended(clean_pod_policy: CleanPodPolicy, **lifecycle_changes: object) -> Observation:
    """Build a job that has just completed (or ended otherwise, by `lifecycle_changes`).

    Worker 0 has ended; worker 1 and a spare still exist."""
    observation = build_training(2, 1, job=build_job(2, 1, run_policy=RunPolicySpec(clean_pod_policy=clean_pod_policy)))
    observation = change_worker(observation, "j-w0-0", pod={"exit_code": 0, "phase": "Succeeded"})
    desired = observation.desired.with_plan(stop=Stop.FINISH)
    return observation.with_desired(
        desired.with_lifecycle(**({"completed_at": NOW, "stopped_at": NOW} | lifecycle_changes))
    )


class TestCleaningUp:
    @pytest.mark.parametrize(
        ("clean_pod_policy", "at_once", "later"),
        [
            (CleanPodPolicy.NONE, [], []),
            (CleanPodPolicy.RUNNING, ["j-w2-0"], ["j-w1-0", "j-w2-0"]),
            (CleanPodPolicy.ALL, ["j-w0-0", "j-w2-0"], ["j-w0-0", "j-w1-0", "j-w2-0"]),
        ],
    )
    def test_the_policy_of_the_job_selects_the_deleted_pods(
        self, clean_pod_policy: CleanPodPolicy, at_once: list[str], later: list[str]
    ) -> None:
        assert list_leaving(build_ended(clean_pod_policy)) == at_once, "ranks may still leave by themselves"
        assert list_leaving(replace(build_ended(clean_pod_policy), now=NOW + WORKER_LEAVE_SECONDS / 4)) == at_once
        assert list_leaving(replace(build_ended(clean_pod_policy), now=NOW + WORKER_LEAVE_SECONDS / 4 + 1)) == later

    def test_pods_of_a_failed_job_stay_for_their_logs(self) -> None:
        failed = build_ended(CleanPodPolicy.RUNNING, completed_at=None, failed_reason="ScriptFailed")
        assert list_leaving(failed) == []
        assert list_leaving(replace(failed, now=NOW + WORKER_LEAVE_SECONDS + 1)) == ["j-w1-0", "j-w2-0"], (
            "pods that do not end"
        )
        ended = {"exit_code": 1, "phase": "Failed"}
        finished = change_worker(change_worker(failed, "j-w1-0", pod=ended), "j-w2-0", pod=ended)
        assert list_leaving(replace(finished, now=NOW + 10 * WORKER_LEAVE_SECONDS)) == []
        unplaced = change_worker(failed, "j-w2-0", pod={"phase": "Pending"})
        assert list_leaving(unplaced) == ["j-w2-0"], "it would start only now"

    def test_a_pod_whose_sidecar_still_runs_is_deleted_later(self) -> None:
        observation = change_worker(build_ended(CleanPodPolicy.RUNNING), "j-w0-0", pod={"phase": "Running"})
        assert list_leaving(observation) == ["j-w2-0"], "its sidecar ends within seconds"
        assert "j-w0-0" in list_leaving(replace(observation, now=NOW + WORKER_LEAVE_SECONDS / 4 + 1))

    def test_a_deleted_or_missing_pod_of_an_ended_job_is_not_deleted_again(self) -> None:
        observation = change_worker(build_ended(CleanPodPolicy.ALL), "j-w2-0", pod={"deleting": True})
        assert list_leaving(observation) == ["j-w0-0"]
        assert list_leaving(change_worker(build_ended(CleanPodPolicy.ALL), "j-w0-0", gone=True)) == ["j-w2-0"]

    def test_without_a_stop_time_no_worker_is_late(self) -> None:
        assert list_leaving(build_ended(CleanPodPolicy.RUNNING, stopped_at=None)) == ["j-w2-0"]


def test_an_ended_job_creates_no_workers() -> None:
    observation = change_worker(build_ended(CleanPodPolicy.RUNNING), "j-w1-0", gone=True)
    assert isinstance(workforce.update_workforce(observation, build_policy()), DesiredState)
    assert not list_missing_workers(apply_step(observation))


class TestAvoidedNodes:
    """A pod avoids the nodes that were suspects when it was created, even after they no longer are."""

    SPARE = "j-w2-0"

    def build_unschedulable(self, seconds: float = UNPLACED_POD_SECONDS, **pod: Any) -> Observation:
        pod_values = {
            "avoided_nodes": frozenset({"node-9"}),
            "unschedulable_message": "0/6 nodes",
            "node": "",
            "created_at": NOW - seconds,
        }
        observation = change_worker(build_training(replicas=2, spares=1), self.SPARE, pod={**pod_values, **pod})
        nodes = {**observation.cluster_view.nodes, "node-9": NodeView("node-9", "uid-9", ready=True)}
        return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes), operator_age=1000.0)

    def test_a_spare_is_replaced_when_an_avoided_node_may_be_used_again(self) -> None:
        observation = apply_step(self.build_unschedulable())
        assert list_leaving(observation) == [self.SPARE]
        assert list_names(list_missing_workers(observation)) == ["j-w2-1"]

    def test_a_spare_stays_while_the_node_is_avoided(self) -> None:
        observation = self.build_unschedulable()
        observation = replace(
            observation, cluster_view=replace(observation.cluster_view, suspects=frozenset({"node-9"}))
        )
        assert list_leaving(apply_step(observation)) == []

    @pytest.mark.parametrize(
        "pod",
        [
            {"created_at": NOW - UNPLACED_POD_SECONDS + 1},
            {"unschedulable_message": ""},
            {"avoided_nodes": frozenset()},
            {"avoided_nodes": frozenset({"a-node-that-is-gone"})},
        ],
        ids=["young", "schedulable", "no avoided node", "removed node"],
    )
    def test_a_spare_stays_if_replacing_it_would_not_help(self, pod: dict[str, Any]) -> None:
        assert list_leaving(apply_step(self.build_unschedulable(**pod))) == []

    def test_a_spare_stays_while_the_operator_may_not_know_all_suspects(self) -> None:
        assert list_leaving(apply_step(replace(self.build_unschedulable(), operator_age=0.0))) == []


class TestStuckWorkers:
    """A worker cannot start on its node, for example because its image cannot be pulled. Another node may be better."""

    SPARE, SUBSTITUTE = "j-w2-0", "j-w3-0"
    TIMEOUT = build_job().spec.scheduling_timeout

    def build_stuck(self, seconds: float = TIMEOUT, reason: str = "ImagePullBackOff", **changes: Any) -> Observation:
        pod = {"waiting_reason": reason, "created_at": NOW - seconds}
        observation = change_worker(build_training(replicas=2, spares=1), self.SPARE, pod=pod)
        views = [replace(view, heartbeat=None) if view.name == self.SPARE else view for view in observation.workers]
        return replace(observation, workers=tuple(views), **changes)

    def with_substitute(self, **heartbeat: Any) -> Observation:
        """Return the job after its substitute's pod has been created."""
        observation = apply_step(self.build_stuck())
        pod = PodView(self.SUBSTITUTE, "uid-3", "Running", "node-3", "10.0.0.3", created_at=NOW)
        report = Heartbeat(worker=self.SUBSTITUTE, **heartbeat) if heartbeat else None
        others = [view for view in observation.workers if view.name != self.SUBSTITUTE]
        return replace(
            observation, workers=(*others, WorkerView(find_record(observation, self.SUBSTITUTE), pod, report))
        )

    def test_one_more_worker_is_created_and_the_kubelet_keeps_trying(self) -> None:
        observation = apply_step(self.build_stuck())
        assert list_names(observation.state.placement.workers)[-1] == self.SUBSTITUTE
        assert list_leaving(observation) == []
        pod = {"waiting_reason": "ImagePullBackOff", "created_at": NOW - self.TIMEOUT}
        repeated = apply_step(change_worker(self.with_substitute(), self.SUBSTITUTE, pod=pod))
        assert list_names(repeated.state.placement.workers)[-1] == self.SUBSTITUTE, (
            "the substitute is stuck, too: no third worker is created"
        )
        assert list_leaving(repeated) == []

    def test_the_stuck_worker_leaves_once_its_substitute_is_warm(self) -> None:
        assert list_leaving(apply_step(self.with_substitute(state=LauncherState.STARTING))) == []
        replaced = apply_step(self.with_substitute(state=LauncherState.WARM))
        assert list_leaving(replaced) == [self.SPARE]
        staying = [worker.name for worker in replaced.state.placement.workers if not worker.leaving]
        assert staying == ["j-w0-0", "j-w1-0", self.SUBSTITUTE], "the stuck worker gets no further substitute"

    def test_the_substitute_leaves_if_the_stuck_worker_starts(self) -> None:
        observation = change_worker(self.with_substitute(), self.SPARE, pod={"waiting_reason": ""})
        assert list_leaving(apply_step(observation)) == [self.SUBSTITUTE]

    @pytest.mark.parametrize(
        ("seconds", "reason"), [(TIMEOUT - 1, "ImagePullBackOff"), (10 * TIMEOUT, "ContainerCreating")]
    )
    def test_a_start_that_takes_long_is_awaited(self, seconds: float, reason: str) -> None:
        assert len(apply_step(self.build_stuck(seconds, reason)).state.placement.workers) == 3

    def test_nothing_is_created_by_a_clock_in_doubt_beyond_a_queues_admission_or_in_mode_recommend(self) -> None:
        observation = self.build_stuck()
        assert workforce.list_stuck_workers(observation, build_policy())
        for changed in (
            self.build_stuck(clock_agrees=False),
            replace(observation, job=replace(observation.job, queue="q")),
        ):
            assert workforce.list_stuck_workers(changed, build_policy()) == ()
        assert workforce.list_stuck_workers(observation, build_policy(mode=RemediationMode.RECOMMEND)) == ()
