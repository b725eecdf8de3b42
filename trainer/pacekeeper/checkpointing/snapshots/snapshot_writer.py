"""Takes snapshots: the state is copied into shared memory at once; the rank states of all ranks follow later."""

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

from pacekeeper.observe.collectives.cpu_group import CpuGroup

from ..background import run_in_background
from ..rank_state import RANK_STATE_BYTES, capture_rank_state, compute_fingerprint
from ..training_state import TrainingState
from .snapshot_backoff import SnapshotBackoff
from .snapshot_copies import CopyTime, TornCopyError
from .snapshot_slots import CopyOutcome, Snapshots

_COPY_REPORT_STRUCT = struct.Struct("<??d")
"""A rank's report, which follows its rank state.

It has: whether the rank should keep a copy, whether it has one of this snapshot, and its cost in seconds.
"""
CONCURRENT_COST_SHARE = 0.1
"""Share of a snapshot's concurrent time (the device's copying, the host's checksum) that counts as its cost.

If a snapshot may cost 1 % of the time, a tenth of the time may pass concurrently with it.
"""
_log = logging.getLogger(__name__)


class SnapshotWriter:
    """One rank's part in taking snapshots."""

    def __init__(
        self,
        snapshots: Snapshots | None,
        state: TrainingState,
        peers: CpuGroup,
        should_store_copy: bool,
        get_delivery_cost: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create the writer.

        `snapshots` None: this rank has no shared memory.
        `should_store_copy`: whether this rank keeps a copy; the other ranks contribute their rank states.
        `get_delivery_cost`: returns the seconds that each snapshot costs this rank's training later.
        """
        self._snapshots = snapshots if should_store_copy else None
        self._should_store_copy = should_store_copy
        self._state = state
        self._peers = peers
        self._get_delivery_cost = get_delivery_cost
        self._exchange: tuple[dist.Work, torch.Tensor, bool] | None = None
        self._memory_backoff = SnapshotBackoff()
        self._fruitless_backoff = SnapshotBackoff()
        """Backoff after snapshots that cannot be restored; the same on all ranks."""
        self._costs: deque[float] = deque(maxlen=5)
        self._cost_of_peers = 0.0
        self._has_allocated = False
        """Whether memory was allocated for the present snapshot."""
        self._host_seconds = 0.0
        """Time that the training thread has spent on it."""
        self._pending_publish: Future[tuple[int, float]] | None = None
        """Its step, and the seconds of its checksum."""
        self._copy_time: CopyTime | None = None
        """None: the host made the copy."""

    @property
    def stores_copy(self) -> bool:
        """Whether this rank keeps a copy, if there is memory for one."""
        return self._snapshots is not None

    @property
    def seconds(self) -> float:
        """Mean cost of the last few snapshots to the training, on the rank where it is highest; 0: unknown."""
        return max(self._own_cost, self._cost_of_peers)

    def write(self, step: int, samples: int, wait: bool = False) -> None:
        """Copy the state after `step`; `settle` makes it valid, and has made the previous one valid. Collective.

        `samples`: samples of this rank. `wait`: wait for memory that is allocated in the background.
        """
        if self._fruitless_backoff.should_skip():
            return
        start = time.perf_counter()
        if self._state.sharded:
            self._peers.all_agree(True)  # all have the previous one, which the job needs while this one is written
        has_copy = self._copy_state(step, wait)
        report = _COPY_REPORT_STRUCT.pack(self._should_store_copy, has_copy, self._own_cost)
        own_row = torch.frombuffer(bytearray(capture_rank_state(samples) + report), dtype=torch.uint8)
        gathered = torch.empty(self._peers.group.size() * len(own_row), dtype=torch.uint8)
        work = dist.all_gather_into_tensor(gathered, own_row, group=self._peers.group, async_op=True)
        assert work is not None
        self._exchange = (work, gathered.view(-1, len(own_row)), has_copy)
        self._host_seconds = time.perf_counter() - start

    def settle(self, wait: bool = False) -> int | None:
        """Make the last snapshot valid once all rank states have arrived. Returns its step, None without one.

        If training continues while the host works, the checksum is computed in the background. The snapshot is then
        valid at a later call, or at this one with `wait`.
        """
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._finish_exchange(*exchange)
        pending = self._pending_publish
        if pending is None or not (wait or pending.done()):
            return None
        start = time.perf_counter()
        step, checksum_seconds = pending.result()
        self._pending_publish = None
        if not self._has_allocated:  # allocation is expensive, and rare
            self._costs.append(
                self._host_seconds + time.perf_counter() - start + self._compute_concurrent_cost(checksum_seconds)
            )
        return step

    def _compute_concurrent_cost(self, checksum_seconds: float) -> float:
        """Return the cost of copy and checksum in addition to the time of the training thread."""
        copy = self._copy_time
        return (
            0.0
            if copy is None
            else copy.blocked_seconds + CONCURRENT_COST_SHARE * (copy.concurrent_seconds + checksum_seconds)
        )

    def _finish_exchange(self, work: dist.Work, rows: torch.Tensor, has_copy: bool) -> None:
        self._peers.wait(work)
        if not self._is_restorable(rows[:, RANK_STATE_BYTES:]):
            self._fruitless_backoff.record_failure()
            self._memory_backoff.reset()  # all ranks try again together
            if self._snapshots is not None and has_copy:
                self._snapshots.release_slot()
                self._costs.append(self._host_seconds)
            return
        self._fruitless_backoff.reset()
        if self._snapshots is not None and has_copy:
            self._complete_snapshot(self._snapshots, rows[:, :RANK_STATE_BYTES].reshape(-1))

    def _complete_snapshot(self, snapshots: Snapshots, rank_states: torch.Tensor) -> None:
        is_intact, self._copy_time = True, None
        try:
            self._copy_time = snapshots.finish_copy()
        except TornCopyError as error:
            is_intact = False
            _log.warning("no snapshot on rank %d: %s", self._peers.group.rank(), error)
        if self._state.sharded:
            is_intact = self._peers.all_agree(is_intact)  # otherwise the next one would overwrite what all ranks have
        if not is_intact:
            return  # the slot stays void

        def publish() -> tuple[int, float]:
            start = time.perf_counter()
            step = snapshots.publish(rank_states)
            return step, time.perf_counter() - start

        if self._copy_time is not None:
            self._host_seconds = 0.0  # launching may wait for all earlier work of the device
            self._pending_publish = run_in_background(publish, "pacekeeper-checksum")
            return
        self._pending_publish = Future()
        step, seconds = publish()
        self._host_seconds += seconds
        self._pending_publish.set_result((step, seconds))

    def _copy_state(self, step: int, wait: bool) -> bool:
        """Copy the state into a slot, and return whether this rank has a copy."""
        if self._snapshots is None or self._memory_backoff.should_skip():
            return False
        start = time.perf_counter()
        try:
            state = self._state.capture_local()
            outcome = self._snapshots.write(step, state, compute_fingerprint(self._state.describe_local(state)), wait)
        except OSError as error:
            self._memory_backoff.record_failure()
            self._costs.append(time.perf_counter() - start)  # so that a retry costs no more than a snapshot may
            _log.warning(
                "no snapshot of step %d on rank %d: %s; give the container and its runtime volume more memory",
                step,
                self._peers.group.rank(),
                error,
            )
            return False
        self._memory_backoff.reset()
        self._has_allocated = outcome is CopyOutcome.ALLOCATED_AND_COPIED
        return outcome is not CopyOutcome.DEFERRED

    def _is_restorable(self, reports: torch.Tensor) -> bool:
        """Return whether the job could be restored: shards are needed from all ranks, a replica from any."""
        rows = [_COPY_REPORT_STRUCT.unpack(row) for row in reports.numpy()]
        self._cost_of_peers = max(cost for *_, cost in rows)
        has_copies = [has_copy for should_store, has_copy, _ in rows if should_store]
        return all(has_copies) if self._state.sharded else any(has_copies)

    @property
    def _own_cost(self) -> float:
        return (fmean(self._costs) if self._costs else 0.0) + self._get_delivery_cost()
