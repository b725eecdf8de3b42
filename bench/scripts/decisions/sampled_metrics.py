"""What is observed of a job: its ranks' last steps, with their noise, as sidecars report them.

Steps are as long as the world expects them, so that their number at any time is known; what each rank did in a step is
drawn for that step, and the same at each read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pacekeeper.observe.rank_history import MAX_EARLIER_SHARE_STEPS
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers.windows import count_window_steps
from pacekeeper_operator.observe.rank_metrics import RANK_ROW, RankRows

from .draw import Scenario
from .noise import NoiseModel, NoiseSource
from .policy_run import WINDOW_STEPS
from .salts import create_rng
from .world import CALM, GC_INTERVAL_STEPS, CostModel, Strain, TrainingStrategy

FIRST_STEP = 500
TOKENS_PER_SEQUENCE = 1000.0
"""Of a sequence of the usual length."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stretch:
    """Of a round, from `begin` on: steps that are trained by one strategy under one strain."""

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
    salt: str = ""
    noise_model: NoiseModel = NoiseModel.INDEPENDENT
    pieces: list[Stretch] = field(default_factory=list)
    _steps: dict[tuple[int, int], SampledStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._noise = NoiseSource(self.world, self.noise_model, self.seed, self.salt)

    @classmethod
    def from_scenario(cls, scenario: Scenario, world: CostModel, first: int = FIRST_STEP) -> SampledMetrics:
        """Of a round of this scenario, whose first step has the number `first`."""
        return cls(world, scenario.seed, first, scenario.salt, scenario.noise_model)

    def extend(self, now: float, strategy: TrainingStrategy, strain: Strain) -> None:
        """From `now` on by this strategy, under this strain."""
        last = self.pieces[-1] if self.pieces else None
        if last is not None and (last.strategy, last.strain) == (strategy, strain):
            return
        step = self.first if last is None else self._find_next_step(last, now)
        self.pieces.append(Stretch(now, step, self.world.step_seconds(strategy, strain), strategy, strain))

    def count_done_steps(self, now: float) -> int:
        """Steps of this round, by `now`."""
        if not self.pieces:
            return 0
        return self._find_next_step(self.pieces[-1], now) - self.first

    def list_window_steps(self, now: float) -> Sequence[SampledStep]:
        """The window of steps that all ranks have done by `now` in their mode, and the last ones of other shares before
        it."""
        steps: list[SampledStep] = []
        window_steps, seconds, earlier_steps, until = WINDOW_STEPS, 0.0, 0, now
        for index in range(len(self.pieces) - 1, -1, -1):
            piece = self.pieces[index]
            if piece.strategy.mode is not self.pieces[-1].strategy.mode:
                break
            for number in range(self._find_next_step(piece, until) - 1, piece.step - 1, -1):
                if len(steps) - earlier_steps < window_steps:
                    seconds += piece.seconds
                    window_steps = count_window_steps(WINDOW_STEPS, seconds / (len(steps) - earlier_steps + 1))
                elif earlier_steps < MAX_EARLIER_SHARE_STEPS and piece.strategy.shares != steps[0].strategy.shares:
                    earlier_steps += 1
                else:
                    return steps[::-1]
                steps.append(self._get_step(index, number))
            until = min(until, piece.begin)
        return steps[::-1]

    def _find_next_step(self, piece: Stretch, now: float) -> int:
        """The first step of it that is not done by `now`."""
        trained = self.world.job.compute_trained_seconds
        return piece.step + max(0, int((trained(now) - trained(piece.begin)) / piece.seconds))

    def _get_step(self, index: int, number: int) -> SampledStep:
        if (index, number) not in self._steps:
            if len(self._steps) > 8 * WINDOW_STEPS:
                self._steps = dict(list(self._steps.items())[-2 * WINDOW_STEPS :])
            self._steps[index, number] = self._draw_step(self.pieces[index], number)
        return self._steps[index, number]

    def _draw_step(self, piece: Stretch, number: int) -> SampledStep:
        job, strategy, strain = self.world.job, piece.strategy, piece.strain
        rng = create_rng(self.seed, number, salt=self.salt)
        noise = self._noise.draw_step(number, rng)
        shares = np.array(strategy.shares or (job.samples,) * job.ranks, dtype=np.float64)
        relative_times = np.full(job.ranks, strain.all_slow)
        for rank, factor in strain.slow:
            relative_times[rank] *= factor
        if strain.turns > 1:
            relative_times[rng.integers(job.ranks)] *= strain.turns
        lengths = np.ones(job.ranks)
        if strain.lengths and not strategy.balanced:
            lengths = np.exp(strain.lengths * rng.standard_normal(job.ranks) - strain.lengths**2 / 2)
        is_collecting = rng.random(job.ranks) < 1.0 / GC_INTERVAL_STEPS
        if strategy.gc_interval:
            is_collecting = np.full(job.ranks, number % strategy.gc_interval == 0)
        gc_seconds = np.asarray(strain.gc_seconds * is_collecting, dtype=np.float64)
        own_seconds = (job.fixed_seconds + shares * job.sample_seconds) * relative_times * noise * lengths + gc_seconds
        transfer_seconds = job.transfer_seconds + strain.transfer_seconds
        step_seconds = (
            own_seconds
            if strategy.mode is not SyncMode.SYNC
            else np.full(job.ranks, own_seconds.max() + transfer_seconds)
        )
        return SampledStep(
            number, strategy, own_seconds, step_seconds, gc_seconds, shares * lengths * TOKENS_PER_SEQUENCE, shares
        )

    def build_rows(self, now: float) -> RankRows | None:
        """Figures of all ranks, in their order; None: they have not done a step yet."""
        steps = self.list_window_steps(now)
        same_share_steps = [step for step in steps if step.strategy.shares == steps[-1].strategy.shares]
        if not same_share_steps:
            return None
        own_seconds = np.mean([step.own for step in same_share_steps], axis=0)
        step_seconds = np.mean([step.took for step in same_share_steps], axis=0)
        rows = np.zeros(self.world.job.ranks, RANK_ROW)
        rows["rank"] = np.arange(len(rows))
        rows["steps"] = len(same_share_steps)
        rows["step_seconds"], rows["compute_seconds"] = step_seconds, own_seconds
        rows["compute_seconds_per_sample"] = own_seconds / same_share_steps[-1].shares
        rows["wait_seconds"] = np.maximum(0.0, step_seconds - own_seconds)
        rows["share"] = same_share_steps[-1].shares
        rows["first_steps_seconds"], _ = self._first_steps
        rows["last_step"] = same_share_steps[-1].number
        return rows

    @cached_property
    def _first_steps(self) -> tuple[float, float]:
        return self._noise.measure_first_steps()

    def build_windows(self, now: float) -> list[RankWindow]:
        """Of all ranks, in their order."""
        steps = self.list_window_steps(now)
        strategy, strain = self.pieces[-1].strategy, self.pieces[-1].strain
        numbers = tuple(step.number for step in steps)
        step_seconds, own_seconds, gc_seconds, lengths, shares = (
            np.array([getattr(step, name) for step in steps]).T.tolist() if steps else [()] * self.world.job.ranks
            for name in ("took", "own", "gc_seconds", "lengths", "shares")
        )
        transfers, (step, first_own_seconds) = self._list_sync_seconds(now, strategy), self._first_steps
        return [
            RankWindow(
                rank=rank,
                steps=numbers,
                step_seconds=tuple(step_seconds[rank]),
                compute_seconds=tuple(own_seconds[rank]),
                samples=tuple(int(count) for count in shares[rank]),
                gc_seconds=tuple(gc_seconds[rank]),
                lengths=tuple(lengths[rank]) if strain.lengths else (),
                squares=tuple(TOKENS_PER_SEQUENCE * total for total in lengths[rank]) if strain.lengths else (),
                sync_mode=strategy.mode,
                transfers=transfers,
                baseline_seconds=step,
                baseline_own_seconds=first_own_seconds,
            )
            for rank in range(self.world.job.ranks)
        ]

    def _list_sync_seconds(self, now: float, strategy: TrainingStrategy) -> tuple[float, ...]:
        """Seconds that the synchronizations in this mode took: (): there were none."""
        if strategy.mode is SyncMode.SYNC:
            return ()
        mode_start = now
        for piece in reversed(self.pieces):
            if piece.strategy.mode is not strategy.mode:
                break
            mode_start = piece.begin
        pause = (
            strategy.sync_seconds
            if strategy.mode is SyncMode.ASYNC_EDIT
            else strategy.sync_every * self.pieces[-1].seconds
        )
        moments = np.arange(mode_start + pause, now, pause)[-WINDOW_STEPS:]
        return tuple(self.world.synchronisation_seconds(self._get_strain(moment)) for moment in moments)

    def _get_strain(self, moment: float) -> Strain:
        return next((piece.strain for piece in reversed(self.pieces) if piece.begin <= moment), CALM)
