"""What is kept of a window for people: the verdict, the named functions on all ranks, and whole patterns of the
suspects and of usual ranks beside them. `report` makes an HTML page of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Self

from ..errors import InputError
from ..reading import Longest, Within, parse_json, read, read_tuple
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

    @classmethod
    def from_json(cls, data: object, path: str) -> Self:
        """Raises InputError that names the field."""
        plot = read(cls, data, path)
        for name in ("seconds", "busy", "early"):
            if len(getattr(plot, name)) != len(plot.ranks):
                raise InputError(f"{path}.{name}: must have a figure for each of the {len(plot.ranks)} ranks")
        return plot


@dataclass(frozen=True)
class Page:
    """All of it. `answers`: of the suspects first, then of the usual ranks."""

    localisation: Localisation
    plots: tuple[Plot, ...]
    answers: tuple[Answer, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """What `page` has written. Raises InputError that names the field."""
        if len(data) > MOST_BYTES:
            raise InputError(f"page: {len(data)} bytes are more than the {MOST_BYTES} that are kept")
        content = parse_json(data, "page")
        if not isinstance(content, Mapping):
            raise InputError("page: must be an object")
        return cls(
            read(Localisation, content.get("localisation"), "localisation"),
            read_tuple(Plot.from_json, content.get("plots"), "plots", MOST_PLOTTED),
            read_tuple(_answer, content.get("answers"), "answers", MOST_SUSPECTS + MOST_USUAL),
        )


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


def _answer(data: object, path: str) -> Answer:
    """As it was sent: text that holds JSON."""
    if not isinstance(data, str):
        raise InputError(f"{path}: must be a string")
    try:
        return Answer.from_bytes(data.encode(errors="replace"))
    except InputError as error:
        raise InputError(f"{path}.{error}") from error


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
