"""Which pods a job is to have, and which are to go: by the job's stage, by what workers have been given up for."""

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
    list_missing_workers,
    list_surplus_workers,
)
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


def stepped(world: Observation) -> Observation:
    """The world under what the step decides."""
    return world.with_desired(workforce.update_workforce(world, build_policy()))


def names(workers: tuple[WorkerRecord, ...]) -> list[str]:
    return [worker.name for worker in workers]


def going(world: Observation) -> list[str]:
    return [view.name for view in list_surplus_workers(world)]


def record(world: Observation, name: str) -> WorkerRecord:
    found = world.state.placement.find_worker(name)
    assert found is not None
    return found


def marked(world: Observation, name: str, **changes: object) -> Observation:
    """What the bookkeeping says of a worker is changed."""
    return world.with_desired(world.desired.with_worker(replace(record(world, name), **changes)))  # type: ignore[arg-type]


def reserved(replicas: int = 2, spares: int = 1) -> Observation:
    """Names are promised, no pod is there."""
    start = stepped(build_fresh(replicas, spares))
    return stepped(start)


class TestMissing:
    def test_nothing_is_promised_or_made_before_the_template_is_accepted(self) -> None:
        world = build_fresh()
        refused = world.with_desired(world.desired.with_placement(template_accepted=None))
        assert stepped(refused).state.placement == refused.state.placement
        promised = reserved()
        assert names(list_missing_workers(promised)) == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert not list_missing_workers(promised.with_desired(promised.desired.with_placement(template_accepted=None)))

    def test_a_job_that_trains_goes_on_with_the_template_it_began_with(self) -> None:
        world = change_worker(build_training(), "j-w4-0", gone=True)
        edited = world.with_desired(world.desired.with_placement(template_accepted=None))
        assert names(list_missing_workers(stepped(edited))) == ["j-w4-1"]

    @pytest.mark.parametrize("end", ["suspend", "stop", "failed", "complete"])
    def test_nothing_is_made_for_a_job_that_ends(self, end: str) -> None:
        world = reserved()
        ending = {
            "suspend": replace(world, job=replace(world.job, spec=replace(world.job.spec, suspend=True))),
            "stop": world.with_desired(world.desired.with_plan(stop=Stop.SUSPEND)),
            "failed": world.with_desired(world.desired.with_lifecycle(failed_reason="ScriptFailed")),
            "complete": world.with_desired(world.desired.with_lifecycle(completed_at=NOW)),
        }[end]
        assert not list_missing_workers(ending)
        assert names(list_missing_workers(world)) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_one_whose_pod_was_there_or_that_is_given_up_is_not_made_again(self) -> None:
        world = reserved()
        assert "j-w0-0" not in names(list_missing_workers(marked(world, "j-w0-0", uid="uid-0")))
        assert "j-w0-0" not in names(list_missing_workers(marked(world, "j-w0-0", leaving="it is not wanted")))

    def test_ordinals_that_are_free_are_used_again_by_later_incarnations(self) -> None:
        world = build_training(2, 2)
        world = change_worker(change_worker(world, "j-w2-0", gone=True), "j-w3-0", gone=True)
        assert names(list_missing_workers(stepped(world))) == ["j-w2-1", "j-w3-1"]

    def test_after_a_scale_down_no_more_are_made_than_are_wanted(self) -> None:
        world = build_training(2, 2, job=build_job(2, 1))
        assert not list_missing_workers(stepped(world))
        assert going(stepped(world)) == ["j-w3-0"], "the newest of those without ranks"


