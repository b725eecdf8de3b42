"""Finds who is slow, who hangs where, and who died first of what, while a job runs. Pure: sentences for people.

The live view names a suspect at once. The summary counts only what the estimator holds for certain (P ≥ 0.95).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pacekeeper.health.fault_formatting import describe_fault
from pacekeeper_analysis.estimator.estimator import JobLayout, StragglerEstimator
from pacekeeper_analysis.estimator.observations import StepWindow
from pacekeeper_analysis.estimator.parameters import EstimatorParameters
from pacekeeper_analysis.failures.crash import is_peer_consequence
from pacekeeper_analysis.failures.hang import HangVerdict, diagnose_hang
from pacekeeper_analysis.failures.wait_graph import name_ranks
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState, RankWindow
from pacekeeper_analysis.protocol.watched_container import RankDescription
from pacekeeper_analysis.stragglers.defaults import DEFAULT_STRAGGLER_SLOWDOWN
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis, diagnose_bottleneck

from .container import ContainerState

MIN_JUDGED_STEPS = 8
"""Steps that all ranks have in common before slowness is judged, as in `diagnose_bottleneck`."""
FIRST_CAUSE_TIMEOUT_SECONDS = 2.0
"""Seconds for which the first cause of a failure is awaited if a rank has only lost a peer."""
UNWATCHED_NOTICE_SECONDS = 60.0
"""Seconds after which a command without ranks is reported."""
STACK_LINES = 4
"""Innermost calls of a blamed rank that are printed."""
WHY_UNWATCHED = (
    "python -I, -E, or -S; a PYTHONPATH that the command replaces; Python before 3.9; or a script that creates no "
    "process group and steps no optimizer"
)


@dataclass
class _SlowEpisode:
    """A time in which a rank was certainly slow."""

    rank: int
    since: float
    until: float
    slowdown: float  # of the job's steps by this rank: the largest S seen

    @property
    def lost_seconds(self) -> float:
        return (self.until - self.since) * (1 - 1 / self.slowdown)


@dataclass
class _Hang:
    """A time in which the ranks made no progress."""

    sentence: str
    since: float
    until: float | None = None  # None: it lasts


@dataclass
class LiveAnalysis:
    """What is known of a running command. Times are seconds since the epoch, as in faults."""

    began: float
    threshold: float = DEFAULT_STRAGGLER_SLOWDOWN
    _ranks: tuple[RankDescription, ...] = ()
    _said_unwatched: bool = False
    _estimator: StragglerEstimator | None = None
    _named: tuple[int | str, ...] = ()
    _judged_step: int = 0  # the newest one that has been judged
    _step: int | None = None
    _steps: int = 0
    _step_seconds: list[float] = field(default_factory=list)
    _episodes: list[_SlowEpisode] = field(default_factory=list)
    _hangs: list[_Hang] = field(default_factory=list)
    _failures: list[FaultReport] = field(default_factory=list)
    _causes: list[str] = field(default_factory=list)
    _announced_round: int = 0
    _progress_at: float = 0.0
    _broken: int = 0

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Ranks that are named as slow now."""
        return tuple(rank for rank in self._named if isinstance(rank, int))

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last judged steps; None: none has been judged."""
        return median(self._step_seconds) if self._step_seconds else None

    def observe(self, state: ContainerState, windows: Sequence[RankWindow], now: float) -> list[str]:
        """Return sentences about what is new. `windows`: of the present ranks; (): not read at this poll."""
        return [
            *self._describe_ranks(state, now),
            *self._follow_progress(state, now),
            *self._judge_speed(state, windows, now),
            *self._judge_stalls(state),
            *self._judge_failures(state, now),
            *self._describe_broken(state),
        ]

    def summarize(self, now: float) -> list[str]:
        """Return the sentences at the end of the command."""
        if not self._ranks:
            return [f"nothing was watched: no process became a rank. Possible reasons: {WHY_UNWATCHED}"]
        sentences = [self._describe_speed(now)]
        sentences += [
            f"rank {episode.rank} was slow for {episode.until - episode.since:.0f} s, with S up to "
            f"{episode.slowdown:.2f}: about {episode.lost_seconds:.0f} s lost"
            for episode in self._episodes
        ]
        for hang in self._hangs:
            seconds = (now if hang.until is None else hang.until) - hang.since
            sentences.append(f"no progress for {seconds:.0f} s: {hang.sentence}")
        sentences += self._name_first_cause(now + FIRST_CAUSE_TIMEOUT_SECONDS)
        sentences += [f"first failure of round {round_}: {cause}" for round_, cause in self._list_causes()]
        if len(sentences) == 1:
            sentences.append("no slow rank, no hang, and no failed rank")
        return sentences

    # ---- ranks and progress -------------------------------------------------------------------------------------

    def _describe_ranks(self, state: ContainerState, now: float) -> list[str]:
        ranks, earlier = state.ranks, self._ranks
        if not ranks:
            if self._said_unwatched or now - self.began < UNWATCHED_NOTICE_SECONDS:
                return []
            self._said_unwatched = True
            return [f"no process has become a rank so far. Possible reasons: {WHY_UNWATCHED}"]
        self._ranks = ranks
        if {rank.pid for rank in ranks} != {rank.pid for rank in earlier}:
            self._estimator, self._named, self._judged_step = None, (), 0
        world = ranks[0].world_size
        is_known = [rank.resumed_from for rank in ranks] == [rank.resumed_from for rank in earlier]
        if len(ranks) == len(earlier) and is_known and ranks[0].restart == earlier[0].restart:
            return []
        if len(ranks) < world and now - min(rank.started_at for rank in ranks) < 0:
            return []
        sentences = []
        if len(ranks) == world and (len(earlier) != world or ranks[0].restart != earlier[0].restart):
            sentences.append(_describe_start(ranks))
        resumed = {rank.resumed_from for rank in ranks} - {None, 0}
        if resumed and not is_known and len(resumed) == 1 and all(rank.resumed_from is not None for rank in ranks):
            sentences.append(f"the script continues from step {resumed.pop()}")
        return sentences

    def _follow_progress(self, state: ContainerState, now: float) -> list[str]:
        """Note progress. Return when ranks that made none continue."""
        progress = state.heartbeat.progress
        if progress.steps_in_round == self._steps:
            return []
        self._step, self._steps, self._progress_at = progress.step, progress.steps_in_round, now
        sentences = []
        for hang in self._hangs:
            if hang.until is None:
                hang.until = now
                sentences.append(f"training goes on after {now - hang.since:.1f} s without progress")
        return sentences

    def _describe_speed(self, now: float) -> str:
        ranks = self._ranks
        speed = f", the last ones of {median(self._step_seconds) * 1e3:.1f} ms each" if self._step_seconds else ""
        watched = f"{len(ranks)} of {ranks[0].world_size} ranks"
        return f"{now - self.began:.0f} s, {watched}, {self._step or 0} steps{speed}"

    # ---- slow ranks ---------------------------------------------------------------------------------------------

    def _judge_speed(self, state: ContainerState, windows: Sequence[RankWindow], now: float) -> list[str]:
        """Return whether ranks are slow, when that changes."""
        ordered = sorted(windows, key=lambda window: window.rank)
        if len(ordered) < 2 or len(ordered) != len(state.ranks) or not all(window.steps for window in ordered):
            return []
        ranks = [window.rank for window in ordered]
        # The analysis numbers the ranks from 0: on one of several machines, they have other numbers.
        numbered = [replace(window, rank=position) for position, window in enumerate(ordered)]
        steps = StepWindow.from_rank_windows(numbered)
        if steps is None or len(steps.numbers) < MIN_JUDGED_STEPS or int(steps.numbers[-1]) == self._judged_step:
            return []
        self._judged_step = int(steps.numbers[-1])
        self._step_seconds = [float(seconds) for seconds in steps.step_seconds.max(axis=1)]
        estimator = self._estimator
        if estimator is None:
            # Ranks count as alike, unlike those of watched jobs: one that is slow from its first step on is named.
            estimator = StragglerEstimator.create(JobLayout(len(ranks), 1), now)
        self._estimator = estimator.observe_steps(steps, now)
        diagnosis = diagnose_bottleneck(numbered, self.threshold)
        if diagnosis is None:
            return []
        probabilities = dict(zip(ranks, map(float, self._estimator.workers.slow), strict=True))
        self._count_episodes(ranks, diagnosis, probabilities, now)
        return self._name_bottleneck(ranks, diagnosis, probabilities)

    def _name_bottleneck(
        self, ranks: Sequence[int], diagnosis: Diagnosis, probabilities: Mapping[int, float]
    ) -> list[str]:
        culprits = tuple(ranks[position] for position in diagnosis.culprits)
        is_slow = diagnosis.slowdown >= self.threshold and diagnosis.bottleneck is not Bottleneck.NONE
        named: tuple[int | str, ...] = (diagnosis.bottleneck, *culprits) if is_slow else ()
        if named == self._named:
            return []
        self._named = named
        if not is_slow:
            return ["no rank is slow any more, and nothing else slows the steps down"]
        effect = (
            f"a step takes {diagnosis.step_seconds * 1e3:.0f} ms instead of "
            f"{diagnosis.step_seconds / diagnosis.slowdown * 1e3:.0f} ms (S = {diagnosis.slowdown:.2f})"
        )
        if diagnosis.bottleneck is Bottleneck.COMPUTE and culprits:
            slow = ", ".join(
                f"rank {ranks[position]} takes {diagnosis.rank_slowdown[position]:.2f} × its peers' time for its own "
                f"work (P = {probabilities[ranks[position]]:.2f})"
                for position in diagnosis.culprits
            )
            return [f"SLOW: {slow}; {effect}"]
        return [f"SLOW: {diagnosis.evidence[0]}; {effect}"]

    def _count_episodes(
        self, ranks: Sequence[int], diagnosis: Diagnosis, probabilities: Mapping[int, float], now: float
    ) -> None:
        """Count the time of ranks that are certainly slow, and cost what counts as slow."""
        if self._estimator is None or diagnosis.bottleneck is not Bottleneck.COMPUTE:
            return
        certain = EstimatorParameters().action_probability
        for position in diagnosis.culprits:
            rank = ranks[position]
            if probabilities[rank] < certain or diagnosis.slowdown < self.threshold:
                continue
            onset = max(self.began, float(self._estimator.workers.slow_onsets[position]))
            last = next((episode for episode in reversed(self._episodes) if episode.rank == rank), None)
            if last is None or onset > last.until:
                last = _SlowEpisode(rank, onset, now, diagnosis.slowdown)
                self._episodes.append(last)
            last.until, last.slowdown = now, max(last.slowdown, diagnosis.slowdown)

    # ---- hangs --------------------------------------------------------------------------------------------------

    def _judge_stalls(self, state: ContainerState) -> list[str]:
        stalls = [fault for fault in state.faults if fault.kind is FaultKind.STALLED]
        if not stalls:
            return []
        world = state.ranks[0].world_size if state.ranks else len(stalls[-1].ranks)
        verdict = diagnose_hang(stalls, world)
        if verdict is None:
            return []
        sentence = _describe_hang(verdict)
        current = self._hangs[-1] if self._hangs and self._hangs[-1].until is None else None
        if current is not None and current.sentence == sentence:
            return []
        if current is None:
            self._hangs.append(_Hang(sentence, self._progress_at or self.began))
        else:
            current.sentence = sentence
        waits = [verdict.waits] if verdict.waits and verdict.ranks else []
        return [f"HANG: {sentence}", *verdict.evidence, *waits, *_list_stacks(stalls[-1], verdict)]

    # ---- failures -----------------------------------------------------------------------------------------------

    def _judge_failures(self, state: ContainerState, now: float) -> list[str]:
        failures = [fault for fault in state.faults if fault.kind is FaultKind.RANK_FAILED]
        self._failures += failures
        for hang in self._hangs:
            if failures and hang.until is None:
                hang.until = now
        return self._name_first_cause(now)

    def _name_first_cause(self, now: float) -> list[str]:
        """Return which rank of the newest round failed first, once that is known.

        A rank that only lost a peer is no cause, unless no other failure follows.
        """
        newest = max((fault.round for fault in self._failures), default=0)
        if newest <= self._announced_round:
            return []
        failures = [fault for fault in self._failures if fault.round == newest]
        cause = next((fault for fault in failures if not is_peer_consequence(fault)), None)
        if cause is None and now - failures[0].noticed_at < FIRST_CAUSE_TIMEOUT_SECONDS:
            return []
        self._announced_round = newest
        self._causes.append(describe_fault(cause or failures[0]))
        return [f"CRASH: {self._causes[-1]}"]

    def _list_causes(self) -> list[tuple[int, str]]:
        rounds = sorted({fault.round for fault in self._failures})
        return list(zip(rounds, self._causes, strict=False))

    def _describe_broken(self, state: ContainerState) -> list[str]:
        new, self._broken = state.broken[self._broken :], max(self._broken, len(state.broken))
        return [
            f"process {report.pid} is not watched any more, and runs on: {report.error} in {report.hook}"
            for report in new
        ]


def has_ended(state: ContainerState) -> bool:
    """Return whether the last ranks have ended."""
    return state.heartbeat.state in (LauncherState.FINISHED, LauncherState.FAILED)


def _describe_start(ranks: Sequence[RankDescription]) -> str:
    first = ranks[0]
    restart = f" after restart {first.restart}" if first.restart else ""
    what = {
        "Native": "",
        "Pure": ", in pure Python",
        "StepsOnly": ", steps only: this torch reports no collectives, so that slow ranks are not named",
    }[first.recording]
    return f"watching {len(ranks)} ranks{restart}: torch {first.torch}, Python {first.python}{what}"


def _describe_hang(verdict: HangVerdict) -> str:
    if not verdict.ranks:
        return verdict.waits or verdict.evidence[0]
    verb = "holds" if len(verdict.ranks) == 1 else "hold"
    return f"{name_ranks(verdict.ranks)} {verb} all others up ({verdict.kind})"


def _list_stacks(stall: FaultReport, verdict: HangVerdict) -> list[str]:
    """Return the innermost calls of the blamed ranks, innermost last."""
    return [
        f"rank {rank.rank}: {line.strip()}"
        for rank in stall.ranks
        if rank.rank in verdict.ranks
        for line in rank.stack.splitlines()[-STACK_LINES:]
    ]
