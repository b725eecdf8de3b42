"""The wait-for graph over nested groups: which stalled rank waits for which.

A rank inside the s-th collective of a group waits for each member that has not entered it. Inside a receive it waits
only for its sender, because a channel between two ranks is a group of two. Ranks that wait for each other count as one
node. Then at least one node waits for no other node. These are the *sinks*: they block all others.

In contrast, C4 (arXiv 2406.04594) judges each group separately, which blames ranks that wait for a rank in another
group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from pacekeeper_rank.collectives.communicators import format_ranks
from pacekeeper_rank.records import Collective, Device

from ..protocol.communicators import Communicator, parse_entered, parse_ranks
from ..protocol.reports import FaultReport, RankState

_SEND, _RECEIVE = Collective.SEND.name, Collective.RECV.name
_CHANNEL_ENDS = 2
_MAX_GROUPS_DESCRIBED = 3
"""Upper limit of groups that a sentence names."""
_MAX_RANK_LIST_LENGTH = 60
"""Upper limit of characters of a list of ranks."""


@dataclass(frozen=True)
class WaitSinks:
    """The nodes that wait for no other node."""

    ranks_outside: tuple[int, ...]  # ranks that wait for no rank
    wait_cycles: tuple[tuple[int, ...], ...]  # ranks that wait for each other, in different collectives
    pending_collectives: tuple[
        PendingCollective, ...
    ]  # collectives that all their ranks have entered, and some have not left
    unknown_ranks: tuple[int, ...]  # waiting ranks for which the awaited rank is unknown


class WaitGraph:
    """The wait-for graph of the ranks of one round.

    The ranks in `waits` are inside a collective, where a rank may stand still as long as another one does. The others
    wait for no rank.
    """

    def __init__(self, ranks: Mapping[int, RankState], waits: Iterable[int], faults: Iterable[FaultReport]) -> None:
        """Build the graph. `faults` are the workers' reports, which contain the groups of their ranks."""
        self._ranks = tuple(ranks)
        positions = {rank: _locate_rank(ranks[rank]) for rank in sorted(waits)}
        self._meetings = _collect_pending_collectives(
            {rank: position for rank, position in positions.items() if position is not None}, ranks, faults
        )
        self._unknown = frozenset(rank for rank, position in positions.items() if position is None)

    def find_sinks(self) -> WaitSinks:
        rank_count = len(self._ranks)
        components = _find_sink_components(self._build_edges())
        single_nodes = [nodes[0] for nodes in components if len(nodes) == 1]
        ranks = sorted(self._ranks[node] for node in single_nodes if node < rank_count)
        cycles = (tuple(sorted(self._ranks[node] for node in nodes if node < rank_count)) for nodes in components)
        return WaitSinks(
            ranks_outside=tuple(rank for rank in ranks if rank not in self._unknown),
            wait_cycles=tuple(cycle for cycle in cycles if len(cycle) > 1),
            pending_collectives=tuple(self._meetings[node - rank_count] for node in single_nodes if node >= rank_count),
            unknown_ranks=tuple(rank for rank in ranks if rank in self._unknown),
        )

    def describe_waiters(self, culprits: Sequence[int]) -> str:
        """Describe which ranks wait for the `culprits`, for people. "" if none is known."""
        direct = [
            (pending, awaited)
            for pending in self._meetings
            if (awaited := [rank for rank in culprits[:_MAX_GROUPS_DESCRIBED] if pending.is_missing(rank)])
        ]
        parts = [
            f"{name_ranks(sorted(pending.inside))} {_conjugate_wait(len(pending.inside))} in {pending} for "
            f"{name_ranks(awaited)}"
            for pending, awaited in direct[:_MAX_GROUPS_DESCRIBED]
        ]
        if len(direct) > _MAX_GROUPS_DESCRIBED:
            parts.append(f"so do ranks of {len(direct) - _MAX_GROUPS_DESCRIBED} other groups")
        waiting = {rank for pending, _ in direct for rank in pending.inside}.union(culprits)
        others = sum(rank not in waiting for pending in self._meetings for rank in pending.inside)
        if parts and others:
            parts.append(f"{others} more {_conjugate_wait(others)} elsewhere")
        return "; ".join(parts)

    def _build_edges(self) -> list[list[int]]:
        """Return the edges of the graph. Its nodes are the ranks, followed by the pending collectives.

        An edge leads from a rank to the collective that it is inside, and from a collective to each missing rank. A
        rank that an earlier collective of the group misses is also missing from later ones. So a later collective has
        an edge to the earlier one instead.
        """
        node_of = {rank: node for node, rank in enumerate(self._ranks)}
        edges: list[list[int]] = [[] for _ in self._ranks]
        earlier: dict[int, tuple[int, int]] = {}
        for node, pending in enumerate(self._meetings, len(self._ranks)):
            for rank in pending.inside:
                edges[node_of[rank]] = [node]
            earlier_node, covered = earlier.get(id(pending.group), (0, 0))
            missing = pending.missing
            edges.append([node_of[rank] for rank in missing[covered:]] + ([earlier_node] if covered else []))
            if not pending.accepts_any_sender:
                earlier[id(pending.group)] = node, len(missing)
        return edges


