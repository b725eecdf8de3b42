"""The bottleneck of a job, the gain of each strategy, and the revert: on windows built for each bottleneck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.protocol.plan import Member, Plan, SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers import price, strategies
from pacekeeper_analysis.stragglers.length_cost import SequenceCost
from pacekeeper_analysis.stragglers.shares import MIN_KNOWN_RANKS_WIN
from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis, Hysteresis, Strategy

THRESHOLD = 1.1
STEPS = 32
BATCH = 8
WORK = 0.08
"""Seconds of a healthy rank's own work in a step, and of the whole step in the job's first steady ones."""
FIRST = 0.09
SHARED = Member("w0", "127.0.0.1", (0, 1, 2, 3))


def build_windows(
    own: np.ndarray,
    exposed: float | np.ndarray = 0.005,
    garbage: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    squares: np.ndarray | None = None,
    shares: tuple[int, ...] | None = None,
    baseline: float = FIRST,
) -> list[RankWindow]:
    """Of a synchronous job whose ranks do this own work, [steps, ranks]: all wait for the last one of each step."""
    steps, ranks = own.shape
    whole = own if garbage is None else own + garbage
    lasts = tuple(whole.max(axis=1) + exposed)
    return [
        RankWindow(
            rank=rank,
            steps=tuple(range(100, 100 + steps)),
            step_seconds=lasts,
            compute_seconds=tuple(whole[:, rank]),
            samples=((BATCH,) * ranks if shares is None else shares)[rank : rank + 1] * steps,
            gc_seconds=() if garbage is None else tuple(garbage[:, rank]),
            lengths=() if lengths is None else tuple(lengths[:, rank]),
            squares=() if squares is None else tuple(squares[:, rank]),
            sync_mode="Sync",
            baseline_seconds=baseline,
        )
        for rank in range(ranks)
    ]


def draw_work(seed: int = 0, ranks: int = 4, noise: float = 0.02) -> np.ndarray:
    """Own seconds of healthy ranks, [steps, ranks]."""
    return WORK * (1 + noise * np.random.default_rng(seed).standard_normal((STEPS, ranks)))


def diagnose_windows(given: list[RankWindow], threshold: float = THRESHOLD) -> Diagnosis:
    diagnosis = strategies.diagnose_bottleneck(given, threshold)
    assert diagnosis is not None
    return diagnosis


def choose_strategy(given: list[RankWindow]) -> Strategy | None:
    """Return the preferred strategy; None: all are refused, or there is none."""
    first = next(iter(strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD)), None)
    return None if first is None or first.refused else first


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_healthy_jobs_have_no_bottleneck(ranks: int, noise: float) -> None:
    for seed in range(10):
        given = build_windows(draw_work(seed, ranks, noise))
        assert diagnose_windows(given).bottleneck is Bottleneck.NONE
        assert strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD) == ()


@pytest.mark.parametrize("slow", [1.25, 1.6, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_a_persistently_slow_rank_gets_a_smaller_share(slow: float, noise: float) -> None:
    own = draw_work(1, noise=noise)
    own[:, 2] *= slow
    diagnosis = diagnose_windows(build_windows(own))
    assert diagnosis.bottleneck is Bottleneck.COMPUTE
    assert diagnosis.culprits == (2,)
    assert diagnosis.slowdown == pytest.approx((WORK * slow + 0.005) / (WORK + 0.005), rel=0.08)
    assert diagnosis.rank_slowdown[2] == pytest.approx(slow, rel=0.05)
    assert f"rank 2 {diagnosis.rank_slowdown[2]:.2f} ×" in diagnosis.evidence[0]
    strategy = choose_strategy(build_windows(own))
    assert strategy is not None
    assert (strategy.remedy, strategy.mode) == ("Rebalance", SyncMode.SYNC)
    assert strategy.shares is not None
    assert sum(strategy.shares) == 4 * BATCH
    assert strategy.shares[2] == min(strategy.shares) < BATCH


def test_shares_come_in_whole_microbatches_where_shapes_are_static() -> None:
    own = draw_work(1)
    own[:, 2] *= 2
    strategy = choose_strategy([replace(window, share_granularity=2) for window in build_windows(own)])
    assert strategy is not None
    assert strategy.shares is not None
    assert sorted(strategy.shares) == [4, 8, 10, 10]
    assert strategy.shares[2] == 4
    whole = diagnose_windows([replace(window, share_granularity=BATCH) for window in build_windows(own)])
    proposed = {strategy.remedy: strategy for strategy in strategies.propose_strategies(whole, threshold=THRESHOLD)}
    assert proposed["Rebalance"].refused, "each rank has one microbatch, and keeps it"
    assert not proposed["LocalSGD"].refused


def test_the_rest_of_an_equal_division_into_microbatches_is_not_uneven() -> None:
    shares = (2 * BATCH, BATCH, BATCH, BATCH)
    own = draw_work(1) * np.array(shares) / BATCH
    given = [replace(window, share_granularity=BATCH) for window in build_windows(own, shares=shares)]
    assert diagnose_windows(given).bottleneck is Bottleneck.NONE
    assert strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD) == ()
    assert (
        strategies.propose_strategies(diagnose_windows(build_windows(own, shares=shares)), threshold=THRESHOLD)[
            0
        ].remedy
        == "Rebalance"
    )


def test_the_evidence_names_the_cause_of_the_slowdown_and_the_gain_of_a_spare() -> None:
    own = draw_work(noise=0.0)
    own[:, 3] *= 2
    explanation = diagnose_windows(build_windows(own, exposed=0.0)).evidence[-1]
    # 2 over the mean of 1, 1, 1, 2
    assert "S 1.60; with every other rank ideal, S_w: rank 3 1.60, rank 0 1.00" in explanation
    assert explanation.endswith("at their peers' speed: 2.00 × as fast")
    own[:, 3] /= 2
    own[::2, 1] *= 1.5  # intermittent: no rank is to blame
    assert not any("S_w" in sentence for sentence in diagnose_windows(build_windows(own)).evidence)


def test_the_promise_of_a_strategy_comes_true() -> None:
    own = draw_work(2)
    own[:, 2] *= 2
    strategy = choose_strategy(build_windows(own))
    assert strategy is not None
    assert strategy.shares is not None
    after = draw_work(3) * np.array(strategy.shares) / BATCH
    after[:, 2] *= 2
    assert diagnose_windows(build_windows(after, shares=strategy.shares)).step_seconds == pytest.approx(
        strategy.step_seconds, rel=0.03
    )


def test_shares_that_mend_as_well_as_integers_allow_are_the_end_of_it() -> None:
    """9, 9, 9 and 5 on speeds 1 : 1 : 1 : ½ take 10 where 8 would do: that is no reason to leave synchronous SGD."""
    shares = (9, 9, 9, 5)
    own = draw_work(4) * np.array(shares) / BATCH
    own[:, 3] *= 2
    diagnosis = diagnose_windows(build_windows(own, shares=shares))
    assert diagnosis.bottleneck is Bottleneck.COMPUTE
    assert diagnosis.culprits == (3,)
    proposed = strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    assert {strategy.remedy for strategy in proposed} == {"Rebalance", "LocalSGD"}
    assert all(strategy.refused for strategy in proposed)


def test_coarse_shares_are_enough_where_they_mend_most_of_it() -> None:
    """Four times as slow: AsyncEDiT would be a quarter faster than the best of few samples, but not exact."""
    own = draw_work(24)
    own[:, 3] *= 4
    diagnosis = diagnose_windows(build_windows(own))
    proposed = strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    assert "exact" in strategies.explain_exact_preference(diagnosis, proposed)
    shares = next(strategy.shares for strategy in proposed if strategy.shares is not None)
    mended = draw_work(25) * np.array(shares) / BATCH
    mended[:, 3] *= 4
    diagnosis = diagnose_windows(build_windows(mended, shares=shares))
    assert "exact" in strategies.explain_exact_preference(
        diagnosis, strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    ), "and they stay enough"
    not_allowed = [replace(strategy, refused="not allowed") for strategy in proposed]
    assert strategies.explain_exact_preference(diagnose_windows(build_windows(own)), not_allowed) == ""
    erratic = draw_work(26) * np.where(np.arange(STEPS)[:, None] % 4 == np.arange(4), 6.0, 1.0)
    assert strategies.explain_exact_preference(diagnose_windows(build_windows(erratic)), proposed) == ""


def test_a_rank_that_has_recovered_gets_its_share_back() -> None:
    shares = (9, 9, 9, 5)
    given = build_windows(draw_work(5) * np.array(shares) / BATCH, shares=shares)
    assert diagnose_windows(given).culprits == ()
    strategy = choose_strategy(given)
    assert strategy is not None
    assert strategy.shares == (8, 8, 8, 8)


def test_slow_steps_from_before_its_share_changed_do_not_prevent_that() -> None:
    """A rank's window keeps them indefinitely, and all ranks have them; lengths do not change that."""
    before, shares = (BATCH,) * 4, (9, 9, 9, 5)
    lengths = np.random.default_rng(31).lognormal(6.0, 0.4, size=(STEPS + 8, 4)) * np.array(
        [before] * 8 + [shares] * STEPS
    )
    usual = draw_work(30) * np.array(shares) / BATCH
    slow = draw_work(31)[:8] * np.array([1.0, 1.0, 1.0, 2.5])
    for dealt in (None, lengths):
        own = np.concatenate([slow, usual])
        if dealt is not None:
            own *= dealt / dealt.mean(axis=0)
        given = [
            replace(window, samples=(before[window.rank],) * 8 + (shares[window.rank],) * STEPS)
            for window in build_windows(own, lengths=dealt)
        ]
        assert diagnose_windows(given).culprits == ()
        strategy = choose_strategy(given)
        assert strategy is not None
        assert strategy.shares == (8, 8, 8, 8)


