"""How a job uses the checks of nodes before ranks start there."""

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

ENABLED = PreflightSpec(enabled=True)


def build_placed(replicas: int = 2, spares: int = 0, spec: PreflightSpec = ENABLED) -> Observation:
    """Build a job whose workers are all placed and warm; no rank has started."""
    observation = build_fresh(job=build_job(replicas, spares, preflight=spec))
    observation = observation.with_desired(workforce.update_workforce(observation, build_policy()))
    observation = with_pods(
        observation.with_desired(workforce.update_workforce(observation, build_policy())), state=LauncherState.WARM
    )
    return observation.with_desired(workforce.update_workforce(observation, build_policy()))


def with_checks(observation: Observation, passed: bool | None = True, *nodes: str, time: float = NOW) -> Observation:
    """Return the observation with checks of these nodes; by default, of all nodes of workers."""
    names = nodes or tuple(view.node for view in observation.workers)
    found = {observation.cluster_view.nodes[name].uid: NodeCheck(time, passed, "slow: its cores") for name in names}
    return replace(observation, node_checks={**observation.node_checks, **found})


def apply_step(observation: Observation, **policy: object) -> Observation:
    return observation.with_desired(preflight.apply_preflight(observation, build_policy(**policy)))


def has_members(observation: Observation) -> bool:
    return bool(membership.update_membership(observation, build_policy()).plan.members)


def list_checks(observation: Observation) -> list[CheckNodes]:
    return [effect for effect in list_effects(observation, build_policy(), {}) if isinstance(effect, CheckNodes)]


def find_condition(observation: Observation) -> tuple[str, str, str]:
    conditions = status.build_job_status(observation, build_policy(), JobStatus()).conditions
    return next(
        (condition.status, condition.reason, condition.message)
        for condition in conditions
        if condition.type == JobCondition.PREFLIGHT
    )


class TestBeforeTheStart:
    def test_without_preflight_no_node_is_checked_or_awaited(self) -> None:
        observation = apply_step(build_placed(spec=PreflightSpec()))
        assert has_members(observation)
        assert not list_checks(observation)
        assert not any(
            condition.type == JobCondition.PREFLIGHT
            for condition in status.build_job_status(observation, build_policy(), JobStatus()).conditions
        )

    def test_ranks_wait_until_all_nodes_have_passed(self) -> None:
        observation = apply_step(build_placed())
        assert not has_members(observation)
        (check,) = list_checks(observation)
        assert [name for name, _ in check.nodes] == sorted(view.node for view in observation.workers)
        assert find_condition(observation)[:2] == ("Unknown", "Probing")
        partly_checked = with_checks(observation, True, observation.workers[0].node)
        assert not has_members(partly_checked)
        assert len(list_checks(partly_checked)[0].nodes) == 1
        all_checked = apply_step(with_checks(observation))
        assert has_members(all_checked)
        assert not list_checks(all_checked)
        assert all_checked.state.preflight.started_at is None
        assert find_condition(all_checked)[:2] == ("True", "NodesPassed")

    def test_no_node_is_checked_before_all_workers_are_placed(self) -> None:
        observation = build_placed()
        without_pod = replace(observation.workers[0], pod=None)
        assert not list_checks(apply_step(replace(observation, workers=(without_pod, *observation.workers[1:]))))

    def test_the_job_starts_if_checks_take_too_long(self) -> None:
        observation = apply_step(build_placed())
        assert observation.state.preflight.started_at == NOW
        assert not has_members(replace(observation, now=NOW + 299))
        late = replace(observation, now=NOW + 300)
        assert has_members(late)
        assert find_condition(late)[:2] == ("Unknown", "Inconclusive")

    def test_the_job_starts_after_inconclusive_checks(self) -> None:
        observation = apply_step(with_checks(build_placed(), None))
        assert has_members(observation)
        assert find_condition(observation)[:2] == ("Unknown", "Inconclusive")

    def test_checks_from_long_before_the_worker_are_ignored(self) -> None:
        observation = build_placed()
        created_at = max(view.pod.created_at for view in observation.workers if view.pod)
        assert has_members(apply_step(with_checks(observation, time=created_at - 86400.0)))
        assert not has_members(apply_step(with_checks(observation, time=created_at - 86401.0)))
        assert not has_members(
            apply_step(with_checks(observation, None, time=created_at - preflight.UNKNOWN_CHECK_TTL_SECONDS - 1))
        )

    def test_an_operator_that_finds_the_job_training_repeats_the_condition(self) -> None:
        observation = build_training(2, 0, job=build_job(2, 0, preflight=ENABLED))
        before = ConditionStatus("Preflight", "Unknown", "Inconclusive", "node-1: no image")
        conditions = status.build_job_status(observation, build_policy(), JobStatus(conditions=(before,))).conditions
        assert [
            (condition.status, condition.reason, condition.message)
            for condition in conditions
            if condition.type == "Preflight"
        ] == [("Unknown", "Inconclusive", "node-1: no image")]


