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

from pacekeeper.keep.news import CheckpointNews
from pacekeeper.modes.course import Course, Supply, crossed, joins, mode_from, supply
from pacekeeper.modes.progress import Progress
from pacekeeper.observe.windows import StepTimes
from pacekeeper_analysis import shares
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import MODES, Stop, SyncMode
from pacekeeper_analysis.records import RECORD, Kind, Phase, StateOrigin

from .rank import LEFT, LOST_PEER, Leg, Rank, Stand
from .volume import Kept

if TYPE_CHECKING:
    from ..world import World
    from .training import Training

_MEETS = (0.1, 0.5)
_RESTORES = (0.2, 1.0)
_FIRST_STEP = (0.5, 2.0)
"""Seconds that these take."""
_STAGES = (0.05, 0.2)
_WRITES = (0.5, 2.0)
"""Seconds for which a checkpoint holds the ranks up, and until it is published."""
_EXITS = (0.02, 0.3)
_NOTICES = (0.005, 0.1)
"""Seconds until a rank exits, and until it hears that a peer has."""
_SYNCHRONISES = 1.3
"""How many times as long as a step's all-reduce a synchronisation in Local-SGD modes takes."""
_LOOKS_AGAIN = 0.5
"""Seconds between two looks whether ranks that stand still can go on."""
_LONG = 1.5
"""Seconds of a leg that launchers may take for a stall."""


