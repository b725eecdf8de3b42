"""What a draft asks for once it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_operator.api import Cause, Class, Outcome, RunPolicySpec
from pacekeeper_operator.decide import workforce
from pacekeeper_operator.decide.think import effects
from pacekeeper_operator.effects import (
    AskForQuarantine,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    GuardNetwork,
    TryTemplate,
    WriteIncident,
)
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.state import Incident, WantedQuarantine
from tests.support.worlds import NOW, change_worker, fresh, job, policy, training


def asked(world: Observation, kind: type[Effect], **written: Incident) -> list[Effect]:
    found = effects(world, policy(), written)
    return [effect for effect in found if isinstance(effect, kind)]


class TestTemplate:
    def test_is_tried_once_for_each_generation_before_the_job_has_members(self) -> None:
        accepted = fresh()
        asks = accepted.with_draft(accepted.draft.with_placement(template_accepted=0))
        assert asked(asks, TryTemplate) == [TryTemplate(1)]
        assert asked(accepted, TryTemplate) == []
        trains = training()
        assert asked(trains.with_draft(trains.draft.with_placement(template_accepted=0)), TryTemplate) == []
        assert asked(asks.with_draft(asks.draft.with_life(completed_at=NOW)), TryTemplate) == []


class TestPods:
    def created(self, world: Observation) -> dict[str, bool]:
        """By name, whether it is made as a spare."""
        world = world.with_draft(workforce.step(world, policy()))
        pods = asked(world, CreatePod)
        return {effect.worker.name: effect.spare for effect in pods if isinstance(effect, CreatePod)}

    def test_first_workers_hold_ranks_and_those_beyond_are_spares(self) -> None:
        start = fresh(2, 1)
        start = start.with_draft(workforce.step(start, policy()))
        assert self.created(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}

    def test_whoever_comes_later_prefers_nodes_without_incidents_and_no_first_worker_does(self) -> None:
        def preferring(world: Observation) -> dict[str, bool]:
            around = replace(world.surroundings, unreliable_nodes=("node-7",))
            world = replace(world, surroundings=around).with_draft(workforce.step(world, policy()))
            pods = asked(world, CreatePod)
            return {one.worker.name: bool(one.unreliable) for one in pods if isinstance(one, CreatePod)}

        start = fresh(2, 1)
        start = start.with_draft(workforce.step(start, policy()))
        assert preferring(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}
        world = change_worker(change_worker(training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(world.state.placement.workers[1], leaving="x", dead=True)
        assert preferring(world.with_draft(world.draft.with_worker(record))) == {"j-w1-1": True, "j-w4-1": True}

    def test_whoever_comes_later_keeps_off_the_others_nodes_unless_a_seat_is_free(self) -> None:
        world = change_worker(change_worker(training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(world.state.placement.workers[1], leaving="x", dead=True)
        world = world.with_draft(world.draft.with_worker(record))
        assert self.created(world) == {"j-w1-1": False, "j-w4-1": True}
        assert self.created(change_worker(training(), "j-w4-0", gone=True)) == {"j-w4-1": True}

    def test_they_avoid_suspects(self) -> None:
        world = change_worker(training(), "j-w4-0", gone=True)
        around = replace(world.surroundings, suspects=frozenset({"node-7", "node-2"}))
        world = replace(world, surroundings=around)
        world = world.with_draft(workforce.step(world, policy()))
        (pod,) = asked(world, CreatePod)
        assert isinstance(pod, CreatePod)
        assert pod.avoid == ("node-2", "node-7")

    def test_what_is_surplus_and_what_nobody_knows_goes(self) -> None:
        world = training()
        stray = world.workers[0].pod
        assert stray is not None
        record = replace(world.state.placement.workers[4], leaving="x", force=True)
        world = world.with_draft(world.draft.with_worker(record))
        world = replace(world, strays=(replace(stray, name="j-w9-0", uid="stray"),))
        assert asked(world, DeletePod) == [DeletePod("j-w4-0", "uid-4", True), DeletePod("j-w9-0", "stray")]


def test_an_incident_is_written_where_it_is_not_yet_as_it_is() -> None:
    world = training()
    before = Incident("i", Cause.HANG, Class.UNKNOWN, 1, "m", NOW, NOW, NOW)
    now = replace(before, outcome=Outcome.RECOVERED)
    world = world.with_draft(world.draft.with_incident(now))
    assert asked(world, WriteIncident) == [WriteIncident(now, None)]
    assert asked(world, WriteIncident, i=before) == [WriteIncident(now, before)]
    assert asked(world, WriteIncident, i=now) == []


def test_quarantines_are_asked_for() -> None:
    world = training()
    wanted = WantedQuarantine("node-1", "uid", "why", "i")
    world = world.with_draft(world.draft.with_incidents(quarantines=(wanted,)))
    assert asked(world, AskForQuarantine) == [AskForQuarantine(wanted)]


def test_the_network_is_guarded_where_the_platform_wants_it() -> None:
    assert asked(training(), GuardNetwork) == [GuardNetwork(1)]
    assert not [e for e in effects(training(), policy(guards_network=False), {}) if isinstance(e, GuardNetwork)]


class TestEnd:
    @pytest.mark.parametrize(("ttl", "after", "deleted"), [(60, 59, False), (60, 60, True), (None, 10_000, False)])
    def test_a_job_is_deleted_once_its_time_after_the_end_is_over(
        self, ttl: int | None, after: float, deleted: bool
    ) -> None:
        world = training(job=job(run_policy=RunPolicySpec(ttl_seconds_after_finished=ttl)))
        ended = world.with_draft(world.draft.with_life(completed_at=NOW, stopped_at=NOW))
        assert asked(replace(ended, now=NOW + after), DeleteJob) == ([DeleteJob("u1d2c3")] if deleted else [])
        assert asked(replace(world, now=NOW + 10_000), DeleteJob) == [], "it has not ended"
