"""A node that jobs blame: who is believed, who is not, and what holds a quarantine back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.conditions import QuarantineCondition
from pacekeeper_operator.api.incident import ObjectRef
from pacekeeper_operator.api.names import LABEL_NO_QUARANTINE, LABEL_PROBE_GROUP, PAUSE_CONFIG_MAP, TAINT_QUARANTINE
from pacekeeper_operator.api.node_probe import InconclusiveReason, ProbeMetrics, ProbeResult
from pacekeeper_operator.api.node_quarantine import (
    NodeSuspicion,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    QuarantineVerdict,
    Witness,
)
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.nodes.node_quarantine import decide_quarantine_step
from pacekeeper_operator.decide.nodes.node_suspicion import (
    CONFIRMED_SUSPICION_HOLD_SECONDS,
    MAX_CONCURRENT_SUSPICION_PROBES,
    MAX_NODE_SIGNS,
    with_sign,
)
from pacekeeper_operator.decide.nodes.quarantine_steps import (
    ApproveQuarantine,
    DeleteQuarantine,
    EndProbe,
    ProbePod,
    Quarantine,
    QuarantineRules,
    QuarantineStep,
    RequeueAfter,
    StartProbe,
    TargetNode,
    WriteQuarantineStatus,
)
from pacekeeper_operator.decide.nodes.quarantine_usage import QuarantineContext, QuarantineUsage
from pacekeeper_operator.kube.client import (
    CONFIG_MAPS,
    EVENTS,
    NODE_OBJECTS,
    NODE_QUARANTINES,
    PODS,
    Listing,
    Object,
    Objects,
    ResourceKind,
)
from pacekeeper_operator.services import quarantine as service
from pacekeeper_operator.services.node_registry import NodeRegistry
from pacekeeper_operator.services.quarantine import NodeAccusation, find_decision, raise_suspicion
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.effect_results import QuarantineDecision
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.schema import find_schema_errors, read_schema

START = 1_000_000.0
NODE, DOWN = TargetNode("uid-1"), TargetNode("uid-1", ready=False)
HELD = TargetNode("uid-1", tainted=True, cordoned=True)
ELSEWHERE = (ProbePod("Succeeded", node="node-2", has_gpus=True),)
PASSED, FAILED = (
    ProbePod("Succeeded"),
    ProbePod("Failed", "GPU-a has 7 uncorrected memory errors", group_peers=ELSEWHERE),
)
NO_IMAGE = ProbePod("Pending", "ErrImagePull", InconclusiveReason.IMAGE)


def sign(at: float = START, namespace: str = "team-a", **changes: Any) -> NodeSuspicion:
    return replace(NodeSuspicion(namespace, f"gpt-r{at:.0f}", "XID 79", at), **changes)


def suspicion(*signs: NodeSuspicion, name: str = "node-1", **status: Any) -> Quarantine:
    spec = QuarantineSpec("XID 79", "uid-1", suspicions=signs or (sign(),))
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(**status), guarded=True)


def settle(
    quarantine: Quarantine,
    node: TargetNode = NODE,
    pod: ProbePod | None = None,
    around: QuarantineContext | None = None,
    now: float = START,
) -> tuple[Quarantine, QuarantineStep]:
    """What is written until something else is to be done, and that."""
    for _ in range(10):
        step = decide_quarantine_step(quarantine, node, pod, around or QuarantineContext(node_count=100), now)
        if not isinstance(step, WriteQuarantineStatus):
            return quarantine, step
        quarantine = replace(quarantine, status=step.status)
    raise AssertionError("it never comes to rest")


def condition(quarantine: Quarantine, type_: QuarantineCondition) -> tuple[str, str]:
    found = next(c for c in quarantine.status.conditions if c.type == type_)
    return found.status, found.reason


def after_a_probe(pod: ProbePod, *signs: NodeSuspicion, seconds: float = 5.0) -> Quarantine:
    """Suspected at START, probed, and the pod is gone."""
    begun, step = settle(suspicion(*signs))
    assert isinstance(step, StartProbe)
    told = decide_quarantine_step(begun, NODE, pod, QuarantineContext(), START + seconds)
    assert isinstance(told, WriteQuarantineStatus)
    return replace(begun, status=told.status)


class TestWitnesses:
    def test_a_jobs_word_only_brings_about_a_probe(self) -> None:
        begun, step = settle(suspicion())
        assert step == StartProbe("probe-q-node-1-1000000", share_gpus=True)
        assert begun.status.phase is QuarantinePhase.SUSPECTED
        assert condition(begun, QuarantineCondition.WITNESSED) == ("False", "NoWitness")
        assert decide_quarantine_step(begun, NODE, ProbePod("Running"), QuarantineContext(), START + 2) == RequeueAfter(
            1
        )

    def test_a_probe_that_passes_clears_the_node_and_keeps_the_next_ones_away(self) -> None:
        cleared = after_a_probe(PASSED)
        assert (cleared.status.phase, cleared.verdict) == (QuarantinePhase.CLEARED, QuarantineVerdict.CLEARED)
        assert decide_quarantine_step(cleared, NODE, PASSED, QuarantineContext(), START + 5) == EndProbe(
            "probe-q-node-1-1000000"
        )
        again = replace(
            cleared, spec=replace(cleared.spec, suspicions=with_sign(cleared.spec.suspicions, sign(START + 100)))
        )
        assert isinstance(decide_quarantine_step(again, NODE, None, QuarantineContext(), START + 101), RequeueAfter)
        assert decide_quarantine_step(again, NODE, None, QuarantineContext(), START + 606) == DeleteQuarantine()

    def test_a_probe_that_fails_confirms(self) -> None:
        failed = after_a_probe(FAILED, seconds=12)
        assert condition(failed, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert settle(failed, now=START + 12)[1] == ApproveQuarantine()

    def test_a_node_that_is_slow_is_confirmed_by_a_second_probe_that_says_so(self) -> None:
        """Whoever is busy on it for a moment, to have it quarantined or not, is not enough."""
        others = tuple(ProbePod("Succeeded", node=name, measurements=ProbeMetrics(0.001)) for name in ("a", "b"))
        slow = ProbePod("Succeeded", node="node-1", measurements=ProbeMetrics(0.002), group_peers=others)
        once = after_a_probe(slow)
        assert once.status.probes[-1].inconclusive is InconclusiveReason.SLOW
        assert condition(once, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        again, step = settle(once, now=START + 65)
        assert isinstance(step, StartProbe)
        twice, _ = settle(again, pod=slow, now=START + 70)
        assert condition(twice, QuarantineCondition.WITNESSED) == ("True", "Probe")
        well, _ = settle(again, pod=replace(slow, measurements=ProbeMetrics(0.001)), now=START + 70)
        assert well.status.phase is QuarantinePhase.CLEARED

    def test_a_node_that_somebody_computes_on_is_not_held_to_be_slow(self) -> None:
        others = tuple(
            ProbePod("Succeeded", node=n, measurements=ProbeMetrics(0.001, cores=8, idle_cores=8)) for n in "ab"
        )
        figures = ProbeMetrics(0.002, cores=8, idle_cores=1)
        looked = after_a_probe(ProbePod("Succeeded", node="node-1", measurements=figures, group_peers=others))
        assert looked.status.phase is QuarantinePhase.CLEARED

    def test_a_probe_before_a_jobs_start_is_a_witness(self) -> None:
        found, step = settle(suspicion(sign(witness=Witness.PROBE)), now=START + CONFIRMED_SUSPICION_HOLD_SECONDS)
        assert condition(found, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert step == ApproveQuarantine()
        said = with_sign((sign(),), sign(START + 1, witness=Witness.PROBE))
        assert [one.witness for one in said] == [Witness.PROBE], "it is news at once"

    def test_a_node_that_cannot_start_the_pod_in_time_is_confirmed(self) -> None:
        begun, _ = settle(suspicion())
        late, step = settle(begun, pod=ProbePod("Pending", group_peers=ELSEWHERE), now=START + 60)
        assert condition(late, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert step == EndProbe("probe-q-node-1-1000000")

    def test_the_nodes_own_condition_confirms_while_the_probe_still_waits(self) -> None:
        begun, _ = settle(suspicion())
        told, step = settle(begun, DOWN, ProbePod("Pending"), now=START + 40)
        assert step == EndProbe("probe-q-node-1-1000000")
        assert told.status.probes[-1].inconclusive is InconclusiveReason.SUPERSEDED
        approving, step = settle(told, DOWN, now=START + 40)
        assert step == ApproveQuarantine()
        assert condition(approving, QuarantineCondition.WITNESSED) == ("True", "NodeCondition")

    def test_a_job_that_says_that_the_node_is_not_ready_is_held_against_the_node(self) -> None:
        _, step = settle(suspicion(sign(witness=Witness.NODE_CONDITION)), NODE)
        assert isinstance(step, StartProbe)

    def test_vouched_series_need_no_probe_and_none_refutes_them(self) -> None:
        vouched = suspicion(sign(witness=Witness.GPU_SERIES))
        assert settle(vouched, now=START + 10)[1] == ApproveQuarantine()
        cleared = after_a_probe(PASSED)
        later = with_sign(cleared.spec.suspicions, sign(START + 100, witness=Witness.GPU_SERIES))
        found, step = settle(replace(cleared, spec=replace(cleared.spec, suspicions=later)), now=START + 110)
        assert step == ApproveQuarantine(), "the sign itself names the witness"
        begun = decide_quarantine_step(
            replace(found, spec=replace(found.spec, approved=True)), HELD, None, QuarantineContext(), START + 111
        )
        assert isinstance(begun, WriteQuarantineStatus)
        said = replace(found, status=begun.status)
        assert condition(said, QuarantineCondition.WITNESSED) == ("True", "GpuSeries")

    def test_a_witness_that_withdraws_leaves_the_question_to_a_probe(self) -> None:
        held, step = settle(suspicion(), DOWN, now=START + 1)
        assert isinstance(step, RequeueAfter)
        _, step = settle(held, NODE, now=START + 5)
        assert isinstance(step, StartProbe)

    def test_weak_signs_take_two_namespaces(self) -> None:
        weak = sign(weak=True)
        assert isinstance(settle(suspicion(weak))[1], RequeueAfter)
        assert isinstance(settle(suspicion(weak, sign(START + 9, "team-b", weak=True)), now=START + 9)[1], StartProbe)
        again = with_sign((weak,), sign(START + 100, weak=True))
        assert isinstance(settle(suspicion(*again), now=START + 100)[1], RequeueAfter), "one namespace is one voice"

    def test_what_nobody_confirms_is_dropped(self) -> None:
        dropped, step = settle(suspicion(sign(weak=True)), now=START + 600)
        assert (dropped.status.phase, step) == (QuarantinePhase.RELEASED, DeleteQuarantine())

    def test_a_probe_without_an_image_confirms_nothing_and_backs_off(self) -> None:
        begun, _ = settle(suspicion())
        told = decide_quarantine_step(begun, NODE, NO_IMAGE, QuarantineContext(), START + 60)
        assert isinstance(told, WriteQuarantineStatus)
        assert told.event == "ProbeInconclusive"
        vain = replace(begun, status=told.status)
        waiting, step = settle(vain, now=START + 61)
        assert isinstance(step, RequeueAfter)
        assert condition(waiting, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        assert "ErrImagePull" in (waiting.status.message or "")
        assert isinstance(settle(waiting, now=START + 121)[1], StartProbe)

    def test_probes_in_the_whole_cluster_are_bounded(self) -> None:
        others = tuple(
            suspicion(sign(START - 300), name=f"node-{i + 2}", probes=(ProbeResult("p", START - 1),))
            for i in range(MAX_CONCURRENT_SUSPICION_PROBES)
        )
        assert isinstance(
            settle(suspicion(), around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others[1:])))[1],
            StartProbe,
        )
        waiting, step = settle(suspicion(), around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others)))
        assert isinstance(step, RequeueAfter)
        assert "its turn" in (waiting.status.message or "")


class TestSigns:
    def test_a_namespaces_flood_changes_nothing(self) -> None:
        first = with_sign((), sign())
        assert with_sign(first, sign(START + 1)) == first
        assert with_sign(first, sign(START + 59)) == first
        assert with_sign(first, sign(START + 60)) != first

    def test_what_is_stronger_is_news_at_once(self) -> None:
        weak = with_sign((), sign(weak=True))
        (strong,) = with_sign(weak, sign(START + 1))
        assert not strong.weak
        (vouched,) = with_sign((strong,), sign(START + 2, witness=Witness.GPU_SERIES))
        assert vouched.witness is Witness.GPU_SERIES

    def test_many_namespaces_do_not_crowd_out_a_witness(self) -> None:
        signs = with_sign((), sign(witness=Witness.GPU_SERIES))
        for i in range(20):
            signs = with_sign(signs, sign(START + i, f"mob-{i}"))
        assert len(signs) == MAX_NODE_SIGNS
        assert signs[0].witness is Witness.GPU_SERIES


def confirmed(name: str, at: float = START, **status: Any) -> Quarantine:
    return suspicion(sign(at, witness=Witness.GPU_SERIES), name=name, **status)


def approved(quarantine: Quarantine) -> Quarantine:
    return replace(quarantine, spec=replace(quarantine.spec, approved=True))


class TestHeldBack:
    def test_for_a_moment_in_which_a_fault_of_many_shows(self) -> None:
        held, step = settle(confirmed("node-1"), now=START + 1)
        assert step == RequeueAfter(9)
        others = (confirmed("node-2", START + 4), confirmed("node-3", START + 8))
        tripped, _ = settle(
            held,
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others), node_count=100),
            now=START + 10,
        )
        assert (tripped.status.phase, tripped.verdict) == (QuarantinePhase.BLOCKED, QuarantineVerdict.BREAKER)

    def test_those_quarantined_earlier_do_not_trip_it(self) -> None:
        earlier = tuple(approved(confirmed(f"node-{i}", START - 3600 * i)) for i in (2, 3))
        _, step = settle(
            confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(earlier), node_count=100),
            now=START + 10,
        )
        assert step == ApproveQuarantine()

    def test_those_that_were_marked_within_the_window_do(self) -> None:
        lately = tuple(approved(confirmed(f"node-{i}", START - 20)) for i in (2, 3))
        tripped, _ = settle(
            confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(lately), node_count=100),
            now=START + 10,
        )
        assert tripped.verdict is QuarantineVerdict.BREAKER

    def test_it_clears_where_the_others_turn_out_well(self) -> None:
        blamed = tuple(suspicion(sign(), name=f"node-{i}") for i in (2, 3))
        tripped, _ = settle(
            confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(blamed), node_count=100),
            now=START + 10,
        )
        assert tripped.verdict is QuarantineVerdict.BREAKER
        cleared = tuple(replace(b, status=after_a_probe(PASSED, *b.spec.suspicions).status) for b in blamed)
        assert (
            settle(
                tripped,
                around=QuarantineContext(usage=QuarantineUsage.from_quarantines(cleared), node_count=100),
                now=START + 20,
            )[1]
            == ApproveQuarantine()
        )

    def test_a_mass_fault_that_stays_drops_all_and_quarantines_none(self) -> None:
        """The first that is dropped must not make the others look like faults of their own."""
        mass = [confirmed(f"node-{i}", START + i) for i in range(3)]
        alive = dict(enumerate(mass))
        for now in range(int(START) + 15, int(START) + 700, 5):
            for i, one in list(alive.items()):
                others = tuple(other for j, other in alive.items() if j != i)
                alive[i], step = settle(
                    one,
                    around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others), node_count=100),
                    now=float(now),
                )
                assert not isinstance(step, ApproveQuarantine)
                if isinstance(step, DeleteQuarantine):
                    del alive[i]
        assert not alive

    def test_a_pause_holds_it(self) -> None:
        held, _ = settle(
            confirmed("node-1"), around=QuarantineContext(node_count=100, pause_reason="maintenance"), now=START + 10
        )
        assert (held.status.phase, held.verdict) == (QuarantinePhase.BLOCKED, QuarantineVerdict.PAUSED)
        assert settle(held, now=START + 20)[1] == ApproveQuarantine()

    def test_the_budget_counts_what_is_quarantined_not_what_is_suspected(self) -> None:
        rules = QuarantineRules(max_nodes=1)
        others = (confirmed("node-2", START - 300),)
        assert (
            settle(
                confirmed("node-1"),
                around=QuarantineContext(rules, QuarantineUsage.from_quarantines(others), 100),
                now=START + 10,
            )[1]
            == ApproveQuarantine()
        )
        spent = QuarantineContext(rules, QuarantineUsage.from_quarantines([approved(others[0])]), 100)
        held, _ = settle(confirmed("node-1"), around=spent, now=START + 10)
        assert held.verdict is QuarantineVerdict.BUDGET_SPENT
        assert "1 of 100" in (held.status.message or "")

    def test_recommend_asks_a_person_and_does_not_flood_him(self) -> None:
        rules = QuarantineRules(acts=False, max_nodes=1)
        asked, step = settle(confirmed("node-1"), around=QuarantineContext(rules, node_count=100), now=START + 10)
        assert (asked.status.phase, asked.verdict) == (QuarantinePhase.PENDING, QuarantineVerdict.AWAITS_APPROVAL)
        assert isinstance(step, RequeueAfter)
        second, _ = settle(
            confirmed("node-2"),
            around=QuarantineContext(rules, QuarantineUsage.from_quarantines([asked]), 100),
            now=START + 10,
        )
        assert second.verdict is QuarantineVerdict.BUDGET_SPENT

    def test_a_person_need_not_wait_for_a_witness(self) -> None:
        held = replace(NODE, tainted=True, cordoned=True)
        found, _ = settle(approved(suspicion()), held)
        assert found.status.phase is QuarantinePhase.ACTIVE
        assert condition(found, QuarantineCondition.WITNESSED) == ("True", "Person")


def test_what_is_written_passes_the_definition() -> None:
    kinds = (settle(suspicion())[0], after_a_probe(PASSED), after_a_probe(FAILED), settle(confirmed("n"))[0])
    for found in kinds:
        assert find_schema_errors(found.status.to_patch(), read_schema("nodequarantines")["status"]) == []
        assert QuarantineStatus.parse(found.status.to_patch()) == found.status
        assert find_schema_errors(found.spec.to_json(), read_schema("nodequarantines")["spec"]) == []
        assert QuarantineSpec.parse(found.spec.to_json()) == found.spec


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (QuarantinePhase, ("status", "phase")),
        (Witness, ("spec", "suspicions", "items", "witness")),
        (InconclusiveReason, ("status", "probes", "items", "inconclusive")),
    ],
)
def test_the_definition_knows_the_same_words(words: Any, path: tuple[str, ...]) -> None:
    found = read_schema("nodequarantines")
    for name in path:
        found = found["items"] if name == "items" else found.get("properties", found)[name]
    assert found["enum"] == list(words)


class World(FakeCluster):
    """Six nodes, and a kubelet on each that treats probe pods as `kubelet` says."""

    def __init__(self) -> None:
        super().__init__()
        self.kubelet: dict[str, Object] = {}
        self.broken: set[str] = set()  # kinds that cannot be read
        self.lists: list[str] = []  # kinds, as they were listed
        for i in range(1, 7):
            self.node(f"node-{i}")

    def node(self, name: str, ready: str = "True", gpus: int = 0, labels: Mapping[str, str] | None = None) -> None:
        status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"nvidia.com/gpu": str(gpus)}}
        body = {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": dict(labels or {})},
            "spec": {},
            "status": status,
        }
        self._store(("nodes", "", name), body)

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        if kind.plural in self.broken:
            raise kopf.TemporaryError("the API server does not answer")
        return await super().find(kind, name, namespace)

    async def list_with_version(self, kind: ResourceKind, namespace: str = "", **named: Any) -> Listing:
        self.lists.append(kind.plural)
        return await super().list_with_version(kind, namespace, **named)

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        if kind is PODS and "nodeName" in body["spec"]:
            body = {**body, "status": self.kubelet.get(body["spec"]["nodeName"], {"phase": "Succeeded"})}
        return await super().create(kind, body, dry_run=dry_run)

    def held(self) -> set[str]:
        found = [body for (plural, _, _), body in self.objects.items() if plural == NODE_OBJECTS.plural]
        return {
            body["metadata"]["name"]
            for body in found
            if any(t["key"] == TAINT_QUARANTINE for t in body["spec"].get("taints") or ())
            and body["spec"].get("unschedulable")
        }

    def quarantine(self, name: str = "node-1") -> Quarantine | None:
        body = self.objects.get((NODE_QUARANTINES.plural, "", name))
        return None if body is None else Quarantine.parse(body)

    def events(self) -> Sequence[str]:
        return [body["reason"] for (plural, _, _), body in self.objects.items() if plural == EVENTS.plural]

    def probes(self) -> Objects:
        return [body for (plural, _, _), body in self.objects.items() if plural == PODS.plural]


def on_node_1(pod: Object) -> bool:
    return bool(pod["spec"]["nodeName"] == "node-1")


class Clock(OperatorRuntime):
    def __init__(self) -> None:
        super().__init__(0)
        self.time = START

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


SETTINGS = Settings(quarantine_mode=RemediationMode.ACT, quarantine_max_nodes=5, quarantine_max_share=0.5)


def blame(node: str = "node-1", namespace: str = "team-a", **changes: Any) -> NodeAccusation:
    said = NodeAccusation(node, f"uid-{node}", "XID 79", ObjectRef("gpt-r3-gpu-error", namespace), START)
    return replace(said, **changes)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def run(world: World, clock: Clock, seconds: float, settings: Settings = SETTINGS) -> None:
    """The loop over all quarantines for so long; it looks again when one of them wants it."""
    end = clock.time + seconds
    while clock.time < end:
        clock.time = min(end, clock.time + max(1.0, await service.reconcile_all(NodeRegistry(world, clock, settings))))


class TestService:
    async def test_a_forged_fault_touches_no_node(self, world: World, clock: Clock) -> None:
        assert (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        ).verdict is QuarantineVerdict.SUSPECTED
        await run(world, clock, 30)
        assert not world.held()
        assert "NodeCleared" in world.events()
        again = blame(incident=ObjectRef("again", "team-a"), found_at=clock.now())
        ruling = await raise_suspicion(NodeRegistry(world, clock, SETTINGS), again)
        assert ruling.verdict is QuarantineVerdict.CLEARED
        await run(world, clock, 600)
        assert world.quarantine() is None
        assert not world.probes()

    async def test_a_flood_of_faults_brings_one_probe_in_ten_minutes(self, world: World, clock: Clock) -> None:
        names = set()
        for i in range(300):
            await raise_suspicion(
                NodeRegistry(world, clock, SETTINGS),
                blame(incident=ObjectRef(f"i-{i}", "team-a"), found_at=clock.now()),
            )
            await run(world, clock, 2)
            found = world.quarantine()
            assert found is not None
            names |= {probe.pod for probe in found.status.probes}
        assert len(names) == 1
        assert not world.held()

    async def test_a_bad_node_is_quarantined_once_the_probe_says_so(self, world: World, clock: Clock) -> None:
        state = {"terminated": {"exitCode": 1, "message": "3 of 4 GPUs answer"}}
        world.kubelet["node-1"] = {"phase": "Failed", "containerStatuses": [{"name": "probe", "state": state}]}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 9)
        assert not world.held()
        await run(world, clock, 3)
        assert world.held() == {"node-1"}
        found = await find_decision(NodeRegistry(world, clock, SETTINGS), "node-1", "uid-node-1")
        assert found == QuarantineDecision(QuarantineVerdict.QUARANTINED, "node-1 is quarantined")
        assert {"ProbeFailed", "NodeQuarantined"} <= set(world.events())

    async def test_a_node_that_is_not_ready_is_quarantined_without_a_probe(self, world: World, clock: Clock) -> None:
        world.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 12)
        assert world.held() == {"node-1"}
        assert not world.probes()

    async def test_a_private_registry_without_a_secret_quarantines_nobody(self, world: World, clock: Clock) -> None:
        waiting = {"name": "probe", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no basic auth"}}}
        world.kubelet["node-1"] = {"phase": "Pending", "containerStatuses": [waiting]}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 100)
        found = world.quarantine()
        assert found is not None
        assert condition(found, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        assert "no basic auth" in (found.status.message or "")
        await run(world, clock, 600)
        assert not world.held()

    @pytest.mark.parametrize("check", ["network", "driver"])
    async def test_what_probes_fail_on_every_node_convicts_none(self, world: World, clock: Clock, check: str) -> None:
        """A forged XID is enough to have a node probed."""
        words = json.dumps({"unfit": "it does not work", "check": check, "gpus": 1})
        state = {"terminated": {"exitCode": 1, "message": words}}
        for i in range(1, 7):
            world.node(f"node-{i}", gpus=8)
            status = [{"name": "probe", "state": state}]
            world.kubelet[f"node-{i}"] = {"phase": "Failed", "containerStatuses": status}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 20)
        found = world.quarantine()
        assert found is not None
        assert found.status.probes[-1].inconclusive is InconclusiveReason.SHARED_FAILURE
        assert "fails in the same way" in (found.status.message or "")
        assert find_schema_errors(found.status.to_patch(), read_schema("nodequarantines")["status"]) == []
        await run(world, clock, 700)
        assert not world.held()

    async def test_the_others_of_a_circle_look_at_one_gpu_each_where_one_is_free(
        self, world: World, clock: Clock
    ) -> None:
        for i in range(1, 4):
            world.node(f"node-{i}", gpus=8)
        for i in range(4, 7):
            world.objects.pop(("nodes", "", f"node-{i}"))
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        spec = {"nodeName": "node-3", "containers": [limits]}
        world._store(("pods", "team-b", "w"), {"metadata": {"name": "w", "namespace": "team-b"}, "spec": spec})
        world.kubelet |= {f"node-{i}": {"phase": "Running", "podIP": "10.0.0.1"} for i in (1, 2, 3)}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 15)
        asked = {
            pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
            for pod in world.probes()
            if LABEL_PROBE_GROUP in pod["metadata"].get("labels", {})
        }
        assert asked == {"node-1": "8", "node-2": "1", "node-3": None}

    async def test_power_lost_at_once_touches_no_node(self, world: World, clock: Clock) -> None:
        for i in (1, 2, 3):
            world.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
            await run(world, clock, 2)
        await run(world, clock, 700)
        assert not world.held()
        assert await world.list(NODE_QUARANTINES) == []

    async def lose_power(self, world: World, clock: Clock) -> None:
        """Of three nodes. Their kubelets are away, and their jobs' words come within seconds."""
        for i in (1, 2, 3):
            world.node(f"node-{i}", ready="Unknown")
            world.kubelet[f"node-{i}"] = {"phase": "Pending"}
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
        await run(world, clock, 90)
        assert not world.held()

    def come_back(self, world: World, name: str, pod: Object | None = None) -> None:
        world.node(name)
        world.kubelet[name] = pod or {"phase": "Succeeded"}

    async def test_the_first_that_is_back_shows_nothing_of_those_that_still_boot(
        self, world: World, clock: Clock
    ) -> None:
        await self.lose_power(world, clock)
        for i, pause in ((1, 100), (2, 400), (3, 30)):
            self.come_back(world, f"node-{i}")
            for late in range(i + 1, 4):  # jobs say it again: that makes it no other fault
                said = ObjectRef(f"again-{i}-{late}", "team-a")
                await raise_suspicion(
                    NodeRegistry(world, clock, SETTINGS), blame(f"node-{late}", incident=said, found_at=clock.now())
                )
            await run(world, clock, pause)
            assert not world.held()
            found = world.quarantine(f"node-{i}")
            assert found is not None
            assert found.verdict is QuarantineVerdict.CLEARED
        await run(world, clock, 700)
        assert not world.held()
        assert await world.list(NODE_QUARANTINES) == []

    async def test_one_that_comes_back_broken_is_quarantined_once_the_others_are_settled(
        self, world: World, clock: Clock
    ) -> None:
        await self.lose_power(world, clock)
        state = {"terminated": {"exitCode": 1, "message": "3 of 4 GPUs answer"}}
        broken = {"phase": "Failed", "containerStatuses": [{"name": "probe", "state": state}]}
        self.come_back(world, "node-1", broken)
        await run(world, clock, 100)
        assert not world.held(), "the others may come back in the same way"
        for name in ("node-2", "node-3"):
            self.come_back(world, name)
        await run(world, clock, 300)
        assert world.held() == {"node-1"}

    async def test_a_probe_that_failed_while_many_were_away_is_asked_again(self, world: World, clock: Clock) -> None:
        """The API server has not noticed yet that the nodes are not Ready."""
        for i in (1, 2, 3):
            world.kubelet[f"node-{i}"] = {"phase": "Pending"}
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
        await run(world, clock, 70)
        assert "ProbeFailed" in world.events()
        for i in (1, 2, 3):
            self.come_back(world, f"node-{i}")
            await run(world, clock, 70)
            assert not world.held()
        await run(world, clock, 200)
        assert not world.held()
        assert {found.verdict for i in (1, 2, 3) if (found := world.quarantine(f"node-{i}"))} <= {
            QuarantineVerdict.CLEARED
        }

    async def test_jobs_that_ask_on_and_on_do_not_wear_the_breaker_down(self, world: World, clock: Clock) -> None:
        """Each suspicion is dropped in its turn; what is said again then is no new sign."""
        said = []
        for i, pause in ((1, 20), (2, 20), (3, 0)):
            world.node(f"node-{i}", ready="Unknown")
            said.append(blame(f"node-{i}", found_at=clock.now()))
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), said[-1])
            clock.time += pause / 4
        rulings = []
        for _ in range(300):
            rulings = [await raise_suspicion(NodeRegistry(world, clock, SETTINGS), words) for words in said]
            await run(world, clock, 5)
            assert not world.held()
        assert {ruling.verdict for ruling in rulings} == {QuarantineVerdict.CLEARED}
        assert await world.list(NODE_QUARANTINES) == []

    async def test_who_holds_all_gpus_of_two_nodes_cannot_keep_the_breaker_tripped(
        self, world: World, clock: Clock
    ) -> None:
        """Nobody can look at these nodes, and a namespace blames them without end."""
        refusal = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Pod was rejected"}
        world.kubelet |= {"node-2": refusal, "node-3": refusal}
        fleet = NodeRegistry(world, clock, SETTINGS)
        await raise_suspicion(fleet, blame("node-1", witness=Witness.GPU_SERIES))
        for i in range(4):
            for node in ("node-2", "node-3"):
                said = ObjectRef(f"{node}-{i}", "team-b")
                await raise_suspicion(fleet, blame(node, incident=said, found_at=clock.now()))
            await run(world, clock, 30)
            if i == 0:
                found = await find_decision(NodeRegistry(world, clock, SETTINGS), "node-1", "uid-node-1")
                assert found is not None
                assert found.verdict is QuarantineVerdict.BREAKER, "they count as long as something may still show"
        assert world.held() == {"node-1"}

    async def test_the_third_node_after_two_earlier_ones_is_quarantined(self, world: World, clock: Clock) -> None:
        for i in (1, 2, 3):
            world.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
            await run(world, clock, 90)
        assert world.held() == {"node-1", "node-2", "node-3"}

    async def test_the_budget_lets_one_through(self, world: World, clock: Clock) -> None:
        tight = replace(SETTINGS, quarantine_max_nodes=1)
        for i in (1, 2):
            world.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(NodeRegistry(world, clock, tight), blame(f"node-{i}", found_at=clock.now()))
        await run(world, clock, 20, tight)
        assert world.held() == {"node-1"}
        ruling = await find_decision(NodeRegistry(world, clock, SETTINGS), "node-2", "uid-node-2")
        assert ruling is not None
        assert ruling.verdict is QuarantineVerdict.BUDGET_SPENT

    @pytest.mark.parametrize("broken", [False, True])
    async def test_a_pause_that_cannot_be_read_is_a_pause(self, world: World, clock: Clock, broken: bool) -> None:
        world.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        if broken:
            world.broken.add(CONFIG_MAPS.plural)
        else:
            world._store(("configmaps", SETTINGS.namespace, PAUSE_CONFIG_MAP), {"metadata": {"name": PAUSE_CONFIG_MAP}})
        await run(world, clock, 20)
        assert not world.held()
        assert (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame("node-2", found_at=clock.now()))
        ).verdict is QuarantineVerdict.PAUSED
        assert world.quarantine("node-2") is None
        found = await find_decision(NodeRegistry(world, clock, SETTINGS), "node-1", "uid-node-1")
        assert found is not None
        assert found.verdict is QuarantineVerdict.PAUSED

    async def test_many_blamed_nodes_cost_one_look_at_the_cluster(self, world: World, clock: Clock) -> None:
        for i in range(7, 40):
            world.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
        await run(world, clock, 15)
        world.lists.clear()
        await service.reconcile_all(NodeRegistry(world, clock, SETTINGS))
        assert sorted(world.lists) == ["nodequarantines", "nodes"]

    async def test_no_node_is_touched_upon_what_a_look_had_read_before(self, world: World, clock: Clock) -> None:
        world.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        fleet = NodeRegistry(world, clock, SETTINGS)
        await fleet.refresh()
        for other in ("node-2", "node-3"):
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(other))
        clock.time = START + 10
        await service.reconcile_node(fleet, "node-1")
        assert not world.held()
        assert (
            await find_decision(NodeRegistry(world, clock, SETTINGS), "node-1", "uid-node-1")
        ).verdict is QuarantineVerdict.BREAKER  # type: ignore[union-attr]

    async def test_probes_at_once_are_bounded_within_one_look(self, world: World, clock: Clock) -> None:
        for i in range(7, 40):
            world.node(f"node-{i}")
            world.kubelet[f"node-{i}"] = {"phase": "Running"}
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(f"node-{i}", found_at=clock.now()))
        await run(world, clock, 3)
        assert (
            len({probe["metadata"]["labels"][LABEL_PROBE_GROUP] for probe in world.probes()})
            == MAX_CONCURRENT_SUSPICION_PROBES
        )

    async def test_what_is_not_even_suspected(self, world: World, clock: Clock) -> None:
        world.node("node-2", labels={LABEL_NO_QUARANTINE: ""})
        assert (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame("node-2"))
        ).verdict is QuarantineVerdict.OPTED_OUT
        assert (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(uid="another"))
        ).verdict is QuarantineVerdict.UNKNOWN_NODE
        assert (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame("node-99"))
        ).verdict is QuarantineVerdict.UNKNOWN_NODE
        assert await world.list(NODE_QUARANTINES) == []

    async def test_a_second_namespace_adds_its_word(self, world: World, clock: Clock) -> None:
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(is_weak=True))
        await run(world, clock, 5)
        assert not world.quarantine().status.probes  # type: ignore[union-attr]  # it is there
        words = (
            await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(namespace="team-b", is_weak=True))
        ).message
        assert "team-a" not in words
        await run(world, clock, 1)
        assert world.quarantine().status.probes  # type: ignore[union-attr]

    async def test_a_probe_asks_for_the_gpus_that_are_free(self, world: World, clock: Clock) -> None:
        world.node("node-1", gpus=8)
        limits = {"resources": {"limits": {"nvidia.com/gpu": "6"}}}
        spec = {"nodeName": "node-1", "containers": [limits]}
        world._store(("pods", "team-b", "w"), {"metadata": {"name": "w", "namespace": "team-b"}, "spec": spec})
        world.kubelet["node-1"] = {"phase": "Running"}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 5)
        (probe,) = [pod for pod in world.probes() if pod["metadata"].get("labels") and on_node_1(pod)]
        assert probe["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert probe["spec"]["containers"][0]["command"][-1] == "--gpus=2"

    async def test_probes_get_the_installations_pull_secrets(self, world: World, clock: Clock) -> None:
        private = replace(SETTINGS, image_pull_secrets="registry, other", image_pull_policy="Always")
        world.kubelet["node-1"] = {"phase": "Running"}
        await raise_suspicion(NodeRegistry(world, clock, private), blame())
        await run(world, clock, 5, private)
        (probe,) = [pod for pod in world.probes() if on_node_1(pod)]
        assert probe["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
        assert probe["spec"]["containers"][0]["imagePullPolicy"] == "Always"

    async def test_an_operator_that_dies_goes_on_where_it_stood(self, world: World, clock: Clock) -> None:
        """Nothing is kept in memory: each look is that of another operator."""
        world.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        step_by_step = service.MAX_STEPS_PER_RECONCILE
        service.MAX_STEPS_PER_RECONCILE = 1
        try:
            await run(world, clock, 30)
        finally:
            service.MAX_STEPS_PER_RECONCILE = step_by_step
        assert world.held() == {"node-1"}

    async def test_all_are_released_and_all_suspicions_end(self, world: World, clock: Clock) -> None:
        world.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
        await run(world, clock, 15)
        assert world.held() == {"node-1"}
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame("node-2", is_weak=True))
        await service.release_all(world, clock, 30)
        assert not world.held()
        assert await world.list(NODE_QUARANTINES) == []

    async def test_while_one_ends_nothing_new_is_said_into_it(self, world: World, clock: Clock) -> None:
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(is_weak=True))
        await run(world, clock, 1)
        ended = world.quarantine()
        assert ended is not None
        dropped = {"phase": "Released", "message": "the suspicion is dropped"}
        await world.patch(NODE_QUARANTINES, "node-1", {"status": dropped})
        ruling = await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame(namespace="team-b"))
        assert ruling.verdict is QuarantineVerdict.RELEASING


@pytest.mark.parametrize(
    ("ready", "tainted", "suspected", "wakes"),
    [
        ("True", False, True, False),
        ("Unknown", False, True, True),
        ("True", True, False, True),
        ("Unknown", False, False, False),
    ],
)
async def test_nodes_that_concern_quarantines_wake_the_loop(
    world: World, clock: Clock, ready: str, tainted: bool, suspected: bool, wakes: bool
) -> None:
    if suspected:
        await raise_suspicion(NodeRegistry(world, clock, SETTINGS), blame())
    fleet = NodeRegistry(world, clock, SETTINGS)
    await fleet.refresh()
    fleet.changed_nodes.clear()
    world.node("node-1", ready=ready)
    body = await world.get(NODE_OBJECTS, "node-1")
    body["spec"]["taints"] = [{"key": TAINT_QUARANTINE, "effect": "NoSchedule"}] if tainted else []
    fleet.nodes.apply_event(body, deleted=False)
    assert bool(fleet.changed_nodes) is wakes
