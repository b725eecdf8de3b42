"""When ranks look into themselves, what is waited for, and where the answer goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.profiling.localize import Explanation, Localization, describe_localization
from pacekeeper_analysis.protocol.plan import SourceNaming, Stop, SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import DetectionSpec, JobSpec, ProfileSpec
from pacekeeper_operator.decide.effects import LocalizeProfile, SaveProfile
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.stragglers import profile
from pacekeeper_operator.state.desired_state import Incident, StragglerInvestigation
from pacekeeper_operator.state.effect_results import LocalizedProfile
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training, change_members

STEADY = JobMetrics(step_seconds=0.1, relative_time=1.0, uniform_slowdown=1.0)
FOUND = Finding(
    FaultClass.CODE,
    "train.py:augment on rank 2",
    (Signal(SignalKind.TIMES, "1.4 × its peers'"), Signal(SignalKind.PROFILE, "augment takes 0.2 s")),
)
LOCALIZATION = Localization(
    FOUND,
    (Explanation(FOUND, "train.py:augment", (2,), 0.2, 0.9),),
    step_seconds=0.6,
    excess_seconds=0.22,
    explained=0.9,
    reported=4,
    expected=4,
)
NOTHING = replace(LOCALIZATION, finding=Finding(FaultClass.UNKNOWN, ""), explanations=(), excess_seconds=0.0)


DATA = Finding(FaultClass.DATA, "sequence lengths on all ranks", (Signal(SignalKind.TIMES, "uneven"),))
LINK = Finding(FaultClass.NETWORK, "link 0 → 2", (Signal(SignalKind.TRANSPORT, "12 MB/s"),))


def volatile(**changes: Any) -> Incident:
    values: dict[str, Any] = {
        "name": "j-volatile",
        "cause": IncidentCause.VOLATILE,
        "class_": IncidentClass.PERFORMANCE,
        "round": 1,
        "message": "slow",
        "first_sign": NOW - 60,
        "detected": NOW - 30,
        "decided": NOW - 30,
        "live": True,
    }
    return Incident(**(values | changes))


def steady(*incidents: Incident, uniform: float = 1.0, **changes: Any) -> Observation:
    world = build_training(**{"metrics": replace(STEADY, uniform_slowdown=uniform), **changes})
    return world.with_desired(world.desired.with_incidents(current=incidents))


def suspecting(world: Observation, shown: Bottleneck | None) -> Observation:
    return world.with_desired(
        world.desired.with_adaptation(investigation=StragglerInvestigation(NOW - 5, last_bottleneck=shown))
    )


def stepped(world: Observation, **changes: Any) -> Observation:
    return world.with_desired(profile.advance_profile_window(world, build_policy(**changes)))


def by_hand(world: Observation, wanted: str = "1") -> Observation:
    return replace(world, job=replace(world.job, profile_request=wanted))


def told(world: Observation, localization: Localization = LOCALIZATION) -> Observation:
    assert world.plan.profile is not None
    return replace(
        world, profile_answers=4, localized_profile=LocalizedProfile(world.plan.profile.name, localization, "{}")
    )


class TestBegin:
    def test_nothing_is_looked_into_while_all_is_well(self) -> None:
        world = steady()
        assert profile.advance_profile_window(world, build_policy()) == world.desired

    def test_an_incident_that_names_no_function(self) -> None:
        asked = stepped(steady(volatile()))
        window = asked.plan.profile
        assert window is not None
        assert (window.first_step, window.steps, window.sources) == (562, 80, SourceNaming.HASH)
        assert asked.state.profiling.incident == "j-volatile"
        assert asked.plan.version == 101

    def test_long_steps_have_a_window_of_their_own_length(self) -> None:
        window = stepped(steady(volatile(), metrics=replace(STEADY, step_seconds=5.0))).plan.profile
        assert window is not None
        assert (window.first_step, window.steps) == (504, 32)

    @pytest.mark.parametrize(
        "incident",
        [
            volatile(finding=FOUND),
            volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=FOUND),
            volatile(cause=IncidentCause.CRASH),
            volatile(round=0),
        ],
        ids=["names one", "names its cause", "not slowness", "another round"],
    )
    def test_others_are_let_be(self, incident: Incident) -> None:
        assert stepped(steady(incident)).plan.profile is None

    def test_once_an_incident(self) -> None:
        world = stepped(steady(volatile()))
        over = world.with_desired(profile._end_window(world.desired))
        assert stepped(over).plan.profile is None

    def test_all_ranks_slow_alike_and_again_only_once_they_are_slower(self) -> None:
        world = stepped(steady(uniform=1.2))
        assert world.plan.profile is not None
        over = world.with_desired(profile._end_window(world.desired))
        assert stepped(over).plan.profile is None
        slower = replace(over, metrics=replace(STEADY, uniform_slowdown=1.35))
        assert stepped(slower).plan.profile is not None

    @pytest.mark.parametrize(
        "changes", [{"relative_time": 1.5}, {"uniform_slowdown": 1.09}, {"uniform_slowdown": None}], ids=str
    )
    def test_what_is_not_all_slow(self, changes: dict[str, Any]) -> None:
        world = steady(metrics=replace(STEADY, **({"uniform_slowdown": 1.2} | changes)))
        assert stepped(world).plan.profile is None

    def test_answers_that_show_nothing_yet_keep_it_off_and_those_that_show_no_trouble_do_not(self) -> None:
        world = steady(uniform=1.2)
        assert stepped(suspecting(world, None)).plan.profile is None
        assert stepped(suspecting(world, Bottleneck.COMMUNICATION)).plan.profile is None
        assert stepped(suspecting(world, Bottleneck.NONE)).plan.profile is not None

    @pytest.mark.parametrize("cause", [IncidentCause.UNEVEN_LENGTHS, IncidentCause.GARBAGE_COLLECTION])
    def test_what_names_itself_explains_how_slow_all_are(self, cause: IncidentCause) -> None:
        named = volatile(name="j-named", cause=cause, finding=DATA)
        explained = stepped(steady(named, uniform=1.4))
        assert (explained.plan.profile, explained.state.profiling.uniform_slowdown) == (None, 1.4)
        slower = replace(explained, metrics=replace(STEADY, uniform_slowdown=1.6))
        assert stepped(slower).plan.profile is None, "it is open: by how much it slows them is its own"
        over = slower.with_desired(slower.desired.with_incidents(current=()))
        assert stepped(over).plan.profile is not None

    @pytest.mark.parametrize("cause", [IncidentCause.UNEVEN_LENGTHS, IncidentCause.GARBAGE_COLLECTION])
    def test_what_names_itself_keeps_its_name(self, cause: IncidentCause) -> None:
        """Whoever waits for uneven ranks waits in collectives, which is no link's fault."""
        world = stepped(steady(uniform=1.4))
        opened = volatile(name="j-named", cause=cause, finding=DATA, decided=world.now)
        waits = replace(LOCALIZATION, finding=replace(FOUND, fault=FaultClass.NETWORK, culprit="all_reduce"))
        done = told(world.with_desired(world.desired.with_incidents(current=(opened,))), waits)
        assert profile.check_profile(done, build_policy()) is None
        (incident,) = stepped(done).state.incidents.current
        assert incident.finding == DATA
        assert incident.evidence == describe_localization(waits)

    def test_ranks_that_all_work_for_longer_are_looked_into_however_uneven_they_are(self) -> None:
        """As under a processor quota on all nodes, which holds up one rank after the other."""
        world = suspecting(
            steady(metrics=replace(STEADY, uniform_slowdown=1.5, relative_time=1.4)), Bottleneck.COMMUNICATION
        )
        assert stepped(world).plan.profile is None
        slow = RankWindow(0, (1, 2), (0.1, 0.1), (0.06, 0.06), (0, 0), baseline_own_seconds=0.04)
        assert stepped(replace(world, evidence=(Evidence("ask", "w", 1, (slow,)),))).plan.profile is not None

    def test_slow_work_of_which_no_incident_tells(self) -> None:
        """A dear remedy waits for the loss to be worth it, and a job may have none: people are told all the same."""
        world = suspecting(steady(), Bottleneck.COMPUTE)
        asked = stepped(world)
        assert asked.plan.profile is not None
        assert stepped(asked.with_desired(profile._end_window(asked.desired))).plan.profile is None, "once a round"
        told_of = volatile(cause=IncidentCause.STRAGGLER, finding=FOUND)
        assert stepped(suspecting(steady(told_of), Bottleneck.COMPUTE)).plan.profile is None

    @pytest.mark.parametrize(
        ("seconds", "uniform", "asked"), [(5, 1.5, False), (12, 1.5, True), (12, 1.05, False), (12, None, False)]
    )
    def test_what_slows_all_for_long_is_looked_into_whatever_answers_show(
        self, seconds: float, uniform: float | None, asked: bool
    ) -> None:
        """As a quota on one node, which looks now like slow work and now like slow links."""
        world = steady(metrics=replace(STEADY, relative_time=1.8, uniform_slowdown=uniform))
        shown = StragglerInvestigation(NOW - seconds, last_bottleneck=Bottleneck.COMMUNICATION)
        world = world.with_desired(world.desired.with_adaptation(investigation=shown))
        assert (stepped(world).plan.profile is not None) == asked

    def test_how_slow_all_are_with_a_slow_link_is_known_once_the_link_is_named(self) -> None:
        known = stepped(steady(volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=LINK), uniform=1.5))
        assert known.plan.profile is None
        over = known.with_desired(known.desired.with_incidents(current=()))
        assert stepped(over).plan.profile is None
        slower = replace(over, metrics=replace(STEADY, uniform_slowdown=1.8))
        assert stepped(slower).plan.profile is not None
        nobody = volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=replace(LINK, culprit=""))
        assert stepped(steady(nobody)).plan.profile is not None

    def test_two_an_hour_and_then_by_hand(self) -> None:
        world = steady(volatile())
        spent = world.with_desired(world.desired.with_profiling(requested_times=(NOW - 3000, NOW - 10)))
        assert stepped(spent).plan.profile is None
        assert stepped(spent, profiles_per_hour=3).plan.profile is not None
        assert stepped(by_hand(spent)).plan.profile is not None
        old = world.with_desired(world.desired.with_profiling(requested_times=(NOW - 3700, NOW - 10)))
        assert stepped(old).plan.profile is not None

    def test_by_hand_once_for_each_value_and_in_any_mode(self) -> None:
        world = steady()
        local = world.with_desired(world.desired.with_plan(sync_mode=SyncMode.EDIT))
        asked = stepped(by_hand(local))
        assert asked.plan.profile is not None
        over = asked.with_desired(profile._end_window(asked.desired))
        assert stepped(over).plan.profile is None
        assert stepped(by_hand(over, "2")).plan.profile is not None

    def test_not_before_all_train(self) -> None:
        assert stepped(by_hand(change_members(steady(), start={"first_step_at": None}))).plan.profile is None

    def test_the_job_may_show_its_sources(self) -> None:
        detection = DetectionSpec(profile=ProfileSpec(SourceNaming.SHOW))
        world = steady(volatile())
        shown = replace(world, job=replace(world.job, spec=replace(world.job.spec, detection=detection)))
        window = stepped(shown).plan.profile
        assert window is not None
        assert window.sources is SourceNaming.SHOW


