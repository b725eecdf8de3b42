"""A straggler from detection to remedy, over several passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import SignalKind
from pacekeeper_analysis.protocol.reports import Evidence, LauncherState, RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.training_job import RemediationMode, Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.stragglers import collective_waits, straggler
from pacekeeper_operator.state.desired_state import PastIncident
from pacekeeper_operator.state.job_metrics import PersistentSlowness
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.restart_estimates import RestartMeasurements
from testing.operators.observations import (
    NOW,
    build_evidence,
    build_policy,
    build_training,
    change_members,
    change_worker,
    list_decisions,
)

STEPS = tuple(range(468, 500))


def build_windows(
    request: str, slow: float, shares: tuple[int, ...], managed: bool = True, granularity: int = 1
) -> tuple[Evidence, ...]:
    """Build windows of four ranks of 10 ms a sample; rank 2 takes `slow` times as long."""
    costs = [0.010 * (slow if rank == 2 else 1.0) for rank in range(4)]
    seconds = [cost * share for cost, share in zip(costs, shares, strict=True)]
    return build_evidence(
        request,
        (
            RankWindow(
                rank,
                STEPS,
                (max(seconds),) * 32,
                (seconds[rank],) * 32,
                (shares[rank] if managed else 0,) * 32,
                share_granularity=granularity,
            )
            for rank in range(4)
        ),
    )


def build_slow(relative_time: float = 2.0, **changes: object) -> Observation:
    observation = build_training(**changes)  # type: ignore[arg-type]
    return replace(observation, metrics=replace(observation.metrics, slowdown=1.6, relative_time=relative_time))


def with_result(result: PassResult, observation: Observation, seconds: float = 1.0, **changes: object) -> Observation:
    return replace(observation.with_desired(result.desired), now=observation.now + seconds, **changes)  # type: ignore[arg-type]


def evaluate_slow_rank(
    slow: float, shares: tuple[int, ...] = (8, 8, 8, 8), managed: bool = True, granularity: int = 1
) -> PassResult:
    return evaluate_with_answers(
        change_members(build_slow(relative_time=slow), training={"managed": managed}),
        slow,
        shares,
        managed,
        granularity=granularity,
    )


def evaluate_with_answers(
    observation: Observation,
    slow: float,
    shares: tuple[int, ...] = (8, 8, 8, 8),
    managed: bool = True,
    recommend_only: bool = False,
    granularity: int = 1,
) -> PassResult:
    """Run the pass that requests evidence, and the one that receives it. `recommend_only`: in mode Recommend."""
    policy = build_policy(mode=RemediationMode.RECOMMEND) if recommend_only else build_policy()
    requesting = evaluate_job(observation, policy)
    evidence = build_windows(requesting.desired.requests.evidence_name, slow, shares, managed, granularity)
    return evaluate_job(with_result(requesting, observation, evidence=evidence), policy)


def test_a_slow_rank_in_the_metrics_leads_to_a_request_not_a_decision() -> None:
    result = evaluate_job(build_slow(), build_policy())
    assert result.desired.requests.evidence_name
    assert result.desired.requests.evidence_parts == (EvidencePart.WINDOWS, EvidencePart.OPERATIONS)
    assert not list_decisions(result)


def test_many_ranks_report_collectives_with_the_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_waits, "FIRST_REQUEST_MAX_RANKS", 3)
    requesting = evaluate_job(build_slow(), build_policy())
    assert requesting.desired.requests.evidence_parts == (EvidencePart.WINDOWS,)
    repeated = evaluate_job(with_result(requesting, build_slow(), 30.0), build_policy())
    assert repeated.desired.requests.evidence_parts == (EvidencePart.WINDOWS, EvidencePart.OPERATIONS)


def test_a_slow_rank_has_two_kinds_of_signals() -> None:
    (incident,) = evaluate_slow_rank(2.0).desired.state.incidents.current
    assert incident.finding is not None
    assert incident.finding.culprit == "rank 2"
    assert set(incident.finding.signal_kinds) == {SignalKind.TIMES, SignalKind.WAITS}


def test_a_rank_for_which_no_peer_waits_is_no_straggler(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a rank of a pipeline stage with more work than the others."""
    monkeypatch.setattr(collective_waits, "is_holding_up_peers", lambda *_: False)
    assert not list_decisions(evaluate_slow_rank(2.0))


