"""`import pacekeeper.auto`: the one line that has any training script watched. It changes nothing in what is computed."""

from __future__ import annotations

from .watching import watch_steps

watch_steps()