class TestLearned:
    def test_a_node_that_the_pod_does_not_tell_any_more_is_remembered(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"node": ""})
        assert record(stepped(world), "j-w1-0").node == "node-1"

    def test_a_node_that_is_told_goes_before_what_was_known(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"node": "node-9"})
        assert record(stepped(world), "j-w1-0").node == "node-9"

    def test_who_holds_ranks_is_not_on_its_way_to_being_warm(self) -> None:
        world = change_members(build_training(), state=LauncherState.STARTING)
        for view in world.workers:
            world = change_worker(world, view.name, pod={"started": True})
        spare = change_worker(world, "j-w4-0", heartbeat={"state": LauncherState.STARTING})
        known = {worker.name: worker.starting_since for worker in stepped(spare).state.placement.workers}
        assert known == {"j-w0-0": None, "j-w1-0": None, "j-w2-0": None, "j-w3-0": None, "j-w4-0": NOW}

    def test_a_given_up_worker_whose_pod_is_gone_is_struck_off_once_it_holds_no_ranks(self) -> None:
        world = marked(build_training(), "j-w1-0", leaving="x", dead=True)
        world = marked(change_worker(world, "j-w1-0", gone=True), "j-w4-0", leaving="x")
        world = change_worker(world, "j-w4-0", gone=True)
        assert "j-w1-0" in names(stepped(world).state.placement.workers), "its seat is not filled yet"
        assert "j-w4-0" not in names(stepped(world).state.placement.workers)

    @pytest.mark.parametrize(
        ("late", "forced"),
        [
            (POD_DELETION_OVERDUE_SECONDS - 1, False),
            (POD_DELETION_OVERDUE_SECONDS, False),
            (POD_DELETION_OVERDUE_SECONDS + 1, True),
        ],
    )
    def test_a_deletion_that_nobody_confirms_is_forced_after_a_while(self, late: float, forced: bool) -> None:
        world = change_worker(build_training(), "j-w4-0", pod={"deleting": True, "delete_by": NOW - late})
        world = stepped(world)
        assert record(world, "j-w4-0").force is forced
        assert going(world) == (["j-w4-0"] if forced else []), "it is going already, unless more is to be asked"

    @pytest.mark.parametrize(
        ("node", "forced"),
        [("node-4", True), ("gone", True), ("node-3", False), ("", False)],
        ids=["not ready", "no such node", "ready", "not placed"],
    )
    def test_a_deletion_on_a_lost_node_is_forced_at_once(self, node: str, forced: bool) -> None:
        world = build_training()
        nodes = {**world.cluster_view.nodes, "node-4": NodeView("node-4", "node-uid-4", ready=False)}
        world = replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))
        world = change_worker(world, "j-w4-0", pod={"deleting": True, "delete_by": NOW + 30, "node": node})
        assert record(stepped(world), "j-w4-0").force is forced

    def test_where_no_nodes_can_be_seen_none_is_lost(self) -> None:
        world = build_training()
        world = replace(world, cluster_view=replace(world.cluster_view, nodes={}))
        world = change_worker(world, "j-w4-0", pod={"deleting": True, "delete_by": NOW + 30})
        assert not record(stepped(world), "j-w4-0").force


class TestPlacing:
    def timed(self, seconds: float, unplaced: int) -> Observation:
        """So long after a job of two and a spare was to be placed, so many of its pods are not."""
        world = build_fresh(2, 1, job=build_job(2, 1, scheduling_timeout=60.0))
        world = with_pods(stepped(stepped(world)))
        for ordinal in range(3 - unplaced, 3):
            world = change_worker(world, f"j-w{ordinal}-0", pod={"node": ""})
        return stepped(replace(world, now=NOW + seconds))

    @pytest.mark.parametrize(("seconds", "unplaced"), [(59, 3), (600, 0), (600, 1)])
    def test_enough_are_placed_or_the_time_is_not_over(self, seconds: float, unplaced: int) -> None:
        world = self.timed(seconds, unplaced)
        assert not going(world)
        assert world.state.placement.attempts == 0

    @pytest.mark.parametrize("unplaced", [2, 3])
    def test_too_few_are_placed_in_time(self, unplaced: int) -> None:
        world = self.timed(60, unplaced)
        assert going(world) == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert world.state.placement.placing_since is None
        assert not list_missing_workers(stepped(world)), "not before its turn"

    def test_a_job_that_trains_is_placed(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"node": ""})
        later = stepped(replace(stepped(world), now=NOW + 10_000))
        assert later.state.placement.placing_since is None
        assert not going(later)

    def test_time_does_not_run_while_somebody_else_holds_its_pods_back(self) -> None:
        world = with_pods(
            stepped(stepped(build_fresh(1, 0, job=build_job(1, 0, scheduling_timeout=60.0)))), placed=False
        )
        held = stepped(change_worker(replace(world, now=NOW + 50), "j-w0-0", pod={"scheduling_gated": True}))
        assert not going(stepped(replace(held, now=NOW + 1000)))
        released = stepped(change_worker(replace(held, now=NOW + 1000), "j-w0-0", pod={"scheduling_gated": False}))
        assert not going(stepped(replace(released, now=NOW + 1059)))
        assert going(stepped(replace(released, now=NOW + 1060))) == ["j-w0-0"]


