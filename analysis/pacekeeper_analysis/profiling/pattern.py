"""The pattern of one rank: in which functions its time went in a window of steps, and the setup of its process.

A rank writes its pattern as JSON of at most MAX_RANK_PATTERN_BYTES. Numbers of functions are columns, which are read
directly into arrays, so patterns of 10,000 ranks can be read together. Ranks are not trusted: each value read here is
within its bounds, or reading raises InputError, which names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..protocol.decoding import MaxLength, Within, parse_json, read_dataclass, read_tuple
from ..protocol.reports import Mode
from ..protocol.requests import SourceNaming

MAX_RANK_PATTERN_BYTES = 8 * 2**10
"""Upper limit of one encoded pattern."""
MAX_PROFILE_ANSWER_BYTES = 2 * MAX_RANK_PATTERN_BYTES + 512
"""Upper limit of a rank's answer: the window's pattern, and that of its early steps."""
MAX_PATTERN_FUNCTIONS = 128
MAX_PATTERN_NAMES = 1024
MAX_FUNCTION_NAME_LENGTH = 160
MAX_PATTERN_STACKS = 512
MAX_STACK_DEPTH = 64
"""Upper limit of frames of a stack. Of deeper stacks the innermost frames are kept."""
MAX_SHARES_SUM = 1.01
"""Greatest sum of the functions' shares of a window. Rounding makes it greater than 1."""
NOT_MEASURED = -1.0
"""Value of `use` and `spread` if they were not measured."""


class TimeOwner(IntEnum):
    """The owner of an instant: the first of these that is active in it."""

    GPU_COMPUTE = 0
    GPU_MEMORY = 1  # copies and fills
    COLLECTIVE = 2  # a wait for peers without other work
    DATA = 3  # a wait for the loader, or the loading itself
    GC = 4  # Python's collections
    PYTHON = 5  # everything else: the innermost Python function


class FunctionPattern(NamedTuple):
    """One function in the window."""

    name: str  # "train.py:augment", "torch/nn/modules/linear.py:Linear.forward", a kernel's, "all_reduce"
    owner: TimeOwner
    share: float  # β: share of the window's time, 0 … 1
    error: float  # one standard error of `share`
    use: float  # μ: mean use of its resource, 0 … 1 (the CPU, for a Python function); or NOT_MEASURED
    spread: float  # σ: standard deviation of the use; or NOT_MEASURED


class FoldedStack(NamedTuple):
    """A call path and the number of samples that show it. `frames` are outermost first."""

    sample_count: int
    frames: tuple[str, ...]


@dataclass(frozen=True)
class ProcessSetup:
    """The setup of the rank's process and the behavior of its machine, to detect wrong settings.

    None means not known.
    """

    threads: Annotated[int, Within(1, 2**16)] | None = None  # of one operation, in torch
    processors: Annotated[float, Within(0, 2**16)] | None = None  # CPUs that cgroup and affinity leave to the worker
    ranks: Annotated[int, Within(1, 2**16)] | None = None  # on this worker, which share the CPUs
    throttled: Annotated[float, Within(0, 1)] | None = None  # share of the quota's periods that throttled the worker
    ran: Annotated[float, Within(0, 1)] | None = None  # share of the window that the training thread was on a CPU
    delayed: Annotated[float, Within(0, 1)] | None = None  # … that it was ready to run while others had the CPUs
    infiniband: bool = False  # whether the machine has such devices
    anomalies: bool = False  # whether autograd detects anomalies: slow, for debugging
    variables: Annotated[
        tuple[Annotated[str, MaxLength(120)], ...], MaxLength(40)
    ] = ()  # NAME=value, of `REPORTED_VARIABLES`


REPORTED_VARIABLES = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"),
        *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG"),
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
        *("NCCL_NET_GDR_LEVEL", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MAX_NCHANNELS", "NCCL_DEBUG"),
        *("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
    }
)
"""Environment variables that slow a job down if they are set wrongly. No others leave the rank."""


@dataclass(frozen=True)
class _PatternHead:
    """The pattern without functions and stacks."""

    rank: Annotated[int, Within(0, 2**24)]
    round: Annotated[int, Within(0)]
    first_step: Annotated[int, Within(0)]
    steps: Annotated[int, Within(1, 2**20)]
    seconds: Annotated[float, Within(0, 1e6)]  # duration of these steps, without other phases
    stack_samples: Annotated[int, Within(0, 2**20)]  # number of samples of the Python stack
    mode: Mode = ""  # a plan.SyncMode; "": a monitored script
    samples: Annotated[int, Within(1, 2**31)] | None = None  # of this rank per step
    length: Annotated[float, Within(0, 1e24)] | None = None  # sum over these samples per step (for example tokens)
    follows_lengths: Annotated[float, Within(-1, 1)] | None = None  # correlation of own work with `length`
    sources: SourceNaming = SourceNaming.HASH
    setup: ProcessSetup = field(default_factory=ProcessSetup)