def test_a_rank_at_half_speed_gets_fewer_samples_without_a_new_round() -> None:
    result = evaluate_slow_rank(2.0)
    shares = result.desired.plan.shares
    assert shares is not None
    assert sum(shares) == 32
    assert shares[2] <= 5
    assert result.desired.plan.membership == 1
    (incident,) = result.desired.state.incidents.current
    assert (incident.rank, incident.remedy, incident.live) == (2, Remedy.REBALANCE, True)
    assert {price.name for price in incident.remedies} == {"Rebalance", "LocalSGD", "ReplaceWorker"}
    assert any("S_w: rank 2 1.60" in sentence for sentence in incident.evidence), incident.evidence
    assert result.desired.requests.evidence_name == ""


def test_a_script_with_static_shapes_gets_shares_in_whole_microbatches() -> None:
    shares = evaluate_slow_rank(2.0, granularity=2).desired.plan.shares
    assert shares is not None
    assert sorted(shares) == [4, 8, 10, 10]
    assert shares[2] == 4


def test_a_rebalanced_straggler_begins_no_new_investigation() -> None:
    observation = build_slow(spares=0)
    result = evaluate_with_answers(observation, 2.0)
    later = with_result(result, observation, 30.0, metrics=replace(observation.metrics, relative_time=2.1))
    assert not evaluate_job(later, build_policy()).desired.requests.evidence_name
    slower = replace(later, metrics=replace(observation.metrics, relative_time=3.0))
    assert evaluate_job(slower, build_policy()).desired.requests.evidence_name


def test_a_very_slow_rank_is_replaced_after_a_requested_checkpoint() -> None:
    observation = build_slow(relative_time=4.0)
    replaced = evaluate_slow_rank(4.0)
    (incident,) = replaced.desired.state.incidents.current
    assert incident.remedy is Remedy.REPLACE_WORKER
    assert replaced.desired.plan.checkpoint_request == 1
    assert replaced.desired.plan.members[2].worker == "j-w2-0"
    final = evaluate_job(change_members(with_result(replaced, observation), checkpoint={"request": 1}), build_policy())
    assert final.desired.plan.members[2].worker == "j-w4-0"
    assert final.desired.plan.shares is None


@pytest.mark.parametrize(
    ("starting", "remedy"),
    [
        ({"node": "node-2", "since": NOW - 20}, Remedy.REBALANCE),
        ({"node": "node-7", "since": NOW - 20, "boot_id": "same"}, Remedy.REBALANCE),
        ({"node": "node-7", "since": NOW - 20}, Remedy.REPLACE_WORKER),
        ({"node": "node-2", "warm_seconds": 3.0}, Remedy.REBALANCE),
        ({"node": "node-2", "warm_seconds": 3.3}, Remedy.REPLACE_WORKER),
        ({"node": "", "since": NOW - 20}, Remedy.REPLACE_WORKER),
    ],
    ids=["same node", "same kernel", "elsewhere", "window", "later", "unscheduled"],
)
def test_no_spare_is_used_while_a_pod_of_the_job_starts_on_the_same_machine(
    starting: dict[str, Any], remedy: Remedy
) -> None:
    """Importing torch takes processors from the ranks next to it, and passes. A window is 32 steps of 0.1 s."""
    observation = start_spare(build_slow(relative_time=4.0, spares=2), **starting)
    result = evaluate_with_answers(observation, 4.0)
    (incident,) = result.desired.state.incidents.current
    assert incident.remedy is remedy
    reason = next(price.reason for price in incident.remedies if price.name == "ReplaceWorker")
    assert ("j-w5-0 of this job starts on the same machine" in reason) is (remedy is Remedy.REBALANCE)


def start_spare(
    observation: Observation, node: str, since: float | None = None, warm_seconds: float = math.inf, boot_id: str = ""
) -> Observation:
    """Return the job while its second spare starts on this node, or has been warm there for some seconds."""
    view = observation.find_worker("j-w5-0")
    assert view is not None
    assert view.pod is not None
    record = replace(view.record, node=node, starting_since=since)
    observation = observation.with_desired(observation.desired.with_worker(record))
    state = LauncherState.WARM if since is None else LauncherState.STARTING
    observation = change_worker(
        observation,
        view.name,
        pod={"node": node, "started": True},
        heartbeat={"state": state},
        state_seconds=warm_seconds,
    )
    nodes = {name: replace(view, boot_id=boot_id) for name, view in observation.cluster_view.nodes.items()}
    return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))


def test_a_very_slow_rank_gets_fewer_samples_if_there_is_no_spare() -> None:
    result = evaluate_with_answers(build_slow(relative_time=4.0, spares=0), 4.0)
    (incident,) = result.desired.state.incidents.current
    assert incident.remedy is Remedy.REBALANCE
    assert result.desired.plan.shares is not None