def test_where_shares_cannot_help_a_slow_rank_the_others_stop_waiting_for_it() -> None:
    """Its cost does not depend on its share, as the steps before the last change of shares show."""
    samples = np.repeat([[8, 8, 8, 8], [9, 9, 9, 5]], STEPS, axis=0)
    own = np.concatenate([draw_work(6), draw_work(7)]) * samples / BATCH
    own[:, 3] = np.concatenate([draw_work(8), draw_work(9)])[:, 3] * 1.8
    given = [replace(window, samples=tuple(samples[:, window.rank])) for window in build_windows(own)]
    diagnosis = diagnose_windows(given)
    assert diagnosis.bottleneck is Bottleneck.COMPUTE
    assert diagnosis.culprits == (3,)
    assert diagnosis.rank_slowdown[3] == pytest.approx(1.8, rel=0.05)
    strategy = choose_strategy(given)
    assert strategy is not None
    assert (strategy.remedy, strategy.mode) == ("LocalSGD", SyncMode.ASYNC_EDIT)
    assert strategy.shares == (8, 8, 8, 8)


def test_shares_that_did_not_help_are_followed_by_a_strategy_that_does() -> None:
    """Rank 3 takes 1.8 × as long with any share. Shares are tried; then its steps from before show more."""
    fixed = draw_work(22)[:, 3] * 1.8

    def build_window_after(shares: tuple[int, ...]) -> list[RankWindow]:
        own = draw_work(23) * np.array(shares) / BATCH
        own[:, 3] = fixed
        return build_windows(own, shares=shares)

    before = build_window_after((BATCH,) * 4)
    first = choose_strategy(before)
    assert first is not None
    assert first.shares is not None
    after = build_window_after(first.shares)
    joined = [
        replace(
            new,
            steps=(*old.steps[-8:], *(step + STEPS for step in new.steps)),
            step_seconds=old.step_seconds[-8:] + new.step_seconds,
            compute_seconds=old.compute_seconds[-8:] + new.compute_seconds,
            samples=old.samples[-8:] + new.samples,
        )
        if old.samples[-1] != new.samples[-1]  # a rank whose share has not changed keeps none of them
        else replace(new, steps=tuple(step + STEPS for step in new.steps))
        for old, new in zip(before, after, strict=True)
    ]
    strategy = choose_strategy(joined)
    assert strategy is not None
    assert strategy.mode is SyncMode.ASYNC_EDIT
    assert strategy.shares == (BATCH,) * 4


@pytest.mark.parametrize("paces", [(0.5, 1.0, 1.0, 1.0), (1.0, 1.25, 1.5, 1.75)])
def test_ranks_that_differ_without_a_few_slow_ones_get_shares_that_fit(paces: tuple[float, ...]) -> None:
    """One that is twice as fast as all the others, or ranks of four kinds."""
    diagnosis = diagnose_windows(build_windows(draw_work(21) * paces))
    assert diagnosis.bottleneck is Bottleneck.COMPUTE
    strategy = choose_strategy(build_windows(draw_work(21) * paces))
    assert strategy is not None
    assert strategy.shares is not None
    assert strategy.shares[0] == max(strategy.shares) > BATCH > strategy.shares[3]
    assert strategy.step_seconds < 0.92 * diagnosis.step_seconds


def test_a_bound_of_memory_can_rule_shares_out() -> None:
    own = draw_work(10)
    own[:, 1] *= 2
    diagnosis = diagnose_windows(build_windows(own))
    strategy = strategies.propose_strategies(diagnosis, threshold=THRESHOLD, largest_share=BATCH)[0]
    assert strategy.mode is SyncMode.ASYNC_EDIT
    strategy = strategies.propose_strategies(diagnosis, threshold=THRESHOLD, smallest_share=BATCH + 1)[0]
    assert strategy.mode is SyncMode.ASYNC_EDIT


@pytest.mark.parametrize("slow", [1.5, 2.0, 3.0])
def test_intermittently_slow_ranks_are_not_waited_for(slow: float) -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        own = draw_work(seed) * np.where(random.integers(0, 4, (STEPS, 1)) == np.arange(4), slow, 1.0)
        diagnosis = diagnose_windows(build_windows(own))
        assert diagnosis.bottleneck is Bottleneck.VOLATILE
        assert diagnosis.culprits == ()
        strategy = choose_strategy(build_windows(own))
        assert strategy is not None
        assert strategy.mode is SyncMode.ASYNC_EDIT
        assert strategy.step_seconds < 0.9 * diagnosis.step_seconds


def test_intermittently_slow_ranks_get_no_shares_that_fit_a_few_steps() -> None:
    """Eight steps: rank 1 was the slow one in four of them, rank 0 in none."""
    own = draw_work()[:8] * np.where(np.arange(4) == np.array([[1, 3, 1, 2, 1, 3, 1, 2]]).T, 1.8, 1.0)
    assert diagnose_windows(build_windows(own)).bottleneck is Bottleneck.VOLATILE
    assert [
        strategy.remedy
        for strategy in strategies.propose_strategies(diagnose_windows(build_windows(own)), threshold=THRESHOLD)
    ] == ["LocalSGD"]
    lucky = (10, 7, 8, 7)
    given = build_windows(own * np.array(lucky) / BATCH, shares=lucky)
    (equal,) = (
        strategy
        for strategy in strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD)
        if strategy.remedy == "Rebalance"
    )
    assert equal.shares == (BATCH,) * 4
    assert equal.step_seconds == pytest.approx(diagnose_windows(build_windows(own)).step_seconds, rel=0.02)


