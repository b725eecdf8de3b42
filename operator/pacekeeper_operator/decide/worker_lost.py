"""A worker's pod is gone, ends, or is told to end."""

from __future__ import annotations

from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Reason, Remedy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, PodView, Policy, WorkerView
from ..subject import Subject
from .pricing import choose_at_standstill, replace_lost_option, written


def check(observation: Observation, policy: Policy) -> Decision | None:
    terminating = {fault.worker: fault for fault in observation.faults_of(FaultKind.TERMINATING)}
    for view in observation.members:
        if view.record.leaving or view.record.name in observation.state.life.finished:
            continue
        how = _how_lost(view, terminating.get(view.name))
        if how is not None:
            return _replace(observation, policy, view, how, terminating.get(view.name))
    return None


def _how_lost(view: WorkerView, fault: Fault | None) -> tuple[str, Class, bool] | None:
    """In words, whose doing, and whether it still trains for a moment; None: it is not lost."""
    pod = view.pod
    if pod is None:
        return ("its pod is gone", Class.DISRUPTION, False) if view.record.uid else None
    if pod.disrupted:
        return f"its pod is disrupted ({pod.disrupted})", Class.DISRUPTION, not pod.ended
    if pod.deleting:
        return "its pod was deleted", Class.DISRUPTION, not pod.ended
    if fault is not None:
        return "its pod was told to end", Class.DISRUPTION, not pod.ended
    if pod.ended and pod.exit_code != 0:
        return _say_exit(pod), Class.UNKNOWN, False
    return None


def _replace(
    observation: Observation, policy: Policy, view: WorkerView, how: tuple[str, Class, bool], fault: Fault | None
) -> Decision:
    words, class_, trains = how
    disruption = class_ is Class.DISRUPTION
    option = replace_lost_option(observation, policy)
    # Without a spare the ranks wait for the worker that is made in its place: there is no other remedy.
    choice = choose_at_standstill((option,))
    allowed = not policy.refusal(Remedy.REPLACE_WORKER)
    actions: tuple[Action, ...] = ()
    if not disruption and observation.budget_is_spent(policy):
        actions = (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left, and of worker {view.name} {words}"),)
    elif allowed:
        actions = (ReplaceWorker(view.name, words, dead=not trains, disruption=disruption),)
    member = next(member for member in observation.plan.members if member.worker == view.name)
    return Decision(
        subject=Subject(_cause(view), observation.round, worker=view.name),
        class_=class_,
        message=f"worker {view.name} (rank {', '.join(map(str, member.ranks))}) is lost: {words}",
        first_sign=observation.now if fault is None else fault.noticed_at,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if allowed else None,
        remedies=written(choice.prices, choice.chosen),
        evidence=(view.pod.exit_message,) if view.pod is not None and view.pod.exit_message else (),
        rank=member.ranks[0],
        worker=view.name,
        node=view.record.node or None,
        settles=tuple(
            f.name for f in observation.faults if f.worker == view.name or f.kind is not FaultKind.TERMINATING
        ),
        last_step=observation.step,
    )


def _cause(view: WorkerView) -> Cause:
    killed = view.pod is not None and view.pod.exit_reason == "OOMKilled"
    return Cause.OUT_OF_MEMORY if killed else Cause.WORKER_LOST


def _say_exit(pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"its trainer ended with {pod.exit_code}{reason}" if pod.exit_code is not None else "its pod has failed"
