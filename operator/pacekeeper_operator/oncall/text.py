"""Tables and paragraphs of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The last column is cut where a line would be longer than WIDTH; the others are as wide as they need to be."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads) - 1)]
    return "\n".join(
        cut("  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=False)] + line[-1:]))
        for line in lines
    )


def cut(line: str) -> str:
    line = plain(" ".join(line.splitlines())).rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def paragraph(text: str, indent: str = "", first: str | None = None) -> str:
    """`first`: what stands before the first line in place of `indent`."""
    begin = indent if first is None else first
    lines = list(map(plain, text.splitlines())) or [""]
    return "\n".join(
        textwrap.fill(
            line, WIDTH, initial_indent=indent if at else begin, subsequent_indent=indent, break_on_hyphens=False
        )
        or (indent if at else begin).rstrip()
        for at, line in enumerate(lines)
    )


def plain(line: str) -> str:
    """Without what a terminal would obey: part of these words are tenants' own."""
    return "".join(letter if letter.isprintable() else " " if letter == "\t" else "?" for letter in line)


def entries(pairs: Sequence[tuple[str, str]]) -> str:
    """One `name  words` a line, the words below each other."""
    width = max((len(name) for name, _ in pairs), default=0) + 4
    return "\n".join(paragraph(words, " " * width, f"  {name}".ljust(width)) for name, words in pairs)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min`, `5.5 h`, `2 d`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