@dataclass(frozen=True)
class PendingCollective:
    """A collective that some ranks are inside."""

    group: _WaitGroup
    sequence: int
    inside: Mapping[int, str]  # the collective that each rank takes it for
    accepts_any_sender: bool  # a receive from any sender; each rank numbers these itself

    @property
    def missing(self) -> Sequence[int]:
        """Members that have not entered it, the farthest behind first."""
        if self.accepts_any_sender:
            return [rank for rank in self.group.members_by_progress if rank not in self.inside]
        return self.group.members_by_progress[: bisect_left(self.group.progress, self.sequence)]

    def is_missing(self, rank: int) -> bool:
        return self.group.newest_entered.get(rank, self.sequence) < self.sequence and rank not in self.inside

    @property
    def has_been_left(self) -> bool:
        """Whether a member has entered a later collective of the group. Sends ahead of their receiver prove nothing."""
        return not self.is_channel and bisect_right(self.group.progress, self.sequence) < len(self.group.progress)

    @property
    def is_channel(self) -> bool:
        return set(self.inside.values()) <= {_SEND, _RECEIVE}

    def find_mismatched(self, job_counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks inside that take it for another collective than most.

        If there is no majority, as in a group of two, the majority of the job's ranks decides (`job_counts`: number of
        ranks by collective). If that is not decisive either, return all.
        """
        group_counts = Counter(self.inside.values())
        if len(group_counts) <= 1 or self.is_channel:
            return ()

        def votes(collective: str) -> tuple[int, int]:
            return group_counts[collective], job_counts.get(collective, 0)

        first, second, *_ = sorted(group_counts, key=votes, reverse=True)
        usual = first if votes(first) > votes(second) else ""
        return tuple(rank for rank, collective in self.inside.items() if collective != usual)

    def __str__(self) -> str:
        ((collective, _),) = Counter(self.inside.values()).most_common(1)
        if self.is_channel and len(self.group.members) == _CHANNEL_ENDS:
            source, destination = self.group.members
            return f"{collective} {self.sequence} from rank {source} to rank {destination}"
        if not self.group.known:
            return f"{collective} {self.sequence}"
        name = f"group {self.group.name!r} of " if self.group.name else ""
        return f"{collective} {self.sequence} of {name}{name_ranks(self.group.members)}"


@dataclass(frozen=True)
class _WaitGroup:
    """A group on CPUs or on GPUs. Their sequence numbers are not comparable, because CPUs run ahead."""

    members: tuple[int, ...]
    name: str
    known: bool  # whether the members are known; otherwise they are the ranks that refer to the group
    newest_entered: Mapping[int, int]  # newest collective of the group that each member has entered; -1: none

    @cached_property
    def members_by_progress(self) -> list[int]:
        return sorted(self.members, key=lambda rank: self.newest_entered[rank])

    @cached_property
    def progress(self) -> list[int]:
        return [self.newest_entered[rank] for rank in self.members_by_progress]


@dataclass(frozen=True)
class _WaitPosition:
    """The collective in which a rank waits."""

    on_gpu: bool
    identity: int  # of the group
    sequence: int
    collective: str
    peer: int | None  # None: none, or any sender

    @property
    def accepts_any_sender(self) -> bool:
        return not self.on_gpu and self.collective == _RECEIVE and self.peer is None


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for people: "rank 3", "ranks 0-3"."""
    text = format_ranks(ranks)
    if len(text) > _MAX_RANK_LIST_LENGTH:
        text = f"{text[:_MAX_RANK_LIST_LENGTH].rpartition(',')[0]} … ({len(ranks)} of them)"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _conjugate_wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _locate_rank(rank: RankState) -> _WaitPosition | None:
    """Return the collective in which the rank waits. None if its number is not comparable with another rank's."""
    if rank.device == Device.STARTED.name:
        position = _WaitPosition(True, rank.device_group, rank.device_sequence, rank.device_collective, None)
        return position if rank.device_group else None
    if rank.device == Device.RUNNING.name or rank.collective == Collective.NONE.name:
        return None
    return _WaitPosition(False, rank.group, rank.sequence, rank.collective, rank.peer)


