"""A node that jobs accuse: which evidence counts, and what delays a quarantine."""

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


def build_suspicion(at: float = START, namespace: str = "team-a", **changes: Any) -> NodeSuspicion:
    return replace(NodeSuspicion(namespace, f"gpt-r{at:.0f}", "XID 79", at), **changes)


def build_quarantine(*signs: NodeSuspicion, name: str = "node-1", **status: Any) -> Quarantine:
    spec = QuarantineSpec("XID 79", "uid-1", suspicions=signs or (build_suspicion(),))
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(**status), guarded=True)


def run_until_step(
    quarantine: Quarantine,
    node: TargetNode = NODE,
    pod: ProbePod | None = None,
    around: QuarantineContext | None = None,
    now: float = START,
) -> tuple[Quarantine, QuarantineStep]:
    """Apply status writes until another step follows; return the quarantine and that step."""
    for _ in range(10):
        step = decide_quarantine_step(quarantine, node, pod, around or QuarantineContext(node_count=100), now)
        if not isinstance(step, WriteQuarantineStatus):
            return quarantine, step
        quarantine = replace(quarantine, status=step.status)
    raise AssertionError("the status writes do not end")


def find_condition(quarantine: Quarantine, type_: QuarantineCondition) -> tuple[str, str]:
    found = next(c for c in quarantine.status.conditions if c.type == type_)
    return found.status, found.reason


def build_after_probe(pod: ProbePod, *signs: NodeSuspicion, seconds: float = 5.0) -> Quarantine:
    """Build a quarantine that was suspected at START and probed, and whose pod is gone."""
    probing, step = run_until_step(build_quarantine(*signs))
    assert isinstance(step, StartProbe)
    probed = decide_quarantine_step(probing, NODE, pod, QuarantineContext(), START + seconds)
    assert isinstance(probed, WriteQuarantineStatus)
    return replace(probing, status=probed.status)


