"""The places of torch at which a process becomes a rank, or an agent that starts ranks. All names here may be missing.

The wrappers stay for the life of the process. Once the process is a rank, or the library is inactive, they only pass
calls on.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from ..hook_guard import call_after
from .guard import guard


class _Process:
    """What this process has become. Modules are imported when it does."""

    rank: Any = None
    """A `rank_process.WatchedRank` or a `launched_rank.LaunchedRank`."""
    agent: Any = None
    """An `agent.WatchedAgent`."""


def watch_process_groups(module: ModuleType) -> None:
    """Make the process a rank when it has created its first process group. `module`: torch's distributed_c10d."""
    name = "_register_process_group"
    register = getattr(module, name, None)
    if register is None:
        return

    def watch(*_: Any) -> None:
        if _Process.rank is None:
            guard.run("process group", become_rank)

    setattr(module, name, call_after(register, watch))


def watch_optimizers(module: ModuleType) -> None:
    """Make the process a rank at its first optimizer step, and record its steps. `module`: torch.optim.optimizer.

    The hooks are registered once, before any step: torch iterates over them during a step.
    """
    register_before = getattr(module, "register_optimizer_step_pre_hook", None)
    register_after = getattr(module, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        return
    register_before(_begin_optimizer_step)
    register_after(_end_optimizer_step)


def watch_agent(module: ModuleType) -> None:
    """Have an agent that starts ranks (torchrun, accelerate) report how they end.

    `module`: torch.distributed.elastic.multiprocessing.api. Ranks import it, too: only `start` makes an agent.
    """
    context = getattr(module, "PContext", None)
    start, wait = getattr(context, "start", None), getattr(context, "wait", None)
    if context is None or start is None or wait is None:
        return

    def watch(*_: Any) -> None:
        guard.run("agent", become_agent)

    def report(result: Any, *_: Any) -> None:
        if result is not None and _Process.agent is not None:
            guard.run("exits", _Process.agent.report_exits, result)

    context.start, context.wait = call_after(start, watch), call_after(wait, report)


def become_rank() -> None:
    """Make this process a rank, unless there is no runtime folder."""
    if os.environ.get("PACEKEEPER_COMMUNICATORS"):
        from . import launched_rank

        _Process.rank = launched_rank.start_launched_rank()
    else:
        from . import rank_process

        _Process.rank = rank_process.start_rank()
    if _Process.rank is None:
        guard.active = False


def become_agent() -> None:
    """Make this process an agent, unless there is no runtime folder."""
    if _Process.agent is None:
        from . import agent

        _Process.agent = agent.start_agent()


def mark_script_end() -> None:
    """Record that the script of a rank that the launcher has started has ended."""
    finish = getattr(_Process.rank, "finish", None)
    if finish is not None:
        guard.run("end of the script", finish)


def _begin_optimizer_step(optimizer: Any, *_: Any) -> None:
    if _Process.rank is None:
        guard.run("optimizer step", become_rank)
    if _Process.rank is not None:
        guard.run("begin of a step", _Process.rank.begin_step, optimizer)


def _end_optimizer_step(optimizer: Any, *_: Any) -> None:
    if _Process.rank is not None:
        guard.run("end of a step", _Process.rank.end_step, optimizer)
