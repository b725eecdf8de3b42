"""`import pacekeeper.auto`: the one line that has any training script watched. What it computes stays the same."""

from __future__ import annotations

from .observe.watching import record_optimizer_steps

record_optimizer_steps()
