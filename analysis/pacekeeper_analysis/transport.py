"""What a rank's transfers over the network were doing, by NCCL's own word: proxy operations and their steps.

NCCL moves the bytes of a collective between machines by *proxy operations*, one for each peer, channel and direction,
each cut into steps; NVLink and shared memory have none. Our profiler plugin (`pacekeeper/native/nccl_profiler.c`)
writes one record an operation into a file, `rings/<local rank>.transport`. All times are nanoseconds of the host's
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from .records import Collective


class Flag(IntFlag):
    """Of an operation's record."""

    SEND = 1  # else a receive
    MEASURED = 2  # its steps were seen: bytes and waits are exact; else `bytes` is the most that it may be, waits are 0
    FOREIGN = 4  # of a communicator of another process (PXN), which is not told
    BEGUN = 8  # it was its turn; before that it waits for earlier ones
    # While it runs: at least one of its steps waits for …
    WAITS_FOR_NETWORK = 16
    WAITS_FOR_GPU = 32
    WAITS_FOR_CREDIT = 64


HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("capacity", "<u8"),  # records that the file holds
        ("pid", "<i4"),
        ("version", "<i4"),  # of the profiler interface that NCCL has taken
        ("steps_until_ns", "<i8"),  # written by readers: steps are measured until then
        ("padding", "V32"),
        ("operations", "<u8"),  # started so far
        ("more_padding", "V56"),
        ("communicators", "<u8"),  # made so far
        ("rest", "V3960"),
    ]
)
"""The file's first page."""

COMMUNICATOR = np.dtype(
    [
        ("order", "<u8"),  # of creation in this process, from 1; 0: void
        ("id", "<u8"),  # NCCL's, the same on all its ranks
        ("created_ns", "<i8"),
        ("finalized_ns", "<i8"),  # 0: it lives
        ("size", "<i4"),
        ("rank", "<i4"),  # of this process in it
        ("nodes", "<i4"),
        ("name", "S20"),  # where the framework gave it one; its first 19 bytes
    ]
)
"""A communicator of the process; behind the header, the newest COMMUNICATORS of them."""

OPERATION = np.dtype(
    [
        ("index", "<u8"),  # from 1; 0: void. A reader checks it for torn slots
        ("communicator", "<u8"),  # its id; 0: not known
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),  # 0: it runs
        ("bytes", "<i8"),
        ("sequence", "<u4"),  # of the collective among those of its kind in the communicator; sends and receives apart
        ("peer", "<i4"),  # rank in the communicator
        # Time in which at least one step waited for …
        ("network_us", "<u4"),  # of a receive: for the sender, too
        ("gpu_us", "<u4"),
        ("credit_us", "<u4"),  # the receiver to take it
        ("channel", "u1"),
        ("collective", "u1"),  # a records.Collective
        ("flags", "u1"),
        ("steps", "u1"),  # that were measured; 255: so many or more
    ]
)
"""One proxy operation, 64 bytes; behind the communicators, the newest OPERATIONS of them."""

MAGIC = 0x504B_4E43_434C_0001
COMMUNICATORS, OPERATIONS = 256, 16_384
COMMUNICATORS_AT = HEADER.itemsize
OPERATIONS_AT = COMMUNICATORS_AT + COMMUNICATORS * COMMUNICATOR.itemsize
FILE_BYTES = OPERATIONS_AT + OPERATIONS * OPERATION.itemsize
STEPS_UNTIL_AT = 24
"""Where `steps_until_ns` stands in the file."""
NAMED = 4
"""Transfers that are named where words tell of them."""


@dataclass(frozen=True)
class Flow:
    """What one rank has exchanged with one peer in one direction, summed over the operations that ended in a window."""

    communicator: int
    peer: int
    """Rank in the communicator."""
    sends: bool
    measured: bool
    """Bytes and waits are exact. Without steps `bytes` is the most that it may have been, and the waits are 0."""
    operations: int
    bytes: int
    busy_seconds: float
    """In which at least one of its channels was at it."""
    network_seconds: float
    """This and the next two: summed over channels."""
    gpu_seconds: float
    credit_seconds: float


def flows(operations: NDArray[np.void]) -> tuple[Flow, ...]:
    """What operations (`OPERATION`) that have ended exchanged, by communicator, peer and direction.

    Those that run, that are of other processes' communicators, or that make no sense are left out. Those whose steps
    were measured have a Flow of their own.
    """
    flags = operations["flags"]
    sound = (operations["end_ns"] >= operations["start_ns"]) & (operations["end_ns"] > 0) & (operations["bytes"] >= 0)
    told = operations[sound & (flags & Flag.FOREIGN == 0) & (operations["communicator"] != 0)]
    keys = np.empty(len(told), [("communicator", "u8"), ("peer", "i4"), ("sends", "?"), ("measured", "?")])
    keys["communicator"], keys["peer"] = told["communicator"], told["peer"]
    keys["sends"], keys["measured"] = told["flags"] & Flag.SEND != 0, told["flags"] & Flag.MEASURED != 0
    names, members = np.unique(keys, return_inverse=True)
    return tuple(_flow(key, told[members == number]) for number, key in enumerate(names))


