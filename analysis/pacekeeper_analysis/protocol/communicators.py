"""Communicators: which ranks form a group (C4, arXiv 2406.04594, its first layer of records)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated

from pacekeeper_rank.collectives.communicators import MAX_COMMUNICATOR_RANKS, MAX_COMMUNICATORS, MAX_MEMBERS_LENGTH

from ..errors import InputError
from .decoding import MaxLength, Within

MAX_INTERLEAVED_RANKS = 1_024
"""Upper limit of ranks of a communicator in which runs of different strides overlap."""
MAX_MEMBERS_CHARACTERS = 32_000
"""Upper limit of characters of all members in one message. Reading them takes 10 µs per run."""
MAX_RANK_DIGITS = 7
MAX_GROUP_IDENTITY_DIGITS = 8
"""Hexadecimal ones."""
MAX_SEQUENCE_DIGITS = 19
"""Those of a signed integer of 64 bits."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks. Records and rank states refer to it by `identity`, which is the same on all of its members."""

    identity: Annotated[int, Within(0, 2**32 - 1)]
    members: Annotated[
        str, MaxLength(MAX_MEMBERS_LENGTH)
    ]  # global ranks in the order of the group: "0-3", "0-12:4" (stride 4), "5,2"
    name: Annotated[str, MaxLength(80)] = ""  # mesh dimension or description from the script; "": none

    def __post_init__(self) -> None:
        """Raise InputError if `members` are not ranks, or if a rank occurs twice."""
        runs = _parse_runs(self.members)
        if _are_disjoint(runs):
            return  # do not count ranks one by one: the sender may be hostile
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
        """The global ranks, in the order of the group."""
        return parse_ranks(self.members)

    @property
    def size(self) -> int:
        """The number of ranks, computed without listing them."""
        return sum(map(len, _parse_runs(self.members)))

    def fits_world_size(self, world_size: int) -> bool:
        """Return whether a job of `world_size` ranks may have this communicator."""
        return all(run[-1] < world_size for run in _parse_runs(self.members))


def truncate_communicators(communicators: Iterable[Communicator]) -> tuple[Communicator, ...]:
    """Return the first communicators, as many as fit into one message."""
    taken, characters = list[Communicator](), 0
    for communicator in communicators:
        characters += len(communicator.members)
        if len(taken) == MAX_COMMUNICATORS or characters > MAX_MEMBERS_CHARACTERS:
            break
        taken.append(communicator)
    return tuple(taken)


def check_communicators_size(data: object) -> None:
    """Check the size of a message's communicators before they are read. Raises InputError."""
    communicators = data.get("communicators", ()) if isinstance(data, Mapping) else ()
    if not isinstance(communicators, (list, tuple)):
        return  # the reader raises the error
    members = [communicator.get("members", "") for communicator in communicators if isinstance(communicator, Mapping)]
    if sum(len(text) for text in members if isinstance(text, str)) > MAX_MEMBERS_CHARACTERS:
        raise InputError(f"communicators: their members exceed the limit of {MAX_MEMBERS_CHARACTERS} characters")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the output of `pacekeeper_rank.collectives.communicators.format_ranks`. Raises InputError."""
    return tuple(chain.from_iterable(_parse_runs(text)))


def _parse_runs(text: str) -> list[range]:
    runs: list[range] = []
    for piece in text.split(",") if text else ():
        span, _, stride_text = piece.partition(":")
        low, dash, high = span.partition("-")
        if not all(
            part.isdecimal() and len(part) <= MAX_RANK_DIGITS
            for part in (low, high if dash else low, stride_text or "1")
        ):
            raise InputError(f"{piece[:40]!r} is not a run of ranks: give them as 0-7, 0-12:4 or 5")
        first, last, stride = int(low), int(high if dash else low), int(stride_text or 1)
        if last < first or stride < 1:
            raise InputError(f"{piece[:40]!r} is not a run of ascending ranks")
        runs.append(range(first, last + 1, stride))
    if sum(map(len, runs)) > MAX_COMMUNICATOR_RANKS:
        raise InputError(f"{text[:40]!r} are more than {MAX_COMMUNICATOR_RANKS} ranks")
    return runs


def _are_disjoint(runs: Sequence[range]) -> bool:
    """Return whether each run begins after the end of the one before it."""
    return all(previous[-1] < run[0] for previous, run in pairwise(sorted(runs, key=lambda run: run[0])))


def _group_by_remainder(runs: Sequence[range]) -> Collection[list[range]]:
    """Group runs of one stride by remainder. Runs of different remainders have no rank in common."""
    groups: dict[int, list[range]] = defaultdict(list)
    for run in runs:
        groups[run[0] % run.step].append(run)
    return groups.values()


def format_entered(sequences: Mapping[int, int]) -> str:
    """Format how far a rank has come in each group, by the group's identity."""
    return ",".join(f"{identity:x}:{sequence}" for identity, sequence in sequences.items())


def parse_entered(text: str) -> dict[int, int]:
    """Parse the output of `format_entered`. Raises InputError."""
    sequences = {}
    for piece in text.split(",") if text else ():
        identity, _, sequence = piece.partition(":")
        is_identity = 0 < len(identity) <= MAX_GROUP_IDENTITY_DIGITS and set(identity) <= _HEXADECIMAL
        if not (is_identity and sequence.isdecimal() and len(sequence) <= MAX_SEQUENCE_DIGITS):
            raise InputError(f"{piece[:40]!r} is not a rank's progress in a group: give it as 1f:12")
        sequences[int(identity, 16)] = int(sequence)
    return sequences


_HEXADECIMAL = frozenset("0123456789abcdef")
