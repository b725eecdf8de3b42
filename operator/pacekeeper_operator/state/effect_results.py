"""Results of effects: what came of the operator's requests, checks, and profile windows."""

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
