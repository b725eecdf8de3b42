"""Agreement of all ranks at a sync point: rank 0's directives from the plan, and sums over all rank reports.

It is one small all-reduce over a CPU group of the library. In Sync it is issued while a step computes and read at the
sync point after it, so it is complete long before a rank waits for it. At the synchronizations of Local-SGD modes,
where ranks wait for each other anyway, it is read at once. Rank 0 contributes the content of its plan, not a version
number, because ranks see different versions at different times. The other ranks contribute zeros there, so the sum is
rank 0's content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper_analysis.protocol.plan import SYNC_MODES
from pacekeeper_rank.recorder import Recorder

from .training_config import TrainingConfig


@dataclass(frozen=True)
class Directives:
    """Directives of rank 0 for all ranks."""

    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    plan_version: int = 0
    """0: there is no plan."""
    checkpoint_request: int = 0
    suspend: bool = False
    snapshot_every: int = 0


@dataclass(frozen=True)
class RankReport:
    """Report of one rank; all ranks receive the sums."""

    leaving: int = 0
    """Number of ranks that a signal has requested to leave."""
    loss: float = 0.0
    """Sum of the reported losses since the last sync point; `weight` is the sum of their divisors."""
    weight: float = 0.0
    samples: int = 0
    """Samples used since the last sync point."""
    out_of_samples: int = 0
    """Number of ranks that reached this sync point because no sample was left for them."""
    querying: int = 0
    """Number of ranks with a due query that their peers do not have yet."""


@dataclass(frozen=True)
class AgreementResult:
    """Result of an agreement, the same on all ranks."""

    directives: Directives
    summed_report: RankReport


class Agreement(CpuGroup):
    """One rank's part in the exchange between all ranks, and the group that it uses."""

    def __init__(self, recorder: Recorder) -> None:
        """Create the group. Collective: all ranks create it together."""
        super().__init__(recorder)
        self.rank, self._world_size = dist.get_rank(), self.group.size()
        self._issued: tuple[dist.Work, torch.Tensor] | None = None

    def issue(self, directives: Directives, report: RankReport) -> None:
        """Start the next exchange; `directives` count on rank 0 only."""
        encoded = (
            _encode_directives(directives, self._world_size)
            if self.rank == 0
            else [0.0] * (_DIRECTIVE_NUMBERS + self._world_size)
        )
        numbers = (report.leaving, report.loss, report.weight, report.samples, report.out_of_samples, report.querying)
        vector = torch.tensor([*numbers, *encoded], dtype=torch.float64)
        self._issued = (self.start_sum(vector), vector)

    @property
    def is_issued(self) -> bool:
        """Whether an exchange is in progress."""
        return self._issued is not None

    def collect_result(self) -> AgreementResult:
        """Wait for the exchange that was issued last, and return its result."""
        assert self._issued is not None, "issue() comes first"
        work, vector = self._issued
        self._issued = None
        self.wait(work)
        leaving, loss, weight, samples, out_of_samples, querying, *encoded = vector.tolist()
        return AgreementResult(
            _decode_directives(encoded),
            RankReport(int(leaving), loss, weight, int(samples), int(out_of_samples), int(querying)),
        )


def _encode_directives(directives: Directives, world_size: int) -> list[float]:
    """Return _DIRECTIVE_NUMBERS numbers, followed by the shares of all ranks."""
    config = directives.training_config
    return [
        directives.plan_version,
        directives.checkpoint_request,
        directives.suspend,
        directives.snapshot_every,
        SYNC_MODES.index(config.sync_mode),
        config.sync_every,
        config.sync_seconds,
        config.gc_every,
        config.sequence_cost is not None,
        *(config.sequence_cost or (0.0, 0.0, 0.0)),
        config.shares is not None,
        *(config.shares or [0] * world_size),
    ]


_DIRECTIVE_NUMBERS = len(_encode_directives(Directives(), 0))


def _decode_directives(numbers: Sequence[float]) -> Directives:
    version, request, suspend, snapshot_every, mode, every, seconds, gc_every, *rest = numbers
    has_cost, fixed, per_token, per_token_squared, has_shares, *shares = rest
    config = TrainingConfig(
        sync_mode=SYNC_MODES[int(mode)],
        sync_every=int(every),
        sync_seconds=seconds,
        gc_every=int(gc_every),
        shares=tuple(int(share) for share in shares) if has_shares else None,
        sequence_cost=(fixed, per_token, per_token_squared) if has_cost else None,
    )
    return Directives(config, int(version), int(request), suspend > 0, int(snapshot_every))