class TestSpares:
    def test_one_that_only_its_node_took_along_is_replaced_at_once(self) -> None:
        world = build_training()
        nodes = {**world.cluster_view.nodes, "node-4": NodeView("node-4", "node-uid-4", ready=False)}
        world = replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))
        heard = change_worker(world, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS - 1)
        assert not record(stepped(heard), "j-w4-0").leaving, "whoever is heard is there"
        silent = stepped(change_worker(world, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS + 1))
        assert record(silent, "j-w4-0").leaving
        assert names(list_missing_workers(silent)) == ["j-w4-1"]
        assert going(silent) == ["j-w4-0"]

    def test_one_that_ended_well_or_is_given_up_already_is_left_alone(self) -> None:
        ended = stepped(change_worker(build_training(), "j-w4-0", pod={"exit_code": 0, "phase": "Succeeded"}))
        assert not record(ended, "j-w4-0").leaving
        given_up = marked(change_worker(build_training(), "j-w4-0", pod={"exit_code": 1}), "j-w4-0", leaving="before")
        assert record(stepped(given_up), "j-w4-0").leaving == "before"

    def test_its_successor_waits_only_where_no_seat_is_empty(self) -> None:
        world = change_worker(build_training(), "j-w4-0", gone=True)
        waiting = world.with_desired(world.desired.with_placement(retry_at=NOW + 5))
        assert not list_missing_workers(stepped(waiting))
        needed = waiting.with_desired(waiting.desired.with_placement(vacant_since=NOW - 1))
        assert names(list_missing_workers(stepped(needed))) == ["j-w4-1"]
        assert names(list_missing_workers(stepped(replace(waiting, now=NOW + 5)))) == ["j-w4-1"]

    def test_nor_does_one_that_does_not_start_come_again_at_once_where_the_others_train_without(self) -> None:
        world = build_training(3, 0, job=build_job(4, 0, min_replicas=2))
        assert names(list_missing_workers(stepped(world))) == ["j-w3-0"]
        waiting = world.with_desired(world.desired.with_placement(retry_at=NOW + 5))
        assert not list_missing_workers(stepped(waiting))
        assert names(list_missing_workers(stepped(replace(waiting, now=NOW + 5)))) == ["j-w3-0"]


class TestGivenUp:
    def test_who_still_trains_keeps_its_pod_until_its_seat_is_filled(self) -> None:
        world = marked(build_training(), "j-w1-0", leaving="its GPU fails")
        assert not going(world)
        assert going(marked(world, "j-w1-0", dead=True)) == ["j-w1-0"]
        assert not going(change_worker(marked(world, "j-w1-0", dead=True), "j-w1-0", gone=True))

    def test_a_deletion_is_asked_for_once_and_again_where_it_has_to_be_forced(self) -> None:
        world = marked(build_training(), "j-w4-0", leaving="x")
        assert going(world) == ["j-w4-0"]
        asked = change_worker(world, "j-w4-0", pod={"deleting": True})
        assert not going(asked)
        assert going(marked(asked, "j-w4-0", force=True)) == ["j-w4-0"]


def stopping(stopped_at: float = NOW) -> Observation:
    """A job of two and a spare that has been told to suspend; all pods are there, two hold ranks."""
    world = build_training(2, 1)
    draft = world.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=stopped_at)
    return world.with_desired(draft)


class TestLeaving:
    def test_who_holds_no_ranks_goes_at_once(self) -> None:
        assert going(stopping()) == ["j-w2-0"]
        gathering = change_worker(stopping(), "j-w2-0", heartbeat={"state": LauncherState.GATHERING, "round": 0})
        assert going(gathering) == ["j-w2-0"]
        assert going(change_worker(stopping(), "j-w0-0", heartbeat=None)) == ["j-w2-0"]

    def test_one_that_was_never_heard_holds_nothing(self) -> None:
        world = stopping()
        silent = replace(
            world, workers=tuple(replace(v, heartbeat=None) if v.name == "j-w1-0" else v for v in world.workers)
        )
        assert going(silent) == ["j-w1-0", "j-w2-0"]

    def test_who_has_left_goes(self) -> None:
        left = change_worker(stopping(), "j-w0-0", pod={"exit_code": 0, "phase": "Succeeded"})
        assert going(left) == ["j-w0-0", "j-w2-0"]

    def test_nobody_is_waited_for_longer_than_it_takes_to_leave(self) -> None:
        assert going(stopping(NOW - WORKER_LEAVE_SECONDS + 1)) == ["j-w2-0"]
        assert going(stopping(NOW - WORKER_LEAVE_SECONDS - 1)) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_what_goes_or_has_gone_is_not_deleted_twice(self) -> None:
        late = stopping(NOW - WORKER_LEAVE_SECONDS - 1)
        late = change_worker(change_worker(late, "j-w0-0", pod={"deleting": True}), "j-w1-0", gone=True)
        assert going(late) == ["j-w2-0"]

    def test_one_whose_node_is_lost_is_deleted_by_force(self) -> None:
        forced = change_worker(marked(stopping(), "j-w0-0", force=True), "j-w0-0", pod={"deleting": True})
        assert going(forced) == ["j-w0-0", "j-w2-0"]