@dataclass(frozen=True, eq=False)
class RankPattern(_PatternHead):
    """One rank's window."""

    names: tuple[str, ...] = ()  # functions and stacks refer to them by position
    functions: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))  # positions in `names`
    owners: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    statistics: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    """For each function: share, error, use, spread."""
    folded: tuple[tuple[int, ...], ...] = ()  # stacks: samples, then frames (positions in `names`), outermost first

    @property
    def step_seconds(self) -> float:
        """The mean seconds per step."""
        return self.seconds / self.steps

    @property
    def function_patterns(self) -> tuple[FunctionPattern, ...]:
        """The functions, the largest share first, as the rank wrote them."""
        rows = zip(self.functions.tolist(), self.owners.tolist(), self.statistics.tolist(), strict=True)
        return tuple(
            FunctionPattern(self.names[name], TimeOwner(owner), *statistics) for name, owner, statistics in rows
        )

    @property
    def stacks(self) -> tuple[FoldedStack, ...]:
        return tuple(
            FoldedStack(samples, tuple(self.names[frame] for frame in frames)) for samples, *frames in self.folded
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON that `from_json` reads. Numbers have four digits after the point."""
        head = {name: value for name, value in asdict(_extract_head(self)).items() if value != _DEFAULTS.get(name)}
        setup = {name: value for name, value in asdict(self.setup).items() if value != getattr(ProcessSetup, name)}
        columns = np.round(self.statistics.astype(np.float64).T, 4).tolist()
        return {
            **head,
            "setup": setup,
            "names": list(self.names),
            "functions": self.functions.tolist(),
            "owners": "".join(map(str, self.owners.tolist())),
            **dict(zip(_COLUMNS, columns or [[]] * 4, strict=True)),
            "stacks": [list(stack) for stack in self.folded],
        }

    @classmethod
    def from_json(cls, data: object, path: str = "pattern", *, stacks: bool = True) -> Self:
        """Read a pattern. Raises InputError, which names the field.

        Without `stacks`, they are not read, so that thousands of patterns take only seconds.
        """
        head = read_dataclass(_PatternHead, data, path)
        assert isinstance(data, Mapping)
        _check_variables(head.setup.variables, path)
        names = _read_names(data.get("names", ()), f"{path}.names")
        owners = _read_owners(data.get("owners", ""), f"{path}.owners")
        functions = _read_column(data.get("functions", ()), f"{path}.functions", len(owners))
        if not ((functions >= 0) & (functions < len(names)) & (functions == np.floor(functions))).all():  # or NaN
            raise InputError(f"{path}.functions: must be positions in the {len(names)} names")
        statistics = [_read_column(data.get(name, ()), f"{path}.{name}", len(owners)) for name in _COLUMNS]
        for name, column, low in zip(_COLUMNS, statistics, _LOWEST, strict=True):
            if not ((column >= low) & (column <= 1.0)).all():  # rejects NaN, too
                raise InputError(f"{path}.{name}: must be from {low:g} to 1")
        if statistics[0].sum() > MAX_SHARES_SUM:
            raise InputError(f"{path}.share: {statistics[0].sum():.3f} in total is more than the whole window")
        return cls(
            **{name: getattr(head, name) for name in _PatternHead.__dataclass_fields__},
            names=names,
            functions=functions.astype(np.uint16),
            owners=owners,
            statistics=np.stack(statistics, axis=1).astype(np.float32),
            folded=_read_stacks(data.get("stacks", ()), f"{path}.stacks", len(names)) if stacks else (),
        )


@dataclass(frozen=True, eq=False)
class ProfileAnswer:
    """A rank's answer for a window.

    `baseline` is the pattern of early steps, under the same shares and mode. None if the rank has none.
    """

    pattern: RankPattern
    baseline: RankPattern | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all functions in it."""
        return (*self.pattern.names, *(self.baseline.names if self.baseline is not None else ()))

    def rename_functions(self, rename: Callable[[str], str], sources: SourceNaming) -> ProfileAnswer:
        """Return the answer with renamed functions."""
        return ProfileAnswer(
            *(_rename_functions(pattern, rename, sources) for pattern in (self.pattern, self.baseline))
        )

    def to_bytes(self) -> bytes:
        """Encode the answer in at most MAX_PROFILE_ANSWER_BYTES. Stacks are dropped if longer names need the room."""
        patterns = {"pattern": self.pattern, "baseline": self.baseline}
        data = encode_compact_json(
            {name: None if pattern is None else pattern.to_json() for name, pattern in patterns.items()}
        )
        if len(data) <= MAX_PROFILE_ANSWER_BYTES:
            return data
        return ProfileAnswer(*(_drop_stacks(pattern) for pattern in (self.pattern, self.baseline))).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, *, stacks: bool = True) -> Self:
        """Decode an answer. Raises InputError, which names the field."""
        if len(data) > MAX_PROFILE_ANSWER_BYTES:
            raise InputError(f"answer: {len(data)} bytes are more than the limit of {MAX_PROFILE_ANSWER_BYTES}")
        content = parse_json(data, "answer")
        if not isinstance(content, Mapping):
            raise InputError("answer: must be an object")
        pattern = RankPattern.from_json(content.get("pattern"), "pattern", stacks=stacks)
        early = content.get("baseline")
        baseline = None if early is None else RankPattern.from_json(early, "baseline", stacks=stacks)
        if baseline is not None and baseline.rank != pattern.rank:
            raise InputError(f"baseline.rank: {baseline.rank} is not the rank of the pattern, {pattern.rank}")
        return cls(pattern, baseline)


