"""The pattern of one rank: in which functions its time went in a window of steps, and how it was set up meanwhile.

A rank writes its pattern as JSON of at most `MOST_BYTES`. Numbers of functions stand in columns, which are read at once
into arrays: patterns of 10,000 ranks are read together. Ranks are not trusted: what is read here keeps within bounds,
or it is an InputError that names the field.
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
from ..plan import SourceNaming
from ..reading import MaxLength, Within, parse_json, read_dataclass, read_tuple
from ..reports import Mode

MAX_RANK_PATTERN_BYTES = 8 * 2**10
"""Of one pattern, as it is written."""
MAX_PROFILE_ANSWER_BYTES = 2 * MAX_RANK_PATTERN_BYTES + 512
"""Of what a rank sends: the window's pattern, and that of its early steps."""
MAX_PATTERN_FUNCTIONS = 128
MAX_PATTERN_NAMES = 1024
MAX_FUNCTION_NAME_LENGTH = 160
MAX_PATTERN_STACKS = 512
MAX_STACK_DEPTH = 64
"""Frames of a stack: of deeper ones the innermost stay."""
NOT_MEASURED = -1.0
"""Of `use` and `spread`: it was not measured."""


class TimeOwner(IntEnum):
    """Who has an instant: the first of them that is at work in it."""

    GPU_COMPUTE = 0
    GPU_MEMORY = 1  # copies and fills
    COLLECTIVE = 2  # a wait for peers in which nothing else is done
    DATA = 3  # a wait for the loader, or the loading itself
    GARBAGE = 4  # Python's collections
    PYTHON = 5  # all else: the innermost Python function


class FunctionPattern(NamedTuple):
    """One function in the window."""

    name: str  # "train.py:augment", "torch/nn/modules/linear.py:Linear.forward", a kernel's, "all_reduce"
    owner: TimeOwner
    share: float  # β: of the window's time, 0 … 1
    error: float  # one standard error of `share`
    use: float  # μ: mean use of what it is bound to, 0 … 1: of a Python function its processor; UNKNOWN
    spread: float  # σ: standard deviation of that; UNKNOWN


class FoldedStack(NamedTuple):
    """A call path that was seen in so many looks; `frames`: outermost first."""

    looks: int
    frames: tuple[str, ...]


@dataclass(frozen=True)
class ProcessSetup:
    """How the rank's process was set up, and what its machine did with it: what tells a wrong setting. 0 and -1: not
    known."""

    threads: Annotated[int, Within(0, 2**16)] = 0  # of an operation, by torch
    processors: Annotated[float, Within(0, 2**16)] = 0.0  # that its control group and affinity leave the worker
    ranks: Annotated[int, Within(0, 2**16)] = 0  # on this worker, who share them
    throttled: Annotated[float, Within(-1, 1)] = -1.0  # of the quota's periods in which it held the worker up
    ran: Annotated[float, Within(-1, 1)] = -1.0  # of the window's time that the training thread was on a processor
    delayed: Annotated[float, Within(-1, 1)] = -1.0  # … that it was ready to run, and others had the processors
    infiniband: bool = False  # the machine has such devices
    anomalies: bool = False  # autograd looks for anomalies: slow, for debugging
    variables: Annotated[tuple[Annotated[str, MaxLength(120)], ...], MaxLength(40)] = ()  # NAME=value, of `REPORTED_VARIABLES`


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
"""Of the environment, the names that slow a job down where they are set wrongly. No others leave the rank."""


