"""What a job does about nodes that are looked at before ranks start there."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.conditions import ConditionStatus, JobCondition
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict, Witness
from pacekeeper_operator.api.training_job import JobStatus, PreflightSpec, Remedy
from pacekeeper_operator.decide.effects import CheckNodes, CreatePod, RequestQuarantine
from pacekeeper_operator.decide.evaluate import evaluate_job, list_effects
from pacekeeper_operator.decide.lifecycle import status
from pacekeeper_operator.decide.placement import membership, preflight, workforce
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.effect_results import NodeCheck, QuarantineDecision
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_job, build_policy, build_training, with_pods

WANTED = PreflightSpec(enabled=True)


def placed(replicas: int = 2, spares: int = 0, spec: PreflightSpec = WANTED) -> Observation:
    """All workers have their nodes and are warm; no rank has begun."""
    world = build_fresh(job=build_job(replicas, spares, preflight=spec))
    world = world.with_desired(workforce.update_workforce(world, build_policy()))
    world = with_pods(world.with_desired(workforce.update_workforce(world, build_policy())), state=LauncherState.WARM)
    return world.with_desired(workforce.update_workforce(world, build_policy()))


def checked(world: Observation, passed: bool | None = True, *nodes: str, at: float = NOW) -> Observation:
    """These nodes have been looked at; none named: all that workers are on."""
    names = nodes or tuple(view.node for view in world.workers)
    found = {world.cluster_view.nodes[name].uid: NodeCheck(at, passed, "slow: its cores") for name in names}
    return replace(world, node_checks={**world.node_checks, **found})


def stepped(world: Observation, **rules: object) -> Observation:
    return world.with_desired(preflight.apply_preflight(world, build_policy(**rules)))


def founded(world: Observation) -> bool:
    return bool(membership.update_membership(world, build_policy()).plan.members)


def looks(world: Observation) -> list[CheckNodes]:
    return [effect for effect in list_effects(world, build_policy(), {}) if isinstance(effect, CheckNodes)]


def condition(world: Observation) -> tuple[str, str, str]:
    said = status.build_job_status(world, build_policy(), JobStatus()).conditions
    return next((c.status, c.reason, c.message) for c in said if c.type == JobCondition.PREFLIGHT)


class TestBeforeTheStart:
    def test_without_the_wish_nothing_is_looked_at_or_waited_for(self) -> None:
        world = stepped(placed(spec=PreflightSpec()))
        assert founded(world)
        assert not looks(world)
        assert not any(
            c.type == JobCondition.PREFLIGHT
            for c in status.build_job_status(world, build_policy(), JobStatus()).conditions
        )

    def test_ranks_wait_until_all_nodes_have_passed(self) -> None:
        world = stepped(placed())
        assert not founded(world)
        (look,) = looks(world)
        assert [name for name, _ in look.nodes] == sorted(view.node for view in world.workers)
        assert condition(world)[:2] == ("Unknown", "Probing")
        one = checked(world, True, world.workers[0].node)
        assert not founded(one)
        assert len(looks(one)[0].nodes) == 1
        done = stepped(checked(world))
        assert founded(done)
        assert not looks(done)
        assert done.state.preflight.started_at is None
        assert condition(done)[:2] == ("True", "NodesPassed")

    def test_nobody_is_looked_at_before_all_have_a_node(self) -> None:
        world = placed()
        lone = replace(world.workers[0], pod=None)
        assert not looks(stepped(replace(world, workers=(lone, *world.workers[1:]))))

    def test_what_is_not_found_out_in_time_does_not_hold_the_job_up(self) -> None:
        world = stepped(placed())
        assert world.state.preflight.started_at == NOW
        assert not founded(replace(world, now=NOW + 299))
        late = replace(world, now=NOW + 300)
        assert founded(late)
        assert condition(late)[:2] == ("Unknown", "Inconclusive")

    def test_an_answer_that_says_nothing_does_not_hold_it_up_either(self) -> None:
        world = stepped(checked(placed(), None))
        assert founded(world)
        assert condition(world)[:2] == ("Unknown", "Inconclusive")

    def test_what_was_found_long_before_the_worker_was_made_is_nothing(self) -> None:
        world = placed()
        made = max(view.pod.created_at for view in world.workers if view.pod)
        assert founded(stepped(checked(world, at=made - 86400.0)))
        assert not founded(stepped(checked(world, at=made - 86401.0)))
        assert not founded(stepped(checked(world, None, at=made - preflight.UNKNOWN_CHECK_TTL_SECONDS - 1)))

    def test_an_operator_that_finds_the_job_training_repeats_what_was_said(self) -> None:
        world = build_training(2, 0, job=build_job(2, 0, preflight=WANTED))
        said = ConditionStatus("Preflight", "Unknown", "Inconclusive", "node-1: no image")
        told = status.build_job_status(world, build_policy(), JobStatus(conditions=(said,))).conditions
        assert [(c.status, c.reason, c.message) for c in told if c.type == "Preflight"] == [
            ("Unknown", "Inconclusive", "node-1: no image")
        ]


class TestANodeThatFails:
    def test_its_workers_go_elsewhere_and_the_probe_is_the_witness_against_it(self) -> None:
        world = placed()
        bad = world.workers[0].node
        after = stepped(checked(checked(world), False, bad))
        given_up = [w.name for w in after.state.placement.workers if w.leaving]
        assert given_up == [view.name for view in world.workers if view.node == bad]
        assert preflight.list_failed_nodes(after) == (bad,)
        (wanted,) = after.state.incidents.quarantine_requests
        assert (wanted.node, wanted.witness, wanted.uid) == (bad, Witness.PROBE, world.cluster_view.nodes[bad].uid)
        assert not founded(after)
        assert condition(after)[:2] == ("False", "NodesFailed")
        replaced = after.with_desired(workforce.update_workforce(after, build_policy()))
        wants = list_effects(replaced, build_policy(), {})
        assert [effect.avoid for effect in wants if isinstance(effect, CreatePod)] == [(bad,)]
        assert any(isinstance(effect, RequestQuarantine) for effect in wants)

    def test_two_workers_on_it_both_go(self) -> None:
        world = placed()
        node = world.workers[0].node
        both = tuple(replace(view, pod=replace(view.pod, node=node)) for view in world.workers if view.pod)
        after = stepped(checked(replace(world, workers=both), False))
        assert all(worker.leaving for worker in after.state.placement.workers)
        assert len(after.state.preflight.avoided_nodes) == len(after.state.incidents.quarantine_requests) == 1

    def test_a_verdict_ends_the_suspicion_and_the_node_stays_avoided(self) -> None:
        world = stepped(checked(placed(), False))
        rulings = {
            w.node_key: QuarantineDecision(QuarantineVerdict.QUARANTINED, "held")
            for w in world.state.incidents.quarantine_requests
        }
        after = evaluate_job(replace(world, quarantine_decisions=rulings), build_policy()).desired
        assert not after.state.incidents.quarantine_requests
        assert after.state.preflight.avoided_nodes

    def test_where_nothing_may_be_done_it_is_only_said(self) -> None:
        only_told = stepped(checked(placed(), False), paused="by a person")
        assert not only_told.state.preflight.avoided_nodes
        assert not any(worker.leaving for worker in only_told.state.placement.workers)
        unblamed = stepped(checked(placed(), False), allow=frozenset(Remedy) - {Remedy.QUARANTINE_NODE})
        assert unblamed.state.preflight.avoided_nodes
        assert not unblamed.state.incidents.quarantine_requests

    def test_where_there_is_no_room_without_it_the_job_takes_it(self) -> None:
        world = stepped(checked(placed(), False))
        crowded = world.with_desired(world.desired.with_placement(attempts=1))
        again = checked(placed(), False).with_desired(
            placed()
            .desired.with_preflight(avoided_nodes=crowded.state.preflight.avoided_nodes)
            .with_placement(attempts=1)
        )
        after = stepped(again)
        assert preflight.list_failed_nodes(after) == ()
        assert founded(after)
        assert "for lack of other nodes" in condition(after)[2]

    def test_it_is_forgotten_in_time(self) -> None:
        world = stepped(checked(placed(), False))
        assert stepped(replace(world, now=NOW + 86399)).state.preflight.avoided_nodes
        assert not stepped(replace(world, now=NOW + 86401)).state.preflight.avoided_nodes

    def test_it_is_written_down(self) -> None:
        draft = stepped(checked(placed(), False)).desired
        assert state_codec.decode_state(state_codec.encode_state(draft, "j"), "j").desired == draft


class TestASpare:
    def test_it_takes_no_ranks_before_its_node_has_passed(self) -> None:
        world = build_training(2, 1, job=build_job(2, 1, preflight=WANTED))
        lost = world.with_desired(
            world.desired.with_worker(replace(world.workers[0].record, leaving="lost", dead=True))
        )
        waiting = stepped(lost)
        assert [effect.nodes for effect in looks(waiting)] == [(("node-2", "node-uid-2"),)]
        members = membership.update_membership(waiting, build_policy()).plan.members
        assert "j-w2-0" not in {member.worker for member in members}
        ready = stepped(checked(waiting, True, "node-2"))
        assert "j-w2-0" in {
            member.worker for member in membership.update_membership(ready, build_policy()).plan.members
        }

    def test_members_are_left_alone(self) -> None:
        world = build_training(2, 1, job=build_job(2, 1, preflight=WANTED))
        after = stepped(checked(world, False))
        assert [worker.name for worker in after.state.placement.workers if worker.leaving] == ["j-w2-0"]
