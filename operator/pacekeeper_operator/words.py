"""Words for people about many things at once."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED_ITEMS = 8
"""So many are named; whoever wants to know them all asks the API server."""


def format_list(things: Sequence[object]) -> str:
    """`1, 2, 3`, or the first eight `and 592 more`."""
    names = ", ".join(map(str, things[:MAX_LISTED_ITEMS]))
    return f"{names} and {len(things) - MAX_LISTED_ITEMS} more" if len(things) > MAX_LISTED_ITEMS else names


def shorten_text(text: str, limit: int) -> str:
    """The beginning of what is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 2] + " …"
