"""Decisions on workers that one event has taken: cost, affected ranks, and message."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.decision import Decision, FailJob, ReplaceWorker
from pacekeeper_operator.decide.failures import lost_worker_decision
from pacekeeper_operator.decide.failures.lost_worker_decision import LostWorker
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training


def build_losses(
    observation: Observation, names: list[str], class_: IncidentClass = IncidentClass.UNKNOWN
) -> list[LostWorker]:
    views = (observation.find_worker(name) for name in names)
    return [
        LostWorker(view, IncidentCause.WORKER_LOST, class_, "it is gone", NOW - 1) for view in views if view is not None
    ]


def make_decision(
    names: list[str], class_: IncidentClass = IncidentClass.UNKNOWN, *, restarts_left: int = 1, allowed: bool = True
) -> Decision:
    """Decide on lost workers. `restarts_left`: restarts that the budget has left."""
    observation = build_training(8, 2)
    observation = observation.with_desired(
        observation.desired.with_budget(restarts=tuple(NOW - n for n in range(1, 3 - restarts_left)))
    )
    allow = frozenset(Remedy) - (set() if allowed else {Remedy.REPLACE_WORKER})
    return lost_worker_decision.decide_lost_workers(
        observation, build_policy(max_restarts=2, allow=allow), build_losses(observation, names, class_)
    )


def test_the_message_names_a_lost_worker_and_its_rank() -> None:
    decision = make_decision(["j-w1-0"])
    assert decision.message == "worker j-w1-0 (rank 1) is lost: it is gone"
    assert (decision.node, decision.rank, decision.live) == ("node-1", 1, False)


def test_the_job_trains_on_after_the_loss_of_a_spare() -> None:
    decision = make_decision(["j-w8-0"])
    assert decision.message == "worker j-w8-0 (a spare) is lost: it is gone"
    assert (decision.rank, decision.live) == (None, True)


def test_the_message_names_three_workers_and_counts_the_others() -> None:
    three = "; ".join(f"j-w{n}-0 (rank {n}): it is gone" for n in (1, 2, 3))
    assert make_decision(["j-w1-0", "j-w2-0", "j-w3-0"]).message == f"3 workers are lost: {three}"
    assert make_decision([f"j-w{n}-0" for n in (1, 2, 3, 4)]).message == f"4 workers are lost: {three}; and 1 more"


def test_a_worker_without_a_node_names_no_node() -> None:
    observation = build_training()
    (found,) = build_losses(observation, ["j-w1-0"])
    without_node = replace(found, view=replace(found.view, record=replace(found.view.record, node="")))
    assert lost_worker_decision.decide_lost_workers(observation, build_policy(), [without_node]).node is None


class TestBudget:
    def test_without_a_restart_left_the_job_fails(self) -> None:
        (end,) = make_decision(["j-w1-0"], restarts_left=0).actions
        assert isinstance(end, FailJob)
        assert end.message == "no restart is left: worker j-w1-0 (rank 1) is lost: it is gone"

    def test_a_disruption_needs_no_restart_of_the_budget(self) -> None:
        (action,) = make_decision(["j-w1-0"], IncidentClass.DISRUPTION, restarts_left=0).actions
        assert isinstance(action, ReplaceWorker)
        assert action.disruption

    def test_a_lost_spare_needs_no_restart_of_the_budget(self) -> None:
        (action,) = make_decision(["j-w8-0"], restarts_left=0).actions
        assert isinstance(action, ReplaceWorker)

    def test_workers_lost_together_count_as_one_restart(self) -> None:
        actions = make_decision(["j-w1-0", "j-w2-0", "j-w3-0"]).actions
        assert [isinstance(action, ReplaceWorker) and action.disruption for action in actions] == [False, True, True]


def test_no_action_is_taken_if_replacing_is_not_allowed() -> None:
    decision = make_decision(["j-w1-0"], allowed=False)
    assert (decision.actions, decision.remedy) == ((), None)
    assert make_decision(["j-w1-0"]).remedy is Remedy.REPLACE_WORKER
