"""What a job has around it: the nodes, and what other jobs show of nodes that they blame, of hangs, of how long
incidents last, of whose turn it is, and of who is heard.

Kept once for all jobs, and brought up to date by what changes and by the passing of time: a pass over one job costs the
same however many others there are. No I/O; time is an argument, and what is over stays over if a clock goes back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from ..api import IncidentCause, IncidentClass, TrainingJob, JobPhase
from ..manifests import identify_checkpoint_folder
from ..observation import RECENT_POLL_SECONDS, NodeView, ClusterView
from ..state import DesiredState, Incident, Incidents, PastIncident
from .store import Key, ResourceStore

SUSPECT_NODE_SECONDS = 60.0
"""Nodes that were found failing within so many seconds of one another fail at once."""
HUNG_NODE_SECONDS = 3600.0
"""A hang that is older says nothing about its node any more."""
NamedNodes = tuple[tuple[str, float], ...]
"""Nodes, and when each was named, in seconds since the epoch."""
NO_INCIDENTS = Incidents()


@dataclass(frozen=True)
class NodeSnapshot:
    """All nodes by name, and since when those that are to be empty have been seen to be so. Looked through when one has
    changed, and not before."""

    views: Mapping[str, NodeView] = field(default_factory=dict)
    leaving_since: Mapping[str, float] = field(default_factory=dict)
    store_changes: int = -1  # of the shelf, when it was looked through

    def refresh(self, store: ResourceStore[NodeView], now: float) -> NodeSnapshot:
        """The nodes as they are by now."""
        if store.change_count == self.store_changes:
            return self
        views = {node.name: node for node in store}
        leaving = {name: self.leaving_since.get(name, now) for name, node in views.items() if node.leave_reason}
        return NodeSnapshot(views, leaving, store.change_count)


@dataclass(frozen=True)
class JobSummary:
    """What others may want to know of a job."""

    uid: str
    incidents: Incidents
    placement_turn: PlacementTurn | None  # None: it does not wait to be placed
    folder_claim: FolderClaim | None = None  # None: it writes no checkpoints, or not where others do

    @classmethod
    def from_job(cls, job: TrainingJob, draft: DesiredState, phase: JobPhase | None) -> JobSummary:
        placement = draft.state.placement
        able = placement.template_accepted == job.generation  # else it cannot have pods at all
        waits = able and phase is JobPhase.PENDING and not job.spec.suspend
        return cls(job.uid, draft.state.incidents, _build_placement_turn(job, draft) if waits else None, _build_folder_claim(job, draft))


@dataclass(frozen=True, order=True)
class PlacementTurn:
    """Of a job that could not be placed so far. `age`: when it was made, and its UID."""

    seniority: tuple[float, str]
    name: str = ""
    attempts: int = 0


@dataclass(frozen=True, order=True)
class FolderClaim:
    """Of a folder of checkpoints: who has workers comes first, then who is older."""

    has_no_workers: bool  # it has no workers so far
    seniority: tuple[float, str]  # when it was made, and its UID
    name: str = ""
    folder: str = ""


class PeerJobs:
    """Of all jobs of this operator. A job of another namespace is not believed, nor waited for: that it has hung on a
    node is a reason to ask about the node, no more. That it is heard at all shows that the operator is not cut off."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _NamespaceJobs] = {}
        self._hung = RecentNodes(HUNG_NODE_SECONDS)  # in all of them
        self._reported_at: dict[str, float] = {}  # when each job was heard, by UID: who was heard last stands last
        self._held_polls: dict[str, int] = {}  # polls of each job that are held, by UID; no zeros

    def put(self, key: Key, shown: JobSummary | None, now: float) -> None:
        """How a job is now; None: it is not there (any more)."""
        here = self._namespaces.setdefault(key[0], _NamespaceJobs())
        before = here.jobs.pop(key, None)
        if shown is not None:
            here.jobs[key] = shown
        elif not here.jobs:
            del self._namespaces[key[0]]
        here.placement_queue.update(before.placement_turn if before else None, shown.placement_turn if shown else None)
        here.folder_claims.update(before.folder_claim if before else None, shown.folder_claim if shown else None)
        known, incidents = (before.incidents if before else NO_INCIDENTS), (shown.incidents if shown else NO_INCIDENTS)
        if known.past is not incidents.past or known.current is not incidents.current:
            here.blamed.put(key, tuple(_list_blamed_nodes(incidents)), now)
        if known.past is not incidents.past:
            hung = tuple(_list_hung_nodes(incidents))
            here.hung.put(key, hung, now)
            self._hung.put(key, hung, now)
            here.durations.put(key, incidents.past)

    def mark_reporting(self, uid: str, at: float) -> None:
        """A worker of the job with this UID has spoken."""
        self._reported_at.pop(uid, None)
        self._reported_at[uid] = at

    def adjust_held_polls(self, uid: str, polls: int) -> None:
        """So many more polls of the job are held, or fewer. While one is, its worker's machine is there."""
        held = self._held_polls.get(uid, 0) + polls
        if held > 0:  # it may have been forgotten meanwhile
            self._held_polls[uid] = held
        else:
            self._held_polls.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Nobody will hear of it any more."""
        self._reported_at.pop(uid, None)
        self._held_polls.pop(uid, None)

    def build_cluster_view(self, job: TrainingJob, desired: DesiredState, now: float) -> ClusterView:
        """What the other jobs show that concerns this one, whose draft is looked at."""
        here = self._namespaces.get(job.namespace) or _NamespaceJobs()
        key = job.namespace, job.name
        known = here.jobs.get(key)
        return ClusterView(
            suspects=here.blamed.get_nodes(now),
            older_waiting_job=here.placement_queue.find_first_before(_build_placement_turn(job, desired)),
            folder_owner=here.folder_claims.find_first_before(_build_folder_claim(job, desired)),
            hung_nodes=here.hung.count_mentions(now, key if known is not None and known.uid == job.uid else None),
            hung_elsewhere=here.find_hung_elsewhere(self._hung, now),
            past_durations=here.durations.collect_by_cause(),
            reached_elsewhere=self._has_other_reporting_job(job.uid, now),
        )

    def _has_other_reporting_job(self, uid: str, now: float) -> bool:
        if any(other != uid for other in islice(self._held_polls, 2)):
            return True
        last = next((at for other, at in reversed(self._reported_at.items()) if other != uid), None)
        return last is not None and now - last < RECENT_POLL_SECONDS


class RecentNodes:
    """Nodes that jobs name, each for so many seconds from the moment that goes with it."""

    def __init__(self, seconds: float) -> None:
        self.changes = 0  # of what is named
        self._seconds = seconds
        self._named: dict[Key, NamedNodes] = {}
        self._oldest: list[tuple[float, Key]] = []  # a heap of moments: what is over soonest comes first
        self._counts: dict[str, int] = {}  # never changed, but replaced
        self._nodes = frozenset[str]()

    def put(self, key: Key, named: NamedNodes, now: float) -> None:
        """All that the job names by now."""
        fresh = tuple(each for each in named if self._is_recent(each[1], now))
        before = self._named.pop(key, ())
        if fresh:
            self._named[key] = fresh
        if fresh == before:
            return
        counts = Counter(self._counts)
        counts.update(node for node, _ in fresh)
        counts.subtract(node for node, _ in before)
        self._counts = dict(+counts)
        self._nodes = frozenset(self._counts)
        self.changes += 1
        if fresh:
            heapq.heappush(self._oldest, (min(at for _, at in fresh), key))

    def get_nodes(self, now: float) -> frozenset[str]:
        """Those that some job names."""
        self._expire(now)
        return self._nodes

    def count_mentions(self, now: float, without: Key | None = None) -> Mapping[str, int]:
        """How often each is named, but by this job."""
        self._expire(now)
        own = self._named.get(without) if without is not None else None
        return dict(Counter(self._counts) - Counter(node for node, _ in own)) if own else self._counts

    def _is_recent(self, at: float, now: float) -> bool:
        return now - at < self._seconds

    def _expire(self, now: float) -> None:
        """What is over by now is named no more."""
        while self._oldest and not self._is_recent(self._oldest[0][0], now):
            _, key = heapq.heappop(self._oldest)
            self.put(key, self._named.get(key, ()), now)


class PlacementQueue:
    """Of jobs that wait to be placed: by how often that has failed, oldest first."""

    def __init__(self) -> None:
        self._by_attempts: dict[int, list[PlacementTurn]] = {}

    def update(self, before: PlacementTurn | None, now: PlacementTurn | None) -> None:
        """One job's."""
        if before == now:
            return
        if before is not None:
            turns = self._by_attempts[before.attempts]
            del turns[bisect_left(turns, before)]
            if not turns:
                del self._by_attempts[before.attempts]
        if now is not None:
            insort(self._by_attempts.setdefault(now.attempts, []), now)

    def find_first_before(self, turn: PlacementTurn | None) -> str:
        """The oldest of the jobs that have their turn before: older ones that could not be placed as often as this one,
        or less often; "": there is none."""
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
    """Of checkpoints, and the jobs that want to write there."""

    def __init__(self) -> None:
        self._by_folder: dict[str, set[FolderClaim]] = {}

    def update(self, before: FolderClaim | None, now: FolderClaim | None) -> None:
        """One job's."""
        if before == now:
            return
        if before is not None:
            holdings = self._by_folder[before.folder]
            holdings.discard(before)
            if not holdings:
                del self._by_folder[before.folder]
        if now is not None:
            self._by_folder.setdefault(now.folder, set()).add(now)

    def find_first_before(self, mine: FolderClaim | None) -> str:
        """The job that has the folder before this one; "": there is none."""
        if mine is None:
            return ""
        others = (each for each in self._by_folder.get(mine.folder, ()) if each.seniority[1] != mine.seniority[1])
        first = min(others, default=mine)
        return first.name if first < mine else ""


