"""Formatting of lists and long texts for people."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED_ITEMS = 8
"""Maximum number of items that a text names. All of them are available from the API server."""


def format_list(items: Sequence[object]) -> str:
    """Return `1, 2, 3`, or the first eight and `and 592 more`."""
    names = ", ".join(map(str, items[:MAX_LISTED_ITEMS]))
    return f"{names} and {len(items) - MAX_LISTED_ITEMS} more" if len(items) > MAX_LISTED_ITEMS else names


def shorten_text(text: str, limit: int) -> str:
    """Return `text`, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 2] + " …"
