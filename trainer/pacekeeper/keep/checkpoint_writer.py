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

from pacekeeper.exchange import broadcast, gather
from pacekeeper.observe.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.plain import allow

from .checkpoints import ONE_VOLUME, CheckpointFolder, appears, described, in_short
from .distributed_checkpoint import Failed, Pin, Saver, Staged
from .manifests import FileSum, Manifest, checksum
from .news import Reporter, culprit
from .worker import this_worker

_SLOW_SECONDS = 10.0
"""Training that waits for a checkpoint's end for so long says so: a volume may hang instead of failing."""
_PATIENCE_SECONDS = 1500.0
"""After which training, or the rank's end, waits for a checkpoint no longer: before the launcher's watch takes the rank
for one that hangs (`LauncherSettings.phase_deadline`), and ends the round for it."""
_log = logging.getLogger(__name__)


class WriteOutcome(Enum):
    """What came of writing a checkpoint: the same on all ranks, unless it is LOST."""

    KEPT = auto()
    """Or nothing was being written."""
    FAILED = auto()
    """A file could not be written or read. Another attempt may succeed."""
    OVER = auto()
    """A later round has begun, or another job has taken the folder: this round keeps nothing any more, and ends."""
    LOST = auto()
    """This rank could not reach its peers to hear of it."""


allow(WriteOutcome)


class RoundOver(RuntimeError):
    """What this round trains can be kept no more."""


