"""The result of applying actions."""

from __future__ import annotations

from dataclasses import dataclass

from ...state.desired_state import DesiredState


@dataclass(frozen=True)
class ActionResult:
    """The desired state after the actions, and notes for the incident's evidence."""

    desired: DesiredState
    notes: tuple[str, ...] = ()
