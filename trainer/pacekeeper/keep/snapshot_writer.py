"""Takes snapshots: the state is copied into shared memory at once; the rank states of all ranks come to it later."""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median_low

import torch
import torch.distributed as dist

from pacekeeper.observe.cpu_group import CpuGroup

from .rank_state import RANK_STATE_BYTES, capture_rank_state, fingerprint
from .snapshots import SLOTS, Slot, Snapshots
from .state import TrainingState

_log = logging.getLogger(__name__)


class SnapshotWriter:
    """One rank's part in it."""

    def __init__(self, snapshots: Snapshots | None, state: TrainingState, peers: CpuGroup, keeps: bool) -> None:
        """
        snapshots: None: this rank has no shared memory.
        keeps: whether this rank is one of those that keep a copy; the others give their rank states.
        """
        self._snapshots = snapshots if keeps else None
        self._state = state
        self._peers = peers
        self._exchange: tuple[dist.Work, torch.Tensor, Slot | None] | None = None
        self._costs: deque[float] = deque(maxlen=5)
        self._taken = 0
        self._copy_seconds = 0.0

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps a copy: no longer where there was no memory for one."""
        return self._snapshots is not None

    @property
    def seconds(self) -> float:
        """What a snapshot costs the training; 0: not known yet."""
        return median_low(self._costs) if self._costs else 0.0

    def write(self, step: int, samples: int) -> None:
        """Copies the state after `step`; `settle` makes it valid. Collective. `samples`: of this rank."""
        slot = self._copy(step)
        mine = torch.frombuffer(bytearray(capture_rank_state(samples)), dtype=torch.uint8)
        everybody = torch.empty(self._peers.group.size() * RANK_STATE_BYTES, dtype=torch.uint8)
        work = dist.all_gather_into_tensor(everybody, mine, group=self._peers.group, async_op=True)
        assert work is not None
        self._exchange = (work, everybody, slot)

    def settle(self) -> int:
        """Makes what was written last valid, now that all rank states have come; returns its step, -1 without one."""
        if self._exchange is None:
            return -1
        (work, rank_states, slot), self._exchange = self._exchange, None
        self._peers.wait(work)
        if slot is None:
            return -1
        start = time.perf_counter()
        step = slot.publish(rank_states)
        if self._taken > SLOTS:  # the first ones make their slots, which is dear
            self._costs.append(self._copy_seconds + time.perf_counter() - start)
        return step

    def _copy(self, step: int) -> Slot | None:
        if self._snapshots is None:
            return None
        try:
            start = time.perf_counter()
            state = self._state.own()
            slot = self._snapshots.write(step, state, fingerprint(self._state.own_description(state)))
        except OSError as error:
            self._snapshots = None
            rank = self._peers.group.rank()
            _log.warning(
                "no more snapshots on rank %d: %s; give the container and its runtime volume more memory", rank, error
            )
            return None
        self._taken += 1
        self._copy_seconds = time.perf_counter() - start
        return slot
