"""What a rank's transfers over the network were doing, by NCCL's own word: proxy operations and their steps.

NCCL moves the bytes of a collective between machines by *proxy operations*, one for each peer, channel and direction,
each cut into steps; NVLink and shared memory have none. Our profiler plugin (`pacekeeper/native/nccl_profiler.c`)
writes one record an operation into a file, `rings/<local rank>.transport`. All times are nanoseconds of the host's
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from .records import Collective
from .reports import FlowWindow


class OperationFlag(IntFlag):
    """Of an operation's record."""

    SEND = 1  # else a receive
    MEASURED = 2  # its steps were seen: bytes and waits are exact; else `bytes` is the most that it may be, waits are 0
    FOREIGN = 4  # of a communicator of another process (PXN), which is not told
    BEGUN = 8  # it was its turn; before that it waits for earlier ones
    # While it runs: at least one of its steps waits for …
    WAITS_FOR_NETWORK = 16
    WAITS_FOR_GPU = 32
    WAITS_FOR_CREDIT = 64


TRANSPORT_HEADER = np.dtype(
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

TRANSPORT_COMMUNICATOR = np.dtype(
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

PROXY_OPERATION = np.dtype(
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

TRANSPORT_MAGIC = 0x504B_4E43_434C_0001
MAX_RECORDED_COMMUNICATORS, MAX_RECORDED_OPERATIONS = 256, 16_384
COMMUNICATORS_OFFSET = TRANSPORT_HEADER.itemsize
OPERATIONS_OFFSET = COMMUNICATORS_OFFSET + MAX_RECORDED_COMMUNICATORS * TRANSPORT_COMMUNICATOR.itemsize
TRANSPORT_FILE_BYTES = OPERATIONS_OFFSET + MAX_RECORDED_OPERATIONS * PROXY_OPERATION.itemsize
STEPS_UNTIL_OFFSET = 24
"""Where `steps_until_ns` stands in the file."""
MAX_TRANSFERS_NAMED = 4
"""Transfers that are named where words tell of them."""


FLOW_WINDOW_COUNT = 3
MIN_FLOW_WINDOW_NS, MAX_FLOW_WINDOW_NS = 1_000_000_000, 5_000_000_000
"""A file of a job with many small messages keeps few seconds."""
MAX_PROXY_OPERATION_BYTES = 1 << 38
"""Of one operation; more makes no sense."""


def collect_flow_windows(
    operations: NDArray[np.void], communicators: NDArray[np.void], rank: int, now_ns: int
) -> tuple[FlowWindow, ...]:
    """What a rank has exchanged with its peers lately, by window.

    Of `operations` (`OPERATION`) those count that have ended and whose steps were measured. Without steps `bytes` is
    only the most that it may have been, and an operation takes as long as its collective, which waits for its slowest
    link: its time tells nothing of its own. The time of a receive does not either, because it holds the wait for the
    sender; a peer that only receives is told, too, since without that nobody could tell which rank it is.
    """
    end, nbytes, flags = operations["end_ns"], operations["bytes"], operations["flags"]
    sound = (end > 0) & (end <= now_ns) & (nbytes >= 0) & (nbytes <= MAX_PROXY_OPERATION_BYTES)
    told = operations[sound & (flags & (OperationFlag.MEASURED | OperationFlag.FOREIGN) == OperationFlag.MEASURED)]
    if not len(told):
        return ()
    ago = now_ns - told["end_ns"]
    window = min(max(int(ago.max()) // FLOW_WINDOW_COUNT + 1, MIN_FLOW_WINDOW_NS), MAX_FLOW_WINDOW_NS)
    keys = np.empty(len(told), [("communicator", "u8"), ("peer", "i4"), ("age", "i8")])
    keys["communicator"], keys["peer"], keys["age"] = told["communicator"], told["peer"], ago // window
    names, members = np.unique(keys, return_inverse=True)
    sends = told["flags"] & OperationFlag.SEND != 0
    sent = np.bincount(members, weights=np.where(sends, told["bytes"], 0))
    network = np.bincount(members, weights=np.where(sends, told["network_us"], 0)) * 1e-6
    shapes = {int(each["id"]): (int(each["rank"]), int(each["size"])) for each in communicators}
    found = []
    for name, sent_bytes, seconds in zip(names, sent.tolist(), network.tolist(), strict=True):
        communicator, peer, age = name.tolist()
        place, size = shapes.get(communicator, (-1, 0))
        if 0 <= place < size and 0 <= peer < size and age < FLOW_WINDOW_COUNT:
            found.append(FlowWindow(communicator, place, peer, rank, age, int(sent_bytes), round(seconds, 6)))
    return tuple(found)


def describe_running_transfers(rank: int, operations: NDArray[np.void], communicators: NDArray[np.void], now_ns: int) -> str:
    """What a rank's transfers (`OPERATION`) that have not ended wait for, the longest first; "": there are none."""
    begun = operations[(operations["end_ns"] == 0) & (operations["flags"] & OperationFlag.BEGUN != 0)]
    told = begun[np.argsort(begun["start_ns"])]
    known = {int(communicator["id"]): communicator for communicator in communicators}
    words = [_describe_transfer(operation, known, now_ns) for operation in told[:MAX_TRANSFERS_NAMED]]
    if len(told) > MAX_TRANSFERS_NAMED:
        words.append(f"and {len(told) - MAX_TRANSFERS_NAMED} more")
    return f"rank {rank}: {'; '.join(words)}" if words else ""


def _describe_transfer(operation: np.void, communicators: Mapping[int, np.void], now_ns: int) -> str:
    communicator = communicators.get(int(operation["communicator"]))
    where = "of another process" if communicator is None else f"in a communicator of {communicator['size']}"
    waits = _describe_waits(int(operation["flags"]))
    return (
        f"{'sends to' if operation['flags'] & OperationFlag.SEND else 'receives from'} rank {operation['peer']} {where} "
        f"({_name_collective(int(operation['collective']))} {operation['sequence']}, channel {operation['channel']}) for "
        f"{max(now_ns - int(operation['start_ns']), 0) * 1e-9:.1f} s{waits}"
    )


def _describe_waits(flags: int) -> str:
    """What the steps wait for; "": that was not measured."""
    names: Iterable[tuple[OperationFlag, str]] = (
        (OperationFlag.WAITS_FOR_NETWORK, "the network"),
        (OperationFlag.WAITS_FOR_GPU, "the GPU"),
        (OperationFlag.WAITS_FOR_CREDIT, "the receiver"),
    )
    waits = [name for flag, name in names if flags & flag]
    return f", waits for {' and '.join(waits)}" if waits else ""


def _name_collective(number: int) -> str:
    return Collective(number).name if number in set(Collective) else "operation"