class Run:
    """Of one round. It exists since its first rank has come to the store."""

    def __init__(self, world: World, training: Training, first: Rank, host: str) -> None:
        """`host`: address of the launcher that serves the store."""
        self.training = training
        self.round = first.round
        self.membership = first.membership
        self.ranks: dict[int, Rank] = {}
        self.progress = Progress()
        self.mode = SyncMode.SYNC
        """In force."""
        self.ordinals = 0
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
        self.stands = False
        """Its ranks take longer than they should."""
        self._world = world
        self._random = world.random(f"run {training.uid} {first.membership} {first.round} {host}")
        self._host = host
        self._world_size = first.world_size
        self._links: list[tuple[str, str]] = []
        """Pairs of its ranks' nodes; each node with itself, too."""
        self._supply = Supply(SyncMode.SYNC)
        self._even: tuple[int, ...] = ()
        """Equal shares."""
        self._then: Callable[[], None] = self._nothing
        self._communication = 0.0
        self._wanted_at = math.inf
        self._look_at = -1.0
        self._ordinal_step = 0
        self._membership_of_plan: int | None = None
        self._checkpointed = 0
        self._kept = 0
        self._written_at = -1.0
        self._failed = False
        self._snapshot: Kept | None = None

    @property
    def step(self) -> int:
        """Of the job, that is completed."""
        return self.progress.step

    @property
    def global_batch(self) -> int:
        """0: no step has begun yet."""
        return self.progress.global_batch

    @property
    def seated(self) -> list[Rank]:
        """In order."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def _nothing(self) -> None:
        pass

    def _stamp(self, *names: str) -> None:
        self.stamps |= dict.fromkeys(names, int(1e9 * self._world.now()))

    # Ranks come, stand still and go.

    def join(self, rank: Rank) -> None:
        """It has come to the store."""
        rank.run, rank.leg = self, Leg(Phase.START, self._world.now(), 0.0)
        self.ranks[rank.number] = rank
        rank.worker.launcher.wake()
        if len(self.ranks) == self._world_size and not self.over:
            self._world.story.note("meet", self.training.uid, self.round)
            self.training.runs.append(self)
            nodes = list(dict.fromkeys(each.worker.node for each in self.seated))
            self._links = list(combinations_with_replacement(nodes, 2))
            self._stamp("device_ns")
            self._go(Phase.START, self._random.uniform(*_MEETS), self._restore)

    def rank_ended(self, rank: Rank) -> None:
        """Whoever is waiting for it, or comes to do so, hears of it, unless its machine is silent."""
        if not self.over:
            self.over = True
            self._then = self._nothing
            self._stand()
        if rank.exit_code == 0 or rank.exit_code == LEFT:
            return
        for peer in self.seated:
            if peer.alive and peer.leg is not None:
                self._tell_of_loss(peer, rank)

    def _tell_of_loss(self, peer: Rank, lost: Rank) -> None:
        now, arrives = self._world.now(), peer.arrives()
        if math.isfinite(arrives):
            wait = max(0.0, arrives - now) + self._random.uniform(*_NOTICES)
            self._world.after(wait, self._loses, peer, lost)
        else:
            self._world.after(_LOOKS_AGAIN, self._loses, peer, lost)

    def _loses(self, peer: Rank, lost: Rank) -> None:
        if not peer.alive or peer.worker.gone:
            return
        if peer.arrives() > self._world.now() or Stand.STOPPED in peer.still:
            self._tell_of_loss(peer, lost)
        elif self._world.network.reaches(peer.worker.node, lost.worker.node):
            peer.end(1, LOST_PEER)
        else:
            self._world.after(_LOOKS_AGAIN, self._loses, peer, lost)

    # The way from one collective to the next.

    def _go(self, phase: Phase, seconds: float, then: Callable[[], None]) -> None:
        """All ranks are busy for so long, then meet."""
        now = self._world.now()
        for rank in self.ranks.values():
            rank.leg = Leg(phase, now, seconds, share=rank.leg.share if rank.leg is not None else 0)
        self._await(0.0, then)

    def _await(self, communication: float, then: Callable[[], None]) -> None:
        """`then` comes when all ranks are through with their legs, and with the collective behind them."""
        self._communication, self._then = communication, then
        self.stands = False
        end = max(rank.leg.end for rank in self.ranks.values() if rank.leg is not None) + communication
        self._plan_look(end)
        if end - self._world.now() > _LONG:
            self._stand()

    def _plan_look(self, at: float) -> None:
        self._look_at = at
        self._world.after(max(0.0, at - self._world.now()), self._looks, at)

    def _looks(self, planned: float) -> None:
        if planned == self._look_at and not self.over:
            self.look()

    def look(self) -> None:
        """Whether all have come."""
        if self.over or self._then == self._nothing:
            return
        now = self._world.now()
        end = max(rank.arrives() for rank in self.ranks.values()) + self._communication
        if math.isinf(end) or not self._connected():
            self._stand()
            self._plan_look(now + _LOOKS_AGAIN)
        elif end > now + 1e-9:
            self._plan_look(end)
        else:
            then, self._then = self._then, self._nothing
            self.stands = False
            then()

    def _stand(self) -> None:
        """Launchers are to look closely."""
        if not self.stands:
            self.stands = True
            self._wake()

    def _connected(self) -> bool:
        if any(rank.blocks_collectives for rank in self.ranks.values()):
            return False
        reaches = self._world.network.reaches
        return all(reaches(one, other) for one, other in self._links)

    def _wake(self) -> None:
        """What launchers tell of their ranks has changed."""
        for worker in dict.fromkeys(rank.worker for rank in self.ranks.values()):
            worker.launcher.wake()

    # The beginning.

    def _restore(self) -> None:
        training = self.training
        training.volume.owner = self
        newest = training.volume.newest
        found = -1 if newest is None else newest.step
        snapshots = [rank.worker.folder.snapshot for rank in self.seated]
        versions = [kept for kept in snapshots if kept is not None]
        snapshot = max(versions, key=lambda kept: (kept.step, kept.round), default=None)
        restored = snapshot if snapshot is not None and snapshot.step >= found else newest
        if restored is not None:
            self.progress.load_state_dict(dict(restored.progress))
        self._checkpointed = self._kept = max(0, found)
        if restored is not None:
            self.checkpoint_step = found
        self._found(found)
        self._stamp("joined_ns", "restoring_ns")
        near = StateOrigin.MEMORY if restored is snapshot else StateOrigin.CHECKPOINT
        self.stamps["origin"] = StateOrigin.NOTHING if restored is None else near
        self._go(Phase.RESTORE, self._random.uniform(*_RESTORES), self._open)

    def _open(self) -> None:
        training, progress = self.training, self.progress
        if not training.global_batch:
            training.global_batch = training.samples * self._world_size
        self._stamp("restored_ns")
        self.restored_step = progress.step
        progress.begin(training.global_batch)
        self._even = shares.equal(training.global_batch, self._world_size, 1)
        try:
            self._check(progress.course)
        except InputError:  # of another number of ranks
            progress.course = Course()
        self._ordinal_step = progress.step
        self.answered = progress.answered
        self.began_at = self._world.now()
        self._world.story.tell(
            training.job, f"round {self.round} of membership {self.membership} goes on from step {progress.step}"
        )
        for tell in self._world.trainings.on_step:
            tell(self)
        self._wake()
        self._conclude()

    # Ordinals.

    def _meet(self) -> None:
        """All ranks have come to the end of their legs."""
        now, progress = self._world.now(), self.progress
        used = 0
        for rank in self.ranks.values():
            leg = rank.leg
            assert leg is not None
            self._record(rank, leg, now)
            used += leg.samples
            rank.samples += leg.samples
            rank.steps_in_round += leg.parts
            rank.step_ended = now if self.mode is SyncMode.SYNC else leg.end
        is_first = self.ordinals == 0
        self.ordinals += 1
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
            self._wake()
        self._conclude()

    def _record(self, rank: Rank, leg: Leg, now: float) -> None:
        """In its history. The first step of a round is no training yet."""
        if leg.phase is not Phase.TRAIN:
            return
        step, mode = self.progress.step, MODES.index(self.mode)
        if self.mode is SyncMode.SYNC:
            rank.history.append(StepTimes(step + 1, now - leg.began, leg.seconds, leg.share, 0.0), mode)
            return
        for number in range(leg.parts):
            rank.history.append(StepTimes(step + 1 + number, leg.seconds, leg.seconds, leg.share, 0.0), mode)
        record = np.zeros(1, RECORD)
        record["kind"], record["phase"], record["value"] = Kind.SYNCHRONISATION, Phase.TRAIN, now - leg.end
        rank.history.add(record)

    def _conclude(self) -> None:
        """What follows for all ranks alike: it is rank 0's word that counts."""
        progress, training = self.progress, self.training
        course, request, suspend = self._orders()
        mode = mode_from(course.sync_mode, progress.step, training.warmup_steps)
        limit = None if training.until is None else progress.samples_at(training.until)
        following = supply(
            mode, progress.samples - progress.origin, progress.global_batch, limit and limit - progress.origin
        )
        if suspend or any(rank.leaving for rank in self.ranks.values()):
            self._take_snapshot()
            self._settle_snapshot()
            self._keep_last(LEFT)
            return
        duties: list[Callable[[Callable[[], None]], None]] = []
        if request > progress.answered:
            duties.append(lambda then: self._answer(request, then))
        if progress.step > self._checkpointed and crossed(self._ordinal_step, progress.step, training.checkpoint_every):
            duties.append(self._checkpoint)
        finish = limit is not None and progress.samples >= limit

        def go_on() -> None:
            if duties:
                duties.pop(0)(go_on)
            elif finish:
                self._keep_last(0)
            else:
                self._settle_snapshot()
                if crossed(self._ordinal_step, progress.step, training.snapshot_every):
                    self._take_snapshot()
                self._begin_period(course, following)

        go_on()

    def _orders(self) -> tuple[Course, int, bool]:
        """The course, the checkpoint request, and whether the job is suspended, as rank 0 reads its plan."""
        in_force = self.progress.course
        folder = self.ranks[0].worker.folder
        plan = folder.plan
        if plan is None:
            return in_force, 0, False
        if self._membership_of_plan is None:
            self._membership_of_plan = plan.membership
        course, refused = Course.of(plan), ""
        if plan.version == 0 or plan.membership != self._membership_of_plan:
            course = in_force
        else:
            try:
                self._check(course)
            except InputError as error:
                course, refused = in_force, f"plan {plan.version}: {error}"
        if refused != folder.refused:
            folder.refused = refused
            self.ranks[0].worker.launcher.wake()
        return course, plan.checkpoint_request, plan.stop is Stop.SUSPEND

    def _check(self, course: Course) -> None:
        """Raises InputError where the script cannot train so."""
        if course.shares is not None and (
            len(course.shares) != self._world_size or sum(course.shares) != self.progress.global_batch
        ):
            raise InputError(f"shares: {list(course.shares)} do not make up {self.progress.global_batch} samples")
        plain = course.shares is None and course.sync_mode is SyncMode.SYNC
        if not plain and any(rank.worker.refuses for rank in self.ranks.values()):
            raise InputError("this script trains with equal shares, in mode Sync only")

    def _begin_period(self, course: Course, following: Supply) -> None:
        progress = self.progress
        progress.course = course
        if following.mode is not self.mode:
            self.mode = following.mode
            self._world.story.tell(self.training.job, f"trains in mode {self.mode} from step {progress.step + 1} on")
            self._wake()
        self._supply = following
        self._ordinal_step = progress.step
        self._begin_legs()

    def _begin_legs(self) -> None:
        training, progress, now = self.training, self.progress, self._world.now()
        first = self.ordinals == 0
        dealt = (None if self._supply.leased else progress.course.shares) or self._even
        for rank in self.seated:
            share = dealt[rank.number]
            slow = self._world.nodes[rank.worker.node].slow
            seconds = (training.fixed_seconds + share * training.sample_seconds) * slow
            seconds *= self._random.uniform(0.98, 1.02)
            if first:
                seconds += self._random.uniform(*_FIRST_STEP)
            phase = Phase.START if first else Phase.TRAIN
            parts = self._planned(seconds)
            rank.leg = Leg(phase, now, seconds, parts, steps=True, share=share, samples=parts * share)
        if self._supply.leased and self._supply.limit is not None:
            self._take_leases(self._supply.limit - (progress.samples - progress.origin))
        more = _SYNCHRONISES if self._supply.local else 1.0
        self._await(training.communication_seconds * self._slowness() * more, self._meet)

    def _slowness(self) -> float:
        """Of the slowest link between its nodes."""
        slowness = self._world.network.slowness
        return max(slowness(one, other) for one, other in self._links)

    def _planned(self, seconds: float) -> int:
        """Steps of a rank up to the next ordinal, where each takes so long."""
        progress, until = self.progress, self.training.until
        if self._supply.leased:
            steps = 1
            while not joins(steps * seconds, seconds, progress.course.sync_seconds):
                steps += 1
            return steps
        if not self._supply.local:
            return 1
        if until is None:
            return progress.course.sync_every
        return min(progress.course.sync_every, progress.whole_batches(progress.samples_at(until) - progress.samples))

    def _take_leases(self, left: int) -> None:
        """Where there are no more than `left` samples, ranks take them as they come to it; the last batch is small."""
        legs = [rank.leg for rank in self.seated if rank.leg is not None]
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

    def _state(self) -> Kept:
        return Kept(self.progress.step, self.round, self.progress.state_dict())

    def _take_snapshot(self) -> None:
        self._snapshot = self._state()

    def _settle_snapshot(self) -> None:
        """The one taken last is valid now."""
        if self._snapshot is not None:
            for rank in self.ranks.values():
                rank.worker.folder.snapshot = self._snapshot
            self.snapshot_step = self._snapshot.step
            self._snapshot = None

    def _answer(self, request: int, then: Callable[[], None]) -> None:
        self.progress.answered = request
        self._checkpoint(then)

    def _checkpoint(self, then: Callable[[], None]) -> None:
        """Of the present state, unless there is one; it is published in the background."""

        def stage() -> None:
            answered = self.progress.answered
            if self.progress.step <= self._checkpointed:
                if answered > self.answered:
                    self.answered = answered
                    self._wake()
                then()
                return
            self._checkpointed = self.progress.step
            kept = self._state()
            self._go(Phase.CHECKPOINT, self._random.uniform(*_STAGES), lambda: write(kept, answered))

        def write(kept: Kept, answered: int) -> None:
            seconds = self._random.uniform(*_WRITES) + self.training.volume.slow
            self._written_at = self._world.now() + seconds
            self._world.after(seconds, self._write, kept, answered)
            then()

        self._wait_for_checkpoint(stage)

    def _wait_for_checkpoint(self, then: Callable[[], None]) -> None:
        left = self._written_at - self._world.now()
        if left > 0:
            self._go(Phase.CHECKPOINT, left + _NOTICES[0], then)
        else:
            then()

    def _write(self, kept: Kept, answered: int) -> None:
        """What comes of it, if the ranks are still there."""
        if self.over:
            return
        if any(Stand.STOPPED in rank.still for rank in self.ranks.values()):
            self._world.after(_LOOKS_AGAIN, self._write, kept, answered)
            return
        volume, folder, now = self.training.volume, self.ranks[0].worker.folder, self._world.now()
        self._failed = volume.fails
        if volume.fails:
            self._checkpointed = self._kept
            error = f"/checkpoints: step {kept.step}: rank 0: OSError: [Errno 28] No space left on device"
            folder.checkpoints = replace(folder.checkpoints, failed_rank=0, error=error)
        elif volume.owner is self:  # else a later round has begun
            volume.publish(kept)
            self._kept = self.checkpoint_step = kept.step
            self.answered = max(self.answered, answered)
            folder.checkpoints = CheckpointNews(kept.step, int(1e9 * now))
            self._world.story.note("kept", self.training.uid, kept.step)
        self._wake()

    def _found(self, step: int) -> None:
        """For rank 0's launcher: the newest checkpoint on the volume."""
        folder = self.ranks[0].worker.folder
        if step != folder.checkpoints.step:
            folder.checkpoints = CheckpointNews(step, int(1e9 * self._world.now()))

    # The end.

    def _keep_last(self, code: int, attempts: int = 2) -> None:
        """Nobody writes a checkpoint after this one: where it fails there is a second attempt. Then the ranks exit."""

        def written() -> None:
            if self._failed and attempts > 1:
                self._keep_last(code, attempts - 1)
                return
            for rank in self.ranks.values():
                if code == 0:
                    rank.leg = Leg(Phase.FINISHED, self._world.now(), 0.0)
                self._world.after(self._random.uniform(*_EXITS), self._exit, rank, code)

        self._failed = False
        self._checkpoint(lambda: self._wait_for_checkpoint(written))

    def _exit(self, rank: Rank, code: int) -> None:
        if rank.alive and rank.still:
            self._world.after(_LOOKS_AGAIN, self._exit, rank, code)
        else:
            rank.end(code)