def test_a_rank_for_which_shares_do_not_suffice_is_replaced_in_the_same_incident() -> None:
    observation, result = build_slow(), evaluate_slow_rank(2.0)
    slower = replace(observation, metrics=replace(observation.metrics, relative_time=4.0))
    repeated = evaluate_job(with_result(result, slower, 6.0), build_policy())
    assert repeated.desired.requests.evidence_name
    assert result.desired.plan.shares is not None
    evidence = build_windows(repeated.desired.requests.evidence_name, 4.0, result.desired.plan.shares)
    replaced = evaluate_job(with_result(repeated, slower, 20.0, evidence=evidence), build_policy())
    (incident,) = replaced.desired.state.incidents.current
    assert incident.remedy is Remedy.REPLACE_WORKER
    assert replaced.desired.plan.checkpoint_request == 1


def test_an_unmanaged_script_gets_a_spare_once_the_loss_is_worth_it() -> None:
    observation = change_members(build_slow(), training={"managed": False})
    requesting = evaluate_job(observation, build_policy())
    evidence = build_windows(requesting.desired.requests.evidence_name, 2.0, (8, 8, 8, 8), managed=False)
    waiting = evaluate_job(with_result(requesting, observation, evidence=evidence), build_policy())
    assert not list_decisions(waiting)
    result = evaluate_job(with_result(waiting, observation, 10.0, evidence=evidence), build_policy())
    (incident,) = result.desired.state.incidents.current
    assert incident.remedy is Remedy.REPLACE_WORKER
    assert "library" in next(price.reason for price in incident.remedies if price.name == "Rebalance")


def test_a_rank_that_is_slow_at_times_is_no_straggler() -> None:
    observation = build_slow()
    requesting = evaluate_job(observation, build_policy())
    evidence = []
    for answer in build_windows(requesting.desired.requests.evidence_name, 1.0, (8, 8, 8, 8)):
        (window,) = answer.windows
        burst = tuple(0.3 if window.rank == 2 and n % 4 == 0 else 0.08 for n in range(32))
        evidence.append(replace(answer, windows=(replace(window, compute_seconds=burst),)))
    assert not list_decisions(
        evaluate_job(with_result(requesting, observation, evidence=tuple(evidence)), build_policy())
    )


@pytest.mark.parametrize(
    ("slowdown", "outcome"),
    [(1.05, IncidentOutcome.RECOVERED), (1.2, IncidentOutcome.MITIGATED), (2.2, IncidentOutcome.INEFFECTIVE)],
)
def test_the_outcome_is_measured(slowdown: float, outcome: IncidentOutcome) -> None:
    observation = change_members(build_slow(), progress={"step": 560})
    result = evaluate_slow_rank(2.0)
    (decided,) = result.desired.state.incidents.current
    assert decided.steps_before is not None
    assert decided.steps_before.mean_seconds == pytest.approx((decided.reference_seconds or 0.0) * 2.0, rel=0.1)
    step_seconds = (decided.reference_seconds or 0.0) * slowdown
    metrics = replace(observation.metrics, relative_time=2.0, step_seconds=step_seconds, throughput=32 / step_seconds)
    early = with_result(result, observation, 5.0, metrics=metrics)
    assert evaluate_job(early, build_policy()).desired.state.incidents.open
    final = replace(early, now=early.now + 1, metrics=replace(early.metrics, steps=32))
    (incident,) = evaluate_job(final, build_policy()).desired.state.incidents.current
    assert incident.cause is IncidentCause.STRAGGLER
    assert incident.outcome is outcome


def test_evidence_is_requested_again_during_the_investigation() -> None:
    observation = build_slow()
    requesting = evaluate_job(observation, build_policy())
    assert evaluate_job(with_result(requesting, observation, 2.0), build_policy()).desired == requesting.desired
    repeated = evaluate_job(with_result(requesting, observation, 6.0), build_policy())
    assert repeated.desired.requests.evidence_name not in ("", requesting.desired.requests.evidence_name)
    assert repeated.desired.state.adaptation.investigation is not None
    assert repeated.desired.state.adaptation.investigation.since == NOW


