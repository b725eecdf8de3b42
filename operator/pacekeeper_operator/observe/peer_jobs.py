"""What concerns a job from outside: the nodes, and other jobs.

Other jobs show the nodes that they blame, hangs, how long Incidents last, whose turn it is, and which jobs report. The
data is kept once for all jobs, and updated by changes and by time: a pass over one job costs the same for any number of
others. No I/O: time is an argument. What has expired stays expired if a clock goes back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from ..api.incident import IncidentCause, IncidentClass
from ..api.training_job import JobPhase, TrainingJob
from ..kube.store import Key, ResourceStore
from ..pods.manifests import identify_checkpoint_folder
from ..state.cluster_view import RECENT_POLL_SECONDS, ClusterView, NodeView
from ..state.desired_state import DesiredState, Incident, Incidents, PastIncident

SUSPECT_NODE_SECONDS = 60.0
"""Nodes that were found failing within this duration of one another count as failing at once."""
HUNG_NODE_SECONDS = 3600.0
"""An older hang is no evidence about its node."""
NamedNodes = tuple[tuple[str, float], ...]
"""Nodes, and the time at which each was named, in seconds since the epoch."""
NO_INCIDENTS = Incidents()


@dataclass(frozen=True)
class NodeSnapshot:
    """All nodes by name, and since when those that have to be emptied were seen so.

    It is built again only when a node has changed.
    """

    views: Mapping[str, NodeView] = field(default_factory=dict)
    leaving_since: Mapping[str, float] = field(default_factory=dict)
    store_changes: int | None = None  # `change_count` of the store when it was built

    def refresh(self, store: ResourceStore[NodeView], now: float) -> NodeSnapshot:
        """Return the present snapshot."""
        if store.change_count == self.store_changes:
            return self
        views = {node.name: node for node in store}
        leaving = {name: self.leaving_since.get(name, now) for name, node in views.items() if node.leave_reason}
        return NodeSnapshot(views, leaving, store.change_count)


@dataclass(frozen=True)
class JobSummary:
    """The part of a job that other jobs may depend on."""

    uid: str
    incidents: Incidents
    placement_turn: PlacementTurn | None  # None: it does not wait to be placed
    folder_claim: FolderClaim | None = None  # None: it writes no checkpoints, or not to a shared folder

    @classmethod
    def from_job(cls, job: TrainingJob, desired: DesiredState, phase: JobPhase | None) -> JobSummary:
        placement = desired.state.placement
        is_accepted = placement.template_accepted == job.generation  # otherwise it cannot have pods at all
        waits = is_accepted and phase is JobPhase.PENDING and not job.spec.suspend
        return cls(
            job.uid,
            desired.state.incidents,
            _build_placement_turn(job, desired) if waits else None,
            _build_folder_claim(job, desired),
        )


@dataclass(frozen=True, order=True)
class PlacementTurn:
    """The turn of a job that could not be placed so far. `seniority` is its creation time and UID."""

    seniority: tuple[float, str]
    name: str = ""
    attempts: int = 0


@dataclass(frozen=True, order=True)
class FolderClaim:
    """The claim of a job on a checkpoint folder. Jobs with workers come first, then older jobs."""

    has_no_workers: bool  # it has no workers yet
    seniority: tuple[float, str]  # creation time and UID
    name: str = ""
    folder: str = ""


class PeerJobs:
    """All jobs of this operator.

    Jobs of another namespace are not trusted, nor waited for. Their hangs on a node are only a reason to probe the
    node. Reports of any job show that the operator is not cut off.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str, _NamespaceJobs] = {}
        self._hung = RecentNodes(HUNG_NODE_SECONDS)  # in all namespaces
        self._reported_at: dict[str, float] = {}  # time of each job's last report, by UID; the latest is last
        self._held_polls: dict[str, int] = {}  # number of held polls of each job, by UID; without zeros

    def put(self, key: Key, summary: JobSummary | None, now: float) -> None:
        """Record a job's present summary; None: it does not exist (any more)."""
        namespace_jobs = self._namespaces.setdefault(key[0], _NamespaceJobs())
        before = namespace_jobs.jobs.pop(key, None)
        if summary is not None:
            namespace_jobs.jobs[key] = summary
        elif not namespace_jobs.jobs:
            del self._namespaces[key[0]]
        namespace_jobs.placement_queue.update(
            before.placement_turn if before else None, summary.placement_turn if summary else None
        )
        namespace_jobs.folder_claims.update(
            before.folder_claim if before else None, summary.folder_claim if summary else None
        )
        old_incidents, incidents = (
            (before.incidents if before else NO_INCIDENTS),
            (summary.incidents if summary else NO_INCIDENTS),
        )
        if old_incidents.past is not incidents.past or old_incidents.current is not incidents.current:
            namespace_jobs.blamed.put(key, tuple(_list_blamed_nodes(incidents)), now)
        if old_incidents.past is not incidents.past:
            hung_nodes = tuple(_list_hung_nodes(incidents))
            namespace_jobs.hung.put(key, hung_nodes, now)
            self._hung.put(key, hung_nodes, now)
            namespace_jobs.durations.put(key, incidents.past)

    def mark_reporting(self, uid: str, at: float) -> None:
        """Record that a worker of the job with this UID has reported."""
        self._reported_at.pop(uid, None)
        self._reported_at[uid] = at

    def adjust_held_polls(self, uid: str, polls: int) -> None:
        """Record a change of the number of held polls of a job. While a poll is held, its worker's machine is alive."""
        held = self._held_polls.get(uid, 0) + polls
        if held > 0:  # it may have been forgotten in the meantime
            self._held_polls[uid] = held
        else:
            self._held_polls.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Forget the reports of a job."""
        self._reported_at.pop(uid, None)
        self._held_polls.pop(uid, None)

    def build_cluster_view(self, job: TrainingJob, desired: DesiredState, now: float) -> ClusterView:
        """Return what other jobs show that concerns this one, with its desired state."""
        namespace_jobs = self._namespaces.get(job.namespace) or _NamespaceJobs()
        key = job.namespace, job.name
        summary = namespace_jobs.jobs.get(key)
        return ClusterView(
            suspects=namespace_jobs.blamed.get_nodes(now),
            older_waiting_job=namespace_jobs.placement_queue.find_first_before(_build_placement_turn(job, desired)),
            folder_owner=namespace_jobs.folder_claims.find_first_before(_build_folder_claim(job, desired)),
            hung_nodes=namespace_jobs.hung.count_mentions(
                now, key if summary is not None and summary.uid == job.uid else None
            ),
            hung_elsewhere=namespace_jobs.find_hung_elsewhere(self._hung, now),
            past_durations=namespace_jobs.durations.collect_by_cause(),
            reached_elsewhere=self._has_other_reporting_job(job.uid, now),
        )

    def _has_other_reporting_job(self, uid: str, now: float) -> bool:
        if any(other != uid for other in islice(self._held_polls, 2)):
            return True
        last = next((at for other, at in reversed(self._reported_at.items()) if other != uid), None)
        return last is not None and now - last < RECENT_POLL_SECONDS


class RecentNodes:
    """Nodes that jobs name, each for `seconds` from the time that comes with it."""

    def __init__(self, seconds: float) -> None:
        self.changes = 0  # number of changes of what is named
        self._seconds = seconds
        self._named: dict[Key, NamedNodes] = {}
        self._oldest: list[tuple[float, Key]] = []  # a heap of times: what expires first comes first
        self._counts: dict[str, int] = {}  # replaced, never changed in place
        self._nodes = frozenset[str]()

    def put(self, key: Key, named: NamedNodes, now: float) -> None:
        """Record all nodes that the job names now."""
        recent = tuple(mention for mention in named if self._is_recent(mention[1], now))
        before = self._named.pop(key, ())
        if recent:
            self._named[key] = recent
        if recent == before:
            return
        counts = Counter(self._counts)
        counts.update(node for node, _ in recent)
        counts.subtract(node for node, _ in before)
        self._counts = dict(+counts)
        self._nodes = frozenset(self._counts)
        self.changes += 1
        if recent:
            heapq.heappush(self._oldest, (min(at for _, at in recent), key))

    def get_nodes(self, now: float) -> frozenset[str]:
        """Return the nodes that any job names."""
        self._expire(now)
        return self._nodes

    def count_mentions(self, now: float, without: Key | None = None) -> Mapping[str, int]:
        """Return how often each node is named, without this job."""
        self._expire(now)
        own = self._named.get(without) if without is not None else None
        return dict(Counter(self._counts) - Counter(node for node, _ in own)) if own else self._counts

    def _is_recent(self, at: float, now: float) -> bool:
        return now - at < self._seconds

    def _expire(self, now: float) -> None:
        """Drop what has expired."""
        while self._oldest and not self._is_recent(self._oldest[0][0], now):
            _, key = heapq.heappop(self._oldest)
            self.put(key, self._named.get(key, ()), now)


class PlacementQueue:
    """The jobs that wait to be placed: by the number of failed attempts, oldest first."""

    def __init__(self) -> None:
        self._by_attempts: dict[int, list[PlacementTurn]] = {}

    def update(self, before: PlacementTurn | None, after: PlacementTurn | None) -> None:
        """Replace one job's turn."""
        if before == after:
            return
        if before is not None:
            turns = self._by_attempts[before.attempts]
            del turns[bisect_left(turns, before)]
            if not turns:
                del self._by_attempts[before.attempts]
        if after is not None:
            insort(self._by_attempts.setdefault(after.attempts, []), after)

    def find_first_before(self, turn: PlacementTurn | None) -> str:
        """Return the name of the oldest job that has its turn before; "": none.

        These are older jobs with at most as many failed attempts.
        """
        if turn is None:
            return ""
        oldest = (
            next((other for other in turns[:2] if other.seniority[1] != turn.seniority[1]), turn)
            for attempts, turns in self._by_attempts.items()
            if attempts <= turn.attempts
        )
        first = min(oldest, default=turn)
        return first.name if first.seniority < turn.seniority else ""


