"""The next step of a NodeQuarantine, and the results of probe pods."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator import node_probe
from pacekeeper_operator.api.names import FIELD_MANAGER_CORDON
from pacekeeper_operator.api.node_probe import InconclusiveReason, ProbeMetrics, ProbeResult
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineSpec, QuarantineStatus
from pacekeeper_operator.decide.nodes.node_probes import CLEAN_PROBE_PAUSE_SECONDS
from pacekeeper_operator.decide.nodes.node_quarantine import decide_quarantine_step
from pacekeeper_operator.decide.nodes.node_suspicion import count_allowed_nodes
from pacekeeper_operator.decide.nodes.probe_measurements import read_measurements
from pacekeeper_operator.decide.nodes.quarantine_steps import (
    AddFinalizer,
    DeleteQuarantine,
    EndProbe,
    HoldNode,
    ProbePod,
    Quarantine,
    QuarantineRules,
    QuarantineStep,
    ReleaseNode,
    RemoveFinalizer,
    RequeueAfter,
    StartProbe,
    TargetNode,
    WriteQuarantineStatus,
)
from pacekeeper_operator.decide.nodes.quarantine_usage import QuarantineContext

START = 1_000_000.0
HELD_NODE = TargetNode("uid-1", tainted=True, cordoned=True)
OTHER_NODE_PASSED = (ProbePod("Succeeded", node="node-2", has_gpus=True),)
FREE_NODE = TargetNode("uid-1")
NEW_QUARANTINE = Quarantine("node-1", "q-uid-123", QuarantineSpec("bad", "uid-1", approved=True), QuarantineStatus())
GUARDED_QUARANTINE = replace(NEW_QUARANTINE, guarded=True)
ACTIVE_STATUS = QuarantineStatus(phase=QuarantinePhase.ACTIVE, cordoned_at=START, previously_cordoned=False)


def decide_next_step(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None = None, now: float = START
) -> QuarantineStep:
    return decide_quarantine_step(quarantine, node, pod, QuarantineContext(), now)


def decide_status(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None = None, now: float = START
) -> WriteQuarantineStatus:
    action = decide_next_step(quarantine, node, pod, now)
    assert isinstance(action, WriteQuarantineStatus)
    return action


def with_status(**changes: Any) -> Quarantine:
    return replace(GUARDED_QUARANTINE, status=replace(ACTIVE_STATUS, **changes))


def build_probe_results(*results: bool | None, start: float = START + 3600) -> tuple[ProbeResult, ...]:
    """Build one probe per result, 10 s long, 1000 s apart. None: the probe still runs."""
    return tuple(
        ProbeResult(f"p{i}", start + 1000 * i, None if passed is None else start + 1000 * i + 10, passed, "its message")
        for i, passed in enumerate(results)
    )


class TestQuarantining:
    def test_the_finalizer_comes_before_anything_is_done_to_the_node(self) -> None:
        assert decide_next_step(NEW_QUARANTINE, FREE_NODE) == AddFinalizer()
        assert decide_next_step(GUARDED_QUARANTINE, FREE_NODE) == HoldNode(repeated=False)

    def test_a_partly_marked_node_is_marked_completely(self) -> None:
        assert decide_next_step(GUARDED_QUARANTINE, replace(FREE_NODE, tainted=True)) == HoldNode(repeated=False)
        assert decide_next_step(GUARDED_QUARANTINE, replace(FREE_NODE, cordoned=True)) == HoldNode(repeated=False)

    def test_the_status_of_a_held_node_has_its_time_and_earlier_cordon(self) -> None:
        written = decide_status(GUARDED_QUARANTINE, replace(HELD_NODE, cordoned_by_others=True))
        assert written.event == "NodeQuarantined"
        assert written.status.phase is QuarantinePhase.ACTIVE
        assert (written.status.cordoned_at, written.status.previously_cordoned) == (START, True)
        conditions = {c.type: (c.status, c.reason, c.last_transition_time) for c in written.status.conditions}
        assert conditions == {
            "Quarantined": ("True", "Quarantined", START),
            "Witnessed": ("True", "Person", START),
        }
        assert decide_next_step(
            replace(GUARDED_QUARANTINE, status=written.status), replace(HELD_NODE, cordoned_by_others=True)
        ) == RequeueAfter(60)

    def test_a_removed_mark_is_added_again(self) -> None:
        assert decide_next_step(with_status(), replace(HELD_NODE, cordoned=False)) == HoldNode(repeated=True)

    def test_an_unapproved_quarantine_changes_no_node(self) -> None:
        waiting = replace(GUARDED_QUARANTINE, spec=replace(GUARDED_QUARANTINE.spec, approved=False))
        written = decide_status(waiting, FREE_NODE)
        assert (written.status.phase, written.event) == (QuarantinePhase.PENDING, "ApprovalNeeded")
        assert decide_next_step(replace(waiting, status=written.status), FREE_NODE) == RequeueAfter(60)

    def test_a_quarantine_created_by_hand_applies_to_the_first_node_of_its_name(self) -> None:
        by_hand = replace(GUARDED_QUARANTINE, spec=QuarantineSpec("by hand", approved=True))
        written = decide_status(by_hand, FREE_NODE)
        assert written.status.node_uid == "uid-1"
        seen = replace(by_hand, status=written.status)
        assert decide_next_step(seen, FREE_NODE) == HoldNode(repeated=False)
        assert decide_status(seen, TargetNode("uid-2")).status.phase is QuarantinePhase.RELEASED


class TestRelease:
    @pytest.mark.parametrize(
        ("node", "message"),
        [
            (None, "does not exist"),
            (TargetNode("uid-2"), "was recreated"),
            (replace(HELD_NODE, opted_out=True), "no-quarantine"),
        ],
    )
    def test_a_quarantine_of_a_deleted_recreated_or_opted_out_node_ends(
        self, node: TargetNode | None, message: str
    ) -> None:
        held = with_status()
        if node is not None and node.marked:
            step = decide_next_step(held, node)
            assert isinstance(step, ReleaseNode)
            assert message in step.reason
            node = replace(node, tainted=False, cordoned=False)
        written = decide_status(held, node)
        assert message in (written.status.message or "")
        assert decide_next_step(replace(held, status=written.status), node) == DeleteQuarantine()

    def test_deletion_releases_before_the_finalizer_goes(self) -> None:
        deleted = replace(with_status(), deleted=True)
        assert isinstance(decide_next_step(deleted, HELD_NODE), ReleaseNode)
        assert isinstance(decide_next_step(deleted, replace(HELD_NODE, tainted=False)), ReleaseNode)
        assert decide_next_step(deleted, FREE_NODE) == RemoveFinalizer()
        assert decide_next_step(deleted, None) == RemoveFinalizer()

    def test_deletion_ends_a_running_probe(self) -> None:
        deleted = replace(with_status(probes=build_probe_results(None)), deleted=True)
        assert isinstance(decide_next_step(deleted, HELD_NODE, ProbePod("Running")), ReleaseNode)
        assert decide_next_step(deleted, FREE_NODE, ProbePod("Running")) == EndProbe("p0")

    def test_the_quarantine_of_an_old_node_does_not_change_a_new_one(self) -> None:
        assert (
            decide_next_step(replace(with_status(), deleted=True), TargetNode("uid-2", cordoned_by_others=True))
            == RemoveFinalizer()
        )

    def test_three_passed_probes_in_a_row_release_and_keep_releasing(self) -> None:
        passed = with_status(probes=build_probe_results(True, True, True))
        assert isinstance(decide_next_step(passed, HELD_NODE), ReleaseNode)
        assert isinstance(decide_next_step(passed, replace(HELD_NODE, cordoned=False)), ReleaseNode)
        assert decide_next_step(passed, FREE_NODE, ProbePod("Succeeded")) == EndProbe("p2")
        ended = decide_status(passed, FREE_NODE)
        assert ended.status.phase is QuarantinePhase.RELEASED
        assert decide_next_step(replace(passed, status=ended.status), FREE_NODE) == DeleteQuarantine()


class TestProbe:
    def test_a_probe_starts_at_expiry_and_is_recorded_first(self) -> None:
        held = replace(GUARDED_QUARANTINE, status=decide_status(GUARDED_QUARANTINE, HELD_NODE).status)
        assert decide_next_step(held, HELD_NODE, now=START + 3590) == RequeueAfter(10)
        written = decide_status(held, HELD_NODE, now=START + 3600)
        assert written.status.phase is QuarantinePhase.PROBING
        probing = replace(held, status=written.status)
        pod = written.status.probes[-1].pod
        assert decide_next_step(probing, HELD_NODE, None, START + 3601) == StartProbe(pod)
        assert decide_next_step(probing, HELD_NODE, ProbePod("Running"), START + 3601) == RequeueAfter(1)

    @pytest.mark.parametrize(
        ("pod", "seconds", "message"),
        [
            (ProbePod("Failed", "3 of 4 GPUs answer", group_peers=OTHER_NODE_PASSED), 5, "3 of 4 GPUs answer"),
            (ProbePod("Pending", group_peers=OTHER_NODE_PASSED), 60, "did not end within 60 s"),
            (ProbePod("Running", "waits", group_peers=OTHER_NODE_PASSED), 60, "did not end within 60 s: waits"),
        ],
    )
    def test_a_failed_probe_keeps_the_quarantine_with_a_reason(
        self, pod: ProbePod, seconds: float, message: str
    ) -> None:
        probing = with_status(phase=QuarantinePhase.PROBING, probes=build_probe_results(None))
        now = START + 3600 + seconds
        written = decide_status(probing, HELD_NODE, pod, now)
        assert (written.event, written.warning) == ("ProbeFailed", True)
        failed = replace(probing, status=written.status)
        assert failed.last_probe == ProbeResult("p0", START + 3600, now, False, message)
        assert decide_next_step(failed, HELD_NODE, pod, now) == EndProbe("p0")
        active = decide_status(failed, HELD_NODE, None, now).status
        assert active.phase is QuarantinePhase.ACTIVE
        assert message in (active.message or "")
        assert decide_next_step(replace(failed, status=active), HELD_NODE, None, now) == RequeueAfter(60)

    @pytest.mark.parametrize(
        "pod",
        [
            None,
            ProbePod("Pending", "ErrImagePull", InconclusiveReason.IMAGE),
            ProbePod("Failed", "OutOfcpu", InconclusiveReason.NOT_RUN),
        ],
    )
    def test_an_inconclusive_probe_is_no_failure(self, pod: ProbePod | None) -> None:
        probing = with_status(phase=QuarantinePhase.PROBING, probes=build_probe_results(None))
        written = decide_status(probing, HELD_NODE, pod, START + 3660)
        assert written.event == "ProbeInconclusive"
        (ended,) = written.status.probes
        assert (ended.passed, ended.inconclusive) == (None, pod.inconclusive if pod else InconclusiveReason.NOT_RUN)
        active = replace(probing, status=written.status)
        assert (
            decide_status(active, HELD_NODE, now=START + 3661).status.phase is QuarantinePhase.ACTIVE
        )  # it waits for the next probe

    def test_repeated_probes_without_an_image_release_the_node(self) -> None:
        inconclusive = tuple(
            replace(p, passed=None, inconclusive=InconclusiveReason.IMAGE) for p in build_probe_results(*[False] * 5)
        )
        assert isinstance(decide_next_step(with_status(probes=inconclusive[:4]), HELD_NODE), WriteQuarantineStatus)
        freed = decide_next_step(with_status(probes=inconclusive), HELD_NODE)
        assert isinstance(freed, ReleaseNode)
        assert "could not check it" in freed.reason
        failed = with_status(probes=(*inconclusive[:2], *build_probe_results(False), *inconclusive[3:]))
        assert isinstance(
            decide_next_step(failed, HELD_NODE), WriteQuarantineStatus
        )  # one of them has shown that the node is bad

    def test_repeated_shared_failures_release_the_node(self) -> None:
        inconclusive = tuple(
            replace(p, passed=None, inconclusive=InconclusiveReason.SHARED_FAILURE)
            for p in build_probe_results(*[False] * 5)
        )
        assert isinstance(decide_next_step(with_status(probes=inconclusive), HELD_NODE), ReleaseNode)
        uncompared = tuple(replace(p, inconclusive=InconclusiveReason.NO_COMPARISON) for p in inconclusive)
        assert isinstance(decide_next_step(with_status(probes=uncompared), HELD_NODE), WriteQuarantineStatus)

    def test_a_probe_from_before_the_quarantine_does_not_release(self) -> None:
        """A person has approved a suspicion that a probe had cleared."""
        before = with_status(probes=build_probe_results(True, start=START - 100))
        assert isinstance(decide_next_step(before, HELD_NODE), WriteQuarantineStatus)

    def test_a_passed_probe_is_recorded_before_the_release(self) -> None:
        probing = with_status(phase=QuarantinePhase.PROBING, probes=build_probe_results(None))
        written = decide_status(probing, HELD_NODE, ProbePod("Succeeded"), START + 3605)
        assert written.event == "ProbePassed"
        assert "1 in a row of 3" in (written.status.message or "")
        held = replace(probing, status=written.status)
        assert decide_status(held, HELD_NODE, now=START + 3606).status.phase is QuarantinePhase.ACTIVE
        after = decide_status(held, HELD_NODE, now=START + 3605 + CLEAN_PROBE_PAUSE_SECONDS).status
        assert (after.phase, len(after.probes)) == (QuarantinePhase.PROBING, 2), "the next probe does not wait for long"

    def test_a_release_takes_the_configured_number_of_passed_probes(self) -> None:
        once = with_status(probes=build_probe_results(True))
        assert isinstance(
            decide_quarantine_step(
                once, HELD_NODE, None, QuarantineContext(QuarantineRules(release_probes=1)), START + 3700
            ),
            ReleaseNode,
        )

    @pytest.mark.parametrize(
        ("results", "released"),
        [
            ((True, True, True), True),
            ((False, True, True, True), True),
            ((True, True, False), False),
            ((True, False, True, True), False),
            ((True, True, "nothing", True), True),
            ((True, True, "nothing"), False),
        ],
    )
    def test_a_failed_probe_resets_the_count_and_an_inconclusive_one_does_not(
        self, results: tuple[bool | str, ...], released: bool
    ) -> None:
        results_in_order = build_probe_results(*(result if isinstance(result, bool) else False for result in results))
        probes = tuple(
            replace(probe, passed=None, inconclusive=InconclusiveReason.NOT_RUN) if result == "nothing" else probe
            for probe, result in zip(results_in_order, results, strict=True)
        )
        assert isinstance(decide_next_step(with_status(probes=probes), HELD_NODE), ReleaseNode) is released

    def test_a_passed_probe_resets_the_back_off(self) -> None:
        failed = with_status(probes=build_probe_results(False, False, True, False))
        ended = failed.status.probes[-1].finished or 0
        assert decide_status(failed, HELD_NODE, now=ended + 59).status.phase is QuarantinePhase.ACTIVE
        assert decide_status(failed, HELD_NODE, now=ended + 60).status.phase is QuarantinePhase.PROBING

    def test_peers_of_the_probe_group_show_whether_the_node_is_slow(self) -> None:
        probing = with_status(phase=QuarantinePhase.PROBING, probes=build_probe_results(None))
        others = tuple(ProbePod("Running", node=name) for name in ("a", "b"))
        pod = ProbePod("Succeeded", node="node-1", measurements=ProbeMetrics(0.002), group_peers=others)
        assert decide_next_step(probing, HELD_NODE, pod, START + 3605) == RequeueAfter(1)
        done = tuple(replace(other, phase="Succeeded", measurements=ProbeMetrics(0.001)) for other in others)
        written = decide_status(probing, HELD_NODE, replace(pod, group_peers=done), START + 3606)
        assert written.event == "ProbeFailed"
        assert "2.0 times as long" in (written.status.message or "")
        assert written.status.probes[-1].metrics == pod.measurements
        assert decide_status(probing, HELD_NODE, pod, START + 3660).event == "ProbePassed", (
            "no peer is waited for indefinitely"
        )

    def test_a_probe_group_without_its_own_pod_is_ended(self) -> None:
        probing = with_status(phase=QuarantinePhase.PROBING, probes=build_probe_results(None))
        without = ProbePod(phase="", group_peers=(ProbePod("Running"),))
        assert decide_next_step(probing, HELD_NODE, without, START + 3605) == StartProbe("p0")
        written = decide_status(probing, HELD_NODE, without, START + 3660)
        assert written.status.probes[-1].inconclusive is InconclusiveReason.NOT_RUN
        assert decide_next_step(replace(probing, status=written.status), HELD_NODE, without, START + 3661) == EndProbe(
            "p0"
        )

    @pytest.mark.parametrize(("failures", "back_off"), [(1, 60), (2, 120), (5, 960), (10, 3600)])
    def test_failures_back_off(self, failures: int, back_off: float) -> None:
        failed = with_status(probes=build_probe_results(*[False] * failures))
        ended = failed.status.probes[-1].finished or 0
        before, due = ended + back_off - 1, ended + back_off
        assert decide_status(failed, HELD_NODE, now=before).status.phase is QuarantinePhase.ACTIVE
        probing = decide_status(failed, HELD_NODE, now=due).status
        assert probing.phase is QuarantinePhase.PROBING
        assert len(probing.probes) == min(failures + 1, 10)  # the schema allows no more

    def test_a_longer_expiry_holds_after_failed_probes_too(self) -> None:
        failed = with_status(probes=build_probe_results(False))
        longer = replace(failed, spec=replace(failed.spec, expires_after=86400.0))
        assert decide_status(longer, HELD_NODE, now=START + 20000).status.phase is QuarantinePhase.ACTIVE


class TestBudget:
    @pytest.mark.parametrize(
        ("nodes", "max_nodes", "share", "allowed"),
        [(6, 5, 0.1, 1), (1, 5, 0.1, 1), (30, 5, 0.1, 3), (1000, 5, 0.1, 5), (100, 50, 0.29, 29), (6, 0, 0.5, 0)],
    )
    def test_the_budget_is_limited_by_share_and_count(
        self, nodes: int, max_nodes: int, share: float, allowed: int
    ) -> None:
        assert count_allowed_nodes(nodes, max_nodes, share) == allowed


def build_node_body(*owners: tuple[str, str], unschedulable: bool = True, **metadata: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
    managed = [{"manager": name, "operation": how, "fieldsV1": fields} for name, how in owners]
    status = {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}
    return {
        "metadata": {"uid": "uid-1", "managedFields": [status, *managed], **metadata},
        "spec": {"unschedulable": True} if unschedulable else {},
    }


class TestParsing:
    OPERATOR = (FIELD_MANAGER_CORDON, "Apply")

    @pytest.mark.parametrize(
        ("body", "by_operator", "by_others"),
        [
            (build_node_body(unschedulable=False), False, False),
            (build_node_body(OPERATOR), True, False),
            (build_node_body(OPERATOR, ("kubectl", "Update")), True, True),
            (build_node_body(("kubectl", "Update")), False, True),
            (build_node_body(), False, True),  # its owner is unknown, so the operator must not remove it
        ],
    )
    def test_the_owner_of_a_cordon_is_its_field_manager(
        self, body: dict[str, Any], by_operator: bool, by_others: bool
    ) -> None:
        node = TargetNode.parse(body)
        assert (node.cordoned, node.cordoned_by_others) == (by_operator, by_others)

    def test_opt_out_counts_with_any_value(self) -> None:
        assert TargetNode.parse(build_node_body(labels={"pacekeeper.dev/no-quarantine": ""})).opted_out

    def test_a_failed_pod_has_a_reason(self) -> None:
        state = {"terminated": {"reason": "Error", "message": "3 of 4 GPUs answer\n"}}
        pod = ProbePod.parse({"status": {"phase": "Failed", "containerStatuses": [{"state": state}]}})
        assert pod == ProbePod("Failed", "3 of 4 GPUs answer")
        refused = ProbePod.parse({"status": {"phase": "Failed", "reason": "OutOfcpu", "message": "Node has no cpu"}})
        assert refused == ProbePod("Failed", "OutOfcpu: Node has no cpu", InconclusiveReason.NOT_RUN)

    @pytest.mark.parametrize(
        ("reason", "sandbox", "inconclusive"),
        [
            ("ErrImagePull", "False", InconclusiveReason.IMAGE),
            ("ImagePullBackOff", "True", InconclusiveReason.IMAGE),
            ("ContainerCreating", "True", InconclusiveReason.IMAGE),  # the pull goes on
            ("ContainerCreating", "False", None),  # no sandbox: the node cannot start pods
            ("CreateContainerError", "True", None),
        ],
    )
    def test_a_pod_without_an_image_is_inconclusive(
        self, reason: str, sandbox: str, inconclusive: InconclusiveReason | None
    ) -> None:
        waiting = {"name": "probe", "state": {"waiting": {"reason": reason}}}
        conditions = [{"type": "PodReadyToStartContainers", "status": sandbox}]
        status = {"phase": "Pending", "containerStatuses": [waiting], "conditions": conditions}
        assert ProbePod.parse({"status": status}).inconclusive is inconclusive

    @pytest.mark.parametrize(("status", "ready"), [("True", True), ("Unknown", False), ("False", False)])
    def test_ready_follows_the_node_condition(self, status: str, ready: bool) -> None:
        body = build_node_body() | {"status": {"conditions": [{"type": "Ready", "status": status}]}}
        assert TargetNode.parse(body).ready is ready
        assert not TargetNode.parse(build_node_body()).ready  # a kubelet that has never reported


class TestProbeProgram:
    def test_the_operator_reads_what_the_probe_measures(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as server:
            serving = threading.Thread(target=server.serve, args=(120,))
            serving.start()
            link = node_probe.measure_link("127.0.0.1", server.port, "s3cret")
            serving.join(60)
            assert not serving.is_alive(), "its only peer is served"
        links = [{"peer": "node-1", "up": link.up, "down": link.down, "ping": link.ping}]
        measured = {**node_probe.measure_node_speed(), "links": links}
        metrics, unfit = read_measurements(json.dumps(measured))
        assert not unfit
        assert metrics is not None
        assert metrics.core_seconds > 0
        assert 0 <= metrics.idle_cores <= metrics.cores
        assert metrics.memory_bytes_per_second > 1e6
        assert metrics.links[0].up > 1e6
        assert 0 < metrics.links[0].ping < 1

    def test_a_client_without_the_secret_is_rejected_and_does_not_count(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as server:
            serving = threading.Thread(target=server.serve, args=(120,))
            serving.start()
            with pytest.raises(OSError, match="closed the connection"):
                node_probe.measure_link("127.0.0.1", server.port, "guessed")
            node_probe.measure_link("127.0.0.1", server.port, "s3cret")
            serving.join(60)
            assert not serving.is_alive()

    def test_the_probe_server_does_not_wait_indefinitely_for_a_peer(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as server:
            began = time.monotonic()
            server.serve(0.1)
            assert time.monotonic() - began < 60

    def test_missing_and_faulty_gpus_are_unfit(self) -> None:
        node_probe.check_gpus(2, "GPU-a, 0\nGPU-b, [N/A]\n")
        with pytest.raises(node_probe.NodeUnfit, match="1 of 2 GPUs answer"):
            node_probe.check_gpus(2, "GPU-a, 0\n")
        with pytest.raises(node_probe.NodeUnfit, match="GPU-b has 7 uncorrected"):
            node_probe.check_gpus(2, "GPU-a, 0\nGPU-b, 7\n")
        with pytest.raises(node_probe.NodeUnfit) as none:
            node_probe.check_gpus(2, "")
        assert none.value.check == node_probe.DRIVER, "perhaps only the pod sees no driver"

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [
            ("GPU-a,GPU-b", 2),
            ("GPU-a,GPU-a", 1),
            ("GPU-a, GPU-b", 2),
            ("MIG-1,MIG-2", 1),
            ("all", 8),
            ("void", 8),
            (None, 8),
        ],
    )
    def test_gpus_that_are_shared_count_once(self, visible: str | None, expected: int) -> None:
        environment = {} if visible is None else {"NVIDIA_VISIBLE_DEVICES": visible}
        assert node_probe.count_physical_gpus(8, environment) == expected

    def test_an_unreachable_address_is_unfit(self) -> None:
        with pytest.raises(node_probe.NodeUnfit, match=r"127\.0\.0\.1:1 cannot be reached"):
            node_probe.check_network("127.0.0.1", 1)
