"""Takes snapshots: the state is copied into shared memory at once; the rank states of all ranks come to it later."""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from statistics import fmean

import torch
import torch.distributed as dist

from pacekeeper.observe.cpu_group import CpuGroup

from .beside import run_in_background
from .copies import CopyTime, TornCopyError
from .rank_state import RANK_STATE_BYTES, capture_rank_state, compute_fingerprint
from .refusals import SnapshotBackoff
from .snapshots import Snapshots, CopyOutcome
from .state import TrainingState

_COPY_REPORT_STRUCT = struct.Struct("<??d")
"""What a rank says beside its rank state: whether it is to keep a copy, whether it has one of this snapshot, and what
one costs it, in seconds."""
CONCURRENT_COST_SHARE = 0.1
"""Of the time that a snapshot takes beside the training (the device's copying, the host's checksum), what counts as its
cost: so where it may cost 1 % of the time, a tenth of it may go on beside."""
_log = logging.getLogger(__name__)


class SnapshotWriter:
    """One rank's part in it."""

    def __init__(
        self,
        snapshots: Snapshots | None,
        state: TrainingState,
        peers: CpuGroup,
        should_store_copy: bool,
        get_delivery_cost: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        snapshots: None: this rank has no shared memory.
        keeps: whether this rank is one of those that keep a copy; the others give their rank states.
        beside: seconds that each snapshot takes from this rank's training later on.
        """
        self._snapshots = snapshots if should_store_copy else None
        self._should_store_copy = should_store_copy
        self._state = state
        self._peers = peers
        self._get_delivery_cost = get_delivery_cost
        self._exchange: tuple[dist.Work, torch.Tensor, bool] | None = None
        self._memory_backoff = SnapshotBackoff()
        self._fruitless_backoff = SnapshotBackoff()
        """Of snapshots that help nobody; alike on all ranks."""
        self._costs: deque[float] = deque(maxlen=5)
        self._cost_of_peers = 0.0
        self._has_allocated = False
        """Whether memory was taken for the snapshot that is under way."""
        self._host_seconds = 0.0
        """For which the training thread has been busy with it."""
        self._pending_publish: Future[tuple[int, float]] | None = None
        """Its step, and the seconds that the checksum took."""
        self._copy_time: CopyTime | None = None
        """None: the host made the copy."""

    @property
    def stores_copy(self) -> bool:
        """Whether this rank keeps a copy, as far as there is memory for one."""
        return self._snapshots is not None

    @property
    def seconds(self) -> float:
        """What a snapshot costs the training: of the last few, the mean, on the rank where it is highest.

        0: not known yet.
        """
        return max(self._own_cost, self._cost_of_peers)

    def write(self, step: int, samples: int, wait: bool = False) -> None:
        """Copies the state after `step`; `settle` makes it valid, and has made the one before valid. Collective.

        samples: of this rank. wait: for memory that is being taken beside the training.
        """
        if self._fruitless_backoff.should_skip():
            return
        start = time.perf_counter()
        if self._state.sharded:
            self._peers.all_agree(True)  # all have the one before, which the job needs while this one is written
        kept = self._copy_state(step, wait)
        said = _COPY_REPORT_STRUCT.pack(self._should_store_copy, kept, self._own_cost)
        mine = torch.frombuffer(bytearray(capture_rank_state(samples) + said), dtype=torch.uint8)
        everybody = torch.empty(self._peers.group.size() * len(mine), dtype=torch.uint8)
        work = dist.all_gather_into_tensor(everybody, mine, group=self._peers.group, async_op=True)
        assert work is not None
        self._exchange = (work, everybody.view(-1, len(mine)), kept)
        self._host_seconds = time.perf_counter() - start

    def settle(self, wait: bool = False) -> int:
        """Makes what was written last valid, now that all rank states have come; returns its step, -1 without one.

        Where the training goes on beside the host, its checksum is made meanwhile: then it is valid at a later call,
        or with `wait` at this one.
        """
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._finish_exchange(*exchange)
        sealing = self._pending_publish
        if sealing is None or not (wait or sealing.done()):
            return -1
        start = time.perf_counter()
        step, seal_seconds = sealing.result()
        self._pending_publish = None
        if not self._has_allocated:  # taking memory is dear, and rare
            self._costs.append(self._host_seconds + time.perf_counter() - start + self._compute_concurrent_cost(seal_seconds))
        return step

    def _compute_concurrent_cost(self, seal_seconds: float) -> float:
        """What the copy and the checksum cost it, beside the time of its thread."""
        copy = self._copy_time
        return 0.0 if copy is None else copy.blocked_seconds + CONCURRENT_COST_SHARE * (copy.concurrent_seconds + seal_seconds)

    def _finish_exchange(self, work: dist.Work, rows: torch.Tensor, kept: bool) -> None:
        self._peers.wait(work)
        if not self._is_restorable(rows[:, RANK_STATE_BYTES:]):
            self._fruitless_backoff.record_failure()
            self._memory_backoff.reset()  # all ranks try again together
            if self._snapshots is not None and kept:
                self._snapshots.release_slot()
                self._costs.append(self._host_seconds)
            return
        self._fruitless_backoff.reset()
        if self._snapshots is not None and kept:
            self._complete_snapshot(self._snapshots, rows[:, :RANK_STATE_BYTES].reshape(-1))

    def _complete_snapshot(self, snapshots: Snapshots, rank_states: torch.Tensor) -> None:
        whole, self._copy_time = True, None
        try:
            self._copy_time = snapshots.finish_copy()
        except TornCopyError as error:
            whole = False
            _log.warning("no snapshot on rank %d: %s", self._peers.group.rank(), error)
        if self._state.sharded:
            whole = self._peers.all_agree(whole)  # else the next one would be written over what all ranks have
        if not whole:
            return  # the slot stays void

        def publish() -> tuple[int, float]:
            start = time.perf_counter()
            step = snapshots.publish(rank_states)
            return step, time.perf_counter() - start

        if self._copy_time is not None:
            self._host_seconds = 0.0  # its launching may wait for all that the device has to do before
            self._pending_publish = run_in_background(publish, "pacekeeper-seal")
            return
        self._pending_publish = Future()
        step, seconds = publish()
        self._host_seconds += seconds
        self._pending_publish.set_result((step, seconds))

    def _copy_state(self, step: int, wait: bool) -> bool:
        """Whether this rank has a copy."""
        if self._snapshots is None or self._memory_backoff.should_skip():
            return False
        start = time.perf_counter()
        try:
            state = self._state.capture_local()
            written = self._snapshots.write(step, state, compute_fingerprint(self._state.describe_local(state)), wait)
        except OSError as error:
            self._memory_backoff.record_failure()
            self._costs.append(time.perf_counter() - start)  # so that trying again costs no more than a snapshot may
            _log.warning(
                "no snapshot of step %d on rank %d: %s; give the container and its runtime volume more memory",
                step,
                self._peers.group.rank(),
                error,
            )
            return False
        self._memory_backoff.reset()
        self._has_allocated = written is CopyOutcome.ALLOCATED_AND_COPIED
        return written is not CopyOutcome.DEFERRED

    def _is_restorable(self, reports: torch.Tensor) -> bool:
        """Whether a job could come back from what the ranks have: shards from all together, a replica from any."""
        rows = [_COPY_REPORT_STRUCT.unpack(row) for row in reports.numpy()]
        self._cost_of_peers = max(cost for *_, cost in rows)
        have = [has for keeps, has, _ in rows if keeps]
        return all(have) if self._state.sharded else any(have)

    @property
    def _own_cost(self) -> float:
        return (fmean(self._costs) if self._costs else 0.0) + self._get_delivery_cost()