def test_requests_become_less_frequent_but_do_not_end() -> None:
    """Only the relative time shows a slow rank, and the answers show no bottleneck: that may change at any time."""
    observation = build_slow()
    requesting = evaluate_job(observation, build_policy())
    for seconds in (10_000.0, 10_130.0):
        observation = change_members(observation, progress={"step": (observation.progress.step or 0) + 1000})
        evidence = build_windows(requesting.desired.requests.evidence_name, 1.0, (8, 8, 8, 8))
        later = evaluate_job(with_result(requesting, observation, seconds, evidence=evidence), build_policy())
        assert later.desired.requests.evidence_name != requesting.desired.requests.evidence_name
        requesting = later
    first_sign = straggler._get_first_sign(observation.with_desired(requesting.desired))
    assert first_sign == NOW + 10_130.0, "a bottleneck that begins now has no earlier cost"


def test_a_tolerated_straggler_hides_no_other() -> None:
    observation = build_slow(spares=0)
    result = evaluate_with_answers(observation, 2.0)
    measured = with_result(
        result, observation, 60.0, metrics=replace(observation.metrics, peer_slowdown=1.05, relative_time=2.0, steps=32)
    )
    final = evaluate_job(measured, build_policy())
    assert not final.desired.state.incidents.open
    unchanged = with_result(final, measured, 100.0)
    assert not evaluate_job(unchanged, build_policy()).desired.requests.evidence_name
    another = replace(unchanged, metrics=replace(unchanged.metrics, peer_slowdown=1.9))
    assert evaluate_job(another, build_policy()).desired.requests.evidence_name


def investigate_after_rebalance(
    slow: float,
    relative_time: float = 2.5,
    shares: tuple[int, ...] | None = None,
    measured: bool = True,
    forbidden: Remedy = Remedy.QUARANTINE_NODE,
) -> tuple[PassResult, Observation]:
    """Evaluate the answers after a rebalance for a rank that is 2.5 × as slow; metrics cover part of the time before.

    All ranks have answered the requests since, under `shares` or the computed ones."""
    observation = build_slow(relative_time=2.2, spares=0)
    rebalanced = evaluate_with_answers(observation, 2.5)
    assert rebalanced.desired.plan.shares is not None
    assert rebalanced.desired.state.adaptation.suppressed_relative_time == 2.2
    steps = 32 if measured else 0
    after = with_result(
        rebalanced,
        observation,
        60.0,
        metrics=replace(observation.metrics, relative_time=relative_time, peer_slowdown=1.2, steps=steps),
    )
    requesting = evaluate_job(after, build_policy())
    request = requesting.desired.requests.evidence_name
    evidence = build_windows(request, slow, shares or rebalanced.desired.plan.shares)
    after = with_result(requesting, after, 6.0, evidence=evidence)
    allow = frozenset(Remedy) - {forbidden}
    return evaluate_job(after, build_policy(allow=allow)), replace(after, evidence=())


def test_a_straggler_whose_shares_fit_is_investigated_again_only_if_it_changes() -> None:
    result, observation = investigate_after_rebalance(2.5)
    assert not list_decisions(result)
    assert result.desired.state.adaptation.investigation is None
    assert (result.desired.requests.evidence_name, result.desired.state.adaptation.suppressed_relative_time) == (
        "",
        2.5,
    )

    def has_request(relative_time: float, peer_slowdown: float = 1.2) -> bool:
        later = with_result(
            result,
            observation,
            100.0,
            metrics=replace(observation.metrics, relative_time=relative_time, peer_slowdown=peer_slowdown),
        )
        return bool(evaluate_job(later, build_policy()).desired.requests.evidence_name)

    assert not has_request(2.5)
    assert not has_request(2.7)
    assert has_request(2.76), "it has become slower"
    assert not has_request(2.3)
    assert has_request(2.2), "it has recovered in part"
    assert not has_request(2.5, 1.3)
    assert has_request(2.5, 1.33), "another rank is slow as well"


def test_remaining_waits_after_a_rebalance_are_not_investigated() -> None:
    """Many jobs always wait for about a tenth of a step."""
    result, observation = investigate_after_rebalance(2.5)
    assert observation.progress.step_seconds is not None

    def has_request(**metrics: Any) -> bool:
        later = with_result(result, observation, 30.0, metrics=replace(observation.metrics, **metrics))
        return bool(evaluate_job(later, build_policy()).desired.requests.evidence_name)

    assert not has_request(relative_time=2.5, peer_slowdown=1.2, wait_share=0.12)
    assert has_request(
        relative_time=2.5, peer_slowdown=1.2, wait_share=0.12, step_seconds=1.2 * observation.progress.step_seconds
    ), "longer steps are a change"
    assert has_request(relative_time=1.0, peer_slowdown=1.2, wait_share=0.12), (
        "the straggler has recovered, so the shares no longer fit"
    )


