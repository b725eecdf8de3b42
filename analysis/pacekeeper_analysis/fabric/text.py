"""A Fabric as text for a terminal: leaves down, spines across, and the planned loads of their links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .view import FabricLink, FabricView, FabricViewCondition, LinkState, list_leaves_and_spines

DEAD, SLOW, NOT_LISTED = "×", "~", "·"
UP_DOWN_HEADER = "up/down"
MAX_LEAF_NAME_LENGTH = 24


def render_text(view: FabricView, width: int = 100) -> str:
    """Render lines of at most `width` columns, except messages of conditions."""
    lines = [f"{view.name}: {view.leaves} leaves × {view.spines} spines · {view.summary}"]
    lines += [
        _describe_condition(condition)
        for condition in view.conditions
        if condition.type == "Planned" or condition.status != "True"
    ]
    if not view.conditions:
        lines.append("The operator has not processed it yet: is it running?")
    if view.links:
        lines += ["", *_build_table(view, width)]
    return "\n".join(lines)


def _describe_condition(condition: FabricViewCondition) -> str:
    """Describe a condition. Foreign text must not control the terminal."""
    message = "".join(character if character.isprintable() else " " for character in condition.message)
    return f"{condition.type} {condition.status}, {condition.reason}{': ' if message else ''}{message}"


def _build_table(view: FabricView, width: int) -> Iterator[str]:
    """Build the table with both directions of each link if they fit, else the fuller one.

    It may need several blocks.
    """
    leaves, spines = list_leaves_and_spines([view])
    names = {
        leaf: leaf if len(leaf) <= MAX_LEAF_NAME_LENGTH else f"…{leaf[1 - MAX_LEAF_NAME_LENGTH :]}" for leaf in leaves
    }
    left_width = max(len(UP_DOWN_HEADER), *map(len, names.values()))
    rows = _build_rows(view, leaves, spines, both_directions=True)
    both_directions = (
        view.max_load is not None and left_width + _compute_column_width(rows, spines) * len(spines) <= width
    )
    if not both_directions:
        rows = _build_rows(view, leaves, spines, both_directions=False)
    cell_width = _compute_column_width(rows, spines)
    columns_per_block = max(1, (width - left_width) // cell_width)
    for first in range(0, len(spines), columns_per_block):
        shown = slice(first, first + columns_per_block)
        yield (
            f"{UP_DOWN_HEADER if both_directions else '':<{left_width}}"
            f"{''.join(f'{spine:>{cell_width}}' for spine in spines[shown])}"
        )
        for leaf, row in zip(leaves, rows, strict=True):
            yield f"{names[leaf]:<{left_width}}{''.join(f'{text:>{cell_width}}' for text in row[shown])}"
        yield ""
    yield _build_legend(view, both_directions)


def _build_rows(
    view: FabricView, leaves: Sequence[str], spines: Sequence[str], both_directions: bool
) -> list[list[str]]:
    links = {(link.leaf, link.spine): link for link in view.links}
    planned = view.max_load is not None
    return [[_format_cell(links.get((leaf, spine)), planned, both_directions) for spine in spines] for leaf in leaves]


def _format_cell(link: FabricLink | None, planned: bool, both_directions: bool) -> str:
    if link is None:
        return NOT_LISTED
    if link.state is LinkState.DOWN:
        return DEAD
    mark = SLOW if link.state is LinkState.SLOW else ""
    if not planned:
        return mark or "up"
    return mark + (f"{link.up}/{link.down}" if both_directions else f"{link.load}")


def _compute_column_width(cells: Sequence[Sequence[str]], spines: Sequence[str]) -> int:
    """Return the width of a column."""
    return 2 + max(len(text) for row in (spines, *cells) for text in row)


def _build_legend(view: FabricView, both_directions: bool) -> str:
    entries = [f"{DEAD} dead", f"{SLOW} slow"]
    if view.max_load is not None:
        direction = "up from the leaf and down to it" if both_directions else "in the fuller direction"
        entries.append(f"loads in {view.unit}, {direction}")
    if (max_load := view.max_unlisted_load) is not None:
        entries.append(f"{NOT_LISTED} not listed, {max_load} at most")
    return "; ".join(entries)
