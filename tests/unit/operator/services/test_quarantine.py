"""What a NodeQuarantine needs next, and what a probe pod finds."""

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
HELD = TargetNode("uid-1", tainted=True, cordoned=True)
ELSEWHERE = (ProbePod("Succeeded", node="node-2", has_gpus=True),)
FREE = TargetNode("uid-1")
FRESH = Quarantine("node-1", "q-uid-123", QuarantineSpec("bad", "uid-1", approved=True), QuarantineStatus())
GUARDED = replace(FRESH, guarded=True)
ACTIVE_STATUS = QuarantineStatus(phase=QuarantinePhase.ACTIVE, cordoned_at=START, previously_cordoned=False)


def next_step(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None = None, now: float = START
) -> QuarantineStep:
    return decide_quarantine_step(quarantine, node, pod, QuarantineContext(), now)


def report(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None = None, now: float = START
) -> WriteQuarantineStatus:
    action = next_step(quarantine, node, pod, now)
    assert isinstance(action, WriteQuarantineStatus)
    return action


def with_status(**changes: Any) -> Quarantine:
    return replace(GUARDED, status=replace(ACTIVE_STATUS, **changes))


def probed(*results: bool | None, start: float = START + 3600) -> tuple[ProbeResult, ...]:
    """One probe each, 10 s long, 1000 s apart; None: it still runs."""
    return tuple(
        ProbeResult(f"p{i}", start + 1000 * i, None if passed is None else start + 1000 * i + 10, passed, "so it said")
        for i, passed in enumerate(results)
    )


class TestHolding:
    def test_the_finalizer_comes_before_anything_is_done_to_the_node(self) -> None:
        assert next_step(FRESH, FREE) == AddFinalizer()
        assert next_step(GUARDED, FREE) == HoldNode(repeated=False)

    def test_a_half_marked_node_is_marked_wholly(self) -> None:
        assert next_step(GUARDED, replace(FREE, tainted=True)) == HoldNode(repeated=False)
        assert next_step(GUARDED, replace(FREE, cordoned=True)) == HoldNode(repeated=False)

    def test_the_held_node_is_written_down_with_time_and_the_cordon_of_others(self) -> None:
        written = report(GUARDED, replace(HELD, cordoned_by_others=True))
        assert written.event == "NodeQuarantined"
        assert written.status.phase is QuarantinePhase.ACTIVE
        assert (written.status.cordoned_at, written.status.previously_cordoned) == (START, True)
        said = {c.type: (c.status, c.reason, c.last_transition_time) for c in written.status.conditions}
        assert said == {"Quarantined": ("True", "Quarantined", START), "Witnessed": ("True", "Person", START)}
        assert next_step(
            replace(GUARDED, status=written.status), replace(HELD, cordoned_by_others=True)
        ) == RequeueAfter(60)

    def test_a_mark_that_somebody_takes_away_comes_back(self) -> None:
        assert next_step(with_status(), replace(HELD, cordoned=False)) == HoldNode(repeated=True)

    def test_unapproved_touches_nothing(self) -> None:
        waiting = replace(GUARDED, spec=replace(GUARDED.spec, approved=False))
        written = report(waiting, FREE)
        assert (written.status.phase, written.event) == (QuarantinePhase.PENDING, "ApprovalNeeded")
        assert next_step(replace(waiting, status=written.status), FREE) == RequeueAfter(60)

    def test_a_quarantine_made_by_hand_means_the_node_that_was_there_first(self) -> None:
        by_hand = replace(GUARDED, spec=QuarantineSpec("by hand", approved=True))
        written = report(by_hand, FREE)
        assert written.status.node_uid == "uid-1"
        seen = replace(by_hand, status=written.status)
        assert next_step(seen, FREE) == HoldNode(repeated=False)
        assert report(seen, TargetNode("uid-2")).status.phase is QuarantinePhase.RELEASED


