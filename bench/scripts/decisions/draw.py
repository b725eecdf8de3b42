"""Scenarios, drawn: a job, and what befalls it. Each is a function of its seed, and of a salt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .kinds import KINDS
from .noise import NoiseModel
from .salts import create_rng
from .world import CALM, HICCUP_INTERVAL_STEPS, JobCosts, Segment, Spare, Timeline

LEAD_SECONDS_RANGE, TAIL_SECONDS = (60, 600), 180
"""Seconds that nothing is wrong before and behind."""
MIN_SLOW_SECONDS, MAX_SLOW_SECONDS = 30, 3600
"""Seconds that a slowdown lasts; those without end are watched for MAX_SLOW_SECONDS."""
DEPTH_RANGE = (1.05, 5.0)
PAUSE_SECONDS_RANGE = (20, 180)
"""Seconds of each part of a slowdown that flaps, and between two."""

PHASES_SHARE = 0.3
"""Of the jobs have phases other than training."""
PHASE_INTERVAL_RANGE, PHASE_SHARE_RANGE = (60, 900), (0.02, 0.2)
"""Seconds from one to the next, and which part of them it takes."""


@dataclass(frozen=True)
class Scenario:
    """seed, salt: of what is observed, with noise by `noise_model`. evidence_delay_seconds: the age of the metrics.
    restart_known: whether the job has had a restart before, so that its cost is known."""

    seed: int
    kind: str
    depth: float
    end: str  # never, once, flapping
    job: JobCosts
    timeline: Timeline
    evidence_delay_seconds: int = 0
    restart_known: bool = True
    salt: str = ""
    noise_model: NoiseModel = NoiseModel.INDEPENDENT

    @property
    def description(self) -> str:
        job = self.job
        return (
            f"seed {self.seed}{f' of salt {self.salt}' if self.salt else ''}: "
            f"{self.kind} {self.depth:.2f} × for {self.timeline.end_second - self.timeline.onset} s "
            f"({self.end}), {job.ranks} ranks, spare: {job.spare}, restart {job.restart_seconds} s"
            f"{'' if self.restart_known else ' (not known)'}, noise {job.noise:g}"
            f"{f' ({self.noise_model})' if self.noise_model is not NoiseModel.INDEPENDENT else ''}"
            f"{f', metrics {self.evidence_delay_seconds} s old' if self.evidence_delay_seconds else ''}"
            f"{f', a phase of {job.phase_seconds} s every {job.phase_every} s' if job.phase_seconds else ''}"
        )


def draw_scenario(
    seed: int,
    kind: str | None = None,
    ranks: int | None = None,
    *,
    salt: str = "",
    noise_model: NoiseModel = NoiseModel.INDEPENDENT,
) -> Scenario:
    """`kind`, `ranks`: of this kind and size; None: of any."""
    rng = create_rng(17, seed, salt=salt)
    names = list(KINDS)
    weights = np.array([KINDS[name].weight for name in names])
    drawn_kind = str(rng.choice(names, p=weights / weights.sum()))
    kind = kind or drawn_kind
    job = _add_phases(draw_job(rng, ranks), seed, salt)
    lowest, highest = DEPTH_RANGE[0], min(DEPTH_RANGE[1], KINDS[kind].deepest)
    # What is above 1 is log-uniform: shallow ones are the most frequent, as published, and deep ones are tried, too.
    depth = 1.0 + float(np.exp(rng.uniform(np.log(lowest - 1), np.log(highest - 1))))
    end = str(rng.choice(["once", "never", "flapping"], p=[0.7, 0.15, 0.15]))
    duration = MAX_SLOW_SECONDS
    if end != "never":
        duration = int(np.clip(rng.exponential(KINDS[kind].mean_seconds), MIN_SLOW_SECONDS, MAX_SLOW_SECONDS))
    strain = KINDS[kind].make(job, depth, rng)
    onset = int(create_rng(19, seed, salt=salt).integers(*LEAD_SECONDS_RANGE))
    segments, now, until = [Segment(0, onset, CALM)], onset, onset + duration
    while now < until:
        length = until - now if end != "flapping" else int(rng.integers(*PAUSE_SECONDS_RANGE))
        segments.append(Segment(now, min(until, now + length), strain))
        now = segments[-1].end
        if now < until:
            segments.append(Segment(now, min(until, now + int(rng.integers(*PAUSE_SECONDS_RANGE))), CALM))
            now = segments[-1].end
    if end != "never":
        segments.append(Segment(now, now + TAIL_SECONDS, CALM))
    return Scenario(
        seed=seed,
        kind=kind,
        depth=depth,
        end=end,
        job=job,
        timeline=Timeline(tuple(segments)),
        evidence_delay_seconds=int(rng.choice([0, 15], p=[0.8, 0.2])),
        restart_known=bool(rng.random() < 0.85),
        salt=salt,
        noise_model=noise_model,
    )


def draw_healthy_scenario(
    seed: int,
    hours: float,
    ranks: int | None = None,
    *,
    salt: str = "",
    noise_model: NoiseModel = NoiseModel.INDEPENDENT,
) -> Scenario:
    """Nothing goes wrong."""
    rng = create_rng(18, seed, salt=salt)
    timeline = Timeline((Segment(0, round(3600 * hours), CALM),))
    job = _add_phases(draw_job(rng, ranks), seed, salt)
    return Scenario(seed, "healthy", 1.0, "never", job, timeline, salt=salt, noise_model=noise_model)


SIZES: Sequence[tuple[int, int]] = ((4, 1), (8, 8), (128, 8))
"""Workers, and ranks of each."""


def _add_phases(job: JobCosts, seed: int, salt: str) -> JobCosts:
    """Some evaluate, or write checkpoints that take a while."""
    rng = create_rng(20, seed, salt=salt)
    if rng.random() >= PHASES_SHARE:
        return job
    every, share = int(rng.integers(*PHASE_INTERVAL_RANGE)), float(rng.uniform(*PHASE_SHARE_RANGE))
    return replace(job, phase_every=every, phase_seconds=max(1, round(share * every)))


def draw_job(rng: np.random.Generator, ranks: int | None = None) -> JobCosts:
    sizes = [size for size in SIZES if ranks in (None, size[0] * size[1])]
    shares = np.array([{4: 0.5, 64: 0.4, 1024: 0.1}[workers * ranks_each] for workers, ranks_each in sizes])
    workers, ranks_each = sizes[int(rng.choice(len(sizes), p=shares / shares.sum()))]
    step, compute_share = float(rng.uniform(0.3, 1.5)), float(rng.uniform(0.75, 0.95))
    fixed_share, samples = float(rng.uniform(0.02, 0.1)), int(rng.choice([8, 16, 32]))
    return JobCosts(
        workers=workers,
        ranks_each=ranks_each,
        samples=samples,
        sample_seconds=step * compute_share * (1 - fixed_share) / samples,
        fixed_seconds=step * compute_share * fixed_share,
        transfer_seconds=step * (1 - compute_share),
        noise=float(rng.choice([0.01, 0.03, 0.08], p=[0.4, 0.4, 0.2])),
        hiccups=float(rng.choice([0.0, 1.0 / (HICCUP_INTERVAL_STEPS * workers * ranks_each)])),
        spare=Spare(str(rng.choice([spare.value for spare in Spare], p=[0.35, 0.45, 0.2]))),
        restart_seconds=int(rng.choice([3, 60, 300])),
    )
