"""The account of a watched job: what counts as a GPU, a round, a hang, and as lost to slow ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.accounting.gpu_account import GpuAccount, Loss
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.watched_job import AccountStatus, WatchedJobStatus
from pacekeeper_operator.decide.watched.job_account import account_for_gpus
from pacekeeper_operator.decide.watched.observed_incidents import verify_incidents
from pacekeeper_operator.state.desired_state import Incident, WatchedRound
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.straggler_estimate import EstimatedFault, FaultEstimate, StragglerEstimate
from testing.operators.observations import NOW, build_policy, build_training, change_members, change_worker

DAY = "1970-01-12"
"""Of NOW."""


def build_watched(steps: int = 100, *rounds: WatchedRound, seconds: float = 0.0) -> Observation:
    """Return a job of five workers with one rank each, `seconds` after NOW, with this many steps in its last round."""
    observation = build_training()
    desired = observation.desired.with_watched(rounds=rounds or (WatchedRound(1, NOW - 100.0, first_step=NOW - 90.0),))
    observation = replace(observation.with_desired(desired), now=NOW + seconds)
    round_ = desired.state.watched.rounds[-1].round
    return change_members(observation, round=round_, progress={"step": steps, "steps_in_round": steps})


def account_from(began: float, *observations: Observation) -> GpuAccount:
    """Return the account since `began`, of passes over these observations."""
    account = GpuAccount(until=began)
    for observation in observations:
        account = account_for_gpus(observation, account)
    return account


def test_steps_after_the_first_are_useful_and_every_rank_counts_as_a_gpu() -> None:
    account = account_from(NOW - 100.0, build_watched())
    assert account.total.lost == {Loss.STARTUP: 50.0}
    assert account.total.useful == 450.0


def test_gpus_count_where_pods_have_them() -> None:
    observation = build_watched()
    for worker in observation.workers:
        observation = change_worker(observation, worker.name, pod={"gpus": 8})
    assert account_from(NOW - 100.0, observation).total.held == 4000.0


def test_pods_without_a_node_hold_nothing() -> None:
    observation = build_watched()
    for record in observation.state.placement.workers:
        observation = observation.with_desired(observation.desired.with_worker(replace(record, node="")))
        observation = change_worker(observation, record.name, record=replace(record, node=""))
    assert account_from(NOW - 100.0, observation).total.held == 0.0


def test_a_slow_rank_costs_its_share_and_charges_its_node() -> None:
    fault = FaultEstimate(EstimatedFault.SLOW_WORKER, 0.99, 2.2, NOW - 50, rank=2, job_slowdown=2.0)
    observation = replace(build_watched(), estimate=StragglerEstimate((fault,)))
    account = account_from(NOW - 90.0, observation)
    assert account.total.lost[Loss.STRAGGLER] == pytest.approx(225.0)
    assert account.nodes == {(DAY, "node-2"): pytest.approx(225.0)}


def test_a_hang_counts_from_the_last_step_on() -> None:
    observation = build_watched(seconds=60.0)
    incident = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "", NOW, NOW, NOW, node="node-1")
    hung = observation.with_desired(observation.desired.with_incident(incident))
    account = account_from(NOW - 90.0, build_watched(), hung)
    assert account.total.lost == {Loss.HANG: 300.0}
    assert account.nodes == {(DAY, "node-1"): 300.0}


@pytest.mark.parametrize(("ended", "is_over"), [(NOW - 4.0, False), (NOW + 4.0, True)])
def test_a_hang_is_over_once_a_step_ends_after_it_was_found(ended: float, *, is_over: bool) -> None:
    """The first report after it may bring steps from before it, which are dated by their end."""
    incident = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "", NOW - 3.0, NOW, NOW, last_step=80)
    observation = build_watched(seconds=5.0)
    observation = observation.with_desired(observation.desired.with_incident(incident))
    observation = change_members(observation, progress={"step_ended_at": ended})
    desired = verify_incidents(observation, build_policy())
    assert (not desired.state.incidents.open) == is_over


def test_a_hang_waits_for_reports_from_after_its_first_sign() -> None:
    incident = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "", NOW, NOW, NOW, node="node-1")
    observation = build_watched(seconds=9.0)
    observation = observation.with_desired(observation.desired.with_incident(incident))
    stale = change_members(observation, progress={"steps_in_round": 70, "step_ended_at": NOW - 21.0}, sent_at=NOW - 20)
    assert Loss.HANG not in account_from(NOW - 90.0, stale).total.lost
    fresh = change_members(observation, progress={"steps_in_round": 90, "step_ended_at": NOW - 1.0}, sent_at=NOW + 1.0)
    assert account_from(NOW - 90.0, stale, fresh).total.lost[Loss.HANG] == 50.0


def test_a_restart_costs_the_gap_and_the_steps_that_it_repeats() -> None:
    first = WatchedRound(1, NOW - 100.0, first_step=NOW - 90.0, ended=NOW + 5.0)
    second = WatchedRound(2, NOW + 10.0, first_step=NOW + 20.0, resumed_from=80)
    again = change_members(build_watched(11, first, second, seconds=30.0), start={"started_at": NOW + 9.0})
    account = account_from(NOW - 90.0, build_watched(), again)
    assert account.total.lost == {Loss.REPEATED_STEPS: 25.0 + 50.0, Loss.IDLE: 20.0, Loss.STARTUP: 55.0}


def test_the_account_ends_with_the_job() -> None:
    observation = build_watched(seconds=10.0)
    over = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW + 10.0))
    account = account_from(NOW - 90.0, build_watched(), over)
    assert account.total.lost == {Loss.IDLE: 50.0}
    assert account_for_gpus(replace(over, now=NOW + 999.0), account) is account


def test_the_account_is_the_same_after_it_was_stored() -> None:
    account = account_from(NOW - 100.0, build_watched())
    patch = WatchedJobStatus(account=AccountStatus.from_account(account)).to_patch()
    stored = WatchedJobStatus.parse(patch).account
    assert stored is not None
    assert stored.to_account() == account
