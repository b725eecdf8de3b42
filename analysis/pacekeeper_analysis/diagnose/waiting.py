"""Who waits for whom among ranks that stand still: the wait-for graph over nested groups. (C4, arXiv 2406.04594, judges
each group alone, which blames ranks that wait for somebody in another one.)

A rank inside the s-th collective of a group waits for each member that has not entered it; inside a receive for its
sender only, since what one rank sends another is a group of two. Ranks that wait for each other count as one, and then
somebody waits for nobody else. These are the *sinks*: they hold all others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ..communicators import Communicator, format_ranks, parse_entered, parse_ranks
from ..records import Collective, Device
from ..reports import FaultReport, RankState

_SEND, _RECEIVE = Collective.SEND.name, Collective.RECV.name
_MAX_GROUPS_DESCRIBED = 3
"""Groups that a sentence tells of."""
_MAX_RANK_LIST_LENGTH = 60
"""Characters of a list of ranks."""


@dataclass(frozen=True)
class WaitSinks:
    """Who waits for nobody but each other."""

    outside: tuple[int, ...]  # ranks that wait for nobody
    circles: tuple[tuple[int, ...], ...]  # ranks that wait for each other, in different collectives
    meetings: tuple[PendingCollective, ...]  # collectives that all their ranks have entered, and some have not left
    unknown: tuple[int, ...]  # ranks that wait, nobody knows for whom


class WaitGraph:
    """Of the ranks of one round, of which those in `waits` are inside of a collective, where a rank may stand still for
    as long as another one does. The rest waits for nobody."""

    def __init__(self, ranks: Mapping[int, RankState], waits: Iterable[int], faults: Iterable[FaultReport]) -> None:
        """`faults`: with what the ranks' workers say of their groups."""
        self._ranks = tuple(ranks)
        places = {rank: _locate_rank(ranks[rank]) for rank in sorted(waits)}
        self._meetings = _collect_pending_collectives({rank: place for rank, place in places.items() if place is not None}, ranks, faults)
        self._unknown = frozenset(rank for rank, place in places.items() if place is None)

    def find_sinks(self) -> WaitSinks:
        first = len(self._ranks)
        found = _find_sink_components(self._build_edges())
        alone = [nodes[0] for nodes in found if len(nodes) == 1]
        ranks = sorted(self._ranks[node] for node in alone if node < first)
        circles = (tuple(sorted(self._ranks[node] for node in nodes if node < first)) for nodes in found)
        return WaitSinks(
            outside=tuple(rank for rank in ranks if rank not in self._unknown),
            circles=tuple(circle for circle in circles if len(circle) > 1),
            meetings=tuple(self._meetings[node - first] for node in alone if node >= first),
            unknown=tuple(rank for rank in ranks if rank in self._unknown),
        )

    def describe_waiters(self, culprits: Sequence[int]) -> str:
        """Who waits for these, for people; "": nobody that is known."""
        direct = [
            (meeting, held)
            for meeting in self._meetings
            if (held := [rank for rank in culprits[:_MAX_GROUPS_DESCRIBED] if meeting.is_missing(rank)])
        ]
        said = [
            f"{name_ranks(sorted(meeting.inside))} {_conjugate_wait(len(meeting.inside))} in {meeting} for {name_ranks(held)}"
            for meeting, held in direct[:_MAX_GROUPS_DESCRIBED]
        ]
        if len(direct) > _MAX_GROUPS_DESCRIBED:
            said.append(f"so do ranks of {len(direct) - _MAX_GROUPS_DESCRIBED} other groups")
        waiting = {rank for meeting, _ in direct for rank in meeting.inside}.union(culprits)
        others = sum(rank not in waiting for meeting in self._meetings for rank in meeting.inside)
        if said and others:
            said.append(f"{others} more {_conjugate_wait(others)} elsewhere")
        return "; ".join(said)

    def _build_edges(self) -> list[list[int]]:
        """Nodes are the ranks, and behind them the meetings: a rank leads to the one that it is inside of, a meeting to
        the ranks that it misses. Whom an earlier meeting of the group misses, it misses, too: so it leads there."""
        number_of = {rank: number for number, rank in enumerate(self._ranks)}
        edges: list[list[int]] = [[] for _ in self._ranks]
        earlier: dict[int, tuple[int, int]] = {}
        for number, meeting in enumerate(self._meetings, len(self._ranks)):
            for rank in meeting.inside:
                edges[number_of[rank]] = [number]
            before, so_many = earlier.get(id(meeting.group), (0, 0))
            missing = meeting.missing
            edges.append([number_of[rank] for rank in missing[so_many:]] + ([before] if so_many else []))
            if not meeting.takes_any:
                earlier[id(meeting.group)] = number, len(missing)
        return edges


