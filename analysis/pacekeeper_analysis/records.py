"""What a rank measures: fixed-size records in a ring of shared memory, one ring a rank.

The ring is a file that the rank maps and writes; launcher and sidecar map it read-only. It holds a header page with the
rank's present state (what it is doing right now, which is what a hang is judged by) and, behind it, the last `capacity`
records. All times are nanoseconds of the host's CLOCK_MONOTONIC: they compare within one host only, and nothing here
compares them across hosts.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class RecordKind(IntEnum):
    """What a record is about."""

    STEP = 1  # one optimizer step, from the end of the one before to its own end; value = samples of this rank
    COMPUTE = 2  # one a step: as long as the rank's own work in it, waits for its peers excluded; value = its samples
    # One collective; start = this rank entered, end = its future was done; value = seconds up to its end in which this
    # rank did nothing but wait for it; 0: it went on meanwhile.
    COLLECTIVE = 3
    DATA = 4  # waiting for the loader
    PHASE = 5  # a whole phase other than training: compile, evaluation, checkpoint, …
    GARBAGE = 6  # a Python garbage collection
    LOSS = 7  # value = the training loss of the step, as this rank saw it
    # Of a Local-SGD mode; start = this rank came, end = its parameters are the common ones, with a forward pass in
    # between that hides most of it; value = seconds that it held this rank up.
    SYNCHRONISATION = 8
    # Before a step's own record, where the loader knows them: value = the lengths of this rank's samples in sum, bytes
    # = their squares in sum; 0: not known.
    LENGTHS = 9


class Phase(IntEnum):
    """What the rank is busy with. Each phase has a deadline of its own, so none is ever taken for a hang of another."""

    START = 0  # from the fork to the end of the first step of the round
    TRAIN = 1
    COMPILE = 2
    EVALUATE = 3
    CHECKPOINT = 4
    DATA = 5  # of the script's own, by its word
    RESTORE = 6
    FINISHED = 7
    LOAD = 8  # waits for a batch of its loader


class Collective(IntEnum):
    """Which collective a record or a rank's state speaks of."""

    NONE = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


class Device(IntEnum):
    """How far the GPU has come with the collectives that its rank has issued: most calls return before it has begun."""

    NONE = 0  # the rank uses no GPU
    RUNNING = 1  # nobody has looked: the rank makes progress, or its flight recorder is off
    IDLE = 2  # all are complete, or none is NCCL's
    SCHEDULED = 3  # the oldest one that is not complete has not begun: work of the rank's own is before it
    STARTED = 4  # it has begun: it waits for its peers


class StateOrigin(IntEnum):
    """Where a rank's state came from at the start of its round, the nearest first."""

    UNKNOWN = 0  # it is not there yet, or the script does not tell
    NOTHING = 1  # there was none: the job begins
    MEMORY = 2  # of its own worker: a snapshot
    NEIGHBOUR = 3  # another worker's memory
    CHECKPOINT = 4  # the volume


SYMMETRIC_COLLECTIVES = frozenset(
    {Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.BARRIER}
)
"""Collectives in which the last to arrive made the others wait; a broadcast would blame the innocent."""

NOTICED_LATE = 1
"""Flag of a collective's record: its end was noticed only when the rank entered the next one; an upper bound."""

RING_RECORD = np.dtype(
    [
        ("index", "<u8"),  # position in the rank's history, from 1; 0: never written. A reader checks it for torn slots
        ("kind", "u1"),
        ("phase", "u1"),
        ("collective", "u1"),
        ("flags", "u1"),  # of a step: position in plan.SyncMode of the mode that was in force
        ("step", "<u4"),
        ("sequence", "<u4"),  # of the collective inside its group
        ("group", "<u4"),  # identity of the communicator; a send's or receive's is that of its channel
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("bytes", "<i8"),
        ("value", "<f8"),
        ("peer", "<i4"),  # global rank, of a send or receive; -1: none, or received from whoever comes
        ("reserved", "<i4"),
    ]
)
"""One record, 64 bytes."""

RING_RECORD_FORMAT = "<QBBBBIIIqqqdii"
"""The same for `struct`, which writes one in under a microsecond."""

