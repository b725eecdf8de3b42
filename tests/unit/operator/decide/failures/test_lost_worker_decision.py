"""What becomes of workers that one event has taken: what it costs, whom it concerns, and how it is told."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.decision import Decision, FailJob, ReplaceWorker
from pacekeeper_operator.decide.failures import lost_worker_decision
from pacekeeper_operator.decide.failures.lost_worker_decision import LostWorker
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training


def losses(world: Observation, names: list[str], class_: IncidentClass = IncidentClass.UNKNOWN) -> list[LostWorker]:
    views = (world.find_worker(name) for name in names)
    return [
        LostWorker(view, IncidentCause.WORKER_LOST, class_, "it is gone", NOW - 1) for view in views if view is not None
    ]


def decided(
    names: list[str], class_: IncidentClass = IncidentClass.UNKNOWN, *, left: int = 1, allowed: bool = True
) -> Decision:
    """`left`: restarts that the budget has left."""
    world = build_training(8, 2)
    world = world.with_desired(world.desired.with_budget(restarts=tuple(NOW - n for n in range(1, 3 - left))))
    allow = frozenset(Remedy) - (set() if allowed else {Remedy.REPLACE_WORKER})
    return lost_worker_decision.decide_lost_workers(
        world, build_policy(max_restarts=2, allow=allow), losses(world, names, class_)
    )


def test_one_is_told_by_name_and_rank() -> None:
    decision = decided(["j-w1-0"])
    assert decision.message == "worker j-w1-0 (rank 1) is lost: it is gone"
    assert (decision.node, decision.rank, decision.live) == ("node-1", 1, False)


def test_a_spare_holds_nobody_up() -> None:
    decision = decided(["j-w8-0"])
    assert decision.message == "worker j-w8-0 (a spare) is lost: it is gone"
    assert (decision.rank, decision.live) == (None, True)


def test_three_are_named_and_more_are_counted() -> None:
    three = "; ".join(f"j-w{n}-0 (rank {n}): it is gone" for n in (1, 2, 3))
    assert decided(["j-w1-0", "j-w2-0", "j-w3-0"]).message == f"3 workers are lost: {three}"
    assert decided([f"j-w{n}-0" for n in (1, 2, 3, 4)]).message == f"4 workers are lost: {three}; and 1 more"


def test_one_that_has_no_node_yet_names_none() -> None:
    world = build_training()
    (found,) = losses(world, ["j-w1-0"])
    nowhere = replace(found, view=replace(found.view, record=replace(found.view.record, node="")))
    assert lost_worker_decision.decide_lost_workers(world, build_policy(), [nowhere]).node is None


class TestBudget:
    def test_without_a_restart_left_the_job_fails(self) -> None:
        (end,) = decided(["j-w1-0"], left=0).actions
        assert isinstance(end, FailJob)
        assert end.message == "no restart is left: worker j-w1-0 (rank 1) is lost: it is gone"

    def test_what_somebody_wanted_needs_none(self) -> None:
        (action,) = decided(["j-w1-0"], IncidentClass.DISRUPTION, left=0).actions
        assert isinstance(action, ReplaceWorker)
        assert action.disruption

    def test_nor_does_a_spare(self) -> None:
        (action,) = decided(["j-w8-0"], left=0).actions
        assert isinstance(action, ReplaceWorker)

    def test_one_event_costs_one(self) -> None:
        actions = decided(["j-w1-0", "j-w2-0", "j-w3-0"]).actions
        assert [isinstance(one, ReplaceWorker) and one.disruption for one in actions] == [False, True, True]


def test_where_nobody_may_be_replaced_it_is_only_told() -> None:
    decision = decided(["j-w1-0"], allowed=False)
    assert (decision.actions, decision.remedy) == ((), None)
    assert decided(["j-w1-0"]).remedy is Remedy.REPLACE_WORKER