class TestWitness:
    def test_a_jobs_suspicion_only_causes_a_probe(self) -> None:
        probing, step = run_until_step(build_quarantine())
        assert step == StartProbe("probe-q-node-1-1000000", share_gpus=True)
        assert probing.status.phase is QuarantinePhase.SUSPECTED
        assert find_condition(probing, QuarantineCondition.WITNESSED) == ("False", "NoWitness")
        assert decide_quarantine_step(
            probing, NODE, ProbePod("Running"), QuarantineContext(), START + 2
        ) == RequeueAfter(1)

    def test_a_probe_that_passes_clears_the_node_and_delays_the_next_probe(self) -> None:
        cleared = build_after_probe(PASSED)
        assert (cleared.status.phase, cleared.verdict) == (QuarantinePhase.CLEARED, QuarantineVerdict.CLEARED)
        assert decide_quarantine_step(cleared, NODE, PASSED, QuarantineContext(), START + 5) == EndProbe(
            "probe-q-node-1-1000000"
        )
        again = replace(
            cleared,
            spec=replace(cleared.spec, suspicions=with_sign(cleared.spec.suspicions, build_suspicion(START + 100))),
        )
        assert isinstance(decide_quarantine_step(again, NODE, None, QuarantineContext(), START + 101), RequeueAfter)
        assert decide_quarantine_step(again, NODE, None, QuarantineContext(), START + 606) == DeleteQuarantine()

    def test_a_probe_that_fails_confirms(self) -> None:
        failed = build_after_probe(FAILED, seconds=12)
        assert find_condition(failed, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert run_until_step(failed, now=START + 12)[1] == ApproveQuarantine()

    def test_a_slow_node_is_confirmed_only_by_a_second_slow_probe(self) -> None:
        """A pod that is busy on it for a moment, on purpose or not, is not enough."""
        others = tuple(ProbePod("Succeeded", node=name, measurements=ProbeMetrics(0.001)) for name in ("a", "b"))
        slow = ProbePod("Succeeded", node="node-1", measurements=ProbeMetrics(0.002), group_peers=others)
        once = build_after_probe(slow)
        assert once.status.probes[-1].inconclusive is InconclusiveReason.SLOW
        assert find_condition(once, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        again, step = run_until_step(once, now=START + 65)
        assert isinstance(step, StartProbe)
        twice, _ = run_until_step(again, pod=slow, now=START + 70)
        assert find_condition(twice, QuarantineCondition.WITNESSED) == ("True", "Probe")
        well, _ = run_until_step(again, pod=replace(slow, measurements=ProbeMetrics(0.001)), now=START + 70)
        assert well.status.phase is QuarantinePhase.CLEARED

    def test_a_busy_node_does_not_count_as_slow(self) -> None:
        others = tuple(
            ProbePod("Succeeded", node=n, measurements=ProbeMetrics(0.001, cores=8, idle_cores=8)) for n in "ab"
        )
        figures = ProbeMetrics(0.002, cores=8, idle_cores=1)
        probed = build_after_probe(ProbePod("Succeeded", node="node-1", measurements=figures, group_peers=others))
        assert probed.status.phase is QuarantinePhase.CLEARED

    def test_a_probe_before_a_jobs_start_is_a_witness(self) -> None:
        found, step = run_until_step(
            build_quarantine(build_suspicion(witness=Witness.PROBE)), now=START + CONFIRMED_SUSPICION_HOLD_SECONDS
        )
        assert find_condition(found, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert step == ApproveQuarantine()
        suspicions = with_sign((build_suspicion(),), build_suspicion(START + 1, witness=Witness.PROBE))
        assert [one.witness for one in suspicions] == [Witness.PROBE], "the witness counts at once"

    def test_a_node_that_cannot_start_the_pod_in_time_is_confirmed(self) -> None:
        probing, _ = run_until_step(build_quarantine())
        late, step = run_until_step(probing, pod=ProbePod("Pending", group_peers=ELSEWHERE), now=START + 60)
        assert find_condition(late, QuarantineCondition.WITNESSED) == ("True", "Probe")
        assert step == EndProbe("probe-q-node-1-1000000")

    def test_the_nodes_own_condition_confirms_while_the_probe_still_waits(self) -> None:
        probing, _ = run_until_step(build_quarantine())
        probed, step = run_until_step(probing, DOWN, ProbePod("Pending"), now=START + 40)
        assert step == EndProbe("probe-q-node-1-1000000")
        assert probed.status.probes[-1].inconclusive is InconclusiveReason.SUPERSEDED
        approving, step = run_until_step(probed, DOWN, now=START + 40)
        assert step == ApproveQuarantine()
        assert find_condition(approving, QuarantineCondition.WITNESSED) == ("True", "NodeCondition")

    def test_a_jobs_report_of_an_unready_node_is_verified_on_the_node(self) -> None:
        _, step = run_until_step(build_quarantine(build_suspicion(witness=Witness.NODE_CONDITION)), NODE)
        assert isinstance(step, StartProbe)

    def test_trusted_series_need_no_probe_and_no_probe_refutes_them(self) -> None:
        vouched = build_quarantine(build_suspicion(witness=Witness.GPU_SERIES))
        assert run_until_step(vouched, now=START + 10)[1] == ApproveQuarantine()
        cleared = build_after_probe(PASSED)
        later = with_sign(cleared.spec.suspicions, build_suspicion(START + 100, witness=Witness.GPU_SERIES))
        found, step = run_until_step(replace(cleared, spec=replace(cleared.spec, suspicions=later)), now=START + 110)
        assert step == ApproveQuarantine(), "the suspicion itself names the witness"
        probing = decide_quarantine_step(
            replace(found, spec=replace(found.spec, approved=True)), HELD, None, QuarantineContext(), START + 111
        )
        assert isinstance(probing, WriteQuarantineStatus)
        probed = replace(found, status=probing.status)
        assert find_condition(probed, QuarantineCondition.WITNESSED) == ("True", "GpuSeries")

    def test_a_withdrawn_witness_leaves_the_decision_to_a_probe(self) -> None:
        blocked, step = run_until_step(build_quarantine(), DOWN, now=START + 1)
        assert isinstance(step, RequeueAfter)
        _, step = run_until_step(blocked, NODE, now=START + 5)
        assert isinstance(step, StartProbe)

    def test_weak_suspicions_need_two_namespaces(self) -> None:
        weak = build_suspicion(weak=True)
        assert isinstance(run_until_step(build_quarantine(weak))[1], RequeueAfter)
        assert isinstance(
            run_until_step(build_quarantine(weak, build_suspicion(START + 9, "team-b", weak=True)), now=START + 9)[1],
            StartProbe,
        )
        again = with_sign((weak,), build_suspicion(START + 100, weak=True))
        assert isinstance(run_until_step(build_quarantine(*again), now=START + 100)[1], RequeueAfter), (
            "one namespace counts once"
        )

    def test_an_unconfirmed_suspicion_is_dropped(self) -> None:
        dropped, step = run_until_step(build_quarantine(build_suspicion(weak=True)), now=START + 600)
        assert (dropped.status.phase, step) == (QuarantinePhase.RELEASED, DeleteQuarantine())

    def test_a_probe_without_an_image_confirms_nothing_and_backs_off(self) -> None:
        probing, _ = run_until_step(build_quarantine())
        probed = decide_quarantine_step(probing, NODE, NO_IMAGE, QuarantineContext(), START + 60)
        assert isinstance(probed, WriteQuarantineStatus)
        assert probed.event == "ProbeInconclusive"
        without_result = replace(probing, status=probed.status)
        waiting, step = run_until_step(without_result, now=START + 61)
        assert isinstance(step, RequeueAfter)
        assert find_condition(waiting, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        assert "ErrImagePull" in (waiting.status.message or "")
        assert isinstance(run_until_step(waiting, now=START + 121)[1], StartProbe)

    def test_probes_in_the_whole_cluster_are_bounded(self) -> None:
        others = tuple(
            build_quarantine(build_suspicion(START - 300), name=f"node-{i + 2}", probes=(ProbeResult("p", START - 1),))
            for i in range(MAX_CONCURRENT_SUSPICION_PROBES)
        )
        assert isinstance(
            run_until_step(
                build_quarantine(), around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others[1:]))
            )[1],
            StartProbe,
        )
        waiting, step = run_until_step(
            build_quarantine(), around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others))
        )
        assert isinstance(step, RequeueAfter)
        assert "its turn" in (waiting.status.message or "")