def test_the_revert_gives_no_such_shares_either() -> None:
    given = build_local_windows()
    for rank, times in enumerate((1.0, 1.2, 1.0, 1.0)):
        some = [own * (times if step % 2 else 1.0) for step, own in enumerate(given[rank].compute_seconds)]
        given[rank] = replace(given[rank], compute_seconds=tuple(some), samples=(32,) * STEPS)
    strategy = strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION)
    assert strategy is not None
    assert strategy.shares is None


@pytest.mark.parametrize(("longer", "every"), [(1, 128), (10, 16), (50, None)])
def test_edit_synchronizes_soon_enough_for_ranks_to_leave(longer: int, every: int | None) -> None:
    """They checkpoint and end at a synchronization only, within their pod's 30 s, however long a transfer takes."""
    # 0.08 s of own work, this number of times
    given = build_windows(draw_work() * longer, 0.5 * longer, baseline=FIRST * longer)
    found_strategies = strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD)
    assert [strategy.sync_every for strategy in found_strategies if strategy.mode is SyncMode.EDIT] == (
        [] if every is None else [every]
    )
    assert SyncMode.ASYNC_EDIT in {strategy.mode for strategy in found_strategies}


@pytest.mark.parametrize(
    ("own", "exposed", "mode"),
    [(1.15, 0.25, SyncMode.ASYNC_EDIT), (3.5, 0.25, SyncMode.EDIT), (1.15, 0.18, SyncMode.EDIT)],
    ids=["becomes as fast", "a step in hand is long", "at first not worth it"],
)
def test_edit_is_compared_with_async_edit_after_its_warm_up(own: float, exposed: float, mode: SyncMode) -> None:
    """That begins with 3 % of the time, and ends with the wait for a step in hand each 30 s: EDiT has none."""
    strategy = choose_strategy(build_windows(draw_work(noise=0.002) * own / WORK, exposed * own, baseline=1.02 * own))
    assert strategy is not None
    assert (strategy.remedy, strategy.mode) == ("LocalSGD", mode)


def test_noise_on_all_ranks_makes_each_step_wait_for_one() -> None:
    own = WORK * (1 + np.random.default_rng(0).exponential(0.6, (STEPS, 8)))
    assert diagnose_windows(build_windows(own)).bottleneck is Bottleneck.VOLATILE
    strategy = choose_strategy(build_windows(own))
    assert strategy is not None
    assert strategy.mode is SyncMode.ASYNC_EDIT


@pytest.mark.parametrize("exposed", [0.005, 0.1])
def test_the_price_of_async_edit_is_that_of_a_simulation(exposed: float) -> None:
    random = np.random.default_rng(0)

    def draw_own_seconds(steps: int) -> np.ndarray:
        slow = np.where(random.random((steps, 4)) < 0.3, 2.0, 1.0)
        return np.asarray(WORK * slow * (1 + 0.05 * random.standard_normal((steps, 4))) * [1.0, 1.0, 1.0, 1.4])

    given = build_windows(draw_own_seconds(STEPS), exposed)
    strategy = next(
        strategy
        for strategy in strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD)
        if strategy.mode is SyncMode.ASYNC_EDIT
    )
    assert strategy.sync_seconds is not None
    seconds, done = 0.0, 0
    for _ in range(200):
        ends = draw_own_seconds(round(strategy.sync_seconds / WORK) + 20).cumsum(axis=0)
        steps = (ends < strategy.sync_seconds).sum(axis=0) + 1  # each ends the step that it has in hand
        seconds += ends[steps - 1, np.arange(4)].max() + exposed
        done += int(steps.sum())
    assert strategy.step_seconds == pytest.approx(seconds / (done / 4), rel=0.06)


def test_a_single_hiccup_is_no_bottleneck() -> None:
    own = draw_work(11)
    own[7, 2] *= 30
    assert diagnose_windows(build_windows(own)).bottleneck is Bottleneck.NONE


@pytest.mark.parametrize("exposed", [0.04, 0.2, 0.6])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_link_that_has_become_slow_is_found(exposed: float, noise: float) -> None:
    diagnosis = diagnose_windows(build_windows(draw_work(12, noise=noise), exposed))
    assert diagnosis.bottleneck is Bottleneck.COMMUNICATION
    assert diagnosis.culprits == ()
    assert diagnosis.exposed_seconds == pytest.approx(exposed)
    strategy = choose_strategy(build_windows(draw_work(12, noise=noise), exposed))
    assert strategy is not None
    assert strategy.remedy == "LocalSGD"
    assert strategy.sync_seconds is not None
    assert exposed / strategy.sync_seconds < 0.03
    assert strategy.step_seconds == pytest.approx(WORK, rel=0.08)


def test_communication_that_was_always_there_is_no_bottleneck() -> None:
    assert diagnose_windows(build_windows(draw_work(13), 0.06, baseline=WORK + 0.06)).bottleneck is Bottleneck.NONE
    assert diagnose_windows(build_windows(draw_work(13), 0.06, baseline=0.0)).bottleneck is Bottleneck.NONE


def test_own_work_that_has_grown_on_all_ranks_is_not_the_links_fault() -> None:
    assert diagnose_windows(build_windows(2 * draw_work(14), 0.03, baseline=WORK + 0.03)).bottleneck is Bottleneck.NONE
    assert (
        diagnose_windows(add_own_baseline(build_windows(2 * draw_work(14), 0.03, baseline=WORK + 0.03))).bottleneck
        is Bottleneck.NONE
    )


def add_own_baseline(given: list[RankWindow]) -> list[RankWindow]:
    """Of the first steady steps the own work is known, too."""
    return [replace(window, baseline_own_seconds=WORK) for window in given]


def test_a_slow_link_is_found_on_a_machine_that_has_become_slower_too() -> None:
    given = build_windows(1.5 * draw_work(15), 2 * WORK, baseline=WORK + 0.03)
    diagnosis = diagnose_windows(add_own_baseline(given))
    assert diagnosis.bottleneck is Bottleneck.COMMUNICATION
    assert diagnosis.slowdown == pytest.approx(3.5 * WORK / (1.5 * WORK + 0.03), rel=0.05)
    assert diagnose_windows(given).bottleneck is Bottleneck.NONE, (
        "a sidecar that does not report it: nothing distinguishes the two"
    )


def test_garbage_in_different_steps_is_collected_in_the_same() -> None:
    pauses = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.1, WORK, 0.0)
    diagnosis = diagnose_windows(build_windows(draw_work(15), garbage=pauses))
    assert diagnosis.bottleneck is Bottleneck.GC
    strategy = choose_strategy(build_windows(draw_work(15), garbage=pauses))
    assert strategy is not None
    assert (strategy.remedy, strategy.mode) == ("PlanGC", SyncMode.SYNC)
    assert strategy.gc_every is not None
    assert round(1 / (pauses > 0).mean()) <= strategy.gc_every <= 1.5 / (pauses > 0).mean(), "no more often than needed"
    together = np.where(np.arange(STEPS)[:, None] % strategy.gc_every == 0, WORK, 0.0).repeat(4, axis=1)
    assert diagnose_windows(build_windows(draw_work(15), garbage=together)).bottleneck is Bottleneck.NONE
    assert diagnose_windows(build_windows(draw_work(15), garbage=together)).step_seconds == pytest.approx(
        strategy.step_seconds, rel=0.1
    )


