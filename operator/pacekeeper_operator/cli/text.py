"""Tables and paragraphs of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

TEXT_WIDTH = 100
MAX_DECIMAL_SECONDS = 10
"""Durations below it have a digit after the point."""
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table.

    The last column is cut if a line would be longer than TEXT_WIDTH; the others are as wide as they need to be.
    """
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers) - 1)]
    return "\n".join(
        cut_line("  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=False)] + line[-1:]))
        for line in lines
    )


def cut_line(line: str) -> str:
    line = strip_control_characters(" ".join(line.splitlines())).rstrip()
    return line if len(line) <= TEXT_WIDTH else f"{line[: TEXT_WIDTH - 1]}…"


def format_paragraph(text: str, indent: str = "", first_indent: str | None = None) -> str:
    """Wrap a text. `first_indent` replaces `indent` before the first line."""
    initial_indent = indent if first_indent is None else first_indent
    lines = list(map(strip_control_characters, text.splitlines())) or [""]
    return "\n".join(
        textwrap.fill(
            line,
            TEXT_WIDTH,
            initial_indent=indent if index else initial_indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        or (indent if index else initial_indent).rstrip()
        for index, line in enumerate(lines)
    )


def strip_control_characters(line: str) -> str:
    """Remove what a terminal would interpret, as part of the text comes from tenants."""
    return "".join(character if character.isprintable() else " " if character == "\t" else "?" for character in line)


def format_entries(pairs: Sequence[tuple[str, str]]) -> str:
    """Format one `name  text` per line, with the texts aligned."""
    width = max((len(name) for name, _ in pairs), default=0) + 4
    return "\n".join(format_paragraph(text, " " * width, f"  {name}".ljust(width)) for name, text in pairs)


def format_elapsed(seconds: float) -> str:
    """Format a duration: `4.2 s`, `3 min`, `5.5 h`, `2 d`."""
    if seconds < MAX_DECIMAL_SECONDS:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