MAX_ENTERED_GROUPS = 64
"""Groups of which a rank's state says how far it has come. The first place is nobody's: there those count in vain that
find no other free."""

RING_STATE = np.dtype(
    [
        ("magic", "<u8"),
        ("capacity", "<u8"),
        ("rank", "<i4"),
        ("round", "<i4"),
        ("pid", "<i4"),  # in the process namespace of the trainer container
        ("phase", "<i4"),
        ("phase_since_ns", "<i8"),
        ("step", "<i8"),  # last completed optimizer step of the job; -1: none
        ("step_end_ns", "<i8"),
        ("steps_in_round", "<i8"),
        ("collective", "<i4"),  # the collective it is inside of now; NONE: outside
        ("group", "<u4"),
        ("sequence", "<i8"),  # of the last collective entered in `group`
        ("collective_since_ns", "<i8"),
        ("collectives_entered", "<i8"),  # in this round, over all groups
        ("checkpoint_step", "<i8"),  # last step whose checkpoint is published on the volume; -1: none
        ("snapshot_step", "<i8"),  # last step held in the shared-memory snapshot; -1: none
        ("restored_step", "<i8"),  # step that this round started from; 0: from the beginning; -1: not yet known
        ("samples", "<i8"),  # of this rank since the job's beginning
        ("global_batch", "<i8"),  # samples a step of the whole job; 0: unknown (the script is only watched)
        ("loss", "<f8"),
        ("plan_version", "<i8"),  # version of the plan in force on this rank
        ("checkpoint_request", "<i8"),  # the last checkpoint request this rank has answered
        ("share", "<i8"),  # samples of this rank in a step now; 0: unknown
        ("sync_mode", "<i8"),  # position in plan.SyncMode of the mode in force; -1: the script is only watched
        ("bad_loss_step", "<i8"),  # first step of this round whose loss was not finite; -1: none
        ("longest_load_ns", "<i8"),  # longest wait for the loader in this round; 0: none is over yet
        # Of the collectives on the GPU, looked up while the rank makes no progress:
        ("device", "<i4"),  # a Device
        ("device_collective", "<i4"),  # the oldest one that is not complete; meaningful where it is told by `device`
        ("device_group", "<u4"),  # identity of its communicator; 0: a send or receive
        ("device_sequence", "<u4"),  # in this group
        ("share_grain", "<i8"),  # samples that each rank's share is a multiple of; 0: unknown
        ("peer", "<i4"),  # global rank that it sends to or receives from now; -1: whoever comes
        ("owner", "<i4"),  # process id of who alone may take the ring; 0: any may; -1: the first that does
        # How far it has come in each group: so a peer knows whether it has ever entered what others wait in.
        ("entered", [("group", "<u8"), ("sequence", "<i8")], (MAX_ENTERED_GROUPS,)),
        ("total_steps", "<i8"),  # optimizer steps that the script wants of the job; 0: without end, or not known
        # When the rank, in this round, … 0: it has not yet, or its script does not tell.
        ("device_ns", "<i8"),  # … had its device
        ("joined_ns", "<i8"),  # … was in its process group, and in those that the library makes at once
        ("restoring_ns", "<i8"),  # … began to bring its state back
        ("restored_ns", "<i8"),  # … had it
        ("origin", "<i8"),  # an StateOrigin
        ("replica_ranks", "<i8"),  # the number of ranks may be any multiple of it; 0: unknown
    ]
)
"""The rank's present state, at the beginning of the ring's header page."""

POLLED_DEVICE_FIELDS = ("device", "device_collective", "device_group", "device_sequence")
"""Fields of the state whose change is no progress of the rank."""

RING_MAGIC = 0x504B_5249_4E47_0001
"""Of this layout. What is added at the end of the state, with 0 for what is not known, leaves it as it is."""
RING_HEADER_BYTES = 4096
assert RING_RECORD.itemsize == 64
assert RING_STATE.itemsize <= RING_HEADER_BYTES


def compute_ring_bytes(capacity: int) -> int:
    """Size of a ring file that holds the last `capacity` records."""
    return RING_HEADER_BYTES + capacity * RING_RECORD.itemsize
