"""The files in the runtime folder of a watched container (docs/architecture/runtime-folder.md).

Processes of others write them, so that they are not trusted: each value read here has its field's type and is within
the bounds declared at the field. Otherwise reading raises InputError, which names the field. Times called `at` or
`…_at` are seconds since the epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from ..errors import InputError
from .decoding import MaxLength, OneOf, Truncated, Within, abbreviate_value, parse_json, read_dataclass
from .reports import MAX_WORKER_RANKS, Count, Position, Seconds

MAX_FILE_BYTES = 256 * 1024
"""Limit of each file. A longer one is not from Pacekeeper."""
STACK_SIGNAL_NUMBER = 44
"""Number of the signal by which a rank is asked for its stacks, on Linux with glibc. A rank that does not catch it
ends."""
MAX_INODE_DIGITS = 20
"""Digits of a 64-bit number."""
MAX_SOCKETS_FILE_BYTES = 1024 * 1024
"""Limit of `sockets.json`: about 60,000 sockets. A rank of a large job has a thousand."""
RECORDINGS = ("Native", "Pure", "StepsOnly")
"""What a rank records: all, by C; all, by Python; only its steps, without collectives and waits for peers."""

Identifier = Annotated[str, MaxLength(200)]
Pid = Annotated[int, Within(1, 2**31)]
ErrorText = Annotated[str, Truncated(8_000)]
Nanoseconds = Annotated[int, Within(0, 2**62)]
FunctionName = Annotated[str, Truncated(500)]
MAX_PROFILE_FILE_BYTES = 2 * 1024 * 1024
"""Limit of a file with a profile window. Most take less than 200 KiB."""
MAX_PROFILE_SAMPLES, MAX_PROFILE_WAITS = 4096, 40_000
_FunctionNumbers = Annotated[tuple[Count, ...], MaxLength(64)]
_Times = Annotated[tuple[Nanoseconds, ...], MaxLength(MAX_PROFILE_WAITS)]
Content = TypeVar("Content")


@dataclass(frozen=True)
class RankDescription:
    """A rank, as it describes itself: `ranks/<slot>.json`."""

    rank: Count  # in its training
    world_size: Annotated[int, Within(1, 2**24)]
    slot: Annotated[int, Within(0, MAX_WORKER_RANKS - 1)]  # in the container
    pid: Pid  # in the container
    restart: Count  # of torchrun, from 0
    started_at: Seconds
    recording: Annotated[str, OneOf(frozenset(RECORDINGS))]
    python: Identifier = ""
    torch: Identifier = ""
    rendezvous: Identifier = ""  # host:port of the training's rendezvous; ":" if the script has none
    run_id: Identifier = ""  # of torchrun
    resumed_from: Position | None = None  # step, by the optimizer's state; None: not known (yet)
    optimizer: Identifier | None = None

    @property
    def training(self) -> tuple[str, str, int]:
        """What is equal for all ranks of one training."""
        return self.rendezvous, self.run_id, self.world_size


@dataclass(frozen=True)
class RankEnd:
    """How a rank's script ended: `ends/<slot>.json`. Without the file, a signal or os._exit ended it."""

    pid: Pid
    at: Seconds
    kind: Identifier = ""  # type of the exception; "": none
    error: ErrorText = ""  # its traceback


@dataclass(frozen=True)
class RankFailure:
    """How torchrun's agent saw a rank fail."""

    pid: Pid
    exit_code: Annotated[int, Within(-1024, 2**31)]  # negative: the signal
    at: Seconds
    message: ErrorText = ""


@dataclass(frozen=True)
class AgentExits:
    """The end of the ranks that an agent had started: `exits/<ns>.json`. Without failures, all ended with code 0."""

    at: Seconds
    failures: dict[str, RankFailure] = field(default_factory=dict)  # by local rank


@dataclass(frozen=True)
class RankProcess:
    """One sample of a rank's process."""

    pid: Pid
    state: Annotated[str, MaxLength(1)] = ""  # letter of /proc/<pid>/stat; "": gone
    cpu_ticks: Count = 0  # of its main thread


@dataclass(frozen=True)
class ProcessSamples:
    """The newest samples of the process monitor: `processes.json`."""

    at: Seconds
    by: Pid  # the process that samples
    oom_kills: Count = 0  # in the container, since its start
    ranks: dict[str, RankProcess] = field(default_factory=dict)  # by slot


