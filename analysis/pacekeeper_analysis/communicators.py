"""Communicators: which ranks talk to each other in a group (C4, arXiv 2406.04594, its first layer of records)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated

from .errors import InputError
from .reading import MaxLength, Within

MAX_COMMUNICATOR_RANKS = 1 << 20
"""Of one communicator."""
MAX_INTERLEAVED_RANKS = 1_024
"""Of one in which runs of different strides overlap."""
MAX_COMMUNICATORS = 256
"""Of one rank, or one worker in one message."""
MAX_MEMBERS_CHARACTERS = 32_000
"""Of the members of all in one message: reading them takes 10 µs a run."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks. `identity` is what records and rank states call it by, the same on all of its members."""

    identity: Annotated[int, Within(0, 2**32 - 1)]
    members: Annotated[str, MaxLength(4_000)]  # global ranks in the order of the group: "0-3", "0-12:4" (by fours), "5,2"
    name: Annotated[str, MaxLength(80)] = ""  # the mesh dimension or description that the script gave it; "": none

    def __post_init__(self) -> None:
        """Raises InputError where `members` are no ranks, or not each of them once."""
        runs = _parse_runs(self.members)
        if _are_disjoint(runs):
            return  # nothing to be counted one by one: who sends this may be hostile
        if len({run.step for run in runs}) > 1:
            if sum(map(len, runs)) > MAX_INTERLEAVED_RANKS:
                raise InputError(f"Communicator.members: {self.members[:80]!r}: give runs that do not overlap")
            ranks = parse_ranks(self.members)
            if len(set(ranks)) == len(ranks):
                return
        elif all(map(_are_disjoint, _group_by_remainder(runs))):
            return
        raise InputError(f"Communicator.members: {self.members[:80]!r} names a rank twice")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, in the order of the group."""
        return parse_ranks(self.members)

    @property
    def size(self) -> int:
        """Number of its ranks, which are not counted one by one."""
        return sum(map(len, _parse_runs(self.members)))

    def fits_world_size(self, world_size: int) -> bool:
        """Whether a job of so many ranks may have it."""
        return all(run[-1] < world_size for run in _parse_runs(self.members))


def truncate_communicators(communicators: Iterable[Communicator]) -> tuple[Communicator, ...]:
    """The first of them, as many as one message takes."""
    taken, characters = list[Communicator](), 0
    for each in communicators:
        characters += len(each.members)
        if len(taken) == MAX_COMMUNICATORS or characters > MAX_MEMBERS_CHARACTERS:
            break
        taken.append(each)
    return tuple(taken)


def check_communicators_size(data: object) -> None:
    """Of the communicators of a message, before they are read. Raises InputError."""
    given = data.get("communicators", ()) if isinstance(data, Mapping) else ()
    if not isinstance(given, (list, tuple)):
        return  # whoever reads it says so
    members = [each.get("members", "") for each in given if isinstance(each, Mapping)]
    if sum(len(text) for text in members if isinstance(text, str)) > MAX_MEMBERS_CHARACTERS:
        raise InputError(f"communicators: their members are more than the {MAX_MEMBERS_CHARACTERS} characters that are taken")


def format_ranks(ranks: Sequence[int]) -> str:
    """Runs with a common stride, in order: (0, 1, 2, 3, 8) is "0-3,8", (0, 4, 8) is "0-8:4"."""
    pieces, position = [], 0
    while position < len(ranks):
        end = position + 1
        stride = ranks[end] - ranks[position] if end < len(ranks) else 0
        if stride > 0:
            while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == stride:
                end += 1
        if stride <= 0 or (end - position < 2 and stride != 1):
            pieces.append(str(ranks[position]))
            position += 1
            continue
        pieces.append(f"{ranks[position]}-{ranks[end]}" + (f":{stride}" if stride > 1 else ""))
        position = end + 1
    return ",".join(pieces)


def parse_ranks(text: str) -> tuple[int, ...]:
    """The reverse of `format_ranks`. Raises InputError."""
    return tuple(chain.from_iterable(_parse_runs(text)))


def _parse_runs(text: str) -> list[range]:
    runs: list[range] = []
    for piece in text.split(",") if text else ():
        span, _, by = piece.partition(":")
        low, dash, high = span.partition("-")
        if not all(part.isdecimal() and len(part) < 8 for part in (low, high if dash else low, by or "1")):
            raise InputError(f"{piece[:40]!r} is no run of ranks: give them as 0-7, 0-12:4 or 5")
        first, last, stride = int(low), int(high if dash else low), int(by or 1)
        if last < first or stride < 1:
            raise InputError(f"{piece[:40]!r} is no run of ranks that rise")
        runs.append(range(first, last + 1, stride))
    if sum(map(len, runs)) > MAX_COMMUNICATOR_RANKS:
        raise InputError(f"{text[:40]!r} are more than {MAX_COMMUNICATOR_RANKS} ranks")
    return runs


def _are_disjoint(runs: Sequence[range]) -> bool:
    """Whether each begins behind the end of another."""
    return all(before[-1] < run[0] for before, run in pairwise(sorted(runs, key=lambda run: run[0])))


def _group_by_remainder(runs: Sequence[range]) -> Collection[list[range]]:
    """Of one stride; those of different remainders have no rank in common."""
    found: dict[int, list[range]] = defaultdict(list)
    for run in runs:
        found[run[0] % run.step].append(run)
    return found.values()


def format_entered(sequences: Mapping[int, int]) -> str:
    """How far a rank has come, by the identity of the group."""
    return ",".join(f"{identity:x}:{sequence}" for identity, sequence in sequences.items())


def parse_entered(text: str) -> dict[int, int]:
    """The reverse of `format_entered`. Raises InputError."""
    sequences = {}
    for piece in text.split(",") if text else ():
        identity, _, sequence = piece.partition(":")
        is_identity = 0 < len(identity) <= 8 and set(identity) <= _HEXADECIMAL
        if not (is_identity and sequence.isdecimal() and len(sequence) < 20):
            raise InputError(f"{piece[:40]!r} does not say how far a rank has come in a group: give it as 1f:12")
        sequences[int(identity, 16)] = int(sequence)
    return sequences


_HEXADECIMAL = frozenset("0123456789abcdef")