def test_a_rebalanced_straggler_without_a_bottleneck_is_not_investigated() -> None:
    result, _ = investigate_after_rebalance(1.3, shares=(17, 17, 13, 17))
    assert result.desired.state.adaptation.investigation is None


def test_a_very_slow_rank_is_investigated_until_it_may_be_replaced() -> None:
    result, _ = investigate_after_rebalance(
        3.5, relative_time=3.5, shares=(10, 10, 3, 10), forbidden=Remedy.REPLACE_WORKER
    )
    assert not list_decisions(result)
    assert result.desired.state.adaptation.investigation is not None


def test_a_straggler_whose_shares_do_not_fit_is_investigated_until_they_may_change() -> None:
    result, _ = investigate_after_rebalance(2.5, shares=(9, 9, 5, 9), forbidden=Remedy.REBALANCE)
    assert not list_decisions(result)
    assert result.desired.state.adaptation.investigation is not None


def test_a_straggler_is_investigated_while_its_remedy_is_measured() -> None:
    result, _ = investigate_after_rebalance(2.5, measured=False)
    assert result.desired.state.incidents.open
    assert result.desired.state.adaptation.investigation is not None
    assert result.desired.state.adaptation.suppressed_relative_time == 2.2


def test_shares_that_no_longer_fit_are_computed_again() -> None:
    result, _ = investigate_after_rebalance(4.0, relative_time=4.0, shares=(9, 9, 5, 9))
    assert list_decisions(result), "it has become slower"


def test_the_suppression_ends_when_the_straggler_has_recovered() -> None:
    observation = build_slow()
    recovered = with_result(
        evaluate_slow_rank(2.0),
        observation,
        60.0,
        metrics=replace(observation.metrics, peer_slowdown=1.0, relative_time=1.0),
    )
    assert evaluate_job(recovered, build_policy()).desired.state.adaptation.suppressed_relative_time is None


def test_a_recommended_remedy_is_investigated_again_once_it_is_allowed() -> None:
    observation = build_slow()
    recommended = evaluate_with_answers(observation, 2.0, recommend_only=True)
    assert recommended.desired.plan.shares is None
    later = with_result(recommended, observation, 30.0)
    assert not evaluate_job(later, build_policy(mode=RemediationMode.RECOMMEND)).desired.requests.evidence_name
    assert evaluate_job(later, build_policy()).desired.requests.evidence_name


def build_slow_before(*workers: str) -> Observation:
    observation = build_slow(relative_time=4.0)
    past = tuple(PastIncident(IncidentCause.STRAGGLER, NOW - 100, 5.0, rank=2, worker=worker) for worker in workers)
    return observation.with_desired(observation.desired.with_incidents(past=past))


@pytest.mark.parametrize(
    ("workers", "remedy"),
    [
        (("j-w7-0", "j-w2-0", "j-w2-0"), Remedy.REPLACE_WORKER),
        (("j-w7-0", "j-w8-0"), Remedy.REBALANCE),
    ],
)
def test_a_rank_that_is_slow_on_every_worker_takes_no_more_spares(workers: tuple[str, ...], remedy: Remedy) -> None:
    (incident,) = evaluate_with_answers(build_slow_before(*workers), 4.0).desired.state.incidents.current
    assert incident.remedy is remedy
    if remedy is Remedy.REBALANCE:
        reason = next(price.reason for price in incident.remedies if price.name == "ReplaceWorker")
        assert "look at the script" in reason


def test_a_spare_for_a_straggler_counts_as_a_restart_and_waits_for_the_budget() -> None:
    assert len(evaluate_slow_rank(4.0).desired.state.budget.restarts) == 1
    observation = build_slow(relative_time=4.0)
    observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 10,) * 10))
    (incident,) = evaluate_with_answers(observation, 4.0).desired.state.incidents.current
    assert incident.remedy is Remedy.REBALANCE
    assert any("no restart is left" in price.reason for price in incident.remedies)


def test_incident_numbers_of_a_long_round_continue_after_old_ones_are_deleted() -> None:
    observation = build_slow()
    observation = observation.with_desired(
        observation.desired.with_incidents(closed=("j-r1-straggler-rank2-150-u1d2c",))
    )
    (incident,) = evaluate_with_answers(observation, 2.0).desired.state.incidents.current
    assert incident.name == "j-r1-straggler-rank2-151-u1d2c"