def _flow(key: np.void, operations: NDArray[np.void]) -> Flow:
    return Flow(
        communicator=int(key["communicator"]),
        peer=int(key["peer"]),
        sends=bool(key["sends"]),
        measured=bool(key["measured"]),
        operations=len(operations),
        bytes=int(operations["bytes"].sum()),
        busy_seconds=_covered(operations["start_ns"], operations["end_ns"]) * 1e-9,
        network_seconds=float(operations["network_us"].sum(dtype="u8")) * 1e-6,
        gpu_seconds=float(operations["gpu_us"].sum(dtype="u8")) * 1e-6,
        credit_seconds=float(operations["credit_us"].sum(dtype="u8")) * 1e-6,
    )


def _covered(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Length of the union of these intervals."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate((start[:1], end[:-1]))
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


@dataclass(frozen=True)
class Group:
    """A process group as the framework knows it."""

    identity: int  # as records.RECORD has it in `group`
    name: str
    size: int
    rank: int  # of this process in it


def groups_by_communicator(communicators: NDArray[np.void], groups: Sequence[Group]) -> Mapping[int, int]:
    """Which process group a communicator (`COMMUNICATOR`) belongs to: identities by communicator id.

    NCCL's ids are its own. Where the framework has given a communicator its group's name, that tells. Else those that
    live are paired with the groups of the same size and rank, in order of creation, if there are as many of both.
    `groups` have to be in the order in which they were first used, because PyTorch makes a communicator then. What
    cannot be told is left out: the communicators that PyTorch makes for single pairs of ranks, several groups of the
    same size and rank of which some have not talked yet, and communicators that were made anew after an error.
    """
    alive = communicators[(communicators["finalized_ns"] == 0) & (communicators["order"] > 0)]
    alive = alive[np.argsort(alive["order"])]
    found: dict[int, int] = {}
    times_named = Counter(_short(group.name) for group in groups)
    by_name = {_short(group.name): group for group in groups if times_named[_short(group.name)] == 1}
    unnamed: dict[tuple[int, int], list[int]] = defaultdict(list)
    for communicator in alive:
        group = by_name.get(bytes(communicator["name"])) if communicator["name"] else None
        if group is not None and (group.size, group.rank) == (communicator["size"], communicator["rank"]):
            found[int(communicator["id"])] = group.identity
        else:
            unnamed[int(communicator["size"]), int(communicator["rank"])].append(int(communicator["id"]))
    left: dict[tuple[int, int], list[int]] = defaultdict(list)
    for group in groups:
        if group.identity not in found.values():
            left[group.size, group.rank].append(group.identity)
    for shape, identities in left.items():
        if len(unnamed[shape]) == len(identities):
            found.update(zip(unnamed[shape], identities, strict=True))
    return found


def _short(name: str) -> bytes:
    return name.encode()[: COMMUNICATOR["name"].itemsize - 1]


def running_in_words(rank: int, operations: NDArray[np.void], communicators: NDArray[np.void], now_ns: int) -> str:
    """What a rank's transfers (`OPERATION`) that have not ended wait for, the longest first; "": there are none."""
    begun = operations[(operations["end_ns"] == 0) & (operations["flags"] & Flag.BEGUN != 0)]
    told = begun[np.argsort(begun["start_ns"])]
    known = {int(communicator["id"]): communicator for communicator in communicators}
    words = [_running(operation, known, now_ns) for operation in told[:NAMED]]
    if len(told) > NAMED:
        words.append(f"and {len(told) - NAMED} more")
    return f"rank {rank}: {'; '.join(words)}" if words else ""


def _running(operation: np.void, communicators: Mapping[int, np.void], now_ns: int) -> str:
    communicator = communicators.get(int(operation["communicator"]))
    where = "of another process" if communicator is None else f"in a communicator of {communicator['size']}"
    waits = _waits(int(operation["flags"]))
    return (
        f"{'sends to' if operation['flags'] & Flag.SEND else 'receives from'} rank {operation['peer']} {where} "
        f"({_collective(int(operation['collective']))} {operation['sequence']}, channel {operation['channel']}) for "
        f"{max(now_ns - int(operation['start_ns']), 0) * 1e-9:.1f} s{waits}"
    )


def _waits(flags: int) -> str:
    """What the steps wait for; "": that was not measured."""
    names: Iterable[tuple[Flag, str]] = (
        (Flag.WAITS_FOR_NETWORK, "the network"),
        (Flag.WAITS_FOR_GPU, "the GPU"),
        (Flag.WAITS_FOR_CREDIT, "the receiver"),
    )
    waits = [name for flag, name in names if flags & flag]
    return f", waits for {' and '.join(waits)}" if waits else ""


def _collective(number: int) -> str:
    return Collective(number).name if number in set(Collective) else "operation"
