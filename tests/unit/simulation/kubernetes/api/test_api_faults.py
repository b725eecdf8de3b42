"""Faults and moments are values: they can be written down, read back, drawn by seed, and come when they say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from pacekeeper_operator.api.training_job import JobPhase
from simulation import generator
from simulation.faults.context import FaultContext, is_operator_write
from simulation.faults.fault import Cost, Fault
from simulation.faults.machines import NodeIsCutOff, NodePartition
from simulation.faults.targets import TargetMissing, TargetRole
from simulation.faults.triggers import AfterFault, AfterWrite, BeforeWrite, PhaseBegins, RoundGathers, Trigger
from simulation.faults.value_codec import derive_kind, find_members, from_json, to_json
from simulation.kubernetes.api.api_faults import RequestOutcome
from simulation.kubernetes.api.api_server import ApiServer
from simulation.kubernetes.api.requests import Request, RequestStage
from simulation.loop import VirtualLoop
from simulation.network import SimulatedNetwork
from simulation.run_log import RunLog
from simulation.schedule import Schedule


def test_every_fault_can_be_drawn_written_down_and_read_back() -> None:
    random = Random(3)
    for cls, (weight, make) in generator.FAULT_MENU.items():
        for _ in range(20):
            drawn = make(random)
            assert type(drawn) is cls
            assert from_json(Fault, json.loads(json.dumps(to_json(drawn)))) == drawn
        assert weight > 0


def test_the_generator_draws_from_the_whole_vocabulary() -> None:
    assert set(find_members(Fault).values()) == set(generator.FAULT_MENU)


def test_what_is_as_by_default_is_not_written_down() -> None:
    assert to_json(NodeIsCutOff()) == {"kind": "node-is-cut-off"}
    written = to_json(NodeIsCutOff(role=TargetRole.SPARE, partition=NodePartition.API))
    assert written == {"kind": "node-is-cut-off", "role": "spare", "partition": "api"}


def test_an_enumeration_without_words_is_written_by_name() -> None:
    next_request = find_members(Fault)["next-request"]
    written = to_json(next_request(outcome=RequestOutcome.LATE))  # type: ignore[call-arg]
    assert written == {"kind": "next-request", "outcome": "LATE"}


def test_who_names_an_unknown_fault_learns_of_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no fault 'flood'; there are: .*rank-crashes"):
        from_json(Fault, {"kind": "flood"})


def test_only_what_can_be_healed_lasts() -> None:
    vocabulary = find_members(Fault)
    assert vocabulary["power-fails"].can_heal()
    assert vocabulary["job-edited"].can_heal()
    assert not vocabulary["rank-crashes"].can_heal()


@dataclass
class FakeWorld:
    """As much of a world as moments need."""

    loop: VirtualLoop = field(default_factory=lambda: VirtualLoop())  # type: ignore[abstract]

    def __post_init__(self) -> None:
        self.log = RunLog(self.loop.time)
        self.network = SimulatedNetwork(self.loop, Random(1))
        self.api = ApiServer(self)
        self.api.create("namespaces", {"metadata": {"name": "team"}})

    def create_random(self, purpose: str) -> Random:
        return Random(purpose)

    def wall_time(self, _place: str = "") -> float:
        return 1.8e9

    def now(self) -> float:
        return self.loop.time()

    def call_after(self, seconds: float, call: Any, *arguments: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, call, *arguments)

    def pass_time(self, seconds: float) -> None:
        async def wait() -> None:
            done = self.loop.create_future()
            self.loop.call_later(seconds, done.set_result, None)
            await done

        self.loop.run(wait())


class TriggerHarness:
    """A scene, and when strokes have struck there."""

    def __init__(self, *moments: Trigger) -> None:
        self.world = FakeWorld()
        self.context = FaultContext(cast(Any, self.world), Schedule(0).jobs)
        self.injected: dict[int, float] = {}
        for place, moment in enumerate(moments):
            moment.arm(self.context, lambda place=place: self.inject(place))  # type: ignore[misc]

    def inject(self, place: int) -> None:
        self.injected[place] = self.world.now()
        self.context.mark_injected(place)

    def send_request(self, method: str, path: str, stage: RequestStage, status: int = 0, **query: str) -> None:
        self.world.api.notify_observers(Request("operator-0", method, path, query, None, "", stage, status))


PODS = "/api/v1/namespaces/team/pods"
STATES = "/apis/pacekeeper.dev/v1alpha1/namespaces/team/trainingjobstates/a"


def test_the_nth_write_of_a_kind_is_counted_when_it_is_sent_and_when_it_is_done() -> None:
    stage = TriggerHarness(BeforeWrite(2), AfterWrite(1, plural="pods"))
    stage.send_request("PUT", STATES, RequestStage.SENT)
    stage.send_request("PUT", STATES, RequestStage.APPLIED, 200)
    assert not stage.injected
    stage.send_request("POST", PODS, RequestStage.SENT)
    assert list(stage.injected) == [0]
    stage.send_request("POST", PODS, RequestStage.APPLIED, 403)
    assert list(stage.injected) == [0], "what was refused is no write"
    stage.send_request("POST", PODS, RequestStage.APPLIED, 201)
    assert list(stage.injected) == [0, 1]


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [("GET", PODS, {}), ("POST", PODS, {"dryRun": "All"}), ("PUT", "/apis/coordination.k8s.io/v1/leases/x", {})],
)
def test_what_changes_nothing_that_anybody_decides_upon_is_no_write(
    method: str, path: str, query: dict[str, str]
) -> None:
    assert not is_operator_write(Request("operator-0", method, path, query, None, ""))
    assert is_operator_write(Request("operator-0", "POST", PODS, {}, None, ""))


def test_one_stroke_comes_so_many_seconds_after_another() -> None:
    stage = TriggerHarness(AfterWrite(1), AfterFault(0, 2.5))
    stage.world.pass_time(1.0)
    stage.send_request("POST", PODS, RequestStage.APPLIED, 201)
    stage.world.pass_time(5.0)
    assert stage.injected == {0: 1.0, 1: 3.5}


def job(phase: str) -> dict[str, Any]:
    return {"status": {"phase": phase}}


def test_a_phase_begins_when_it_was_another_one_before() -> None:
    stage = TriggerHarness(PhaseBegins(2, phase=JobPhase.RECOVERING))
    api = stage.world.api
    api.create("trainingjobs", stage.context.get_job_settings(0).build_manifest())
    for phase in ("Recovering", "Recovering", "Running"):
        api.patch("trainingjobs", "a", "team", job(phase), subresource="status")
    assert not stage.injected
    api.patch("trainingjobs", "a", "team", job("Recovering"), subresource="status")
    assert stage.injected


def test_a_round_gathers_when_the_plans_membership_grows() -> None:
    stage = TriggerHarness(RoundGathers(2))
    for version, membership in enumerate((1, 1, 2)):
        before = stage.world.api.get("trainingjobstates", "a", "team")
        body = {
            "apiVersion": "pacekeeper.dev/v1alpha1",
            "kind": "TrainingJobState",
            "metadata": {"name": "a", "namespace": "team"},
            "schemaVersion": 1,
            "plan": {"version": version, "membership": membership},
            "state": {},
        }
        if before is None:
            stage.world.api.create("trainingjobstates", body)
        else:
            body["metadata"] = before["metadata"]
            stage.world.api.update("trainingjobstates", body)
        assert bool(stage.injected) == (membership == 2)


def test_whom_a_fault_is_for_may_not_be_there() -> None:
    with pytest.raises(TargetMissing, match="no job a"):
        TriggerHarness().context.get_job(0)


def test_what_never_heals_says_what_a_job_may_lack_for_it() -> None:
    drawn = [generator.generate_schedule(seed) for seed in range(400)]
    costs = Counter(cost for schedule in drawn for cost in schedule.costs)
    assert costs[Cost.METRICS] > 0
    assert costs[Cost.STATUS] > 0
    assert all(derive_kind(type(stroke.fault)) for schedule in drawn for stroke in schedule.injections)
