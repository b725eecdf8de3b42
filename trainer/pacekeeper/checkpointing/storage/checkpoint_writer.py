"""Writes checkpoints in the background: each is one attempt, whose outcome is the same on all ranks."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch.distributed as dist

from pacekeeper.object_collectives import all_gather_objects, broadcast_object
from pacekeeper.observe.collectives.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.safe_serialization import allow_classes

from ..worker_identity import identify_worker
from .checkpoint_folder import describe_error, summarize_reasons
from .checkpoint_status import CheckpointReporter, parse_failed_rank
from .checkpoint_storage import CheckpointFiles, CheckpointStorage
from .distributed_checkpoint import CheckpointSaver, CheckpointWriteError, PinMemory, StagedCopy
from .manifests import FileChecksum, Manifest

_SLOW_WRITE_WARNING_SECONDS = 10.0
"""Seconds after which training that waits for a checkpoint is reported: a volume may hang instead of fail."""
_MAX_WRITE_WAIT_SECONDS = 1500.0
"""Seconds after which training, or the rank's end, no longer waits for a checkpoint.

It is shorter than the launcher's hang deadline (`LauncherSettings.phase_deadline`), which would end the round.
"""
_log = logging.getLogger(__name__)


class WriteOutcome(Enum):
    """Outcome of writing a checkpoint: the same on all ranks, unless it is UNCONFIRMED."""

    PUBLISHED = auto()
    """The checkpoint is published, or nothing was being written."""
    FAILED = auto()
    """A file could not be written or read. Another attempt may succeed."""
    SUPERSEDED = auto()
    """A later round has begun, or another job has taken the folder: this round can save nothing more, and ends."""
    UNCONFIRMED = auto()
    """This rank could not reach its peers to learn the outcome."""


allow_classes(WriteOutcome)


class RoundSupersededError(RuntimeError):
    """This round can no longer save its state."""


class CheckpointWriter:
    """One rank's part in writing checkpoints."""

    def __init__(
        self,
        folder: CheckpointStorage,
        reporter: CheckpointReporter,
        peers: CpuGroup,
        pin_memory: PinMemory,
        free_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the writer. `pin_memory`: as `SlotCopies.pin`. `free_memory`: as for `CheckpointSaver`."""
        self._folder = folder
        self._reporter = reporter
        self._rank = dist.get_rank()
        self._peers = peers
        self._saver = CheckpointSaver(peers, pin_memory, free_memory=free_memory)
        self._group: dist.ProcessGroup | None = None
        self._worker_by_rank: list[str] = []
        """Worker of each rank."""
        self._write_thread: threading.Thread | None = None
        self._is_stuck = False
        """Whether `wait` has timed out: its copy is still being written, and no other one is made until it ends."""
        self._outcome = WriteOutcome.PUBLISHED
        self._superseded_reason = ""

    @property
    def has_buffer(self) -> bool:
        """As `CheckpointSaver.has_buffer`."""
        return self._saver.has_buffer

    def start(self, manifest: Manifest, state: dict[str, Any], on_published: Callable[[int], None]) -> None:
        """Copy `state`, and write the copy as the checkpoint of `manifest` in the background. Collective.

        `manifest`: its files are added when they are written. `on_published`: called in the background with the step,
        once the checkpoint is published. Call `wait` first, for the outcome of the previous checkpoint.
        """
        statuses = self._peers.all_gather((self._is_stuck, self._group is not None, identify_worker()))
        if stuck_ranks := [rank for rank, status in enumerate(statuses) if status[0]]:
            self._report_stuck_write(manifest.step, stuck_ranks[0])
            self._outcome = WriteOutcome.UNCONFIRMED
            return
        if not all(status[1] for status in statuses):
            self._group = new_cpu_group("pacekeeper checkpoints")
            self._worker_by_rank = [status[2] for status in statuses]
        assert self._group is not None
        staged: StagedCopy | str
        try:
            staged = self._saver.stage(state)
        except CheckpointWriteError as failure:
            staged = str(failure)
        self._write_thread = threading.Thread(
            target=self._write, args=(self._group, manifest, staged, on_published), name="checkpoint", daemon=True
        )
        self._write_thread.start()

    def wait(self) -> WriteOutcome:
        """Wait until the present checkpoint is published or given up, and return the outcome for `agree_on_outcome`.

        The log of rank 0 has the reason of a failure.
        """
        if self._write_thread is not None:
            if not self._is_stuck:  # it waits for each checkpoint only once
                self._write_thread.join(_SLOW_WRITE_WARNING_SECONDS)
                if self._write_thread.is_alive():
                    self._report_slow_volume()
                    self._write_thread.join(max(0.0, _MAX_WRITE_WAIT_SECONDS - _SLOW_WRITE_WARNING_SECONDS))
                if self._write_thread.is_alive():
                    self._report_wait_timeout()
                    self._is_stuck = True
            if self._write_thread.is_alive():
                return WriteOutcome.UNCONFIRMED
            self._write_thread = None
        outcome = (
            WriteOutcome.UNCONFIRMED if self._is_stuck else self._outcome
        )  # the outcome after a time-out is not awaited
        self._is_stuck, self._outcome = False, WriteOutcome.PUBLISHED
        return outcome

    def agree_on_outcome(self, outcome: WriteOutcome) -> WriteOutcome:
        """Return the outcome for all ranks from the one that `wait` returned on this rank. Collective.

        It is UNCONFIRMED if it is on one of them, since others may have received it after that one timed out. Raises
        RoundSupersededError, on all ranks, if this round can save nothing more.
        """
        outcomes = self._peers.all_gather(outcome)
        if WriteOutcome.SUPERSEDED in outcomes:
            raise RoundSupersededError(
                f"{self._superseded_reason or 'a later round has begun'}: this round keeps no checkpoint, and ends"
            )
        return WriteOutcome.UNCONFIRMED if WriteOutcome.UNCONFIRMED in outcomes else outcome

    def _write(
        self,
        group: dist.ProcessGroup,
        manifest: Manifest,
        staged: StagedCopy | str,
        on_published: Callable[[int], None],
    ) -> None:
        step = manifest.step
        try:
            outcome, reason = self._attempt_write(group, manifest, staged)
        except Exception as error:  # training continues; if a peer is gone, it will end soon
            outcome, reason = WriteOutcome.UNCONFIRMED, self._format_reason(error)
            self._group = None  # some peers may have left its collectives
        if outcome is WriteOutcome.PUBLISHED:
            on_published(step)
            self._reporter.report_published(step)
        elif self._rank == 0 or outcome is WriteOutcome.UNCONFIRMED:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        if outcome is WriteOutcome.SUPERSEDED:
            self._superseded_reason = reason
        if (
            outcome is WriteOutcome.FAILED or self._folder.new_owner_message
        ):  # an earlier round does not report about a later one
            self._reporter.report_failure(f"{self._folder.location}: step {step}: {reason}", parse_failed_rank(reason))
        self._outcome = outcome

    def _attempt_write(
        self, group: dist.ProcessGroup, manifest: Manifest, staged: StagedCopy | str
    ) -> tuple[WriteOutcome, str]:
        """Return the outcome and its reason, as rank 0 determines it, the same on all ranks.

        No rank leaves before the last collective, even after a failure: its peers would wait for it there.
        """
        files = self._folder.begin_attempt(manifest.step)
        own_result: dict[str, FileChecksum] | str
        try:
            own_result = self._saver.write(staged, files, group)
        except Exception as error:
            own_result = self._format_reason(error)
        results = all_gather_objects(own_result, group)
        rejections = all_gather_objects(self._verify(files, results), group)
        decision: tuple[WriteOutcome, str] = broadcast_object(
            self._publish(manifest, results, rejections) if self._rank == 0 else None, group
        )
        if decision[0] is WriteOutcome.FAILED:
            self._folder.discard(manifest.step, self._saver.owns_file)
        return decision

    def _verify(self, storage: CheckpointFiles, results: Sequence[dict[str, FileChecksum] | str]) -> str:
        """Read what another rank has written, as another worker sees it. Returns why it differs; "": it does not."""
        verified_rank = choose_verified_rank(self._worker_by_rank, self._rank)
        files = results[verified_rank]
        if any(isinstance(result, str) for result in results) or isinstance(files, str):
            return ""  # nothing is published
        for name, entry in files.items():
            path = storage.describe(name)
            try:
                if not storage.wait_until_visible(name):
                    return (
                        f"rank {self._rank}: {path}, which rank {verified_rank} has written, is missing on "
                        f"this rank's worker. {self._folder.remedy_if_unshared}"
                    )
                if storage.compute_checksum(name) != entry:
                    return f"rank {self._rank}: {path} differs from what rank {verified_rank} has written"
            except OSError as error:
                return self._format_reason(error)
        return ""

    def _publish(
        self, manifest: Manifest, results: Sequence[dict[str, FileChecksum] | str], rejections: Sequence[str]
    ) -> tuple[WriteOutcome, str]:
        """Publish on rank 0. `results`: files of each rank, or why it failed; `rejections`: why ranks reject files."""
        folder = self._folder
        failures = [part for part in results if isinstance(part, str)] + [reason for reason in rejections if reason]
        if not failures:
            try:
                files = {name: entry for part in results if isinstance(part, dict) for name, entry in part.items()}
                if folder.publish(replace(manifest, files=files)):
                    return WriteOutcome.PUBLISHED, ""
                return (
                    WriteOutcome.SUPERSEDED,
                    folder.new_owner_message or f"round {folder.round} is over: a later one has begun",
                )
            except Exception as error:  # the peers wait for the outcome
                failures = [self._format_reason(error)]
        return WriteOutcome.FAILED, summarize_reasons(failures)

    def _report_stuck_write(self, step: int, rank: int) -> None:
        reason = (
            f"rank {rank}: an earlier one is still being written: the volume has neither completed nor failed the write"
        )
        if self._rank == 0:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        self._reporter.report_failure(f"{self._folder.location}: step {step}: {reason}", rank)

    def _report_slow_volume(self) -> None:
        reason = (
            "training waits for the last checkpoint, which is still being written after "
            f"{_SLOW_WRITE_WARNING_SECONDS:g} s"
        )
        self._reporter.report_failure(f"{self._folder.location}: {reason}")

    def _report_wait_timeout(self) -> None:
        reason = (
            f"rank {self._rank}: training no longer waits for the last checkpoint, which is still being written "
            f"after {_MAX_WRITE_WAIT_SECONDS:g} s: the volume has neither completed nor failed the write"
        )
        _log.warning("%s: %s", self._folder.location, reason)
        self._reporter.report_failure(f"{self._folder.location}: {reason}")

    def _format_reason(self, error: Exception) -> str:
        """Return the reason in one line, for all ranks."""
        return str(error) if isinstance(error, CheckpointWriteError) else f"rank {self._rank}: {describe_error(error)}"


def choose_verified_rank(workers: Sequence[str], rank: int) -> int:
    """Return the rank whose files `rank` verifies. One rank verifies each rank's files, if possible on another worker.

    `workers`: worker of each rank. If all are on one, another rank on it verifies; a single rank verifies its own
    files.
    """
    order = sorted(range(len(workers)), key=lambda other_rank: workers[other_rank])
    largest_count = max(Counter(workers).values())
    shift = largest_count if largest_count < len(workers) else 1
    return order[(order.index(rank) + shift) % len(order)]
