"""Pages in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")

_RECORD_ERRORS = "<script>onerror = message => { document.documentElement.dataset.failed = message; };</script>"
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=3000", "--dump-dom"),
)


def load_in_browser(page: str, folder: Path, script: str = "", width: int = 1200) -> str:
    """The page's document after its scripts have run, and then `script`. An error in any of them fails the test."""
    page = page.replace("<head>", "<head>" + _RECORD_ERRORS).replace("</body>", f"<script>{script}</script></body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    assert CHROMIUM is not None
    options = [*_OPTIONS, f"--window-size={width},1000", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *options, f"file://{folder / 'page.html'}"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "data-failed" not in result.stdout, re.findall(r'data-failed="[^"]*"', result.stdout)
    return result.stdout


def read_notes(document: str) -> str:
    """What a script has left in `document.documentElement.dataset.seen`."""
    (notes,) = re.findall(r'data-seen="([^"]*)"', document)
    return html.unescape(notes)


def wrap_in_frame(page: str, width: int) -> str:
    """A page that holds this one in a frame of such a width, as on a phone: browsers' own windows are never so narrow.
    It notes by how many pixels the page is wider than the frame, and whether it has failed."""
    page = page.replace("<head>", "<head>" + _RECORD_ERRORS)
    content = json.dumps(page).replace("<", "\\u003c")
    return f"""<!doctype html><html><head></head><body>
<iframe id="frame" style="width:{width}px;height:3000px;border:0"></iframe><script>
const frame = document.getElementById("frame");
frame.onload = () => {{ const inner = frame.contentDocument.documentElement;
  document.documentElement.dataset.seen =
    [inner.scrollWidth - inner.clientWidth, inner.dataset.failed || "well"].join("|"); }};
frame.srcdoc = {content};
</script></body></html>"""