def test_refused_shares_are_not_sent_again_and_another_remedy_is_chosen() -> None:
    observation, result = build_slow(), evaluate_slow_rank(2.0)
    refusing = change_members(
        with_result(result, observation, 1.0), training={"refused": "a replica of 2 ranks takes 2 samples at least"}
    )
    refused = evaluate_job(refusing, build_policy())
    assert refused.desired.plan.shares is None
    assert not refused.desired.state.incidents.open
    repeated = evaluate_job(
        change_members(with_result(refused, observation, 10.0), training={"refused": ""}), build_policy()
    )
    assert repeated.desired.requests.evidence_name, "the rank is slow as before"
    evidence = build_windows(repeated.desired.requests.evidence_name, 2.0, (8, 8, 8, 8))
    next_remedy = evaluate_job(
        change_members(with_result(repeated, observation, 20.0, evidence=evidence), training={"refused": ""}),
        build_policy(),
    )
    assert next_remedy.desired.plan.shares is None
    (incident,) = next_remedy.desired.state.incidents.open
    assert incident.remedy not in (None, Remedy.REBALANCE)
    assert "a replica of 2" in next(price.reason for price in incident.remedies if price.name == "Rebalance")


def build_slightly_slow(
    relative_time: float = 1.08, managed: bool = True, spares: int = 1, seconds: float = 60.0, error: float = 0.0
) -> Observation:
    """Build a job whose rank 2 has been slower than its peers for `seconds`, by less than the threshold."""
    observation = change_members(build_slow(relative_time=relative_time, spares=spares), training={"managed": managed})
    observation = observation.with_desired(
        observation.desired.with_budget(measurements=RestartMeasurements(exchange=(60.0,)))
    )
    persistent = PersistentSlowness(KnownRelativeTimes({2: relative_time}, error), observation.now - seconds)
    return replace(
        observation,
        metrics=replace(observation.metrics, slowest_rank=2, wait_share=0.0, persistent_slowness=persistent),
    )


def evaluate_fruitless_answer(observation: Observation, relative_time: float = 1.08) -> PassResult:
    """Run the pass after one whose answer led to no decision."""
    first = evaluate_with_answers(observation, relative_time)
    request = first.desired.requests.evidence_name
    return evaluate_job(
        with_result(first, observation, 3.0, evidence=build_windows(request, relative_time, (8, 8, 8, 8))),
        build_policy(),
    )


def test_a_rank_that_is_slightly_slow_for_long_gets_fewer_samples() -> None:
    result = evaluate_with_answers(build_slightly_slow(), 1.08, (32, 32, 32, 32))
    (incident,) = result.desired.state.incidents.current
    assert (incident.cause, incident.rank, incident.remedy) == (IncidentCause.STRAGGLER, 2, Remedy.REBALANCE)
    assert incident.first_sign == pytest.approx(NOW - 60.0)
    shares = result.desired.plan.shares
    assert shares is not None
    assert shares[2] == min(shares) < 32


def test_a_slightly_slow_rank_gets_a_spare_once_the_loss_is_worth_it() -> None:
    """With eight samples, no share can move for 1.08. The loss is 0.074 s a second, and a spare costs 61 s."""
    early, late = (evaluate_with_answers(build_slightly_slow(seconds=seconds), 1.08) for seconds in (600.0, 900.0))
    assert not early.desired.state.incidents.current
    assert early.desired.requests.evidence_name, "the investigation continues"
    (incident,) = late.desired.state.incidents.current
    assert (incident.rank, incident.remedy) == (2, Remedy.REPLACE_WORKER)


def test_shares_with_a_small_gain_do_not_delay_a_spare() -> None:
    """Moving one of 32 samples shortens steps by 2 %, and 2.8 % would remain; a spare leaves nothing."""
    without_spare, with_spare = (
        evaluate_with_answers(build_slightly_slow(1.05, spares=spares, error=0.01), 1.05, (32,) * 4)
        for spares in (0, 1)
    )
    (incident,) = without_spare.desired.state.incidents.current
    assert incident.remedy == Remedy.REBALANCE
    assert with_spare.desired.plan.shares is None
    assert not with_spare.desired.state.incidents.current
    late = evaluate_with_answers(build_slightly_slow(1.05, seconds=3000.0, error=0.01), 1.05, (32,) * 4)
    (incident,) = late.desired.state.incidents.current
    assert incident.remedy == Remedy.REPLACE_WORKER
    prices = {price.name: price.reason for price in incident.remedies}
    assert prices[Remedy.REBALANCE] == "it wins so little that a spare is the better remedy, once it is due"


