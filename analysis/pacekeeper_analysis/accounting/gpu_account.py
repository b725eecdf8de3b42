"""The account of a training's GPU seconds.

Every GPU second is attributed once, so that useful seconds and losses add up to the seconds that were held. A second is
attributed when it is known what it was for: the time since the last complete step stays open until the next step
completes, a hang is found, or the round ends.

| time | attributed to |
|---|---|
| until the first step of a round is complete | Startup |
| of a step that an earlier round had completed already | RepeatedSteps |
| of a step, in which a slow rank works longer than its peers; or without sums of own work: (1 - 1/S) | Straggler |
| of a step, in which even the rank that waits least waits: exposed communication | Communication |
| of a step that a round did not complete | RepeatedSteps: its work is done again |
| from the last complete step on, of ranks that hang | Hang |
| between two rounds, and after the last step of the job | Idle |

A slow rank is known only some time after it has become slow. Until then its excess counts as useful; then it is moved.
So is the gap between two rounds, if the second one begins before it is known when the first one ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from .rank_work import RankSums, StepWork, WorkPosition

MAX_DAYS = 62
"""Days with a tally of their own: two months."""
MAX_NODES = 256
"""Nodes of days to which losses are attributed. Losses of older ones stay in the total only."""
DayAndNode = tuple[str, str]
"""ISO date, UTC, and name of a node."""
MAX_RECENT_INTERVALS = 512
"""Intervals in which the excess of ranks can still be moved: some minutes, in which a slow rank is found."""


class Loss(StrEnum):
    """What GPU seconds were lost to."""

    STARTUP = "Startup"
    HANG = "Hang"
    STRAGGLER = "Straggler"
    COMMUNICATION = "Communication"
    REPEATED_STEPS = "RepeatedSteps"
    IDLE = "Idle"


@dataclass(frozen=True)
class Tally:
    """GPU seconds by what they were for."""

    useful: float = 0.0
    lost: Mapping[Loss, float] = field(default_factory=dict)

    @property
    def held(self) -> float:
        """All GPU seconds."""
        return self.useful + sum(self.lost.values())

    @property
    def goodput(self) -> float | None:
        """The share of useful seconds; None: no GPU was held."""
        return self.useful / self.held if self.held else None

    def __add__(self, other: Tally) -> Tally:
        lost = dict(self.lost)
        for loss, seconds in other.lost.items():
            lost[loss] = lost.get(loss, 0.0) + seconds
        return Tally(self.useful + other.useful, lost)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is probably slow."""

    rank: int
    since: float  # seconds since the epoch
    node: str = ""


@dataclass(frozen=True)
class TrainingMoment:
    """What is known of a training at one moment. Times are seconds since the epoch."""

    now: float
    gpus: int  # that its pods hold; of a job without GPUs: its ranks
    round: int  # the newest one, from 1; 0: no rank has started yet
    held_since: float | None = None  # since when its first pod runs
    round_began: float | None = None  # when its first rank started
    first_step_ended: float | None = None  # of this round; None: it has no complete step
    steps_in_round: int = 0  # that are complete
    step: int | None = None  # last complete one, over all rounds; None: unknown, as from where the round resumed
    step_ended: float | None = None  # when the last step of this round was completed
    previous_round_ended: float | None = None  # when the first rank of the round before ended; None: not observed
    is_over: bool = False  # no step follows
    is_hung: bool = False
    knows_last_step: bool = True  # the steps before the hang are all reported
    step_seconds: float | None = None  # usual time of a step; None: not known
    slowdown: float = 1.0  # S of recent steps: their time over that without slow ranks, as far as sums do not show it
    exposed_share: float = 0.0  # of a step, in which even the rank that waits least waits; of use without sums
    culprit_nodes: tuple[str, ...] = ()  # of what slows or holds it now
    sums: RankSums | None = None  # of all ranks in this round; None: some do not report them
    slow_ranks: tuple[SlowRank, ...] = ()  # whose excess the sums show


