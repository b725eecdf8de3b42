"""Makes this process a rank that Pacekeeper's launcher has started, of a script that does not use the library itself.

It records on the ring that the launcher has created, so that the launcher sees its steps and its collectives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..forking.rank_start import COMMUNICATORS_VARIABLE, RING_VARIABLE
from ..monitoring import start_monitoring
from ..record_ring import may_take_ring
from ..recorder import Recorder
from ..recorder_factory import open_recorder
from ..records import Phase


class LaunchedRank:
    """The rank that this process is."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.restart_clock(1)

    def begin_step(self, optimizer: Any) -> None:
        """Handle an optimizer that begins a step."""
        self._recorder.begin_optimizer_step(optimizer)

    def end_step(self, optimizer: Any) -> None:
        """Handle an optimizer that has completed a step. The steps of the first optimizer are the job's."""
        self._recorder.end_optimizer_step(optimizer)

    def finish(self) -> None:
        """Handle the end of the script. Its threads and exit handlers may still run."""
        self._recorder.enter_phase(Phase.FINISHED)


def start_launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Make this process the rank.

    None: the launcher has not started it as one, as a worker of a data loader, or it records by the package itself.
    """
    ring, communicators = environment.get(RING_VARIABLE), environment.get(COMMUNICATORS_VARIABLE)
    if "pacekeeper.observe.monitoring" in sys.modules:
        return None
    if not ring or not communicators or not os.path.exists(ring) or not may_take_ring(Path(ring)):
        return None
    native = environment.get("PACEKEEPER_NATIVE") != "0"
    recorder = open_recorder(Path(ring), Path(communicators), native=native)
    start_monitoring(recorder)
    return LaunchedRank(recorder)
