"""Dependencies between operations: the operations of one training step as a graph.

A graph describes one replica of the model. Every replica and every step has the same graph, so one description serves a
job of any size. Replicas and steps differ only in durations (see `simulate`). A job without such symmetry is one
replica that holds all operations of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Operation:
    """An operation of the graph."""

    type: str
    stage: int = 0
    """Pipeline stage. 0 without a pipeline."""
    index: int = 0
    """Its position among the operations of its type and stage in a step."""
    chunk: int = 0
    """Model chunk within the stage (interleaved schedules)."""
    microbatch: int | None = None
    """Its microbatch; None: it has none."""

    def __str__(self) -> str:
        return f"{self.type} {self.index} of stage {self.stage}"


@dataclass(frozen=True)
class StartGroup:
    """Operations that start at the same instant: a collective, a matched send and receive, or one single operation."""

    members: tuple[int, ...]
    predecessors: tuple[int, ...]
    """Operations that one of the members waits for."""
    across: tuple[int, ...]
    """Axes of the replica mesh whose replicas also start together. Empty for operations of one replica only."""
    retire: tuple[int, ...]
    """Operations that nothing after this unit waits for, so their times can be discarded."""


@dataclass(frozen=True)
class OperationGraph:
    """An acyclic graph of operations, in an order in which they can be simulated. `GraphBuilder.build` creates it."""

    size: int
    """Number of operations. They are numbered from 0."""
    predecessors: tuple[tuple[int, ...], ...]
    """For each operation: those that it waits for itself."""
    units: tuple[StartGroup, ...]
    """All operations, each in exactly one unit. Each unit comes after the units it waits for."""
    final: tuple[int, ...]
    """The operations that end the step."""

    def with_independent_replicas(self, chosen: Sequence[bool]) -> OperationGraph:
        """Return the same graph in which the chosen operations [operation] do not wait for other replicas."""
        units = [
            replace(unit, across=()) if all(chosen[node] for node in unit.members) else unit for unit in self.units
        ]
        return replace(self, units=tuple(units))


class GraphBuilder:
    """Collects operations and the order between them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._after: list[list[int]] = []
        self._groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def add_operation(self, name: str, after: Iterable[int] = ()) -> int:
        """Add an operation that starts when all of `after` have ended, and return its number.

        `name` appears only in error messages.
        """
        self._names.append(name)
        self._after.append(list(after))
        return len(self._names) - 1

    def add_wait(self, operation: int, on: int) -> None:
        """Make `operation` start only after `on` has ended."""
        self._after[operation].append(on)

    def add_chain(self, operations: Sequence[int]) -> None:
        """Make each operation start only after the one before it has ended."""
        for before, operation in pairwise(operations):
            self.add_wait(operation, on=before)

    def start_together(self, operations: Sequence[int], across: tuple[int, ...] = ()) -> None:
        """Make the operations start when the last of them could start.

        With `across`, this includes all replicas along those mesh axes. An operation may be in only one such group.
        """
        self._groups.append((tuple(operations), across))

    def build(self, final: Sequence[int] = ()) -> OperationGraph:
        """Return the finished graph. Raises ValueError if operations wait for each other in a cycle.

        `final` are the operations that end a step. By default these are all that nothing waits for.
        """
        groups = self._groups + [((node,), ()) for node in self._list_ungrouped()]
        order = self._sort_topologically([members for members, _ in groups])
        waited_for = {before for after in self._after for before in after}
        ends = tuple(final) or tuple(node for node in range(len(self._names)) if node not in waited_for)
        units: list[StartGroup] = []
        still_needed = set(ends)
        for index in reversed(order):
            members, across = groups[index]
            after = tuple(sorted({before for member in members for before in self._after[member]}))
            last_use = tuple(node for node in (*after, *members) if node not in still_needed)
            still_needed.update(after)
            units.append(StartGroup(members, after, across, last_use))
        return OperationGraph(len(self._names), tuple(map(tuple, self._after)), tuple(reversed(units)), ends)

    def _list_ungrouped(self) -> list[int]:
        grouped = [node for members, _ in self._groups for node in members]
        if len(grouped) != len(set(grouped)):
            duplicate = next(node for node in grouped if grouped.count(node) > 1)
            raise ValueError(
                f"{self._names[duplicate]} is in two groups of operations that start together; merge the groups"
            )
        return sorted(set(range(len(self._names))) - set(grouped))

    def _sort_topologically(self, groups: list[tuple[int, ...]]) -> list[int]:
        """Return indices into `groups` such that each group comes after all it waits for (Kahn's algorithm)."""
        group_of = {node: index for index, members in enumerate(groups) for node in members}
        predecessors = [{group_of[node] for member in members for node in self._after[member]} for members in groups]
        followers: list[list[int]] = [[] for _ in groups]
        for index, needed in enumerate(predecessors):
            for predecessor in needed:
                followers[predecessor].append(index)
        remaining = [len(needed) for needed in predecessors]
        ready = [index for index, count in enumerate(remaining) if count == 0]
        for index in ready:
            for follower in followers[index]:
                remaining[follower] -= 1
                if remaining[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(groups):
            in_cycle = [self._names[groups[index][0]] for index, count in enumerate(remaining) if count > 0]
            raise ValueError(f"these operations wait for each other in a cycle: {', '.join(in_cycle[:8])}")
        return ready
