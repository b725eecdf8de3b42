"""What a draft asks for once it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import RunPolicySpec
from pacekeeper_operator.decide.effects import (
    ApplyNetworkPolicy,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    RequestQuarantine,
    ValidateTemplate,
    WriteIncident,
)
from pacekeeper_operator.decide.evaluate import list_effects
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_job, build_policy, build_training, change_worker


def asked(world: Observation, kind: type[Effect], **written: Incident) -> list[Effect]:
    found = list_effects(world, build_policy(), written)
    return [effect for effect in found if isinstance(effect, kind)]


class TestTemplate:
    def test_is_tried_once_for_each_generation_before_the_job_has_members(self) -> None:
        accepted = build_fresh()
        asks = accepted.with_desired(accepted.desired.with_placement(template_accepted=0))
        assert asked(asks, ValidateTemplate) == [ValidateTemplate(1)]
        assert asked(accepted, ValidateTemplate) == []
        trains = build_training()
        assert asked(trains.with_desired(trains.desired.with_placement(template_accepted=0)), ValidateTemplate) == []
        assert asked(asks.with_desired(asks.desired.with_lifecycle(completed_at=NOW)), ValidateTemplate) == []


class TestPods:
    def created(self, world: Observation) -> dict[str, bool]:
        """By name, whether it is made as a spare."""
        world = world.with_desired(workforce.update_workforce(world, build_policy()))
        pods = asked(world, CreatePod)
        return {effect.worker.name: effect.spare for effect in pods if isinstance(effect, CreatePod)}

    def test_first_workers_hold_ranks_and_those_beyond_are_spares(self) -> None:
        start = build_fresh(2, 1)
        start = start.with_desired(workforce.update_workforce(start, build_policy()))
        assert self.created(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}

    def test_whoever_comes_later_prefers_nodes_without_incidents_and_no_first_worker_does(self) -> None:
        def preferring(world: Observation) -> dict[str, bool]:
            around = replace(world.cluster_view, unreliable_nodes=("node-7",))
            world = replace(world, cluster_view=around).with_desired(workforce.update_workforce(world, build_policy()))
            pods = asked(world, CreatePod)
            return {one.worker.name: bool(one.unreliable) for one in pods if isinstance(one, CreatePod)}

        start = build_fresh(2, 1)
        start = start.with_desired(workforce.update_workforce(start, build_policy()))
        assert preferring(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}
        world = change_worker(change_worker(build_training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(world.state.placement.workers[1], leaving="x", dead=True)
        assert preferring(world.with_desired(world.desired.with_worker(record))) == {"j-w1-1": True, "j-w4-1": True}

    def test_whoever_comes_later_keeps_off_the_others_nodes_unless_a_seat_is_free(self) -> None:
        world = change_worker(change_worker(build_training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(world.state.placement.workers[1], leaving="x", dead=True)
        world = world.with_desired(world.desired.with_worker(record))
        assert self.created(world) == {"j-w1-1": False, "j-w4-1": True}
        assert self.created(change_worker(build_training(), "j-w4-0", gone=True)) == {"j-w4-1": True}

    def test_they_avoid_suspects(self) -> None:
        world = change_worker(build_training(), "j-w4-0", gone=True)
        around = replace(world.cluster_view, suspects=frozenset({"node-7", "node-2"}))
        world = replace(world, cluster_view=around)
        world = world.with_desired(workforce.update_workforce(world, build_policy()))
        (pod,) = asked(world, CreatePod)
        assert isinstance(pod, CreatePod)
        assert pod.avoid == ("node-2", "node-7")

    def test_what_is_surplus_and_what_nobody_knows_goes(self) -> None:
        world = build_training()
        stray = world.workers[0].pod
        assert stray is not None
        record = replace(world.state.placement.workers[4], leaving="x", force=True)
        world = world.with_desired(world.desired.with_worker(record))
        world = replace(world, stray_pods=(replace(stray, name="j-w9-0", uid="stray"),))
        assert asked(world, DeletePod) == [DeletePod("j-w4-0", "uid-4", True), DeletePod("j-w9-0", "stray")]


def test_an_incident_is_written_where_it_is_not_yet_as_it_is() -> None:
    world = build_training()
    before = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW, NOW, NOW)
    now = replace(before, outcome=IncidentOutcome.RECOVERED)
    world = world.with_desired(world.desired.with_incident(now))
    assert asked(world, WriteIncident) == [WriteIncident(now, None)]
    assert asked(world, WriteIncident, i=before) == [WriteIncident(now, before)]
    assert asked(world, WriteIncident, i=now) == []


def test_quarantines_are_asked_for() -> None:
    world = build_training()
    wanted = QuarantineRequest("node-1", "uid", "why", "i")
    world = world.with_desired(world.desired.with_incidents(quarantine_requests=(wanted,)))
    assert asked(world, RequestQuarantine) == [RequestQuarantine(wanted)]


def test_the_network_is_guarded_where_the_platform_wants_it() -> None:
    assert asked(build_training(), ApplyNetworkPolicy) == [ApplyNetworkPolicy(1)]
    assert not [
        e
        for e in list_effects(build_training(), build_policy(applies_network_policy=False), {})
        if isinstance(e, ApplyNetworkPolicy)
    ]


class TestEnd:
    @pytest.mark.parametrize(("ttl", "after", "deleted"), [(60, 59, False), (60, 60, True), (None, 10_000, False)])
    def test_a_job_is_deleted_once_its_time_after_the_end_is_over(
        self, ttl: int | None, after: float, deleted: bool
    ) -> None:
        world = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=ttl)))
        ended = world.with_desired(world.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        assert asked(replace(ended, now=NOW + after), DeleteJob) == ([DeleteJob("u1d2c3")] if deleted else [])
        assert asked(replace(world, now=NOW + 10_000), DeleteJob) == [], "it has not ended"