@dataclass(frozen=True)
class StepInterval:
    """Some steps that are attributed. The excess of a rank can still be moved from the useful seconds."""

    ended: float
    steps: int
    seconds: float
    useful: float = 0.0  # GPU seconds
    excess: Mapping[int, float] = field(default_factory=dict)  # GPU seconds, by rank


@dataclass(frozen=True)
class RecentSteps:
    """The last steps of this round. They are not stored: a new leader begins without them, and moves nothing twice."""

    position: WorkPosition | None = None  # None: no sums were observed
    intervals: tuple[StepInterval, ...] = ()  # oldest first
    is_whole: bool = False  # no earlier leader has counted steps of this round
    slow_ranks: tuple[SlowRank, ...] = ()  # of the last moment

    def estimate_step_seconds(self, steps: int) -> float | None:
        """Return the mean time of about the last `steps` steps; None: there is none."""
        counted, seconds = 0, 0.0
        for interval in reversed(self.intervals):
            counted, seconds = counted + interval.steps, seconds + interval.seconds
            if counted >= steps:
                break
        return seconds / counted if counted else None


@dataclass(frozen=True)
class UnfinishedStep:
    """The time between the last complete step of a round and the round's end, as far as that is known."""

    began: float
    ended: float
    gpus: int
    loss: Loss


@dataclass(frozen=True)
class GpuAccount:
    """What is attributed so far."""

    total: Tally = field(default_factory=Tally)
    days: Mapping[str, Tally] = field(default_factory=dict)  # by ISO date, UTC; the newest MAX_DAYS
    nodes: Mapping[DayAndNode, float] = field(default_factory=dict)  # GPU seconds lost to hangs and stragglers
    until: float | None = None  # up to which all is attributed; None: the account has not begun
    round: int = 0
    steps_in_round: int = 0  # that count
    highest_step: int = 0  # completed by rounds before this one
    step: int = 0  # last one of this round that counts; 0: unknown
    hung: bool = False
    gpus: int = 0  # that were held last
    recent: RecentSteps = field(default_factory=RecentSteps, compare=False)
    unfinished: UnfinishedStep | None = field(default=None, compare=False)  # of the round before; None: not known


def advance_account(account: GpuAccount, moment: TrainingMoment) -> GpuAccount:
    """Return the account with all seconds that this moment explains. Call it with moments in their order."""
    if account.until is None:
        account = replace(account, until=moment.now if moment.held_since is None else moment.held_since)
    if moment.round > account.round:
        account = _begin_round(account, moment)
    account = _move_gap(account, moment)
    account = replace(_count_steps(account, moment), gpus=moment.gpus or account.gpus)
    account = _move_excess(account, moment)
    if moment.is_over:
        return _attribute_time(account, moment, moment.now, {Loss.IDLE: 1.0})
    if account.steps_in_round == 0:  # also before the first round: its pods hold GPUs already
        return _attribute_time(account, moment, moment.now, {Loss.STARTUP: 1.0})
    if moment.is_hung and moment.knows_last_step:
        account = _attribute_time(account, moment, moment.now, {Loss.HANG: 1.0})
    return replace(account, hung=moment.is_hung)


def _begin_round(account: GpuAccount, moment: TrainingMoment) -> GpuAccount:
    began = moment.now if moment.round_began is None else moment.round_began
    gap, unfinished = Loss.STARTUP, None
    if account.round:
        # The time since its last complete step. When its ranks ended may be unknown: then it lasted until now.
        ended = began if moment.previous_round_ended is None else min(began, moment.previous_round_ended)
        interrupted = Loss.HANG if account.hung else Loss.REPEATED_STEPS
        loss = interrupted if account.steps_in_round else Loss.STARTUP
        last_step_ended = account.until
        account, gap = _attribute_time(account, moment, ended, {loss: 1.0}), Loss.IDLE
        assert last_step_ended is not None
        assert account.until is not None
        unfinished = UnfinishedStep(last_step_ended, account.until, moment.gpus, loss)
    account = _attribute_time(account, moment, began, {gap: 1.0})
    highest = max(account.highest_step, account.step)
    return replace(
        account,
        round=moment.round,
        steps_in_round=0,
        highest_step=highest,
        step=0,
        hung=False,
        recent=RecentSteps(),
        unfinished=unfinished,
    )


