"""The state of a rank's network transfers by NCCL's own report: proxy operations and their steps.

NCCL moves the bytes of a collective between machines by *proxy operations*: one for each peer, channel and direction,
each cut into steps. NVLink and shared memory have none. The profiler plugin (`pacekeeper/native/nccl_profiler.c`)
writes one record per operation into a file, `rings/<local rank>.transport`. All times are nanoseconds of the host's
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from pacekeeper_rank.records import Collective

from .reports import FlowWindow


class OperationFlag(IntFlag):
    """Flags of a proxy operation's record."""

    SEND = 1  # else a receive
    MEASURED = 2  # its steps were measured: bytes and waits are exact; else `bytes` is an upper bound, waits are 0
    FOREIGN = 4  # of a communicator of another process (PXN), which is not reported
    BEGUN = 8  # its turn has come; before that it waits for earlier ones
    # While it runs, at least one of its steps waits for …
    WAITS_FOR_NETWORK = 16
    WAITS_FOR_GPU = 32
    WAITS_FOR_CREDIT = 64


TRANSPORT_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("capacity", "<u8"),  # number of records that the file holds
        ("pid", "<i4"),
        ("version", "<i4"),  # of the profiler interface that NCCL uses
        ("steps_until_ns", "<i8"),  # written by readers: steps are measured until this time
        ("padding", "V32"),
        ("operations", "<u8"),  # started so far
        ("more_padding", "V56"),
        ("communicators", "<u8"),  # created so far
        ("rest", "V3960"),
    ]
)
"""The first page of the file."""

TRANSPORT_COMMUNICATOR = np.dtype(
    [
        ("order", "<u8"),  # of creation in this process, from 1; 0: empty slot
        ("id", "<u8"),  # NCCL's, the same on all its ranks
        ("created_ns", "<i8"),
        ("finalized_ns", "<i8"),  # 0: still in use
        ("size", "<i4"),
        ("rank", "<i4"),  # of this process in it
        ("nodes", "<i4"),
        ("name", "S20"),  # from the framework, if any; its first 19 bytes
    ]
)
"""A communicator of the process. Behind the header are the newest MAX_RECORDED_COMMUNICATORS of them."""

PROXY_OPERATION = np.dtype(
    [
        ("index", "<u8"),  # from 1; 0: empty slot. Readers detect torn slots by it
        ("communicator", "<u8"),  # its id; 0: not known
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),  # 0: still running
        ("bytes", "<i8"),
        ("sequence", "<u4"),  # of the collective among those of its kind in the communicator; sends and receives apart
        ("peer", "<i4"),  # rank in the communicator
        # Time in which at least one step waited for …
        ("network_us", "<u4"),  # of a receive: also for the sender
        ("gpu_us", "<u4"),
        ("credit_us", "<u4"),  # for the receiver to take the data
        ("channel", "u1"),
        ("collective", "u1"),  # a records.Collective
        ("flags", "u1"),
        ("steps", "u1"),  # number of measured steps; 255: that many or more
    ]
)
"""One proxy operation, 64 bytes. Behind the communicators are the newest MAX_RECORDED_OPERATIONS of them."""

TRANSPORT_MAGIC = 0x504B_4E43_434C_0001
MAX_RECORDED_COMMUNICATORS, MAX_RECORDED_OPERATIONS = 256, 16_384
COMMUNICATORS_OFFSET = TRANSPORT_HEADER.itemsize
OPERATIONS_OFFSET = COMMUNICATORS_OFFSET + MAX_RECORDED_COMMUNICATORS * TRANSPORT_COMMUNICATOR.itemsize
TRANSPORT_FILE_BYTES = OPERATIONS_OFFSET + MAX_RECORDED_OPERATIONS * PROXY_OPERATION.itemsize
STEPS_UNTIL_OFFSET = 24
"""Offset of `steps_until_ns` in the file."""
MAX_TRANSFERS_NAMED = 4
"""Upper limit of transfers that a message names."""


FLOW_WINDOW_COUNT = 3
MIN_FLOW_WINDOW_NS, MAX_FLOW_WINDOW_NS = 1_000_000_000, 5_000_000_000
"""Limits of a flow window. The file of a job with many small messages covers few seconds."""
MAX_PROXY_OPERATION_BYTES = 1 << 38
"""Upper limit of one operation's bytes. A larger value is invalid."""


