"""Decisions: pure functions of an Observation and a Policy. Nothing here does I/O; time is part of the observation.

`CHECKS` is the ordered list. A check looks for one kind of fault and answers with a Decision, or None. To add a remedy:
one check here, one module in `act`, one line in each list.
"""

from __future__ import annotations

from collections.abc import Callable

from ..decision import Decision
from ..observation import Observation, Policy
from . import crash, gpu_error, hang, node_lost, round_failed, start_failed, straggler, worker_lost

Check = Callable[[Observation, Policy], Decision | None]

CHECKS: tuple[Check, ...] = (
    start_failed.check,
    worker_lost.check,
    node_lost.check,
    gpu_error.check,
    crash.check,
    hang.check,
    round_failed.check,
    straggler.check,
)
"""In order of certainty: what has gone explains why others crash or stall, so it is asked first."""