def _move_gap(account: GpuAccount, moment: TrainingMoment) -> GpuAccount:
    """Move what followed the end of the round from its unfinished step: its fault may be diagnosed only later."""
    step, ended = account.unfinished, moment.previous_round_ended
    if step is None or ended is None or moment.round != account.round or ended >= step.ended:
        return account
    ended = max(ended, step.began)
    began = step.ended if moment.round_began is None else min(step.ended, max(ended, moment.round_began))
    before = Tally(0.0, {step.loss: -(step.ended - ended) * step.gpus})  # which may be that of a start, too
    after = Tally(0.0, {Loss.IDLE: (began - ended) * step.gpus, Loss.STARTUP: (step.ended - began) * step.gpus})
    account = _add_tally(account, step.ended, before + after, ())
    return replace(account, unfinished=replace(step, ended=ended))


def _count_steps(account: GpuAccount, moment: TrainingMoment) -> GpuAccount:
    if moment.round != account.round or moment.first_step_ended is None or moment.step_ended is None:
        return account
    if account.steps_in_round == 0:
        # How long the first step itself took is not known: it is part of the start.
        account = _attribute_time(account, moment, moment.first_step_ended, {Loss.STARTUP: 1.0})
        account = replace(account, steps_in_round=1, recent=RecentSteps(is_whole=True))
    if moment.sums is not None and account.recent.position is None:
        begin = WorkPosition.begin_round if account.recent.is_whole else WorkPosition.skip_reported
        account = replace(account, recent=replace(account.recent, position=begin(moment.sums)))
    new_steps = moment.steps_in_round - account.steps_in_round
    if new_steps > 0:
        account = _attribute_steps(account, moment, new_steps)
    return replace(
        account, steps_in_round=max(account.steps_in_round, moment.steps_in_round), step=moment.step or account.step
    )


def _attribute_steps(account: GpuAccount, moment: TrainingMoment, new_steps: int) -> GpuAccount:
    assert moment.step_ended is not None
    assert account.until is not None
    step_seconds = account.recent.estimate_step_seconds(new_steps) or moment.step_seconds
    was_hung = account.hung and step_seconds is not None
    if was_hung and step_seconds is not None:
        # The hang's step is among the new ones. They take as long as others; the rest of the time is the hang.
        account = _attribute_time(account, moment, moment.step_ended - new_steps * step_seconds, {Loss.HANG: 1.0})
    work, position = None, account.recent.position
    if moment.sums is not None and position is not None:
        work, position = position.advance(moment.sums)
    assert account.until is not None
    began, useful_before, gpus = account.until, account.total.useful, moment.gpus
    repeated = _compute_repeated_share(account, moment, new_steps)
    shares = _split_steps(moment, repeated, None if was_hung else work)
    account = _attribute_time(account, moment, moment.step_ended, shares)
    recent = replace(account.recent, position=position)
    if not was_hung and account.until is not None and account.until > began:
        excess = {} if work is None else work.excess
        interval = StepInterval(
            ended=account.until,
            steps=new_steps,
            seconds=account.until - began,
            useful=account.total.useful - useful_before,
            excess={rank: seconds * gpus * (1.0 - repeated) for rank, seconds in excess.items()},
        )
        recent = replace(recent, intervals=(*recent.intervals, interval)[-MAX_RECENT_INTERVALS:])
    return replace(account, recent=recent)


def _compute_repeated_share(account: GpuAccount, moment: TrainingMoment, new_steps: int) -> float:
    """Return the share of these steps that an earlier round had completed."""
    if moment.step is None:
        return 0.0
    first = moment.step - new_steps
    return min(1.0, max(0, min(moment.step, account.highest_step) - first) / new_steps)


