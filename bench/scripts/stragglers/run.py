"""What a run is, as the bench orders it, and what each of its ranks gives back. Plain values that travel as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from .diaries import DiaryEntry
from .draws import Costs, Scenario, draw_costs

RANKS = 4
GLOBAL_BATCH = 28
"""With one rank half as fast as the others, integer shares of 28 samples (8, 8, 8, 4) reach the bound; of 32 they
would be capped at 91.4 % of it."""
LOCAL_BATCH = GLOBAL_BATCH // RANKS
AEDIT_LEASE = 2
"""Samples of a microbatch in A-EDiT: with leases so small it reaches what leases of single samples do."""


@dataclass(frozen=True)
class Run:
    """One side in one scenario with one seed."""

    side: str
    scenario: Scenario
    seed: int
    steps: int
    """Global batches that the whole job trains on."""
    unit_seconds: float
    """What a sample costs an undisturbed rank; 0: nothing is slept."""
    sync_every: int
    """Local steps between two synchronizations, of the sides that have such."""
    learning_rate: float = 2e-3
    decays: bool = False
    """Whether the learning rate falls to zero along the run, in a straight line."""
    shares: tuple[int, ...] | None = None
    snapshot_every: int = 0
    """Global batches between two snapshots of the common parameters, for the held-out loss; 0: none. Of the sides that
    synchronize now and then it is the next synchronization."""
    warmup_steps: int = 0
    """Of our Local-SGD modes, in Sync."""
    addresses: tuple[str, ...] = ("127.0.0.1",) * RANKS
    """Of the ranks."""
    namespaces: tuple[str, ...] = ()
    """Network namespaces of the ranks; none: the machine's own."""
    interface: str = "lo"

    @property
    def sync_seconds(self) -> float:
        """For the sides that synchronize by the clock: what `sync_every` undisturbed steps take."""
        return self.sync_every * LOCAL_BATCH * self.unit_seconds

    def compute_rate_factor(self, samples: int) -> float:
        """Factor of the learning rate when the job has used this many samples."""
        return max(0.0, 1 - samples / self.samples) if self.decays else 1.0

    def draw_costs(self) -> Costs:
        """[rank, sample]; some more samples than the run uses, since the last lease may reach beyond its end."""
        return draw_costs(self.scenario, RANKS, self.samples, GLOBAL_BATCH, self.seed)

    @property
    def samples(self) -> int:
        return self.steps * GLOBAL_BATCH

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        tuples = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**(data | tuples | {"scenario": Scenario(data["scenario"])}))


@dataclass
class Place:
    """What a rank is given by its host in addition to the run itself."""

    rank: int
    ports: tuple[int, ...]
    """Free ones, as many as ranks, and one more."""
    folder: Path
    """The ranks' own, shared, empty at the start."""


@dataclass
class Outcome:
    """What one rank gives back."""

    diary: list[DiaryEntry]
    weights: list[float]
    """Of this rank's data in the result of each period, from 1 on."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Period and held-out loss after it; of rank 0."""
    blocks: list[tuple[float, float]] = field(default_factory=list)
    """Seconds a step of paired blocks, the plain side's first; of runs that alternate."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        entries = [DiaryEntry(**(entry | {"samples": tuple(entry["samples"])})) for entry in data["diary"]]
        pairs = {name: [tuple(pair) for pair in data[name]] for name in ("losses", "blocks")}
        return cls(diary=entries, weights=data["weights"], **pairs)
