"""The open requests to a job's ranks, and what the operator needs only while they are open.

This part of the desired state is never written to the API server. A new leader begins without it, and issues its own
requests. So nothing here may be needed for a decision that the earlier leader has begun.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.protocol.plan import Member
from pacekeeper_analysis.protocol.requests import Requests

LEADER_DIGITS = 8
"""Hexadecimal digits of a request's name that tell requests of different leaders apart."""


@dataclass(frozen=True)
class JobRequests(Requests):
    """The open requests, and the bookkeeping of them. Times are seconds since the epoch."""

    issued: int = 0  # requests of this leader so far
    investigation: InvestigationRequest | None = None  # None: this leader has not asked in the present investigation
    revert: RevertRequest | None = None  # the same for the present Local-SGD mode
    connections_requested_at: float | None = None
    """When the connections were last asked for evidence: before a round for other routes, or of a watched job."""
    link_check: LinkCheck | None = None
    profile_window: ProfileWindow | None = None  # of the open request for a profile

    def list_concerned_workers(self, previous: Requests, members: Sequence[Member]) -> set[str]:
        """Return the workers whose part differs from that of `previous`."""
        concerned: set[str] = set()
        if (self.evidence, self.profile) != (previous.evidence, previous.profile):
            concerned.update(member.worker for member in members)
        if self.probe != previous.probe:
            probes = (probe for probe in (self.probe, previous.probe) if probe is not None)
            concerned.update(source for probe in probes for source in probe.sources)
        return concerned

    def build_next_name(self, kind: str, nonce: str) -> str:
        """Return a name for the next request. `nonce`: of this pass, which no other leader has."""
        leader = hashlib.sha256(f"{nonce}/requests".encode()).hexdigest()[:LEADER_DIGITS]
        return f"{kind}-{self.issued + 1}-{leader}"


@dataclass(frozen=True)
class InvestigationRequest:
    """The last evidence request of a straggler investigation, and what its answers have shown."""

    requested_at: float
    step: int | None = None  # the last completed one at that time
    relative_time: float | None = None  # relative step time of the slowest rank at that time, by the metrics
    last_clear_at: float | None = None  # when an answer last showed no bottleneck; None: none has


@dataclass(frozen=True)
class RevertRequest:
    """The last request for evidence that the reason of a Local-SGD mode is over, and its answers so far."""

    requested_at: float | None = None
    clear_answers: int = 0  # answers in a row that showed that it is over
    first_clear_step: int | None = None  # the step at the first of them


@dataclass(frozen=True)
class ProfileWindow:
    """The open profile window. It is recorded in the job's state once it has ended, with or without a result."""

    requested_at: float
    until: float  # answers are awaited until then
    round: int = 0  # in which it was requested
    incident: str = ""  # whose profile it is; "": no incident was open
    reason: str = ""  # for people
    annotation: str = ""  # value of the annotation that a user requested it with; "": the operator chose to open it
    uniform_slowdown: float = 1.0  # slowdown of all ranks at that time


@dataclass(frozen=True)
class LinkCheck:
    """The evidence of the job's connections, and the probe of the hottest place."""

    at: float
    request: str  # evidence request that was answered
    hottest: HottestPlace | None = None  # None: none is hot
    hot_places: tuple[str, ...] = ()  # all hot places, for people, hottest first
    conclusive: bool = False  # enough connections could be told apart to be compared
    sides: tuple[LinkSide, ...] = ()  # slowest ones
    incident: str = ""  # for which it is, or was, probed
    probe: str = ""  # pending probe; "": none
    probed_at: float | None = None


@dataclass(frozen=True)
class HottestPlace:
    """The slowest place between the job's ranks."""

    kind: SpotKind
    source: int  # rank
    destination: int
    bytes_per_second: float  # while it was busy


@dataclass(frozen=True)
class LinkSide:
    """All that a rank sends, or receives: its time per byte over the usual."""

    rank: int
    sends: bool
    ratio: float