class IncidentDurations:
    """For how long incidents lasted, by their cause."""

    def __init__(self) -> None:
        self._jobs: dict[IncidentCause, dict[Key, tuple[float, ...]]] = {}
        self._known: dict[IncidentCause, tuple[float, ...]] = {}  # never changed, but replaced

    def put(self, key: Key, past: Sequence[PastIncident]) -> None:
        """All that the job remembers."""
        fresh: dict[IncidentCause, list[float]] = {}
        for each in past:
            fresh.setdefault(each.cause, []).append(each.seconds)
        for cause in {*self._jobs, *fresh}:
            jobs, seconds = self._jobs.setdefault(cause, {}), tuple(fresh.get(cause, ()))
            if jobs.get(key, ()) == seconds:
                continue
            jobs.pop(key, None)
            if seconds:
                jobs[key] = seconds
            self._known = {each: known for each, known in self._known.items() if each is not cause}

    def collect_by_cause(self) -> Mapping[IncidentCause, tuple[float, ...]]:
        """Of all jobs."""
        missing = [cause for cause, jobs in self._jobs.items() if jobs and cause not in self._known]
        if missing:
            joined = {cause: tuple(chain.from_iterable(self._jobs[cause].values())) for cause in missing}
            self._known = {**self._known, **joined}
        return self._known


