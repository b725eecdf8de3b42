"""The README's commands, for tests that type them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def read_commands(heading: str) -> list[str]:
    """The lines of the first block of code behind the door's name."""
    match = re.search(rf"\*\*{heading}\*\*.*?```\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None, heading
    return match[1].replace("\\\n", " ").splitlines()