def over(clean: CleanPodPolicy, **life: object) -> Observation:
    """A job that has just completed (or, by `life`, otherwise ended): worker 0 has ended, worker 1 and a spare are
    there."""
    world = build_training(2, 1, job=build_job(2, 1, run_policy=RunPolicySpec(clean_pod_policy=clean)))
    world = change_worker(world, "j-w0-0", pod={"exit_code": 0, "phase": "Succeeded"})
    draft = world.desired.with_plan(stop=Stop.FINISH)
    return world.with_desired(draft.with_lifecycle(**({"completed_at": NOW, "stopped_at": NOW} | life)))


class TestCleaningUp:
    @pytest.mark.parametrize(
        ("clean", "at_once", "later"),
        [
            (CleanPodPolicy.NONE, [], []),
            (CleanPodPolicy.RUNNING, ["j-w2-0"], ["j-w1-0", "j-w2-0"]),
            (CleanPodPolicy.ALL, ["j-w0-0", "j-w2-0"], ["j-w0-0", "j-w1-0", "j-w2-0"]),
        ],
    )
    def test_by_the_jobs_policy(self, clean: CleanPodPolicy, at_once: list[str], later: list[str]) -> None:
        assert going(over(clean)) == at_once, "ranks may still leave by themselves"
        assert going(replace(over(clean), now=NOW + WORKER_LEAVE_SECONDS / 4)) == at_once
        assert going(replace(over(clean), now=NOW + WORKER_LEAVE_SECONDS / 4 + 1)) == later

    def test_pods_of_a_failed_job_end_by_themselves_and_stay_for_their_logs(self) -> None:
        failed = over(CleanPodPolicy.RUNNING, completed_at=None, failed_reason="ScriptFailed")
        assert going(failed) == []
        assert going(replace(failed, now=NOW + WORKER_LEAVE_SECONDS + 1)) == ["j-w1-0", "j-w2-0"], "those that do not"
        ended = {"exit_code": 1, "phase": "Failed"}
        left = change_worker(change_worker(failed, "j-w1-0", pod=ended), "j-w2-0", pod=ended)
        assert going(replace(left, now=NOW + 10 * WORKER_LEAVE_SECONDS)) == []
        unplaced = change_worker(failed, "j-w2-0", pod={"phase": "Pending"})
        assert going(unplaced) == ["j-w2-0"], "it would only begin now"

    def test_a_pod_whose_second_container_runs_on_gives_its_node_back(self) -> None:
        world = change_worker(over(CleanPodPolicy.RUNNING), "j-w0-0", pod={"phase": "Running"})
        assert going(world) == ["j-w2-0"], "its sidecar ends within seconds"
        assert "j-w0-0" in going(replace(world, now=NOW + WORKER_LEAVE_SECONDS / 4 + 1))

    def test_what_goes_or_has_gone_is_not_deleted_twice(self) -> None:
        world = change_worker(over(CleanPodPolicy.ALL), "j-w2-0", pod={"deleting": True})
        assert going(world) == ["j-w0-0"]
        assert going(change_worker(over(CleanPodPolicy.ALL), "j-w0-0", gone=True)) == ["j-w2-0"]

    def test_where_nobody_wrote_when_ranks_were_told_nobody_is_late(self) -> None:
        assert going(over(CleanPodPolicy.RUNNING, stopped_at=None)) == ["j-w2-0"]


def test_an_end_changes_nothing_about_workers() -> None:
    world = change_worker(over(CleanPodPolicy.RUNNING), "j-w1-0", gone=True)
    assert isinstance(workforce.update_workforce(world, build_policy()), DesiredState)
    assert not list_missing_workers(stepped(world))


