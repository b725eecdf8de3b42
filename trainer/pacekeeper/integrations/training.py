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

from pacekeeper.environment import LEFT_WHEN_TOLD, Environment
from pacekeeper.keep.news import open_news
from pacekeeper.modes.course import Course
from pacekeeper.modes.follower import PlanReader
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.observe.recorder import Begun, Recorder
from pacekeeper.observe.watching import recorder
from pacekeeper_analysis.records import Kind, Phase

_log = logging.getLogger(__name__)


class Told(NamedTuple):
    """What is asked of all ranks alike behind a step."""

    save: bool
    """Write a checkpoint."""
    leave: bool
    """And leave then: `FrameworkTraining.saved` does it."""


class FrameworkTraining:
    """One rank's part of the trainings of one framework's trainer, one after the other."""

    def __init__(self) -> None:
        self._recorder = recorder()
        self._environment = Environment.read()
        self._peers: _Peers | None = None
        self._phase: Begun | None = None
        self._steps_before = 0
        """Of the job: those of trainings that this process has ended. A framework counts each training from 0."""
        self._told = Told(save=False, leave=False)
        self._asked = self._answered = 0
        """Checkpoint requests of the plan."""
        self._sigterm: Any = None
        """The handler before ours."""
        self._lost = False
        """Whether a loss was not finite."""

    def begin(self, step: int) -> None:
        """Training goes on behind `step` of the framework's count; 0: from its beginning. Collective."""
        watched = self._recorder
        watched.steered = True  # its callbacks say when a step is complete
        watched.restart_clock(self._steps_before + step + 1)
        watched.ring.state.restored_step = self._steps_before + step
        open_news(self._environment).found(self._steps_before + step or -1)
        if step:
            watched.ring.state.checkpoint_step = self._steps_before + step
        self._peers = self._peers or _Peers(watched, self._environment)
        self._peers.ask()
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, self._peers.leave_soon)

    def optimizer_begins(self) -> None:
        """All gradients of the step are there."""
        self._recorder.optimizer_begins()

    def step_ended(self) -> Told:
        """The optimizer has stepped. What all ranks were told up to the step before stays told until it is done."""
        self._recorder.end_step()
        assert self._peers is not None, "begin() comes first"
        leaving, self._asked = self._peers.answers()
        self._peers.ask()
        leave = self._told.leave or leaving > 0
        self._told = Told(leave or self._asked > self._answered, leave)
        return self._told

    def enter(self, phase: Phase) -> None:
        """A phase other than training, until the next one or `train`."""
        self.train()
        self._phase = self._recorder.begin_phase(phase)

    def train(self) -> None:
        """Training goes on, if it does not already."""
        if self._phase is not None:
            self._recorder.end_phase(self._phase)
            self._phase = None

    def report_loss(self, loss: float) -> None:
        """Of the newest steps: the mean over all ranks, or this rank's."""
        ring, step, now = self._recorder.ring, self._recorder.step - 1, time.monotonic_ns()
        ring.state.loss = loss
        ring.write(Kind.LOSS, now, now, step, Phase.TRAIN, loss)
        if not math.isfinite(loss) and not self._lost:
            self._lost = True
            ring.state.bad_loss_step = step

    def saved(self, publish: Callable[[], None]) -> None:
        """The framework has written this rank's part of a checkpoint of the newest step. Collective.

        publish: called when all ranks have written theirs: a restart goes on from it then.
        Ends the process with exit code 143 where the job was told to leave.
        """
        assert self._peers is not None, "begin() comes first"
        self._peers.meet()
        publish()
        watched, step = self._recorder, self._recorder.step - 1
        watched.ring.state.checkpoint_step = step
        self._answered = watched.ring.state.checkpoint_request = self._asked
        open_news(self._environment).kept(step)
        self.train()
        if self._told.leave:
            self._peers.meet()  # who leaves first ends the round: not before everything is published
            _log.info("told to leave: the checkpoint after step %d is kept", step)
            sys.exit(LEFT_WHEN_TOLD)

    def end(self) -> None:
        """Training is over; the script may go on, and train again."""
        assert self._peers is not None, "begin() comes first"
        self.train()
        self._peers.answers()
        self._steps_before = self._recorder.step - 1
        self._recorder.steered = False
        self._recorder.enter(Phase.START)  # what the script does next may take long
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)


@cache
def of_this_process() -> FrameworkTraining:
    """One process has one count of steps, however many trainers come and go in it."""
    return FrameworkTraining()


class _Peers:
    """What the ranks tell each other at each step, in the background: it is taken at the next one."""

    def __init__(self, watched: Recorder, environment: Environment) -> None:
        """Collective."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if alone else CpuGroup(watched)
        self._plan = PlanReader(environment.runtime if environment.rank == 0 else None, _take_any)
        self._told_to_leave = False
        self._sum = torch.zeros(2, dtype=torch.int64)
        self._work: dist.Work | None = None

    def leave_soon(self, *_: object) -> None:
        """On SIGTERM."""
        self._told_to_leave = True

    def ask(self) -> None:
        """Begins the exchange: who is told to leave, and rank 0's newest checkpoint request."""
        request = self._plan.orders(Course(), 0).checkpoint_request
        self._sum = torch.tensor([int(self._told_to_leave), request])
        if self._group is not None:
            self._work = self._group.start_sum(self._sum)

    def answers(self) -> tuple[int, int]:
        """How many ranks were told to leave, and the request: the same on all ranks."""
        if self._group is not None and self._work is not None:
            self._group.wait(self._work)
            self._work = None
        leaving, request = self._sum.tolist()
        return leaving, request

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        if self._group is not None:
            self._group.all_agree(True)


def _take_any(_: Course) -> None:
    """Nobody steers these ranks: what a plan says of shares and modes is not for them."""
