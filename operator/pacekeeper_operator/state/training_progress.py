"""The progress of a job's training, from its members' heartbeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pacekeeper_analysis.protocol.reports import Heartbeat


@dataclass(frozen=True)
class TrainingProgress:
    """What the members' heartbeats say about the training."""

    membership: int  # the plan's
    planned_round: int  # the plan's
    member_count: int  # of the plan, with those that have not reported
    heartbeats: tuple[Heartbeat, ...]  # of the members that have reported, in rank order
    step_seconds: float | None  # by the ranks' statistics; None: not known

    @cached_property
    def round(self) -> int:
        """The highest round that a member has seen in this membership; without a report, the plan's round."""
        seen = (heartbeat.round for heartbeat in self.heartbeats if heartbeat.membership == self.membership)
        return max([self.planned_round, *seen])

    @property
    def step(self) -> int | None:
        """The last step that some member has reported as completed; None: none."""
        steps = (heartbeat.progress.step for heartbeat in self.heartbeats)
        return max((step for step in steps if step is not None), default=None)

    def count_steps_since(self, step: int | None) -> int:
        """Return how many steps the job has completed after `step`; None: since its start."""
        first, last = (-1 if number is None else number for number in (step, self.step))
        return last - first

    @cached_property
    def steps_in_round(self) -> int:
        """The least number of steps that a member has completed in its present round; 0: there is no report."""
        return min((heartbeat.progress.steps_in_round for heartbeat in self.heartbeats), default=0)

    @cached_property
    def sync_modes(self) -> frozenset[str]:
        """The modes in which members train, by their reports."""
        return frozenset(heartbeat.training.sync_mode for heartbeat in self.heartbeats)

    @property
    def restored_step(self) -> int:
        """The step from which the present round started; 0: the beginning, or not known."""
        return max((heartbeat.start.restored_step or 0 for heartbeat in self.heartbeats), default=0)

    @property
    def resumed_step(self) -> int | None:
        """The step from which the present round started; 0: the beginning; None: a member does not report it (yet)."""
        if self.training_since is None:
            return None
        steps = [heartbeat.start.restored_step for heartbeat in self.heartbeats]
        known = [step for step in steps if step is not None]
        return min(known) if known and len(known) == len(steps) else None

    @property
    def total_steps(self) -> int | None:
        """Number of steps that the script runs. 0: not reported, or its ranks disagree. None: no rank has begun."""
        reports = (heartbeat.progress for heartbeat in self.heartbeats)
        reported = {report.total_steps or 0 for report in reports if report.steps_in_round > 0}
        return None if not reported else reported.pop() if len(reported) == 1 else 0

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint; None: none is known."""
        steps = (heartbeat.checkpoint.step for heartbeat in self.heartbeats)
        return max((step for step in steps if step is not None), default=None)

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the newest checkpoint was published; None: not known."""
        ages = (heartbeat.checkpoint.age_seconds for heartbeat in self.heartbeats)
        return max((age for age in ages if age is not None), default=None)

    @property
    def snapshot_step(self) -> int | None:
        """The step of the newest snapshot in the members' memory; None: there is none."""
        steps = (heartbeat.checkpoint.snapshot_step for heartbeat in self.heartbeats)
        return max((step for step in steps if step is not None), default=None)

    @property
    def replicated_step(self) -> int | None:
        """The step of the newest snapshot that the loss of any one member leaves; None: there is none.

        With one member, there is no other that could have it. A member that is lost may no longer report its own.
        """
        steps = [heartbeat.checkpoint.replicated_step for heartbeat in self.heartbeats]
        known = [step for step in steps if step is not None]
        has_all = self.member_count > 1 and len(known) == len(steps)
        return min(known, default=None) if has_all else None

    @cached_property
    def training_since(self) -> float | None:
        """When every member had completed the present round's first step; None: some have not yet."""
        times = [
            heartbeat.start.first_step_at
            for heartbeat in self.heartbeats
            if heartbeat.start.first_step_at is not None
            and (heartbeat.membership, heartbeat.round) == (self.membership, self.round)
        ]
        return max(times) if times and len(times) == self.member_count else None

    @cached_property
    def round_start_seconds(self) -> float | None:
        """Seconds from the present round's start to its first step, the least of all members; None: not known.

        All members begin together, so that no member's report can make it longer.
        """
        starts = (heartbeat.start for heartbeat in self.heartbeats)
        seconds = (
            start.first_step_at - start.started_at
            for start in starts
            if start.first_step_at is not None and start.started_at is not None
        )
        return min((duration for duration in seconds if duration > 0), default=None)

    @property
    def global_batch(self) -> int | None:
        """Samples per step of the whole job; None: the script does not report it."""
        batches = (heartbeat.training.global_batch for heartbeat in self.heartbeats)
        return max((batch for batch in batches if batch is not None), default=None)

    @property
    def replica_ranks(self) -> int | None:
        """The job trains exactly with any multiple of this number of ranks; None: the script does not report it."""
        multiples = (heartbeat.training.replica_ranks for heartbeat in self.heartbeats)
        return max((multiple for multiple in multiples if multiple is not None), default=None)

    @property
    def refusal(self) -> str:
        """Why ranks do not follow the newest plan, from their reports; "": they follow it."""
        return next((heartbeat.training.refused for heartbeat in self.heartbeats if heartbeat.training.refused), "")
