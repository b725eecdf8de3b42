"""The patterns of all ranks as arrays: ranks × functions, in seconds per step.

Patterns are read one after another, so that 10,000 ranks need little more memory than the arrays. The table contains
the functions that most ranks have, and functions of few ranks that take much time there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .pattern import ProcessSetup, ProfileAnswer, RankPattern, TimeOwner

MAX_TABLE_COLUMNS = 256
"""Upper limit of functions of the table. Those with the most time on some rank come first."""

Name = tuple[str, TimeOwner]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FunctionStatistics:
    """Statistics of ranks × functions. Rows of ranks without a pattern hold NaN in `step_seconds`, and 0 elsewhere."""

    step_seconds: NDArray[np.float64]  # of each rank
    seconds: Matrix  # in the function, per step
    errors: Matrix  # one standard error of `seconds`
    busy: Matrix  # the part of these seconds in which it used its resource; 0 if not known
    spread: Matrix  # seconds × standard deviation of the use
    lengths: NDArray[np.float64]  # sum over each rank's samples; 0: not known
    samples: NDArray[np.float64]  # of each rank per step; 0: not known


@dataclass(frozen=True, eq=False)
class PatternTable:
    """The table. `now` is the window, and `early` the ranks' own early steps."""

    ranks: NDArray[np.int64]
    functions: tuple[Name, ...]
    now: FunctionStatistics
    early: FunctionStatistics
    setups: tuple[ProcessSetup, ...]
    early_setups: tuple[ProcessSetup | None, ...]
    follows_lengths: NDArray[np.float64]
    refused: tuple[str, ...] = ()  # why an answer could not be read, for people

    @property
    def owners(self) -> NDArray[np.uint8]:
        return np.array([owner for _, owner in self.functions], np.uint8)


@dataclass
class _PatternColumns:
    """Patterns of one kind, as they are read."""

    row: list[NDArray[np.int64]] = field(default_factory=list)
    function: list[NDArray[np.int64]] = field(default_factory=list)
    statistics: list[NDArray[np.float32]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    def add(self, row: int, pattern: RankPattern | None, names: dict[Name, int]) -> None:
        self.step_seconds.append(np.nan if pattern is None else pattern.step_seconds)
        self.lengths.append(0.0 if pattern is None else pattern.length or 0.0)
        self.samples.append(0.0 if pattern is None else pattern.samples or 0.0)
        if pattern is None or not len(pattern.functions):
            return
        keys = zip(pattern.functions.tolist(), pattern.owners.tolist(), strict=True)
        ids = [names.setdefault((pattern.names[name], TimeOwner(owner)), len(names)) for name, owner in keys]
        self.row.append(np.full(len(ids), row))
        self.function.append(np.array(ids))
        self.statistics.append(pattern.statistics)

    def join(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        if not self.row:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32)
        return np.concatenate(self.row), np.concatenate(self.function), np.concatenate(self.statistics)


def read_table(answers: Iterable[tuple[int, bytes]]) -> PatternTable:
    """Read the answers by rank. Invalid answers, or those of another rank, are left out."""
    names: dict[Name, int] = {}
    now, early = _PatternColumns(), _PatternColumns()
    ranks, refused = list[int](), list[str]()
    setups, early_setups, follows_lengths = list[ProcessSetup](), list[ProcessSetup | None](), list[float]()
    for rank, data in answers:
        try:
            answer = ProfileAnswer.from_bytes(data, stacks=False)
            if answer.pattern.rank != rank:
                raise InputError(f"pattern.rank: {answer.pattern.rank} is not the sender's")
        except InputError as error:
            refused.append(f"rank {rank}: {error}")
            continue
        row, baseline = len(ranks), answer.baseline
        ranks.append(rank)
        setups.append(answer.pattern.setup)
        early_setups.append(None if baseline is None else baseline.setup)
        follows_lengths.append(answer.pattern.follows_lengths or 0.0)
        now.add(row, answer.pattern, names)
        early.add(row, baseline, names)
    columns = _choose_functions(now, len(names))
    positions = np.full(len(names) + 1, -1)
    positions[columns] = np.arange(len(columns))
    all_names = list(names)
    return PatternTable(
        ranks=np.array(ranks, np.int64),
        functions=tuple(all_names[column] for column in columns.tolist()),
        now=_build_statistics(now, positions, len(columns)),
        early=_build_statistics(early, positions, len(columns)),
        setups=tuple(setups),
        early_setups=tuple(early_setups),
        follows_lengths=np.array(follows_lengths),
        refused=tuple(refused),
    )


def _choose_functions(now: _PatternColumns, name_count: int) -> NDArray[np.int64]:
    """Return the functions of the table, those with the most time first.

    Half of the table is for functions that most ranks have, the rest for those with the most time on some rank.
    """
    _, function, statistics = now.join()
    mean, largest = np.bincount(function, statistics[:, 0], minlength=name_count), np.zeros(name_count)
    np.maximum.at(largest, function, statistics[:, 0])
    common = np.argsort(-mean, kind="stable")[: MAX_TABLE_COLUMNS // 2]
    rare = np.argsort(-largest, kind="stable")
    rare = rare[~np.isin(rare, common)][: MAX_TABLE_COLUMNS - len(common)]
    return np.concatenate((common, rare)).astype(np.int64)


def _build_statistics(
    columns: _PatternColumns, positions: NDArray[np.int64], function_count: int
) -> FunctionStatistics:
    row, function, statistics = columns.join()
    step_seconds = np.array(columns.step_seconds)
    position = positions[function]
    selected = position >= 0
    row, position, statistics = row[selected], position[selected], statistics[selected]

    def matrix(values: NDArray[np.float32]) -> Matrix:
        filled = np.zeros((len(step_seconds), function_count), np.float32)
        np.add.at(filled, (row, position), values * step_seconds[row].astype(np.float32))
        return filled

    share, error, use, spread = statistics.T
    return FunctionStatistics(
        step_seconds=step_seconds,
        seconds=matrix(share),
        errors=matrix(error),
        busy=matrix(share * np.maximum(use, 0)),
        spread=matrix(share * np.maximum(spread, 0)),
        lengths=np.array(columns.lengths),
        samples=np.array(columns.samples),
    )