def test_little_garbage_is_collected_together_too_since_that_is_free() -> None:
    pauses = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.1, 0.08 * WORK, 0.0)
    diagnosis = diagnose_windows(build_windows(draw_work(15), garbage=pauses))
    assert diagnosis.bottleneck is Bottleneck.GC
    assert strategies.MIN_FREE_REMEDY_SLOWDOWN <= diagnosis.slowdown < strategies.compute_recovery_threshold(THRESHOLD)
    strategy = choose_strategy(build_windows(draw_work(15), garbage=pauses))
    assert strategy is not None
    assert strategy.remedy == "PlanGC"
    less = diagnose_windows(build_windows(draw_work(15), garbage=0.3 * pauses))
    assert less.bottleneck is Bottleneck.NONE, "that is not worth a word"


def test_garbage_is_evaluated_by_the_steps_since_its_first_collection() -> None:
    pauses = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.15, WORK, 0.0)
    all_along = diagnose_windows(build_windows(draw_work(15), garbage=pauses)).slowdown
    lately = np.where(np.arange(STEPS)[:, None] >= 16, pauses, 0.0)
    assert diagnose_windows(build_windows(draw_work(15), garbage=lately)).slowdown == pytest.approx(all_along, rel=0.15)
    just_now = np.where(np.arange(STEPS)[:, None] == STEPS - 1, [WORK, 0, 0, 0], 0.0) * 10
    assert strategies.diagnose_bottleneck(build_windows(draw_work(15), garbage=just_now), THRESHOLD) is None, (
        "the next answer shows its cost"
    )


def test_a_hiccup_does_not_hide_when_a_slow_rank_began() -> None:
    own = draw_work()[:12]
    own[2:, 2] *= 1.6
    own[7, 0] *= 4.0
    diagnosis = diagnose_windows(build_windows(own))
    assert (diagnosis.bottleneck, diagnosis.culprits, len(diagnosis.window.steps)) == (Bottleneck.COMPUTE, (2,), 10)
    assert diagnosis.slowdown == pytest.approx(1.56, abs=0.06), "not that of steps some of which were well"


class TestKnownSlow:
    """A rank at 1.07: the threshold does not find it, and it is known from the windows before."""

    def test_a_known_slow_rank_is_a_culprit_and_its_cost_is_known(self) -> None:
        own = draw_work(noise=0.01)
        own[:, 1] *= 1.07
        assert not diagnose_windows(build_windows(own)).culprits
        diagnosis = strategies.diagnose_bottleneck(
            build_windows(own), THRESHOLD, known_relative_times=KnownRelativeTimes({1: 1.07}, 0.01)
        )
        assert diagnosis is not None
        assert (diagnosis.bottleneck, diagnosis.culprits) == (Bottleneck.NONE, (1,))
        assert diagnosis.effects[Bottleneck.COMPUTE] == pytest.approx(1.055, abs=0.01)

    def test_shares_fit_a_known_slow_rank(self) -> None:
        own = draw_work(noise=0.01) * np.where(np.arange(4) == 1, 1.09, 1.0)
        given = build_windows(own, shares=(32,) * 4)
        diagnosis = strategies.diagnose_bottleneck(
            given, THRESHOLD, known_relative_times=KnownRelativeTimes({1: 1.09}, 0.01)
        )
        assert diagnosis is not None
        of_compute = replace(diagnosis, bottleneck=Bottleneck.COMPUTE, slowdown=diagnosis.effects[Bottleneck.COMPUTE])
        first, *_ = strategies.propose_strategies(of_compute, threshold=THRESHOLD)
        assert (first.remedy, first.refused) == ("Rebalance", "")
        assert first.shares is not None
        assert first.shares[1] == min(first.shares) < 32

    def test_the_gain_of_shares_is_known_with_the_pace(self) -> None:
        """Of 256 ranks with noise no eight steps show what shares for eight of them win: less than 2 %."""
        noise = 1 + 0.03 * np.random.default_rng(0).standard_normal((8, 256))
        own = WORK * noise * np.where(np.arange(256) < 8, 1.06, 1.0)
        given = build_windows(own, shares=(32,) * 256)

        def rebalance_by_paces(paces: dict[int, float]) -> Strategy:
            diagnosis = strategies.diagnose_bottleneck(
                given, THRESHOLD, known_relative_times=KnownRelativeTimes(paces, 0.036)
            )
            assert diagnosis is not None
            assert set(diagnosis.known_relative_times) == set(paces)
            of_compute = replace(
                diagnosis, bottleneck=Bottleneck.COMPUTE, slowdown=diagnosis.effects[Bottleneck.COMPUTE]
            )
            found_strategies = strategies.propose_strategies(of_compute, threshold=THRESHOLD)
            return next(strategy for strategy in found_strategies if strategy.remedy == "Rebalance")

        strategy = rebalance_by_paces(dict.fromkeys(range(8), 1.06))
        assert strategy.refused == ""
        assert strategy.to_option().min_win == MIN_KNOWN_RANKS_WIN
        assert strategy.shares is not None
        assert set(strategy.shares[:8]) <= {30, 31}

    def test_a_recovered_rank_costs_nothing(self) -> None:
        diagnosis = strategies.diagnose_bottleneck(
            build_windows(draw_work(noise=0.01)), THRESHOLD, known_relative_times=KnownRelativeTimes({1: 1.07}, 0.01)
        )
        assert diagnosis is not None
        assert diagnosis.effects[Bottleneck.COMPUTE] < 1.005

    @pytest.mark.parametrize("slow", [dict.fromkeys(range(4), 1.05), {7: 1.05}])
    def test_nonsense_is_not_trusted(self, slow: dict[int, float]) -> None:
        diagnosis = strategies.diagnose_bottleneck(build_windows(draw_work()), THRESHOLD, KnownRelativeTimes(slow, 0.0))
        assert diagnosis is not None
        assert not diagnosis.culprits

    @pytest.mark.parametrize("seed", range(20))
    def test_eight_steps_are_overridden_by_the_pace_known_from_more(self, seed: int) -> None:
        """With noise of 3 % eight steps would show 1.01 as well as 1.08."""
        random = np.random.default_rng(seed)
        own = WORK * (1 + 0.03 * random.standard_normal((8, 4))) * np.where(np.arange(4) == 1, 1.05, 1.0)
        diagnosis = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD, KnownRelativeTimes({1: 1.05}, 0.036))
        assert diagnosis is not None
        assert diagnosis.culprits == (1,)
        assert diagnosis.rank_slowdown[1] == pytest.approx(1.05, abs=1e-6)
        assert diagnosis.effects[Bottleneck.COMPUTE] == pytest.approx(1.03, abs=0.015)

    def test_a_difference_beyond_chance_is_trusted(self) -> None:
        """The median of 32 steps is off by a fifth of what one step is."""
        own = draw_work(noise=0.001) * np.where(np.arange(4) == 1, 1.03, 1.0)
        diagnosis = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD, KnownRelativeTimes({1: 1.08}, 0.06))
        assert diagnosis is not None
        assert diagnosis.rank_slowdown[1] == pytest.approx(1.03, abs=0.001)
        diagnosis = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD, KnownRelativeTimes({1: 1.08}, 0.09))
        assert diagnosis is not None
        assert diagnosis.rank_slowdown[1] == pytest.approx(1.08, abs=0.001)

    @pytest.mark.parametrize("known", [1.02, 1.08])
    def test_chance_in_its_work_is_no_transfer(self, known: float) -> None:
        own = draw_work(noise=0.001) * np.where(np.arange(4) == 1, 1.05, 1.0)
        single = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD)
        diagnosis = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD, KnownRelativeTimes({1: known}, 0.1))
        assert single is not None
        assert diagnosis is not None
        assert diagnosis.exposed_seconds == pytest.approx(single.exposed_seconds)
        assert diagnosis.step_seconds == pytest.approx(single.step_seconds + (known - 1.05) * WORK, rel=2e-3)

    def test_garbage_is_no_part_of_a_pace(self) -> None:
        own, pauses = draw_work(noise=0.001), np.zeros((STEPS, 4))
        pauses[::4, 1] = WORK
        diagnosis = strategies.diagnose_bottleneck(
            build_windows(own, garbage=pauses), THRESHOLD, KnownRelativeTimes({1: 1.05}, 0.2)
        )
        assert diagnosis is not None
        assert diagnosis.window.gc_seconds is not None
        without = diagnosis.window.compute_seconds[:, 1] - diagnosis.window.gc_seconds[:, 1]
        assert without == pytest.approx(np.full(len(without), 1.05 * WORK), rel=0.01)

    def test_a_rank_that_has_become_slower_is_as_slow_as_it_shows(self) -> None:
        own = draw_work(noise=0.01) * np.where(np.arange(4) == 1, 1.6, 1.0)
        diagnosis = strategies.diagnose_bottleneck(build_windows(own), THRESHOLD, KnownRelativeTimes({1: 1.05}, 1.0))
        assert diagnosis is not None
        assert diagnosis.rank_slowdown[1] == pytest.approx(1.6, abs=0.02)


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("noise", [0.01, 0.08])
def test_a_slow_link_costs_the_same_with_any_noise(noise: float, ranks: int) -> None:
    """In the job's first steps the usual rank waited for others, too: not only for the transfer."""
    random = np.random.default_rng(1)
    own = [WORK * (1 + noise * random.standard_normal((STEPS, ranks))) for _ in range(2)]
    first = float(np.median(own[0].max(axis=1))) + 0.01
    given = [
        replace(window, baseline_seconds=first, baseline_own_seconds=WORK)
        for window in build_windows(own[1], exposed=0.01 + 0.04)
    ]
    diagnosis = diagnose_windows(given)
    assert diagnosis.bottleneck is Bottleneck.COMMUNICATION
    assert diagnosis.slowdown == pytest.approx((first + 0.04) / first, rel=0.05)


