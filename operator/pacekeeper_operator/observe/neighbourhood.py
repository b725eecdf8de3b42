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

from ..api import Cause, Class, Job, JobPhase
from ..manifests import checkpoint_folder
from ..observation import HEARD_SECONDS, NodeView, Surroundings
from ..state import Draft, Incident, Incidents, Past
from .store import Key, Shelf

SUSPECT_SECONDS = 60.0
"""Nodes that were found failing within so many seconds of one another fail at once."""
HUNG_SECONDS = 3600.0
"""A hang that is older says nothing about its node any more."""
Named = tuple[tuple[str, float], ...]
"""Nodes, and when each was named, in seconds since the epoch."""
NOBODY = Incidents()


@dataclass(frozen=True)
class KnownNodes:
    """All nodes by name, and since when those that are to be empty have been seen to be so. Looked through when one has
    changed, and not before."""

    views: Mapping[str, NodeView] = field(default_factory=dict)
    leaving_since: Mapping[str, float] = field(default_factory=dict)
    changes: int = -1  # of the shelf, when it was looked through

    def seen(self, shelf: Shelf[NodeView], now: float) -> KnownNodes:
        """The nodes as they are by now."""
        if shelf.changes == self.changes:
            return self
        views = {node.name: node for node in shelf}
        leaving = {name: self.leaving_since.get(name, now) for name, node in views.items() if node.leaving}
        return KnownNodes(views, leaving, shelf.changes)


@dataclass(frozen=True)
class Shown:
    """What others may want to know of a job."""

    uid: str
    incidents: Incidents
    turn: Turn | None  # None: it does not wait to be placed
    holding: Holding | None = None  # None: it writes no checkpoints, or not where others do

    @classmethod
    def of(cls, job: Job, draft: Draft, phase: JobPhase | None) -> Shown:
        placement = draft.state.placement
        able = placement.template_accepted == job.generation  # else it cannot have pods at all
        waits = able and phase is JobPhase.PENDING and not job.spec.suspend
        return cls(job.uid, draft.state.incidents, _turn(job, draft) if waits else None, _holding(job, draft))


@dataclass(frozen=True, order=True)
class Turn:
    """Of a job that could not be placed so far. `age`: when it was made, and its UID."""

    age: tuple[float, str]
    name: str = ""
    attempts: int = 0


@dataclass(frozen=True, order=True)
class Holding:
    """Of a folder of checkpoints: who has workers comes first, then who is older."""

    waits: bool  # it has no workers so far
    age: tuple[float, str]  # when it was made, and its UID
    name: str = ""
    folder: str = ""


