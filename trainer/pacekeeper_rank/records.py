"""What a rank measures: fixed-size records in a ring of shared memory, one ring per rank.

The ring is a file that the rank maps and writes. Launcher and sidecar map it read-only. A header page holds the rank's
present state: what it is doing right now, which is the basis for detecting a hang. Behind it are the last `capacity`
records. All times are nanoseconds of the host's CLOCK_MONOTONIC. They are comparable within one host only, and no code
here compares them across hosts.

The layouts are plain tables, so that a rank needs no numpy. `pacekeeper_analysis.protocol.records` makes numpy's types
of them.
"""

from __future__ import annotations

from enum import IntEnum

MAX_STEPS_AHEAD = 2
"""Largest number of steps that a rank is ahead of its device."""


class RecordKind(IntEnum):
    """What a record describes."""

    STEP = 1  # one optimizer step, from the end of the previous step to its own end; value = samples of this rank
    COMPUTE = 2  # one per step: the rank's own work in it, without waits for its peers; value = its samples
    # One collective; start = this rank entered, end = its future was done; value = seconds up to its end in which this
    # rank only waited for it; 0: the rank continued at the same time.
    COLLECTIVE = 3
    DATA = 4  # waiting for the data loader
    PHASE = 5  # a whole phase other than training: compile, evaluation, checkpoint, …
    GC = 6  # a Python garbage collection
    LOSS = 7  # value = the training loss of the step, as this rank saw it
    # Of a Local-SGD mode; start = this rank arrived, end = its parameters are the common ones, with a forward pass in
    # between that hides most of it; value = seconds for which it blocked this rank.
    SYNCHRONIZATION = 8
    # Before the record of a step, if the loader knows them: value = sum of the lengths of this rank's samples, bytes =
    # sum of their squares; 0: not known.
    LENGTHS = 9


class Phase(IntEnum):
    """What the rank is doing. Each phase has its own deadline, so one phase is never mistaken for a hang of another."""

    START = 0  # from the fork to the end of the first step of the round
    TRAIN = 1
    COMPILE = 2
    EVALUATE = 3
    CHECKPOINT = 4
    DATA = 5  # loads data, as declared by the script itself
    RESTORE = 6
    FINISHED = 7
    LOAD = 8  # waits for a batch from its loader


class Collective(IntEnum):
    """The collective of a record or of a rank's state."""

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
    """Progress of the GPU with the collectives that its rank has issued. Most calls return before the GPU begins."""

    NONE = 0  # the rank uses no GPU
    RUNNING = 1  # not checked: the rank makes progress, or its flight recorder is off
    IDLE = 2  # all are complete, or none belongs to NCCL
    SCHEDULED = 3  # the oldest incomplete one has not begun: the rank's own work is queued before it
    STARTED = 4  # it has begun: it waits for its peers


class StateOrigin(IntEnum):
    """Where a rank's state came from at the start of its round, the nearest first."""

    UNKNOWN = 0  # it is not there yet, or the script does not report it
    NOTHING = 1  # there was none: the job is new
    MEMORY = 2  # a snapshot in the memory of its own worker
    PEER = 3  # another worker's memory
    CHECKPOINT = 4  # the volume


SYMMETRIC_COLLECTIVES = frozenset(
    {Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.BARRIER}
)
"""Collectives in which the last rank to arrive made the others wait. A broadcast would blame the innocent."""

NOTICED_LATE = 1
"""Flag of a collective's record: its end was noticed only when the rank entered the next one, so it is an upper bound.
"""

Fields = tuple[tuple[str, str], ...]
"""Fields of a structure without gaps, in order: name, and format as numpy writes it (`<i8`: 8 bytes)."""

RING_RECORD_FIELDS: Fields = (
    ("index", "<u8"),  # position in the rank's history, from 1; 0: never written. Readers detect torn slots by it
    ("kind", "u1"),
    ("phase", "u1"),
    ("collective", "u1"),
    ("flags", "u1"),  # of a step: position in plan.SyncMode of the mode in force
    ("step", "<u4"),
    ("sequence", "<u4"),  # of the collective inside its group
    ("group", "<u4"),  # identity of the communicator; a send's or receive's is that of its channel
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("bytes", "<i8"),
    ("value", "<f8"),
    ("peer", "<i4"),  # global rank, of a send or receive; -1: none, or received from any sender
    ("reserved", "<i4"),
)
"""One record, 64 bytes."""

MAX_ENTERED_GROUPS = 64
"""Number of groups whose progress a rank's state records.

The first slot belongs to no group. Groups that find no free slot count there, without effect.
"""
ENTERED_GROUP_FIELDS: Fields = (("group", "<u8"), ("sequence", "<i8"))
"""One group's progress: its identity, and the last collective that the rank has entered in it."""
ENTERED_GROUP_BYTES = 16