@dataclass(frozen=True)
class StackFrame:
    """One call of a stack."""

    file: Annotated[str, Truncated(500)]
    line: Annotated[int, Within(0)] | None
    function: Annotated[str, Truncated(200)]


@dataclass(frozen=True)
class StackAnswer:
    """A rank's main thread: `stacks/<slot>.json`."""

    request: Identifier
    stack: Annotated[tuple[StackFrame, ...], MaxLength(200)] = ()  # outermost call first

    def format(self) -> str:
        """Return the stack as text, innermost call last, in the format of faulthandler."""
        return "\n".join(f'File "{frame.file}", line {frame.line or 0} in {frame.function}' for frame in self.stack)


@dataclass(frozen=True)
class ProfileRecording:
    """What a rank has sampled in a profile window: `profiles/<slot>.json`. Times are ns of CLOCK_MONOTONIC."""

    request: Identifier
    pid: Pid
    began_ns: Nanoseconds
    ended_ns: Nanoseconds
    names: Annotated[tuple[FunctionName, ...], MaxLength(20_000)] = ()  # of functions
    stacks: Annotated[tuple[_FunctionNumbers, ...], MaxLength(MAX_PROFILE_SAMPLES)] = ()  # in `names`, outermost first
    taken_ns: _Times = ()  # of each sample
    ran_ns: _Times = ()  # processor time of the training thread until then; 0: unknown
    stack_of_sample: Annotated[tuple[Count, ...], MaxLength(MAX_PROFILE_SAMPLES)] = ()  # in `stacks`
    wait_begins_ns: _Times = ()  # of each wait for peers
    wait_ends_ns: _Times = ()

    def __post_init__(self) -> None:
        """Raise InputError if columns do not fit each other, or name what does not exist."""
        if not len(self.taken_ns) == len(self.ran_ns) == len(self.stack_of_sample):
            raise InputError("taken_ns, ran_ns, stack_of_sample: must have one entry a sample")
        if len(self.wait_begins_ns) != len(self.wait_ends_ns):
            raise InputError("wait_begins_ns, wait_ends_ns: must have one entry a wait")
        if max(self.stack_of_sample, default=-1) >= len(self.stacks):
            raise InputError("stack_of_sample: names a stack that does not exist")
        if not all(stack and max(stack) < len(self.names) for stack in self.stacks):
            raise InputError("stacks: must be positions in the names, one at least")
        if any(map(operator.gt, self.taken_ns, self.taken_ns[1:])):
            raise InputError("taken_ns: must be in order of time")


@dataclass(frozen=True)
class BrokenReport:
    """Why the library has ended watching a process: `broken/<slot>.json`."""

    pid: Pid
    at: Seconds
    hook: Identifier = ""
    error: Annotated[str, Truncated(2_000)] = ""


def decode_sockets(content: bytes, name: str) -> dict[int, int]:
    """Return the rank that holds each socket, by inode: `sockets.json`. Raises InputError. `name`: of the file."""
    if len(content) > MAX_SOCKETS_FILE_BYTES:
        raise InputError(f"{name}: {len(content)} bytes are more than the limit of {MAX_SOCKETS_FILE_BYTES}")
    data: Any = parse_json(content, name)
    if not isinstance(data, Mapping):
        raise InputError(f"{name}: must be an object")
    for inode, rank in data.items():
        if not (inode.isascii() and inode.isdecimal() and len(inode) <= MAX_INODE_DIGITS):
            raise InputError(f"{name}: {abbreviate_value(inode)} is not an inode")
        if type(rank) is not int or rank < 0:
            raise InputError(f"{name}.{inode}: {abbreviate_value(rank)} is not a rank")
    return {int(inode): rank for inode, rank in data.items()}


def decode_file(cls: type[Content], content: bytes, name: str, max_bytes: int = MAX_FILE_BYTES) -> Content:
    """Read a file's content as `cls`. Raises InputError, which names the field. `name`: of the file, for errors."""
    if len(content) > max_bytes:
        raise InputError(f"{name}: {len(content)} bytes are more than the limit of {max_bytes}")
    data: Any = parse_json(content, name)
    for key, value in data.items() if isinstance(data, Mapping) else ():
        if isinstance(value, Mapping) and len(value) > MAX_WORKER_RANKS:
            raise InputError(f"{name}.{key}: {len(value)} entries are more than the limit of {MAX_WORKER_RANKS}")
    return read_dataclass(cls, data, name)
