"""When the ranks of a job meet, and what they do there. Pure decisions: numbers in, numbers out, no torch.

An *ordinal* is a boundary between two steps at which all ranks meet. In Sync each boundary is one; in the Local-SGD
modes (EDiT and AsyncEDiT, arXiv 2412.07210) each synchronisation is one, and in between a rank waits for nobody. All
that concerns the whole job happens at ordinals, from numbers that all ranks have alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pacekeeper_analysis.lengths import SequenceCost
from pacekeeper_analysis.plan import SyncMode, WorkerPlan


@dataclass(frozen=True)
class TrainingConfig:
    """How the ranks train together: what a plan may change live. Part of a checkpoint."""

    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: int = 16
    """EDiT: steps between two synchronisations."""
    sync_seconds: float = 2.0
    """AsyncEDiT: seconds between two synchronisations."""
    gc_every: int = 0
    """Steps between two garbage collections; 0: as Python likes."""
    shares: tuple[int, ...] | None = None
    """Samples of each rank in a step; None: as equal as integers allow."""
    sequence_cost: tuple[float, float, float] | None = None
    """By which samples are balanced: terms of `SequenceCost`; None: the script's own."""

    @classmethod
    def from_plan(cls, plan: WorkerPlan) -> Self:
        return cls(
            plan.sync_mode, plan.sync_every, plan.sync_seconds, plan.garbage_every, plan.shares, plan.sequence_cost
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        lists = {name: tuple(state[name]) for name in ("shares", "sequence_cost") if state.get(name) is not None}
        return cls(**{**state, **lists, "sync_mode": SyncMode(state["sync_mode"])})

    @property
    def cost(self) -> SequenceCost | None:
        return None if self.sequence_cost is None else SequenceCost(*self.sequence_cost)


def select_sync_mode(wanted: SyncMode, step: int, warmup_steps: int) -> SyncMode:
    """The mode after `step` steps of the job: Local-SGD begins after a warm-up in Sync, and then at once."""
    return wanted if step >= warmup_steps else SyncMode.SYNC


def crosses_multiple(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]: from ordinal to ordinal a job may go several steps."""
    return every > 0 and after // every > before // every


def should_synchronize(elapsed: float, step_seconds: float, seconds: float, in_flight_seconds: float = 0.0) -> bool:
    """Whether a rank synchronises after this step rather than after the next one: the one that is nearer to `seconds`.

    elapsed: seconds since the last ordinal; ahead: how long this step will still take; step_seconds: of the next one.
    """
    return elapsed + in_flight_seconds + step_seconds / 2 >= seconds


@dataclass(frozen=True)
class SampleSource:
    """How the ranks train, and where their samples come from, up to the next ordinal or for good."""

    mode: SyncMode
    is_leased: bool = False
    """Whether ranks take samples as they come; otherwise each step's global batch is dealt out by shares."""
    limit: int | None = None
    """Of leases: how many samples the job may have used at their end; None: there is no end."""

    @property
    def is_local(self) -> bool:
        return self.mode is not SyncMode.SYNC


def choose_sample_source(wanted: SyncMode, samples: int, global_batch: int, limit: int | None) -> SampleSource:
    """What follows an ordinal after `samples` of at most `limit` samples of the job.

    Global batches are dealt from multiples of the global batch on; leases may end anywhere. So leases up to the next
    multiple lie between them. The job's last global batch is dealt in any mode: every rank has a part in its end.
    """
    missing = -samples % global_batch
    if wanted is SyncMode.ASYNC_EDIT:
        leases_end = None if limit is None else limit - global_batch
        if leases_end is None or samples < leases_end:
            return SampleSource(wanted, is_leased=True, limit=leases_end)
    if missing:
        return SampleSource(SyncMode.ASYNC_EDIT, is_leased=True, limit=samples + missing)
    return SampleSource(wanted)


@dataclass(frozen=True)
class SyncActions:
    """What happens at an ordinal, on all ranks alike."""

    leave: bool = False
    finish: bool = False
    checkpoint: bool = False
    snapshot: bool = False
    switch: bool = False
    """Another mode, or another supply of samples."""

    @property
    def has_any(self) -> bool:
        """All of them need the common parameters, and to know which samples are not used."""
        return self.leave or self.finish or self.checkpoint or self.snapshot or self.switch