class TestFailedNode:
    def test_workers_of_a_failed_node_are_replaced_and_the_probe_is_the_witness(self) -> None:
        observation = build_placed()
        failed_node = observation.workers[0].node
        after = apply_step(with_checks(with_checks(observation), False, failed_node))
        leaving = [worker.name for worker in after.state.placement.workers if worker.leaving]
        assert leaving == [view.name for view in observation.workers if view.node == failed_node]
        assert preflight.list_failed_nodes(after) == (failed_node,)
        (request,) = after.state.incidents.quarantine_requests
        assert (request.node, request.witness, request.uid) == (
            failed_node,
            Witness.PROBE,
            observation.cluster_view.nodes[failed_node].uid,
        )
        assert not has_members(after)
        assert find_condition(after)[:2] == ("False", "NodesFailed")
        replaced = after.with_desired(workforce.update_workforce(after, build_policy()))
        effects = list_effects(replaced, build_policy(), {})
        assert [effect.avoid for effect in effects if isinstance(effect, CreatePod)] == [(failed_node,)]
        assert any(isinstance(effect, RequestQuarantine) for effect in effects)

    def test_both_workers_of_a_failed_node_are_replaced(self) -> None:
        observation = build_placed()
        node = observation.workers[0].node
        workers = tuple(replace(view, pod=replace(view.pod, node=node)) for view in observation.workers if view.pod)
        after = apply_step(with_checks(replace(observation, workers=workers), False))
        assert all(worker.leaving for worker in after.state.placement.workers)
        assert len(after.state.preflight.avoided_nodes) == len(after.state.incidents.quarantine_requests) == 1

    def test_a_decision_ends_the_request_and_the_node_stays_avoided(self) -> None:
        observation = apply_step(with_checks(build_placed(), False))
        decisions = {
            worker.node_key: QuarantineDecision(QuarantineVerdict.QUARANTINED, "held")
            for worker in observation.state.incidents.quarantine_requests
        }
        after = evaluate_job(replace(observation, quarantine_decisions=decisions), build_policy()).desired
        assert not after.state.incidents.quarantine_requests
        assert after.state.preflight.avoided_nodes

    def test_no_action_is_taken_in_a_pause_or_if_not_allowed(self) -> None:
        unchanged = apply_step(with_checks(build_placed(), False), paused="by a person")
        assert not unchanged.state.preflight.avoided_nodes
        assert not any(worker.leaving for worker in unchanged.state.placement.workers)
        unblamed = apply_step(with_checks(build_placed(), False), allow=frozenset(Remedy) - {Remedy.QUARANTINE_NODE})
        assert unblamed.state.preflight.avoided_nodes
        assert not unblamed.state.incidents.quarantine_requests

    def test_a_failed_node_is_used_if_there_is_no_other_room(self) -> None:
        observation = apply_step(with_checks(build_placed(), False))
        without_room = observation.with_desired(observation.desired.with_placement(attempts=1))
        second_attempt = with_checks(build_placed(), False).with_desired(
            build_placed()
            .desired.with_preflight(avoided_nodes=without_room.state.preflight.avoided_nodes)
            .with_placement(attempts=1)
        )
        after = apply_step(second_attempt)
        assert preflight.list_failed_nodes(after) == ()
        assert has_members(after)
        assert "for lack of other nodes" in find_condition(after)[2]

    def test_an_avoided_node_expires(self) -> None:
        observation = apply_step(with_checks(build_placed(), False))
        assert apply_step(replace(observation, now=NOW + 86399)).state.preflight.avoided_nodes
        assert not apply_step(replace(observation, now=NOW + 86401)).state.preflight.avoided_nodes

    def test_preflight_state_survives_encoding_and_decoding(self) -> None:
        desired = apply_step(with_checks(build_placed(), False)).desired
        assert state_codec.decode_state(state_codec.encode_state(desired, "j"), "j").desired == desired


class TestSpare:
    def test_a_spare_takes_no_ranks_before_its_node_has_passed(self) -> None:
        observation = build_training(2, 1, job=build_job(2, 1, preflight=ENABLED))
        lost = observation.with_desired(
            observation.desired.with_worker(replace(observation.workers[0].record, leaving="lost", dead=True))
        )
        waiting = apply_step(lost)
        assert [effect.nodes for effect in list_checks(waiting)] == [(("node-2", "node-uid-2"),)]
        members = membership.update_membership(waiting, build_policy()).plan.members
        assert "j-w2-0" not in {member.worker for member in members}
        ready = apply_step(with_checks(waiting, True, "node-2"))
        assert "j-w2-0" in {
            member.worker for member in membership.update_membership(ready, build_policy()).plan.members
        }

    def test_members_stay_if_their_node_fails(self) -> None:
        observation = build_training(2, 1, job=build_job(2, 1, preflight=ENABLED))
        after = apply_step(with_checks(observation, False))
        assert [worker.name for worker in after.state.placement.workers if worker.leaving] == ["j-w2-0"]