class TestKeptOff:
    """A pod keeps off the nodes that were suspects when it was made, however long they have been none."""

    SPARE = "j-w2-0"

    def waiting(self, seconds: float = UNPLACED_POD_SECONDS, **pod: Any) -> Observation:
        kept_off = {
            "avoided_nodes": frozenset({"node-9"}),
            "unschedulable_message": "0/6 nodes",
            "node": "",
            "created_at": NOW - seconds,
        }
        world = change_worker(build_training(replicas=2, spares=1), self.SPARE, pod={**kept_off, **pod})
        nodes = {**world.cluster_view.nodes, "node-9": NodeView("node-9", "uid-9", ready=True)}
        return replace(world, cluster_view=replace(world.cluster_view, nodes=nodes), operator_age=1000.0)

    def test_another_one_is_made_when_the_node_may_be_used_again(self) -> None:
        world = stepped(self.waiting())
        assert going(world) == [self.SPARE]
        assert names(list_missing_workers(world)) == ["j-w2-1"]

    def test_not_while_the_node_is_to_be_avoided(self) -> None:
        world = self.waiting()
        world = replace(world, cluster_view=replace(world.cluster_view, suspects=frozenset({"node-9"})))
        assert going(stepped(world)) == []

    @pytest.mark.parametrize(
        "pod",
        [
            {"created_at": NOW - UNPLACED_POD_SECONDS + 1},
            {"unschedulable_message": ""},
            {"avoided_nodes": frozenset()},
            {"avoided_nodes": frozenset({"a-node-that-is-gone"})},
        ],
        ids=["young", "on its way", "kept off nothing", "off what is gone"],
    )
    def test_nor_where_it_would_not_help(self, pod: dict[str, Any]) -> None:
        assert going(stepped(self.waiting(**pod))) == []

    def test_nor_by_an_operator_that_has_not_heard_of_all_suspects(self) -> None:
        assert going(stepped(replace(self.waiting(), operator_age=0.0))) == []


class TestStuckWorkers:
    """A worker cannot start on its node, where its image cannot be pulled, for example. Another node may be better."""

    SPARE, SUBSTITUTE = "j-w2-0", "j-w3-0"
    TIMEOUT = build_job().spec.scheduling_timeout

    def stuck(self, seconds: float = TIMEOUT, reason: str = "ImagePullBackOff", **changes: Any) -> Observation:
        pod = {"waiting_reason": reason, "created_at": NOW - seconds}
        world = change_worker(build_training(replicas=2, spares=1), self.SPARE, pod=pod)
        views = [replace(view, heartbeat=None) if view.name == self.SPARE else view for view in world.workers]
        return replace(world, workers=tuple(views), **changes)

    def with_substitute(self, **heartbeat: Any) -> Observation:
        """Return the job after its substitute's pod has been created."""
        world = stepped(self.stuck())
        pod = PodView(self.SUBSTITUTE, "uid-3", "Running", "node-3", "10.0.0.3", created_at=NOW)
        beat = Heartbeat(worker=self.SUBSTITUTE, **heartbeat) if heartbeat else None
        others = [view for view in world.workers if view.name != self.SUBSTITUTE]
        return replace(world, workers=(*others, WorkerView(record(world, self.SUBSTITUTE), pod, beat)))

    def test_one_more_worker_is_created_and_the_kubelet_keeps_trying(self) -> None:
        world = stepped(self.stuck())
        assert names(world.state.placement.workers)[-1] == self.SUBSTITUTE
        assert going(world) == []
        pod = {"waiting_reason": "ImagePullBackOff", "created_at": NOW - self.TIMEOUT}
        again = stepped(change_worker(self.with_substitute(), self.SUBSTITUTE, pod=pod))
        assert names(again.state.placement.workers)[-1] == self.SUBSTITUTE, "it is stuck, too: there is no third one"
        assert going(again) == []

    def test_the_stuck_worker_leaves_once_its_substitute_is_warm(self) -> None:
        assert going(stepped(self.with_substitute(state=LauncherState.STARTING))) == []
        assert going(stepped(self.with_substitute(state=LauncherState.WARM))) == [self.SPARE]

    def test_the_substitute_leaves_if_the_stuck_worker_starts(self) -> None:
        world = change_worker(self.with_substitute(), self.SPARE, pod={"waiting_reason": ""})
        assert going(stepped(world)) == [self.SUBSTITUTE]

    @pytest.mark.parametrize(
        ("seconds", "reason"), [(TIMEOUT - 1, "ImagePullBackOff"), (10 * TIMEOUT, "ContainerCreating")]
    )
    def test_a_start_that_takes_long_is_awaited(self, seconds: float, reason: str) -> None:
        assert len(stepped(self.stuck(seconds, reason)).state.placement.workers) == 3

    def test_nothing_is_created_by_a_clock_in_doubt_beyond_a_queues_admission_or_in_mode_recommend(self) -> None:
        world = self.stuck()
        assert workforce.list_stuck_workers(world, build_policy())
        for changed in (self.stuck(clock_agrees=False), replace(world, job=replace(world.job, queue="q"))):
            assert workforce.list_stuck_workers(changed, build_policy()) == ()
        assert workforce.list_stuck_workers(world, build_policy(mode=RemediationMode.RECOMMEND)) == ()
