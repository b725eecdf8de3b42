"""The ranks of one round, which train together: what each of them does, and what happens when all have arrived.

Between two sync points a rank works independently (a `WorkSegment`). One event ends a segment of all ranks: when the
last of them has arrived, the collective ends. Decisions at sync points are the library's own, as far as they do not
need torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from pacekeeper.checkpointing.storage.checkpoint_status import CheckpointStatus
from pacekeeper.observe.rank_history import StepTimes
from pacekeeper.sync.progress import Progress
from pacekeeper.sync.training_config import (
    SampleSource,
    TrainingConfig,
    choose_sample_source,
    crosses_multiple,
    select_sync_mode,
    should_synchronize,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SYNC_MODES, Stop, SyncMode
from pacekeeper_analysis.protocol.records import RING_RECORD, RING_STATE
from pacekeeper_analysis.stragglers import shares
from pacekeeper_rank.records import Collective, Phase, RecordKind, StateOrigin

from ..kubernetes.machine import Machine
from ..ports import SharedWorld
from .rank import LOST_PEER_ERROR, TERMINATED_EXIT_CODE, SimulatedRank, StallReason, WorkSegment
from .training_script import TrainingScript
from .volume import SavedState

_EMPTY_STATE = dict.fromkeys(RING_STATE.names or (), 0)
"""Every field of a state, in the order of the record."""
_GROUP_ID = 1
_LOAD_NS = 50_000_000
_INIT_SECONDS = (0.1, 0.5)
_RESTORE_SECONDS = (0.2, 1.0)
_FIRST_STEP_SECONDS = (0.5, 2.0)
"""Durations in seconds."""
_STAGING_SECONDS = (0.05, 0.2)
_CHECKPOINT_WRITE_SECONDS = (0.5, 2.0)
"""Seconds for which a checkpoint blocks the ranks, and until it is published."""
_RANK_EXIT_SECONDS = (0.02, 0.3)
_PEER_LOSS_NOTICE_SECONDS = (0.005, 0.1)
"""Seconds until a rank exits, and until a rank notices a peer's exit."""
_SYNC_COST_FACTOR = 1.3
"""Duration of a synchronization in Local-SGD modes, relative to a step's all-reduce."""
_STALL_POLL_SECONDS = 0.5
"""Seconds between two checks whether stalled ranks can continue."""
_LONG_SEGMENT_SECONDS = 1.5
"""Seconds of a segment after which launchers may see a stall."""


