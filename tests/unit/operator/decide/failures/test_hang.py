"""What becomes of a hang: by what hung before, where, and by what may still be done."""

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
HELD = "rank 2 blocks all others (Stopped)"


def hung(world: Observation, culprit: int = 2, **stack: str) -> Decision:
    """Rank `culprit` holds the others; -1: all wait for each other."""
    faults = []
    for member in world.plan.members:
        fault = build_stall(member.worker, member.ranks[0], culprit=member.ranks[0] == culprit)
        (state,) = fault.ranks
        waiting = 60.0 if culprit < 0 else state.waiting_seconds
        own = stack.get(f"rank{state.rank}", state.stack)
        faults.append(replace(fault, ranks=(replace(state, waiting_seconds=waiting, stack=own),)))
    decision = hang.check_hangs(replace(world, faults=tuple(faults)), build_policy())
    assert decision is not None
    return decision


def after(past: PastIncident, **changes: Any) -> Observation:
    world = build_training(**changes)
    return world.with_desired(world.desired.with_incidents(past=(past,)))


def reasons(decision: Decision) -> dict[str, str]:
    return {price.name: price.reason for price in decision.remedies}


def test_once_is_no_reason_to_blame_the_worker() -> None:
    decision = hung(build_training())
    assert decision.actions == (RestartRanks(),)
    assert reasons(decision)["ReplaceWorker"] == "once is no reason to blame the worker"
    assert (decision.message, decision.class_) == (HELD, IncidentClass.UNKNOWN)