class TestRelease:
    @pytest.mark.parametrize(
        ("node", "word"),
        [
            (None, "does not exist"),
            (TargetNode("uid-2"), "was recreated"),
            (replace(HELD, opted_out=True), "no-quarantine"),
        ],
    )
    def test_ends_by_itself(self, node: TargetNode | None, word: str) -> None:
        held = with_status()
        if node is not None and node.marked:
            step = next_step(held, node)
            assert isinstance(step, ReleaseNode)
            assert word in step.reason
            node = replace(node, tainted=False, cordoned=False)
        written = report(held, node)
        assert word in (written.status.message or "")
        assert next_step(replace(held, status=written.status), node) == DeleteQuarantine()

    def test_deletion_releases_before_the_finalizer_goes(self) -> None:
        deleted = replace(with_status(), deleted=True)
        assert isinstance(next_step(deleted, HELD), ReleaseNode)
        assert isinstance(next_step(deleted, replace(HELD, tainted=False)), ReleaseNode)
        assert next_step(deleted, FREE) == RemoveFinalizer()
        assert next_step(deleted, None) == RemoveFinalizer()

    def test_deletion_ends_a_probe_that_runs(self) -> None:
        deleted = replace(with_status(probes=probed(None)), deleted=True)
        assert isinstance(next_step(deleted, HELD, ProbePod("Running")), ReleaseNode)
        assert next_step(deleted, FREE, ProbePod("Running")) == EndProbe("p0")

    def test_a_new_node_is_not_touched_by_the_quarantine_of_the_old_one(self) -> None:
        assert (
            next_step(replace(with_status(), deleted=True), TargetNode("uid-2", cordoned_by_others=True))
            == RemoveFinalizer()
        )

    def test_three_passed_probes_in_a_row_release_and_keep_releasing(self) -> None:
        passed = with_status(probes=probed(True, True, True))
        assert isinstance(next_step(passed, HELD), ReleaseNode)
        assert isinstance(next_step(passed, replace(HELD, cordoned=False)), ReleaseNode)
        assert next_step(passed, FREE, ProbePod("Succeeded")) == EndProbe("p2")
        ended = report(passed, FREE)
        assert ended.status.phase is QuarantinePhase.RELEASED
        assert next_step(replace(passed, status=ended.status), FREE) == DeleteQuarantine()