class FolderClaims:
    """The checkpoint folders, and the jobs that claim them."""

    def __init__(self) -> None:
        self._by_folder: dict[str, set[FolderClaim]] = {}

    def update(self, before: FolderClaim | None, after: FolderClaim | None) -> None:
        """Replace one job's claim."""
        if before == after:
            return
        if before is not None:
            claims = self._by_folder[before.folder]
            claims.discard(before)
            if not claims:
                del self._by_folder[before.folder]
        if after is not None:
            self._by_folder.setdefault(after.folder, set()).add(after)

    def find_first_before(self, claim: FolderClaim | None) -> str:
        """Return the name of the job that has the folder before this one; "": none."""
        if claim is None:
            return ""
        others = (other for other in self._by_folder.get(claim.folder, ()) if other.seniority[1] != claim.seniority[1])
        first = min(others, default=claim)
        return first.name if first < claim else ""


class IncidentDurations:
    """The durations of past Incidents, by cause."""

    def __init__(self) -> None:
        self._jobs: dict[IncidentCause, dict[Key, tuple[float, ...]]] = {}
        self._known: dict[IncidentCause, tuple[float, ...]] = {}  # replaced, never changed in place

    def put(self, key: Key, past: Sequence[PastIncident]) -> None:
        """Record all past Incidents of a job."""
        by_cause: dict[IncidentCause, list[float]] = {}
        for item in past:
            by_cause.setdefault(item.cause, []).append(item.seconds)
        for cause in {*self._jobs, *by_cause}:
            jobs, seconds = self._jobs.setdefault(cause, {}), tuple(by_cause.get(cause, ()))
            if jobs.get(key, ()) == seconds:
                continue
            jobs.pop(key, None)
            if seconds:
                jobs[key] = seconds
            self._known = {item: durations for item, durations in self._known.items() if item is not cause}

    def collect_by_cause(self) -> Mapping[IncidentCause, tuple[float, ...]]:
        """Return the durations of all jobs, in seconds."""
        missing = [cause for cause, jobs in self._jobs.items() if jobs and cause not in self._known]
        if missing:
            joined = {cause: tuple(chain.from_iterable(self._jobs[cause].values())) for cause in missing}
            self._known = {**self._known, **joined}
        return self._known


