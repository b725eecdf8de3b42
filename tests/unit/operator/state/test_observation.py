"""What follows directly from an observation: prices, names, and the rendezvous of a round."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_analysis.stragglers.price import AccumulatedLoss, Option
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.stragglers.pricing import (
    build_remedy_prices,
    build_replace_option,
    build_restart_option,
    choose_remedy_at_standstill,
)
from pacekeeper_operator.state import rounds
from pacekeeper_operator.state.cluster_view import FRESH_WORKER_SECONDS, LAUNCHER_UNRESPONSIVE_SECONDS
from pacekeeper_operator.state.desired_state import Adaptation
from pacekeeper_operator.state.effect_results import BlockedAction
from pacekeeper_operator.state.incident_key import IncidentKey
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_crash,
    build_job,
    build_policy,
    build_training,
    change_worker,
)


class TestClocks:
    @pytest.mark.parametrize(("ago", "young"), [(0.0, True), (1.9, True), (2.0, False), (-0.1, False)])
    def test_a_fault_dated_in_the_future_is_not_young(self, ago: float, young: bool) -> None:
        assert build_training().is_younger(build_crash("j-w1-0", 1, noticed_at=NOW - ago), 2.0) is young


class TestViews:
    def is_warm(self, pod: dict[str, Any] | None = None, **changes: Any) -> bool:
        view = change_worker(build_training(), "j-w4-0", pod=pod, **changes).find_worker("j-w4-0")
        assert view is not None
        return view.warm

    def test_a_warm_worker_can_take_ranks_at_once(self) -> None:
        assert self.is_warm()
        assert self.is_warm(silent_seconds=FRESH_WORKER_SECONDS)
        assert not self.is_warm(silent_seconds=FRESH_WORKER_SECONDS + 0.1)
        assert not self.is_warm({"address": ""})
        assert not self.is_warm({"deleting": True})
        assert not self.is_warm({"phase": "Failed"})
        assert not self.is_warm(heartbeat={"state": LauncherState.STARTING})
        assert not self.is_warm(heartbeat={"launcher_silent_seconds": LAUNCHER_UNRESPONSIVE_SECONDS})


class TestPrices:
    def test_a_remedy_that_is_not_allowed_is_refused_by_name(self) -> None:
        none = build_policy(allow=frozenset())
        assert "allow" in build_restart_option(build_training(), none).refused
        assert "allow" in build_replace_option(build_training(), none).refused
        assert build_restart_option(build_training(), build_policy()).refused == ""
        assert build_replace_option(build_training(spares=0), build_policy()).refused == "no spare is warm"

    def test_the_chosen_remedy_is_marked(self) -> None:
        choice = choose_remedy_at_standstill(
            (Option(Remedy.RESTART_RANKS, 5.0, 1.0), Option(Remedy.REPLACE_WORKER, 9.0, 1.0))
        )
        assert [(price.name, price.chosen) for price in build_remedy_prices(choice.prices, choice.chosen)] == [
            (Remedy.RESTART_RANKS, True),
            (Remedy.REPLACE_WORKER, False),
        ]
        assert not any(price.chosen for price in build_remedy_prices(choice.prices, None))


class TestNames:
    @pytest.mark.parametrize(
        ("subject", "name"),
        [
            (IncidentKey(IncidentCause.HANG, 3), "j-r3-hang-u1d2c"),
            (IncidentKey(IncidentCause.HANG, 3, occurrence=2), "j-r3-hang-2-u1d2c"),
            (IncidentKey(IncidentCause.STRAGGLER, 3, rank=0), "j-r3-straggler-rank0-u1d2c"),
            (IncidentKey(IncidentCause.WORKER_LOST, 3, worker="j-w1-0", rank=1), "j-r3-worker-lost-w1-0-u1d2c"),
        ],
    )
    def test_names_of_incidents_contain_their_occurrence(self, subject: IncidentKey, name: str) -> None:
        assert subject.incident_name(build_job()) == name
        assert subject.find_occurrence(name, build_job()) == subject.occurrence
        assert replace(subject, round=4).find_occurrence(name, build_job()) == 0


class TestRounds:
    def test_a_round_of_other_members_resets_shares_and_refusals(self) -> None:
        observation = build_training()
        desired = observation.desired.with_plan(shares=(6, 8, 9, 9))
        desired = desired.with_adaptation(
            shares_refusal="no", suppressed_relative_time=2.0, suppressed_peer_slowdown=1.5
        )
        desired = desired.with_adaptation(loss=AccumulatedLoss(3.0, NOW, 1.1))
        observation = observation.with_desired(desired)
        same = rounds.begin_round(observation, observation.plan.members)
        adaptation = same.state.adaptation
        assert same.plan.shares == (6, 8, 9, 9)
        assert (
            adaptation.shares_refusal,
            adaptation.suppressed_relative_time,
            adaptation.suppressed_peer_slowdown,
        ) == ("no", 2.0, 1.5)
        assert adaptation.loss == AccumulatedLoss(3.0, NOW, 1.1)
        fewer = rounds.begin_round(observation, observation.plan.members[:3])
        adaptation = fewer.state.adaptation
        assert fewer.plan.shares is None
        assert (
            adaptation.shares_refusal,
            adaptation.suppressed_relative_time,
            adaptation.suppressed_peer_slowdown,
        ) == ("", None, None)
        assert adaptation.loss is None

    @pytest.mark.parametrize("silent", [True, False])
    def test_a_member_without_a_heartbeat_uses_the_default_rendezvous_port(self, silent: bool) -> None:
        observation = build_training()
        if silent:
            views = tuple(
                replace(view, heartbeat=None) if view.name == "j-w0-0" else view for view in observation.workers
            )
        else:
            views = observation.workers[1:]
        plan = rounds.begin_round(replace(observation, workers=views), observation.plan.members).plan
        assert (plan.store_port, plan.secret) == (Plan.store_port, "")


CACHED_NAMES = sorted(name for name, value in vars(Observation).items() if isinstance(value, cached_property))


@pytest.mark.parametrize("seed", range(20))
def test_cached_values_carried_to_the_next_desired_state_equal_new_ones(seed: int) -> None:
    rng, observation = random.Random(seed), build_training(6, 2)
    observation = change_worker(observation, "j-w3-0", heartbeat={"round": 4, "training": {"sync_mode": "EDiT"}})
    for _ in range(20):
        for name in rng.sample(CACHED_NAMES, rng.randrange(len(CACHED_NAMES))):
            getattr(observation, name)
        desired, workers = observation.desired, observation.state.placement.workers
        match rng.randrange(6):
            case 0:
                observation = observation.with_desired(desired.with_plan(round=rng.randrange(9)))
            case 1:
                observation = observation.with_desired(desired.with_plan(membership=rng.randrange(3)))
            case 2:
                members = tuple(Member(w.name, "10.0.0.9", (n,)) for n, w in enumerate(rng.sample(workers, 4)))
                observation = observation.with_desired(desired.with_plan(members=members))
            case 3:
                given_up = replace(rng.choice(workers), leaving=rng.choice(["", "it is lost"]))
                observation = observation.with_desired(desired.with_worker(given_up))
            case 4:
                observation = observation.with_desired(
                    desired.with_placement(workers=tuple(rng.sample(workers, len(workers))))
                )
            case _:
                observation = observation.with_blocked_actions((BlockedAction("what", "why"),))
        rebuilt = replace(observation)
        assert {name: getattr(observation, name) for name in CACHED_NAMES} == {
            n: getattr(rebuilt, n) for n in CACHED_NAMES
        }


class TestLoss:
    def test_the_loss_between_two_samples_is_their_mean(self) -> None:
        loss = Adaptation(loss=AccumulatedLoss(3.0, NOW, 1.25)).accumulate_loss(NOW + 100, 2.0, since=NOW - 50)
        assert (loss.seconds, loss.slowdown) == pytest.approx((3.0 + 100 * (0.2 + 0.5) / 2, 2.0))

    def test_the_loss_before_the_first_sign_counts_the_earlier_slowdown(self) -> None:
        """For an hour shares had compensated the slowdown. Then the rank became slower."""
        loss = Adaptation(loss=AccumulatedLoss(3.0, NOW, 1.0)).accumulate_loss(NOW + 3600, 2.0, since=NOW + 3590)
        assert (loss.seconds, loss.at) == pytest.approx((3.0 + 10 * 0.25, NOW + 3600))

    def test_the_first_loss_counts_from_the_first_sign(self) -> None:
        assert Adaptation().accumulate_loss(NOW + 60, 1.25, since=NOW).seconds == pytest.approx(60 * 0.2)