class TestSuspicions:
    def test_many_suspicions_of_one_namespace_change_nothing(self) -> None:
        first = with_sign((), build_suspicion())
        assert with_sign(first, build_suspicion(START + 1)) == first
        assert with_sign(first, build_suspicion(START + 59)) == first
        assert with_sign(first, build_suspicion(START + 60)) != first

    def test_a_stronger_suspicion_counts_at_once(self) -> None:
        weak = with_sign((), build_suspicion(weak=True))
        (strong,) = with_sign(weak, build_suspicion(START + 1))
        assert not strong.weak
        (vouched,) = with_sign((strong,), build_suspicion(START + 2, witness=Witness.GPU_SERIES))
        assert vouched.witness is Witness.GPU_SERIES

    def test_many_namespaces_do_not_crowd_out_a_witness(self) -> None:
        signs = with_sign((), build_suspicion(witness=Witness.GPU_SERIES))
        for i in range(20):
            signs = with_sign(signs, build_suspicion(START + i, f"mob-{i}"))
        assert len(signs) == MAX_NODE_SIGNS
        assert signs[0].witness is Witness.GPU_SERIES


def build_confirmed(name: str, at: float = START, **status: Any) -> Quarantine:
    return build_quarantine(build_suspicion(at, witness=Witness.GPU_SERIES), name=name, **status)


def build_approved(quarantine: Quarantine) -> Quarantine:
    return replace(quarantine, spec=replace(quarantine.spec, approved=True))


