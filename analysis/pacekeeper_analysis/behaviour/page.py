"""What is kept of a window for people: the verdict, the named functions on all ranks, and whole patterns of the
suspects and of usual ranks beside them. `report` makes an HTML page of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Self

from ..errors import InputError
from ..reading import MaxLength, Within, parse_json, read_dataclass, read_tuple
from .localise import Localization
from .pattern import MAX_FUNCTION_NAME_LENGTH, ProfileAnswer, TimeOwner, encode_compact_json
from .table import PatternTable

MAX_PAGE_BYTES = 900 * 2**10
MAX_SUSPECTS_KEPT, MAX_USUAL_KEPT = 12, 4
MAX_FUNCTIONS_PLOTTED, MAX_PLOT_POINTS = 4, 2000
"""Functions, and ranks of each."""

PlotValues = Annotated[tuple[Annotated[float, Within(-1, 1e6)], ...], MaxLength(MAX_PLOT_POINTS)]


@dataclass(frozen=True)
class FunctionPlot:
    """One function on many ranks: the suspects, and others evenly. The lists are equally long."""

    function: Annotated[str, MaxLength(MAX_FUNCTION_NAME_LENGTH)]
    owner: Annotated[int, Within(0, max(TimeOwner))]
    ranks: Annotated[tuple[Annotated[int, Within(0)], ...], MaxLength(MAX_PLOT_POINTS)]
    seconds: PlotValues  # of a step, in the window
    busy: PlotValues  # of these, those in which it used what it is bound to
    early: PlotValues  # seconds in the early steps; -1: not known

    @classmethod
    def from_json(cls, data: object, path: str) -> Self:
        """Raises InputError that names the field."""
        plot = read_dataclass(cls, data, path)
        for name in ("seconds", "busy", "early"):
            if len(getattr(plot, name)) != len(plot.ranks):
                raise InputError(f"{path}.{name}: must have a figure for each of the {len(plot.ranks)} ranks")
        return plot


@dataclass(frozen=True)
class ProfilePage:
    """All of it. `answers`: of the suspects first, then of the usual ranks."""

    localisation: Localization
    plots: tuple[FunctionPlot, ...]
    answers: tuple[ProfileAnswer, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """What `page` has written. Raises InputError that names the field."""
        if len(data) > MAX_PAGE_BYTES:
            raise InputError(f"page: {len(data)} bytes are more than the {MAX_PAGE_BYTES} that are kept")
        content = parse_json(data, "page")
        if not isinstance(content, Mapping):
            raise InputError("page: must be an object")
        return cls(
            read_dataclass(Localization, content.get("localisation"), "localisation"),
            read_tuple(FunctionPlot.from_json, content.get("plots"), "plots", MAX_FUNCTIONS_PLOTTED),
            read_tuple(_read_answer, content.get("answers"), "answers", MAX_SUSPECTS_KEPT + MAX_USUAL_KEPT),
        )


def write_profile_page(localisation: Localization, table: PatternTable, answers: Mapping[int, bytes]) -> bytes:
    """As JSON, of MOST_BYTES at most. `answers`: by rank, as they were sent."""
    shown = [*localisation.suspects[:MAX_SUSPECTS_KEPT], *localisation.usual[:MAX_USUAL_KEPT]]
    whole = [answers[rank].decode(errors="replace") for rank in dict.fromkeys(shown) if rank in answers]
    content = {
        "localisation": asdict(localisation),
        "plots": [asdict(plot) for plot in _build_plots(localisation, table)],
        "answers": whole,
    }
    data = encode_compact_json(content)
    while len(data) > MAX_PAGE_BYTES and whole:
        whole.pop()
        data = encode_compact_json(content)
    return data


def _read_answer(data: object, path: str) -> ProfileAnswer:
    """As it was sent: text that holds JSON."""
    if not isinstance(data, str):
        raise InputError(f"{path}: must be a string")
    try:
        return ProfileAnswer.from_bytes(data.encode(errors="replace"))
    except InputError as error:
        raise InputError(f"{path}.{error}") from error


def _build_plots(localisation: Localization, table: PatternTable) -> list[FunctionPlot]:
    """Of the functions that are named; where none is, of those that take most time."""
    named = [explanation.function for explanation in localisation.explanations if explanation.function]
    names = dict.fromkeys([*named, *(name for name, _ in table.functions)])
    rows = _select_rows(localisation, table)
    columns = [next(i for i, (name, _) in enumerate(table.functions) if name == wanted) for wanted in names]
    return [_build_plot(table, column, rows) for column in columns[:MAX_FUNCTIONS_PLOTTED]]


def _build_plot(table: PatternTable, column: int, rows: list[int]) -> FunctionPlot:
    name, owner = table.functions[column]
    early = table.early.step_seconds
    return FunctionPlot(
        function=name,
        owner=int(owner),
        ranks=tuple(int(table.ranks[row]) for row in rows),
        seconds=tuple(round(float(table.now.seconds[row, column]), 5) for row in rows),
        busy=tuple(round(float(table.now.busy[row, column]), 5) for row in rows),
        early=tuple(
            round(float(table.early.seconds[row, column]), 5) if early[row] == early[row] else -1.0 for row in rows
        ),
    )


def _select_rows(localisation: Localization, table: PatternTable) -> list[int]:
    place = {int(rank): row for row, rank in enumerate(table.ranks)}
    suspects = [place[rank] for rank in localisation.suspects if rank in place]
    every = max(1, -(-len(table.ranks) // (MAX_PLOT_POINTS - len(suspects))))
    return sorted({*suspects, *range(0, len(table.ranks), every)})