def encode_compact_json(data: Mapping[str, Any]) -> bytes:
    """Encode as JSON without blanks."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _rename_functions(pattern: RankPattern | None, rename: Callable[[str], str], sources: SourceNaming) -> Any:
    return None if pattern is None else replace(pattern, names=tuple(map(rename, pattern.names)), sources=sources)


def _drop_stacks(pattern: RankPattern | None) -> Any:
    return None if pattern is None else replace(pattern, folded=pattern.folded[: len(pattern.folded) * 3 // 4])


_COLUMNS = ("share", "error", "use", "spread")
_LOWEST = (0.0, 0.0, NOT_MEASURED, NOT_MEASURED)
_DEFAULTS = {"mode": "", "samples": None, "length": None, "follows_lengths": None, "setup": None}


def _extract_head(pattern: RankPattern) -> _PatternHead:
    return _PatternHead(**{name: getattr(pattern, name) for name in _PatternHead.__dataclass_fields__})


def _read_names(data: object, path: str) -> tuple[str, ...]:
    return read_tuple(_read_name, data, path, MAX_PATTERN_NAMES)


def _read_name(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_FUNCTION_NAME_LENGTH or not value.isprintable():
        raise InputError(f"{path}: must be {MAX_FUNCTION_NAME_LENGTH} printable characters at most")
    return value


def _read_owners(data: object, path: str) -> NDArray[np.uint8]:
    """Read one digit per function."""
    if (
        not isinstance(data, str)
        or len(data) > MAX_PATTERN_FUNCTIONS
        or not (data.isascii() and (data or "0").isdigit())
    ):
        raise InputError(f"{path}: must be a digit a function, for {MAX_PATTERN_FUNCTIONS} functions at most")
    owners = np.frombuffer(data.encode(), np.uint8) - np.uint8(ord("0"))
    if owners.size and owners.max() > max(TimeOwner):
        raise InputError(f"{path}: {owners.max()} is not an owner")
    return owners


def _read_column(data: object, path: str, length: int) -> NDArray[np.float64]:
    if not isinstance(data, list) or len(data) != length:
        raise InputError(f"{path}: must be a list of {length} numbers, one a function")
    try:
        column = np.array(data, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: must be a list of numbers") from error
    if column.shape != (length,):
        raise InputError(f"{path}: must be a list of numbers")
    return column


def _read_stacks(data: object, path: str, name_count: int) -> tuple[tuple[int, ...], ...]:
    def stack(value: object, stack_path: str) -> tuple[int, ...]:
        numbers = read_tuple(_read_whole_number, value, stack_path, MAX_STACK_DEPTH + 1)
        if len(numbers) <= 1 or numbers[0] < 1 or max(numbers[1:]) >= name_count:
            raise InputError(f"{stack_path}: must be a number of samples, followed by positions in the names")
        return numbers

    return read_tuple(stack, data, path, MAX_PATTERN_STACKS)


def _read_whole_number(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InputError(f"{path}: must be a whole number from 0 on")
    return value


def _check_variables(variables: Sequence[str], path: str) -> None:
    for variable in variables:
        if variable.partition("=")[0] not in REPORTED_VARIABLES:
            raise InputError(
                f"{path}.setup.variables: {variable.partition('=')[0][:40]!r} is not one that a rank may send"
            )