def collect_flow_windows(
    operations: NDArray[np.void], communicators: NDArray[np.void], rank: int, now_ns: int
) -> tuple[FlowWindow, ...]:
    """Return what a rank recently exchanged with its peers, by window.

    Only `operations` (dtype `PROXY_OPERATION`) that have ended and whose steps were measured count. Without steps,
    `bytes` is only an upper bound, and an operation lasts as long as its collective, which waits for its slowest link:
    its own time is unknown. The time of a receive includes the wait for the sender, so it does not count either. Peers
    that only receive are included, because otherwise the rank of such a peer could not be identified.
    """
    end, nbytes, flags = operations["end_ns"], operations["bytes"], operations["flags"]
    valid = (end > 0) & (end <= now_ns) & (nbytes >= 0) & (nbytes <= MAX_PROXY_OPERATION_BYTES)
    measured = operations[valid & (flags & (OperationFlag.MEASURED | OperationFlag.FOREIGN) == OperationFlag.MEASURED)]
    if not len(measured):
        return ()
    age_ns = now_ns - measured["end_ns"]
    window_ns = min(max(int(age_ns.max()) // FLOW_WINDOW_COUNT + 1, MIN_FLOW_WINDOW_NS), MAX_FLOW_WINDOW_NS)
    keys = np.empty(len(measured), [("communicator", "u8"), ("peer", "i4"), ("age", "i8")])
    keys["communicator"], keys["peer"], keys["age"] = measured["communicator"], measured["peer"], age_ns // window_ns
    unique_keys, key_index = np.unique(keys, return_inverse=True)
    sends = measured["flags"] & OperationFlag.SEND != 0
    sent = np.bincount(key_index, weights=np.where(sends, measured["bytes"], 0))
    network = np.bincount(key_index, weights=np.where(sends, measured["network_us"], 0)) * 1e-6
    shapes = {int(record["id"]): (int(record["rank"]), int(record["size"])) for record in communicators}
    windows = []
    for key, sent_bytes, seconds in zip(unique_keys, sent.tolist(), network.tolist(), strict=True):
        communicator, peer, age = key.tolist()
        place, size = shapes.get(communicator, (-1, 0))
        if 0 <= place < size and 0 <= peer < size and age < FLOW_WINDOW_COUNT:
            windows.append(FlowWindow(communicator, place, peer, rank, age, int(sent_bytes), round(seconds, 6)))
    return tuple(windows)


def describe_running_transfers(
    rank: int, operations: NDArray[np.void], communicators: NDArray[np.void], now_ns: int
) -> str:
    """Describe what a rank's unfinished transfers (dtype `PROXY_OPERATION`) wait for, the longest first. "" if none."""
    running = operations[(operations["end_ns"] == 0) & (operations["flags"] & OperationFlag.BEGUN != 0)]
    transfers = running[np.argsort(running["start_ns"])]
    by_id = {int(communicator["id"]): communicator for communicator in communicators}
    descriptions = [_describe_transfer(operation, by_id, now_ns) for operation in transfers[:MAX_TRANSFERS_NAMED]]
    if len(transfers) > MAX_TRANSFERS_NAMED:
        descriptions.append(f"and {len(transfers) - MAX_TRANSFERS_NAMED} more")
    return f"rank {rank}: {'; '.join(descriptions)}" if descriptions else ""


def _describe_transfer(operation: np.void, communicators: Mapping[int, np.void], now_ns: int) -> str:
    communicator = communicators.get(int(operation["communicator"]))
    scope = "of another process" if communicator is None else f"in a communicator of {communicator['size']}"
    waits = _describe_waits(int(operation["flags"]))
    return (
        f"{'sends to' if operation['flags'] & OperationFlag.SEND else 'receives from'} rank {operation['peer']} "
        f"{scope} "
        f"({_name_collective(int(operation['collective']))} {operation['sequence']}, channel "
        f"{operation['channel']}) for "
        f"{max(now_ns - int(operation['start_ns']), 0) * 1e-9:.1f} s{waits}"
    )


def _describe_waits(flags: int) -> str:
    """Describe what the steps wait for. "" if that was not measured."""
    names: Iterable[tuple[OperationFlag, str]] = (
        (OperationFlag.WAITS_FOR_NETWORK, "the network"),
        (OperationFlag.WAITS_FOR_GPU, "the GPU"),
        (OperationFlag.WAITS_FOR_CREDIT, "the receiver"),
    )
    waits = [name for flag, name in names if flags & flag]
    return f", waits for {' and '.join(waits)}" if waits else ""


def _name_collective(number: int) -> str:
    return Collective(number).name if number in set(Collective) else "operation"
