"""Writes checkpoints in the background: each is one attempt, whose outcome all ranks hear alike."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch.distributed as dist

from pacekeeper.exchange import broadcast_object, all_gather_objects
from pacekeeper.observe.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.plain import allow_classes

from .checkpoints import SHARED_VOLUME_REMEDY, CheckpointFolder, wait_until_visible, describe_error, summarize_reasons
from .distributed_checkpoint import CheckpointWriteError, PinMemory, CheckpointSaver, StagedCopy
from .manifests import FileChecksum, Manifest, compute_checksum
from .news import CheckpointReporter, parse_failed_rank
from .worker import identify_worker

_SLOW_WRITE_WARNING_SECONDS = 10.0
"""Training that waits for a checkpoint's end for so long says so: a volume may hang instead of failing."""
_MAX_WRITE_WAIT_SECONDS = 1500.0
"""After which training, or the rank's end, waits for a checkpoint no longer: before the launcher's watch takes the rank
for one that hangs (`LauncherSettings.phase_deadline`), and ends the round for it."""
_log = logging.getLogger(__name__)


class WriteOutcome(Enum):
    """What came of writing a checkpoint: the same on all ranks, unless it is LOST."""

    PUBLISHED = auto()
    """Or nothing was being written."""
    FAILED = auto()
    """A file could not be written or read. Another attempt may succeed."""
    SUPERSEDED = auto()
    """A later round has begun, or another job has taken the folder: this round keeps nothing any more, and ends."""
    UNCONFIRMED = auto()
    """This rank could not reach its peers to hear of it."""


allow_classes(WriteOutcome)


class RoundSupersededError(RuntimeError):
    """What this round trains can be kept no more."""


