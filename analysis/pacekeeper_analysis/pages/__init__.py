"""Pages for people: a template, what all pages look like, and the data of one of them become one HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render_single_file(template: str, data: Mapping[str, Any]) -> str:
    """`template`: an HTML text with the places STYLE, SCRIPT and DATA in comments. The file needs nothing else, and a
    browser loads nothing for it."""
    common = files(__name__)
    # "<" in names that others have chosen would end the script element, or begin a comment in it.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = template.replace("/*STYLE*/", common.joinpath("common.css").read_text(encoding="utf-8"))
    page = page.replace("/*SCRIPT*/", common.joinpath("common.js").read_text(encoding="utf-8"))
    return page.replace("/*DATA*/null", content)