class CheckpointWriter:
    """One rank's part in it."""

    def __init__(
        self,
        folder: CheckpointFolder,
        news: Reporter,
        peers: CpuGroup,
        pin: Pin,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        """`pin`: as `SlotCopies.pin`. `make_room`: as for `Saver`."""
        self._folder = folder
        self._news = news
        self._rank = dist.get_rank()
        self._peers = peers
        self._saver = Saver(peers, pin, make_room=make_room)
        self._group: dist.ProcessGroup | None = None
        self._workers: list[str] = []
        """On which each rank is."""
        self._writing: threading.Thread | None = None
        self._stuck = False
        """`wait` has waited for long enough: its copy is still being written, and no other one is made meanwhile."""
        self._outcome = WriteOutcome.KEPT
        self._why_over = ""

    @property
    def has_room(self) -> bool:
        """As `Saver.has_room`."""
        return self._saver.has_room

    def start(self, manifest: Manifest, state: dict[str, Any], published: Callable[[int], None]) -> None:
        """Copies `state`, and writes the copy as the checkpoint of this manifest in the background. Collective.

        manifest: its files are found when they are written. published: called in the background, with the step, once
        the checkpoint is kept. `wait` comes first: it says what came of the one before.
        """
        stands = self._peers.gather((self._stuck, self._group is not None, this_worker()))
        if stuck := [rank for rank, its in enumerate(stands) if its[0]]:
            self._tell_of_stuck(manifest.step, stuck[0])
            self._outcome = WriteOutcome.LOST
            return
        if not all(its[1] for its in stands):
            self._group = new_cpu_group("pacekeeper checkpoints")
            self._workers = [its[2] for its in stands]
        assert self._group is not None
        staged: Staged | str
        try:
            staged = self._saver.stage(state)
        except Failed as failure:
            staged = str(failure)
        self._writing = threading.Thread(
            target=self._write, args=(self._group, manifest, staged, published), name="checkpoint", daemon=True
        )
        self._writing.start()

    def wait(self) -> WriteOutcome:
        """Until what is being written is published, or given up; rank 0's log has the reason. `agree` comes next, where
        all ranks go on from it."""
        if self._writing is not None:
            if not self._stuck:  # it waits for each once
                self._writing.join(_SLOW_SECONDS)
                if self._writing.is_alive():
                    self._tell_of_slow_volume()
                    self._writing.join(max(0.0, _PATIENCE_SECONDS - _SLOW_SECONDS))
                if self._writing.is_alive():
                    self._tell_of_patience()
                    self._stuck = True
            if self._writing.is_alive():
                return WriteOutcome.LOST
            self._writing = None
        outcome = WriteOutcome.LOST if self._stuck else self._outcome  # what came of it afterwards, nobody waits for
        self._stuck, self._outcome = False, WriteOutcome.KEPT
        return outcome

    def agree(self, outcome: WriteOutcome) -> WriteOutcome:
        """What all ranks take for the outcome of the one that `wait` gave here: LOST where it is on one of them, since
        others may have heard of it when that one's patience was over. Collective.

        Raises RoundOver, on all ranks, where this round keeps nothing any more.
        """
        outcomes = self._peers.gather(outcome)
        if WriteOutcome.OVER in outcomes:
            raise RoundOver(f"{self._why_over or 'a later round has begun'}: this round keeps no checkpoint, and ends")
        return WriteOutcome.LOST if WriteOutcome.LOST in outcomes else outcome

    def _write(
        self, group: dist.ProcessGroup, manifest: Manifest, staged: Staged | str, published: Callable[[int], None]
    ) -> None:
        step = manifest.step
        try:
            outcome, reason = self._attempt(group, manifest, staged)
        except Exception as error:  # the training goes on; if a peer is gone, it will not come far
            outcome, reason = WriteOutcome.LOST, self._reason(error)
            self._group = None  # some of the peers may have left its collectives
        if outcome is WriteOutcome.KEPT:
            published(step)
            self._news.kept(step)
        elif self._rank == 0 or outcome is WriteOutcome.LOST:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        if outcome is WriteOutcome.OVER:
            self._why_over = reason
        if outcome is WriteOutcome.FAILED or self._folder.taken_by:  # an earlier round has no news of a later one
            self._news.failed(f"{self._folder.path}: step {step}: {reason}", culprit(reason))
        self._outcome = outcome

    def _attempt(self, group: dist.ProcessGroup, manifest: Manifest, staged: Staged | str) -> tuple[WriteOutcome, str]:
        """What came of it, and why: rank 0's word, the same on all ranks.

        No rank leaves before the last collective, whatever fails on it: its peers would wait for it in there.
        """
        mine: dict[str, FileSum] | str
        try:
            mine = self._saver.write(staged, self._folder.partial(manifest.step), group)
        except Exception as error:
            mine = self._reason(error)
        written = gather(mine, group)
        verified = gather(self._verify(manifest.step, written), group)
        said: tuple[WriteOutcome, str] = broadcast(
            self._publish(manifest, written, verified) if self._rank == 0 else None, group
        )
        if said[0] is WriteOutcome.FAILED:
            self._folder.discard(manifest.step, self._saver.wrote)
        return said

    def _verify(self, step: int, written: Sequence[dict[str, FileSum] | str]) -> str:
        """Reads what another rank has written, as another worker sees it; why it is not that, "": it is."""
        writer = whose_files(self._workers, self._rank)
        files = written[writer]
        if any(isinstance(its, str) for its in written) or isinstance(files, str):
            return ""  # nothing will be published
        folder = self._folder.partial(step)
        for name, entry in files.items():
            try:
                if not appears(folder / name):
                    return (
                        f"rank {self._rank}: {folder / name}, which rank {writer} has written, is not there on this "
                        f"rank's worker. {ONE_VOLUME}"
                    )
                if checksum(folder / name) != entry:
                    return f"rank {self._rank}: {folder / name} holds other bytes than rank {writer} has written"
            except OSError as error:
                return self._reason(error)
        return ""

    def _publish(
        self, manifest: Manifest, written: Sequence[dict[str, FileSum] | str], verified: Sequence[str]
    ) -> tuple[WriteOutcome, str]:
        """Rank 0's part. written: by each rank, or why it could not; verified: why a rank does not find it so."""
        folder = self._folder
        failures = [part for part in written if isinstance(part, str)] + [why for why in verified if why]
        if not failures:
            try:
                files = {name: entry for part in written if isinstance(part, dict) for name, entry in part.items()}
                if folder.publish(replace(manifest, files=files)):
                    return WriteOutcome.KEPT, ""
                return WriteOutcome.OVER, folder.taken_by or f"round {folder.round} is over: a later one has begun"
            except Exception as error:  # the peers wait for the outcome
                failures = [self._reason(error)]
        return WriteOutcome.FAILED, in_short(failures)

    def _tell_of_stuck(self, step: int, rank: int) -> None:
        reason = f"rank {rank}: an earlier one is still being written: the volume has neither taken nor refused it"
        if self._rank == 0:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        self._news.failed(f"{self._folder.path}: step {step}: {reason}", rank)

    def _tell_of_slow_volume(self) -> None:
        waits = f"the training waits for the last checkpoint, which is still being written after {_SLOW_SECONDS:g} s"
        self._news.failed(f"{self._folder.path}: {waits}")

    def _tell_of_patience(self) -> None:
        reason = (
            f"rank {self._rank}: the training waits no longer for the last checkpoint, which is still being written "
            f"after {_PATIENCE_SECONDS:g} s: the volume has neither taken nor refused it"
        )
        _log.warning("%s: %s", self._folder.path, reason)
        self._news.failed(f"{self._folder.path}: {reason}")

    def _reason(self, error: Exception) -> str:
        """In one line, for all ranks' ears."""
        return str(error) if isinstance(error, Failed) else f"rank {self._rank}: {described(error)}"


def whose_files(workers: Sequence[str], rank: int) -> int:
    """The rank whose files `rank` verifies: each rank's are verified by one, on another worker as far as there is one.

    workers: on which each rank is. Where all are on one, another rank of it does; a rank that is alone, itself.
    """
    order = sorted(range(len(workers)), key=lambda its: workers[its])
    most = max(Counter(workers).values())
    shift = most if most < len(workers) else 1
    return order[(order.index(rank) + shift) % len(order)]