def test_noise_that_has_grown_is_no_slow_link() -> None:
    """64 ranks, 1 % at first and 8 % now; the transfer is as it was."""
    random = np.random.default_rng(2)
    then, now = (WORK * (1 + noise * random.standard_normal((STEPS, 64))) for noise in (0.01, 0.08))
    first = float(np.median(then.max(axis=1))) + 0.016
    given = [replace(w, baseline_seconds=first, baseline_own_seconds=WORK) for w in build_windows(now, exposed=0.016)]
    assert diagnose_windows(given).effects[Bottleneck.COMMUNICATION] < 1.01


def test_garbage_that_no_plan_stops_is_not_planned_again() -> None:
    """The script collects by itself, too."""
    pauses = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.1, WORK, 0.0)
    diagnosis = diagnose_windows(build_windows(draw_work(15), garbage=pauses))
    for every in (10, 100):
        (again,) = strategies.propose_strategies(diagnosis, threshold=THRESHOLD, gc_every=every)
        assert "already" in again.refused, "it would be planned ever oftener"


def test_the_interval_of_planned_garbage_follows_from_what_is_collected_separately() -> None:
    apart = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.1, WORK, 0.0)
    together = np.where(np.arange(STEPS)[:, None] % 3 == 0, WORK, 0.0).repeat(4, axis=1)
    (single,) = strategies.propose_strategies(
        diagnose_windows(build_windows(draw_work(15), garbage=apart)), threshold=THRESHOLD
    )
    (combined,) = strategies.propose_strategies(
        diagnose_windows(build_windows(draw_work(15), garbage=np.maximum(apart, together))), threshold=THRESHOLD
    )
    assert single.gc_every is not None
    assert combined.gc_every is not None
    assert combined.gc_every >= single.gc_every
    assert combined.step_seconds == pytest.approx(single.step_seconds + WORK / 3, rel=0.1), "the script's own stay"


def test_collections_in_the_same_step_are_together_however_long_each_rank_takes() -> None:
    together = np.where(np.arange(STEPS)[:, None] % 8 == 0, WORK * np.array([1.0, 0.1, 0.1, 0.1]), 0.0)
    assert diagnose_windows(build_windows(draw_work(15), garbage=together)).effects[Bottleneck.GC] < 1.01


def test_little_garbage_hides_no_slow_rank() -> None:
    own = draw_work(15, noise=0.005)
    own[:, 1] *= 1.09
    pauses = np.where(np.random.default_rng(0).random((STEPS, 4)) < 0.1, 0.25 * WORK, 0.0)
    diagnosis = strategies.diagnose_bottleneck(
        build_windows(own, garbage=pauses), THRESHOLD, known_relative_times=KnownRelativeTimes({1: 1.09}, 0.01)
    )
    assert diagnosis is not None
    assert diagnosis.effects[Bottleneck.COMPUTE] > diagnosis.effects[Bottleneck.GC]
    assert diagnosis.bottleneck is Bottleneck.NONE


def test_the_rest_is_computed_where_some_of_the_slow_ranks_stay() -> None:
    own = draw_work(noise=0.001) * np.array([1.0, 1.0, 1.5, 1.3])
    diagnosis = diagnose_windows(build_windows(own))
    assert diagnosis.culprits == (2, 3)
    assert strategies.estimate_remaining_slowdown(diagnosis, [3], THRESHOLD) == pytest.approx(1.28, abs=0.02)
    assert strategies.estimate_remaining_slowdown(diagnosis, [], THRESHOLD) == pytest.approx(1.0, abs=0.01)


COST = SequenceCost(1e-3, 0.0, 1e-8)
"""0.09 s for 8 sequences of 1,000."""


def draw_sequences(seed: int, ranks: int = 4, sigma: float = 0.5) -> np.ndarray:
    """Lengths of the samples as they come, [steps, ranks, samples]."""
    return np.asarray(np.rint(np.random.default_rng(seed).lognormal(6.7, sigma, (STEPS, ranks, BATCH))))


def build_sequence_windows(lengths: np.ndarray, slow: float = 1.0, noise: float = 0.02) -> list[RankWindow]:
    """Of ranks whose work is what their sequences cost; rank 0 takes `slow` times as long."""
    paces = 1 + noise * np.random.default_rng(0).standard_normal(lengths.shape[:2])
    paces[:, 0] *= slow
    own = COST.compute_seconds(lengths).sum(axis=2) * paces
    return build_windows(own, lengths=lengths.sum(axis=2), squares=np.square(lengths).sum(axis=2))


def test_sequences_of_different_lengths_are_for_the_scripts_loader_if_it_does_not_know_them() -> None:
    tokens = 100 * np.random.default_rng(0).lognormal(0, 0.3, (STEPS, 4))
    given = build_windows(draw_work(16) * tokens / tokens.mean(), lengths=tokens)
    diagnosis = diagnose_windows(given)
    assert diagnosis.bottleneck is Bottleneck.LENGTHS
    (strategy,) = strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    assert strategy.remedy == "BalanceLengths"
    assert "give its dataloader their lengths" in strategy.refused
    assert strategy.step_seconds == pytest.approx(WORK + 0.005, rel=0.08)
    assert diagnose_windows([replace(window, lengths=()) for window in given]).bottleneck is Bottleneck.VOLATILE


