"""What an action leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from ...state import Draft


@dataclass(frozen=True)
class Applied:
    """The draft after an action, and what became of it for people; "": nothing to add."""

    draft: Draft
    words: str = ""
