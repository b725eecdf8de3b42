"""What all ranks agree on at an ordinal: rank 0's word on the plan, and sums over what each rank has to say.

One small all-reduce over a CPU group of the library's own. In Sync it is issued while a step computes and read at the
ordinal behind it, so that it is over long before anybody waits for it; at the synchronisations of Local-SGD modes,
where ranks wait for each other anyway, it is read at once. Rank 0 puts the content of its plan in, not a version
number: ranks see different versions at different times. The sum does the rest, since the other ranks add nothing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.observe.recorder import Recorder
from pacekeeper_analysis.plan import SYNC_MODES

from .course import TrainingConfig


@dataclass(frozen=True)
class Directives:
    """Rank 0's word, for all ranks."""

    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    plan_version: int = 0
    """0: there is no plan."""
    checkpoint_request: int = 0
    suspend: bool = False
    snapshot_every: int = 0


@dataclass(frozen=True)
class RankReport:
    """What each rank says; all ranks hear the sums."""

    leaving: int = 0
    """How many ranks were told to leave by a signal."""
    loss: float = 0.0
    """Sum of the reported losses since the last ordinal, and of what they are divided by."""
    weight: float = 0.0
    samples: int = 0
    """Used since the last ordinal."""
    out_of_samples: int = 0
    """How many ranks came to this ordinal because no sample was left for them."""
    querying: int = 0
    """How many ranks ask for something that their peers do not know of yet."""


@dataclass(frozen=True)
class AgreementResult:
    """The same on all ranks."""

    directives: Directives
    summed_report: RankReport


class Agreement(CpuGroup):
    """The exchange of one rank with its peers, and the group that it goes over."""

    def __init__(self, recorder: Recorder) -> None:
        """Collective: all ranks make theirs together."""
        super().__init__(recorder)
        self.rank, self._world_size = dist.get_rank(), self.group.size()
        self._issued: tuple[dist.Work, torch.Tensor] | None = None

    def issue(self, directives: Directives, report: RankReport) -> None:
        """Starts the next exchange; `orders` count on rank 0 only."""
        said = _encode_directives(directives, self._world_size) if self.rank == 0 else [0.0] * (_DIRECTIVE_NUMBERS + self._world_size)
        mine = (report.leaving, report.loss, report.weight, report.samples, report.out_of_samples, report.querying)
        vector = torch.tensor([*mine, *said], dtype=torch.float64)
        self._issued = (self.start_sum(vector), vector)

    @property
    def is_issued(self) -> bool:
        """Whether an exchange is under way."""
        return self._issued is not None

    def collect_result(self) -> AgreementResult:
        """What the exchange issued last has brought."""
        assert self._issued is not None, "issue() comes first"
        work, vector = self._issued
        self._issued = None
        self.wait(work)
        leaving, loss, weight, samples, done, asking, *said = vector.tolist()
        return AgreementResult(_decode_directives(said), RankReport(int(leaving), loss, weight, int(samples), int(done), int(asking)))


def _encode_directives(directives: Directives, world_size: int) -> list[float]:
    """_DIRECTIVE_NUMBERS numbers, and the shares of all ranks."""
    course = directives.training_config
    return [
        directives.plan_version,
        directives.checkpoint_request,
        directives.suspend,
        directives.snapshot_every,
        SYNC_MODES.index(course.sync_mode),
        course.sync_every,
        course.sync_seconds,
        course.gc_every,
        course.sequence_cost is not None,
        *(course.sequence_cost or (0.0, 0.0, 0.0)),
        course.shares is not None,
        *(course.shares or [0] * world_size),
    ]


_DIRECTIVE_NUMBERS = len(_encode_directives(Directives(), 0))


def _decode_directives(numbers: Sequence[float]) -> Directives:
    version, request, suspend, snapshot_every, mode, every, seconds, garbage_every, *rest = numbers
    has_cost, fixed, per_token, per_token_squared, has_shares, *shares = rest
    course = TrainingConfig(
        sync_mode=SYNC_MODES[int(mode)],
        sync_every=int(every),
        sync_seconds=seconds,
        gc_every=int(garbage_every),
        shares=tuple(int(share) for share in shares) if has_shares else None,
        sequence_cost=(fixed, per_token, per_token_squared) if has_cost else None,
    )
    return Directives(course, int(version), int(request), suspend > 0, int(snapshot_every))
