"""HTML pages without a script that load nothing. Much of their content comes from tenants, so all of it is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from ..api.formats import format_time
from .text import strip_control_characters

TABLE_STYLE = """
td, th { text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
"""


def render_document(title: str, hint: str, sections: str, style: str = TABLE_STYLE) -> str:
    """Render a page. `sections` is HTML, the title and the hint below it are text."""
    common = files("pacekeeper_analysis.pages").joinpath("common.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape_text(title)}</title><style>{common}{style}</style></head><body><main>
<header><h1>{escape_text(title)}</h1><p class="hint">{escape_text(hint)}</p></header>
{sections}</main></body></html>
"""


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="hint">None.</p>'
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(_render_cells("th", headers))}</tr></thead><tbody>'
        + "".join(f"<tr>{''.join(_render_cells('td', row))}</tr>" for row in rows)
        + "</tbody></table></div>"
    )


def _render_cells(tag: str, cells: Sequence[str]) -> Iterator[str]:
    return (f"<{tag}>{escape_text(cell)}</{tag}>" for cell in cells)


def render_section(title: str, content: str) -> str:
    return f'<section class="all">{f"<h2>{title}</h2>" if title else ""}{content}</section>'


def escape_text(value: str) -> str:
    return escape(" ".join(map(strip_control_characters, value.splitlines())))


def format_moment(at: float) -> str:
    return f"{format_time(at)[:19]}Z"