class Neighbourhood:
    """Of all jobs of this operator. A job of another namespace is not believed, nor waited for: that it has hung on a
    node is a reason to ask about the node, no more. That it is heard at all shows that the operator is not cut off."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Namespace] = {}
        self._hung = Lately(HUNG_SECONDS)  # in all of them
        self._heard: dict[str, float] = {}  # when each job was heard, by UID: who was heard last stands last
        self._held: dict[str, int] = {}  # polls of each job that are held, by UID; no zeros

    def put(self, key: Key, shown: Shown | None, now: float) -> None:
        """How a job is now; None: it is not there (any more)."""
        here = self._namespaces.setdefault(key[0], _Namespace())
        before = here.jobs.pop(key, None)
        if shown is not None:
            here.jobs[key] = shown
        elif not here.jobs:
            del self._namespaces[key[0]]
        here.turns.change(before.turn if before else None, shown.turn if shown else None)
        here.folders.change(before.holding if before else None, shown.holding if shown else None)
        known, incidents = (before.incidents if before else NOBODY), (shown.incidents if shown else NOBODY)
        if known.past is not incidents.past or known.current is not incidents.current:
            here.blamed.put(key, tuple(_blamed(incidents)), now)
        if known.past is not incidents.past:
            hung = tuple(_hung(incidents))
            here.hung.put(key, hung, now)
            self._hung.put(key, hung, now)
            here.lasted.put(key, incidents.past)

    def hear(self, uid: str, at: float) -> None:
        """A worker of the job with this UID has spoken."""
        self._heard.pop(uid, None)
        self._heard[uid] = at

    def hold(self, uid: str, polls: int) -> None:
        """So many more polls of the job are held, or fewer. While one is, its worker's machine is there."""
        held = self._held.get(uid, 0) + polls
        if held > 0:  # it may have been forgotten meanwhile
            self._held[uid] = held
        else:
            self._held.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Nobody will hear of it any more."""
        self._heard.pop(uid, None)
        self._held.pop(uid, None)

    def around(self, job: Job, draft: Draft, now: float) -> Surroundings:
        """What the other jobs show that concerns this one, whose draft is looked at."""
        here = self._namespaces.get(job.namespace) or _Namespace()
        key = job.namespace, job.name
        known = here.jobs.get(key)
        return Surroundings(
            suspects=here.blamed.nodes(now),
            older_job_waits=here.turns.first_before(_turn(job, draft)),
            folder_held_by=here.folders.first_before(_holding(job, draft)),
            hung_nodes=here.hung.counts(now, key if known is not None and known.uid == job.uid else None),
            hung_elsewhere=here.hung_elsewhere(self._hung, now),
            past_seconds=here.lasted.by_cause(),
            reached_elsewhere=self._hears_another(job.uid, now),
        )

    def _hears_another(self, uid: str, now: float) -> bool:
        if any(other != uid for other in islice(self._held, 2)):
            return True
        last = next((at for other, at in reversed(self._heard.items()) if other != uid), None)
        return last is not None and now - last < HEARD_SECONDS


class Lately:
    """Nodes that jobs name, each for so many seconds from the moment that goes with it."""

    def __init__(self, seconds: float) -> None:
        self.changes = 0  # of what is named
        self._seconds = seconds
        self._named: dict[Key, Named] = {}
        self._oldest: list[tuple[float, Key]] = []  # a heap of moments: what is over soonest comes first
        self._counts: dict[str, int] = {}  # never changed, but replaced
        self._nodes = frozenset[str]()

    def put(self, key: Key, named: Named, now: float) -> None:
        """All that the job names by now."""
        fresh = tuple(each for each in named if self._lasts(each[1], now))
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

    def nodes(self, now: float) -> frozenset[str]:
        """Those that some job names."""
        self._pass(now)
        return self._nodes

    def counts(self, now: float, without: Key | None = None) -> Mapping[str, int]:
        """How often each is named, but by this job."""
        self._pass(now)
        own = self._named.get(without) if without is not None else None
        return dict(Counter(self._counts) - Counter(node for node, _ in own)) if own else self._counts

    def _lasts(self, at: float, now: float) -> bool:
        return now - at < self._seconds

    def _pass(self, now: float) -> None:
        """What is over by now is named no more."""
        while self._oldest and not self._lasts(self._oldest[0][0], now):
            _, key = heapq.heappop(self._oldest)
            self.put(key, self._named.get(key, ()), now)


class Turns:
    """Of jobs that wait to be placed: by how often that has failed, oldest first."""

    def __init__(self) -> None:
        self._by_attempts: dict[int, list[Turn]] = {}

    def change(self, before: Turn | None, now: Turn | None) -> None:
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

    def first_before(self, turn: Turn | None) -> str:
        """The oldest of the jobs that have their turn before: older ones that could not be placed as often as this one,
        or less often; "": there is none."""
        if turn is None:
            return ""
        oldest = (
            next((other for other in turns[:2] if other.age[1] != turn.age[1]), turn)
            for attempts, turns in self._by_attempts.items()
            if attempts <= turn.attempts
        )
        first = min(oldest, default=turn)
        return first.name if first.age < turn.age else ""


class Folders:
    """Of checkpoints, and the jobs that want to write there."""

    def __init__(self) -> None:
        self._by_folder: dict[str, set[Holding]] = {}

    def change(self, before: Holding | None, now: Holding | None) -> None:
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

    def first_before(self, mine: Holding | None) -> str:
        """The job that has the folder before this one; "": there is none."""
        if mine is None:
            return ""
        others = (each for each in self._by_folder.get(mine.folder, ()) if each.age[1] != mine.age[1])
        first = min(others, default=mine)
        return first.name if first < mine else ""


class Lasted:
    """For how long incidents lasted, by their cause."""

    def __init__(self) -> None:
        self._jobs: dict[Cause, dict[Key, tuple[float, ...]]] = {}
        self._known: dict[Cause, tuple[float, ...]] = {}  # never changed, but replaced

    def put(self, key: Key, past: Sequence[Past]) -> None:
        """All that the job remembers."""
        fresh: dict[Cause, list[float]] = {}
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

    def by_cause(self) -> Mapping[Cause, tuple[float, ...]]:
        """Of all jobs."""
        missing = [cause for cause, jobs in self._jobs.items() if jobs and cause not in self._known]
        if missing:
            joined = {cause: tuple(chain.from_iterable(self._jobs[cause].values())) for cause in missing}
            self._known = {**self._known, **joined}
        return self._known


class _Namespace:
    """Jobs that believe one another."""

    def __init__(self) -> None:
        self.jobs: dict[Key, Shown] = {}
        self.turns = Turns()
        self.folders = Folders()
        self.blamed = Lately(SUSPECT_SECONDS)
        self.hung = Lately(HUNG_SECONDS)
        self.lasted = Lasted()
        self._elsewhere = (-1, -1), frozenset[str]()

    def hung_elsewhere(self, everywhere: Lately, now: float) -> frozenset[str]:
        """Nodes on which jobs of other namespaces have hung lately."""
        here, all_of_them = self.hung.counts(now), everywhere.counts(now)
        changes = self.hung.changes, everywhere.changes
        if self._elsewhere[0] != changes:
            self._elsewhere = changes, frozenset(n for n, count in all_of_them.items() if count > here.get(n, 0))
        return self._elsewhere[1]


def _holding(job: Job, draft: Draft) -> Holding | None:
    """None of a job that has ended, or is suspended and has no workers left."""
    workers = bool(draft.state.placement.workers)
    if draft.state.life.over or (job.spec.suspend and not workers):
        return None
    folder = checkpoint_folder(job, draft.state.life.apart)
    return Holding(not workers, (job.created_at, job.uid), job.name, folder) if folder else None


def _turn(job: Job, draft: Draft) -> Turn | None:
    """As far as it waits for others: a first attempt waits for nobody."""
    attempts = draft.state.placement.attempts
    return Turn((job.created_at, job.uid), job.name, attempts) if attempts and not draft.plan.members else None


def _blamed(incidents: Incidents) -> Iterator[tuple[str, float]]:
    for incident in incidents.current:
        if _blames_the_node(incident):
            yield incident.node or "", incident.detected
    for past in incidents.past:
        if _blames_the_node(past):
            yield past.node or "", past.at


def _blames_the_node(incident: Incident | Past) -> bool:
    lost = incident.cause in (Cause.NODE_LOST, Cause.GPU_ERROR)
    return lost and incident.class_ is Class.INFRASTRUCTURE and bool(incident.node)


def _hung(incidents: Incidents) -> Iterator[tuple[str, float]]:
    """The nodes on which its ranks have hung."""
    return ((past.node, past.at) for past in incidents.past if past.cause is Cause.HANG and past.node)
