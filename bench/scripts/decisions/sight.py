"""What is seen of a job: its ranks' last steps, with their noise, as sidecars tell of them.

Steps are as long as the world expects them, so that their number at any time is known; what each rank did in a step is
drawn for that step, and the same whenever it is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pacekeeper.observe.windows import MAX_EARLIER_SHARE_STEPS
from pacekeeper_analysis.diagnose.windows import count_window_steps
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.reports import RankWindow
from pacekeeper_operator.observe.figures import RANK_ROW, RankRows

from .course import WINDOW_STEPS
from .world import CALM, GC_INTERVAL_STEPS, HICCUP, Strain, TrainingStrategy, CostModel

FIRST_STEP = 500
TOKENS = 1000.0
"""Of a sequence of the usual length."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stretch:
    """Of a round, from `begin` on: steps that are trained in one way under one strain."""

    begin: float
    step: int  # the first that ends in it
    seconds: float  # of each
    strategy: TrainingStrategy
    strain: Strain


@dataclass(frozen=True)
class SampledStep:
    """Of all ranks. Arrays are by rank."""

    number: int
    strategy: TrainingStrategy
    own: Values
    took: Values
    gc_seconds: Values
    lengths: Values
    shares: Values


@dataclass
class SampledMetrics:
    """Of one round: what its ranks have done. Times are seconds of the scenario."""

    world: CostModel
    seed: int
    first: int = FIRST_STEP  # number of its first step
    pieces: list[Stretch] = field(default_factory=list)
    _steps: dict[tuple[int, int], SampledStep] = field(default_factory=dict)

    def goes_on(self, now: float, way: TrainingStrategy, strain: Strain) -> None:
        """From `now` on in this way, under this strain."""
        last = self.pieces[-1] if self.pieces else None
        if last is not None and (last.strategy, last.strain) == (way, strain):
            return
        step = self.first if last is None else self._done(last, now)
        self.pieces.append(Stretch(now, step, self.world.step_seconds(way, strain), way, strain))

    def done(self, now: float) -> int:
        """Steps of this round, by `now`."""
        if not self.pieces:
            return 0
        return self._done(self.pieces[-1], now) - self.first

    def last(self, now: float) -> Sequence[SampledStep]:
        """The window of steps that all ranks have done by `now` in their mode, and the last ones of other shares before
        it."""
        found: list[SampledStep] = []
        room, seconds, earlier, until = WINDOW_STEPS, 0.0, 0, now
        for place in range(len(self.pieces) - 1, -1, -1):
            piece = self.pieces[place]
            if piece.strategy.mode is not self.pieces[-1].strategy.mode:
                break
            for number in range(self._done(piece, until) - 1, piece.step - 1, -1):
                if len(found) - earlier < room:
                    seconds += piece.seconds
                    room = count_window_steps(WINDOW_STEPS, seconds / (len(found) - earlier + 1))
                elif earlier < MAX_EARLIER_SHARE_STEPS and piece.strategy.shares != found[0].strategy.shares:
                    earlier += 1
                else:
                    return found[::-1]
                found.append(self._step(place, number))
            until = min(until, piece.begin)
        return found[::-1]

    def _done(self, piece: Stretch, now: float) -> int:
        """The first step of it that is not done by `now`."""
        trained = self.world.job.trained
        return piece.step + max(0, int((trained(now) - trained(piece.begin)) / piece.seconds))

    def _step(self, place: int, number: int) -> SampledStep:
        if (place, number) not in self._steps:
            if len(self._steps) > 8 * WINDOW_STEPS:
                self._steps = dict(list(self._steps.items())[-2 * WINDOW_STEPS :])
            self._steps[place, number] = self._draw(self.pieces[place], number)
        return self._steps[place, number]

    def _draw(self, piece: Stretch, number: int) -> SampledStep:
        job, way, strain = self.world.job, piece.strategy, piece.strain
        random = np.random.default_rng((self.seed, number))
        noise = np.maximum(0.2, 1.0 + job.noise * random.standard_normal(job.ranks))
        noise = np.where(random.random(job.ranks) < job.hiccups, HICCUP, noise)
        shares = np.array(way.shares or (job.samples,) * job.ranks, dtype=np.float64)
        pace = np.full(job.ranks, strain.all_slow)
        for rank, factor in strain.slow:
            pace[rank] *= factor
        if strain.turns > 1:
            pace[random.integers(job.ranks)] *= strain.turns
        lengths = np.ones(job.ranks)
        if strain.lengths and not way.balanced:
            lengths = np.exp(strain.lengths * random.standard_normal(job.ranks) - strain.lengths**2 / 2)
        collects = random.random(job.ranks) < 1.0 / GC_INTERVAL_STEPS
        if way.gc_interval:
            collects = np.full(job.ranks, number % way.gc_interval == 0)
        garbage = np.asarray(strain.gc_seconds * collects, dtype=np.float64)
        own = (job.fixed_seconds + shares * job.sample_seconds) * pace * noise * lengths + garbage
        transfer = job.transfer_seconds + strain.transfer_seconds
        took = own if way.mode is not SyncMode.SYNC else np.full(job.ranks, own.max() + transfer)
        return SampledStep(number, way, own, took, garbage, shares * lengths * TOKENS, shares)

    def rows(self, now: float) -> RankRows | None:
        """Figures of all ranks, in their order; None: they have not done a step yet."""
        steps = self.last(now)
        alike = [step for step in steps if step.strategy.shares == steps[-1].strategy.shares]
        if not alike:
            return None
        own = np.mean([step.own for step in alike], axis=0)
        took = np.mean([step.took for step in alike], axis=0)
        rows = np.zeros(self.world.job.ranks, RANK_ROW)
        rows["rank"] = np.arange(len(rows))
        rows["steps"] = len(alike)
        rows["step_seconds"], rows["compute_seconds"] = took, own
        rows["compute_seconds_per_sample"] = own / alike[-1].shares
        rows["wait_seconds"] = np.maximum(0.0, took - own)
        rows["share"] = alike[-1].shares
        rows["first_steps_seconds"], _ = self.world.first_steps
        return rows

    def windows(self, now: float) -> list[RankWindow]:
        """Of all ranks, in their order."""
        steps = self.last(now)
        way, strain = self.pieces[-1].strategy, self.pieces[-1].strain
        numbers = tuple(step.number for step in steps)
        took, own, garbage, lengths, shares = (
            np.array([getattr(step, name) for step in steps]).T.tolist() if steps else [()] * self.world.job.ranks
            for name in ("took", "own", "garbage", "lengths", "shares")
        )
        transfers, (step, own_work) = self._synchronised(now, way), self.world.first_steps
        return [
            RankWindow(
                rank=rank,
                steps=numbers,
                step_seconds=tuple(took[rank]),
                compute_seconds=tuple(own[rank]),
                samples=tuple(int(count) for count in shares[rank]),
                garbage_seconds=tuple(garbage[rank]),
                lengths=tuple(lengths[rank]) if strain.lengths else (),
                squares=tuple(TOKENS * total for total in lengths[rank]) if strain.lengths else (),
                sync_mode=way.mode,
                transfers=transfers,
                baseline_seconds=step,
                baseline_own_seconds=own_work,
            )
            for rank in range(self.world.job.ranks)
        ]

    def _synchronised(self, now: float, way: TrainingStrategy) -> tuple[float, ...]:
        """Seconds that the synchronisations in this mode took: (): there were none."""
        if way.mode is SyncMode.SYNC:
            return ()
        begun = now
        for piece in reversed(self.pieces):
            if piece.strategy.mode is not way.mode:
                break
            begun = piece.begin
        pause = way.sync_seconds if way.mode is SyncMode.ASYNC_EDIT else way.sync_every * self.pieces[-1].seconds
        moments = np.arange(begun + pause, now, pause)[-WINDOW_STEPS:]
        return tuple(self.world.synchronisation_seconds(self._strain_at(moment)) for moment in moments)

    def _strain_at(self, moment: float) -> Strain:
        return next((piece.strain for piece in reversed(self.pieces) if piece.begin <= moment), CALM)
