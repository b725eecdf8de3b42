"""Tables and paragraphs of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

TEXT_WIDTH = 100
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The last column is cut where a line would be longer than WIDTH; the others are as wide as they need to be."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads) - 1)]
    return "\n".join(
        cut_line("  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=False)] + line[-1:]))
        for line in lines
    )


def cut_line(line: str) -> str:
    line = strip_control_characters(" ".join(line.splitlines())).rstrip()
    return line if len(line) <= TEXT_WIDTH else f"{line[: TEXT_WIDTH - 1]}…"


def format_paragraph(text: str, indent: str = "", first: str | None = None) -> str:
    """`first`: what stands before the first line in place of `indent`."""
    begin = indent if first is None else first
    lines = list(map(strip_control_characters, text.splitlines())) or [""]
    return "\n".join(
        textwrap.fill(
            line, TEXT_WIDTH, initial_indent=indent if at else begin, subsequent_indent=indent, break_on_hyphens=False
        )
        or (indent if at else begin).rstrip()
        for at, line in enumerate(lines)
    )


def strip_control_characters(line: str) -> str:
    """Without what a terminal would obey: part of these words are tenants' own."""
    return "".join(letter if letter.isprintable() else " " if letter == "\t" else "?" for letter in line)


def format_entries(pairs: Sequence[tuple[str, str]]) -> str:
    """One `name  words` a line, the words below each other."""
    width = max((len(name) for name, _ in pairs), default=0) + 4
    return "\n".join(format_paragraph(words, " " * width, f"  {name}".ljust(width)) for name, words in pairs)


def format_elapsed(seconds: float) -> str:
    """`4.2 s`, `3 min`, `5.5 h`, `2 d`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"


def format_count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