@dataclass(frozen=True)
class PendingCollective:
    """A collective that ranks are inside of."""

    group: _WaitGroup
    sequence: int
    inside: Mapping[int, str]  # by rank: which collective it takes it for
    takes_any: bool  # a receive from whoever comes; the numbers of such are each rank's own

    @property
    def missing(self) -> Sequence[int]:
        """Members that have not entered it, those first that are farthest behind."""
        if self.takes_any:
            return [rank for rank in self.group.members_by_progress if rank not in self.inside]
        return self.group.members_by_progress[: bisect_left(self.group.progress, self.sequence)]

    def is_missing(self, rank: int) -> bool:
        return self.group.come.get(rank, self.sequence) < self.sequence and rank not in self.inside

    @property
    def has_been_left(self) -> bool:
        """Some member has entered a later one of the group. What is sent ahead of its receiver says nothing."""
        return not self.is_channel and bisect_right(self.group.progress, self.sequence) < len(self.group.progress)

    @property
    def is_channel(self) -> bool:
        return set(self.inside.values()) <= {_SEND, _RECEIVE}

    def find_mismatched(self, everywhere: Mapping[str, int]) -> tuple[int, ...]:
        """Those inside that take it for another collective than most; where most is not to be told, as in a group of
        two, than most ranks of the job are in (`everywhere`: how many, by collective). All, where that tells neither.
        """
        inside = Counter(self.inside.values())
        if len(inside) < 2 or self.is_channel:
            return ()

        def votes(collective: str) -> tuple[int, int]:
            return inside[collective], everywhere.get(collective, 0)

        first, second, *_ = sorted(inside, key=votes, reverse=True)
        usual = first if votes(first) > votes(second) else ""
        return tuple(rank for rank, collective in self.inside.items() if collective != usual)

    def __str__(self) -> str:
        ((collective, _),) = Counter(self.inside.values()).most_common(1)
        if self.is_channel and len(self.group.members) == 2:
            source, destination = self.group.members
            return f"{collective} {self.sequence} from rank {source} to rank {destination}"
        if not self.group.known:
            return f"{collective} {self.sequence}"
        name = f"group {self.group.name!r} of " if self.group.name else ""
        return f"{collective} {self.sequence} of {name}{name_ranks(self.group.members)}"


@dataclass(frozen=True)
class _WaitGroup:
    """A group on hosts or on GPUs, whose numbers do not compare: hosts run ahead."""

    members: tuple[int, ...]
    name: str
    known: bool  # who is in it; otherwise the members are those that speak of it
    come: Mapping[int, int]  # by member: the newest of its collectives that it has entered; -1: none

    @cached_property
    def members_by_progress(self) -> list[int]:
        return sorted(self.members, key=lambda rank: self.come[rank])

    @cached_property
    def progress(self) -> list[int]:
        return [self.come[rank] for rank in self.members_by_progress]


@dataclass(frozen=True)
class _WaitPosition:
    """The collective that a rank waits in."""

    on_gpu: bool
    identity: int  # of the group
    sequence: int
    collective: str
    peer: int

    @property
    def accepts_any_sender(self) -> bool:
        return not self.on_gpu and self.collective == _RECEIVE and self.peer < 0


def name_ranks(ranks: Sequence[int]) -> str:
    """For people: rank 3, ranks 0-3."""
    text = format_ranks(ranks)
    if len(text) > _MAX_RANK_LIST_LENGTH:
        text = f"{text[:_MAX_RANK_LIST_LENGTH].rpartition(',')[0]} … ({len(ranks)} of them)"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _conjugate_wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _locate_rank(rank: RankState) -> _WaitPosition | None:
    """None: its number compares with no other rank's."""
    if rank.device == Device.STARTED.name:
        place = _WaitPosition(True, rank.device_group, rank.device_sequence, rank.device_collective, -1)
        return place if rank.device_group else None
    if rank.device == Device.RUNNING.name or rank.collective == Collective.NONE.name:
        return None
    return _WaitPosition(False, rank.group, rank.sequence, rank.collective, rank.peer)