class TestDelayedQuarantine:
    def test_a_quarantine_waits_in_case_many_nodes_fail(self) -> None:
        blocked, step = run_until_step(build_confirmed("node-1"), now=START + 1)
        assert step == RequeueAfter(9)
        others = (build_confirmed("node-2", START + 4), build_confirmed("node-3", START + 8))
        tripped, _ = run_until_step(
            blocked,
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others), node_count=100),
            now=START + 10,
        )
        assert (tripped.status.phase, tripped.verdict) == (QuarantinePhase.BLOCKED, QuarantineVerdict.BREAKER)

    def test_earlier_quarantines_do_not_trip_the_breaker(self) -> None:
        earlier = tuple(build_approved(build_confirmed(f"node-{i}", START - 3600 * i)) for i in (2, 3))
        _, step = run_until_step(
            build_confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(earlier), node_count=100),
            now=START + 10,
        )
        assert step == ApproveQuarantine()

    def test_quarantines_within_the_window_trip_the_breaker(self) -> None:
        lately = tuple(build_approved(build_confirmed(f"node-{i}", START - 20)) for i in (2, 3))
        tripped, _ = run_until_step(
            build_confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(lately), node_count=100),
            now=START + 10,
        )
        assert tripped.verdict is QuarantineVerdict.BREAKER

    def test_the_breaker_clears_if_the_other_nodes_are_healthy(self) -> None:
        blamed = tuple(build_quarantine(build_suspicion(), name=f"node-{i}") for i in (2, 3))
        tripped, _ = run_until_step(
            build_confirmed("node-1"),
            around=QuarantineContext(usage=QuarantineUsage.from_quarantines(blamed), node_count=100),
            now=START + 10,
        )
        assert tripped.verdict is QuarantineVerdict.BREAKER
        cleared = tuple(replace(b, status=build_after_probe(PASSED, *b.spec.suspicions).status) for b in blamed)
        assert (
            run_until_step(
                tripped,
                around=QuarantineContext(usage=QuarantineUsage.from_quarantines(cleared), node_count=100),
                now=START + 20,
            )[1]
            == ApproveQuarantine()
        )

    def test_a_lasting_mass_fault_drops_all_suspicions(self) -> None:
        """The first dropped suspicion must not make the others count as single faults."""
        quarantines = [build_confirmed(f"node-{i}", START + i) for i in range(3)]
        remaining = dict(enumerate(quarantines))
        for now in range(int(START) + 15, int(START) + 700, 5):
            for i, one in list(remaining.items()):
                others = tuple(other for j, other in remaining.items() if j != i)
                remaining[i], step = run_until_step(
                    one,
                    around=QuarantineContext(usage=QuarantineUsage.from_quarantines(others), node_count=100),
                    now=float(now),
                )
                assert not isinstance(step, ApproveQuarantine)
                if isinstance(step, DeleteQuarantine):
                    del remaining[i]
        assert not remaining

    def test_a_pause_delays_the_quarantine(self) -> None:
        blocked, _ = run_until_step(
            build_confirmed("node-1"),
            around=QuarantineContext(node_count=100, pause_reason="maintenance"),
            now=START + 10,
        )
        assert (blocked.status.phase, blocked.verdict) == (QuarantinePhase.BLOCKED, QuarantineVerdict.PAUSED)
        assert run_until_step(blocked, now=START + 20)[1] == ApproveQuarantine()

    def test_the_budget_counts_quarantined_nodes_only(self) -> None:
        rules = QuarantineRules(max_nodes=1)
        others = (build_confirmed("node-2", START - 300),)
        assert (
            run_until_step(
                build_confirmed("node-1"),
                around=QuarantineContext(rules, QuarantineUsage.from_quarantines(others), 100),
                now=START + 10,
            )[1]
            == ApproveQuarantine()
        )
        spent = QuarantineContext(rules, QuarantineUsage.from_quarantines([build_approved(others[0])]), 100)
        blocked, _ = run_until_step(build_confirmed("node-1"), around=spent, now=START + 10)
        assert blocked.verdict is QuarantineVerdict.BUDGET_SPENT
        assert "1 of 100" in (blocked.status.message or "")

    def test_recommend_mode_requests_few_approvals(self) -> None:
        rules = QuarantineRules(acts=False, max_nodes=1)
        requested, step = run_until_step(
            build_confirmed("node-1"), around=QuarantineContext(rules, node_count=100), now=START + 10
        )
        assert (requested.status.phase, requested.verdict) == (
            QuarantinePhase.PENDING,
            QuarantineVerdict.AWAITS_APPROVAL,
        )
        assert isinstance(step, RequeueAfter)
        second, _ = run_until_step(
            build_confirmed("node-2"),
            around=QuarantineContext(rules, QuarantineUsage.from_quarantines([requested]), 100),
            now=START + 10,
        )
        assert second.verdict is QuarantineVerdict.BUDGET_SPENT

    def test_a_manual_quarantine_needs_no_witness(self) -> None:
        blocked = replace(NODE, tainted=True, cordoned=True)
        found, _ = run_until_step(build_approved(build_quarantine()), blocked)
        assert found.status.phase is QuarantinePhase.ACTIVE
        assert find_condition(found, QuarantineCondition.WITNESSED) == ("True", "Person")


def test_written_objects_match_the_definition() -> None:
    kinds = (
        run_until_step(build_quarantine())[0],
        build_after_probe(PASSED),
        build_after_probe(FAILED),
        run_until_step(build_confirmed("n"))[0],
    )
    for found in kinds:
        assert find_schema_errors(found.status.to_patch(), read_schema("nodequarantines")["status"]) == []
        assert QuarantineStatus.parse(found.status.to_patch()) == found.status
        assert find_schema_errors(found.spec.to_json(), read_schema("nodequarantines")["spec"]) == []
        assert QuarantineSpec.parse(found.spec.to_json()) == found.spec


@pytest.mark.parametrize(
    ("values", "path"),
    [
        (QuarantinePhase, ("status", "phase")),
        (Witness, ("spec", "suspicions", "items", "witness")),
        (InconclusiveReason, ("status", "probes", "items", "inconclusive")),
    ],
)
def test_the_definition_has_the_same_values(values: Any, path: tuple[str, ...]) -> None:
    found = read_schema("nodequarantines")
    for name in path:
        found = found["items"] if name == "items" else found.get("properties", found)[name]
    assert found["enum"] == list(values)


class QuarantineCluster(FakeCluster):
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

    def list_quarantined_nodes(self) -> set[str]:
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


def runs_on_node_1(pod: Object) -> bool:
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


def build_accusation(node: str = "node-1", namespace: str = "team-a", **changes: Any) -> NodeAccusation:
    accusations = NodeAccusation(node, f"uid-{node}", "XID 79", ObjectRef("gpt-r3-gpu-error", namespace), START)
    return replace(accusations, **changes)