class TestProbe:
    def test_starts_at_expiry_not_before_and_is_written_down_first(self) -> None:
        held = replace(GUARDED, status=report(GUARDED, HELD).status)
        assert next_step(held, HELD, now=START + 3590) == RequeueAfter(10)
        written = report(held, HELD, now=START + 3600)
        assert written.status.phase is QuarantinePhase.PROBING
        begun = replace(held, status=written.status)
        pod = written.status.probes[-1].pod
        assert next_step(begun, HELD, None, START + 3601) == StartProbe(pod)
        assert next_step(begun, HELD, ProbePod("Running"), START + 3601) == RequeueAfter(1)

    @pytest.mark.parametrize(
        ("pod", "seconds", "words"),
        [
            (ProbePod("Failed", "3 of 4 GPUs answer", group_peers=ELSEWHERE), 5, "3 of 4 GPUs answer"),
            (ProbePod("Pending", group_peers=ELSEWHERE), 60, "did not end within 60 s"),
            (ProbePod("Running", "waits", group_peers=ELSEWHERE), 60, "did not end within 60 s: waits"),
        ],
    )
    def test_failure_keeps_the_node_and_says_why_and_when_next(self, pod: ProbePod, seconds: float, words: str) -> None:
        begun = with_status(phase=QuarantinePhase.PROBING, probes=probed(None))
        now = START + 3600 + seconds
        written = report(begun, HELD, pod, now)
        assert (written.event, written.warning) == ("ProbeFailed", True)
        failed = replace(begun, status=written.status)
        assert failed.last_probe == ProbeResult("p0", START + 3600, now, False, words)
        assert next_step(failed, HELD, pod, now) == EndProbe("p0")
        kept = report(failed, HELD, None, now).status
        assert kept.phase is QuarantinePhase.ACTIVE
        assert words in (kept.message or "")
        assert next_step(replace(failed, status=kept), HELD, None, now) == RequeueAfter(60)

    @pytest.mark.parametrize(
        "pod",
        [
            None,
            ProbePod("Pending", "ErrImagePull", InconclusiveReason.IMAGE),
            ProbePod("Failed", "OutOfcpu", InconclusiveReason.NOT_RUN),
        ],
    )
    def test_a_pod_that_says_nothing_of_the_node_is_no_failure(self, pod: ProbePod | None) -> None:
        begun = with_status(phase=QuarantinePhase.PROBING, probes=probed(None))
        written = report(begun, HELD, pod, START + 3660)
        assert written.event == "ProbeInconclusive"
        (ended,) = written.status.probes
        assert (ended.passed, ended.inconclusive) == (None, pod.inconclusive if pod else InconclusiveReason.NOT_RUN)
        kept = replace(begun, status=written.status)
        assert report(kept, HELD, now=START + 3661).status.phase is QuarantinePhase.ACTIVE  # it waits for the next one

    def test_no_quarantine_is_for_ever_for_want_of_an_image(self) -> None:
        vain = tuple(replace(p, passed=None, inconclusive=InconclusiveReason.IMAGE) for p in probed(*[False] * 5))
        assert isinstance(next_step(with_status(probes=vain[:4]), HELD), WriteQuarantineStatus)
        freed = next_step(with_status(probes=vain), HELD)
        assert isinstance(freed, ReleaseNode)
        assert "could not check it" in freed.reason
        failed = with_status(probes=(*vain[:2], *probed(False), *vain[3:]))
        assert isinstance(next_step(failed, HELD), WriteQuarantineStatus)  # one of them has seen that the node is bad

    def test_nor_for_what_probes_fail_on_every_node(self) -> None:
        vain = tuple(
            replace(p, passed=None, inconclusive=InconclusiveReason.SHARED_FAILURE) for p in probed(*[False] * 5)
        )
        assert isinstance(next_step(with_status(probes=vain), HELD), ReleaseNode)
        alone = tuple(replace(p, inconclusive=InconclusiveReason.NO_COMPARISON) for p in vain)
        assert isinstance(next_step(with_status(probes=alone), HELD), WriteQuarantineStatus)

    def test_what_was_seen_before_the_quarantine_does_not_release(self) -> None:
        """A person has approved a suspicion that a probe had cleared."""
        before = with_status(probes=probed(True, start=START - 100))
        assert isinstance(next_step(before, HELD), WriteQuarantineStatus)

    def test_success_is_written_down_before_the_release(self) -> None:
        begun = with_status(phase=QuarantinePhase.PROBING, probes=probed(None))
        written = report(begun, HELD, ProbePod("Succeeded"), START + 3605)
        assert written.event == "ProbePassed"
        assert "1 in a row of 3" in (written.status.message or "")
        held = replace(begun, status=written.status)
        assert report(held, HELD, now=START + 3606).status.phase is QuarantinePhase.ACTIVE
        after = report(held, HELD, now=START + 3605 + CLEAN_PROBE_PAUSE_SECONDS).status
        assert (after.phase, len(after.probes)) == (QuarantinePhase.PROBING, 2), "the next one does not wait for long"

    def test_a_release_takes_as_many_as_the_platform_wants(self) -> None:
        once = with_status(probes=probed(True))
        assert isinstance(
            decide_quarantine_step(
                once, HELD, None, QuarantineContext(QuarantineRules(release_probes=1)), START + 3700
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
    def test_one_that_fails_begins_the_row_anew_and_one_that_says_nothing_does_not(
        self, results: tuple[bool | str, ...], released: bool
    ) -> None:
        said = probed(*(result if isinstance(result, bool) else False for result in results))
        probes = tuple(
            replace(probe, passed=None, inconclusive=InconclusiveReason.NOT_RUN) if result == "nothing" else probe
            for probe, result in zip(said, results, strict=True)
        )
        assert isinstance(next_step(with_status(probes=probes), HELD), ReleaseNode) is released

    def test_a_failure_behind_one_that_passed_is_the_first_again(self) -> None:
        failed = with_status(probes=probed(False, False, True, False))
        ended = failed.status.probes[-1].finished or 0
        assert report(failed, HELD, now=ended + 59).status.phase is QuarantinePhase.ACTIVE
        assert report(failed, HELD, now=ended + 60).status.phase is QuarantinePhase.PROBING

    def test_the_others_of_its_circle_are_waited_for_and_tell_whether_the_node_is_slow(self) -> None:
        begun = with_status(phase=QuarantinePhase.PROBING, probes=probed(None))
        others = tuple(ProbePod("Running", node=name) for name in ("a", "b"))
        pod = ProbePod("Succeeded", node="node-1", measurements=ProbeMetrics(0.002), group_peers=others)
        assert next_step(begun, HELD, pod, START + 3605) == RequeueAfter(1)
        done = tuple(replace(other, phase="Succeeded", measurements=ProbeMetrics(0.001)) for other in others)
        written = report(begun, HELD, replace(pod, group_peers=done), START + 3606)
        assert written.event == "ProbeFailed"
        assert "2.0 times as long" in (written.status.message or "")
        assert written.status.probes[-1].metrics == pod.measurements
        assert report(begun, HELD, pod, START + 3660).event == "ProbePassed", "nobody is waited for without end"

    def test_a_circle_whose_own_pod_never_came_is_ended(self) -> None:
        begun = with_status(phase=QuarantinePhase.PROBING, probes=probed(None))
        without = ProbePod(phase="", group_peers=(ProbePod("Running"),))
        assert next_step(begun, HELD, without, START + 3605) == StartProbe("p0")
        written = report(begun, HELD, without, START + 3660)
        assert written.status.probes[-1].inconclusive is InconclusiveReason.NOT_RUN
        assert next_step(replace(begun, status=written.status), HELD, without, START + 3661) == EndProbe("p0")

    @pytest.mark.parametrize(("failures", "back_off"), [(1, 60), (2, 120), (5, 960), (10, 3600)])
    def test_failures_back_off(self, failures: int, back_off: float) -> None:
        failed = with_status(probes=probed(*[False] * failures))
        ended = failed.status.probes[-1].finished or 0
        before, due = ended + back_off - 1, ended + back_off
        assert report(failed, HELD, now=before).status.phase is QuarantinePhase.ACTIVE
        begun = report(failed, HELD, now=due).status
        assert begun.phase is QuarantinePhase.PROBING
        assert len(begun.probes) == min(failures + 1, 10)  # the definition takes no more

    def test_a_longer_expiry_holds_after_failed_probes_too(self) -> None:
        failed = with_status(probes=probed(False))
        longer = replace(failed, spec=replace(failed.spec, expires_after=86400.0))
        assert report(longer, HELD, now=START + 20000).status.phase is QuarantinePhase.ACTIVE


class TestBudget:
    @pytest.mark.parametrize(
        ("nodes", "max_nodes", "share", "allowed"),
        [(6, 5, 0.1, 1), (1, 5, 0.1, 1), (30, 5, 0.1, 3), (1000, 5, 0.1, 5), (100, 50, 0.29, 29), (6, 0, 0.5, 0)],
    )
    def test_by_share_and_count(self, nodes: int, max_nodes: int, share: float, allowed: int) -> None:
        assert count_allowed_nodes(nodes, max_nodes, share) == allowed


def node_body(*owners: tuple[str, str], unschedulable: bool = True, **metadata: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
    managed = [{"manager": name, "operation": how, "fieldsV1": fields} for name, how in owners]
    status = {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}
    return {
        "metadata": {"uid": "uid-1", "managedFields": [status, *managed], **metadata},
        "spec": {"unschedulable": True} if unschedulable else {},
    }


class TestParsing:
    OURS = (FIELD_MANAGER_CORDON, "Apply")

    @pytest.mark.parametrize(
        ("body", "ours", "others"),
        [
            (node_body(unschedulable=False), False, False),
            (node_body(OURS), True, False),
            (node_body(OURS, ("kubectl", "Update")), True, True),
            (node_body(("kubectl", "Update")), False, True),
            (node_body(), False, True),  # nobody is known to own it, so it is not ours to take away
        ],
    )
    def test_whose_cordon_it_is(self, body: dict[str, Any], ours: bool, others: bool) -> None:
        node = TargetNode.parse(body)
        assert (node.cordoned, node.cordoned_by_others) == (ours, others)

    def test_opt_out_counts_with_any_value(self) -> None:
        assert TargetNode.parse(node_body(labels={"pacekeeper.dev/no-quarantine": ""})).opted_out

    def test_a_failed_pod_says_why(self) -> None:
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
    def test_a_pod_without_an_image_says_nothing_about_its_node(
        self, reason: str, sandbox: str, inconclusive: InconclusiveReason | None
    ) -> None:
        waiting = {"name": "probe", "state": {"waiting": {"reason": reason}}}
        conditions = [{"type": "PodReadyToStartContainers", "status": sandbox}]
        status = {"phase": "Pending", "containerStatuses": [waiting], "conditions": conditions}
        assert ProbePod.parse({"status": status}).inconclusive is inconclusive

    @pytest.mark.parametrize(("status", "ready"), [("True", True), ("Unknown", False), ("False", False)])
    def test_ready_is_what_the_condition_says(self, status: str, ready: bool) -> None:
        body = node_body() | {"status": {"conditions": [{"type": "Ready", "status": status}]}}
        assert TargetNode.parse(body).ready is ready
        assert not TargetNode.parse(node_body()).ready  # a kubelet that has never spoken


class TestProbeProgram:
    def test_what_it_measures_is_what_the_operator_reads(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as host:
            serving = threading.Thread(target=host.serve, args=(10,))
            serving.start()
            link = node_probe.measure_link("127.0.0.1", host.port, "s3cret")
            serving.join(5)
            assert not serving.is_alive(), "its only guest is served"
        links = [{"peer": "node-1", "up": link.up, "down": link.down, "ping": link.ping}]
        told = {**node_probe.measure_node_speed(), "links": links}
        figures, unfit = read_measurements(json.dumps(told))
        assert not unfit
        assert figures is not None
        assert figures.core_seconds > 0
        assert 0 <= figures.idle_cores <= figures.cores
        assert figures.memory_bytes_per_second > 1e6
        assert figures.links[0].up > 1e6
        assert 0 < figures.links[0].ping < 1

    def test_a_stranger_is_hung_up_on_and_is_no_guest(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as host:
            serving = threading.Thread(target=host.serve, args=(5,))
            serving.start()
            with pytest.raises(OSError, match="closed the connection"):
                node_probe.measure_link("127.0.0.1", host.port, "guessed")
            node_probe.measure_link("127.0.0.1", host.port, "s3cret")
            serving.join(4)
            assert not serving.is_alive()

    def test_a_guest_that_never_comes_is_not_waited_for_without_end(self) -> None:
        with node_probe.NodeProbeServer("s3cret", 1, port=0) as host:
            began = time.monotonic()
            host.serve(0.1)
            assert time.monotonic() - began < 60

    def test_gpus(self) -> None:
        node_probe.check_gpus(2, "GPU-a, 0\nGPU-b, [N/A]\n")
        with pytest.raises(node_probe.NodeUnfit, match="1 of 2 GPUs answer"):
            node_probe.check_gpus(2, "GPU-a, 0\n")
        with pytest.raises(node_probe.NodeUnfit, match="GPU-b has 7 uncorrected"):
            node_probe.check_gpus(2, "GPU-a, 0\nGPU-b, 7\n")
        with pytest.raises(node_probe.NodeUnfit) as none:
            node_probe.check_gpus(2, "")
        assert none.value.check == node_probe.DRIVER, "it is the pod that sees no driver, perhaps"

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

    def test_network(self) -> None:
        with pytest.raises(node_probe.NodeUnfit, match=r"127\.0\.0\.1:1 cannot be reached"):
            node_probe.check_network("127.0.0.1", 1)