def _collect_pending_collectives(places: Mapping[int, _WaitPosition], ranks: Mapping[int, RankState], faults: Iterable[FaultReport]) -> list[PendingCollective]:
    """What the ranks are inside of; the meetings of a group by rising sequence."""
    known = _GroupMembers(faults, frozenset(ranks))
    speak: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for rank, place in places.items():
        speak[place.on_gpu, place.identity].append(rank)
    together = {key: tuple(of) for key, of in speak.items()}
    inside: dict[_GroupKey, dict[tuple[bool, int], dict[int, str]]] = defaultdict(dict)
    names: dict[_GroupKey, str | None] = {}
    one = _MembersInterner()
    for rank, place in places.items():
        members, name = known.find_group(rank, place)
        key = (place.on_gpu, place.identity, one.intern(members or together[place.on_gpu, place.identity]))
        names[key] = name if members else None
        sequence = rank if place.accepts_any_sender else place.sequence
        inside[key].setdefault((place.accepts_any_sender, sequence), {})[rank] = place.collective
    entered = {rank: parse_entered(ranks[rank].entered) for rank in ranks}
    meetings = []
    for (on_gpu, identity, number), by_sequence in inside.items():
        called, members = names[on_gpu, identity, number], one.get_members(number)
        come = {rank: _find_newest_entered(ranks[rank], entered[rank], on_gpu, identity) for rank in members}
        group = _WaitGroup(members, called or "", called is not None, come)
        meetings += [PendingCollective(group, sequence, of, any_) for (any_, sequence), of in sorted(by_sequence.items())]
    return meetings


_GroupKey = tuple[bool, int, int]
"""Of a group: whether on GPUs, identity, number of its members' tuple. Identities are short, and groups of a large job
may share one."""


class _MembersInterner:
    """Numbers of tuples that are equal, so that thousands of ranks can name the thousands in their group: a tuple is
    looked through each time that it is hashed."""

    def __init__(self) -> None:
        self._tuples: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # by id, with the tuple, so that the id stays its own

    def intern(self, members: tuple[int, ...]) -> int:
        known = self._known.get(id(members))
        if known is not None:
            return known[0]
        number = self._numbers.setdefault(members, len(self._tuples))
        if number == len(self._tuples):
            self._tuples.append(members)
        self._known[id(members)] = number, members
        return number

    def get_members(self, number: int) -> tuple[int, ...]:
        return self._tuples[number]


class _GroupMembers:
    """Who is in which group: each rank's as its own worker says."""

    def __init__(self, faults: Iterable[FaultReport], present: frozenset[int]) -> None:
        """`present`: the ranks that are known of; a group's others are left out."""
        self._present = present
        # Thousands of workers speak of the same groups.
        self._read = cache(lambda text: tuple(rank for rank in parse_ranks(text) if rank in present))
        self._holds = cache(lambda text: frozenset(parse_ranks(text)))
        self._told: dict[tuple[int, int], Communicator] = {}
        for fault in faults:
            inside = defaultdict(list)  # of other groups nobody asks
            for state in fault.ranks:
                for identity in {state.group, state.device_group}:
                    inside[identity].append(state.rank)
            for told in fault.communicators:
                speak = inside.get(told.identity)
                holds = self._holds(told.members) if speak else frozenset()
                self._told.update(((rank, told.identity), told) for rank in speak or () if rank in holds)

    def find_group(self, rank: int, place: _WaitPosition) -> tuple[tuple[int, ...], str]:
        """Members and name of the group that `rank` is in at `place`; () where they are not known."""
        told = self._told.get((rank, place.identity))
        if told is not None:
            return self._read(told.members), told.name
        if place.peer in self._present and place.peer != rank:
            return ((rank, place.peer) if place.collective == _SEND else (place.peer, rank)), ""
        return (), ""


def _find_newest_entered(rank: RankState, entered: Mapping[int, int], on_gpu: bool, identity: int) -> int:
    """The newest collective of the group that the rank has entered; -1: none."""
    if on_gpu:
        is_there = rank.device == Device.STARTED.name and rank.device_group == identity
        return rank.device_sequence if is_there else -1
    told = entered.get(identity, -1)
    return max(told, rank.sequence) if rank.group == identity else told


def _find_sink_components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components that no edge leaves (Tarjan 1972), without recursion."""
    order = [0] * len(edges)  # in which nodes are found, from 1; 0: not yet
    low = [0] * len(edges)
    component = [-1] * len(edges)  # -1: not closed yet
    stack: list[int] = []
    found: list[list[int]] = []
    count = closed = 0
    for root in range(len(edges)):
        if order[root]:
            continue
        path = [(root, iter(edges[root]))]
        while path:
            node, following = path[-1]
            if not order[node]:
                count += 1
                order[node] = low[node] = count
                stack.append(node)
            for other in following:
                if not order[other]:
                    path.append((other, iter(edges[other])))
                    break
                if component[other] < 0:
                    low[node] = min(low[node], low[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    nodes = _pop_through(stack, node)
                    for each in nodes:
                        component[each] = closed
                    if all(component[other] == closed for each in nodes for other in edges[each]):
                        found.append(nodes)
                    closed += 1
    return found


def _pop_through(stack: list[int], last: int) -> list[int]:
    at = stack.index(last)
    nodes = stack[at:]
    del stack[at:]
    return nodes
