"""The restart of a watched job that hangs: whether its controller restarts all ranks if one pod is deleted.

It needs the platform's and the namespace's consent. The decision is written before the pod is deleted, and is made at
most once for each incident. A controller that would start only the deleted pod again gets no deletion: the other ranks
would wait on, and the Job would have one try less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pacekeeper_analysis.failures.hang import OUTSIDE_COLLECTIVES_SECONDS, diagnose_hang
from pacekeeper_analysis.protocol.reports import FaultKind, RankState

from ...api.incident import IncidentCause
from ...api.training_job import RemediationMode, Remedy
from ...state.cluster_view import FRESH_WORKER_SECONDS, WorkerView
from ...state.desired_state import DesiredState, Incident, RequestedPodRestart
from ...state.effect_results import JobPolicy, JobSetPolicy, PodController, PodRestartFacts
from ...state.observation import Observation
from ...state.policy import Policy
from ..effects import DeleteWatchedPod

MAX_REMEMBERED_POD_RESTARTS = 16
"""More than may be decided within the window (`RemediationSpec.max_restarts`)."""
JOB_FAILURE_REASON = "BackoffLimitExceeded"
"""Why a Job fails by the deletion of a pod, in the words of its controller."""


@dataclass(frozen=True)
class BlockingPod:
    """A hang as complete reports of this moment show it, and the pod of the rank that causes it."""

    incident: Incident
    view: WorkerView
    ranks: tuple[RankState, ...]

    @property
    def standing_seconds(self) -> float:
        """For how long no rank has made progress, each by its own clock."""
        return min(rank.waiting_seconds for rank in self.ranks)

    @property
    def last_step(self) -> int | None:
        """The last step that some rank has completed; None: none has."""
        return max((rank.step for rank in self.ranks if rank.step is not None), default=None)


@dataclass(frozen=True)
class PodRestartCase:
    """A hang, and what decides about the deletion of its pod."""

    observation: Observation
    hang: BlockingPod
    facts: PodRestartFacts

    @property
    def holds_all_ranks(self) -> bool:
        """Whether all ranks of the training are in this pod."""
        return all(member.worker == self.hang.view.name for member in self.observation.plan.members)


def request_pod_restart(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state with the decision about the pod that blocks the job, and with the reason if it stays.

    It runs before the checks, which settle the reports of the hang.
    """
    observation = observation.with_desired(_settle_consequences(observation))
    observation = observation.with_desired(_withdraw_refused(observation))
    desired, hang, facts = observation.desired, find_blocking_pod(observation), observation.pod_restart
    if hang is None or facts is None or hang.view.pod is None or hang.view.pod.uid != facts.uid:
        return desired
    incident, pod = hang.incident, hang.view.pod
    if any(restart.incident == incident.name for restart in desired.state.watched.restarts):
        return desired
    reason = find_pod_restart_refusal(PodRestartCase(observation, hang, facts))
    if reason:
        return desired.with_incident(replace(incident, remedy_result=f"not restarted: {reason}"))
    restart = RequestedPodRestart(incident.name, pod.name, pod.uid, observation.now, hang.last_step)
    restarts = (*desired.state.watched.restarts, restart)[-MAX_REMEMBERED_POD_RESTARTS:]
    applied = replace(
        incident,
        mode=RemediationMode.ACT,
        remedy=Remedy.RESTART_RANKS,
        applied=observation.now,
        remedy_result=f"pod {pod.name} is deleted: {_describe_restart(facts.controller)}",
    )
    return desired.with_incident(applied).with_watched(restarts=restarts)


def find_blocking_pod(observation: Observation) -> BlockingPod | None:
    """Return the pod of the rank that an open hang names, if complete reports of this moment name it, too; else None.

    A lasting stall is reported again every few seconds. So a rank that moves again is not blamed.
    """
    stalls = observation.select_faults(FaultKind.STALLED)
    hangs = (
        incident
        for incident in observation.state.incidents.open
        if incident.cause is IncidentCause.HANG and incident.round == observation.progress.round
    )
    incident = next(hangs, None)
    if not stalls or incident is None or incident.rank is None:
        return None
    newest = {state.rank: state for stall in stalls for state in stall.ranks}
    if len(newest) < observation.plan.world_size:
        return None
    verdict = diagnose_hang(stalls, observation.plan.world_size)
    if verdict is None or incident.rank not in verdict.ranks:
        return None
    view = observation.find_worker(observation.find_worker_of_rank(incident.rank) or "")
    return None if view is None else BlockingPod(incident, view, tuple(newest.values()))


