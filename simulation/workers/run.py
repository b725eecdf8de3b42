"""The ranks of one round, which train together: what each of them does, and what happens when all have come.

Between two ordinals a rank works by itself (a `Leg`). One event ends a leg of all ranks: when the last of them has
come, the collective is over. The decisions at ordinals are the library's own, as far as they need no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import numpy as np

from pacekeeper.keep.news import CheckpointStatus
from pacekeeper.modes.course import TrainingConfig, SampleSource, crosses_multiple, should_synchronize, select_sync_mode, choose_sample_source
from pacekeeper.modes.progress import Progress
from pacekeeper.observe.windows import StepTimes
from pacekeeper_analysis import shares
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SYNC_MODES, Stop, SyncMode
from pacekeeper_analysis.records import RING_RECORD, RecordKind, Phase, StateOrigin

from .rank import TERMINATED_EXIT_CODE, LOST_PEER_ERROR, WorkSegment, SimulatedRank, StallReason
from .volume import SavedState

if TYPE_CHECKING:
    from ..world import World
    from .training import SimulatedTraining

_INIT_SECONDS = (0.1, 0.5)
_RESTORE_SECONDS = (0.2, 1.0)
_FIRST_STEP_SECONDS = (0.5, 2.0)
"""Seconds that these take."""
_STAGING_SECONDS = (0.05, 0.2)
_CHECKPOINT_WRITE_SECONDS = (0.5, 2.0)
"""Seconds for which a checkpoint holds the ranks up, and until it is published."""
_RANK_EXIT_SECONDS = (0.02, 0.3)
_PEER_LOSS_NOTICE_SECONDS = (0.005, 0.1)
"""Seconds until a rank exits, and until it hears that a peer has."""
_SYNC_COST_FACTOR = 1.3
"""How many times as long as a step's all-reduce a synchronisation in Local-SGD modes takes."""
_STALL_POLL_SECONDS = 0.5
"""Seconds between two looks whether ranks that stand still can go on."""
_LONG_SEGMENT_SECONDS = 1.5
"""Seconds of a leg that launchers may take for a stall."""