class TestAnswers:
    def test_all_of_them_are_looked_into_at_once(self) -> None:
        world = stepped(steady(volatile()))
        assert world.plan.profile is not None
        assert (
            list(profile.list_profile_effects(replace(world, profile_answers=3, last_profile_answer_at=world.now)))
            == []
        )
        assert list(profile.list_profile_effects(replace(world, profile_answers=4))) == [
            LocalizeProfile(world.plan.profile.name, 4)
        ]

    def test_some_once_the_time_is_over_or_the_round_is(self) -> None:
        world = stepped(steady(volatile()))
        until = world.state.profiling.until
        assert until is not None
        world = replace(world, profile_answers=3, last_profile_answer_at=until)
        late = replace(world, now=until + 1)
        assert len(list(profile.list_profile_effects(late))) == 1
        assert stepped(late).plan.profile is not None
        assert len(list(profile.list_profile_effects(change_members(world, round=2)))) == 1

    def test_who_does_not_answer_with_the_others_is_not_waited_for(self) -> None:
        world = stepped(steady(volatile()))
        world = replace(world, profile_answers=3, last_profile_answer_at=world.now + 8)
        assert world.state.profiling.until is not None
        assert world.state.profiling.until > world.now + 20
        assert list(profile.list_profile_effects(replace(world, now=world.now + 10))) == []
        assert (
            len(
                list(
                    profile.list_profile_effects(
                        replace(world, now=world.now + 8 + profile.PROFILE_LATE_ANSWER_SECONDS)
                    )
                )
            )
            == 1
        )

    def test_none_ends_it(self) -> None:
        world = stepped(steady(volatile()))
        assert stepped(world).plan.profile is not None
        assert world.state.profiling.until is not None
        assert stepped(replace(world, now=world.state.profiling.until + 1)).plan.profile is None
        assert stepped(change_members(world, round=2)).plan.profile is None

    def test_a_stop_ends_it(self) -> None:
        world = stepped(steady(volatile()))
        assert stepped(world.with_desired(world.desired.with_plan(stop=Stop.SUSPEND))).plan.profile is None

    def test_the_answer_goes_into_the_incident(self) -> None:
        done = stepped(told(stepped(steady(volatile()))))
        incident = done.state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding is not None
        assert (incident.finding.culprit, incident.finding.fault) == (FOUND.culprit, FaultClass.CODE)
        assert len(incident.finding.signal_kinds) == 2
        assert done.plan.profile is None
        assert list(profile.list_profile_effects(done)) == [SaveProfile("profile-101", "j-volatile")]

    def test_into_one_that_is_over_meanwhile_too(self) -> None:
        world = stepped(steady(volatile()))
        closed = world.with_desired(world.desired.with_incident(volatile(outcome=IncidentOutcome.INEFFECTIVE)))
        incident = stepped(told(closed)).state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding is not None

    def test_into_one_that_was_opened_meanwhile(self) -> None:
        world = stepped(steady(uniform=1.2))
        opened = world.with_desired(world.desired.with_incident(volatile(decided=NOW + 1)))
        (incident,) = evaluate_job(told(opened), build_policy()).observation.state.incidents.current
        assert incident.finding is not None
        assert incident.finding.culprit == FOUND.culprit

    def test_that_transfers_take_long_takes_no_link_its_name(self) -> None:
        transfers = Finding(FaultClass.NETWORK, "all_reduce on all ranks", (Signal(SignalKind.PROFILE, "waits"),))
        world = stepped(steady(uniform=1.2))
        opened = world.with_desired(
            world.desired.with_incident(volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=LINK, decided=NOW + 1))
        )
        shown = stepped(told(opened, replace(LOCALIZATION, finding=transfers)))
        finding = shown.state.incidents.current[0].finding
        assert finding is not None
        assert finding.culprit == LINK.culprit
        assert SignalKind.PROFILE in finding.signal_kinds

    def test_an_unknown_answer_takes_no_finding_away(self) -> None:
        known = Finding(FaultClass.HARDWARE, "rank 1", (Signal(SignalKind.TIMES, "slow"),))
        world = stepped(steady(volatile(finding=known)))
        incident = stepped(told(world, NOTHING)).state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding == known
        assert "is explained" in incident.evidence[-1]

    def test_where_there_was_no_incident_it_opens_one(self) -> None:
        asked = told(stepped(by_hand(steady())))
        thought = evaluate_job(asked, build_policy())
        (incident,) = thought.observation.state.incidents.current
        assert thought.failed_steps == ()
        assert (incident.cause, incident.class_, incident.remedy) == (
            IncidentCause.SLOW_STEPS,
            IncidentClass.PERFORMANCE,
            None,
        )
        assert incident.finding is not None
        assert incident.finding.culprit == FOUND.culprit
        assert incident.message == "steps take 0.220 s longer than usual: train.py:augment on rank 2"
        assert incident.slowdown_before == pytest.approx(0.6 / 0.38)
        assert thought.observation.plan.profile is None
        assert thought.observation.state.adaptation.fruitless_investigation is None, (
            "stragglers are looked for as before"
        )
        again = evaluate_job(thought.observation, build_policy())
        assert len(again.observation.state.incidents.current) == 1
        assert list(profile.list_profile_effects(thought.observation)) == [SaveProfile("profile-101", incident.name)]

    def test_nothing_slow_opens_none(self) -> None:
        thought = evaluate_job(told(stepped(by_hand(steady())), NOTHING), build_policy())
        assert thought.observation.state.incidents.current == ()
        assert thought.observation.plan.profile is None

    @pytest.mark.parametrize(("excess", "opened"), [(0.03, 0), (0.1, 1)])
    def test_little_that_nothing_explains_opens_none(self, excess: float, opened: int) -> None:
        unknown = replace(FOUND, fault=FaultClass.UNKNOWN, culprit="rank 0")
        little = replace(LOCALIZATION, finding=unknown, excess_seconds=excess)
        thought = evaluate_job(told(stepped(by_hand(steady())), little), build_policy())
        assert len(thought.observation.state.incidents.current) == opened


def test_the_sentences_say_what_is_missing() -> None:
    words = describe_localization(replace(LOCALIZATION, reported=3, remarks=("3 of 4 ranks have answered",)))
    assert "90% of that is explained" in words[0]
    assert words[1].startswith("Code: train.py:augment on rank 2; without it a step would take 0.200 s less")
    assert words[-1] == "3 of 4 ranks have answered"


def test_the_spec_names_the_sources() -> None:
    spec = JobSpec.parse({"template": {}, "detection": {"profile": {"sources": "Show"}}})
    assert spec.detection.profile.sources is SourceNaming.SHOW


def test_no_window_is_waited_for_longer_than_an_hour_however_long_steps_are_said_to_take() -> None:
    world = by_hand(steady())
    endless = replace(world, metrics=replace(world.metrics, step_seconds=1e9))
    begun = stepped(endless)
    assert begun.plan.profile is not None
    assert begun.state.profiling.until is not None
    assert begun.state.profiling.until <= begun.now + 3600.0