def test_a_loader_that_knows_lengths_receives_their_cost() -> None:
    given = build_sequence_windows(draw_sequences(0))
    diagnosis = diagnose_windows(given)
    assert diagnosis.bottleneck is Bottleneck.LENGTHS
    strategy = choose_strategy(given)
    assert strategy is not None
    assert (strategy.remedy, strategy.mode, strategy.to_option().exact) == ("BalanceLengths", SyncMode.SYNC, True)
    cost = strategy.apply_to(Plan(members=(SHARED,))).sequence_cost
    assert cost is not None
    assert SequenceCost(*cost).compute_seconds([300, 1000, 3000]) == pytest.approx(
        COST.compute_seconds([300, 1000, 3000]), rel=0.1
    )
    assert strategy.step_seconds == pytest.approx(
        COST.compute_seconds(draw_sequences(0)).sum(axis=2).mean() + 0.005, rel=0.03
    )


def test_a_loader_that_uses_that_cost_already_is_not_changed() -> None:
    """Single sequences outweigh the others, and what another window is fitted to differs only by noise."""
    first, later = (
        choose_strategy(build_sequence_windows(draw_sequences(1, sigma=1.0))),
        diagnose_windows(build_sequence_windows(draw_sequences(2, sigma=1.0))),
    )
    assert first is not None
    assert later.bottleneck is Bottleneck.LENGTHS
    (strategy,) = strategies.propose_strategies(later, threshold=THRESHOLD, sequence_cost=first.sequence_cost)
    assert "already" in strategy.refused
    assert strategy.step_seconds == pytest.approx(later.step_seconds, rel=0.03)


def test_a_loader_receives_a_changed_cost_again() -> None:
    """The plan's is by length, which is even; theirs has become that of attention."""
    lengths = draw_sequences(3, sigma=0.8)
    lengths *= lengths.sum(axis=(1, 2), keepdims=True) / 4 / lengths.sum(axis=2, keepdims=True)
    diagnosis = diagnose_windows(build_sequence_windows(lengths))
    assert diagnosis.bottleneck is Bottleneck.LENGTHS
    (strategy,) = strategies.propose_strategies(diagnosis, threshold=THRESHOLD, sequence_cost=(0.0, 1.0, 0.0))
    assert not strategy.refused
    assert strategy.sequence_cost is not None
    assert strategy.step_seconds < 0.9 * diagnosis.step_seconds


@pytest.mark.parametrize("began", [0, 12])
def test_sequences_are_balanced_for_little_too_since_that_stays(began: int) -> None:
    lengths = draw_sequences(6, sigma=0.1)
    lengths[:began] = lengths.mean()
    diagnosis = diagnose_windows(build_sequence_windows(lengths))
    assert diagnosis.bottleneck is Bottleneck.LENGTHS
    assert strategies.MIN_FREE_REMEDY_SLOWDOWN <= diagnosis.slowdown < strategies.compute_recovery_threshold(THRESHOLD)
    assert len(diagnosis.window.steps) == STEPS - began
    (strategy,) = strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    assert not strategy.refused
    assert diagnose_windows(build_sequence_windows(draw_sequences(6, sigma=0.01))).bottleneck is Bottleneck.NONE


def test_a_slow_rank_is_distinguished_from_long_sequences() -> None:
    diagnosis = diagnose_windows(build_sequence_windows(draw_sequences(4), slow=2.0))
    assert diagnosis.bottleneck is Bottleneck.COMPUTE
    assert diagnosis.culprits == (0,)
    assert diagnosis.rank_slowdown[0] == pytest.approx(2.0, rel=0.05)
    proposed = strategies.propose_strategies(diagnosis, threshold=THRESHOLD)
    assert "exact" in strategies.explain_exact_preference(diagnosis, proposed)
    (shares,) = (strategy.shares for strategy in proposed if strategy.remedy == "Rebalance")
    assert shares is not None
    assert shares[0] == min(shares) < BATCH


def test_lengths_that_do_not_cost_are_not_blamed() -> None:
    lengths = draw_sequences(5)
    for squares in (np.square(lengths).sum(axis=2), None):
        own = draw_work(17)
        own[:, 0] *= 2
        diagnosis = diagnose_windows(build_windows(own, lengths=lengths.sum(axis=2), squares=squares))
        assert diagnosis.bottleneck is Bottleneck.COMPUTE
        assert diagnosis.effects[Bottleneck.LENGTHS] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("began", [1, 12])
def test_the_cost_of_a_bottleneck_is_computed_of_the_steps_since_its_first_sign(began: int) -> None:
    later = np.arange(STEPS)[:, None] >= began
    link = build_windows(draw_work(20), np.where(later[:, 0], 0.1, 0.005))
    assert diagnose_windows(link).bottleneck is Bottleneck.COMMUNICATION
    assert diagnose_windows(link).slowdown == pytest.approx((WORK + 0.1) / (WORK + 0.01), rel=0.05)
    slow = build_windows(draw_work(20) * np.where(later & (np.arange(4) == 2), 2.0, 1.0))
    if began == 1:  # else too few to be sure of
        assert diagnose_windows(slow).slowdown == pytest.approx((2 * WORK + 0.005) / (WORK + 0.005), rel=0.05)
    since = draw_sequences(0)
    since[:began] = since[:began].mean()
    lengths = diagnose_windows(build_sequence_windows(since))
    whole = diagnose_windows(build_sequence_windows(draw_sequences(0)))
    assert (lengths.bottleneck, len(lengths.window.steps)) == (Bottleneck.LENGTHS, STEPS - began)
    assert lengths.slowdown == pytest.approx(whole.slowdown, rel=0.2)


def test_three_steps_wait_for_the_next_answer() -> None:
    """Of eight, in the last of which other ranks are slow in turns."""
    own = draw_work(20)[:8]
    for step in (5, 6, 7):
        own[step, step % 4] *= 2.0
    assert strategies.diagnose_bottleneck(build_windows(own), THRESHOLD) is None
    own[4, 0] *= 2.0
    assert diagnose_windows(build_windows(own)).bottleneck is Bottleneck.VOLATILE
    assert diagnose_windows(build_windows(draw_work(20)[:8])).bottleneck is Bottleneck.NONE


@pytest.mark.parametrize(
    ("seconds", "steps", "slow", "is_seen"),
    [(1.0, 3, 3.5, True), (1.0, 3, 2.5, False), (0.1, 3, 3.5, False), (3.0, 2, 3.5, False)],
    ids=["broken", "slow", "short", "two"],
)
def test_a_broken_rank_is_found_by_three_long_steps(seconds: float, steps: int, slow: float, is_seen: bool) -> None:
    """Of eight. Short ones may be a hiccup, and so may two."""
    own = draw_work(20)[:8] * seconds / WORK
    own[-steps:, 2] *= slow
    diagnosis = diagnose_windows(build_windows(own, baseline=seconds))
    assert (diagnosis.culprits == (2,)) is is_seen
    assert (diagnosis.bottleneck is Bottleneck.COMPUTE) is is_seen


