"""Nodes that their platform wants empty: who leaves them, in which order, and what is left to others."""

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
from tests.unit.operator.decide.failures.test_gpu_warning import warned

CORDONED = "it is cordoned"
WORDS = "node-1 is being drained: it is cordoned"


def marked(world: Observation, *numbers: int, ready: bool = True) -> Observation:
    nodes = dict(world.cluster_view.nodes)
    for number in numbers:
        nodes[f"node-{number}"] = replace(nodes[f"node-{number}"], leave_reason=CORDONED, ready=ready)
    since = {f"node-{number}": NOW - 60 for number in numbers}
    return replace(world, cluster_view=replace(world.cluster_view, nodes=nodes, leaving_since=since))


def again(thought: PassResult, world: Observation, now: float = NOW + 5) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_desired(thought.desired), now=now)


def incidents(thought: PassResult) -> dict[str | None, Incident]:
    return {incident.worker: incident for incident in thought.desired.state.incidents.current}


class TestMembers:
    def test_the_worker_gives_its_ranks_to_a_spare_once_the_checkpoint_is_there(self) -> None:
        world = marked(build_training(), 1)
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.checkpoint_request == 1
        late = again(thought, world, NOW + 10 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert evaluate_job(late, build_policy()).desired.plan.membership == 1, (
            "the node is still there: nothing hurries"
        )
        thought = evaluate_job(change_members(late, checkpoint={"request": 1}), build_policy())
        assert [member.worker for member in thought.desired.plan.members] == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_no_step_is_lost_and_no_restart_burned(self) -> None:
        world = marked(build_training(), 1)
        world = again(evaluate_job(world, build_policy()), world)
        assert compute_phase(world) is JobPhase.RUNNING
        world = again(evaluate_job(change_members(world, checkpoint={"request": 1}), build_policy()), world, NOW + 7)
        round_ = {"start": {"restored_step": 501, "first_step_at": NOW + 9}, "progress": {"step": 503}}
        thought = evaluate_job(
            replace(change_members(world, membership=2, round=2, checkpoint={"request": 1}, **round_), now=NOW + 10),
            build_policy(),
        )
        incident = incidents(thought)["j-w1-0"]
        assert (incident.outcome, incident.steps_lost) == (IncidentOutcome.RECOVERED, 0)
        assert thought.desired.state.budget.restarts == ()

    def test_what_is_said(self) -> None:
        decision = node_leaving.check_leaving_nodes(marked(build_training(), 1), build_policy())
        assert decision is not None
        assert decision.actions == (
            ReplaceWorker("j-w1-0", WORDS, dead=False, disruption=True, waits_for_checkpoint=True),
        )
        assert decision.message == f"j-w1-0 leaves its node, since {WORDS}"
        assert (decision.class_, decision.node, decision.rank) == (IncidentClass.DISRUPTION, "node-1", 1)
        assert [price.reason for price in decision.remedies] == ["an eviction costs more"]

    def test_with_one_spare_one_goes_after_the_other(self) -> None:
        world = marked(build_training(), 1, 2)
        thought = evaluate_job(world, build_policy())
        told = incidents(thought)
        assert [(told[name].remedy) for name in ("j-w1-0", "j-w2-0")] == [Remedy.REPLACE_WORKER, None]
        assert [price.reason for price in told["j-w2-0"].remedies] == ["no spare is warm"]

    def test_without_a_spare_it_is_written_once_and_over_when_the_node_is_wanted_again(self) -> None:
        world = build_training(spares=0)
        thought = evaluate_job(marked(world, 1), build_policy())
        waits = incidents(thought)["j-w1-0"]
        assert (waits.applied, waits.outcome) == (None, None)
        later = evaluate_job(again(thought, marked(world, 1), NOW + 300), build_policy())
        assert incidents(later)["j-w1-0"] == waits
        over = incidents(evaluate_job(again(later, world, NOW + 301), build_policy()))["j-w1-0"]
        assert (over.outcome, over.recovered) == (IncidentOutcome.RECOVERED, NOW + 301)

    def test_from_a_node_that_is_lost_nobody_moves_in_peace(self) -> None:
        assert node_leaving.check_leaving_nodes(marked(build_training(), 1, ready=False), build_policy()) is None

    def test_whoever_drains_it_is_let_evict_first(self) -> None:
        world = marked(build_training(), 1)
        since = {"node-1": NOW - node_leaving.DRAIN_SETTLE_SECONDS + 0.1}
        world = replace(world, cluster_view=replace(world.cluster_view, leaving_since=since))
        assert node_leaving.check_leaving_nodes(world, build_policy()) is None
        assert node_leaving.check_leaving_nodes(replace(world, now=NOW + 0.1), build_policy()) is not None

    def test_an_operator_that_has_just_begun_does_not_take_the_reason_for_gone(self) -> None:
        world = marked(build_training(spares=0), 1)
        thought = evaluate_job(world, build_policy())
        begun = replace(world, cluster_view=replace(world.cluster_view, leaving_since={"node-1": NOW + 5}))
        assert incidents(evaluate_job(again(thought, begun), build_policy()))["j-w1-0"].outcome is None

    def test_a_pod_that_is_being_evicted_is_another_checks(self) -> None:
        world = change_worker(marked(build_training(), 1), "j-w1-0", pod={"deleting": True})
        assert node_leaving.check_leaving_nodes(world, build_policy()) is None


class TestSpares:
    def test_one_on_such_a_node_goes_at_once_and_nobody_moves_to_it(self) -> None:
        told = incidents(evaluate_job(marked(build_training(), 1, 4), build_policy()))
        assert (told["j-w4-0"].remedy, told["j-w4-0"].outcome) == (Remedy.REPLACE_WORKER, IncidentOutcome.RECOVERED)
        assert told["j-w1-0"].remedy is None

    def test_nor_to_one_whose_gpu_is_about_to_fail(self) -> None:
        told = incidents(evaluate_job(warned(marked(build_training(), 1), "j-w4-0"), build_policy()))
        assert told["j-w1-0"].remedy is None

    def test_nor_from_a_failing_gpu_to_such_a_node(self) -> None:
        thought = evaluate_job(marked(warned(build_training()), 4), build_policy())
        assert incidents(thought)["j-w1-0"].remedy is None
        assert gpu_warning.check_gpu_warnings(thought.observation, build_policy()) is None


class TestNodes:
    def test_no_worker_is_placed_there(self) -> None:
        world = marked(build_fresh(), 3, 5)
        thought = evaluate_job(replace(world, now=NOW), build_policy())
        made = [
            effect for effect in list_effects(thought.observation, build_policy(), {}) if isinstance(effect, CreatePod)
        ]
        assert made
        assert all(effect.avoid == ("node-3", "node-5") for effect in made)

    def test_their_health_is_left_to_others(self) -> None:
        proposed = quarantine_proposal.propose_quarantine(
            marked(build_training(), 1), build_policy(), "node-1", "it hung"
        )
        assert proposed.withheld == "the platform already drains the node: it is cordoned"
