"""Training in a framework's loop: what its callbacks report, and what its ranks agree on at each step.

The framework computes, distributes the data and writes the checkpoints; none of that is changed.
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

from pacekeeper.checkpointing.storage.checkpoint_status import open_checkpoint_reporter
from pacekeeper.environment import RANK_LEFT_EXIT_CODE, Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.observe.monitoring import get_recorder
from pacekeeper.sync.plan_reader import PlanReader
from pacekeeper.sync.training_config import TrainingConfig
from pacekeeper_rank.recorder import OpenPhase, Recorder
from pacekeeper_rank.records import Phase, RecordKind

_log = logging.getLogger(__name__)


class StepDirectives(NamedTuple):
    """What all ranks alike must do after a step."""

    save: bool
    """Write a checkpoint."""
    leave: bool
    """Leave after the checkpoint, in `FrameworkTraining.publish_checkpoint`."""


class FrameworkTraining:
    """One rank's part of the successive trainings of one framework."""

    def __init__(self) -> None:
        self._recorder = get_recorder()
        self._environment = Environment.read()
        self._peers: _PeerExchange | None = None
        self._phase: OpenPhase | None = None
        self._steps_before = 0
        """Steps of the job in trainings that have ended in this process. A framework counts each training from 0."""
        self._directives = StepDirectives(save=False, leave=False)
        self._checkpoint_requested = self._checkpoint_answered = 0
        """Checkpoint requests of the plan."""
        self._sigterm: Any = None
        """The SIGTERM handler before Pacekeeper's."""
        self._lost = False
        """Whether a loss was not finite."""

    def begin(self, step: int) -> None:
        """Begin or continue training after `step` of the framework's count; 0: from the beginning. Collective."""
        recorder = self._recorder
        recorder.managed = True  # the framework's callbacks report when a step is complete
        recorder.restart_clock(self._steps_before + step + 1)
        recorder.ring.state.restored_step = self._steps_before + step
        open_checkpoint_reporter(self._environment).report_found(self._steps_before + step or None)
        if step:
            recorder.ring.state.checkpoint_step = self._steps_before + step
        self._peers = self._peers or _PeerExchange(recorder, self._environment)
        self._peers.start_exchange()
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, self._peers.request_leave)

    def optimizer_begins(self) -> None:
        """Record that all gradients of the step are computed."""
        self._recorder.optimizer_begins()

    def end_step(self) -> StepDirectives:
        """Complete the step, and return the directives. They stay in force until they are carried out."""
        self._recorder.end_step()
        assert self._peers is not None, "begin() comes first"
        leaving, self._checkpoint_requested = self._peers.finish_exchange()
        self._peers.start_exchange()
        leave = self._directives.leave or leaving > 0
        self._directives = StepDirectives(leave or self._checkpoint_requested > self._checkpoint_answered, leave)
        return self._directives

    def enter_phase(self, phase: Phase) -> None:
        """Enter a phase other than training, until the next one or `resume_training`."""
        self.resume_training()
        self._phase = self._recorder.begin_phase(phase)

    def resume_training(self) -> None:
        """Resume training, if another phase is in progress."""
        if self._phase is not None:
            self._recorder.end_phase(self._phase)
            self._phase = None

    def report_loss(self, loss: float) -> None:
        """Report the loss of the newest steps: the mean over all ranks, or this rank's."""
        ring, step, now = self._recorder.ring, self._recorder.step - 1, time.monotonic_ns()
        ring.state.loss = loss
        ring.write(RecordKind.LOSS, now, now, step, Phase.TRAIN, loss)
        if not math.isfinite(loss) and not self._lost:
            self._lost = True
            ring.state.bad_loss_step = step

    def publish_checkpoint(self, publish: Callable[[], None]) -> None:
        """Publish the checkpoint of the newest step, of which the framework has written this rank's part. Collective.

        `publish`: called when all ranks have written their parts, after which a restart uses the checkpoint. Ends the
        process with exit code 143 if the job was requested to leave.
        """
        assert self._peers is not None, "begin() comes first"
        self._peers.wait_for_peers()
        publish()
        recorder, step = self._recorder, self._recorder.step - 1
        recorder.ring.state.checkpoint_step = step
        self._checkpoint_answered = recorder.ring.state.checkpoint_request = self._checkpoint_requested
        open_checkpoint_reporter(self._environment).report_published(step)
        self.resume_training()
        if self._directives.leave:
            self._peers.wait_for_peers()  # the first rank to leave ends the round: wait until all is published
            _log.info("leaving on request: the checkpoint after step %d is saved", step)
            sys.exit(RANK_LEFT_EXIT_CODE)

    def end(self) -> None:
        """End the training; the script may continue, and train again."""
        assert self._peers is not None, "begin() comes first"
        self.resume_training()
        self._peers.finish_exchange()
        self._steps_before = self._recorder.step - 1
        self._recorder.managed = False
        self._recorder.enter_phase(Phase.START)  # what the script does next may take a long time
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)


@cache
def get_framework_training() -> FrameworkTraining:
    """Return the process's training: it has one count of steps for all trainers that it creates."""
    return FrameworkTraining()


class _PeerExchange:
    """Exchange between the ranks at each step, in the background: its result is read at the next one."""

    def __init__(self, recorder: Recorder, environment: Environment) -> None:
        """Create the exchange. Collective."""
        is_single_rank = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if is_single_rank else CpuGroup(recorder)
        self._plan = PlanReader(environment.runtime if environment.rank == 0 else None, _accept_any_config)
        self._leave_requested = False
        self._sum = torch.zeros(2, dtype=torch.int64)
        self._work: dist.Work | None = None

    def request_leave(self, *_: object) -> None:
        """Handle SIGTERM."""
        self._leave_requested = True

    def start_exchange(self) -> None:
        """Begin the exchange of the requests to leave, and of rank 0's newest checkpoint request."""
        request = self._plan.read_directives(TrainingConfig(), 0).checkpoint_request
        self._sum = torch.tensor([int(self._leave_requested), request])
        if self._group is not None:
            self._work = self._group.start_sum(self._sum)

    def finish_exchange(self) -> tuple[int, int]:
        """Return the number of ranks that were requested to leave, and the request: the same on all ranks."""
        if self._group is not None and self._work is not None:
            self._group.wait(self._work)
            self._work = None
        leaving, request = self._sum.tolist()
        return leaving, request

    def wait_for_peers(self) -> None:
        """Wait until all ranks have reached this point."""
        if self._group is not None:
            self._group.all_agree(True)


def _accept_any_config(_: TrainingConfig) -> None:
    """Accept any config: these ranks are not managed, so shares and modes of a plan do not apply to them."""
