"""HTML pages: a template, the common style and script, and the data of one page become one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render_single_file(template: str, data: Mapping[str, Any]) -> str:
    """Return `template` filled in: an HTML text with the placeholders STYLE, SCRIPT, and DATA in comments.

    The file is self-contained: a browser loads nothing else for it.
    """
    common = files(__name__)
    # A "<" in a name from outside could end the script element, or begin a comment in it.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = template.replace("/*STYLE*/", common.joinpath("common.css").read_text(encoding="utf-8"))
    page = page.replace("/*SCRIPT*/", common.joinpath("common.js").read_text(encoding="utf-8"))
    return page.replace("/*DATA*/null", content)