def _collect_pending_collectives(
    positions: Mapping[int, _WaitPosition], ranks: Mapping[int, RankState], faults: Iterable[FaultReport]
) -> list[PendingCollective]:
    """Return the collectives that ranks are inside. Those of one group are in ascending order."""
    group_members = _GroupMembers(faults, frozenset(ranks))
    ranks_by_group: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for rank, position in positions.items():
        ranks_by_group[position.on_gpu, position.identity].append(rank)
    present_ranks = {key: tuple(waiting) for key, waiting in ranks_by_group.items()}
    inside: dict[_GroupKey, dict[tuple[bool, int], dict[int, str]]] = defaultdict(dict)
    names: dict[_GroupKey, str | None] = {}
    interner = _MembersInterner()
    for rank, position in positions.items():
        members, name = group_members.find_group(rank, position)
        key = (
            position.on_gpu,
            position.identity,
            interner.intern(members or present_ranks[position.on_gpu, position.identity]),
        )
        names[key] = name if members else None
        sequence = rank if position.accepts_any_sender else position.sequence
        inside[key].setdefault((position.accepts_any_sender, sequence), {})[rank] = position.collective
    entered = {rank: parse_entered(ranks[rank].entered) for rank in ranks}
    pending = []
    for (on_gpu, identity, number), by_sequence in inside.items():
        group_name, members = names[on_gpu, identity, number], interner.get_members(number)
        newest_entered = {rank: _find_newest_entered(ranks[rank], entered[rank], on_gpu, identity) for rank in members}
        group = _WaitGroup(members, group_name or "", group_name is not None, newest_entered)
        pending += [
            PendingCollective(group, sequence, waiting, accepts_any)
            for (accepts_any, sequence), waiting in sorted(by_sequence.items())
        ]
    return pending


_GroupKey = tuple[bool, int, int]
"""Identifies a group: whether on GPUs, identity, number of its tuple of members.

Identities are short, so groups of a large job may share one.
"""


class _MembersInterner:
    """Numbers equal tuples, so that thousands of ranks can refer to the thousands of members of their group.

    Hashing a tuple reads all of it, so the tuples are also found by id.
    """

    def __init__(self) -> None:
        self._tuples: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # by id, with the tuple, so that the id is not reused

    def intern(self, members: tuple[int, ...]) -> int:
        entry = self._known.get(id(members))
        if entry is not None:
            return entry[0]
        number = self._numbers.setdefault(members, len(self._tuples))
        if number == len(self._tuples):
            self._tuples.append(members)
        self._known[id(members)] = number, members
        return number

    def get_members(self, number: int) -> tuple[int, ...]:
        return self._tuples[number]


class _GroupMembers:
    """The group of each rank, as its own worker reports it."""

    def __init__(self, faults: Iterable[FaultReport], present: frozenset[int]) -> None:
        """Read the groups. `present` are the known ranks. Other members of a group are left out."""
        self._present = present
        # Thousands of workers report the same groups.
        self._read = cache(lambda text: tuple(rank for rank in parse_ranks(text) if rank in present))
        self._holds = cache(lambda text: frozenset(parse_ranks(text)))
        self._told: dict[tuple[int, int], Communicator] = {}
        for fault in faults:
            ranks_by_group = defaultdict(list)  # only the groups that the ranks wait in
            for state in fault.ranks:
                for identity in {state.group, state.device_group}:
                    ranks_by_group[identity].append(state.rank)
            for communicator in fault.communicators:
                waiting = ranks_by_group.get(communicator.identity)
                members = self._holds(communicator.members) if waiting else frozenset()
                self._told.update(
                    ((rank, communicator.identity), communicator) for rank in waiting or () if rank in members
                )

    def find_group(self, rank: int, position: _WaitPosition) -> tuple[tuple[int, ...], str]:
        """Return members and name of the group that `rank` is in at `position`. The members are () if not known."""
        communicator = self._told.get((rank, position.identity))
        if communicator is not None:
            return self._read(communicator.members), communicator.name
        peer = position.peer
        if peer is not None and peer in self._present and peer != rank:
            return ((rank, peer) if position.collective == _SEND else (peer, rank)), ""
        return (), ""


def _find_newest_entered(rank: RankState, entered: Mapping[int, int], on_gpu: bool, identity: int) -> int:
    """Return the newest collective of the group that the rank has entered. -1 if none."""
    if on_gpu:
        is_inside = rank.device == Device.STARTED.name and rank.device_group == identity
        return rank.device_sequence if is_inside else -1
    reported = entered.get(identity, -1)
    return max(reported, rank.sequence) if rank.group == identity else reported


def _find_sink_components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components that no edge leaves (Tarjan 1972), without recursion."""
    order = [0] * len(edges)  # in which nodes are visited, from 1; 0: not yet
    low = [0] * len(edges)
    component = [-1] * len(edges)  # -1: not closed yet
    stack: list[int] = []
    sinks: list[list[int]] = []
    count = closed = 0
    for root in range(len(edges)):
        if order[root]:
            continue
        path = [(root, iter(edges[root]))]
        while path:
            node, successors = path[-1]
            if not order[node]:
                count += 1
                order[node] = low[node] = count
                stack.append(node)
            for successor in successors:
                if not order[successor]:
                    path.append((successor, iter(edges[successor])))
                    break
                if component[successor] < 0:
                    low[node] = min(low[node], low[successor])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    nodes = _pop_through(stack, node)
                    for member in nodes:
                        component[member] = closed
                    if all(component[successor] == closed for member in nodes for successor in edges[member]):
                        sinks.append(nodes)
                    closed += 1
    return sinks


def _pop_through(stack: list[int], last: int) -> list[int]:
    start = stack.index(last)
    nodes = stack[start:]
    del stack[start:]
    return nodes
