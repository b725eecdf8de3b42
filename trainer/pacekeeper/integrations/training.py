"""A training whose loop is a framework's: what its callbacks tell, and what its ranks agree on at each step.

The framework computes, deals the data out and writes the checkpoints; none of that is touched.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pacekeeper.environment import RANK_LEFT_EXIT_CODE, Environment
from pacekeeper.keep.news import open_checkpoint_reporter
from pacekeeper.modes.course import TrainingConfig
from pacekeeper.modes.follower import PlanReader
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.observe.recorder import OpenPhase, Recorder
from pacekeeper.observe.watching import get_recorder
from pacekeeper_analysis.records import RecordKind, Phase

_log = logging.getLogger(__name__)


class StepDirectives(NamedTuple):
    """What is asked of all ranks alike behind a step."""

    save: bool
    """Write a checkpoint."""
    leave: bool
    """And leave then: `FrameworkTraining.saved` does it."""


class FrameworkTraining:
    """One rank's part of the trainings of one framework's trainer, one after the other."""

    def __init__(self) -> None:
        self._recorder = get_recorder()
        self._environment = Environment.read()
        self._peers: _PeerExchange | None = None
        self._phase: OpenPhase | None = None
        self._steps_before = 0
        """Of the job: those of trainings that this process has ended. A framework counts each training from 0."""
        self._directives = StepDirectives(save=False, leave=False)
        self._checkpoint_requested = self._checkpoint_answered = 0
        """Checkpoint requests of the plan."""
        self._sigterm: Any = None
        """The handler before ours."""
        self._lost = False
        """Whether a loss was not finite."""

    def begin(self, step: int) -> None:
        """Training goes on behind `step` of the framework's count; 0: from its beginning. Collective."""
        watched = self._recorder
        watched.managed = True  # its callbacks say when a step is complete
        watched.restart_clock(self._steps_before + step + 1)
        watched.ring.state.restored_step = self._steps_before + step
        open_checkpoint_reporter(self._environment).report_found(self._steps_before + step or -1)
        if step:
            watched.ring.state.checkpoint_step = self._steps_before + step
        self._peers = self._peers or _PeerExchange(watched, self._environment)
        self._peers.start_exchange()
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, self._peers.request_leave)

    def optimizer_begins(self) -> None:
        """All gradients of the step are there."""
        self._recorder.optimizer_begins()

    def end_step(self) -> StepDirectives:
        """The optimizer has stepped. What all ranks were told up to the step before stays told until it is done."""
        self._recorder.end_step()
        assert self._peers is not None, "begin() comes first"
        leaving, self._checkpoint_requested = self._peers.finish_exchange()
        self._peers.start_exchange()
        leave = self._directives.leave or leaving > 0
        self._directives = StepDirectives(leave or self._checkpoint_requested > self._checkpoint_answered, leave)
        return self._directives

    def enter_phase(self, phase: Phase) -> None:
        """A phase other than training, until the next one or `train`."""
        self.resume_training()
        self._phase = self._recorder.begin_phase(phase)

    def resume_training(self) -> None:
        """Training goes on, if it does not already."""
        if self._phase is not None:
            self._recorder.end_phase(self._phase)
            self._phase = None

    def report_loss(self, loss: float) -> None:
        """Of the newest steps: the mean over all ranks, or this rank's."""
        ring, step, now = self._recorder.ring, self._recorder.step - 1, time.monotonic_ns()
        ring.state.loss = loss
        ring.write(RecordKind.LOSS, now, now, step, Phase.TRAIN, loss)
        if not math.isfinite(loss) and not self._lost:
            self._lost = True
            ring.state.bad_loss_step = step

    def publish_checkpoint(self, publish: Callable[[], None]) -> None:
        """The framework has written this rank's part of a checkpoint of the newest step. Collective.

        publish: called when all ranks have written theirs: a restart goes on from it then.
        Ends the process with exit code 143 where the job was told to leave.
        """
        assert self._peers is not None, "begin() comes first"
        self._peers.wait_for_peers()
        publish()
        watched, step = self._recorder, self._recorder.step - 1
        watched.ring.state.checkpoint_step = step
        self._checkpoint_answered = watched.ring.state.checkpoint_request = self._checkpoint_requested
        open_checkpoint_reporter(self._environment).report_published(step)
        self.resume_training()
        if self._directives.leave:
            self._peers.wait_for_peers()  # who leaves first ends the round: not before everything is published
            _log.info("told to leave: the checkpoint after step %d is kept", step)
            sys.exit(RANK_LEFT_EXIT_CODE)

    def end(self) -> None:
        """Training is over; the script may go on, and train again."""
        assert self._peers is not None, "begin() comes first"
        self.resume_training()
        self._peers.finish_exchange()
        self._steps_before = self._recorder.step - 1
        self._recorder.managed = False
        self._recorder.enter_phase(Phase.START)  # what the script does next may take long
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)


@cache
def get_framework_training() -> FrameworkTraining:
    """One process has one count of steps, however many trainers come and go in it."""
    return FrameworkTraining()


class _PeerExchange:
    """What the ranks tell each other at each step, in the background: it is taken at the next one."""

    def __init__(self, recorder: Recorder, environment: Environment) -> None:
        """Collective."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if alone else CpuGroup(recorder)
        self._plan = PlanReader(environment.runtime if environment.rank == 0 else None, _accept_any_config)
        self._leave_requested = False
        self._sum = torch.zeros(2, dtype=torch.int64)
        self._work: dist.Work | None = None

    def request_leave(self, *_: object) -> None:
        """On SIGTERM."""
        self._leave_requested = True

    def start_exchange(self) -> None:
        """Begins the exchange: who is told to leave, and rank 0's newest checkpoint request."""
        request = self._plan.read_directives(TrainingConfig(), 0).checkpoint_request
        self._sum = torch.tensor([int(self._leave_requested), request])
        if self._group is not None:
            self._work = self._group.start_sum(self._sum)

    def finish_exchange(self) -> tuple[int, int]:
        """How many ranks were told to leave, and the request: the same on all ranks."""
        if self._group is not None and self._work is not None:
            self._group.wait(self._work)
            self._work = None
        leaving, request = self._sum.tolist()
        return leaving, request

    def wait_for_peers(self) -> None:
        """Returns when all ranks have come here."""
        if self._group is not None:
            self._group.all_agree(True)


def _accept_any_config(_: TrainingConfig) -> None:
    """Nobody steers these ranks: what a plan says of shares and modes is not for them."""
