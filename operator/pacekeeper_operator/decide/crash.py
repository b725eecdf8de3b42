"""A rank has ended with an error. Its launchers are in the next round already: here it is counted and judged."""

from __future__ import annotations

import re

from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Reason, Remedy
from ..decision import Action, CountRestart, Decision, FailJob, ReplaceWorker
from ..observation import Observation, Policy
from ..subject import Subject
from .pricing import choose_at_standstill, replace_option, restart_option, written

SETTLE_SECONDS = 2.0
"""A crash may be the consequence of a lost worker, which shows a moment later. Nothing waits for this judgement."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    failed = observation.faults_of(FaultKind.RANK_FAILED)
    if not failed:
        return None
    round_ = min(fault.round for fault in failed)
    of_round = tuple(fault for fault in failed if fault.round == round_)
    first = min(of_round, key=lambda fault: (_lost_a_peer(fault), fault.noticed_at))
    if observation.now - first.noticed_at < SETTLE_SECONDS and observation.round <= round_ and not first.out_of_memory:
        return None
    return _judge(observation, policy, first, tuple(fault.name for fault in of_round))


def _judge(observation: Observation, policy: Policy, fault: Fault, names: tuple[str, ...]) -> Decision:
    memory = fault.out_of_memory
    follows_rank = memory and any(
        past.cause is Cause.OUT_OF_MEMORY and past.rank == fault.rank and past.worker != fault.worker
        for past in observation.state.incidents.past
    )
    move = replace_option(
        observation,
        policy,
        refused=""
        if memory and not follows_rank
        else "it follows the rank"
        if follows_rank
        else "the worker is not at fault",
    )
    stay = restart_option(observation, policy, helps=not (memory and not move.refused))
    choice = choose_at_standstill((stay, move))
    chosen = choice.chosen
    end = _hopeless(observation, policy, fault)
    actions: tuple[Action, ...]
    if end is not None:
        actions = (end,)
    elif chosen is not None and chosen.option is move:
        actions = (ReplaceWorker(fault.worker, "it ran out of memory", dead=True),)
    else:
        actions = (CountRestart(),)
    remedy = None if end is not None or chosen is None else Remedy(chosen.option.remedy)
    return Decision(
        subject=Subject(Cause.OUT_OF_MEMORY if memory else Cause.CRASH, fault.round),
        class_=Class.APPLICATION if fault.exit_code > 0 or follows_rank else Class.UNKNOWN,
        message=f"rank {fault.rank} on {fault.worker} {_ending(fault)} {_progress(fault)}",
        first_sign=fault.noticed_at,
        actions=actions,
        remedy=remedy,
        remedies=written(choice.prices, chosen if remedy else None),
        evidence=(fault.error,) if fault.error else (),
        rank=fault.rank,
        worker=fault.worker,
        settles=names,
        last_step=max(fault.step, observation.step),
        error=error_line(fault.error),
        barren=not fault.completed_step,
    )


def _hopeless(observation: Observation, policy: Policy, fault: Fault) -> FailJob | None:
    """Two rounds in a row without a completed step and with the same error, or no restarts left."""
    state = observation.state
    line = error_line(fault.error)
    if not fault.completed_step and 0 < state.budget.barren_round < fault.round and state.budget.barren_error == line:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_ending(fault)} in two rounds in a row before it had completed a step:\n{fault.error}",
        )
    used = state.budget.within(observation.now, policy.restart_window)
    if used >= policy.max_restarts:
        return FailJob(
            Reason.RESTART_BUDGET_SPENT,
            f"{used} restarts within {policy.restart_window:.0f} s are all that spec.remediation.maxRestarts allows; "
            f"the last: rank {fault.rank} {_ending(fault)}:\n{fault.error}",
        )
    return None


def _lost_a_peer(fault: Fault) -> bool:
    """Its rank failed because another one was gone: a consequence, not the cause."""
    return fault.exit_code > 0 and _LOST_PEER.search(fault.error) is not None


_LOST_PEER = re.compile(r"Connection (closed|reset|refused)|Broken pipe|connection.*peer", re.IGNORECASE)


def error_line(error: str) -> str:
    """The last line of the script's words: `ValueError: …`, by which a repetition is known."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _progress(fault: Fault) -> str:
    return f"after step {fault.step}" if fault.step >= 0 else "before its first step"


def _ending(fault: Fault) -> str:
    if fault.out_of_memory:
        return "was killed for want of memory"
    return f"was killed by signal {-fault.exit_code}" if fault.exit_code < 0 else f"exited with {fault.exit_code}"
