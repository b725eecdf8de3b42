"""When the ranks of a job synchronize, and what they do then. Pure decisions: numbers in, numbers out, no torch.

A *sync point* is a boundary between two steps that all ranks reach together. In Sync each boundary is one. In the
Local-SGD modes (EDiT and AsyncEDiT, arXiv 2412.07210) each synchronization is one, and in between no rank waits for
another. Everything that concerns the whole job happens at sync points, from numbers that are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan
from pacekeeper_analysis.stragglers.length_cost import SequenceCost


@dataclass(frozen=True)
class TrainingConfig:
    """How the ranks train together: what a plan may change live. Part of a checkpoint."""

    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: int = 16
    """EDiT: steps between two synchronizations."""
    sync_seconds: float = 2.0
    """AsyncEDiT: seconds between two synchronizations."""
    gc_every: int = 0
    """Steps between two garbage collections; 0: Python's own schedule."""
    shares: tuple[int, ...] | None = None
    """Samples of each rank in a step; None: as equal as integers allow."""
    sequence_cost: tuple[float, float, float] | None = None
    """Terms of `SequenceCost`, by which samples are balanced; None: the script's own cost."""

    @classmethod
    def from_plan(cls, plan: WorkerPlan) -> Self:
        return cls(plan.sync_mode, plan.sync_every, plan.sync_seconds, plan.gc_every, plan.shares, plan.sequence_cost)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        tuples = {name: tuple(state[name]) for name in ("shares", "sequence_cost") if state.get(name) is not None}
        return cls(**{**state, **tuples, "sync_mode": SyncMode(state["sync_mode"])})

    @property
    def cost(self) -> SequenceCost | None:
        return None if self.sequence_cost is None else SequenceCost(*self.sequence_cost)


def select_sync_mode(requested_mode: SyncMode, step: int, warmup_steps: int) -> SyncMode:
    """Return the mode after `step` steps of the job: a Local-SGD mode begins right after a warm-up in Sync."""
    return requested_mode if step >= warmup_steps else SyncMode.SYNC


def crosses_multiple(before: int, after: int, every: int) -> bool:
    """Return whether a multiple of `every` lies in (before, after]. A job may advance several steps per sync point."""
    return every > 0 and after // every > before // every


def should_synchronize(elapsed: float, step_seconds: float, seconds: float, in_flight_seconds: float = 0.0) -> bool:
    """Return whether a rank synchronizes after this step, if that is closer to `seconds` than after the next step.

    `elapsed`: seconds since the last sync point. `in_flight_seconds`: remaining time of this step. `step_seconds`: time
    of the next step.
    """
    return elapsed + in_flight_seconds + step_seconds / 2 >= seconds


@dataclass(frozen=True)
class SampleSource:
    """How the ranks train, and where their samples come from, up to the next sync point or permanently."""

    mode: SyncMode
    is_leased: bool = False
    """Whether ranks lease samples on demand; otherwise each step's global batch is assigned by shares."""
    limit: int | None = None
    """Samples that the job may have used when the leases end; None: they do not end."""

    @property
    def is_local(self) -> bool:
        return self.mode is not SyncMode.SYNC


def choose_sample_source(requested_mode: SyncMode, samples: int, global_batch: int, limit: int | None) -> SampleSource:
    """Return the sample source after a sync point at `samples` of at most `limit` samples of the job.

    Global batches start at multiples of the global batch; leases may end anywhere. Leases up to the next multiple
    therefore come before shares. The job's last global batch is assigned by shares in any mode, so that every rank
    takes part in its end.
    """
    missing = -samples % global_batch
    if requested_mode is SyncMode.ASYNC_EDIT:
        leases_end = None if limit is None else limit - global_batch
        if leases_end is None or samples < leases_end:
            return SampleSource(requested_mode, is_leased=True, limit=leases_end)
    if missing:
        return SampleSource(SyncMode.ASYNC_EDIT, is_leased=True, limit=samples + missing)
    return SampleSource(requested_mode)


@dataclass(frozen=True)
class SyncActions:
    """What happens at a sync point, in the same way on all ranks."""

    leave: bool = False
    finish: bool = False
    checkpoint: bool = False
    snapshot: bool = False
    switch: bool = False
    """Switch to another mode, or to another sample source."""

    @property
    def has_any(self) -> bool:
        """Whether there is an action. All of them need the common parameters and the unused samples."""
        return self.leave or self.finish or self.checkpoint or self.snapshot or self.switch