@pytest.mark.parametrize(
    ("steps", "slow_steps", "is_seen"),
    [(8, 3, False), (8, 4, True), (8, 6, True), (STEPS, 12, False), (STEPS, 16, True)],
)
def test_steps_that_take_most_of_the_time_show_a_slow_rank(steps: int, slow_steps: int, is_seen: bool) -> None:
    """Of steps of half a second, four show a rank at 1.5 ×. Of many short ones, some may be a hiccup."""
    own = draw_work(20)[:steps]
    own[-slow_steps:, 2] *= 1.5
    diagnosis = diagnose_windows(build_windows(own), 1.25)
    assert (diagnosis.bottleneck is Bottleneck.COMPUTE and diagnosis.culprits == (2,)) is is_seen


def test_insufficient_windows_have_no_diagnosis() -> None:
    given = build_windows(draw_work(18))
    assert strategies.diagnose_bottleneck([], THRESHOLD) is None
    assert strategies.diagnose_bottleneck(given[1:], THRESHOLD) is None
    assert (
        strategies.diagnose_bottleneck([replace(window, sync_mode="AsyncEDiT") for window in given], THRESHOLD) is None
    )
    assert (
        strategies.diagnose_bottleneck(
            [replace(given[0], compute_seconds=(float("nan"),) * STEPS), *given[1:]], THRESHOLD
        )
        is None
    )
    just_changed = [replace(w, samples=(BATCH,) * (STEPS - 4) + (BATCH + 1,) * 4) for w in given]
    assert strategies.diagnose_bottleneck(just_changed, THRESHOLD) is None


def test_an_unmanaged_script_receives_the_reason_why_nothing_can_be_done() -> None:
    own = draw_work(19)
    own[:, 0] *= 2
    given = [replace(window, samples=(0,) * STEPS) for window in build_windows(own)]
    assert diagnose_windows(given).culprits == (0,)
    rebalance = next(
        strategy
        for strategy in strategies.propose_strategies(diagnose_windows(given), threshold=THRESHOLD)
        if strategy.remedy == "Rebalance"
    )
    assert "does not use the library" in rebalance.refused


def test_a_strategy_becomes_the_plans_next_version() -> None:
    plan = Plan(version=4, members=(SHARED,), shares=(9, 9, 9, 5), sync_every=7)
    strategy = Strategy("LocalSGD", SyncMode.ASYNC_EDIT, 1.0, 1.0, "", shares=(8, 8, 8, 8), sync_seconds=3.0)
    assert strategy.apply_to(plan) == replace(
        plan, version=5, sync_mode=SyncMode.ASYNC_EDIT, shares=(8, 8, 8, 8), sync_seconds=3.0
    )
    assert not strategy.to_option().exact
    assert strategy.to_option("not allowed").refused == "not allowed"
    assert replace(strategy, refused="no").to_option("not allowed").refused == "no"


def build_local_windows(
    seed: int = 0, transfer: float = 0.006, slow: float = 1.0, often: float = 0.0, rank_3: float = 1.0
) -> list[RankWindow]:
    """Of a job under AsyncEDiT: each rank counts its own steps; sometimes (`often`) one takes `slow` × as long."""
    random = np.random.default_rng(seed)
    waits = random.random((5, 4)) * WORK
    waits -= waits.min(axis=1, keepdims=True)
    given = []
    for rank in range(4):
        own = WORK * (1 + 0.03 * random.standard_normal(STEPS)) * np.where(random.random(STEPS) < often, slow, 1.0)
        own = own * (rank_3 if rank == 3 else 1.0)
        steps = tuple(range(1000 * rank, 1000 * rank + STEPS))
        inside = tuple(waits[:, rank] + transfer)
        given.append(
            RankWindow(rank, steps, tuple(own), tuple(own), (BATCH,) * STEPS, (), (), (), "AsyncEDiT", inside, FIRST)
        )
    return given


