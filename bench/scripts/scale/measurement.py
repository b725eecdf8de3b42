"""One figure of the bench, and the goal that it is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """`measured` reaches its goal where it is at most `goal`; an infinite one was not reached at all."""

    name: str
    measured: float
    goal: float
    unit: str
    anchor: str = ""
    """What others have published, or this project measured before; "": no such value."""

    @property
    def holds(self) -> bool:
        return self.measured <= self.goal

    def __str__(self) -> str:
        missed = "" if self.holds else ": MISSED"
        return f"{self.name}: {self.measured:.4g} {self.unit}, goal {self.goal:g}{missed}"

    def to_json(self) -> dict[str, Any]:
        result = {"measured": float(f"{self.measured:.4g}"), "goal": self.goal, "unit": self.unit}
        return result | ({"anchor": self.anchor} if self.anchor else {})
