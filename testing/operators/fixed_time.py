"""A runtime whose time stands still."""

from __future__ import annotations

from pacekeeper_operator.async_runtime import OperatorRuntime
from testing.operators.observations import NOW


class FixedTimeRuntime(OperatorRuntime):
    """Time stands still, unless a test moves it."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.passed = 0.0

    def now(self) -> float:
        return NOW + self.passed

    def monotonic(self) -> float:
        return self.passed