def test_neither_is_another_rank_that_hung_on_it_before() -> None:
    """Moved there since, as nobody knows which of the two places is at fault."""
    decision = hung(after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w2-0", node="node-2")))
    assert (decision.actions, decision.message) == ((RestartRanks(),), HELD)


def test_the_same_again_moves_the_rank_and_says_so() -> None:
    decision = hung(after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")))
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert (action.worker, action.dead) == ("j-w2-0", True)
    assert decision.message == f"{HELD}; it has hung on this worker before"


def test_without_a_spare_it_is_restarted_where_it_is() -> None:
    decision = hung(
        after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2"), spares=0)
    )
    assert decision.actions == (RestartRanks(),)


def test_what_follows_the_rank_is_the_scripts() -> None:
    decision = hung(after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")))
    assert decision.class_ is IncidentClass.APPLICATION
    assert decision.message == f"{HELD}; it has hung on another worker before, so check the script"
    assert reasons(decision)["ReplaceWorker"] == "it follows the rank, not the worker"


@pytest.mark.parametrize("cause", [IncidentCause.CRASH, IncidentCause.HANG])
def test_only_hangs_within_the_window_are_remembered(cause: IncidentCause) -> None:
    past = PastIncident(
        cause, NOW - (100 if cause is IncidentCause.CRASH else 3601), 5.0, rank=2, worker="j-w2-0", node="node-2"
    )
    assert hung(after(past)).actions == (RestartRanks(),)


class TestNode:
    def suspect(self) -> Observation:
        return after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2"))

    def test_several_ranks_that_hung_on_it_are_a_suspicion(self) -> None:
        decision = hung(self.suspect())
        moved, blamed = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert isinstance(blamed, QuarantineNode)
        assert (blamed.node, decision.class_) == ("node-2", IncidentClass.INFRASTRUCTURE)
        assert decision.message == f"{HELD}; it is not the first rank to hang on this node"

    def test_so_are_other_jobs_of_the_namespace(self) -> None:
        world = build_training()
        around = replace(world.cluster_view, hung_nodes={"node-2": 1})
        assert isinstance(hung(replace(world, cluster_view=around)).actions[-1], QuarantineNode)
        elsewhere = replace(world.cluster_view, hung_nodes={"node-1": 1, "node-2": 0})
        assert hung(replace(world, cluster_view=elsewhere)).actions == (RestartRanks(),)

    def test_a_job_that_fails_blames_none(self) -> None:
        world = self.suspect()
        world = world.with_desired(
            world.desired.with_budget(restarts=tuple(NOW - n for n in range(1, 11))).with_lifecycle(training_since=None)
        )
        decision = hung(world)
        (end,) = decision.actions
        assert isinstance(end, FailJob)
        assert (decision.remedy, HELD in end.message) == (None, True)

    def test_a_worker_whose_pod_has_just_gone_names_none(self) -> None:
        decision = hung(change_worker(self.suspect(), "j-w2-0", gone=True))
        assert (decision.node, decision.worker) == (None, "j-w2-0")
        assert not any(isinstance(action, QuarantineNode) for action in decision.actions)


class TestNobody:
    def test_all_that_wait_for_each_other_begin_anew_and_nobody_is_blamed(self) -> None:
        world = after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2"))
        decision = hung(world, culprit=-1)
        assert decision.message == "all ranks wait in the same collective and none comes out of it"
        assert (decision.rank, decision.worker, decision.node) == (None, None, None)
        assert decision.actions == (RestartRanks(),)
        assert (decision.class_, decision.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)

    def test_also_when_that_comes_again(self) -> None:
        decision = hung(after(PastIncident(IncidentCause.HANG, NOW - 100, 5.0)), culprit=-1)
        assert decision.message == "all ranks wait in the same collective and none comes out of it"
        assert decision.actions == (RestartRanks(),)


def test_the_stack_of_the_culprit_is_shown_and_no_others() -> None:
    evidence = hung(build_training(), rank2="main()").evidence
    assert [piece for piece in evidence if "stack" in piece] == ["rank 2, stack:\nmain()"]
    assert not [piece for piece in hung(build_training()).evidence if "stack:" in piece], "there is none"


def test_what_nccl_says_is_evidence_by_its_newest_word() -> None:
    world = build_training()
    first, *others = (
        build_stall(member.worker, member.ranks[0], culprit=member.ranks[0] == 2) for member in world.plan.members
    )
    told = (
        replace(first, name="older", noticed_at=NOW - 5, ras="all ranks alike", transfers="rank 0: nothing"),
        replace(first, ras="dead: rank 2", transfers="rank 0: receives from rank 2"),
        *others,
    )
    decision = hang.check_hangs(replace(world, faults=told), build_policy())
    assert decision is not None
    assert [piece for piece in decision.evidence if "RAS" in piece or "NCCL" in piece] == [
        f"NCCL's RAS, queried by {first.worker}:\ndead: rank 2",
        f"{first.worker} over NCCL: rank 0: receives from rank 2",
    ]
    assert not [piece for piece in hung(world).evidence if "NCCL" in piece], "it was not asked"


class TestFinding:
    """Class, culprit, and two kinds of witnesses at least."""

    def of(self, culprit: RankState, *others: RankState, past: PastIncident | None = None, **told: Any) -> Finding:
        world = build_training() if past is None else after(past)
        rest = (replace(other, rank=rank) for other, rank in zip(others, (0, 1, 3), strict=True))
        states = (replace(culprit, rank=2), *rest)
        told |= {"communicators": GROUPS}
        faults = tuple(
            FaultReport(
                f"{state.rank}",
                FaultKind.STALLED,
                f"j-w{state.rank}-0",
                1,
                NOW,
                ranks=(state,),
                **told,
            )
            for state in states
        )
        decision = hang.check_hangs(replace(world, faults=faults), build_policy())
        assert decision is not None
        assert decision.finding is not None
        assert len(decision.finding.signal_kinds) >= 2
        return decision.finding

    def test_by_where_the_culprit_stands(self) -> None:
        waiting, outside = WAITING, replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT)
        found = self.of(outside, *[waiting] * 3)
        assert (found.fault, found.culprit) == (FaultClass.CODE, "rank 2")
        said = {witness.kind: witness.message for witness in found.signals}
        assert said[SignalKind.WAITS] == "ranks 0-1,3 wait in ALL_REDUCE 42 of group 'data' of ranks 0-3 for rank 2"
        assert said[SignalKind.STACK] == f"rank 2: {IN_SCRIPT}"
        assert said[SignalKind.PROCESS] == "the process of rank 2 sleeps"
        assert self.of(replace(outside, process_state="D"), *[waiting] * 3).fault is FaultClass.HARDWARE
        assert self.of(replace(outside, process_state="T"), *[waiting] * 3).fault is FaultClass.UNKNOWN
        loading = replace(outside, phase="LOAD", overdue=True)
        assert self.of(loading, *[waiting] * 3).fault is FaultClass.DATA
        assert self.of(replace(waiting, collective="BROADCAST"), *[waiting] * 3).fault is FaultClass.CODE
        gpus = [replace(waiting, device="STARTED", device_group=7, device_sequence=5) for _ in range(3)]
        kernel = self.of(replace(gpus[0], device="SCHEDULED"), *gpus)
        assert (kernel.fault, SignalKind.GPU in kernel.signal_kinds) == (FaultClass.UNKNOWN, True)

    def test_by_what_hung_before(self) -> None:
        outside = replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT)
        elsewhere = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        found = self.of(replace(outside, process_state="D"), *[WAITING] * 3, past=elsewhere)
        assert (found.fault, SignalKind.HISTORY in found.signal_kinds) == (FaultClass.CODE, True)
        on_node = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        assert self.of(outside, *[WAITING] * 3, past=on_node).fault is FaultClass.HARDWARE

    def test_of_a_link_inside_one_group(self) -> None:
        pair = replace(WAITING, group=8, sequence=5, waiting_seconds=12.0)
        found = self.of(pair, WAITING, WAITING, replace(pair, entered="7:42"), transfers="rank 2: sends to rank 3")
        assert (found.fault, found.culprit) == (FaultClass.NETWORK, "links of ranks 2, 3")
        assert found.signal_kinds == {SignalKind.WAITS, SignalKind.PROCESS, SignalKind.STACK, SignalKind.TRANSPORT}


class TestLostPackets:
    """Between whom nothing comes through, by what the kernels of both ends say."""

    def of(self, *ends: tuple[int, str]) -> tuple[Decision | None, set[SignalKind]]:
        """`ends`: rank and whom it sends to, of whom it hears nothing."""
        world = build_training()
        blocked = {rank: [BlockedConnection(rank, to, 2.4) for r, to in ends if r == rank] for rank, _ in ends}
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
        decision = hang.check_hangs(replace(world, faults=tuple(faults)), build_policy())
        kinds = (
            set[SignalKind]() if decision is None or decision.finding is None else set(decision.finding.signal_kinds)
        )
        return decision, kinds

    def address(self, rank: int) -> str:
        return next(member.address for member in build_training().plan.members if rank in member.ranks)

    def test_a_pair_is_named_within_seconds(self) -> None:
        decision, kinds = self.of((0, f"{self.address(1)}:50"), (1, f"{self.address(0)}:60"))
        assert decision is not None
        assert decision.finding is not None
        assert (decision.finding.fault, decision.finding.culprit) == (
            FaultClass.NETWORK,
            "between rank 0's worker and rank 1's worker",
        )
        assert SignalKind.TRANSPORT in kinds
        said = {witness.kind: witness.message for witness in decision.finding.signals}
        words = f"nothing that rank 0 sends to {self.address(1)}:50 has been acknowledged for 2.4 s"
        assert said[SignalKind.TRANSPORT].startswith(words)
        assert decision.actions == (RestartRanks(),)

    def test_one_whose_every_way_is_blocked_is_named_alone(self) -> None:
        decision, _ = self.of((0, f"{self.address(1)}:50"), (2, f"{self.address(1)}:60"))
        assert decision is not None
        assert decision.finding is not None
        assert decision.finding.culprit == "links of rank 1's worker"

    @pytest.mark.parametrize("remote", ["127.0.0.6:15006", "[fd00::9]:50", "nonsense"])
    def test_behind_a_mesh_it_is_a_link_of_the_group(self, remote: str) -> None:
        decision, _ = self.of((0, remote))
        assert decision is not None
        assert decision.finding is not None
        assert decision.finding.culprit == "links of ranks 0, 1, 2, 3"

    def test_without_it_more_time_passes(self) -> None:
        assert self.of() == (None, set())


def test_who_is_given_up_already_ends_the_stall() -> None:
    world = build_training()
    record = next(worker for worker in world.state.placement.workers if worker.name == "j-w0-0")
    leaving = world.with_desired(world.desired.with_worker(replace(record, leaving="its GPU fails")))
    faults = tuple(build_stall(m.worker, m.ranks[0], culprit=m.ranks[0] == 2) for m in world.plan.members)
    assert hang.check_hangs(replace(leaving, faults=faults), build_policy()) is None


@pytest.mark.parametrize(("seconds", "ends", "spares"), [(3.0, 1, 0), (3.0, 2, 0), (400.0, 2, 0), (400.0, 2, 1)])
def test_a_hang_of_the_script_that_comes_again_at_its_step_gets_more_time_and_then_ends_the_job(
    seconds: float, ends: int, spares: int
) -> None:
    world = build_training(spares=spares)
    world = world.with_desired(world.desired.with_budget(repetition=RepeatedFailure(500, ends, round=0)))
    outside = replace(WAITING, collective="NONE", sequence=41, stack=IN_SCRIPT, waiting_seconds=seconds)
    faults = []
    for member in world.plan.members:
        fault = build_stall(member.worker, member.ranks[0], culprit=False)
        state = replace(outside if member.ranks[0] == 2 else WAITING, rank=member.ranks[0])
        faults.append(replace(fault, completed_step=True, ranks=(state,)))
    decision = hang.check_hangs(replace(world, faults=tuple(faults)), build_policy())
    if ends == 2 and seconds < 300:
        assert decision is None
        return
    assert decision is not None
    (action, *_) = decision.actions
    assert isinstance(action, FailJob if ends == 2 and not spares else RestartRanks | ReplaceWorker)
    assert decision.repetition == RepeatedFailure(500, ends + 1, round=1)


def spent(world: Observation, *, completed_step: bool = False) -> Observation:
    """Rank 2 hangs, and two restarts have been made lately."""
    world = world.with_desired(world.desired.with_budget(restarts=(NOW - 30, NOW - 20)))
    faults = tuple(replace(fault, completed_step=completed_step) for fault in build_stalls(world, culprit=2))
    return replace(world, faults=faults)


class TestBudget:
    """No restart is left."""

    def test_a_round_that_hangs_before_its_first_step_waits_until_a_restart_leaves_the_window(self) -> None:
        rules, world = build_policy(max_restarts=2), spent(build_training())
        for _ in range(3):
            draft = evaluate_job(world, rules).desired
            assert not draft.state.lifecycle.failed_reason
            assert draft.plan.membership == 1
            (incident,) = draft.state.incidents.open
            assert (incident.cause, incident.applied) == (IncidentCause.HANG, None)
            world = replace(world.with_desired(draft), now=world.now + 60)
        found = {each.type: each for each in status.build_job_status(world, rules, JobStatus()).conditions}
        assert (found[JobCondition.STALLED].status, found[JobCondition.STALLED].reason) == ("True", "BackOff")
        assert "when spec.remediation.maxRestarts allows another restart" in found[JobCondition.STALLED].message
        draft = evaluate_job(replace(world, now=NOW + 3600), rules).desired
        assert draft.plan.membership == 2
        (incident,) = draft.state.incidents.open
        assert (incident.applied, incident.remedy) == (NOW + 3600, Remedy.RESTART_RANKS)

    @pytest.mark.parametrize(
        ("world", "limit"),
        [
            (spent(build_training(), completed_step=True), 2),
            (spent(build_training()), 0),
            (spent(build_untrained()), 2),
        ],
        ids=["after a step", "no restart is allowed", "it has never trained"],
    )
    def test_otherwise_the_job_fails(self, world: Observation, limit: int) -> None:
        assert (
            evaluate_job(world, build_policy(max_restarts=limit)).desired.state.lifecycle.failed_reason
            == "RestartBudgetSpent"
        )