def test_shares_do_not_wait_for_a_spare_without_a_gain() -> None:
    """Ranks 2 and 3 are slow; one spare leaves the other."""
    observation = build_slightly_slow(1.05)
    metrics = replace(
        observation.metrics,
        persistent_slowness=PersistentSlowness(KnownRelativeTimes({2: 1.05, 3: 1.05}, 0.01), observation.now - 600.0),
    )
    observation = replace(observation, metrics=metrics)
    requesting = evaluate_job(observation, build_policy())
    costs = [0.010, 0.010, 0.0105, 0.0105]
    answers = build_evidence(
        requesting.desired.requests.evidence_name,
        (RankWindow(rank, STEPS, (0.336,) * 32, (32 * costs[rank],) * 32, (32,) * 32) for rank in range(4)),
    )
    (incident,) = evaluate_job(
        with_result(requesting, observation, evidence=answers), build_policy()
    ).desired.state.incidents.current
    assert incident.remedy == Remedy.REBALANCE


def test_a_slowdown_within_noise_leads_to_no_incident() -> None:
    uncertain, certain = (
        evaluate_with_answers(build_slightly_slow(relative_time, seconds=20_000.0), relative_time)
        for relative_time in (1.015, 1.05)
    )
    assert not uncertain.desired.state.incidents.current
    assert certain.desired.state.incidents.current


def test_a_small_slowdown_is_measured_over_all_windows() -> None:
    """In the few steps of one answer, it is slow by only 1.055, and one step may deviate by 10 %."""
    result = evaluate_with_answers(build_slightly_slow(seconds=900.0, error=0.1), 1.055)
    (incident,) = result.desired.state.incidents.current
    assert (incident.rank, incident.remedy) == (2, Remedy.REPLACE_WORKER)
    by_all_windows = evaluate_with_answers(build_slightly_slow(seconds=900.0), 1.08).desired.state.incidents.current[0]
    assert incident.slowdown_before == pytest.approx(by_all_windows.slowdown_before, rel=1e-3)


def test_without_a_persistent_slowdown_no_evidence_is_requested() -> None:
    observation = build_slightly_slow()
    result = evaluate_job(
        replace(observation, metrics=replace(observation.metrics, persistent_slowness=None)), build_policy()
    )
    assert not result.desired.requests.evidence_name


def test_a_small_slowdown_of_an_unmanaged_script_is_ignored() -> None:
    assert not evaluate_job(build_slightly_slow(managed=False), build_policy()).desired.requests.evidence_name


def test_a_bottleneck_that_appears_late_extends_the_investigation() -> None:
    """A link becomes slow while waits are investigated, just before the investigation would end."""
    observation = change_members(build_training(), training={"sync_mode": "Sync"})
    observation = replace(
        observation, metrics=replace(observation.metrics, relative_time=1.0, wait_share=0.3, step_seconds=0.1)
    )
    requesting = evaluate_job(observation, build_policy())
    assert requesting.desired.requests.evidence_name

    def build_answers(request: str, seconds: float) -> tuple[Evidence, ...]:
        return build_evidence(
            request,
            (
                RankWindow(rank, STEPS, (seconds,) * 32, (0.08,) * 32, (8,) * 32, baseline_seconds=0.1)
                for rank in range(4)
            ),
        )

    healthy = with_result(
        requesting, observation, 1.0, evidence=build_answers(requesting.desired.requests.evidence_name, 0.1)
    )
    evaluated = evaluate_job(healthy, build_policy())
    for seconds in (3.0, 6.0, 9.0, 12.0, 15.0, 18.0):
        observation = change_members(observation, progress={"step": (observation.progress.step or 0) + 30})
        repeated = with_result(
            evaluated, observation, seconds, evidence=build_answers(evaluated.desired.requests.evidence_name, 0.1)
        )
        evaluated = evaluate_job(repeated, build_policy())
    request = evaluated.desired.requests.evidence_name
    observation = change_members(observation, progress={"step": 900})
    fruitless = evaluate_job(
        with_result(evaluated, observation, 40.0, evidence=build_answers(request, 0.1)), build_policy()
    )
    assert fruitless.desired.state.adaptation.investigation is None
    slow = evaluate_job(with_result(evaluated, observation, 40.0, evidence=build_answers(request, 0.2)), build_policy())
    investigation = slow.desired.state.adaptation.investigation
    assert investigation is not None
    assert investigation.last_bottleneck is Bottleneck.COMMUNICATION


def test_the_accumulated_loss_stays_until_no_rank_is_slow() -> None:
    """The state after a restart of the operator has no windows."""
    observation = build_slightly_slow(seconds=600.0)
    evaluated = evaluate_fruitless_answer(observation)
    assert evaluated.desired.state.adaptation.loss is not None
    metrics = replace(observation.metrics, persistent_slowness=None)
    restarted = replace(with_result(evaluated, observation, 5.0), metrics=replace(metrics, needs_more_windows=True))
    loss = evaluate_job(restarted, build_policy()).desired.state.adaptation.loss
    assert loss is not None
    enough_windows = replace(restarted, metrics=metrics)
    assert evaluate_job(enough_windows, build_policy()).desired.state.adaptation.loss is None


