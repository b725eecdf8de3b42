"""What is kept of a window for people: the verdict, the named functions on all ranks, and whole patterns of the
suspects and of usual ranks beside them. A page with flame graphs can be made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

from ..errors import InputError
from ..reading import Longest, Within, read
from .localise import Localisation
from .pattern import LONGEST_NAME, Answer, Owner, compact
from .table import Table

MOST_BYTES = 900 * 2**10
MOST_SUSPECTS, MOST_USUAL = 12, 4
MOST_PLOTTED, MOST_POINTS = 4, 2000
"""Functions, and ranks of each."""

Figures = Annotated[tuple[Annotated[float, Within(-1, 1e6)], ...], Longest(MOST_POINTS)]


@dataclass(frozen=True)
class Plot:
    """One function on many ranks: the suspects, and others evenly. The lists are equally long."""

    function: Annotated[str, Longest(LONGEST_NAME)]
    owner: Annotated[int, Within(0, max(Owner))]
    ranks: Annotated[tuple[Annotated[int, Within(0)], ...], Longest(MOST_POINTS)]
    seconds: Figures  # of a step, in the window
    busy: Figures  # of these, those in which it used what it is bound to
    early: Figures  # seconds in the early steps; -1: not known


@dataclass(frozen=True)
class Page:
    """All of it. `answers`: of the suspects first, then of the usual ranks."""

    localisation: Mapping[str, Any]  # as `Localisation` is, as plain values
    plots: tuple[Plot, ...]
    answers: tuple[Answer, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """What `page` has written. Raises InputError."""
        try:
            content = json.loads(data)
            plots = tuple(read(Plot, plot, f"plots[{i}]") for i, plot in enumerate(content["plots"]))
            answers = tuple(Answer.from_bytes(answer.encode()) for answer in content["answers"])
            return cls(dict(content["localisation"]), plots, answers)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"this is no page of a behaviour window: {error!r}") from error


def page(localisation: Localisation, table: Table, answers: Mapping[int, bytes]) -> bytes:
    """As JSON, of MOST_BYTES at most. `answers`: by rank, as they were sent."""
    shown = [*localisation.suspects[:MOST_SUSPECTS], *localisation.usual[:MOST_USUAL]]
    whole = [answers[rank].decode(errors="replace") for rank in dict.fromkeys(shown) if rank in answers]
    content = {
        "localisation": asdict(localisation),
        "plots": [asdict(plot) for plot in _plots(localisation, table)],
        "answers": whole,
    }
    data = compact(content)
    while len(data) > MOST_BYTES and whole:
        whole.pop()
        data = compact(content)
    return data


def _plots(localisation: Localisation, table: Table) -> list[Plot]:
    """Of the functions that are named; where none is, of those that take most time."""
    named = [explanation.function for explanation in localisation.explanations if explanation.function]
    names = dict.fromkeys([*named, *(name for name, _ in table.functions)])
    rows = _rows(localisation, table)
    columns = [next(i for i, (name, _) in enumerate(table.functions) if name == wanted) for wanted in names]
    return [_plot(table, column, rows) for column in columns[:MOST_PLOTTED]]


def _plot(table: Table, column: int, rows: list[int]) -> Plot:
    name, owner = table.functions[column]
    early = table.early.step_seconds
    return Plot(
        function=name,
        owner=int(owner),
        ranks=tuple(int(table.ranks[row]) for row in rows),
        seconds=tuple(round(float(table.now.seconds[row, column]), 5) for row in rows),
        busy=tuple(round(float(table.now.busy[row, column]), 5) for row in rows),
        early=tuple(
            round(float(table.early.seconds[row, column]), 5) if early[row] == early[row] else -1.0 for row in rows
        ),
    )


def _rows(localisation: Localisation, table: Table) -> list[int]:
    place = {int(rank): row for row, rank in enumerate(table.ranks)}
    suspects = [place[rank] for rank in localisation.suspects if rank in place]
    every = max(1, -(-len(table.ranks) // (MOST_POINTS - len(suspects))))
    return sorted({*suspects, *range(0, len(table.ranks), every)})
