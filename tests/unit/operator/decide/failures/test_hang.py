"""Decisions on hangs: by earlier hangs, by where they were, and by the remedies that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, SignalKind
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.reports import BlockedConnection, FaultKind, FaultReport, RankState
from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import JobStatus, Remedy
from pacekeeper_operator.decide.decision import Decision, FailJob, QuarantineNode, ReplaceWorker, RestartRanks
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.failures import hang
from pacekeeper_operator.decide.lifecycle import status
from pacekeeper_operator.state.desired_state import PastIncident
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_policy,
    build_stall,
    build_stalls,
    build_training,
    build_untrained,
    change_worker,
)

IN_SCRIPT = 'File "/job/train.py", line 9 in spin'
WAITING = RankState(
    rank=0,
    phase="TRAIN",
    phase_seconds=100.0,
    step=500,
    collective="ALL_REDUCE",
    group=7,
    sequence=42,
    collectives_entered=42,
    waiting_seconds=3.0,
    process_state="S",
    moving=False,
    stack='File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce',
)
GROUPS = (Communicator(7, "0-3", "data"), Communicator(8, "2,3", "tensor"))
BLOCKED = "rank 2 blocks all others (Stopped)"


def decide_hang(observation: Observation, culprit: int = 2, **stack: str) -> Decision:
    """Return the decision on a hang in which rank `culprit` blocks the others; -1: all wait for each other."""
    faults = []
    for member in observation.plan.members:
        fault = build_stall(member.worker, member.ranks[0], culprit=member.ranks[0] == culprit)
        (state,) = fault.ranks
        waiting = 60.0 if culprit < 0 else state.waiting_seconds
        own_stack = stack.get(f"rank{state.rank}", state.stack)
        faults.append(replace(fault, ranks=(replace(state, waiting_seconds=waiting, stack=own_stack),)))
    decision = hang.check_hangs(replace(observation, faults=tuple(faults)), build_policy())
    assert decision is not None
    return decision


def build_with_past_incident(past: PastIncident, **changes: Any) -> Observation:
    observation = build_training(**changes)
    return observation.with_desired(observation.desired.with_incidents(past=(past,)))


def map_reasons(decision: Decision) -> dict[str, str]:
    return {price.name: price.reason for price in decision.remedies}


def test_the_last_step_is_that_of_the_stalls_if_heartbeats_are_older() -> None:
    assert decide_hang(build_training(step=480)).last_step == 500
    assert decide_hang(build_training(step=510)).last_step == 510


def test_a_first_hang_restarts_the_ranks_in_place() -> None:
    decision = decide_hang(build_training())
    assert decision.actions == (RestartRanks(),)
    assert map_reasons(decision)["ReplaceWorker"] == "once is no reason to blame the worker"
    assert (decision.message, decision.class_) == (BLOCKED, IncidentClass.UNKNOWN)


def test_an_earlier_hang_of_another_rank_restarts_the_ranks_in_place() -> None:
    """The rank has moved there since, because the evidence does not show which of the two places is at fault."""
    decision = decide_hang(
        build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w2-0", node="node-2")
        )
    )
    assert (decision.actions, decision.message) == ((RestartRanks(),), BLOCKED)


def test_a_repeated_hang_on_the_same_worker_moves_the_rank() -> None:
    decision = decide_hang(
        build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")
        )
    )
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert (action.worker, action.dead) == ("j-w2-0", True)
    assert decision.message == f"{BLOCKED}; it has hung on this worker before"


def test_a_repeated_hang_without_a_spare_restarts_the_ranks_in_place() -> None:
    decision = decide_hang(
        build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2"), spares=0
        )
    )
    assert decision.actions == (RestartRanks(),)


def test_a_hang_that_follows_the_rank_is_of_the_application() -> None:
    decision = decide_hang(
        build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        )
    )
    assert decision.class_ is IncidentClass.APPLICATION
    assert decision.message == f"{BLOCKED}; it has hung on another worker before, so check the script"
    assert map_reasons(decision)["ReplaceWorker"] == "it follows the rank, not the worker"


@pytest.mark.parametrize("cause", [IncidentCause.CRASH, IncidentCause.HANG])
def test_only_hangs_within_the_window_count(cause: IncidentCause) -> None:
    past = PastIncident(
        cause, NOW - (100 if cause is IncidentCause.CRASH else 3601), 5.0, rank=2, worker="j-w2-0", node="node-2"
    )
    assert decide_hang(build_with_past_incident(past)).actions == (RestartRanks(),)


class TestNode:
    def build_suspect(self) -> Observation:
        return build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        )

    def test_hangs_of_several_ranks_on_a_node_request_its_quarantine(self) -> None:
        decision = decide_hang(self.build_suspect())
        moved, quarantine = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert isinstance(quarantine, QuarantineNode)
        assert (quarantine.node, decision.class_) == ("node-2", IncidentClass.INFRASTRUCTURE)
        assert decision.message == f"{BLOCKED}; it is not the first rank to hang on this node"

    def test_hangs_of_other_jobs_on_a_node_request_its_quarantine(self) -> None:
        observation = build_training()
        suspicious = replace(observation.cluster_view, hung_nodes={"node-2": 1})
        assert isinstance(decide_hang(replace(observation, cluster_view=suspicious)).actions[-1], QuarantineNode)
        elsewhere = replace(observation.cluster_view, hung_nodes={"node-1": 1, "node-2": 0})
        assert decide_hang(replace(observation, cluster_view=elsewhere)).actions == (RestartRanks(),)

    def test_a_job_that_fails_requests_no_quarantine(self) -> None:
        observation = self.build_suspect()
        observation = observation.with_desired(
            observation.desired.with_budget(restarts=tuple(NOW - n for n in range(1, 11))).with_lifecycle(
                training_since=None
            )
        )
        decision = decide_hang(observation)
        (end,) = decision.actions
        assert isinstance(end, FailJob)
        assert (decision.remedy, BLOCKED in end.message) == (None, True)

    def test_a_worker_whose_pod_is_gone_names_no_node(self) -> None:
        decision = decide_hang(change_worker(self.build_suspect(), "j-w2-0", gone=True))
        assert (decision.node, decision.worker) == (None, "j-w2-0")
        assert not any(isinstance(action, QuarantineNode) for action in decision.actions)


class TestNoCulprit:
    def test_ranks_that_wait_for_each_other_restart_without_a_culprit(self) -> None:
        observation = build_with_past_incident(
            PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")
        )
        decision = decide_hang(observation, culprit=-1)
        assert decision.message == "all ranks wait in the same collective and none comes out of it"
        assert (decision.rank, decision.worker, decision.node) == (None, None, None)
        assert decision.actions == (RestartRanks(),)
        assert (decision.class_, decision.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)

    def test_a_repeated_hang_without_a_culprit_restarts_the_ranks(self) -> None:
        decision = decide_hang(build_with_past_incident(PastIncident(IncidentCause.HANG, NOW - 100, 5.0)), culprit=-1)
        assert decision.message == "all ranks wait in the same collective and none comes out of it"
        assert decision.actions == (RestartRanks(),)


def test_the_evidence_contains_the_stack_of_the_culprit_only() -> None:
    evidence = decide_hang(build_training(), rank2="main()").evidence
    assert [piece for piece in evidence if "stack" in piece] == ["rank 2, stack:\nmain()"]
    assert not [piece for piece in decide_hang(build_training()).evidence if "stack:" in piece], "there is none"


def test_the_evidence_contains_the_newest_report_of_nccl() -> None:
    observation = build_training()
    first, *others = (
        build_stall(member.worker, member.ranks[0], culprit=member.ranks[0] == 2) for member in observation.plan.members
    )
    reports = (
        replace(first, name="older", noticed_at=NOW - 5, ras="all ranks alike", transfers="rank 0: nothing"),
        replace(first, ras="dead: rank 2", transfers="rank 0: receives from rank 2"),
        *others,
    )
    decision = hang.check_hangs(replace(observation, faults=reports), build_policy())
    assert decision is not None
    assert [piece for piece in decision.evidence if "RAS" in piece or "NCCL" in piece] == [
        f"NCCL's RAS, queried by {first.worker}:\ndead: rank 2",
        f"{first.worker} over NCCL: rank 0: receives from rank 2",
    ]
    assert not [piece for piece in decide_hang(observation).evidence if "NCCL" in piece], "NCCL was not queried"


class TestFinding:
    """Fault class, culprit, and at least two kinds of signals."""

    def make_finding(
        self, culprit: RankState, *others: RankState, past: PastIncident | None = None, **report: Any
    ) -> Finding:
        observation = build_training() if past is None else build_with_past_incident(past)
        rest = (replace(other, rank=rank) for other, rank in zip(others, (0, 1, 3), strict=True))
        states = (replace(culprit, rank=2), *rest)
        report |= {"communicators": GROUPS}
        faults = tuple(
            FaultReport(
                f"{state.rank}",
                FaultKind.STALLED,
                f"j-w{state.rank}-0",
                1,
                NOW,
                ranks=(state,),
                **report,
            )
            for state in states
        )
        decision = hang.check_hangs(replace(observation, faults=faults), build_policy())
        assert decision is not None
        assert decision.finding is not None
        assert len(decision.finding.signal_kinds) >= 2
        return decision.finding

    def test_the_state_of_the_culprit_determines_the_fault(self) -> None:
        waiting, outside = WAITING, replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT)
        found = self.make_finding(outside, *[waiting] * 3)
        assert (found.fault, found.culprit) == (FaultClass.CODE, "rank 2")
        messages = {witness.kind: witness.message for witness in found.signals}
        assert messages[SignalKind.WAITS] == "ranks 0-1,3 wait in ALL_REDUCE 42 of group 'data' of ranks 0-3 for rank 2"
        assert messages[SignalKind.STACK] == f"rank 2: {IN_SCRIPT}"
        assert messages[SignalKind.PROCESS] == "the process of rank 2 sleeps"
        assert self.make_finding(replace(outside, process_state="D"), *[waiting] * 3).fault is FaultClass.HARDWARE
        assert self.make_finding(replace(outside, process_state="T"), *[waiting] * 3).fault is FaultClass.UNKNOWN
        loading = replace(outside, phase="LOAD", overdue=True)
        assert self.make_finding(loading, *[waiting] * 3).fault is FaultClass.DATA
        assert self.make_finding(replace(waiting, collective="BROADCAST"), *[waiting] * 3).fault is FaultClass.CODE
        gpus = [replace(waiting, device="STARTED", device_group=7, device_sequence=5) for _ in range(3)]
        kernel = self.make_finding(replace(gpus[0], device="SCHEDULED"), *gpus)
        assert (kernel.fault, SignalKind.GPU in kernel.signal_kinds) == (FaultClass.UNKNOWN, True)

    def test_earlier_hangs_determine_the_fault(self) -> None:
        outside = replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT)
        elsewhere = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        found = self.make_finding(replace(outside, process_state="D"), *[WAITING] * 3, past=elsewhere)
        assert (found.fault, SignalKind.HISTORY in found.signal_kinds) == (FaultClass.CODE, True)
        on_node = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        assert self.make_finding(outside, *[WAITING] * 3, past=on_node).fault is FaultClass.HARDWARE

    def test_a_stalled_transfer_within_a_group_names_its_links(self) -> None:
        pair = replace(WAITING, group=8, sequence=5, waiting_seconds=12.0)
        found = self.make_finding(
            pair, WAITING, WAITING, replace(pair, entered="7:42"), transfers="rank 2: sends to rank 3"
        )
        assert (found.fault, found.culprit) == (FaultClass.NETWORK, "links of ranks 2, 3")
        assert found.signal_kinds == {SignalKind.WAITS, SignalKind.PROCESS, SignalKind.STACK, SignalKind.TRANSPORT}


class TestLostPackets:
    """Pairs of workers between which packets are lost, according to the kernels of both ends."""

    def make_decision(self, *ends: tuple[int, str]) -> tuple[Decision | None, set[SignalKind]]:
        """Decide on blocked connections. `ends`: a rank, and the address that does not acknowledge what it sends."""
        observation = build_training()
        blocked = {
            rank: [BlockedConnection(rank, address, 2.4) for sender, address in ends if sender == rank]
            for rank, _ in ends
        }
        faults = [
            FaultReport(
                f"{rank}",
                FaultKind.STALLED,
                f"j-w{rank}-0",
                1,
                NOW,
                ranks=(replace(WAITING, rank=rank),),
                communicators=GROUPS,
                blocked=tuple(blocked.get(rank, ())),
            )
            for rank in range(4)
        ]
        decision = hang.check_hangs(replace(observation, faults=tuple(faults)), build_policy())
        kinds = (
            set[SignalKind]() if decision is None or decision.finding is None else set(decision.finding.signal_kinds)
        )
        return decision, kinds

    def find_address(self, rank: int) -> str:
        return next(member.address for member in build_training().plan.members if rank in member.ranks)

    def test_a_pair_of_workers_without_acknowledgments_is_named(self) -> None:
        decision, kinds = self.make_decision((0, f"{self.find_address(1)}:50"), (1, f"{self.find_address(0)}:60"))
        assert decision is not None
        assert decision.finding is not None
        assert (decision.finding.fault, decision.finding.culprit) == (
            FaultClass.NETWORK,
            "between rank 0's worker and rank 1's worker",
        )
        assert SignalKind.TRANSPORT in kinds
        messages = {witness.kind: witness.message for witness in decision.finding.signals}
        message = f"nothing that rank 0 sends to {self.find_address(1)}:50 has been acknowledged for 2.4 s"
        assert messages[SignalKind.TRANSPORT].startswith(message)
        assert decision.actions == (RestartRanks(),)

    def test_a_worker_with_all_connections_blocked_is_named_alone(self) -> None:
        decision, _ = self.make_decision((0, f"{self.find_address(1)}:50"), (2, f"{self.find_address(1)}:60"))
        assert decision is not None
        assert decision.finding is not None
        assert decision.finding.culprit == "links of rank 1's worker"

    @pytest.mark.parametrize("remote", ["127.0.0.6:15006", "[fd00::9]:50", "nonsense"])
    def test_behind_a_service_mesh_the_links_of_the_group_are_named(self, remote: str) -> None:
        decision, _ = self.make_decision((0, remote))
        assert decision is not None
        assert decision.finding is not None
        assert decision.finding.culprit == "links of ranks 0, 1, 2, 3"

    def test_without_blocked_connections_no_decision_is_made_yet(self) -> None:
        assert self.make_decision() == (None, set())


def test_a_stall_is_ignored_while_a_member_is_leaving() -> None:
    observation = build_training()
    record = next(worker for worker in observation.state.placement.workers if worker.name == "j-w0-0")
    leaving = observation.with_desired(observation.desired.with_worker(replace(record, leaving="its GPU fails")))
    faults = tuple(
        build_stall(member.worker, member.ranks[0], culprit=member.ranks[0] == 2) for member in observation.plan.members
    )
    assert hang.check_hangs(replace(leaving, faults=faults), build_policy()) is None


@pytest.mark.parametrize(("seconds", "ends", "spares"), [(3.0, 1, 0), (3.0, 2, 0), (400.0, 2, 0), (400.0, 2, 1)])
def test_a_script_that_hangs_again_at_the_same_step_gets_more_time_and_then_fails_the_job(
    seconds: float, ends: int, spares: int
) -> None:
    observation = build_training(spares=spares)
    observation = observation.with_desired(
        observation.desired.with_budget(repetition=RepeatedFailure(500, ends, round=0))
    )
    outside = replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT, waiting_seconds=seconds)
    faults = []
    for member in observation.plan.members:
        fault = build_stall(member.worker, member.ranks[0], culprit=False)
        state = replace(outside if member.ranks[0] == 2 else WAITING, rank=member.ranks[0])
        faults.append(replace(fault, completed_step=True, ranks=(state,)))
    decision = hang.check_hangs(replace(observation, faults=tuple(faults)), build_policy())
    if ends == 2 and seconds < 300:
        assert decision is None
        return
    assert decision is not None
    (action, *_) = decision.actions
    assert isinstance(action, FailJob if ends == 2 and not spares else RestartRanks | ReplaceWorker)
    assert decision.repetition == RepeatedFailure(500, ends + 1, round=1)


def with_spent_budget(observation: Observation, *, completed_step: bool = False) -> Observation:
    """Return the observation with a hang of rank 2 and two recent restarts."""
    observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 30, NOW - 20)))
    faults = tuple(replace(fault, completed_step=completed_step) for fault in build_stalls(observation, culprit=2))
    return replace(observation, faults=faults)


class TestBudget:
    """No restart is left."""

    def test_a_round_that_hangs_before_its_first_step_waits_until_a_restart_leaves_the_window(self) -> None:
        policy, observation = build_policy(max_restarts=2), with_spent_budget(build_training())
        for _ in range(3):
            desired = evaluate_job(observation, policy).desired
            assert not desired.state.lifecycle.failed_reason
            assert desired.plan.membership == 1
            (incident,) = desired.state.incidents.open
            assert (incident.cause, incident.applied) == (IncidentCause.HANG, None)
            observation = replace(observation.with_desired(desired), now=observation.now + 60)
        found = {
            condition.type: condition
            for condition in status.build_job_status(observation, policy, JobStatus()).conditions
        }
        assert (found[JobCondition.STALLED].status, found[JobCondition.STALLED].reason) == ("True", "BackOff")
        assert "when spec.remediation.maxRestarts allows another restart" in found[JobCondition.STALLED].message
        desired = evaluate_job(replace(observation, now=NOW + 3600), policy).desired
        assert desired.plan.membership == 2
        (incident,) = desired.state.incidents.open
        assert (incident.applied, incident.remedy) == (NOW + 3600, Remedy.RESTART_RANKS)

    @pytest.mark.parametrize(
        ("observation", "limit"),
        [
            (with_spent_budget(build_training(), completed_step=True), 2),
            (with_spent_budget(build_training()), 0),
            (with_spent_budget(build_untrained()), 2),
        ],
        ids=["after a step", "no restart is allowed", "it has never trained"],
    )
    def test_a_hang_without_a_restart_left_fails_the_job(self, observation: Observation, limit: int) -> None:
        assert (
            evaluate_job(observation, build_policy(max_restarts=limit)).desired.state.lifecycle.failed_reason
            == "RestartBudgetSpent"
        )