class TrainingRound:
    """Of one round. It exists since its first rank has come to the store."""

    def __init__(self, world: World, training: SimulatedTraining, first: SimulatedRank, host: str) -> None:
        """`host`: address of the launcher that serves the store."""
        self.training = training
        self.round = first.round
        self.membership = first.membership
        self.ranks: dict[int, SimulatedRank] = {}
        self.progress = Progress()
        self.mode = SyncMode.SYNC
        """In force."""
        self.sync_points = 0
        self.restored_step = -1
        self.stamps: dict[str, int] = {}
        """How it started, as its ranks' rings say (`records.STATE`)."""
        self.began_at = -1.0
        """When its first step began; below 0: it has not."""
        self.stepped_at = -1.0
        """When it was at its newest ordinal."""
        self.over = False
        """One of its ranks has ended."""
        self.checkpoint_step = -1
        self.snapshot_step = -1
        self.answered = 0
        """The last checkpoint request that is answered."""
        self.is_stalled = False
        """Its ranks take longer than they should."""
        self._world = world
        self._random = world.create_random(f"run {training.uid} {first.membership} {first.round} {host}")
        self._host = host
        self._world_size = first.world_size
        self._links: list[tuple[str, str]] = []
        """Pairs of its ranks' nodes; each node with itself, too."""
        self._sample_source = SampleSource(SyncMode.SYNC)
        self._equal_shares: tuple[int, ...] = ()
        """Equal shares."""
        self._next_action: Callable[[], None] = self._do_nothing
        self._communication = 0.0
        self._wanted_at = math.inf
        self._check_at = -1.0
        self._last_sync_step = 0
        self._membership_of_plan: int | None = None
        self._checkpointed_step = 0
        self._saved_step = 0
        self._written_at = -1.0
        self._failed = False
        self._snapshot: SavedState | None = None

    @property
    def step(self) -> int:
        """Of the job, that is completed."""
        return self.progress.step

    @property
    def global_batch(self) -> int:
        """0: no step has begun yet."""
        return self.progress.global_batch

    @property
    def assigned_ranks(self) -> list[SimulatedRank]:
        """In order."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def _do_nothing(self) -> None:
        pass

    def _stamp_phases(self, *names: str) -> None:
        self.stamps |= dict.fromkeys(names, int(1e9 * self._world.now()))

    # Ranks come, stand still and go.

    def join(self, rank: SimulatedRank) -> None:
        """It has come to the store."""
        rank.training_round, rank.segment = self, WorkSegment(Phase.START, self._world.now(), 0.0)
        self.ranks[rank.number] = rank
        rank.worker.launcher.wake()
        if len(self.ranks) == self._world_size and not self.over:
            self._world.log.record_for_digest("meet", self.training.uid, self.round)
            self.training.rounds.append(self)
            nodes = list(dict.fromkeys(each.worker.node for each in self.assigned_ranks))
            self._links = list(combinations_with_replacement(nodes, 2))
            self._stamp_phases("device_ns")
            self._run_phase(Phase.START, self._random.uniform(*_INIT_SECONDS), self._restore_state)

    def rank_ended(self, rank: SimulatedRank) -> None:
        """Whoever is waiting for it, or comes to do so, hears of it, unless its machine is silent."""
        if not self.over:
            self.over = True
            self._next_action = self._do_nothing
            self._enter_stall()
        if rank.exit_code == 0 or rank.exit_code == TERMINATED_EXIT_CODE:
            return
        for peer in self.assigned_ranks:
            if peer.is_alive and peer.segment is not None:
                self._schedule_peer_loss(peer, rank)

    def _schedule_peer_loss(self, peer: SimulatedRank, lost: SimulatedRank) -> None:
        now, arrives = self._world.now(), peer.compute_arrival_time()
        if math.isfinite(arrives):
            wait = max(0.0, arrives - now) + self._random.uniform(*_PEER_LOSS_NOTICE_SECONDS)
            self._world.call_after(wait, self._apply_peer_loss, peer, lost)
        else:
            self._world.call_after(_STALL_POLL_SECONDS, self._apply_peer_loss, peer, lost)

    def _apply_peer_loss(self, peer: SimulatedRank, lost: SimulatedRank) -> None:
        if not peer.is_alive or peer.worker.is_gone:
            return
        if peer.compute_arrival_time() > self._world.now() or StallReason.STOPPED in peer.stalls:
            self._schedule_peer_loss(peer, lost)
        elif self._world.network.can_reach(peer.worker.node, lost.worker.node):
            peer.end(1, LOST_PEER_ERROR)
        else:
            self._world.call_after(_STALL_POLL_SECONDS, self._apply_peer_loss, peer, lost)

    # The way from one collective to the next.

    def _run_phase(self, phase: Phase, seconds: float, then: Callable[[], None]) -> None:
        """All ranks are busy for so long, then meet."""
        now = self._world.now()
        for rank in self.ranks.values():
            rank.segment = WorkSegment(phase, now, seconds, share=rank.segment.share if rank.segment is not None else 0)
        self._wait_for_ranks(0.0, then)

    def _wait_for_ranks(self, communication: float, then: Callable[[], None]) -> None:
        """`then` comes when all ranks are through with their legs, and with the collective behind them."""
        self._communication, self._next_action = communication, then
        self.is_stalled = False
        end = max(rank.segment.end_at for rank in self.ranks.values() if rank.segment is not None) + communication
        self._schedule_check(end)
        if end - self._world.now() > _LONG_SEGMENT_SECONDS:
            self._enter_stall()

    def _schedule_check(self, at: float) -> None:
        self._check_at = at
        self._world.call_after(max(0.0, at - self._world.now()), self._run_scheduled_check, at)

    def _run_scheduled_check(self, planned: float) -> None:
        if planned == self._check_at and not self.over:
            self.check_arrivals()

    def check_arrivals(self) -> None:
        """Whether all have come."""
        if self.over or self._next_action == self._do_nothing:
            return
        now = self._world.now()
        end = max(rank.compute_arrival_time() for rank in self.ranks.values()) + self._communication
        if math.isinf(end) or not self._is_connected():
            self._enter_stall()
            self._schedule_check(now + _STALL_POLL_SECONDS)
        elif end > now + 1e-9:
            self._schedule_check(end)
        else:
            then, self._next_action = self._next_action, self._do_nothing
            self.is_stalled = False
            then()

    def _enter_stall(self) -> None:
        """Launchers are to look closely."""
        if not self.is_stalled:
            self.is_stalled = True
            self._wake_launchers()

    def _is_connected(self) -> bool:
        if any(rank.blocks_collectives for rank in self.ranks.values()):
            return False
        reaches = self._world.network.can_reach
        return all(reaches(one, other) for one, other in self._links)

    def _wake_launchers(self) -> None:
        """What launchers tell of their ranks has changed."""
        for worker in dict.fromkeys(rank.worker for rank in self.ranks.values()):
            worker.launcher.wake()

    # The beginning.

    def _restore_state(self) -> None:
        training = self.training
        training.volume.owner = self
        newest = training.volume.newest
        found = -1 if newest is None else newest.step
        snapshots = [rank.worker.folder.snapshot for rank in self.assigned_ranks]
        versions = [kept for kept in snapshots if kept is not None]
        snapshot = max(versions, key=lambda kept: (kept.step, kept.round), default=None)
        restored = snapshot if snapshot is not None and snapshot.step >= found else newest
        if restored is not None:
            self.progress.load_state_dict(dict(restored.progress))
        self._checkpointed_step = self._saved_step = max(0, found)
        if restored is not None:
            self.checkpoint_step = found
        self._find_rank_zero_checkpoint(found)
        self._stamp_phases("joined_ns", "restoring_ns")
        near = StateOrigin.MEMORY if restored is snapshot else StateOrigin.CHECKPOINT
        self.stamps["origin"] = StateOrigin.NOTHING if restored is None else near
        self._run_phase(Phase.RESTORE, self._random.uniform(*_RESTORE_SECONDS), self._open_training)

    def _open_training(self) -> None:
        training, progress = self.training, self.progress
        if not training.global_batch:
            training.global_batch = training.samples * self._world_size
        self._stamp_phases("restored_ns")
        self.restored_step = progress.step
        progress.begin_round(training.global_batch)
        self._equal_shares = shares.divide_equally(training.global_batch, self._world_size, 1)
        try:
            self._check_config(progress.training_config)
        except InputError:  # of another number of ranks
            progress.training_config = TrainingConfig()
        self._last_sync_step = progress.step
        self.answered = progress.answered_request
        self.began_at = self._world.now()
        self._world.log.record(
            training.job, f"round {self.round} of membership {self.membership} goes on from step {progress.step}"
        )
        for tell in self._world.trainings.on_step:
            tell(self)
        self._wake_launchers()
        self._decide_next()

    # Ordinals.

    def _reach_sync_point(self) -> None:
        """All ranks have come to the end of their legs."""
        now, progress = self._world.now(), self.progress
        used = 0
        for rank in self.ranks.values():
            leg = rank.segment
            assert leg is not None
            self._record_step(rank, leg, now)
            used += leg.samples
            rank.samples += leg.samples
            rank.steps_in_round += leg.parts
            rank.step_ended = now if self.mode is SyncMode.SYNC else leg.end_at
        is_first = self.sync_points == 0
        self.sync_points += 1
        self.stepped_at = now
        progress.settle(used)
        told = is_first
        for rank in self.ranks.values():
            rank.step = progress.step
            if rank.worker.loss_is_bad and rank.bad_loss_step < 0:
                rank.bad_loss_step, told = progress.step, True
        for tell in self._world.trainings.on_step:
            tell(self)
        if told:
            self._wake_launchers()
        self._decide_next()

    def _record_step(self, rank: SimulatedRank, leg: WorkSegment, now: float) -> None:
        """In its history. The first step of a round is no training yet."""
        if leg.phase is not Phase.TRAIN:
            return
        step, mode = self.progress.step, SYNC_MODES.index(self.mode)
        if self.mode is SyncMode.SYNC:
            rank.history.append(StepTimes(step + 1, now - leg.started_at, leg.seconds, leg.share, 0.0), mode)
            return
        for number in range(leg.parts):
            rank.history.append(StepTimes(step + 1 + number, leg.seconds, leg.seconds, leg.share, 0.0), mode)
        record = np.zeros(1, RING_RECORD)
        record["kind"], record["phase"], record["value"] = RecordKind.SYNCHRONISATION, Phase.TRAIN, now - leg.end_at
        rank.history.add(record)

    def _decide_next(self) -> None:
        """What follows for all ranks alike: it is rank 0's word that counts."""
        progress, training = self.progress, self.training
        course, request, suspend = self._read_directives()
        mode = select_sync_mode(course.sync_mode, progress.step, training.warmup_steps)
        limit = None if training.last_step is None else progress.compute_samples_at(training.last_step)
        following = choose_sample_source(
            mode, progress.samples - progress.origin, progress.global_batch, limit and limit - progress.origin
        )
        if suspend or any(rank.leaving for rank in self.ranks.values()):
            self._take_snapshot()
            self._settle_snapshot()
            self._save_final_checkpoint(TERMINATED_EXIT_CODE)
            return
        duties: list[Callable[[Callable[[], None]], None]] = []
        if request > progress.answered_request:
            duties.append(lambda then: self._answer_request(request, then))
        if progress.step > self._checkpointed_step and crosses_multiple(self._last_sync_step, progress.step, training.checkpoint_every):
            duties.append(self._checkpoint)
        finish = limit is not None and progress.samples >= limit

        def go_on() -> None:
            if duties:
                duties.pop(0)(go_on)
            elif finish:
                self._save_final_checkpoint(0)
            else:
                self._settle_snapshot()
                if crosses_multiple(self._last_sync_step, progress.step, training.snapshot_every):
                    self._take_snapshot()
                self._begin_period(course, following)

        go_on()

    def _read_directives(self) -> tuple[TrainingConfig, int, bool]:
        """The course, the checkpoint request, and whether the job is suspended, as rank 0 reads its plan."""
        in_force = self.progress.training_config
        folder = self.ranks[0].worker.folder
        plan = folder.plan
        if plan is None:
            return in_force, 0, False
        if self._membership_of_plan is None:
            self._membership_of_plan = plan.membership
        course, refused = TrainingConfig.from_plan(plan), ""
        if plan.version == 0 or plan.membership != self._membership_of_plan:
            course = in_force
        else:
            try:
                self._check_config(course)
            except InputError as error:
                course, refused = in_force, f"plan {plan.version}: {error}"
        if refused != folder.refusal:
            folder.refusal = refused
            self.ranks[0].worker.launcher.wake()
        return course, plan.checkpoint_request, plan.stop is Stop.SUSPEND

    def _check_config(self, course: TrainingConfig) -> None:
        """Raises InputError where the script cannot train so."""
        if course.shares is not None and (
            len(course.shares) != self._world_size or sum(course.shares) != self.progress.global_batch
        ):
            raise InputError(f"shares: {list(course.shares)} do not make up {self.progress.global_batch} samples")
        plain = course.shares is None and course.sync_mode is SyncMode.SYNC
        if not plain and any(rank.worker.refuses_requests for rank in self.ranks.values()):
            raise InputError("this script trains with equal shares, in mode Sync only")

    def _begin_period(self, course: TrainingConfig, following: SampleSource) -> None:
        progress = self.progress
        progress.training_config = course
        if following.mode is not self.mode:
            self.mode = following.mode
            self._world.log.record(self.training.job, f"trains in mode {self.mode} from step {progress.step + 1} on")
            self._wake_launchers()
        self._sample_source = following
        self._last_sync_step = progress.step
        self._begin_segments()

    def _begin_segments(self) -> None:
        training, progress, now = self.training, self.progress, self._world.now()
        first = self.sync_points == 0
        dealt = (None if self._sample_source.is_leased else progress.training_config.shares) or self._equal_shares
        for rank in self.assigned_ranks:
            share = dealt[rank.number]
            slow = self._world.nodes[rank.worker.node].slow
            seconds = (training.fixed_seconds + share * training.sample_seconds) * slow
            seconds *= self._random.uniform(0.98, 1.02)
            if first:
                seconds += self._random.uniform(*_FIRST_STEP_SECONDS)
            phase = Phase.START if first else Phase.TRAIN
            parts = self._compute_planned_steps(seconds)
            rank.segment = WorkSegment(phase, now, seconds, parts, trains=True, share=share, samples=parts * share)
        if self._sample_source.is_leased and self._sample_source.limit is not None:
            self._take_leases(self._sample_source.limit - (progress.samples - progress.origin))
        more = _SYNC_COST_FACTOR if self._sample_source.is_local else 1.0
        self._wait_for_ranks(training.communication_seconds * self._get_link_slowdown() * more, self._reach_sync_point)

    def _get_link_slowdown(self) -> float:
        """Of the slowest link between its nodes."""
        slowness = self._world.network.get_slowdown
        return max(slowness(one, other) for one, other in self._links)

    def _compute_planned_steps(self, seconds: float) -> int:
        """Steps of a rank up to the next ordinal, where each takes so long."""
        progress, until = self.progress, self.training.last_step
        if self._sample_source.is_leased:
            steps = 1
            while not should_synchronize(steps * seconds, seconds, progress.training_config.sync_seconds):
                steps += 1
            return steps
        if not self._sample_source.is_local:
            return 1
        if until is None:
            return progress.training_config.sync_every
        return min(progress.training_config.sync_every, progress.count_whole_batches(progress.compute_samples_at(until) - progress.samples))

    def _take_leases(self, left: int) -> None:
        """Where there are no more than `left` samples, ranks take them as they come to it; the last batch is small."""
        legs = [rank.segment for rank in self.assigned_ranks if rank.segment is not None]
        if sum(leg.samples for leg in legs) <= left:
            return
        turns = sorted((number * leg.seconds, place) for place, leg in enumerate(legs) for number in range(leg.parts))
        for leg in legs:
            leg.parts = leg.samples = 0
        for _, place in turns:
            taken = min(legs[place].share, left)
            if taken:
                legs[place].parts += 1
                legs[place].samples += taken
                left -= taken

    # Keeping the state.

    def _build_saved_state(self) -> SavedState:
        return SavedState(self.progress.step, self.round, self.progress.state_dict())

    def _take_snapshot(self) -> None:
        self._snapshot = self._build_saved_state()

    def _settle_snapshot(self) -> None:
        """The one taken last is valid now."""
        if self._snapshot is not None:
            for rank in self.ranks.values():
                rank.worker.folder.snapshot = self._snapshot
            self.snapshot_step = self._snapshot.step
            self._snapshot = None

    def _answer_request(self, request: int, then: Callable[[], None]) -> None:
        self.progress.answered_request = request
        self._checkpoint(then)

    def _checkpoint(self, then: Callable[[], None]) -> None:
        """Of the present state, unless there is one; it is published in the background."""

        def stage() -> None:
            answered = self.progress.answered_request
            if self.progress.step <= self._checkpointed_step:
                if answered > self.answered:
                    self.answered = answered
                    self._wake_launchers()
                then()
                return
            self._checkpointed_step = self.progress.step
            kept = self._build_saved_state()
            self._run_phase(Phase.CHECKPOINT, self._random.uniform(*_STAGING_SECONDS), lambda: write(kept, answered))

        def write(kept: SavedState, answered: int) -> None:
            seconds = self._random.uniform(*_CHECKPOINT_WRITE_SECONDS) + self.training.volume.slow
            self._written_at = self._world.now() + seconds
            self._world.call_after(seconds, self._finish_checkpoint_write, kept, answered)
            then()

        self._wait_for_checkpoint(stage)

    def _wait_for_checkpoint(self, then: Callable[[], None]) -> None:
        left = self._written_at - self._world.now()
        if left > 0:
            self._run_phase(Phase.CHECKPOINT, left + _PEER_LOSS_NOTICE_SECONDS[0], then)
        else:
            then()

    def _finish_checkpoint_write(self, kept: SavedState, answered: int) -> None:
        """What comes of it, if the ranks are still there."""
        if self.over:
            return
        if any(StallReason.STOPPED in rank.stalls for rank in self.ranks.values()):
            self._world.call_after(_STALL_POLL_SECONDS, self._finish_checkpoint_write, kept, answered)
            return
        volume, folder, now = self.training.volume, self.ranks[0].worker.folder, self._world.now()
        self._failed = volume.fails
        if volume.fails:
            self._checkpointed_step = self._saved_step
            error = f"/checkpoints: step {kept.step}: rank 0: OSError: [Errno 28] No space left on device"
            folder.checkpoints = replace(folder.checkpoints, failed_rank=0, error=error)
        elif volume.owner is self:  # else a later round has begun
            volume.publish(kept)
            self._saved_step = self.checkpoint_step = kept.step
            self.answered = max(self.answered, answered)
            folder.checkpoints = CheckpointStatus(kept.step, int(1e9 * now))
            self._world.log.record_for_digest("kept", self.training.uid, kept.step)
        self._wake_launchers()

    def _find_rank_zero_checkpoint(self, step: int) -> None:
        """For rank 0's launcher: the newest checkpoint on the volume."""
        folder = self.ranks[0].worker.folder
        if step != folder.checkpoints.step:
            folder.checkpoints = CheckpointStatus(step, int(1e9 * self._world.now()))

    # The end.

    def _save_final_checkpoint(self, code: int, attempts: int = 2) -> None:
        """Nobody writes a checkpoint after this one: where it fails there is a second attempt. Then the ranks exit."""

        def written() -> None:
            if self._failed and attempts > 1:
                self._save_final_checkpoint(code, attempts - 1)
                return
            for rank in self.ranks.values():
                if code == 0:
                    rank.segment = WorkSegment(Phase.FINISHED, self._world.now(), 0.0)
                self._world.call_after(self._random.uniform(*_RANK_EXIT_SECONDS), self._exit_rank, rank, code)

        self._failed = False
        self._checkpoint(lambda: self._wait_for_checkpoint(written))

    def _exit_rank(self, rank: SimulatedRank, code: int) -> None:
        if rank.is_alive and rank.stalls:
            self._world.call_after(_STALL_POLL_SECONDS, self._exit_rank, rank, code)
        else:
            rank.end(code)