class _NamespaceJobs:
    """The jobs of one namespace, which trust one another."""

    def __init__(self) -> None:
        self.jobs: dict[Key, JobSummary] = {}
        self.placement_queue = PlacementQueue()
        self.folder_claims = FolderClaims()
        self.blamed = RecentNodes(SUSPECT_NODE_SECONDS)
        self.hung = RecentNodes(HUNG_NODE_SECONDS)
        self.durations = IncidentDurations()
        self._elsewhere: tuple[tuple[int, int] | None, frozenset[str]] = None, frozenset()

    def find_hung_elsewhere(self, everywhere: RecentNodes, now: float) -> frozenset[str]:
        """Return the nodes on which jobs of other namespaces have hung recently."""
        own_counts, all_counts = self.hung.count_mentions(now), everywhere.count_mentions(now)
        changes = self.hung.changes, everywhere.changes
        if self._elsewhere[0] != changes:
            self._elsewhere = changes, frozenset(n for n, count in all_counts.items() if count > own_counts.get(n, 0))
        return self._elsewhere[1]


def _build_folder_claim(job: TrainingJob, desired: DesiredState) -> FolderClaim | None:
    """Return the job's claim; None if it has ended, or is suspended and has no workers left."""
    has_workers = bool(desired.state.placement.workers)
    if desired.state.lifecycle.is_over or (job.spec.suspend and not has_workers):
        return None
    folder = identify_checkpoint_folder(job)
    return FolderClaim(not has_workers, (job.created_at or 0.0, job.uid), job.name, folder) if folder else None


def _build_placement_turn(job: TrainingJob, desired: DesiredState) -> PlacementTurn | None:
    """Return the job's turn; None if it does not wait for other jobs, as at its first attempt."""
    attempts = desired.state.placement.attempts
    return (
        PlacementTurn((job.created_at or 0.0, job.uid), job.name, attempts)
        if attempts and not desired.plan.members
        else None
    )


def _list_blamed_nodes(incidents: Incidents) -> Iterator[tuple[str, float]]:
    for incident in incidents.current:
        if _blames_node(incident):
            yield incident.node or "", incident.detected
    for past in incidents.past:
        if _blames_node(past):
            yield past.node or "", past.at


def _blames_node(incident: Incident | PastIncident) -> bool:
    lost = incident.cause in (IncidentCause.NODE_LOST, IncidentCause.GPU_ERROR)
    return lost and incident.class_ is IncidentClass.INFRASTRUCTURE and bool(incident.node)


def _list_hung_nodes(incidents: Incidents) -> Iterator[tuple[str, float]]:
    """Return the nodes on which the job's ranks have hung."""
    return ((past.node, past.at) for past in incidents.past if past.cause is IncidentCause.HANG and past.node)