def test_without_a_remedy_requests_end() -> None:
    evaluated = evaluate_fruitless_answer(build_slightly_slow(spares=0))
    assert not evaluated.desired.requests.evidence_name
    repeated = with_result(evaluated, build_slightly_slow(spares=0), 300.0)
    assert not evaluate_job(repeated, build_policy()).desired.requests.evidence_name


def test_requests_continue_until_all_slow_ranks_are_known() -> None:
    """After ten windows of 3.2 s, only some slow ranks of a node are detected; a remedy for these alone has no gain."""
    assert evaluate_fruitless_answer(build_slightly_slow(spares=0, seconds=20.0)).desired.requests.evidence_name, (
        "the investigation continues"
    )


def test_requests_continue_after_one_answer_with_a_smaller_slowdown() -> None:
    """Over all windows the loss is 4.5 %; a spare exists, and is worth it later."""
    assert evaluate_fruitless_answer(build_slightly_slow(1.05), 1.015).desired.requests.evidence_name, (
        "the investigation continues"
    )


def test_one_spare_does_not_resolve_two_slow_workers() -> None:
    """Ranks 2 and 3 stay slow: without one of them, all wait for the other."""
    observation = build_slightly_slow(seconds=3000.0)
    persistent = PersistentSlowness(KnownRelativeTimes({2: 1.08, 3: 1.08}, 0.0), observation.now - 3000.0)
    observation = replace(observation, metrics=replace(observation.metrics, persistent_slowness=persistent))
    requesting = evaluate_job(observation, build_policy())
    costs = [0.010, 0.010, 0.0108, 0.0108]
    evidence = build_evidence(
        requesting.desired.requests.evidence_name,
        (RankWindow(rank, STEPS, (0.0864,) * 32, (8 * costs[rank],) * 32, (8,) * 32) for rank in range(4)),
    )
    result = evaluate_job(with_result(requesting, observation, evidence=evidence), build_policy())
    assert not result.desired.state.incidents.current


def test_a_slightly_slow_rank_hides_no_slower_one() -> None:
    """It has been investigated for an hour, every two minutes by now; then steps become longer."""
    observation = build_slightly_slow(seconds=600.0)
    evaluated = evaluate_fruitless_answer(observation)
    investigation = evaluated.desired.state.adaptation.investigation
    assert investigation is not None
    long_investigated = evaluated.desired.with_adaptation(
        investigation=replace(investigation, since=NOW - 3600.0, step_seconds=0.1)
    )
    slower_metrics = replace(observation.metrics, relative_time=2.0, step_seconds=0.15)
    longer_steps = replace(
        change_members(observation.with_desired(long_investigated), progress={"step": 600}),
        now=NOW + 10.0,
        metrics=slower_metrics,
    )
    desired = evaluate_job(longer_steps, build_policy()).desired
    assert desired.state.adaptation.investigation is not None
    assert desired.state.adaptation.investigation.since == NOW + 10.0
    assert desired.requests.evidence_name != evaluated.desired.requests.evidence_name


def test_without_new_steps_no_evidence_is_requested_and_the_investigation_stays() -> None:
    """The job runs its evaluation when a link has just become slow: the few steps before show nothing yet."""
    observation = change_members(build_training(), training={"sync_mode": "Sync"})
    observation = replace(
        observation, metrics=replace(observation.metrics, relative_time=1.0, wait_share=0.3, step_seconds=0.1)
    )
    result = evaluate_job(observation, build_policy())
    for _ in range(2):  # the answers; and those of the last steps before the evaluation
        evidence = build_windows(result.desired.requests.evidence_name, 1.0, (8, 8, 8, 8))
        result = evaluate_job(with_result(result, observation, 2.0, evidence=evidence), build_policy())
        observation = replace(observation, now=observation.now + 2.0, evidence=evidence)
    for seconds in range(1, 300, 10):
        assert evaluate_job(with_result(result, observation, float(seconds)), build_policy()).desired == result.desired
    assert result.desired.state.adaptation.investigation is not None
    continued = evaluate_job(
        with_result(result, change_members(observation, progress={"step": 510}), 300.0), build_policy()
    )
    assert continued.desired.requests.evidence_name not in {"", result.desired.requests.evidence_name}
