"""Hangs: the ranks make no progress although all workers are present."""

from __future__ import annotations

from collections.abc import Sequence

from pacekeeper_analysis.failures import hang
from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.failures.hang import HangKind, HangVerdict
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import BlockedConnection, FaultKind, FaultReport, RankState
from pacekeeper_rank.records import Phase

from ...api.conditions import Reason
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...formatting import MAX_LISTED_ITEMS, format_list
from ...state.desired_state import PastIncident
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, FailJob, QuarantineNode, ReplaceWorker, RestartRanks
from ..nodes import quarantine_proposal
from ..stragglers.pricing import (
    build_remedy_prices,
    build_replace_option,
    build_restart_option,
    choose_remedy_at_standstill,
)


def check_hangs(observation: Observation, policy: Policy) -> Decision | None:
    """Decide on a hang once the stalls that workers reported show which ranks or links cause it."""
    stalls = observation.select_faults(FaultKind.STALLED)
    if any(view.record.leaving for view in observation.members):
        return None  # the next membership ends the stall, whichever rank causes it
    verdict = hang.diagnose_hang(stalls, observation.plan.world_size) if stalls else None
    if verdict is None:
        return None
    repetition = observation.state.budget.repetition.with_hang(verdict, stalls)
    if repetition is None:
        return None
    message = _describe_hang(verdict, observation.plan.world_size)
    rank = verdict.ranks[0] if verdict.ranks else None
    worker = None if rank is None else observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    node = None if view is None or view.pod is None else view.pod.node
    history = _HangHistory.from_observation(observation, policy, rank, worker, node)

    tries_elsewhere = history.stays or repetition.has_just_reached_limit(
        policy.rounds_without_progress
    )  # tried once, before the job fails
    replace_option = build_replace_option(
        observation, policy, refused="" if worker and tries_elsewhere else history.reason_to_stay
    )
    restart_option = build_restart_option(
        observation, policy, helps=not (tries_elsewhere and not replace_option.refused)
    )
    choice = choose_remedy_at_standstill((restart_option, replace_option))
    chosen = choice.chosen
    # Wait for a restart, fail the job, move the rank, or restart in place.
    actions: tuple[Action, ...] = ()
    waits = _waits_for_budget(observation, policy, stalls)
    if waits:
        chosen = None
    elif observation.is_budget_spent(policy):
        actions = (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left, and {message}"),)
        chosen = None
    elif repetition.reaches_limit(policy.rounds_without_progress) and (
        chosen is None or chosen.option is not replace_option
    ):
        reason = f"{repetition} (spec.remediation.maxRoundsWithoutProgress); the last: {message}"
        actions = (FailJob(Reason.NO_PROGRESS, reason),)
        chosen = None
    elif chosen is not None and chosen.option is replace_option and worker is not None:
        actions = (ReplaceWorker(worker, "it hung again", dead=True),)
    elif chosen is not None:
        actions = (RestartRanks(),)
    if node and chosen is not None:
        actions = (*actions, *_propose_quarantines(observation, policy, node, history))
    return Decision(
        incident_key=IncidentKey(IncidentCause.HANG, observation.progress.round),
        class_=IncidentClass.APPLICATION
        if history.follows_rank
        else IncidentClass.INFRASTRUCTURE
        if history.node_is_suspect
        else IncidentClass.UNKNOWN,
        message=message + history.summary,
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
        settled_faults=() if waits else tuple(fault.name for fault in stalls),  # evaluated again once a restart is left
        last_step=_find_last_step(observation, stalls),
        repetition=repetition,
        finding=_build_finding(observation.plan, verdict, stalls, history),
    )


def _waits_for_budget(observation: Observation, policy: Policy, stalls: Sequence[FaultReport]) -> bool:
    """Return whether the next round waits until a restart leaves the window.

    This is so for a job that has trained, and whose round now hangs before its first step: storage may be unavailable.
    """
    no_progress = not any(fault.completed_step for fault in stalls)
    return (
        no_progress
        and observation.state.lifecycle.has_trained
        and policy.max_restarts > 0
        and observation.is_budget_spent(policy)
    )


class _HangHistory:
    """How a hang relates to earlier hangs within the restart window."""

    def __init__(self, same_place: bool, follows_rank: bool, node_is_suspect: bool) -> None:
        self.follows_rank = follows_rank
        self.node_is_suspect = node_is_suspect
        self.stays = (same_place and not follows_rank) or node_is_suspect

    @classmethod
    def from_observation(
        cls, observation: Observation, policy: Policy, rank: int | None, worker: str | None, node: str | None
    ) -> _HangHistory:
        since = observation.now - policy.restart_window
        hangs = [
            incident
            for incident in observation.state.incidents.past
            if incident.cause is IncidentCause.HANG and incident.at > since
        ]
        if rank is None:
            return cls(False, False, False)
        return cls(
            same_place=any(incident.rank == rank and incident.worker == worker for incident in hangs),
            follows_rank=any(incident.rank == rank and incident.worker != worker for incident in hangs),
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
            return "; it has hung on another worker before, so check the script"
        return "; it has hung on this worker before" if self.stays else ""


def _stays_with_node(hangs: list[PastIncident], rank: int, worker: str | None, node: str | None) -> bool:
    return bool(node) and any(
        incident.node == node and incident.rank != rank and incident.worker != worker for incident in hangs
    )


def _build_finding(plan: Plan, verdict: HangVerdict, stalls: Sequence[FaultReport], history: _HangHistory) -> Finding:
    states = {
        state.rank: state for fault in sorted(stalls, key=lambda stall: stall.noticed_at) for state in fault.ranks
    }
    culprit_states = [states[rank] for rank in verdict.ranks[:MAX_LISTED_ITEMS]]
    waiting_count = sum(state.collective != "NONE" for state in states.values())
    processes = "; ".join(map(_describe_process, culprit_states)) or "all processes are there, and none is stopped"
    signals = [
        Signal(SignalKind.WAITS, verdict.waits or f"{waiting_count} ranks stand still inside of collectives"),
        Signal(SignalKind.PROCESS, processes),
    ]
    if stack_tops := _describe_stack_tops(culprit_states or list(states.values())):
        signals.append(Signal(SignalKind.STACK, stack_tops))
    if verdict.kind is HangKind.KERNEL:
        signals.append(Signal(SignalKind.GPU, "its GPU has not begun the collective that its peers wait in"))
    blocked = () if culprit_states else hang.find_blocked_ends(stalls)
    if transport := "; ".join(map(_describe_blocked, blocked[:MAX_LISTED_ITEMS])) or (
        "" if culprit_states else "".join(_list_nccl_reports(stalls)[-1:])
    ):
        signals.append(Signal(SignalKind.TRANSPORT, transport))
    if history.summary:
        signals.append(Signal(SignalKind.HISTORY, history.summary.removeprefix("; ")))
    links = _describe_links(plan, blocked) or f"links of ranks {format_list(verdict.members)}"
    culprit = f"rank {format_list(verdict.ranks)}" if culprit_states else links
    fault = _classify_fault(verdict, culprit_states, history)
    advice = KERNEL_HANG_ADVICE if verdict.kind is HangKind.KERNEL else HANG_ADVICE[fault]
    return merge_findings(None, Finding(fault, culprit, tuple(signals), advice=advice))


def _describe_blocked(connection: BlockedConnection) -> str:
    return (
        f"nothing that rank {connection.rank} sends to {connection.remote} has been acknowledged for "
        f"{connection.seconds:.1f} s"
    )


def _describe_links(plan: Plan, blocked: Sequence[BlockedConnection]) -> str:
    """Return the links over which no data arrives: between two workers, or of one worker to several others.

    "": they are not known, for example behind a service mesh that hides the peers' addresses.
    """
    by_address = {member.address: member.ranks[0] for member in plan.members}
    by_rank = {rank: member.ranks[0] for member in plan.members for rank in member.ranks}
    pairs = {
        frozenset((by_rank[connection.rank], by_address[host]))
        for connection in blocked
        if (host := connection.remote.rpartition(":")[0].strip("[]")) in by_address and connection.rank in by_rank
    }
    if len(pairs) == 1:
        first, *rest = sorted(next(iter(pairs)))
        return f"between rank {first}'s worker and rank {rest[0]}'s worker" if rest else ""
    common = frozenset.intersection(*pairs) if pairs else frozenset[int]()
    return f"links of rank {next(iter(common))}'s worker" if len(common) == 1 else ""


HANG_ADVICE = {
    FaultClass.CODE: "check in the stack what this rank does while its peers are in a collective",
    FaultClass.DATA: "check the loader and the storage that it reads",
    FaultClass.HARDWARE: "check the node: its driver, its volumes, its GPU",
    FaultClass.NETWORK: "check the paths between these ranks' nodes",
    FaultClass.UNKNOWN: "check what stopped or ended the process, and what it did last",
}
KERNEL_HANG_ADVICE = "check which kernel the stack launched last, and the GPU"


def _classify_fault(verdict: HangVerdict, culprits: Sequence[RankState], history: _HangHistory) -> FaultClass:
    """Return the class of the fault: by earlier hangs, or else by where the culprits hang."""
    if verdict.kind is HangKind.COMMUNICATION:
        return FaultClass.NETWORK
    if history.node_is_suspect:
        return FaultClass.HARDWARE
    if verdict.kind is HangKind.MISMATCH or history.follows_rank:
        return FaultClass.CODE
    if any(state.process_state == UNINTERRUPTIBLE_STATE for state in culprits):
        return FaultClass.HARDWARE
    if verdict.kind is not HangKind.NEVER_ENTERED:
        return FaultClass.UNKNOWN
    loads = all(state.phase in (Phase.LOAD.name, Phase.DATA.name) for state in culprits)
    return FaultClass.DATA if loads else FaultClass.CODE


UNINTERRUPTIBLE_STATE = "D"
"""State letter of a process that is in a device driver, or waits for a volume."""
_PROCESS_STATE_PHRASES = {
    "R": "runs",
    "S": "sleeps",
    UNINTERRUPTIBLE_STATE: "waits for a device",
    "T": "is stopped",
    "": "is gone",
}


def _describe_process(state: RankState) -> str:
    return (
        f"the process of rank {state.rank} "
        f"{_PROCESS_STATE_PHRASES.get(state.process_state, f'is in state {state.process_state}')}"
    )


def _describe_stack_tops(states: Sequence[RankState]) -> str:
    """Return the innermost call of each rank."""
    calls = [(state.rank, state.stack.strip().splitlines()[-1].strip()) for state in states if state.stack.strip()]
    return "; ".join(f"rank {rank}: {call}" for rank, call in calls[:MAX_LISTED_ITEMS])


def _describe_hang(verdict: HangVerdict, world_size: int) -> str:
    if not verdict.ranks and len(verdict.members) < world_size:
        return verdict.waits
    if not verdict.ranks:
        return "all ranks wait in the same collective and none comes out of it"
    return f"rank {format_list(verdict.ranks)} blocks all others ({verdict.kind})"


def _list_stacks(stalls: Sequence[FaultReport], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"rank {state.rank}, stack:\n{state.stack}"
        for fault in stalls
        for state in fault.ranks
        if state.rank in ranks and state.stack
    )


def _list_nccl_reports(stalls: Sequence[FaultReport]) -> tuple[str, ...]:
    """Return NCCL's RAS report and the transfers in progress, from the newest reports that have them."""
    oldest_first = sorted(stalls, key=lambda fault: fault.noticed_at)
    ras = [f"NCCL's RAS, queried by {fault.worker}:\n{fault.ras}" for fault in oldest_first if fault.ras]
    transfers = {
        fault.worker: f"{fault.worker} over NCCL: {fault.transfers}" for fault in oldest_first if fault.transfers
    }
    return (*ras[-1:], *list(transfers.values())[:MAX_LISTED_ITEMS])


def _find_first_sign(stalls: Sequence[FaultReport]) -> float:
    """Return when the ranks last made progress, by the rank that has waited longest."""
    return min(
        fault.noticed_at - max((state.waiting_seconds for state in fault.ranks), default=0.0) for fault in stalls
    )


def _find_last_step(observation: Observation, stalls: Sequence[FaultReport]) -> int | None:
    """Return the last step that some rank has completed; None: none has. Heartbeats may be older than stalls."""
    steps = (observation.progress.step, *(state.step for fault in stalls for state in fault.ranks))
    return max((step for step in steps if step is not None), default=None)


def _propose_quarantines(
    observation: Observation, policy: Policy, node: str, history: _HangHistory
) -> tuple[QuarantineNode, ...]:
    """Propose the quarantine of a node on which several ranks hung.

    Hangs in other namespaces are not trusted and not shown. They are only a reason to have the node probed.
    """
    if history.node_is_suspect:
        return (
            quarantine_proposal.propose_quarantine(observation, policy, node, "ranks of several workers hung on it"),
        )
    if node in observation.cluster_view.hung_elsewhere:
        return (
            quarantine_proposal.propose_quarantine(
                observation, policy, node, "a rank hung on it, as others have before"
            ),
        )
    return ()
