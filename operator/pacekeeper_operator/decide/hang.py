"""The ranks make no progress although all workers are there: somebody hangs."""

from __future__ import annotations

from collections.abc import Sequence

from pacekeeper_analysis.diagnose import hang
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.diagnose.hang import HangKind, HangVerdict
from pacekeeper_analysis.plan import Plan
from pacekeeper_analysis.records import Phase
from pacekeeper_analysis.reports import BlockedConnection, FaultReport, FaultKind, RankState

from ..api import IncidentCause, IncidentClass, Reason, Remedy
from ..decision import Action, Decision, FailJob, QuarantineNode, ReplaceWorker, RestartRanks
from ..observation import Observation, Policy
from ..state import PastIncident
from ..subject import IncidentKey
from ..words import MAX_LISTED_ITEMS, format_list
from . import blame
from .pricing import choose_remedy_at_standstill, build_replace_option, build_restart_option, build_remedy_prices


def check_hangs(observation: Observation, policy: Policy) -> Decision | None:
    stalls = observation.select_faults(FaultKind.STALLED)
    if any(view.record.leaving for view in observation.members):
        return None  # the next membership ends the stall, whoever holds it
    verdict = hang.diagnose_hang(stalls, observation.plan.world_size) if stalls else None
    if verdict is None:
        return None
    repetition = observation.state.budget.repetition.with_hang(verdict, stalls)
    if repetition is None:
        return None
    said = _describe_hang(verdict, observation.plan.world_size)
    rank = verdict.ranks[0] if verdict.ranks else None
    worker = None if rank is None else observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    node = None if view is None or view.pod is None else view.pod.node
    past = _HangHistory.from_observation(observation, policy, rank, worker, node)

    elsewhere = past.stays or repetition.has_just_reached_limit(policy.rounds_without_progress)  # once, before the job fails
    move = build_replace_option(observation, policy, refused="" if worker and elsewhere else past.reason_to_stay)
    stay = build_restart_option(observation, policy, helps=not (elsewhere and not move.refused))
    choice = choose_remedy_at_standstill((stay, move))
    chosen = choice.chosen
    actions: tuple[Action, ...] = ()
    waits = _waits_for_budget(observation, policy, stalls)
    if waits:
        chosen = None
    elif observation.is_budget_spent(policy):
        actions = (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left, and {said}"),)
        chosen = None
    elif repetition.reaches_limit(policy.rounds_without_progress) and (chosen is None or chosen.option is not move):
        why = f"{repetition} (spec.remediation.maxRoundsWithoutProgress); the last: {said}"
        actions = (FailJob(Reason.NO_PROGRESS, why),)
        chosen = None
    elif chosen is not None and chosen.option is move and worker is not None:
        actions = (ReplaceWorker(worker, "it hung again", dead=True),)
    elif chosen is not None:
        actions = (RestartRanks(),)
    if node and chosen is not None:
        actions = (*actions, *_propose_quarantines(observation, policy, node, past))
    return Decision(
        incident_key=IncidentKey(IncidentCause.HANG, observation.round),
        class_=IncidentClass.APPLICATION
        if past.follows_rank
        else IncidentClass.INFRASTRUCTURE
        if past.node_is_suspect
        else IncidentClass.UNKNOWN,
        message=said + past.summary,
        first_sign=_find_first_sign(stalls),
        actions=actions,
        remedy=None if chosen is None else Remedy(chosen.option.remedy),
        remedies=build_remedy_prices(choice.prices, chosen),
        evidence=(
            *verdict.evidence[:MAX_LISTED_ITEMS],
            *((verdict.waits,) if verdict.ranks and verdict.waits else ()),
            *_list_stacks(stalls, verdict.ranks[:MAX_LISTED_ITEMS]),
            *_list_nccl_reports(stalls),
        ),
        rank=rank,
        worker=worker,
        node=node,
        settled_faults=() if waits else tuple(fault.name for fault in stalls),  # it is judged again once a restart is left
        last_step=observation.step,
        repetition=repetition,
        finding=_build_finding(observation.plan, verdict, stalls, past),
    )


def _waits_for_budget(observation: Observation, policy: Policy, stalls: Sequence[FaultReport]) -> bool:
    """Return whether the next round waits for a restart to leave the window: the job has trained, and this round hangs
    before its first step, as where storage is away."""
    is_barren = not any(fault.completed_step for fault in stalls)
    return is_barren and observation.has_trained and policy.max_restarts > 0 and observation.is_budget_spent(policy)


class _HangHistory:
    """What earlier hangs within the window say about this one."""

    def __init__(self, same_place: bool, follows_rank: bool, node_is_suspect: bool) -> None:
        self.follows_rank = follows_rank
        self.node_is_suspect = node_is_suspect
        self.stays = (same_place and not follows_rank) or node_is_suspect

    @classmethod
    def from_observation(
        cls, observation: Observation, policy: Policy, rank: int | None, worker: str | None, node: str | None
    ) -> _HangHistory:
        since = observation.now - policy.restart_window
        hangs = [past for past in observation.state.incidents.past if past.cause is IncidentCause.HANG and past.at > since]
        if rank is None:
            return cls(False, False, False)
        return cls(
            same_place=any(past.rank == rank and past.worker == worker for past in hangs),
            follows_rank=any(past.rank == rank and past.worker != worker for past in hangs),
            node_is_suspect=_stays_with_node(hangs, rank, worker, node)
            or (node is not None and observation.cluster_view.hung_nodes.get(node, 0) > 0),
        )

    @property
    def reason_to_stay(self) -> str:
        return "it follows the rank, not the worker" if self.follows_rank else "once is no reason to blame the worker"

    @property
    def summary(self) -> str:
        if self.node_is_suspect:
            return "; it is not the first rank to hang on this node"
        if self.follows_rank:
            return "; it has hung on another worker before, so look at the script"
        return "; it has hung on this worker before" if self.stays else ""


def _stays_with_node(hangs: list[PastIncident], rank: int, worker: str | None, node: str | None) -> bool:
    return bool(node) and any(past.node == node and past.rank != rank and past.worker != worker for past in hangs)


def _build_finding(plan: Plan, verdict: HangVerdict, stalls: Sequence[FaultReport], past: _HangHistory) -> Finding:
    states = {state.rank: state for fault in sorted(stalls, key=lambda each: each.noticed_at) for state in fault.ranks}
    named = [states[rank] for rank in verdict.ranks[:MAX_LISTED_ITEMS]]
    waiting = sum(state.collective != "NONE" for state in states.values())
    processes = "; ".join(map(_describe_process, named)) or "all processes are there, and none is stopped"
    witnesses = [
        Signal(SignalKind.WAITS, verdict.waits or f"{waiting} ranks stand still inside of collectives"),
        Signal(SignalKind.PROCESS, processes),
    ]
    if places := _describe_stack_tops(named or list(states.values())):
        witnesses.append(Signal(SignalKind.STACK, places))
    if verdict.kind is HangKind.KERNEL:
        witnesses.append(Signal(SignalKind.GPU, "its GPU has not begun the collective that its peers wait in"))
    blocked = () if named else hang.find_blocked_ends(stalls)
    if transport := "; ".join(map(_describe_blocked, blocked[:MAX_LISTED_ITEMS])) or ("" if named else "".join(_list_nccl_reports(stalls)[-1:])):
        witnesses.append(Signal(SignalKind.TRANSPORT, transport))
    if past.summary:
        witnesses.append(Signal(SignalKind.HISTORY, past.summary.removeprefix("; ")))
    links = _describe_links(plan, blocked) or f"links of ranks {format_list(verdict.members)}"
    culprit = f"rank {format_list(verdict.ranks)}" if named else links
    fault = _classify_fault(verdict, named, past)
    advice = KERNEL_HANG_ADVICE if verdict.kind is HangKind.KERNEL else HANG_ADVICE[fault]
    return merge_findings(None, Finding(fault, culprit, tuple(witnesses), advice=advice))


def _describe_blocked(end: BlockedConnection) -> str:
    return f"nothing that rank {end.rank} sends to {end.remote} has been acknowledged for {end.seconds:.1f} s"


def _describe_links(plan: Plan, blocked: Sequence[BlockedConnection]) -> str:
    """Between whom nothing comes through: two workers, or one and all others that have something for it; "": that
    cannot be told, as behind a service mesh that hides who is at the other end."""
    by_address = {member.address: member.ranks[0] for member in plan.members}
    by_rank = {rank: member.ranks[0] for member in plan.members for rank in member.ranks}
    pairs = {
        frozenset((by_rank[end.rank], by_address[host]))
        for end in blocked
        if (host := end.remote.rpartition(":")[0].strip("[]")) in by_address and end.rank in by_rank
    }
    if len(pairs) == 1:
        one, *other = sorted(next(iter(pairs)))
        return f"between rank {one}'s worker and rank {other[0]}'s worker" if other else ""
    common = frozenset.intersection(*pairs) if pairs else frozenset[int]()
    return f"links of rank {next(iter(common))}'s worker" if len(common) == 1 else ""


HANG_ADVICE = {
    FaultClass.CODE: "look at what the stack says that this rank does while its peers are in a collective",
    FaultClass.DATA: "look at the loader and at the storage that it reads",
    FaultClass.HARDWARE: "look at the node: its driver, its volumes, its GPU",
    FaultClass.NETWORK: "look at the paths between these ranks' nodes",
    FaultClass.UNKNOWN: "look who has stopped or ended the process, and what it did last",
}
KERNEL_HANG_ADVICE = "look at what the stack has launched last, and at the GPU"


def _classify_fault(verdict: HangVerdict, culprits: Sequence[RankState], past: _HangHistory) -> FaultClass:
    """Whose matter it is: by what kept it company before, else by where the culprits stand."""
    if verdict.kind is HangKind.COMMUNICATION:
        return FaultClass.NETWORK
    if past.node_is_suspect:
        return FaultClass.HARDWARE
    if verdict.kind is HangKind.MISMATCH or past.follows_rank:
        return FaultClass.CODE
    if any(state.process_state == UNINTERRUPTIBLE_STATE for state in culprits):
        return FaultClass.HARDWARE
    if verdict.kind is not HangKind.NEVER_ENTERED:
        return FaultClass.UNKNOWN
    loads = all(state.phase in (Phase.LOAD.name, Phase.DATA.name) for state in culprits)
    return FaultClass.DATA if loads else FaultClass.CODE


UNINTERRUPTIBLE_STATE = "D"
"""Letter of a process that is in a device driver, or waits for a volume."""
_PROCESS_STATE_PHRASES = {"R": "runs", "S": "sleeps", UNINTERRUPTIBLE_STATE: "waits for a device", "T": "is stopped", "": "is gone"}


def _describe_process(state: RankState) -> str:
    return f"the process of rank {state.rank} {_PROCESS_STATE_PHRASES.get(state.process_state, f'is in state {state.process_state}')}"


def _describe_stack_tops(states: Sequence[RankState]) -> str:
    """Where they stand, the innermost call of each."""
    calls = [(state.rank, state.stack.strip().splitlines()[-1].strip()) for state in states if state.stack.strip()]
    return "; ".join(f"rank {rank}: {call}" for rank, call in calls[:MAX_LISTED_ITEMS])


def _describe_hang(verdict: HangVerdict, world_size: int) -> str:
    if not verdict.ranks and len(verdict.members) < world_size:
        return verdict.waits
    if not verdict.ranks:
        return "all ranks wait in the same collective and none comes out of it"
    return f"rank {format_list(verdict.ranks)} holds all others ({verdict.kind})"


def _list_stacks(stalls: Sequence[FaultReport], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"rank {state.rank}, stack:\n{state.stack}"
        for fault in stalls
        for state in fault.ranks
        if state.rank in ranks and state.stack
    )


def _list_nccl_reports(stalls: Sequence[FaultReport]) -> tuple[str, ...]:
    """What NCCL itself says, by the newest reports that have it."""
    oldest_first = sorted(stalls, key=lambda fault: fault.noticed_at)
    ras = [f"NCCL's RAS, asked by {fault.worker}:\n{fault.ras}" for fault in oldest_first if fault.ras]
    transfers = {
        fault.worker: f"{fault.worker} over NCCL: {fault.transfers}" for fault in oldest_first if fault.transfers
    }
    return (*ras[-1:], *list(transfers.values())[:MAX_LISTED_ITEMS])


def _find_first_sign(stalls: Sequence[FaultReport]) -> float:
    """When the ranks made progress last, by the one that has waited longest."""
    return min(
        fault.noticed_at - max((state.waiting_seconds for state in fault.ranks), default=0.0) for fault in stalls
    )


def _propose_quarantines(observation: Observation, policy: Policy, node: str, past: _HangHistory) -> tuple[QuarantineNode, ...]:
    """What other namespaces' jobs have seen on the node is not believed, and not told: it is a reason to ask."""
    if past.node_is_suspect:
        return (blame.propose_quarantine(observation, policy, node, "ranks of several workers hung on it"),)
    if node in observation.cluster_view.hung_elsewhere:
        return (blame.propose_quarantine(observation, policy, node, "a rank hung on it, as others have before"),)
    return ()
