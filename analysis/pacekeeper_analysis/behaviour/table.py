"""The patterns of all ranks as arrays: ranks × functions, in seconds of a step.

Read one after the other, so that 10,000 ranks need little more memory than the arrays. A function that few ranks have
stands beside those that most have as long as its time on some rank counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .pattern import ProfileAnswer, TimeOwner, RankPattern, ProcessSetup

MAX_TABLE_COLUMNS = 256
"""Functions of the table. Those that take most time on some rank come first."""

Name = tuple[str, TimeOwner]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FunctionStatistics:
    """Ranks × functions. Rows of ranks without such a pattern hold NaN in `step_seconds`, and 0 elsewhere."""

    step_seconds: NDArray[np.float64]  # of each rank
    seconds: Matrix  # in the function, a step
    errors: Matrix  # one standard error of it
    busy: Matrix  # of these seconds, those in which it used what it is bound to; 0 where that is not known
    spread: Matrix  # seconds × standard deviation of that use
    lengths: NDArray[np.float64]  # of each rank's samples, in sum; 0: not known
    samples: NDArray[np.float64]  # of each rank in a step; 0: not known


@dataclass(frozen=True, eq=False)
class PatternTable:
    """`now`: the window; `early`: the ranks' own early steps."""

    ranks: NDArray[np.int64]
    functions: tuple[Name, ...]
    now: FunctionStatistics
    early: FunctionStatistics
    setups: tuple[ProcessSetup, ...]
    early_setups: tuple[ProcessSetup | None, ...]
    follows_lengths: NDArray[np.float64]
    refused: tuple[str, ...] = ()  # why an answer could not be read, in words

    @property
    def owners(self) -> NDArray[np.uint8]:
        return np.array([owner for _, owner in self.functions], np.uint8)


@dataclass
class _PatternColumns:
    """Of one kind of pattern, as it is read."""

    row: list[NDArray[np.int64]] = field(default_factory=list)
    function: list[NDArray[np.int64]] = field(default_factory=list)
    figures: list[NDArray[np.float32]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    def add(self, row: int, pattern: RankPattern | None, names: dict[Name, int]) -> None:
        self.step_seconds.append(np.nan if pattern is None else pattern.step_seconds)
        self.lengths.append(0.0 if pattern is None else pattern.length)
        self.samples.append(0.0 if pattern is None else pattern.samples)
        if pattern is None or not len(pattern.functions):
            return
        keys = zip(pattern.functions.tolist(), pattern.owners.tolist(), strict=True)
        ids = [names.setdefault((pattern.names[name], TimeOwner(owner)), len(names)) for name, owner in keys]
        self.row.append(np.full(len(ids), row))
        self.function.append(np.array(ids))
        self.figures.append(pattern.figures)

    def join(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        if not self.row:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32)
        return np.concatenate(self.row), np.concatenate(self.function), np.concatenate(self.figures)


def read_table(answers: Iterable[tuple[int, bytes]]) -> PatternTable:
    """`answers`: by rank. One that cannot be read, or is another rank's, costs itself only."""
    names: dict[Name, int] = {}
    now, early = _PatternColumns(), _PatternColumns()
    ranks, refused = list[int](), list[str]()
    setups, early_setups, follows = list[ProcessSetup](), list[ProcessSetup | None](), list[float]()
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
        follows.append(answer.pattern.follows_lengths)
        now.add(row, answer.pattern, names)
        early.add(row, baseline, names)
    columns = _choose_functions(now, len(names))
    places = np.full(len(names) + 1, -1)
    places[columns] = np.arange(len(columns))
    all_names = list(names)
    return PatternTable(
        ranks=np.array(ranks, np.int64),
        functions=tuple(all_names[column] for column in columns.tolist()),
        now=_build_statistics(now, places, len(columns)),
        early=_build_statistics(early, places, len(columns)),
        setups=tuple(setups),
        early_setups=tuple(early_setups),
        follows_lengths=np.array(follows),
        refused=tuple(refused),
    )


def _choose_functions(now: _PatternColumns, names: int) -> NDArray[np.int64]:
    """The functions that the table has, those that take most time first: half of the room is for what most ranks have,
    the rest for what takes most on some rank."""
    _, function, figures = now.join()
    mean, most = np.bincount(function, figures[:, 0], minlength=names), np.zeros(names)
    np.maximum.at(most, function, figures[:, 0])
    common = np.argsort(-mean, kind="stable")[: MAX_TABLE_COLUMNS // 2]
    rare = np.argsort(-most, kind="stable")
    rare = rare[~np.isin(rare, common)][: MAX_TABLE_COLUMNS - len(common)]
    return np.concatenate((common, rare)).astype(np.int64)


def _build_statistics(column: _PatternColumns, places: NDArray[np.int64], functions: int) -> FunctionStatistics:
    row, function, figures = column.join()
    step_seconds = np.array(column.step_seconds)
    place = places[function]
    known = place >= 0
    row, place, figures = row[known], place[known], figures[known]

    def matrix(values: NDArray[np.float32]) -> Matrix:
        filled = np.zeros((len(step_seconds), functions), np.float32)
        np.add.at(filled, (row, place), values * step_seconds[row].astype(np.float32))
        return filled

    share, error, use, spread = figures.T
    return FunctionStatistics(
        step_seconds=step_seconds,
        seconds=matrix(share),
        errors=matrix(error),
        busy=matrix(share * np.maximum(use, 0)),
        spread=matrix(share * np.maximum(spread, 0)),
        lengths=np.array(column.lengths),
        samples=np.array(column.samples),
    )
