"""A Fabric as text for a terminal: leaves down, spines across, and what their links carry by plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .view import FabricViewCondition, FabricLink, FabricView, LinkState, list_leaves_and_spines

DEAD, SLOW, NOT_LISTED = "×", "~", "·"
UP_DOWN_HEADER = "up/down"
MAX_LEAF_NAME_LENGTH = 24


def render_text(view: FabricView, width: int = 100) -> str:
    """Lines of `width` columns at most, but for conditions' messages."""
    lines = [f"{view.name}: {view.leaves} leaves × {view.spines} spines · {view.summary}"]
    lines += [_describe_condition(one) for one in view.conditions if one.type == "Planned" or one.status != "True"]
    if not view.conditions:
        lines.append("The operator has not looked at it yet: is it running?")
    if view.links:
        lines += ["", *_build_table(view, width)]
    return "\n".join(lines)


def _describe_condition(one: FabricViewCondition) -> str:
    """What others have written is kept from steering the terminal."""
    message = "".join(character if character.isprintable() else " " for character in one.message)
    return f"{one.type} {one.status}, {one.reason}{': ' if message else ''}{message}"


def _build_table(view: FabricView, width: int) -> Iterator[str]:
    """Both directions of each link where they fit, else the fuller one; where that does not, either, several blocks."""
    leaves, spines = list_leaves_and_spines([view])
    names = {leaf: leaf if len(leaf) <= MAX_LEAF_NAME_LENGTH else f"…{leaf[1 - MAX_LEAF_NAME_LENGTH :]}" for leaf in leaves}
    left = max(len(UP_DOWN_HEADER), *map(len, names.values()))
    rows = _build_rows(view, leaves, spines, both=True)
    both = view.max_load is not None and left + _compute_column_width(rows, spines) * len(spines) <= width
    if not both:
        rows = _build_rows(view, leaves, spines, both=False)
    cell = _compute_column_width(rows, spines)
    at_once = max(1, (width - left) // cell)
    for first in range(0, len(spines), at_once):
        shown = slice(first, first + at_once)
        yield f"{UP_DOWN_HEADER if both else '':<{left}}{''.join(f'{spine:>{cell}}' for spine in spines[shown])}"
        for leaf, row in zip(leaves, rows, strict=True):
            yield f"{names[leaf]:<{left}}{''.join(f'{one:>{cell}}' for one in row[shown])}"
        yield ""
    yield _build_legend(view, both)


def _build_rows(view: FabricView, leaves: Sequence[str], spines: Sequence[str], both: bool) -> list[list[str]]:
    links = {(link.leaf, link.spine): link for link in view.links}
    planned = view.max_load is not None
    return [[_format_cell(links.get((leaf, spine)), planned, both) for spine in spines] for leaf in leaves]


def _format_cell(link: FabricLink | None, planned: bool, both: bool) -> str:
    if link is None:
        return NOT_LISTED
    if link.state is LinkState.DOWN:
        return DEAD
    mark = SLOW if link.state is LinkState.SLOW else ""
    if not planned:
        return mark or "up"
    return mark + (f"{link.up}/{link.down}" if both else f"{link.load}")


def _compute_column_width(cells: Sequence[Sequence[str]], spines: Sequence[str]) -> int:
    """Width of a column."""
    return 2 + max(len(word) for row in (spines, *cells) for word in row)


def _build_legend(view: FabricView, both: bool) -> str:
    words = [f"{DEAD} dead", f"{SLOW} slow"]
    if view.max_load is not None:
        direction = "up from the leaf and down to it" if both else "in the fuller direction"
        words.append(f"loads in {view.unit}, {direction}")
    if (most := view.max_unlisted_load) is not None:
        words.append(f"{NOT_LISTED} not listed, {most} at most")
    return "; ".join(words)
