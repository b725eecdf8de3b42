"""When ranks are profiled, which answers are awaited, and where the finding is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.profiling.localize import Explanation, Localization, describe_localization
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.protocol.requests import SourceNaming
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import DetectionSpec, JobSpec, ProfileSpec
from pacekeeper_operator.decide.effects import LocalizeProfile, SaveProfile
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.stragglers import profile
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import Incident, StragglerInvestigation
from pacekeeper_operator.state.effect_results import LocalizedProfile
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.job_requests import ProfileWindow
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


def build_volatile(**changes: Any) -> Incident:
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


def build_steady(*incidents: Incident, uniform: float = 1.0, **changes: Any) -> Observation:
    observation = build_training(**{"metrics": replace(STEADY, uniform_slowdown=uniform), **changes})
    return observation.with_desired(observation.desired.with_incidents(current=incidents))


def with_investigation(observation: Observation, bottleneck: Bottleneck | None) -> Observation:
    return observation.with_desired(
        observation.desired.with_adaptation(investigation=StragglerInvestigation(NOW - 5, last_bottleneck=bottleneck))
    )


def apply_step(observation: Observation, **changes: Any) -> Observation:
    return observation.with_desired(profile.advance_profile_window(observation, build_policy(**changes)))


def get_window(observation: Observation) -> ProfileWindow:
    assert observation.requests.profile_window is not None
    return observation.requests.profile_window


def get_name(observation: Observation) -> str:
    assert observation.requests.profile is not None
    return observation.requests.profile.name


def with_manual_request(observation: Observation, request: str = "1") -> Observation:
    return replace(observation, job=replace(observation.job, profile_request=request))


def with_answer(observation: Observation, localization: Localization = LOCALIZATION) -> Observation:
    assert observation.requests.profile is not None
    return replace(
        observation,
        profile_answers=4,
        localized_profile=LocalizedProfile(observation.requests.profile.name, localization, "{}"),
    )


class TestBegin:
    def test_no_window_begins_while_the_job_is_healthy(self) -> None:
        observation = build_steady()
        assert profile.advance_profile_window(observation, build_policy()) == observation.desired

    def test_a_window_begins_for_an_incident_that_names_no_function(self) -> None:
        requested = apply_step(build_steady(build_volatile()))
        window = requested.requests.profile
        assert window is not None
        assert (window.first_step, window.steps, window.sources) == (562, 80, SourceNaming.HASH)
        assert get_window(requested).incident == "j-volatile"
        assert requested.desired.is_stored_as(build_steady(build_volatile()).desired), "nothing is written"

    def test_the_window_is_shorter_for_long_steps(self) -> None:
        window = apply_step(build_steady(build_volatile(), metrics=replace(STEADY, step_seconds=5.0))).requests.profile
        assert window is not None
        assert (window.first_step, window.steps) == (504, 32)

    @pytest.mark.parametrize(
        "incident",
        [
            build_volatile(finding=FOUND),
            build_volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=FOUND),
            build_volatile(cause=IncidentCause.CRASH),
            build_volatile(round=0),
        ],
        ids=["names one", "names its cause", "not slowness", "another round"],
    )
    def test_no_window_begins_for_other_incidents(self, incident: Incident) -> None:
        assert apply_step(build_steady(incident)).requests.profile is None

    def test_one_window_begins_per_incident(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        ended = observation.with_desired(profile._end_window(observation.desired))
        assert apply_step(ended).requests.profile is None

    def test_a_window_begins_for_a_uniform_slowdown_and_again_only_if_it_grows(self) -> None:
        observation = apply_step(build_steady(uniform=1.2))
        assert observation.requests.profile is not None
        ended = observation.with_desired(profile._end_window(observation.desired))
        assert apply_step(ended).requests.profile is None
        slower = replace(ended, metrics=replace(STEADY, uniform_slowdown=1.35))
        assert apply_step(slower).requests.profile is not None

    @pytest.mark.parametrize(
        "changes", [{"relative_time": 1.5}, {"uniform_slowdown": 1.09}, {"uniform_slowdown": None}], ids=str
    )
    def test_no_window_begins_without_a_uniform_slowdown(self, changes: dict[str, Any]) -> None:
        observation = build_steady(metrics=replace(STEADY, **({"uniform_slowdown": 1.2} | changes)))
        assert apply_step(observation).requests.profile is None

    def test_a_window_waits_for_the_investigation_unless_it_found_no_bottleneck(self) -> None:
        observation = build_steady(uniform=1.2)
        assert apply_step(with_investigation(observation, None)).requests.profile is None
        assert apply_step(with_investigation(observation, Bottleneck.COMMUNICATION)).requests.profile is None
        assert apply_step(with_investigation(observation, Bottleneck.NONE)).requests.profile is not None

    @pytest.mark.parametrize("cause", [IncidentCause.UNEVEN_LENGTHS, IncidentCause.GARBAGE_COLLECTION])
    def test_an_incident_with_a_known_cause_explains_the_uniform_slowdown(self, cause: IncidentCause) -> None:
        known_cause = build_volatile(name="j-named", cause=cause, finding=DATA)
        explained = apply_step(build_steady(known_cause, uniform=1.4))
        assert (explained.requests.profile, explained.state.profiling.uniform_slowdown) == (None, 1.4)
        slower = replace(explained, metrics=replace(STEADY, uniform_slowdown=1.6))
        assert apply_step(slower).requests.profile is None, "the open incident explains the slowdown"
        ended = slower.with_desired(slower.desired.with_incidents(current=()))
        assert apply_step(ended).requests.profile is not None

    @pytest.mark.parametrize("cause", [IncidentCause.UNEVEN_LENGTHS, IncidentCause.GARBAGE_COLLECTION])
    def test_an_incident_with_a_known_cause_keeps_its_finding(self, cause: IncidentCause) -> None:
        """Ranks that wait for uneven ranks wait in collectives, which is not caused by a link."""
        observation = apply_step(build_steady(uniform=1.4))
        opened = build_volatile(name="j-named", cause=cause, finding=DATA, decided=observation.now)
        waits_in_collectives = replace(
            LOCALIZATION, finding=replace(FOUND, fault=FaultClass.NETWORK, culprit="all_reduce")
        )
        answered = with_answer(
            observation.with_desired(observation.desired.with_incidents(current=(opened,))), waits_in_collectives
        )
        assert profile.check_profile(answered, build_policy()) is None
        (incident,) = apply_step(answered).state.incidents.current
        assert incident.finding == DATA
        assert incident.evidence == describe_localization(waits_in_collectives)

    def test_a_window_begins_if_the_own_work_of_all_ranks_takes_longer(self) -> None:
        """An example is a processor quota on all nodes, which delays one rank after the other."""
        observation = with_investigation(
            build_steady(metrics=replace(STEADY, uniform_slowdown=1.5, relative_time=1.4)), Bottleneck.COMMUNICATION
        )
        assert apply_step(observation).requests.profile is None
        slow = RankWindow(0, (1, 2), (0.1, 0.1), (0.06, 0.06), (0, 0), baseline_own_seconds=0.04)
        assert (
            apply_step(replace(observation, evidence=(Evidence("ask", "w", 1, (slow,)),))).requests.profile is not None
        )

    def test_a_window_begins_for_slow_work_without_an_incident(self) -> None:
        """An expensive remedy waits until the loss is worth it, and a job may have none. The cause is reported."""
        observation = with_investigation(build_steady(), Bottleneck.COMPUTE)
        requested = apply_step(observation)
        assert requested.requests.profile is not None
        assert apply_step(requested.with_desired(profile._end_window(requested.desired))).requests.profile is None, (
            "once a round"
        )
        named = build_volatile(cause=IncidentCause.STRAGGLER, finding=FOUND)
        assert apply_step(with_investigation(build_steady(named), Bottleneck.COMPUTE)).requests.profile is None

    @pytest.mark.parametrize(
        ("seconds", "uniform", "is_requested"), [(5, 1.5, False), (12, 1.5, True), (12, 1.05, False), (12, None, False)]
    )
    def test_a_long_uniform_slowdown_begins_a_window_for_any_bottleneck(
        self, seconds: float, uniform: float | None, is_requested: bool
    ) -> None:
        """An example is a quota on one node, which appears as slow work at times and as slow links at others."""
        observation = build_steady(metrics=replace(STEADY, relative_time=1.8, uniform_slowdown=uniform))
        investigation = StragglerInvestigation(NOW - seconds, last_bottleneck=Bottleneck.COMMUNICATION)
        observation = observation.with_desired(observation.desired.with_adaptation(investigation=investigation))
        assert (apply_step(observation).requests.profile is not None) == is_requested

    def test_a_named_slow_link_explains_the_uniform_slowdown(self) -> None:
        explained = apply_step(
            build_steady(build_volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=LINK), uniform=1.5)
        )
        assert explained.requests.profile is None
        ended = explained.with_desired(explained.desired.with_incidents(current=()))
        assert apply_step(ended).requests.profile is None
        slower = replace(ended, metrics=replace(STEADY, uniform_slowdown=1.8))
        assert apply_step(slower).requests.profile is not None
        without_culprit = build_volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=replace(LINK, culprit=""))
        assert apply_step(build_steady(without_culprit)).requests.profile is not None

    def test_beyond_the_hourly_budget_only_a_manual_request_begins_a_window(self) -> None:
        observation = build_steady(build_volatile())
        used_budget = observation.with_desired(
            observation.desired.with_profiling(requested_times=(NOW - 3000, NOW - 10))
        )
        assert apply_step(used_budget).requests.profile is None
        assert apply_step(used_budget, profiles_per_hour=3).requests.profile is not None
        assert apply_step(with_manual_request(used_budget)).requests.profile is not None
        old = observation.with_desired(observation.desired.with_profiling(requested_times=(NOW - 3700, NOW - 10)))
        assert apply_step(old).requests.profile is not None

    def test_each_value_of_a_manual_request_begins_one_window_in_any_mode(self) -> None:
        observation = build_steady()
        local_sgd = observation.with_desired(observation.desired.with_plan(sync_mode=SyncMode.EDIT))
        requested = apply_step(with_manual_request(local_sgd))
        assert requested.requests.profile is not None
        ended = requested.with_desired(profile._end_window(requested.desired))
        assert apply_step(ended).requests.profile is None
        assert apply_step(with_manual_request(ended, "2")).requests.profile is not None

    def test_no_window_begins_before_all_ranks_train(self) -> None:
        assert (
            apply_step(
                with_manual_request(change_members(build_steady(), start={"first_step_at": None}))
            ).requests.profile
            is None
        )

    def test_the_job_may_show_its_sources(self) -> None:
        detection = DetectionSpec(profile=ProfileSpec(SourceNaming.SHOW))
        observation = build_steady(build_volatile())
        with_sources = replace(
            observation, job=replace(observation.job, spec=replace(observation.job.spec, detection=detection))
        )
        window = apply_step(with_sources).requests.profile
        assert window is not None
        assert window.sources is SourceNaming.SHOW


class TestAnswers:
    def test_complete_answers_are_localized_at_once(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        assert observation.requests.profile is not None
        assert (
            list(
                profile.list_profile_effects(
                    replace(observation, profile_answers=3, last_profile_answer_at=observation.now)
                )
            )
            == []
        )
        assert list(profile.list_profile_effects(replace(observation, profile_answers=4))) == [
            LocalizeProfile(observation.requests.profile.name, 4)
        ]

    def test_partial_answers_are_localized_at_the_deadline_or_the_end_of_the_round(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        until = get_window(observation).until
        observation = replace(observation, profile_answers=3, last_profile_answer_at=until)
        late = replace(observation, now=until + 1)
        assert len(list(profile.list_profile_effects(late))) == 1
        assert apply_step(late).requests.profile is not None
        assert len(list(profile.list_profile_effects(change_members(observation, round=2)))) == 1

    def test_late_answers_are_not_awaited(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        observation = replace(observation, profile_answers=3, last_profile_answer_at=observation.now + 8)
        assert get_window(observation).until > observation.now + 20
        assert list(profile.list_profile_effects(replace(observation, now=observation.now + 10))) == []
        assert (
            len(
                list(
                    profile.list_profile_effects(
                        replace(observation, now=observation.now + 8 + profile.PROFILE_LATE_ANSWER_SECONDS)
                    )
                )
            )
            == 1
        )

    def test_a_window_without_answers_ends(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        assert apply_step(observation).requests.profile is not None
        assert apply_step(replace(observation, now=get_window(observation).until + 1)).requests.profile is None
        assert apply_step(change_members(observation, round=2)).requests.profile is None

    def test_a_stop_ends_the_window(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        assert (
            apply_step(observation.with_desired(observation.desired.with_plan(stop=Stop.SUSPEND))).requests.profile
            is None
        )

    def test_a_new_leader_abandons_an_open_window_and_requests_another(self) -> None:
        """Answers may have reached the leader before it. They name a window that the new leader does not know."""
        before = with_answer(replace(apply_step(build_steady(build_volatile())), nonce="a"))
        stored = state_codec.decode_state(state_codec.encode_state(before.desired, "j"), "j").desired
        after = apply_step(replace(before, now=NOW + 1, nonce="b").with_desired(stored))
        assert get_name(after) != get_name(before)
        assert get_window(after).incident == "j-volatile"
        assert list(profile.list_profile_effects(replace(after, profile_answers=0))) == []
        assert apply_step(after).requests.profile == after.requests.profile, "the old result is not for it"

    @pytest.mark.parametrize("is_manual", [False, True])
    def test_a_window_is_recorded_once_it_has_ended(self, is_manual: bool) -> None:
        steady = build_steady(build_volatile())
        opened = apply_step(with_manual_request(steady) if is_manual else steady)
        assert opened.desired.is_stored_as(steady.desired)
        ended = apply_step(replace(opened, now=get_window(opened).until + 1)).state.profiling
        assert ended.requested_times == (() if is_manual else (NOW,))
        assert (ended.investigated, ended.followed_annotation) == (("j-volatile",), "1" if is_manual else "")
        assert ended.round == 1

    def test_the_finding_is_recorded_in_the_incident(self) -> None:
        requested = apply_step(build_steady(build_volatile()))
        answered = apply_step(with_answer(requested))
        incident = answered.state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding is not None
        assert (incident.finding.culprit, incident.finding.fault) == (FOUND.culprit, FaultClass.CODE)
        assert len(incident.finding.signal_kinds) == 2
        assert answered.requests.profile is None
        assert list(profile.list_profile_effects(answered)) == [SaveProfile(get_name(requested), "j-volatile")]

    def test_the_finding_is_recorded_in_a_closed_incident(self) -> None:
        observation = apply_step(build_steady(build_volatile()))
        closed = observation.with_desired(
            observation.desired.with_incident(build_volatile(outcome=IncidentOutcome.INEFFECTIVE))
        )
        incident = apply_step(with_answer(closed)).state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding is not None

    def test_the_finding_is_recorded_in_an_incident_opened_during_the_window(self) -> None:
        observation = apply_step(build_steady(uniform=1.2))
        opened = observation.with_desired(observation.desired.with_incident(build_volatile(decided=NOW + 1)))
        (incident,) = evaluate_job(with_answer(opened), build_policy()).observation.state.incidents.current
        assert incident.finding is not None
        assert incident.finding.culprit == FOUND.culprit

    def test_slow_transfers_in_the_profile_do_not_replace_a_named_link(self) -> None:
        transfers = Finding(FaultClass.NETWORK, "all_reduce on all ranks", (Signal(SignalKind.PROFILE, "waits"),))
        observation = apply_step(build_steady(uniform=1.2))
        opened = observation.with_desired(
            observation.desired.with_incident(
                build_volatile(cause=IncidentCause.SLOW_COMMUNICATION, finding=LINK, decided=NOW + 1)
            )
        )
        answered = apply_step(with_answer(opened, replace(LOCALIZATION, finding=transfers)))
        finding = answered.state.incidents.current[0].finding
        assert finding is not None
        assert finding.culprit == LINK.culprit
        assert SignalKind.PROFILE in finding.signal_kinds

    def test_an_unknown_cause_does_not_replace_the_finding(self) -> None:
        finding = Finding(FaultClass.HARDWARE, "rank 1", (Signal(SignalKind.TIMES, "slow"),))
        observation = apply_step(build_steady(build_volatile(finding=finding)))
        incident = apply_step(with_answer(observation, NOTHING)).state.incidents.find("j-volatile")
        assert incident is not None
        assert incident.finding == finding
        assert "is explained" in incident.evidence[-1]

    def test_a_manual_window_opens_an_incident(self) -> None:
        requested = with_answer(apply_step(with_manual_request(build_steady())))
        result = evaluate_job(requested, build_policy())
        (incident,) = result.observation.state.incidents.current
        assert result.failed_steps == ()
        assert (incident.cause, incident.class_, incident.remedy) == (
            IncidentCause.SLOW_STEPS,
            IncidentClass.PERFORMANCE,
            None,
        )
        assert incident.finding is not None
        assert incident.finding.culprit == FOUND.culprit
        assert incident.message == "steps take 0.220 s longer than usual: train.py:augment on rank 2"
        assert incident.slowdown_before == pytest.approx(0.6 / 0.38)
        assert result.observation.requests.profile is None
        assert result.observation.state.adaptation.fruitless_investigation is None, (
            "stragglers are investigated as before"
        )
        next_result = evaluate_job(result.observation, build_policy())
        assert len(next_result.observation.state.incidents.current) == 1
        assert list(profile.list_profile_effects(result.observation)) == [
            SaveProfile(get_name(requested), incident.name)
        ]

    def test_a_window_without_slowness_opens_no_incident(self) -> None:
        result = evaluate_job(with_answer(apply_step(with_manual_request(build_steady())), NOTHING), build_policy())
        assert result.observation.state.incidents.current == ()
        assert result.observation.requests.profile is None

    @pytest.mark.parametrize(("excess", "opened"), [(0.03, 0), (0.1, 1)])
    def test_a_small_unexplained_excess_opens_no_incident(self, excess: float, opened: int) -> None:
        unknown = replace(FOUND, fault=FaultClass.UNKNOWN, culprit="rank 0")
        localization = replace(LOCALIZATION, finding=unknown, excess_seconds=excess)
        result = evaluate_job(
            with_answer(apply_step(with_manual_request(build_steady())), localization), build_policy()
        )
        assert len(result.observation.state.incidents.current) == opened


def test_the_description_names_missing_answers() -> None:
    sentences = describe_localization(replace(LOCALIZATION, reported=3, remarks=("3 of 4 ranks have answered",)))
    assert "90% of that is explained" in sentences[0]
    assert sentences[1].startswith("Code: train.py:augment on rank 2; without it a step would take 0.200 s less")
    assert sentences[-1] == "3 of 4 ranks have answered"


def test_the_spec_names_the_sources() -> None:
    spec = JobSpec.parse({"template": {}, "detection": {"profile": {"sources": "Show"}}})
    assert spec.detection.profile.sources is SourceNaming.SHOW


def test_the_wait_for_a_window_is_limited_to_an_hour() -> None:
    observation = with_manual_request(build_steady())
    endless = replace(observation, metrics=replace(observation.metrics, step_seconds=1e9))
    started = apply_step(endless)
    assert started.requests.profile is not None
    assert get_window(started).until <= started.now + 3600.0