def _split_steps(moment: TrainingMoment, repeated: float, work: StepWork | None) -> Mapping[Loss, float]:
    """Return the share of each loss in the time of these steps. `work`: of the ranks in them; None: not known."""
    new, straggler = 1.0 - repeated, 1.0 - 1.0 / max(1.0, moment.slowdown)
    exposed = min(1.0, max(0.0, moment.exposed_share))
    communication = min(exposed, 1.0 - straggler)
    if work is not None and work.seconds > 0:
        # Ranks that are slow in turns make every rank wait: these waits are in both.
        communication = max(0.0, min(1.0, work.exposed / work.seconds) - straggler)
    return {
        Loss.REPEATED_STEPS: repeated,
        Loss.STRAGGLER: new * straggler,
        Loss.COMMUNICATION: new * communication,
    }


def _move_excess(account: GpuAccount, moment: TrainingMoment) -> GpuAccount:
    """Move the excess of slow ranks, since they are slow, from the useful seconds. It is moved once."""
    intervals = list(account.recent.intervals)
    named = {slow.rank for slow in moment.slow_ranks}
    # The last slow steps may arrive with the first ones by which the rank is not slow any more.
    ended = [slow for slow in account.recent.slow_ranks if slow.rank not in named]
    for slow in (*moment.slow_ranks, *ended):
        for index, interval in enumerate(intervals):
            excess = interval.excess.get(slow.rank)
            if excess is None or interval.ended <= slow.since:
                continue
            seconds = min(excess, interval.useful)
            account = _add_tally(
                account, interval.ended, Tally(-seconds, {Loss.STRAGGLER: seconds}), (slow.node,) if slow.node else ()
            )
            others = {rank: each for rank, each in interval.excess.items() if rank != slow.rank}
            intervals[index] = replace(interval, useful=interval.useful - seconds, excess=others)
    recent = replace(account.recent, intervals=tuple(intervals), slow_ranks=moment.slow_ranks)
    return replace(account, recent=recent)


def _attribute_time(
    account: GpuAccount,
    moment: TrainingMoment,
    until: float,
    shares: Mapping[Loss, float],
) -> GpuAccount:
    """Attribute the time up to `until` by these shares; the rest is useful."""
    assert account.until is not None
    until = min(until, moment.now)
    seconds = (until - account.until) * moment.gpus
    if until <= account.until or not seconds:
        return replace(account, until=max(until, account.until))
    lost = {loss: seconds * share for loss, share in shares.items() if share > 0}
    tally = Tally(max(0.0, seconds - sum(lost.values())), lost)
    return replace(_add_tally(account, until, tally, moment.culprit_nodes), until=until)


def _add_tally(account: GpuAccount, at: float, tally: Tally, culprits: Sequence[str]) -> GpuAccount:
    """Add the seconds to the total, to the day of this time, and to the nodes of culprits."""
    day = datetime.fromtimestamp(at, UTC).date().isoformat()
    days = {**account.days, day: account.days.get(day, Tally()) + tally}
    for oldest in sorted(days)[:-MAX_DAYS]:
        del days[oldest]
    nodes = _charge_nodes(account.nodes, day, culprits, tally.lost)
    return replace(account, total=account.total + tally, days=days, nodes=nodes)


def _charge_nodes(
    nodes: Mapping[DayAndNode, float], day: str, culprits: Sequence[str], lost: Mapping[Loss, float]
) -> Mapping[DayAndNode, float]:
    """Charge the nodes of what slows or holds the job, in equal parts. The oldest and smallest parts are dropped."""
    charged = lost.get(Loss.HANG, 0.0) + lost.get(Loss.STRAGGLER, 0.0)
    if not charged or not culprits:
        return nodes
    updated = {**nodes, **{(day, node): nodes.get((day, node), 0.0) + charged / len(culprits) for node in culprits}}
    for key in sorted(updated, key=lambda key: (key[0], updated[key]))[:-MAX_NODES]:
        del updated[key]
    return updated