class CheckpointWriter:
    """One rank's part in it."""

    def __init__(
        self,
        folder: CheckpointFolder,
        reporter: CheckpointReporter,
        peers: CpuGroup,
        pin_memory: PinMemory,
        free_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """`pin`: as `SlotCopies.pin`. `make_room`: as for `Saver`."""
        self._folder = folder
        self._reporter = reporter
        self._rank = dist.get_rank()
        self._peers = peers
        self._saver = CheckpointSaver(peers, pin_memory, free_memory=free_memory)
        self._group: dist.ProcessGroup | None = None
        self._worker_by_rank: list[str] = []
        """On which each rank is."""
        self._write_thread: threading.Thread | None = None
        self._is_stuck = False
        """`wait` has waited for long enough: its copy is still being written, and no other one is made meanwhile."""
        self._outcome = WriteOutcome.PUBLISHED
        self._superseded_reason = ""

    @property
    def has_buffer(self) -> bool:
        """As `Saver.has_room`."""
        return self._saver.has_buffer

    def start(self, manifest: Manifest, state: dict[str, Any], on_published: Callable[[int], None]) -> None:
        """Copies `state`, and writes the copy as the checkpoint of this manifest in the background. Collective.

        manifest: its files are found when they are written. published: called in the background, with the step, once
        the checkpoint is kept. `wait` comes first: it says what came of the one before.
        """
        stands = self._peers.all_gather((self._is_stuck, self._group is not None, identify_worker()))
        if stuck := [rank for rank, its in enumerate(stands) if its[0]]:
            self._report_stuck_write(manifest.step, stuck[0])
            self._outcome = WriteOutcome.UNCONFIRMED
            return
        if not all(its[1] for its in stands):
            self._group = new_cpu_group("pacekeeper checkpoints")
            self._worker_by_rank = [its[2] for its in stands]
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
        """Until what is being written is published, or given up; rank 0's log has the reason. `agree` comes next, where
        all ranks go on from it."""
        if self._write_thread is not None:
            if not self._is_stuck:  # it waits for each once
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
        outcome = WriteOutcome.UNCONFIRMED if self._is_stuck else self._outcome  # what came of it afterwards, nobody waits for
        self._is_stuck, self._outcome = False, WriteOutcome.PUBLISHED
        return outcome

    def agree_on_outcome(self, outcome: WriteOutcome) -> WriteOutcome:
        """What all ranks take for the outcome of the one that `wait` gave here: LOST where it is on one of them, since
        others may have heard of it when that one's patience was over. Collective.

        Raises RoundSupersededError, on all ranks, where this round keeps nothing any more.
        """
        outcomes = self._peers.all_gather(outcome)
        if WriteOutcome.SUPERSEDED in outcomes:
            raise RoundSupersededError(f"{self._superseded_reason or 'a later round has begun'}: this round keeps no checkpoint, and ends")
        return WriteOutcome.UNCONFIRMED if WriteOutcome.UNCONFIRMED in outcomes else outcome

    def _write(
        self, group: dist.ProcessGroup, manifest: Manifest, staged: StagedCopy | str, on_published: Callable[[int], None]
    ) -> None:
        step = manifest.step
        try:
            outcome, reason = self._attempt_write(group, manifest, staged)
        except Exception as error:  # the training goes on; if a peer is gone, it will not come far
            outcome, reason = WriteOutcome.UNCONFIRMED, self._format_reason(error)
            self._group = None  # some of the peers may have left its collectives
        if outcome is WriteOutcome.PUBLISHED:
            on_published(step)
            self._reporter.report_published(step)
        elif self._rank == 0 or outcome is WriteOutcome.UNCONFIRMED:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        if outcome is WriteOutcome.SUPERSEDED:
            self._superseded_reason = reason
        if outcome is WriteOutcome.FAILED or self._folder.new_owner_message:  # an earlier round has no news of a later one
            self._reporter.report_failure(f"{self._folder.path}: step {step}: {reason}", parse_failed_rank(reason))
        self._outcome = outcome

    def _attempt_write(self, group: dist.ProcessGroup, manifest: Manifest, staged: StagedCopy | str) -> tuple[WriteOutcome, str]:
        """What came of it, and why: rank 0's word, the same on all ranks.

        No rank leaves before the last collective, whatever fails on it: its peers would wait for it in there.
        """
        mine: dict[str, FileChecksum] | str
        try:
            mine = self._saver.write(staged, self._folder.get_partial_path(manifest.step), group)
        except Exception as error:
            mine = self._format_reason(error)
        written = all_gather_objects(mine, group)
        verified = all_gather_objects(self._verify(manifest.step, written), group)
        said: tuple[WriteOutcome, str] = broadcast_object(
            self._publish(manifest, written, verified) if self._rank == 0 else None, group
        )
        if said[0] is WriteOutcome.FAILED:
            self._folder.discard(manifest.step, self._saver.owns_file)
        return said

    def _verify(self, step: int, written: Sequence[dict[str, FileChecksum] | str]) -> str:
        """Reads what another rank has written, as another worker sees it; why it is not that, "": it is."""
        writer = choose_verified_rank(self._worker_by_rank, self._rank)
        files = written[writer]
        if any(isinstance(its, str) for its in written) or isinstance(files, str):
            return ""  # nothing will be published
        folder = self._folder.get_partial_path(step)
        for name, entry in files.items():
            try:
                if not wait_until_visible(folder / name):
                    return (
                        f"rank {self._rank}: {folder / name}, which rank {writer} has written, is not there on this "
                        f"rank's worker. {SHARED_VOLUME_REMEDY}"
                    )
                if compute_checksum(folder / name) != entry:
                    return f"rank {self._rank}: {folder / name} holds other bytes than rank {writer} has written"
            except OSError as error:
                return self._format_reason(error)
        return ""

    def _publish(
        self, manifest: Manifest, written: Sequence[dict[str, FileChecksum] | str], verified: Sequence[str]
    ) -> tuple[WriteOutcome, str]:
        """Rank 0's part. written: by each rank, or why it could not; verified: why a rank does not find it so."""
        folder = self._folder
        failures = [part for part in written if isinstance(part, str)] + [why for why in verified if why]
        if not failures:
            try:
                files = {name: entry for part in written if isinstance(part, dict) for name, entry in part.items()}
                if folder.publish(replace(manifest, files=files)):
                    return WriteOutcome.PUBLISHED, ""
                return WriteOutcome.SUPERSEDED, folder.new_owner_message or f"round {folder.round} is over: a later one has begun"
            except Exception as error:  # the peers wait for the outcome
                failures = [self._format_reason(error)]
        return WriteOutcome.FAILED, summarize_reasons(failures)

    def _report_stuck_write(self, step: int, rank: int) -> None:
        reason = f"rank {rank}: an earlier one is still being written: the volume has neither taken nor refused it"
        if self._rank == 0:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        self._reporter.report_failure(f"{self._folder.path}: step {step}: {reason}", rank)

    def _report_slow_volume(self) -> None:
        waits = f"the training waits for the last checkpoint, which is still being written after {_SLOW_WRITE_WARNING_SECONDS:g} s"
        self._reporter.report_failure(f"{self._folder.path}: {waits}")

    def _report_wait_timeout(self) -> None:
        reason = (
            f"rank {self._rank}: the training waits no longer for the last checkpoint, which is still being written "
            f"after {_MAX_WRITE_WAIT_SECONDS:g} s: the volume has neither taken nor refused it"
        )
        _log.warning("%s: %s", self._folder.path, reason)
        self._reporter.report_failure(f"{self._folder.path}: {reason}")

    def _format_reason(self, error: Exception) -> str:
        """In one line, for all ranks' ears."""
        return str(error) if isinstance(error, CheckpointWriteError) else f"rank {self._rank}: {describe_error(error)}"


def choose_verified_rank(workers: Sequence[str], rank: int) -> int:
    """The rank whose files `rank` verifies: each rank's are verified by one, on another worker as far as there is one.

    workers: on which each rank is. Where all are on one, another rank of it does; a rank that is alone, itself.
    """
    order = sorted(range(len(workers)), key=lambda its: workers[its])
    most = max(Counter(workers).values())
    shift = most if most < len(workers) else 1
    return order[(order.index(rank) + shift) % len(order)]
