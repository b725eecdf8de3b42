"""Monitoring of any training script by one line, `import pacekeeper.auto`. It does not change what is computed."""

from __future__ import annotations

from .observe.monitoring import record_optimizer_steps

record_optimizer_steps()