@pytest.fixture
def cluster() -> QuarantineCluster:
    return QuarantineCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def run_loop(cluster: QuarantineCluster, clock: Clock, seconds: float, settings: Settings = SETTINGS) -> None:
    """Run the loop over all quarantines for this duration; each pass sets the time of the next."""
    end = clock.time + seconds
    while clock.time < end:
        clock.time = min(
            end, clock.time + max(1.0, await service.reconcile_all(NodeRegistry(cluster, clock, settings)))
        )


class TestService:
    async def test_a_forged_fault_touches_no_node(self, cluster: QuarantineCluster, clock: Clock) -> None:
        assert (
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        ).verdict is QuarantineVerdict.SUSPECTED
        await run_loop(cluster, clock, 30)
        assert not cluster.list_quarantined_nodes()
        assert "NodeCleared" in cluster.events()
        again = build_accusation(incident=ObjectRef("again", "team-a"), found_at=clock.now())
        decision = await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), again)
        assert decision.verdict is QuarantineVerdict.CLEARED
        await run_loop(cluster, clock, 600)
        assert cluster.quarantine() is None
        assert not cluster.probes()

    async def test_many_faults_cause_one_probe_in_ten_minutes(self, cluster: QuarantineCluster, clock: Clock) -> None:
        names = set()
        for i in range(300):
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS),
                build_accusation(incident=ObjectRef(f"i-{i}", "team-a"), found_at=clock.now()),
            )
            await run_loop(cluster, clock, 2)
            found = cluster.quarantine()
            assert found is not None
            names |= {probe.pod for probe in found.status.probes}
        assert len(names) == 1
        assert not cluster.list_quarantined_nodes()

    async def test_a_bad_node_is_quarantined_once_the_probe_fails(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        state = {"terminated": {"exitCode": 1, "message": "3 of 4 GPUs answer"}}
        cluster.kubelet["node-1"] = {"phase": "Failed", "containerStatuses": [{"name": "probe", "state": state}]}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 9)
        assert not cluster.list_quarantined_nodes()
        await run_loop(cluster, clock, 3)
        assert cluster.list_quarantined_nodes() == {"node-1"}
        found = await find_decision(NodeRegistry(cluster, clock, SETTINGS), "node-1", "uid-node-1")
        assert found == QuarantineDecision(QuarantineVerdict.QUARANTINED, "node-1 is quarantined")
        assert {"ProbeFailed", "NodeQuarantined"} <= set(cluster.events())

    async def test_a_node_that_is_not_ready_is_quarantined_without_a_probe(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        cluster.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 12)
        assert cluster.list_quarantined_nodes() == {"node-1"}
        assert not cluster.probes()

    async def test_a_private_registry_without_a_secret_quarantines_no_node(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        waiting = {"name": "probe", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no basic auth"}}}
        cluster.kubelet["node-1"] = {"phase": "Pending", "containerStatuses": [waiting]}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 100)
        found = cluster.quarantine()
        assert found is not None
        assert find_condition(found, QuarantineCondition.WITNESSED) == ("Unknown", "ProbeInconclusive")
        assert "no basic auth" in (found.status.message or "")
        await run_loop(cluster, clock, 600)
        assert not cluster.list_quarantined_nodes()

    @pytest.mark.parametrize("check", ["network", "driver"])
    async def test_a_probe_that_fails_on_every_node_quarantines_none(
        self, cluster: QuarantineCluster, clock: Clock, check: str
    ) -> None:
        """A forged XID is enough to have a node probed."""
        text = json.dumps({"unfit": "it does not work", "check": check, "gpus": 1})
        state = {"terminated": {"exitCode": 1, "message": text}}
        for i in range(1, 7):
            cluster.node(f"node-{i}", gpus=8)
            status = [{"name": "probe", "state": state}]
            cluster.kubelet[f"node-{i}"] = {"phase": "Failed", "containerStatuses": status}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 20)
        found = cluster.quarantine()
        assert found is not None
        assert found.status.probes[-1].inconclusive is InconclusiveReason.SHARED_FAILURE
        assert "fails in the same way" in (found.status.message or "")
        assert find_schema_errors(found.status.to_patch(), read_schema("nodequarantines")["status"]) == []
        await run_loop(cluster, clock, 700)
        assert not cluster.list_quarantined_nodes()

    async def test_companions_in_a_probe_group_request_one_free_gpu_each(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        for i in range(1, 4):
            cluster.node(f"node-{i}", gpus=8)
        for i in range(4, 7):
            cluster.objects.pop(("nodes", "", f"node-{i}"))
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        spec = {"nodeName": "node-3", "containers": [limits]}
        cluster._store(("pods", "team-b", "w"), {"metadata": {"name": "w", "namespace": "team-b"}, "spec": spec})
        cluster.kubelet |= {f"node-{i}": {"phase": "Running", "podIP": "10.0.0.1"} for i in (1, 2, 3)}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 15)
        requested = {
            pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
            for pod in cluster.probes()
            if LABEL_PROBE_GROUP in pod["metadata"].get("labels", {})
        }
        assert requested == {"node-1": "8", "node-2": "1", "node-3": None}

    async def test_power_lost_at_once_touches_no_node(self, cluster: QuarantineCluster, clock: Clock) -> None:
        for i in (1, 2, 3):
            cluster.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
            await run_loop(cluster, clock, 2)
        await run_loop(cluster, clock, 700)
        assert not cluster.list_quarantined_nodes()
        assert await cluster.list(NODE_QUARANTINES) == []

    async def lose_power(self, cluster: QuarantineCluster, clock: Clock) -> None:
        """Three nodes lose power: their kubelets are away, and their jobs report within seconds."""
        for i in (1, 2, 3):
            cluster.node(f"node-{i}", ready="Unknown")
            cluster.kubelet[f"node-{i}"] = {"phase": "Pending"}
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
        await run_loop(cluster, clock, 90)
        assert not cluster.list_quarantined_nodes()

    def come_back(self, cluster: QuarantineCluster, name: str, pod: Object | None = None) -> None:
        cluster.node(name)
        cluster.kubelet[name] = pod or {"phase": "Succeeded"}

    async def test_the_first_node_that_is_back_shows_nothing_of_those_that_still_boot(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        await self.lose_power(cluster, clock)
        for i, pause in ((1, 100), (2, 400), (3, 30)):
            self.come_back(cluster, f"node-{i}")
            for late in range(i + 1, 4):  # jobs repeat the suspicion: the fault is the same
                incident = ObjectRef(f"again-{i}-{late}", "team-a")
                await raise_suspicion(
                    NodeRegistry(cluster, clock, SETTINGS),
                    build_accusation(f"node-{late}", incident=incident, found_at=clock.now()),
                )
            await run_loop(cluster, clock, pause)
            assert not cluster.list_quarantined_nodes()
            found = cluster.quarantine(f"node-{i}")
            assert found is not None
            assert found.verdict is QuarantineVerdict.CLEARED
        await run_loop(cluster, clock, 700)
        assert not cluster.list_quarantined_nodes()
        assert await cluster.list(NODE_QUARANTINES) == []

    async def test_a_node_that_comes_back_broken_is_quarantined_once_the_others_are_settled(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        await self.lose_power(cluster, clock)
        state = {"terminated": {"exitCode": 1, "message": "3 of 4 GPUs answer"}}
        broken = {"phase": "Failed", "containerStatuses": [{"name": "probe", "state": state}]}
        self.come_back(cluster, "node-1", broken)
        await run_loop(cluster, clock, 100)
        assert not cluster.list_quarantined_nodes(), "the others may come back in the same way"
        for name in ("node-2", "node-3"):
            self.come_back(cluster, name)
        await run_loop(cluster, clock, 300)
        assert cluster.list_quarantined_nodes() == {"node-1"}

    async def test_a_probe_that_failed_while_many_nodes_were_away_is_repeated(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        """The API server has not noticed yet that the nodes are not Ready."""
        for i in (1, 2, 3):
            cluster.kubelet[f"node-{i}"] = {"phase": "Pending"}
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
        await run_loop(cluster, clock, 70)
        assert "ProbeFailed" in cluster.events()
        for i in (1, 2, 3):
            self.come_back(cluster, f"node-{i}")
            await run_loop(cluster, clock, 70)
            assert not cluster.list_quarantined_nodes()
        await run_loop(cluster, clock, 200)
        assert not cluster.list_quarantined_nodes()
        assert {found.verdict for i in (1, 2, 3) if (found := cluster.quarantine(f"node-{i}"))} <= {
            QuarantineVerdict.CLEARED
        }

    async def test_repeated_suspicions_do_not_reset_the_breaker(self, cluster: QuarantineCluster, clock: Clock) -> None:
        """Each suspicion is dropped after a while; a repetition is no new suspicion."""
        accusations = []
        for i, pause in ((1, 20), (2, 20), (3, 0)):
            cluster.node(f"node-{i}", ready="Unknown")
            accusations.append(build_accusation(f"node-{i}", found_at=clock.now()))
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), accusations[-1])
            clock.time += pause / 4
        decisions = []
        for _ in range(300):
            decisions = [
                await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), accusation) for accusation in accusations
            ]
            await run_loop(cluster, clock, 5)
            assert not cluster.list_quarantined_nodes()
        assert {decision.verdict for decision in decisions} == {QuarantineVerdict.CLEARED}
        assert await cluster.list(NODE_QUARANTINES) == []

    async def test_a_tenant_with_all_gpus_of_two_nodes_cannot_keep_the_breaker_tripped(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        """No probe can run on these nodes, and a namespace accuses them again and again."""
        refusal = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Pod was rejected"}
        cluster.kubelet |= {"node-2": refusal, "node-3": refusal}
        registry = NodeRegistry(cluster, clock, SETTINGS)
        await raise_suspicion(registry, build_accusation("node-1", witness=Witness.GPU_SERIES))
        for i in range(4):
            for node in ("node-2", "node-3"):
                accusations = ObjectRef(f"{node}-{i}", "team-b")
                await raise_suspicion(registry, build_accusation(node, incident=accusations, found_at=clock.now()))
            await run_loop(cluster, clock, 30)
            if i == 0:
                found = await find_decision(NodeRegistry(cluster, clock, SETTINGS), "node-1", "uid-node-1")
                assert found is not None
                assert found.verdict is QuarantineVerdict.BREAKER, "they count while evidence may still come"
        assert cluster.list_quarantined_nodes() == {"node-1"}

    async def test_the_third_node_after_two_earlier_ones_is_quarantined(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        for i in (1, 2, 3):
            cluster.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
            await run_loop(cluster, clock, 90)
        assert cluster.list_quarantined_nodes() == {"node-1", "node-2", "node-3"}

    async def test_the_budget_allows_one_quarantine(self, cluster: QuarantineCluster, clock: Clock) -> None:
        tight = replace(SETTINGS, quarantine_max_nodes=1)
        for i in (1, 2):
            cluster.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(
                NodeRegistry(cluster, clock, tight), build_accusation(f"node-{i}", found_at=clock.now())
            )
        await run_loop(cluster, clock, 20, tight)
        assert cluster.list_quarantined_nodes() == {"node-1"}
        decision = await find_decision(NodeRegistry(cluster, clock, SETTINGS), "node-2", "uid-node-2")
        assert decision is not None
        assert decision.verdict is QuarantineVerdict.BUDGET_SPENT

    @pytest.mark.parametrize("broken", [False, True])
    async def test_a_pause_that_cannot_be_read_counts_as_a_pause(
        self, cluster: QuarantineCluster, clock: Clock, broken: bool
    ) -> None:
        cluster.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        if broken:
            cluster.broken.add(CONFIG_MAPS.plural)
        else:
            cluster._store(
                ("configmaps", SETTINGS.namespace, PAUSE_CONFIG_MAP), {"metadata": {"name": PAUSE_CONFIG_MAP}}
            )
        await run_loop(cluster, clock, 20)
        assert not cluster.list_quarantined_nodes()
        assert (
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation("node-2", found_at=clock.now())
            )
        ).verdict is QuarantineVerdict.PAUSED
        assert cluster.quarantine("node-2") is None
        found = await find_decision(NodeRegistry(cluster, clock, SETTINGS), "node-1", "uid-node-1")
        assert found is not None
        assert found.verdict is QuarantineVerdict.PAUSED

    async def test_many_accused_nodes_cost_one_list_of_the_cluster(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        for i in range(7, 40):
            cluster.node(f"node-{i}", ready="Unknown")
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
        await run_loop(cluster, clock, 15)
        cluster.lists.clear()
        await service.reconcile_all(NodeRegistry(cluster, clock, SETTINGS))
        assert sorted(cluster.lists) == ["nodequarantines", "nodes"]

    async def test_no_node_is_changed_by_an_outdated_list(self, cluster: QuarantineCluster, clock: Clock) -> None:
        cluster.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        registry = NodeRegistry(cluster, clock, SETTINGS)
        await registry.refresh()
        for other in ("node-2", "node-3"):
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation(other))
        clock.time = START + 10
        await service.reconcile_node(registry, "node-1")
        assert not cluster.list_quarantined_nodes()
        assert (
            await find_decision(NodeRegistry(cluster, clock, SETTINGS), "node-1", "uid-node-1")
        ).verdict is QuarantineVerdict.BREAKER  # type: ignore[union-attr]

    async def test_concurrent_probes_are_bounded_within_one_pass(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        for i in range(7, 40):
            cluster.node(f"node-{i}")
            cluster.kubelet[f"node-{i}"] = {"phase": "Running"}
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(f"node-{i}", found_at=clock.now())
            )
        await run_loop(cluster, clock, 3)
        assert (
            len({probe["metadata"]["labels"][LABEL_PROBE_GROUP] for probe in cluster.probes()})
            == MAX_CONCURRENT_SUSPICION_PROBES
        )

    async def test_opted_out_and_unknown_nodes_are_not_suspected(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        cluster.node("node-2", labels={LABEL_NO_QUARANTINE: ""})
        assert (
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation("node-2"))
        ).verdict is QuarantineVerdict.OPTED_OUT
        assert (
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation(uid="another"))
        ).verdict is QuarantineVerdict.UNKNOWN_NODE
        assert (
            await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation("node-99"))
        ).verdict is QuarantineVerdict.UNKNOWN_NODE
        assert await cluster.list(NODE_QUARANTINES) == []

    async def test_a_second_namespace_adds_its_suspicion(self, cluster: QuarantineCluster, clock: Clock) -> None:
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation(is_weak=True))
        await run_loop(cluster, clock, 5)
        assert not cluster.quarantine().status.probes  # type: ignore[union-attr]  # it is there
        text = (
            await raise_suspicion(
                NodeRegistry(cluster, clock, SETTINGS), build_accusation(namespace="team-b", is_weak=True)
            )
        ).message
        assert "team-a" not in text
        await run_loop(cluster, clock, 1)
        assert cluster.quarantine().status.probes  # type: ignore[union-attr]

    async def test_a_probe_requests_the_free_gpus(self, cluster: QuarantineCluster, clock: Clock) -> None:
        cluster.node("node-1", gpus=8)
        limits = {"resources": {"limits": {"nvidia.com/gpu": "6"}}}
        spec = {"nodeName": "node-1", "containers": [limits]}
        cluster._store(("pods", "team-b", "w"), {"metadata": {"name": "w", "namespace": "team-b"}, "spec": spec})
        cluster.kubelet["node-1"] = {"phase": "Running"}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 5)
        (probe,) = [pod for pod in cluster.probes() if pod["metadata"].get("labels") and runs_on_node_1(pod)]
        assert probe["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert probe["spec"]["containers"][0]["command"][-1] == "--gpus=2"

    async def test_probes_get_the_installations_pull_secrets(self, cluster: QuarantineCluster, clock: Clock) -> None:
        private = replace(SETTINGS, image_pull_secrets="registry, other", image_pull_policy="Always")
        cluster.kubelet["node-1"] = {"phase": "Running"}
        await raise_suspicion(NodeRegistry(cluster, clock, private), build_accusation())
        await run_loop(cluster, clock, 5, private)
        (probe,) = [pod for pod in cluster.probes() if runs_on_node_1(pod)]
        assert probe["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
        assert probe["spec"]["containers"][0]["imagePullPolicy"] == "Always"

    async def test_the_next_operator_continues(self, cluster: QuarantineCluster, clock: Clock) -> None:
        """Nothing stays in memory: each pass is that of another operator."""
        cluster.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        max_steps = service.MAX_STEPS_PER_RECONCILE
        service.MAX_STEPS_PER_RECONCILE = 1
        try:
            await run_loop(cluster, clock, 30)
        finally:
            service.MAX_STEPS_PER_RECONCILE = max_steps
        assert cluster.list_quarantined_nodes() == {"node-1"}

    async def test_all_are_released_and_all_suspicions_end(self, cluster: QuarantineCluster, clock: Clock) -> None:
        cluster.node("node-1", ready="Unknown")
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
        await run_loop(cluster, clock, 15)
        assert cluster.list_quarantined_nodes() == {"node-1"}
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation("node-2", is_weak=True))
        await service.release_all(cluster, clock, 30)
        assert not cluster.list_quarantined_nodes()
        assert await cluster.list(NODE_QUARANTINES) == []

    async def test_a_quarantine_that_ends_takes_no_new_suspicions(
        self, cluster: QuarantineCluster, clock: Clock
    ) -> None:
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation(is_weak=True))
        await run_loop(cluster, clock, 1)
        ended = cluster.quarantine()
        assert ended is not None
        dropped = {"phase": "Released", "message": "the suspicion is dropped"}
        await cluster.patch(NODE_QUARANTINES, "node-1", {"status": dropped})
        decision = await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation(namespace="team-b"))
        assert decision.verdict is QuarantineVerdict.RELEASING


@pytest.mark.parametrize(
    ("ready", "tainted", "suspected", "wakes"),
    [
        ("True", False, True, False),
        ("Unknown", False, True, True),
        ("True", True, False, True),
        ("Unknown", False, False, False),
    ],
)
async def test_changes_of_quarantined_nodes_wake_the_loop(
    cluster: QuarantineCluster, clock: Clock, ready: str, tainted: bool, suspected: bool, wakes: bool
) -> None:
    if suspected:
        await raise_suspicion(NodeRegistry(cluster, clock, SETTINGS), build_accusation())
    registry = NodeRegistry(cluster, clock, SETTINGS)
    await registry.refresh()
    registry.changed_nodes.clear()
    cluster.node("node-1", ready=ready)
    body = await cluster.get(NODE_OBJECTS, "node-1")
    body["spec"]["taints"] = [{"key": TAINT_QUARANTINE, "effect": "NoSchedule"}] if tainted else []
    registry.nodes.apply_event(body, deleted=False)
    assert bool(registry.changed_nodes) is wakes
