"""The stored result of a window: the diagnosis, the named functions on all ranks, and some whole patterns.

The patterns are those of the suspects and of usual ranks for comparison. `report` renders an HTML page from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Self

from ..errors import InputError
from ..protocol.decoding import MaxLength, Within, parse_json, read_dataclass, read_tuple
from .localize import Localization
from .pattern import MAX_FUNCTION_NAME_LENGTH, ProfileAnswer, TimeOwner, encode_compact_json
from .table import PatternTable

MAX_PAGE_BYTES = 900 * 2**10
MAX_SUSPECTS_KEPT, MAX_USUAL_KEPT = 12, 4
MAX_FUNCTIONS_PLOTTED, MAX_PLOT_POINTS = 4, 2000
"""Upper limits of plotted functions, and of the ranks of each."""

PlotValues = Annotated[tuple[Annotated[float, Within(-1, 1e6)], ...], MaxLength(MAX_PLOT_POINTS)]


@dataclass(frozen=True)
class FunctionPlot:
    """One function on many ranks: the suspects, and others at even intervals. The lists have equal lengths."""

    function: Annotated[str, MaxLength(MAX_FUNCTION_NAME_LENGTH)]
    owner: Annotated[int, Within(0, max(TimeOwner))]
    ranks: Annotated[tuple[Annotated[int, Within(0)], ...], MaxLength(MAX_PLOT_POINTS)]
    seconds: PlotValues  # per step, in the window
    busy: PlotValues  # the part of them in which it used its resource
    early: PlotValues  # seconds in the early steps; -1: not known

    @classmethod
    def from_json(cls, data: object, path: str) -> Self:
        """Read a plot. Raises InputError, which names the field."""
        plot = read_dataclass(cls, data, path)
        for name in ("seconds", "busy", "early"):
            if len(getattr(plot, name)) != len(plot.ranks):
                raise InputError(f"{path}.{name}: must have a number for each of the {len(plot.ranks)} ranks")
        return plot


@dataclass(frozen=True)
class ProfilePage:
    """The stored content. `answers` are those of the suspects, followed by those of the usual ranks."""

    localization: Localization
    plots: tuple[FunctionPlot, ...]
    answers: tuple[ProfileAnswer, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read what `write_profile_page` has written. Raises InputError, which names the field."""
        if len(data) > MAX_PAGE_BYTES:
            raise InputError(f"page: {len(data)} bytes are more than the limit of {MAX_PAGE_BYTES}")
        content = parse_json(data, "page")
        if not isinstance(content, Mapping):
            raise InputError("page: must be an object")
        return cls(
            read_dataclass(Localization, content.get("localization"), "localization"),
            read_tuple(FunctionPlot.from_json, content.get("plots"), "plots", MAX_FUNCTIONS_PLOTTED),
            read_tuple(_read_answer, content.get("answers"), "answers", MAX_SUSPECTS_KEPT + MAX_USUAL_KEPT),
        )


def write_profile_page(localization: Localization, table: PatternTable, answers: Mapping[int, bytes]) -> bytes:
    """Return JSON of at most MAX_PAGE_BYTES. `answers` are by rank, as sent."""
    shown_ranks = [*localization.suspects[:MAX_SUSPECTS_KEPT], *localization.usual[:MAX_USUAL_KEPT]]
    shown_answers = [answers[rank].decode(errors="replace") for rank in dict.fromkeys(shown_ranks) if rank in answers]
    content = {
        "localization": asdict(localization),
        "plots": [asdict(plot) for plot in _build_plots(localization, table)],
        "answers": shown_answers,
    }
    data = encode_compact_json(content)
    while len(data) > MAX_PAGE_BYTES and shown_answers:
        shown_answers.pop()
        data = encode_compact_json(content)
    return data


def _read_answer(data: object, path: str) -> ProfileAnswer:
    """Read an answer as it was sent: text that holds JSON."""
    if not isinstance(data, str):
        raise InputError(f"{path}: must be a string")
    try:
        return ProfileAnswer.from_bytes(data.encode(errors="replace"))
    except InputError as error:
        raise InputError(f"{path}.{error}") from error


def _build_plots(localization: Localization, table: PatternTable) -> list[FunctionPlot]:
    """Build plots of the named functions. If none is named, of those with the most time."""
    named = [explanation.function for explanation in localization.explanations if explanation.function]
    names = dict.fromkeys([*named, *(name for name, _ in table.functions)])
    rows = _select_rows(localization, table)
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


def _select_rows(localization: Localization, table: PatternTable) -> list[int]:
    row_by_rank = {int(rank): row for row, rank in enumerate(table.ranks)}
    suspects = [row_by_rank[rank] for rank in localization.suspects if rank in row_by_rank]
    interval = max(1, -(-len(table.ranks) // (MAX_PLOT_POINTS - len(suspects))))
    return sorted({*suspects, *range(0, len(table.ranks), interval)})
