"""What actions leave behind."""

from __future__ import annotations

from dataclasses import dataclass

from ...state import DesiredState


@dataclass(frozen=True)
class ActionResult:
    """The draft after them, and what became of them for people, where there is something to add."""

    desired: DesiredState
    notes: tuple[str, ...] = ()