def test_the_cost_of_a_broken_rank_in_a_local_sgd_mode() -> None:
    by_clock = Plan(sync_mode=SyncMode.ASYNC_EDIT, sync_seconds=10.0)
    found = strategies.diagnose_broken_ranks(build_local_windows(rank_3=5.0), by_clock, threshold=3.0)
    assert found is not None
    assert found.culprits == (3,)
    assert found.slowdown == pytest.approx(4 / 3.2, rel=0.05)  # its samples are missing, and little more
    often = strategies.diagnose_broken_ranks(
        build_local_windows(rank_3=5.0), replace(by_clock, sync_seconds=1.0), threshold=3.0
    )
    assert often is not None
    assert often.slowdown > found.slowdown + 0.1, "all wait for its step at each synchronization"
    by_steps = strategies.diagnose_broken_ranks(
        build_local_windows(rank_3=5.0), Plan(sync_mode=SyncMode.EDIT, sync_every=64), threshold=3.0
    )
    assert by_steps is not None
    assert by_steps.slowdown == pytest.approx(5.0, rel=0.05)
    assert strategies.diagnose_broken_ranks(build_local_windows(rank_3=2.0), by_clock, threshold=3.0) is None
    assert strategies.diagnose_broken_ranks(build_local_windows(rank_3=5.0)[1:], by_clock, threshold=3.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_revert_is_proposed_when_the_bottleneck_is_over(seed: int) -> None:
    for bottleneck in (Bottleneck.COMMUNICATION, Bottleneck.VOLATILE, Bottleneck.COMPUTE):
        strategy = strategies.propose_revert_to_sync(
            build_local_windows(seed), threshold=THRESHOLD, bottleneck=bottleneck
        )
        assert strategy is not None
        assert (strategy.remedy, strategy.mode, strategy.shares) == ("Sync", SyncMode.SYNC, None)
        assert strategy.step_seconds == pytest.approx(FIRST, rel=0.05)
        assert strategy.slowdown_after < 1.05


@pytest.mark.parametrize("seed", range(5))
def test_the_revert_is_not_proposed_while_the_bottleneck_lasts(seed: int) -> None:
    link = build_local_windows(seed, transfer=0.2)
    volatile = build_local_windows(seed, slow=2.0, often=0.25)
    assert strategies.propose_revert_to_sync(link, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is None
    assert strategies.propose_revert_to_sync(volatile, threshold=THRESHOLD, bottleneck=Bottleneck.VOLATILE) is None
    assert strategies.propose_revert_to_sync(volatile, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is None


def test_a_few_fast_steps_by_chance_do_not_lead_to_the_revert() -> None:
    """Ten steps of each rank: one has been slow in most of its own, and takes no blame for what comes and goes."""

    def proposes_revert(seed: int, often: float) -> bool:
        names = ("steps", "step_seconds", "compute_seconds", "samples")
        whole = build_local_windows(seed, slow=2.0, often=often)
        few = [replace(window, **{name: getattr(window, name)[:10] for name in names}) for window in whole]
        usual = {Bottleneck.VOLATILE: 1.15}
        return (
            strategies.propose_revert_to_sync(
                few, threshold=THRESHOLD, bottleneck=Bottleneck.VOLATILE, usual_slowdowns=usual
            )
            is not None
        )

    assert sum(proposes_revert(seed, often=0.25) for seed in range(100)) <= 5
    assert sum(proposes_revert(seed, often=0.0) for seed in range(100)) == 100


def test_the_bottleneck_must_fall_further_than_the_threshold() -> None:
    """A slowdown of about 1.08 by ranks that come and go: below 1.1, above half of its excess."""
    given = build_local_windows(3, slow=1.3, often=0.1)
    assert (
        strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is not None
    )
    assert strategies.propose_revert_to_sync(given, threshold=1.06, bottleneck=Bottleneck.VOLATILE) is None


def test_a_slowdown_that_was_always_there_does_not_prevent_the_revert() -> None:
    """A slowdown of about 1.12 by ranks that come and go."""
    given = build_local_windows(3, slow=2.0, often=0.1)
    assert strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.COMPUTE) is None
    usual = {Bottleneck.VOLATILE: 1.3}
    assert (
        strategies.propose_revert_to_sync(
            given, threshold=THRESHOLD, bottleneck=Bottleneck.COMPUTE, usual_slowdowns=usual
        )
        is not None
    )


def test_the_revert_has_shares_of_whole_microbatches() -> None:
    """Of a global batch that is not what the ranks take in their steps, and a rank that has become slow."""
    fine = [
        replace(window, samples=(32,) * STEPS, share_granularity=8) for window in build_local_windows(4, rank_3=1.5)
    ]
    strategy = strategies.propose_revert_to_sync(
        fine, threshold=THRESHOLD, bottleneck=Bottleneck.VOLATILE, global_batch=256
    )
    assert strategy is not None
    assert strategy.shares is not None
    assert sum(strategy.shares) == 256
    assert strategy.shares[3] == min(strategy.shares) < 64
    assert {share % 8 for share in strategy.shares} == {0}


def test_the_revert_has_shares_that_fit_a_rank_that_stays_slow() -> None:
    fine = [replace(window, samples=(32,) * STEPS) for window in build_local_windows(4, rank_3=1.3)]
    strategy = strategies.propose_revert_to_sync(fine, threshold=THRESHOLD, bottleneck=Bottleneck.VOLATILE)
    assert strategy is not None
    assert strategy.shares is not None
    assert sum(strategy.shares) == 4 * 32
    assert 24 <= strategy.shares[3] <= 28


def test_lengths_that_the_loader_will_balance_do_not_prevent_the_revert() -> None:
    """Leases are not balanced over the ranks, so their steps vary more than synchronous ones will."""
    given = [
        replace(window, sync_mode="AsyncEDiT", transfers=(0.006,) * 5, step_seconds=window.compute_seconds)
        for window in build_sequence_windows(draw_sequences(6))
    ]
    strategy = strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION)
    assert strategy is not None
    assert strategy.step_seconds == pytest.approx(COST.compute_seconds(draw_sequences(6)).sum(axis=2).mean(), rel=0.1)
    unknown = [replace(window, squares=()) for window in given]
    assert strategies.propose_revert_to_sync(unknown, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is None


def test_the_revert_needs_all_ranks_and_some_synchronizations() -> None:
    given = build_local_windows(5)
    assert strategies.propose_revert_to_sync([*given[:-1], replace(given[-1], rank=7)], threshold=THRESHOLD) is None
    assert (
        strategies.propose_revert_to_sync([replace(window, transfers=()) for window in given], threshold=THRESHOLD)
        is None
    )
    assert strategies.propose_revert_to_sync([], threshold=THRESHOLD) is None
    nan = replace(given[0], compute_seconds=(float("nan"),) * STEPS)
    assert strategies.propose_revert_to_sync([nan, *given[1:]], threshold=THRESHOLD) is None


def test_the_transfer_is_what_remains_without_waits_for_ranks() -> None:
    """Rank 3 always comes last: the others' seconds inside are waits, its own are the transfer."""
    given = [replace(window, transfers=(0.5,) * 4) for window in build_local_windows(6)[:3]]
    given.append(replace(build_local_windows(6)[3], transfers=(0.004,) * 4))
    assert (
        strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is not None
    )


def test_the_newest_transfer_shows_the_state_of_the_links() -> None:
    well_again = [replace(window, transfers=(0.5,) * 31 + (0.004,)) for window in build_local_windows(6)]
    assert (
        strategies.propose_revert_to_sync(well_again, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION)
        is not None
    )
    again = [replace(window, transfers=(0.004,) * 31 + (0.5,)) for window in build_local_windows(6)]
    assert strategies.propose_revert_to_sync(again, threshold=THRESHOLD, bottleneck=Bottleneck.COMMUNICATION) is None


def test_the_longer_a_bottleneck_lasts_the_rarer_are_synchronizations() -> None:
    """0.2 s each: every 10 s at first, a fifth of the time that it lasts, and every 24 s (1 %) at most."""
    slow = build_local_windows(transfer=0.2)

    def compute_interval(stayed: float, in_force: float = 10.0) -> float:
        return strategies.lengthen_sync_interval(slow, in_force, stayed, threshold=THRESHOLD)

    assert compute_interval(40.0) == 10.0
    assert compute_interval(59.0) == 10.0, "not worth a change of the plan"
    assert compute_interval(75.0) == 15.0
    assert compute_interval(3600.0) == pytest.approx(24.0, rel=0.1)
    assert compute_interval(75.0, in_force=18.0) == 18.0, "never more often again"
    assert (
        strategies.lengthen_sync_interval(build_local_windows(transfer=0.6), 28.0, 3600.0, threshold=THRESHOLD) == 30.0
    ), "the last one is worth it"
    unknown = [replace(window, transfers=()) for window in slow]
    assert strategies.lengthen_sync_interval(unknown, 12.0, 3600.0, threshold=THRESHOLD) == 12.0


def test_a_mode_is_held_after_each_change_and_longer_after_each_flap() -> None:
    held = Hysteresis(first=60.0, longest=300.0)
    assert held.allows(0.0)
    held = held.with_change(1000.0)
    assert not held.allows(1059.0)
    assert held.allows(1060.0)
    held = held.with_change(1060.0)
    assert held.hold_seconds == 120.0
    now = 1060.0
    for _ in range(5):
        now += held.hold_seconds
        held = held.with_change(now)
    assert held.hold_seconds == 300.0
    calm = held.with_change(now + 4 * held.hold_seconds)
    assert calm.hold_seconds == 60.0


@pytest.mark.parametrize(("strength", "often", "swing"), [(1.4, 0.12, 0.1), (1.5, 0.12, 0.0), (1.5, 0.16, 0.0)])
def test_a_bottleneck_at_the_threshold_makes_no_job_flap(strength: float, often: float, swing: float) -> None:
    """500 checks, one every 5 s, of ranks that come and go about as strongly as it takes to change the mode."""
    held, mode, changes = Hysteresis(), SyncMode.SYNC, 0
    for number in range(500):
        now, share = 5.0 * number, often + swing * np.sin(number / 40)
        if mode is SyncMode.SYNC:
            slow = np.random.default_rng(number).random((STEPS, 4)) < share
            strategy = choose_strategy(build_windows(draw_work(number, noise=0.03) * np.where(slow, strength, 1.0)))
            wants = strategy is not None and strategy.mode is not SyncMode.SYNC
        else:
            given = build_local_windows(number, slow=strength, often=share)
            wants = (
                strategies.propose_revert_to_sync(given, threshold=THRESHOLD, bottleneck=Bottleneck.VOLATILE)
                is not None
            )
        if wants and held.allows(now):
            held, changes = held.with_change(now), changes + 1
            mode = SyncMode.ASYNC_EDIT if mode is SyncMode.SYNC else SyncMode.SYNC
    assert changes <= 6, "the bottleneck itself comes and goes twice in these 42 minutes, or not at all"


def test_prices_prefer_exact_training_to_local_sgd() -> None:
    own = draw_work(20)
    own[:, 0] *= 2
    diagnosis = diagnose_windows(build_windows(own))
    options = [strategy.to_option() for strategy in strategies.propose_strategies(diagnosis, threshold=THRESHOLD)]
    choice = price.choose_remedy(options[::-1], diagnosis.slowdown, 0.0, sufficient_slowdown=THRESHOLD)
    assert choice.chosen is not None
    assert choice.chosen.option.remedy == "Rebalance"
