"""What actions leave behind."""

from __future__ import annotations

from dataclasses import dataclass

from ...state import Draft


@dataclass(frozen=True)
class Applied:
    """The draft after them, and what became of them for people, where there is something to add."""

    draft: Draft
    words: tuple[str, ...] = ()
