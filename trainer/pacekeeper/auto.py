"""Monitoring of any training script by one line, `import pacekeeper.auto`. It does not change what is computed."""

from __future__ import annotations

from .environment import Environment
from .observe.monitoring import record_optimizer_steps

record_optimizer_steps()
if (_environment := Environment.read()).peer_saves and _environment.runtime is not None:
    from .checkpointing.peer_saves.trainer_saves import wrap_trainer_saves

    wrap_trainer_saves()