RING_STATE_FIELDS: Fields = (
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
    ("collective", "<i4"),  # the collective it is in now; NONE: outside
    ("group", "<u4"),
    ("sequence", "<i8"),  # of the last collective entered in `group`
    ("collective_since_ns", "<i8"),
    ("collectives_entered", "<i8"),  # in this round, over all groups
    ("checkpoint_step", "<i8"),  # last step whose checkpoint is published on the volume; -1: none
    ("snapshot_step", "<i8"),  # last step held in the shared-memory snapshot; -1: none
    ("restored_step", "<i8"),  # step that this round started from; 0: from the beginning; -1: not yet known
    ("samples", "<i8"),  # of this rank since the job's beginning
    ("global_batch", "<i8"),  # samples per step of the whole job; 0: unknown (a monitored script)
    ("loss", "<f8"),
    ("plan_version", "<i8"),  # version of the plan in force on this rank
    ("checkpoint_request", "<i8"),  # the last checkpoint request this rank has answered
    ("share", "<i8"),  # samples of this rank in a step now; 0: unknown
    ("sync_mode", "<i8"),  # position in plan.SyncMode of the mode in force; -1: a monitored script
    ("bad_loss_step", "<i8"),  # first step of this round whose loss was not finite; -1: none
    ("longest_load_ns", "<i8"),  # longest wait for the loader in this round; 0: none has ended yet
    # Of the collectives on the GPU, polled while the rank makes no progress:
    ("device", "<i4"),  # a Device
    ("device_collective", "<i4"),  # the oldest incomplete one; meaningful if `device` reports it
    ("device_group", "<u4"),  # identity of its communicator; 0: a send or receive
    ("device_sequence", "<u4"),  # in this group
    ("share_granularity", "<i8"),  # samples that each rank's share is a multiple of; 0: unknown
    ("peer", "<i4"),  # global rank that it sends to or receives from now; -1: any sender
    ("owner", "<i4"),  # id of the only process that may take the ring; 0: any may; -1: the first that does
    # Progress in each group: shows a peer whether it has ever entered the collective that others wait in.
    ("entered", f"V{MAX_ENTERED_GROUPS * ENTERED_GROUP_BYTES}"),  # ENTERED_GROUP_FIELDS of each group
    ("total_steps", "<i8"),  # optimizer steps that the script wants of the job; 0: unlimited, or not known
    # When the rank, in this round, … 0: it has not yet, or its script does not report it.
    ("device_ns", "<i8"),  # … had its device
    ("joined_ns", "<i8"),  # … was in its process group, and in those that the library creates at once
    ("restoring_ns", "<i8"),  # … began to load its state
    ("restored_ns", "<i8"),  # … had loaded it
    ("origin", "<i8"),  # a StateOrigin
    ("replica_ranks", "<i8"),  # the number of ranks may be any multiple of it; 0: unknown
    ("replicated_step", "<i8"),  # newest step whose snapshot the loss of any one worker leaves; 0: none, or not known
)
"""The rank's present state, at the beginning of the ring's header page."""

POLLED_DEVICE_FIELDS = ("device", "device_collective", "device_group", "device_sequence")
"""State fields whose change is not progress of the rank."""

RING_MAGIC = 0x504B_5249_4E47_0001
"""Identifies this layout. Fields appended to the state, with 0 for "not known", do not change it."""
RING_HEADER_BYTES = 4096
RING_RECORD_BYTES = 64


_STRUCT_CODES = {"u1": "B", "u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f8": "d"}


def compute_ring_bytes(capacity: int) -> int:
    """Return the size of a ring file that holds the last `capacity` records."""
    return RING_HEADER_BYTES + capacity * RING_RECORD_BYTES


def compute_offsets(fields: Fields) -> dict[str, int]:
    """Return the offset of each field in bytes."""
    offsets, offset = {}, 0
    for name, format_ in fields:
        offsets[name] = offset
        offset += compute_field_bytes(format_)
    return offsets


def compute_field_bytes(format_: str) -> int:
    """Return the size of a field with this format."""
    return int(format_.lstrip("<")[1:])


def build_struct_format(fields: Fields) -> str:
    """Return the same layout for the standard library's `struct`, which writes a record in under a microsecond."""
    return "<" + "".join(_STRUCT_CODES[format_.lstrip("<")] for _, format_ in fields)


RING_STATE_BYTES = sum(compute_field_bytes(format_) for _, format_ in RING_STATE_FIELDS)