class TrainingRound:
    """One round. It exists from the time when its first rank reaches the store."""

    def __init__(
        self,
        world: SharedWorld,
        nodes: Mapping[str, Machine],
        training: TrainingScript,
        first_rank: SimulatedRank,
        address: str,
        *,
        on_start: Callable[[TrainingRound], None],
        on_step: Iterable[Callable[[TrainingRound], None]],
    ) -> None:
        """`address`: of the launcher that serves the store.

        `on_start`: called when all ranks have connected. `on_step`: called at each sync point after a step, and when
        the ranks have restored their state.
        """
        self.training = training
        self.round = first_rank.round
        self.membership = first_rank.membership
        self.ranks: dict[int, SimulatedRank] = {}
        self.progress = Progress()
        self.mode = SyncMode.SYNC
        """The present mode."""
        self.sync_points = 0
        self.restored_step = -1
        self.stamps: dict[str, int] = {}
        """Timestamps of its start, as in its ranks' rings (`records.STATE`)."""
        self.began_at = -1.0
        """When its first step began; below 0: it has not."""
        self.stepped_at = -1.0
        """When it reached its newest sync point."""
        self.over = False
        """Whether one of its ranks has exited."""
        self.checkpoint_step = -1
        self.snapshot_step = -1
        self.answered = 0
        """The last checkpoint request that is answered."""
        self.is_stalled = False
        """Whether its ranks take longer than expected."""
        self._world = world
        self._nodes = nodes
        self._on_start = on_start
        self._on_step = on_step
        self._random = world.create_random(f"run {training.uid} {first_rank.membership} {first_rank.round} {address}")
        self._host = address
        self._world_size = first_rank.world_size
        self._links: list[tuple[str, str]] = []
        """Pairs of its ranks' nodes, including each node with itself."""
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
        """The last completed step of the job."""
        return self.progress.step

    @property
    def global_batch(self) -> int:
        """The global batch; 0: no step has started yet."""
        return self.progress.global_batch

    @property
    def assigned_ranks(self) -> list[SimulatedRank]:
        """Its ranks, in order."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def _do_nothing(self) -> None:
        pass

    def _stamp_phases(self, *names: str) -> None:
        self.stamps |= dict.fromkeys(names, int(1e9 * self._world.now()))

    # Ranks arrive, stall, and exit.

    def join(self, rank: SimulatedRank) -> None:
        """Add a rank that has reached the store."""
        rank.training_round, rank.segment = self, WorkSegment(Phase.START, self._world.now(), 0.0)
        self.ranks[rank.number] = rank
        rank.worker.launcher.wake()
        if len(self.ranks) == self._world_size and not self.over:
            self._world.log.record_for_digest("meet", self.training.uid, self.round)
            self._on_start(self)
            nodes = list(dict.fromkeys(peer.worker.node for peer in self.assigned_ranks))
            self._links = list(combinations_with_replacement(nodes, 2))
            self._stamp_phases("device_ns")
            self._run_phase(Phase.START, self._random.uniform(*_INIT_SECONDS), self._restore_state)

    def rank_ended(self, rank: SimulatedRank) -> None:
        """Notify the peers of a rank that exited, when they wait for it. A silent machine notifies none."""
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
        now, arrives_at = self._world.now(), peer.compute_arrival_time()
        if math.isfinite(arrives_at):
            wait = max(0.0, arrives_at - now) + self._random.uniform(*_PEER_LOSS_NOTICE_SECONDS)
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

    # From one collective to the next.

    def _run_phase(self, phase: Phase, seconds: float, next_action: Callable[[], None]) -> None:
        """Keep all ranks busy for `seconds`, then let them synchronize."""
        now = self._world.now()
        for rank in self.ranks.values():
            rank.segment = WorkSegment(phase, now, seconds, share=rank.segment.share if rank.segment is not None else 0)
        self._wait_for_ranks(0.0, next_action)

    def _wait_for_ranks(self, communication: float, next_action: Callable[[], None]) -> None:
        """Call `next_action` when all ranks have ended their segments, and the collective after them."""
        self._communication, self._next_action = communication, next_action
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
        """Check whether all ranks have arrived."""
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
            next_action, self._next_action = self._next_action, self._do_nothing
            self.is_stalled = False
            next_action()

    def _enter_stall(self) -> None:
        """Mark a stall, so that launchers check their ranks."""
        if not self.is_stalled:
            self.is_stalled = True
            self._wake_launchers()

    def _is_connected(self) -> bool:
        if any(rank.blocks_collectives for rank in self.ranks.values()):
            return False
        can_reach = self._world.network.can_reach
        return all(can_reach(node, peer) for node, peer in self._links)

    def _wake_launchers(self) -> None:
        """Wake the launchers: what they report about their ranks has changed."""
        for worker in dict.fromkeys(rank.worker for rank in self.ranks.values()):
            worker.launcher.wake()

    # Observations.

    def build_state(self, rank: SimulatedRank, now: float) -> np.void:
        """Return the state in a rank's ring."""
        segment = rank.segment
        assert segment is not None
        worked_until = min(now, rank.stalled_since)
        has_arrived = worked_until >= segment.end_at
        phase, since, step, steps, step_ended = (
            segment.phase,
            segment.started_at,
            rank.step,
            rank.steps_in_round,
            rank.step_ended,
        )
        fields: dict[str, float] = {}
        if segment.trains:
            if rank.is_alive and StallReason.LOADER in rank.stalls and not has_arrived:
                phase, since = Phase.LOAD, max(segment.started_at, rank.stalls[StallReason.LOADER])
            if self.mode is not SyncMode.SYNC:
                done = (
                    segment.parts if has_arrived else int(max(0.0, worked_until - segment.started_at) / segment.seconds)
                )
                step, steps = self.progress.step + done, steps + done
                step_ended = segment.started_at + done * segment.seconds if done else step_ended
            fields |= {
                "collectives_entered": self.sync_points + has_arrived,
                "sequence": self.sync_points + has_arrived,
            }
            if has_arrived:
                fields |= {"collective": Collective.ALL_REDUCE, "collective_since_ns": int(1e9 * segment.end_at)}
        fields |= {
            "rank": rank.number,
            "round": rank.round,
            "pid": 100 + rank.local,
            "phase": phase,
            "phase_since_ns": int(1e9 * since),
            "step": step,
            "step_end_ns": int(1e9 * step_ended),
            "steps_in_round": steps,
            "group": _GROUP_ID,
            "checkpoint_step": self.checkpoint_step,
            "snapshot_step": self.snapshot_step if rank.local == 0 else -1,
            "replicated_step": max(0, self.snapshot_step) if rank.local == 0 else 0,
            "restored_step": self.restored_step,
            "samples": rank.samples,
            "global_batch": self.global_batch,
            "total_steps": self.training.last_step or 0,
            "replica_ranks": self.training.replica_ranks if self.global_batch else 0,
            "checkpoint_request": self.answered,
            "share": segment.share,
            "sync_mode": SYNC_MODES.index(self.mode) if self.global_batch else -1,
            "bad_loss_step": rank.bad_loss_step,
            "longest_load_ns": _LOAD_NS if rank.steps_in_round else 0,
            "share_granularity": 1,
            **self.stamps,
        }
        state: np.void = np.array([tuple((_EMPTY_STATE | fields).values())], RING_STATE)[0]
        return state

    # The start.

    def _restore_state(self) -> None:
        training = self.training
        training.volume.owner = self
        newest = training.volume.newest
        newest_step = -1 if newest is None else newest.step
        snapshots = [rank.worker.folder.snapshot for rank in self.assigned_ranks]
        versions = [saved for saved in snapshots if saved is not None]
        snapshot = max(versions, key=lambda saved: (saved.step, saved.round), default=None)
        restored = snapshot if snapshot is not None and snapshot.step >= newest_step else newest
        if restored is not None:
            self.progress.load_state_dict(dict(restored.progress))
        self._checkpointed_step = self._saved_step = max(0, newest_step)
        if restored is not None:
            self.checkpoint_step = newest_step
        self._find_rank_zero_checkpoint(None if newest is None else newest.step)
        self._stamp_phases("joined_ns", "restoring_ns")
        origin = StateOrigin.MEMORY if restored is snapshot else StateOrigin.CHECKPOINT
        self.stamps["origin"] = StateOrigin.NOTHING if restored is None else origin
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
        except InputError:  # the config is for another number of ranks
            progress.training_config = TrainingConfig()
        self._last_sync_step = progress.step
        self.answered = progress.answered_request
        self.began_at = self._world.now()
        self._world.log.record(
            training.job, f"round {self.round} of membership {self.membership} resumes from step {progress.step}"
        )
        for callback in self._on_step:
            callback(self)
        self._wake_launchers()
        self._decide_next()

    # Sync points.

    def _reach_sync_point(self) -> None:
        """Process a sync point: all ranks have ended their segments."""
        now, progress = self._world.now(), self.progress
        used_samples = 0
        for rank in self.ranks.values():
            segment = rank.segment
            assert segment is not None
            self._record_step(rank, segment, now)
            used_samples += segment.samples
            rank.samples += segment.samples
            rank.steps_in_round += segment.parts
            rank.step_ended = now if self.mode is SyncMode.SYNC else segment.end_at
        is_first = self.sync_points == 0
        self.sync_points += 1
        self.stepped_at = now
        progress.settle(used_samples)
        wakes_launchers = is_first
        for rank in self.ranks.values():
            rank.step = progress.step
            if rank.worker.loss_is_bad and rank.bad_loss_step < 0:
                rank.bad_loss_step, wakes_launchers = progress.step, True
        for callback in self._on_step:
            callback(self)
        if wakes_launchers:
            self._wake_launchers()
        self._decide_next()

    def _record_step(self, rank: SimulatedRank, segment: WorkSegment, now: float) -> None:
        """Add the steps to the rank's history. The first step of a round does not count as training."""
        if segment.phase is not Phase.TRAIN:
            return
        step, mode = self.progress.step, SYNC_MODES.index(self.mode)
        if self.mode is SyncMode.SYNC:
            rank.history.append(
                StepTimes(step + 1, now - segment.started_at, segment.seconds, segment.share, 0.0), mode
            )
            return
        for number in range(segment.parts):
            rank.history.append(
                StepTimes(step + 1 + number, segment.seconds, segment.seconds, segment.share, 0.0), mode
            )
        record = np.zeros(1, RING_RECORD)
        record["kind"], record["phase"], record["value"] = RecordKind.SYNCHRONIZATION, Phase.TRAIN, now - segment.end_at
        rank.history.add(record)

    def _decide_next(self) -> None:
        """Decide what all ranks do next. Rank 0's plan counts."""
        progress, training = self.progress, self.training
        config, request, suspend = self._read_directives()
        mode = select_sync_mode(config.sync_mode, progress.step, training.warmup_steps)
        limit = None if training.last_step is None else progress.compute_samples_at(training.last_step)
        sample_source = choose_sample_source(
            mode, progress.samples - progress.origin, progress.global_batch, limit and limit - progress.origin
        )
        if suspend or any(rank.leaving for rank in self.ranks.values()):
            self._take_snapshot()
            self._settle_snapshot()
            self._save_final_checkpoint(TERMINATED_EXIT_CODE)
            return
        tasks: list[Callable[[Callable[[], None]], None]] = []
        if request > progress.answered_request:
            tasks.append(lambda next_action: self._answer_request(request, next_action))
        if progress.step > self._checkpointed_step and crosses_multiple(
            self._last_sync_step, progress.step, training.checkpoint_every
        ):
            tasks.append(self._checkpoint)
        finishes = limit is not None and progress.samples >= limit

        def go_on() -> None:
            if tasks:
                tasks.pop(0)(go_on)
            elif finishes:
                self._save_final_checkpoint(0)
            else:
                self._settle_snapshot()
                if crosses_multiple(self._last_sync_step, progress.step, training.snapshot_every):
                    self._take_snapshot()
                self._begin_period(config, sample_source)

        go_on()

    def _read_directives(self) -> tuple[TrainingConfig, int, bool]:
        """Return the training config, the checkpoint request, and whether the job is suspended, from rank 0's plan."""
        current = self.progress.training_config
        folder = self.ranks[0].worker.folder
        plan = folder.plan
        if plan is None:
            return current, 0, False
        if self._membership_of_plan is None:
            self._membership_of_plan = plan.membership
        config, refusal = TrainingConfig.from_plan(plan), ""
        if plan.version == 0 or plan.membership != self._membership_of_plan:
            config = current
        else:
            try:
                self._check_config(config)
            except InputError as error:
                config, refusal = current, f"plan {plan.version}: {error}"
        if refusal != folder.refusal:
            folder.refusal = refusal
            self.ranks[0].worker.launcher.wake()
        return config, plan.checkpoint_request, plan.stop is Stop.SUSPEND

    def _check_config(self, config: TrainingConfig) -> None:
        """Raise InputError if the script cannot train with this config."""
        if config.shares is not None and (
            len(config.shares) != self._world_size or sum(config.shares) != self.progress.global_batch
        ):
            raise InputError(f"shares: {list(config.shares)} do not make up {self.progress.global_batch} samples")
        is_default = config.shares is None and config.sync_mode is SyncMode.SYNC
        if not is_default and any(rank.worker.refuses_requests for rank in self.ranks.values()):
            raise InputError("this script trains with equal shares, in mode Sync only")

    def _begin_period(self, config: TrainingConfig, sample_source: SampleSource) -> None:
        progress = self.progress
        progress.training_config = config
        if sample_source.mode is not self.mode:
            self.mode = sample_source.mode
            self._world.log.record(self.training.job, f"trains in mode {self.mode} from step {progress.step + 1} on")
            self._wake_launchers()
        self._sample_source = sample_source
        self._last_sync_step = progress.step
        self._begin_segments()

    def _begin_segments(self) -> None:
        training, progress, now = self.training, self.progress, self._world.now()
        is_first = self.sync_points == 0
        rank_shares = (None if self._sample_source.is_leased else progress.training_config.shares) or self._equal_shares
        for rank in self.assigned_ranks:
            share = rank_shares[rank.number]
            slowdown = self._nodes[rank.worker.node].slow
            seconds = (training.fixed_seconds + share * training.sample_seconds) * slowdown
            seconds *= self._random.uniform(0.98, 1.02)
            if is_first:
                seconds += self._random.uniform(*_FIRST_STEP_SECONDS)
            phase = Phase.START if is_first else Phase.TRAIN
            parts = self._compute_planned_steps(seconds)
            rank.segment = WorkSegment(phase, now, seconds, parts, trains=True, share=share, samples=parts * share)
        if self._sample_source.is_leased and self._sample_source.limit is not None:
            self._take_leases(self._sample_source.limit - (progress.samples - progress.origin))
        factor = _SYNC_COST_FACTOR if self._sample_source.is_local else 1.0
        self._wait_for_ranks(
            training.communication_seconds * self._get_link_slowdown() * factor, self._reach_sync_point
        )

    def _get_link_slowdown(self) -> float:
        """Return the slowdown of the slowest link between its nodes."""
        get_slowdown = self._world.network.get_slowdown
        return max(get_slowdown(node, peer) for node, peer in self._links)

    def _compute_planned_steps(self, seconds: float) -> int:
        """Return the number of steps of a rank up to the next sync point, if each takes `seconds`."""
        progress, last_step = self.progress, self.training.last_step
        if self._sample_source.is_leased:
            steps = 1
            while not should_synchronize(steps * seconds, seconds, progress.training_config.sync_seconds):
                steps += 1
            return steps
        if not self._sample_source.is_local:
            return 1
        if last_step is None:
            return progress.training_config.sync_every
        return min(
            progress.training_config.sync_every,
            progress.count_whole_batches(progress.compute_samples_at(last_step) - progress.samples),
        )

    def _take_leases(self, remaining: int) -> None:
        """Distribute the last `remaining` samples in the order in which ranks take them. The last batch is small."""
        segments = [rank.segment for rank in self.assigned_ranks if rank.segment is not None]
        if sum(segment.samples for segment in segments) <= remaining:
            return
        leases = sorted(
            (number * segment.seconds, index)
            for index, segment in enumerate(segments)
            for number in range(segment.parts)
        )
        for segment in segments:
            segment.parts = segment.samples = 0
        for _, index in leases:
            taken = min(segments[index].share, remaining)
            if taken:
                segments[index].parts += 1
                segments[index].samples += taken
                remaining -= taken

    # Saving the state.

    def _build_saved_state(self) -> SavedState:
        return SavedState(self.progress.step, self.round, self.progress.state_dict())

    def _take_snapshot(self) -> None:
        self._snapshot = self._build_saved_state()

    def _settle_snapshot(self) -> None:
        """Publish the snapshot that was taken last."""
        if self._snapshot is not None:
            for rank in self.ranks.values():
                rank.worker.folder.snapshot = self._snapshot
            self.snapshot_step = self._snapshot.step
            self._snapshot = None

    def _answer_request(self, request: int, next_action: Callable[[], None]) -> None:
        self.progress.answered_request = request
        self._checkpoint(next_action)

    def _checkpoint(self, next_action: Callable[[], None]) -> None:
        """Checkpoint the present state unless that is done already. It is published in the background."""

        def stage() -> None:
            answered = self.progress.answered_request
            if self.progress.step <= self._checkpointed_step:
                if answered > self.answered:
                    self.answered = answered
                    self._wake_launchers()
                next_action()
                return
            self._checkpointed_step = self.progress.step
            saved = self._build_saved_state()
            self._run_phase(Phase.CHECKPOINT, self._random.uniform(*_STAGING_SECONDS), lambda: write(saved, answered))

        def write(saved: SavedState, answered: int) -> None:
            seconds = self._random.uniform(*_CHECKPOINT_WRITE_SECONDS) + self.training.volume.slow
            self._written_at = self._world.now() + seconds
            self._world.call_after(seconds, self._finish_checkpoint_write, saved, answered)
            next_action()

        self._wait_for_checkpoint(stage)

    def _wait_for_checkpoint(self, next_action: Callable[[], None]) -> None:
        remaining = self._written_at - self._world.now()
        if remaining > 0:
            self._run_phase(Phase.CHECKPOINT, remaining + _PEER_LOSS_NOTICE_SECONDS[0], next_action)
        else:
            next_action()

    def _finish_checkpoint_write(self, saved: SavedState, answered: int) -> None:
        """Finish a checkpoint if the ranks still run."""
        if self.over:
            return
        if any(StallReason.STOPPED in rank.stalls for rank in self.ranks.values()):
            self._world.call_after(_STALL_POLL_SECONDS, self._finish_checkpoint_write, saved, answered)
            return
        volume, folder, now = self.training.volume, self.ranks[0].worker.folder, self._world.now()
        self._failed = volume.fails
        if volume.fails:
            self._checkpointed_step = self._saved_step
            error = f"/checkpoints: step {saved.step}: rank 0: OSError: [Errno 28] No space left on device"
            folder.checkpoints = replace(folder.checkpoints, failed_rank=0, error=error)
        elif volume.owner is self:  # otherwise, a later round has started
            volume.publish(saved)
            self._saved_step = self.checkpoint_step = saved.step
            self.answered = max(self.answered, answered)
            folder.checkpoints = CheckpointStatus(saved.step, int(1e9 * now))
            self._world.log.record_for_digest("kept", self.training.uid, saved.step)
        self._wake_launchers()

    def _find_rank_zero_checkpoint(self, step: int | None) -> None:
        """Publish the newest checkpoint on the volume to rank 0's launcher."""
        folder = self.ranks[0].worker.folder
        if step != folder.checkpoints.step:
            found_ns = None if step is None else int(1e9 * self._world.now())
            folder.checkpoints = CheckpointStatus(step, found_ns)

    # The end.

    def _save_final_checkpoint(self, code: int, attempts: int = 2) -> None:
        """Write the last checkpoint, with a second attempt if it fails. Then the ranks exit."""

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