@dataclass(frozen=True)
class _PatternHead:
    """What stands beside functions and stacks."""

    rank: Annotated[int, Within(0, 2**24)]
    round: Annotated[int, Within(0)]
    first_step: Annotated[int, Within(0)]
    steps: Annotated[int, Within(1, 2**20)]
    seconds: Annotated[float, Within(0, 1e6)]  # that these steps took, other phases left out
    looks: Annotated[int, Within(0, 2**20)]  # at the Python stack
    mode: Mode = ""  # a plan.SyncMode; "": the script is only watched
    samples: Annotated[int, Within(0, 2**31)] = 0  # of this rank in a step; 0: unknown
    length: Annotated[float, Within(0, 1e24)] = 0.0  # of these samples in sum (tokens, say), a step; 0: unknown
    follows_lengths: Annotated[float, Within(-1, 1)] = 0.0  # correlation of own work with it, by step; 0: unknown
    sources: SourceNaming = SourceNaming.HASH
    setup: ProcessSetup = field(default_factory=ProcessSetup)


@dataclass(frozen=True, eq=False)
class RankPattern(_PatternHead):
    """One rank's window."""

    names: tuple[str, ...] = ()  # that functions and stacks refer to, by position
    functions: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))  # positions in `names`
    owners: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    figures: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    """Of each function: share, error, use, spread."""
    folded: tuple[tuple[int, ...], ...] = ()  # stacks: looks, then frames as positions in `names`, outermost first

    @property
    def step_seconds(self) -> float:
        """Mean."""
        return self.seconds / self.steps

    @property
    def function_patterns(self) -> tuple[FunctionPattern, ...]:
        """Those with most of the time first, as the rank has written them."""
        rows = zip(self.functions.tolist(), self.owners.tolist(), self.figures.tolist(), strict=True)
        return tuple(FunctionPattern(self.names[name], TimeOwner(owner), *figures) for name, owner, figures in rows)

    @property
    def stacks(self) -> tuple[FoldedStack, ...]:
        return tuple(FoldedStack(samples, tuple(self.names[frame] for frame in frames)) for samples, *frames in self.folded)

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it. Figures have four digits behind the point."""
        head = {name: value for name, value in asdict(_extract_head(self)).items() if value != _DEFAULTS.get(name)}
        setup = {name: value for name, value in asdict(self.setup).items() if value != getattr(ProcessSetup, name)}
        columns = np.round(self.figures.astype(np.float64).T, 4).tolist()
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
        """`stacks`: they are read, too; without, thousands of patterns are read in seconds.

        Raises InputError that names the field.
        """
        head = read_dataclass(_PatternHead, data, path)
        assert isinstance(data, Mapping)
        _check_variables(head.setup.variables, path)
        names = _read_names(data.get("names", ()), f"{path}.names")
        owners = _read_owners(data.get("owners", ""), f"{path}.owners")
        functions = _read_column(data.get("functions", ()), f"{path}.functions", len(owners))
        if not ((functions >= 0) & (functions < len(names)) & (functions == np.floor(functions))).all():  # NaN neither
            raise InputError(f"{path}.functions: must be positions in the {len(names)} names")
        figures = [_read_column(data.get(name, ()), f"{path}.{name}", len(owners)) for name in _COLUMNS]
        for name, column, low in zip(_COLUMNS, figures, _LOWEST, strict=True):
            if not ((column >= low) & (column <= 1.0)).all():  # NaN neither
                raise InputError(f"{path}.{name}: must be from {low:g} to 1")
        if figures[0].sum() > 1.01:
            raise InputError(f"{path}.share: {figures[0].sum():.3f} in sum is more than the whole window")
        return cls(
            **{name: getattr(head, name) for name in _PatternHead.__dataclass_fields__},
            names=names,
            functions=functions.astype(np.uint16),
            owners=owners,
            figures=np.stack(figures, axis=1).astype(np.float32),
            folded=_read_stacks(data.get("stacks", ()), f"{path}.stacks", len(names)) if stacks else (),
        )


@dataclass(frozen=True, eq=False)
class ProfileAnswer:
    """What a rank sends of a window. `baseline`: the pattern of early steps, under the same shares and mode; None: the
    rank has none."""

    pattern: RankPattern
    baseline: RankPattern | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all functions in it."""
        return (*self.pattern.names, *(self.baseline.names if self.baseline is not None else ()))

    def rename_functions(self, rename: Callable[[str], str], sources: SourceNaming) -> ProfileAnswer:
        """With other names for the functions."""
        return ProfileAnswer(*(_rename_functions(each, rename, sources) for each in (self.pattern, self.baseline)))

    def to_bytes(self) -> bytes:
        """At most MAX_PROFILE_ANSWER_BYTES: stacks make room where names have become longer."""
        patterns = {"pattern": self.pattern, "baseline": self.baseline}
        data = encode_compact_json({name: None if each is None else each.to_json() for name, each in patterns.items()})
        if len(data) <= MAX_PROFILE_ANSWER_BYTES:
            return data
        return ProfileAnswer(*(_drop_stacks(each) for each in (self.pattern, self.baseline))).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, *, stacks: bool = True) -> Self:
        """Raises InputError that names the field."""
        if len(data) > MAX_PROFILE_ANSWER_BYTES:
            raise InputError(f"answer: {len(data)} bytes are more than the {MAX_PROFILE_ANSWER_BYTES} that are taken")
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
    """As JSON, without blanks."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _rename_functions(pattern: RankPattern | None, rename: Callable[[str], str], sources: SourceNaming) -> Any:
    return None if pattern is None else replace(pattern, names=tuple(map(rename, pattern.names)), sources=sources)


def _drop_stacks(pattern: RankPattern | None) -> Any:
    return None if pattern is None else replace(pattern, folded=pattern.folded[: len(pattern.folded) * 3 // 4])


_COLUMNS = ("share", "error", "use", "spread")
_LOWEST = (0.0, 0.0, NOT_MEASURED, NOT_MEASURED)
_DEFAULTS = {"mode": "", "samples": 0, "length": 0.0, "follows_lengths": 0.0, "setup": None}


def _extract_head(pattern: RankPattern) -> _PatternHead:
    return _PatternHead(**{name: getattr(pattern, name) for name in _PatternHead.__dataclass_fields__})


def _read_names(data: object, path: str) -> tuple[str, ...]:
    return read_tuple(_read_name, data, path, MAX_PATTERN_NAMES)


def _read_name(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_FUNCTION_NAME_LENGTH or not value.isprintable():
        raise InputError(f"{path}: must be {MAX_FUNCTION_NAME_LENGTH} printable characters at most")
    return value


def _read_owners(data: object, path: str) -> NDArray[np.uint8]:
    """A digit for each function."""
    if not isinstance(data, str) or len(data) > MAX_PATTERN_FUNCTIONS or not (data.isascii() and (data or "0").isdigit()):
        raise InputError(f"{path}: must be a digit a function, for {MAX_PATTERN_FUNCTIONS} functions at most")
    owners = np.frombuffer(data.encode(), np.uint8) - np.uint8(ord("0"))
    if owners.size and owners.max() > max(TimeOwner):
        raise InputError(f"{path}: {owners.max()} is no owner")
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


def _read_stacks(data: object, path: str, names: int) -> tuple[tuple[int, ...], ...]:
    def stack(value: object, where: str) -> tuple[int, ...]:
        numbers = read_tuple(_read_whole_number, value, where, MAX_STACK_DEPTH + 1)
        if len(numbers) < 2 or numbers[0] < 1 or max(numbers[1:]) >= names:
            raise InputError(f"{where}: must be a number of looks, and then positions in the names")
        return numbers

    return read_tuple(stack, data, path, MAX_PATTERN_STACKS)


def _read_whole_number(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InputError(f"{path}: must be a whole number from 0 on")
    return value


def _check_variables(variables: Sequence[str], path: str) -> None:
    for given in variables:
        if given.partition("=")[0] not in REPORTED_VARIABLES:
            raise InputError(
                f"{path}.setup.variables: {given.partition('=')[0][:40]!r} is not one that a rank may send"
            )