def find_pod_restart_refusal(case: PodRestartCase) -> str:
    """Return why the first check that does not pass refuses the deletion; "": it helps."""
    reasons = (check(case) for _, check in POD_RESTART_CHECKS)
    return next(filter(None, reasons), "")


def find_controller_refusal(facts: PodRestartFacts, *, holds_all_ranks: bool) -> str:
    """Return why the pod's controller would not restart all ranks; "": it would."""
    controller = facts.controller
    if controller is None:
        return "no controller of its pod is known"
    if controller.job is None:
        return f"{controller.description} is not known to restart all ranks when one pod is deleted"
    return _explain_job(controller.job, controller.job_set, facts, holds_all_ranks=holds_all_ranks)


def list_pod_deletions(observation: Observation) -> tuple[DeleteWatchedPod, ...]:
    """Return the deletions that are decided and not carried out. After a crash, the next operator continues here."""
    deletions = []
    for restart in observation.state.watched.restarts:
        incident = observation.state.incidents.find(restart.incident)
        if incident is None or incident.outcome is not None or incident.applied is None:
            continue
        view = observation.find_worker(restart.pod)
        is_there = view is not None and view.alive and view.pod is not None and view.pod.uid == restart.uid
        if is_there and is_at_standstill(observation, incident.round, restart.last_step):
            deletions.append(DeleteWatchedPod(restart.pod, restart.uid, restart.incident))
    return tuple(deletions)


def is_at_standstill(observation: Observation, round_: int, last_step: int | None) -> bool:
    """Return whether all pods with ranks report, and no rank of this round has completed a step after `last_step`."""
    if observation.progress.round != round_ or len(observation.members) < len(observation.plan.members):
        return False
    limit = -1 if last_step is None else last_step
    return all(
        view.alive
        and view.heartbeat is not None
        and view.silent_seconds <= FRESH_WORKER_SECONDS
        and view.heartbeat.round == round_
        and (view.heartbeat.progress.step is None or view.heartbeat.progress.step <= limit)
        for view in observation.members
    )


def _check_hold(case: PodRestartCase) -> str:
    return case.facts.hold_reason


def _check_pod(case: PodRestartCase) -> str:
    pod = case.hang.view.pod
    if pod is None or not case.hang.view.alive:
        return "its pod has ended already"
    return "its pod belongs to a TrainingJob" if pod.job else ""


def _check_standstill(case: PodRestartCase) -> str:
    if is_at_standstill(case.observation, case.hang.incident.round, case.hang.last_step):
        return ""
    return "not all pods of the job report that they stand still"


def _check_controller(case: PodRestartCase) -> str:
    return find_controller_refusal(case.facts, holds_all_ranks=case.holds_all_ranks)


def _check_budget(case: PodRestartCase) -> str:
    spec, observation = case.observation.job.spec.remediation, case.observation
    restarts = observation.state.watched.restarts
    if sum(restart.at > observation.now - spec.restart_window for restart in restarts) < spec.max_restarts:
        return ""
    return f"{spec.max_restarts} pods of this job have been deleted within {spec.restart_window / 3600:g} h"


def _check_progress(case: PodRestartCase) -> str:
    limit = case.observation.job.spec.remediation.max_rounds_without_progress
    last = case.observation.state.watched.restarts[-limit:]
    if len(last) < limit or any(restart.last_step != case.hang.last_step for restart in last):
        return ""
    return f"it has hung at the same step after each of the last {limit} restarts"


def _check_duration(case: PodRestartCase) -> str:
    """Wait for as long as the diagnosis lets a rank wait outside of collectives.

    A script that Pacekeeper does not know may have a good reason: it writes a checkpoint, or waits for storage.
    """
    if case.hang.standing_seconds >= OUTSIDE_COLLECTIVES_SECONDS:
        return ""
    return f"its pod is deleted if all ranks stand still for {OUTSIDE_COLLECTIVES_SECONDS:.0f} s"


POD_RESTART_CHECKS: tuple[tuple[str, Callable[[PodRestartCase], str]], ...] = (
    # Pause, mode Recommend, and the breaker of the watch hold for all jobs.
    ("remedies-are-applied", _check_hold),
    ("pod-is-watched", _check_pod),
    ("all-ranks-stand-still", _check_standstill),
    ("controller-restarts-all-ranks", _check_controller),
    ("restarts-are-left", _check_budget),
    ("restarts-help", _check_progress),
    # Last, so that the reasons that no time changes are shown at once.
    ("hang-lasts", _check_duration),
)
"""What must hold before a pod is deleted, in this order. Each check returns why it does not hold, or ""."""


