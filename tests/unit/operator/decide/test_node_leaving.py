"""Nodes that their platform wants empty: who leaves them, in which order, and what is left to others."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api import Class, JobPhase, Outcome, Remedy
from pacekeeper_operator.decide import blame, gpu_warning, node_leaving
from pacekeeper_operator.decide.membership import CHECKPOINT_SECONDS
from pacekeeper_operator.decide.status import phase_of
from pacekeeper_operator.decide.think import Thought, effects, think
from pacekeeper_operator.decision import ReplaceWorker
from pacekeeper_operator.effects import CreatePod
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.state import Incident
from tests.support.worlds import NOW, change_members, change_worker, fresh, policy, training
from tests.unit.operator.decide.test_gpu_warning import warned

CORDONED = "it is cordoned"
WORDS = "node-1 is to be empty: it is cordoned"


def marked(world: Observation, *numbers: int, ready: bool = True) -> Observation:
    nodes = dict(world.surroundings.nodes)
    for number in numbers:
        nodes[f"node-{number}"] = replace(nodes[f"node-{number}"], leaving=CORDONED, ready=ready)
    since = {f"node-{number}": NOW - 60 for number in numbers}
    return replace(world, surroundings=replace(world.surroundings, nodes=nodes, leaving_since=since))


def again(thought: Thought, world: Observation, now: float = NOW + 5) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_draft(thought.draft), now=now)


def incidents(thought: Thought) -> dict[str | None, Incident]:
    return {incident.worker: incident for incident in thought.draft.state.incidents.current}


class TestMembers:
    def test_the_worker_gives_its_ranks_to_a_spare_once_the_checkpoint_is_there(self) -> None:
        world = marked(training(), 1)
        thought = think(world, policy())
        assert thought.draft.plan.checkpoint_request == 1
        late = again(thought, world, NOW + 10 * CHECKPOINT_SECONDS)
        assert think(late, policy()).draft.plan.membership == 1, "the node is still there: nothing hurries"
        thought = think(change_members(late, checkpoint_request=1), policy())
        assert [member.worker for member in thought.draft.plan.members] == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_no_step_is_lost_and_no_restart_burned(self) -> None:
        world = marked(training(), 1)
        world = again(think(world, policy()), world)
        assert phase_of(world) is JobPhase.RUNNING
        world = again(think(change_members(world, checkpoint_request=1), policy()), world, NOW + 7)
        round_ = {"membership": 2, "round": 2, "restored_step": 501, "first_step_at": NOW + 9, "step": 503}
        thought = think(replace(change_members(world, checkpoint_request=1, **round_), now=NOW + 10), policy())
        incident = incidents(thought)["j-w1-0"]
        assert (incident.outcome, incident.steps_lost) == (Outcome.RECOVERED, 0)
        assert thought.draft.state.budget.restarts == ()

    def test_what_is_said(self) -> None:
        decision = node_leaving.check(marked(training(), 1), policy())
        assert decision is not None
        assert decision.actions == (ReplaceWorker("j-w1-0", WORDS, dead=False, disruption=True, patient=True),)
        assert decision.message == f"j-w1-0 leaves its node, since {WORDS}"
        assert (decision.class_, decision.node, decision.rank) == (Class.DISRUPTION, "node-1", 1)
        assert [price.reason for price in decision.remedies] == ["to be evicted costs more"]

    def test_with_one_spare_one_goes_after_the_other(self) -> None:
        world = marked(training(), 1, 2)
        thought = think(world, policy())
        told = incidents(thought)
        assert [(told[name].remedy) for name in ("j-w1-0", "j-w2-0")] == [Remedy.REPLACE_WORKER, None]
        assert [price.reason for price in told["j-w2-0"].remedies] == ["no spare is warm"]

    def test_without_a_spare_it_is_written_once_and_over_when_the_node_is_wanted_again(self) -> None:
        world = training(spares=0)
        thought = think(marked(world, 1), policy())
        waits = incidents(thought)["j-w1-0"]
        assert (waits.applied, waits.outcome) == (None, None)
        later = think(again(thought, marked(world, 1), NOW + 300), policy())
        assert incidents(later)["j-w1-0"] == waits
        over = incidents(think(again(later, world, NOW + 301), policy()))["j-w1-0"]
        assert (over.outcome, over.recovered) == (Outcome.RECOVERED, NOW + 301)

    def test_from_a_node_that_is_lost_nobody_moves_in_peace(self) -> None:
        assert node_leaving.check(marked(training(), 1, ready=False), policy()) is None

    def test_whoever_drains_it_is_let_evict_first(self) -> None:
        world = marked(training(), 1)
        since = {"node-1": NOW - node_leaving.EVICTED_SECONDS + 0.1}
        world = replace(world, surroundings=replace(world.surroundings, leaving_since=since))
        assert node_leaving.check(world, policy()) is None
        assert node_leaving.check(replace(world, now=NOW + 0.1), policy()) is not None

    def test_an_operator_that_has_just_begun_does_not_take_the_reason_for_gone(self) -> None:
        world = marked(training(spares=0), 1)
        thought = think(world, policy())
        begun = replace(world, surroundings=replace(world.surroundings, leaving_since={"node-1": NOW + 5}))
        assert incidents(think(again(thought, begun), policy()))["j-w1-0"].outcome is None

    def test_a_pod_that_is_being_evicted_is_another_checks(self) -> None:
        world = change_worker(marked(training(), 1), "j-w1-0", pod={"deleting": True})
        assert node_leaving.check(world, policy()) is None


class TestSpares:
    def test_one_on_such_a_node_goes_at_once_and_nobody_moves_to_it(self) -> None:
        told = incidents(think(marked(training(), 1, 4), policy()))
        assert (told["j-w4-0"].remedy, told["j-w4-0"].outcome) == (Remedy.REPLACE_WORKER, Outcome.RECOVERED)
        assert told["j-w1-0"].remedy is None

    def test_nor_to_one_whose_gpu_is_about_to_fail(self) -> None:
        told = incidents(think(warned(marked(training(), 1), "j-w4-0"), policy()))
        assert told["j-w1-0"].remedy is None

    def test_nor_from_a_failing_gpu_to_such_a_node(self) -> None:
        thought = think(marked(warned(training()), 4), policy())
        assert incidents(thought)["j-w1-0"].remedy is None
        assert gpu_warning.check(thought.observation, policy()) is None


class TestNodes:
    def test_no_worker_is_placed_there(self) -> None:
        world = marked(fresh(), 3, 5)
        thought = think(replace(world, now=NOW), policy())
        made = [effect for effect in effects(thought.observation, policy(), {}) if isinstance(effect, CreatePod)]
        assert made
        assert all(effect.avoid == ("node-3", "node-5") for effect in made)

    def test_their_health_is_left_to_others(self) -> None:
        proposed = blame.propose(marked(training(), 1), policy(), "node-1", "it hung")
        assert proposed.withheld == "somebody else sees to the node: it is cordoned"