class _NamespaceJobs:
    """Jobs that believe one another."""

    def __init__(self) -> None:
        self.jobs: dict[Key, JobSummary] = {}
        self.placement_queue = PlacementQueue()
        self.folder_claims = FolderClaims()
        self.blamed = RecentNodes(SUSPECT_NODE_SECONDS)
        self.hung = RecentNodes(HUNG_NODE_SECONDS)
        self.durations = IncidentDurations()
        self._elsewhere = (-1, -1), frozenset[str]()

    def find_hung_elsewhere(self, everywhere: RecentNodes, now: float) -> frozenset[str]:
        """Nodes on which jobs of other namespaces have hung lately."""
        here, all_of_them = self.hung.count_mentions(now), everywhere.count_mentions(now)
        changes = self.hung.changes, everywhere.changes
        if self._elsewhere[0] != changes:
            self._elsewhere = changes, frozenset(n for n, count in all_of_them.items() if count > here.get(n, 0))
        return self._elsewhere[1]


def _build_folder_claim(job: TrainingJob, draft: DesiredState) -> FolderClaim | None:
    """None of a job that has ended, or is suspended and has no workers left."""
    workers = bool(draft.state.placement.workers)
    if draft.state.life.is_over or (job.spec.suspend and not workers):
        return None
    folder = identify_checkpoint_folder(job, draft.state.life.apart)
    return FolderClaim(not workers, (job.created_at, job.uid), job.name, folder) if folder else None


def _build_placement_turn(job: TrainingJob, draft: DesiredState) -> PlacementTurn | None:
    """As far as it waits for others: a first attempt waits for nobody."""
    attempts = draft.state.placement.attempts
    return PlacementTurn((job.created_at, job.uid), job.name, attempts) if attempts and not draft.plan.members else None


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
    """The nodes on which its ranks have hung."""
    return ((past.node, past.at) for past in incidents.past if past.cause is IncidentCause.HANG and past.node)