def _explain_job(job: JobPolicy, job_set: JobSetPolicy | None, facts: PodRestartFacts, *, holds_all_ranks: bool) -> str:
    """Return why neither the Job nor the JobSet above it would restart all ranks; "": one of them would."""
    name = f"Job {job.name}"
    if job.inactive_reason:
        return f"{name} restarts nothing: {job.inactive_reason}"
    if job.uses_exit_codes:
        return (
            f"{name} counts a deleted pod by how it ends (podFailurePolicy, or podReplacementPolicy Failed), which is "
            "not known before"
        )
    if job.limits_each_index:
        return f"{name} has backoffLimitPerIndex: it would start the index of this pod again, and not the others"
    if job.failed_pods < job.backoff_limit:
        remedy = "have a JobSet with a failurePolicy restart all its Jobs, and set the Job's backoffLimit to 0"
        return "" if holds_all_ranks else f"{name} would start only this pod again, and the others wait on; {remedy}"
    if job_set is None:
        return f"{name} would fail: its backoffLimit of {job.backoff_limit} is used up"
    return _explain_job_set(job_set, job, facts)


def _explain_job_set(job_set: JobSetPolicy, job: JobPolicy, facts: PodRestartFacts) -> str:
    """Return why the JobSet would not restart all of its Jobs once this one has failed; "": it would."""
    name = f"JobSet {job_set.name}"
    if job_set.inactive_reason:
        return f"{name} restarts nothing: {job_set.inactive_reason}"
    if not facts.is_in_one_job_set:
        return f"{name} would not restart the ranks in pods of other JobSets"
    if facts.has_other_trainings:
        return f"{name} would restart other trainings, too"
    if job_set.max_restarts is None:
        return f"{name} would fail: it has no failurePolicy"
    if job_set.strategy not in ("Recreate", "BlockingRecreate"):
        return f"{name} has the restartStrategy {job_set.strategy}, which is not known to recreate all Jobs"
    for rule in job_set.rules:
        fits = not rule.reasons or JOB_FAILURE_REASON in rule.reasons
        if not fits or (rule.replicated_jobs and job.replicated_job not in rule.replicated_jobs):
            continue
        if rule.is_conditional:
            return f"{name} has a rule with conditions that are not known"
        if rule.action == "RestartJobSetAndIgnoreMaxRestarts":
            return ""
        if rule.action != "RestartJobSet":
            return f"{name} would not restart all its Jobs: its failurePolicy demands {rule.action}"
        break
    if job_set.restarts >= job_set.max_restarts:
        return f"{name} would fail: {job_set.restarts} of {job_set.max_restarts} restarts are used up"
    return ""


def _describe_restart(controller: PodController | None) -> str:
    if controller is None or controller.job is None:
        return "its controller restarts all ranks"
    job, job_set = controller.job, controller.job_set
    if job_set is not None and job.failed_pods >= job.backoff_limit:
        return f"JobSet {job_set.name} restarts all its Jobs"
    return f"Job {job.name} starts it again, with all ranks"


def _settle_consequences(observation: Observation) -> DesiredState:
    """Settle the ends of ranks that a deletion causes: they are no crashes of their own."""
    applied = {
        incident.round: incident.applied
        for incident in observation.state.incidents.open
        if incident.cause is IncidentCause.HANG and incident.applied is not None
    }
    return observation.desired.settle_faults(
        tuple(
            fault.name
            for fault in observation.select_faults(FaultKind.RANK_FAILED)
            if fault.noticed_at >= applied.get(fault.round, math.inf)
        )
    )


def _withdraw_refused(observation: Observation) -> DesiredState:
    """Return the state without the decision that the last check before the deletion has refused."""
    desired, refusal = observation.desired, observation.pod_restart_refusal
    incident = None if refusal is None else observation.state.incidents.find(refusal.incident)
    if refusal is None or incident is None or incident.outcome is not None or incident.applied is None:
        return desired
    withdrawn = replace(
        incident, mode=RemediationMode.RECOMMEND, applied=None, remedy_result=f"not restarted: {refusal.reason}"
    )
    return desired.with_incident(withdrawn)
