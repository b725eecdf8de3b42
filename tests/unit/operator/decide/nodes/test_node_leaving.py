"""Nodes that their platform drains: which workers move, in which order, and what other checks decide."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api.incident import IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobPhase, Remedy
from pacekeeper_operator.decide.decision import ReplaceWorker
from pacekeeper_operator.decide.effects import CreatePod
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job, list_effects
from pacekeeper_operator.decide.failures import gpu_warning
from pacekeeper_operator.decide.lifecycle.status import compute_phase
from pacekeeper_operator.decide.nodes import node_leaving, quarantine_proposal
from pacekeeper_operator.decide.placement.membership import MEMBERSHIP_CHECKPOINT_WAIT_SECONDS
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_policy,
    build_training,
    change_members,
    change_worker,
)
from tests.unit.operator.decide.failures.test_gpu_warning import with_warning

CORDONED = "it is cordoned"
REASON = "node-1 is being drained: it is cordoned"


def with_leaving_nodes(observation: Observation, *numbers: int, ready: bool = True) -> Observation:
    nodes = dict(observation.cluster_view.nodes)
    for number in numbers:
        nodes[f"node-{number}"] = replace(nodes[f"node-{number}"], leave_reason=CORDONED, ready=ready)
    since = {f"node-{number}": NOW - 60 for number in numbers}
    return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes, leaving_since=since))


def apply_result(result: PassResult, observation: Observation, now: float = NOW + 5) -> Observation:
    """Return the observation after the result of a pass was written."""
    return replace(observation.with_desired(result.desired), now=now)


def map_incidents(result: PassResult) -> dict[str | None, Incident]:
    return {incident.worker: incident for incident in result.desired.state.incidents.current}


class TestMembers:
    def test_a_spare_takes_the_ranks_once_the_checkpoint_is_saved(self) -> None:
        observation = with_leaving_nodes(build_training(), 1)
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.checkpoint_request == 1
        late = apply_result(result, observation, NOW + 10 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert evaluate_job(late, build_policy()).desired.plan.membership == 1, (
            "the node still works, so the checkpoint is awaited"
        )
        result = evaluate_job(change_members(late, checkpoint={"request": 1}), build_policy())
        assert [member.worker for member in result.desired.plan.members] == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_no_step_is_lost_and_no_restart_is_counted(self) -> None:
        observation = with_leaving_nodes(build_training(), 1)
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        assert compute_phase(observation) is JobPhase.RUNNING
        observation = apply_result(
            evaluate_job(change_members(observation, checkpoint={"request": 1}), build_policy()), observation, NOW + 7
        )
        round_ = {"start": {"restored_step": 501, "first_step_at": NOW + 9}, "progress": {"step": 503}}
        result = evaluate_job(
            replace(
                change_members(observation, membership=2, round=2, checkpoint={"request": 1}, **round_), now=NOW + 10
            ),
            build_policy(),
        )
        incident = map_incidents(result)["j-w1-0"]
        assert (incident.outcome, incident.steps_lost) == (IncidentOutcome.RECOVERED, 0)
        assert result.desired.state.budget.restarts == ()

    def test_action_and_message_for_a_leaving_node(self) -> None:
        decision = node_leaving.check_leaving_nodes(with_leaving_nodes(build_training(), 1), build_policy())
        assert decision is not None
        assert decision.actions == (
            ReplaceWorker("j-w1-0", REASON, dead=False, disruption=True, waits_for_checkpoint=True),
        )
        assert decision.message == f"j-w1-0 leaves its node, since {REASON}"
        assert (decision.class_, decision.node, decision.rank) == (IncidentClass.DISRUPTION, "node-1", 1)
        assert [price.reason for price in decision.remedies] == ["an eviction costs more"]

    def test_with_one_spare_workers_move_one_after_the_other(self) -> None:
        observation = with_leaving_nodes(build_training(), 1, 2)
        result = evaluate_job(observation, build_policy())
        incidents = map_incidents(result)
        assert [(incidents[name].remedy) for name in ("j-w1-0", "j-w2-0")] == [Remedy.REPLACE_WORKER, None]
        assert [price.reason for price in incidents["j-w2-0"].remedies] == ["no spare is warm"]

    def test_without_a_spare_one_incident_is_open_until_the_node_is_no_longer_leaving(self) -> None:
        observation = build_training(spares=0)
        result = evaluate_job(with_leaving_nodes(observation, 1), build_policy())
        waiting = map_incidents(result)["j-w1-0"]
        assert (waiting.applied, waiting.outcome) == (None, None)
        later = evaluate_job(apply_result(result, with_leaving_nodes(observation, 1), NOW + 300), build_policy())
        assert map_incidents(later)["j-w1-0"] == waiting
        closed = map_incidents(evaluate_job(apply_result(later, observation, NOW + 301), build_policy()))["j-w1-0"]
        assert (closed.outcome, closed.recovered) == (IncidentOutcome.RECOVERED, NOW + 301)

    def test_no_worker_moves_from_a_node_that_is_not_ready(self) -> None:
        assert (
            node_leaving.check_leaving_nodes(with_leaving_nodes(build_training(), 1, ready=False), build_policy())
            is None
        )

    def test_workers_move_only_after_the_drain_had_time_to_evict(self) -> None:
        observation = with_leaving_nodes(build_training(), 1)
        since = {"node-1": NOW - node_leaving.DRAIN_SETTLE_SECONDS + 0.1}
        observation = replace(observation, cluster_view=replace(observation.cluster_view, leaving_since=since))
        assert node_leaving.check_leaving_nodes(observation, build_policy()) is None
        assert node_leaving.check_leaving_nodes(replace(observation, now=NOW + 0.1), build_policy()) is not None

    def test_the_incident_stays_open_after_a_restart_of_the_operator(self) -> None:
        observation = with_leaving_nodes(build_training(spares=0), 1)
        result = evaluate_job(observation, build_policy())
        restarted = replace(
            observation, cluster_view=replace(observation.cluster_view, leaving_since={"node-1": NOW + 5})
        )
        assert map_incidents(evaluate_job(apply_result(result, restarted), build_policy()))["j-w1-0"].outcome is None

    def test_a_pod_that_is_being_evicted_is_ignored(self) -> None:
        observation = change_worker(with_leaving_nodes(build_training(), 1), "j-w1-0", pod={"deleting": True})
        assert node_leaving.check_leaving_nodes(observation, build_policy()) is None


class TestSpares:
    def test_a_spare_on_a_leaving_node_is_replaced_at_once_and_takes_no_ranks(self) -> None:
        incidents = map_incidents(evaluate_job(with_leaving_nodes(build_training(), 1, 4), build_policy()))
        assert (incidents["j-w4-0"].remedy, incidents["j-w4-0"].outcome) == (
            Remedy.REPLACE_WORKER,
            IncidentOutcome.RECOVERED,
        )
        assert incidents["j-w1-0"].remedy is None

    def test_no_worker_moves_to_a_spare_with_a_gpu_warning(self) -> None:
        incidents = map_incidents(
            evaluate_job(with_warning(with_leaving_nodes(build_training(), 1), "j-w4-0"), build_policy())
        )
        assert incidents["j-w1-0"].remedy is None

    def test_no_worker_moves_from_a_gpu_warning_to_a_leaving_node(self) -> None:
        result = evaluate_job(with_leaving_nodes(with_warning(build_training()), 4), build_policy())
        assert map_incidents(result)["j-w1-0"].remedy is None
        assert gpu_warning.check_gpu_warnings(result.observation, build_policy()) is None


class TestNodes:
    def test_no_worker_is_placed_on_a_leaving_node(self) -> None:
        observation = with_leaving_nodes(build_fresh(), 3, 5)
        result = evaluate_job(replace(observation, now=NOW), build_policy())
        created = [
            effect for effect in list_effects(result.observation, build_policy(), {}) if isinstance(effect, CreatePod)
        ]
        assert created
        assert all(effect.avoid == ("node-3", "node-5") for effect in created)

    def test_no_quarantine_of_a_leaving_node_is_proposed(self) -> None:
        proposed = quarantine_proposal.propose_quarantine(
            with_leaving_nodes(build_training(), 1), build_policy(), "node-1", "it hung"
        )
        assert proposed.withheld == "the platform already drains the node: it is cordoned"
