"""Writes checkpoints in the background: each is one attempt, whose outcome all ranks hear alike."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch.distributed as dist

from pacekeeper.exchange import broadcast, gather
from pacekeeper.observe.cpu_group import new_cpu_group
from pacekeeper.plain import allow

from .checkpoints import CheckpointFolder
from .distributed_checkpoint import INDEX, TORCHS_INDEX, Failed, save
from .manifests import FileSum, Manifest, checksum
from .news import Reporter, culprit

_SLOW_SECONDS = 10.0
"""Training that waits for a checkpoint's end for so long says so: a volume may hang instead of failing."""
_log = logging.getLogger(__name__)


class WriteOutcome(Enum):
    """What came of writing a checkpoint: the same on all ranks, unless it is LOST."""

    KEPT = auto()
    """Or nothing was being written."""
    FAILED = auto()
    """A file could not be written or read. Another attempt may succeed."""
    OVER = auto()
    """A later round has begun: this one keeps nothing any more."""
    LOST = auto()
    """This rank could not reach its peers to hear of it."""


allow(WriteOutcome)


class CheckpointWriter:
    """One rank's part in it."""

    def __init__(self, folder: CheckpointFolder, news: Reporter) -> None:
        self._folder = folder
        self._news = news
        self._rank = dist.get_rank()
        self._group: dist.ProcessGroup | None = None
        self._writing: threading.Thread | None = None
        self._outcome = WriteOutcome.KEPT

    def start(self, manifest: Manifest, state: dict[str, Any], published: Callable[[int], None]) -> None:
        """Writes `state`, which nobody changes any more, as the checkpoint of this manifest. Collective.

        manifest: its files are found when they are written. published: called in the background, with the step, once
        the checkpoint is kept. `wait` comes first: it says what came of the one before.
        """
        assert self._writing is None, "wait() comes first"
        if self._group is None:
            self._group = new_cpu_group("pacekeeper checkpoints")
        self._writing = threading.Thread(
            target=self._write, args=(self._group, manifest, state, published), name="checkpoint", daemon=True
        )
        self._writing.start()

    def wait(self) -> WriteOutcome:
        """Until what is being written is published, or given up; rank 0's log has the reason."""
        if self._writing is not None:
            self._writing.join(_SLOW_SECONDS)
            if self._writing.is_alive():
                self._tell_of_slow_volume()
            self._writing.join()
            self._writing = None
        outcome, self._outcome = self._outcome, WriteOutcome.KEPT
        return outcome

    def _write(
        self, group: dist.ProcessGroup, manifest: Manifest, state: dict[str, Any], published: Callable[[int], None]
    ) -> None:
        step = manifest.step
        try:
            outcome, reason = self._attempt(group, manifest, state)
        except Exception as error:  # the training goes on; if a peer is gone, it will not come far
            outcome, reason = WriteOutcome.LOST, _reason(self._rank, error)
        if outcome is WriteOutcome.KEPT:
            published(step)
            self._news.kept(step)
        elif self._rank == 0 or outcome is WriteOutcome.LOST:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        if outcome is WriteOutcome.FAILED:
            self._news.failed(f"{self._folder.path}: step {step}: {reason}", culprit(reason))
        self._outcome = outcome

    def _attempt(self, group: dist.ProcessGroup, manifest: Manifest, state: dict[str, Any]) -> tuple[WriteOutcome, str]:
        """What came of it, and why: rank 0's word, the same on all ranks.

        No rank leaves before the last collective, whatever fails on it: its peers would wait for it in there.
        """
        mine: dict[str, FileSum] | str
        try:
            partial = self._folder.partial(manifest.step)
            save(state, partial, group)
            mine = {path.name: checksum(path) for path in partial.glob(f"__{self._rank}_*.distcp")}
        except Exception as error:
            mine = _reason(self._rank, error)
        everybody = gather(mine, group)
        said: tuple[WriteOutcome, str] = broadcast(
            self._publish(manifest, everybody) if self._rank == 0 else None, group
        )
        return said

    def _publish(self, manifest: Manifest, everybody: Sequence[dict[str, FileSum] | str]) -> tuple[WriteOutcome, str]:
        """Rank 0's part. everybody: what each rank has written, or why it could not."""
        folder = self._folder
        failures = [part for part in everybody if isinstance(part, str)]
        if not failures:
            try:
                files = {name: entry for part in everybody if isinstance(part, dict) for name, entry in part.items()}
                files |= {name: checksum(folder.partial(manifest.step) / name) for name in (INDEX, TORCHS_INDEX)}
                if folder.publish(replace(manifest, files=files)):
                    return WriteOutcome.KEPT, ""
                return WriteOutcome.OVER, f"round {folder.round} is over: a later one has begun"
            except Exception as error:  # the peers wait for the outcome
                failures = [_reason(0, error)]
        folder.discard(manifest.step)  # by now nobody writes there any more
        return WriteOutcome.FAILED, "; ".join(dict.fromkeys(failures))

    def _tell_of_slow_volume(self) -> None:
        waits = f"the training waits for the last checkpoint, which is still being written after {_SLOW_SECONDS:g} s"
        self._news.failed(f"{self._folder.path}: {waits}")


def _reason(rank: int, error: Exception) -> str:
    """In one line, for all ranks' ears. What comes to all ranks alike says itself on which it began."""
    return str(error) if isinstance(error, Failed) else f"rank {rank}: {type(error).__name__}: {error}"
