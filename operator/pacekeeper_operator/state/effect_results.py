"""Results of effects: what came of the operator's requests, checks, and profile windows; and what it has read."""

from __future__ import annotations

from dataclasses import dataclass

from pacekeeper_analysis.profiling.localize import Localization

from ..api.node_quarantine import QuarantineVerdict


@dataclass(frozen=True)
class QuarantineDecision:
    """The quarantine decision about a node that a job blames. `message` names no other job."""

    verdict: QuarantineVerdict
    message: str
    recorded: bool = False  # the NodeQuarantine lists a suspicion of the job's namespace


@dataclass(frozen=True)
class LocalizedProfile:
    """The result of a profile window. `page`: the page for people that is to be saved, as JSON; "": it is saved."""

    window: str
    localization: Localization
    page: str = ""


@dataclass(frozen=True)
class NodeCheck:
    """The result of a node's preflight check."""

    at: float  # seconds since the epoch
    passed: bool | None  # None: the check was inconclusive
    message: str = ""


@dataclass(frozen=True)
class TemplateVerdict:
    """The API server's answer to a dry run of the pods of a generation of the job."""

    generation: int
    rejection: str = ""  # its message; "": it accepts them


@dataclass(frozen=True)
class BlockedAction:
    """An action that the operator wants and could not carry out so far."""

    action: str
    reason: str  # mostly the API server's message
    is_pod_creation: bool = False  # it is the creation of a pod


@dataclass(frozen=True)
class JobPolicy:
    """The part of a `batch/v1` Job that decides what follows when one of its pods is deleted."""

    name: str
    backoff_limit: int
    failed_pods: int  # that count against the limit so far
    replicated_job: str = ""  # the JobSet's template that it was created from; "": it has none
    uses_exit_codes: bool = (
        False  # a deleted pod counts by how it ends (podFailurePolicy, podReplacementPolicy: Failed)
    )
    limits_each_index: bool = False  # backoffLimitPerIndex
    inactive_reason: str = ""  # why its controller would not act now; "": it would


@dataclass(frozen=True)
class JobSetRule:
    """A rule of a JobSet's failurePolicy. Empty: it applies to any reason, or to any template."""

    action: str
    reasons: tuple[str, ...] = ()  # of the Job's failure
    replicated_jobs: tuple[str, ...] = ()
    is_conditional: bool = False  # it has more conditions than these


@dataclass(frozen=True)
class JobSetPolicy:
    """The part of a JobSet that decides what follows when one of its Jobs fails."""

    name: str
    max_restarts: int | None  # None: it has no failurePolicy, so that it fails
    restarts: int = 0  # that count against the limit so far
    rules: tuple[JobSetRule, ...] = ()  # in their order; the first that applies decides
    strategy: str = "Recreate"
    inactive_reason: str = ""  # as of a Job


@dataclass(frozen=True)
class PodController:
    """What controls a watched pod, as read from the API server."""

    description: str  # its kind and name, for people
    job: JobPolicy | None = None  # None: it is no Job of `batch/v1`
    job_set: JobSetPolicy | None = None  # that controls the Job; None: none does


@dataclass(frozen=True)
class PodRestartFacts:
    """What decides whether a pod of a watched job may be deleted, apart from the job itself.

    It is read only if the platform has enabled that, and the job's namespace as well.
    """

    uid: str  # of the pod
    hold_reason: str = ""  # why no remedy is applied now; "": some may be
    controller: PodController | None = None  # None: the pod is gone, or nothing controls it
    has_other_trainings: bool = False  # other trainings run below the same owner
    is_in_one_job_set: bool = False  # all pods with ranks belong to the same JobSet


@dataclass(frozen=True)
class PodRestartRefusal:
    """A deletion that was decided and then not carried out."""

    incident: str
    reason: str
