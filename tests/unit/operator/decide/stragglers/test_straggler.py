"""When slowness is looked into, what the answers are worth, and what keeps a remedy back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.protocol.plan import EvidencePart, ProfileRequest, Stop, SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers.price import AccumulatedLoss
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Hysteresis
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import JobSpec, RemediationMode, Remedy, RequestedSyncMode
from pacekeeper_operator.decide.decision import Decision
from pacekeeper_operator.decide.stragglers import requested_sync_mode, revert_to_sync, straggler
from pacekeeper_operator.decide.stragglers.straggler import (
    FIRST_NEGATIVE_CACHE_SECONDS,
    MIN_EVIDENCE_REQUEST_SECONDS,
    SPARE_FIRST_SLOWDOWN,
    WAITING_HYSTERESIS,
    WAITING_INVESTIGATION_SECONDS,
    is_steady,
)
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    FruitlessInvestigation,
    HottestPlace,
    Incident,
    LinkCheck,
    LocalSgdChoice,
    PastIncident,
    StragglerInvestigation,
)
from pacekeeper_operator.state.job_metrics import MIN_WAITING_SHARE, JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_evidence,
    build_job,
    build_policy,
    build_training,
    change_members,
    change_worker,
)

STEPS = 32
CALM = JobMetrics(step_seconds=0.1, relative_time=1.0, wait_share=0.0, peer_slowdown=1.0)
SLOW = replace(CALM, relative_time=2.0)
WAITS = replace(CALM, wait_share=MIN_WAITING_SHARE)
LINK: dict[str, Any] = {"exposed": 0.25, "slow": 1.0}
"""Of windows in which all ranks wait for a link."""


def suspicion(ago: float = 10.0, **changes: Any) -> StragglerInvestigation:
    values: dict[str, Any] = {"since": NOW - ago, "step_seconds": 0.1, "request": "ask", "requested_at": NOW - ago}
    return StragglerInvestigation(**(values | changes))


def world(metrics: JobMetrics = CALM, of_suspicion: StragglerInvestigation | None = None, **plan: Any) -> Observation:
    """Four ranks that train in mode Sync."""
    found = change_members(replace(build_training(), metrics=metrics), training={"sync_mode": "Sync"})
    draft = found.desired.with_plan(**plan) if plan else found.desired
    return found.with_desired(draft.with_adaptation(investigation=of_suspicion))


def windows(slow: float = 2.0, exposed: float = 0.01, rank: int = 2, first: float = 0.08) -> tuple[Evidence, ...]:
    """Of four ranks with 0.07 s of work in a step, one of them slower; all wait for `exposed` seconds more."""
    own = [0.07 * (slow if position == rank else 1.0) for position in range(4)]
    step = max(own) + exposed
    return build_evidence(
        "ask",
        (
            RankWindow(
                position,
                tuple(range(STEPS)),
                (step,) * STEPS,
                (own[position],) * STEPS,
                (8,) * STEPS,
                sync_mode=SyncMode.SYNC,
                baseline_seconds=first,
            )
            for position in range(4)
        ),
    )


def answered(
    metrics: JobMetrics = SLOW,
    shown: Bottleneck | None = None,
    *,
    plan: dict[str, Any] | None = None,
    **of_windows: Any,
) -> Observation:
    """All ranks have answered the question that is out, for everything; `shown`: by the answer before."""
    asked = {"evidence_request": "ask", "evidence_parts": tuple(EvidencePart)}
    found = world(metrics, suspicion(last_bottleneck=shown), **{**asked, **(plan or {})})
    return replace(found, evidence=windows(**of_windows))


def suspected(found: Observation, **of_policy: Any) -> DesiredState:
    return straggler.update_investigation(found, build_policy(**of_policy))


def checked(found: Observation, **of_policy: Any) -> Decision:
    decision = straggler.check_stragglers(found, build_policy(**of_policy))
    assert decision is not None
    return decision


def reason(decision: Decision, remedy: Remedy) -> str:
    return next(price.reason for price in decision.remedies if price.name == remedy)


class TestSteady:
    def test_a_round_that_is_old_enough_and_undisturbed(self) -> None:
        assert is_steady(world())
        assert is_steady(change_members(world(), progress={"steps_in_round": 32}))
        assert not is_steady(change_members(world(), progress={"steps_in_round": 31}))
        long = replace(CALM, step_seconds=2.0)
        assert is_steady(change_members(world(long), progress={"steps_in_round": 8})), (
            "as many steps as their windows have"
        )
        assert not is_steady(change_members(world(long), progress={"steps_in_round": 7}))
        assert not is_steady(change_members(world(), start={"first_step_at": None}))
        assert not is_steady(world(replace(CALM, unreported_members=("j-w1-0",))))
        assert is_steady(world(replace(CALM, prometheus_error="away"))), "sidecars tell how ranks train"
        assert not is_steady(change_worker(world(), "j-w1-0", heartbeat={"training": {"sync_mode": "EDiT"}}))
        assert is_steady(change_members(world(), training={"sync_mode": ""})), "an older library does not tell"

    def test_while_an_incident_holds_the_job_up_it_is_not(self) -> None:
        def with_incident(**changes: Any) -> Observation:
            found = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW - 9, NOW - 8, NOW - 7)
            draft = world().desired.with_incident(replace(found, **changes))
            return world().with_desired(draft)

        assert not is_steady(with_incident())
        assert is_steady(with_incident(live=True))
        assert is_steady(with_incident(recovered=NOW))


class TestSuspect:
    @pytest.mark.parametrize(
        ("metrics", "asks"),
        [
            (CALM, False),
            (SLOW, True),
            (replace(CALM, relative_time=1.1), True),
            (replace(CALM, relative_time=1.09), False),
            (WAITS, True),
            (replace(CALM, wait_share=0.09), False),
            (JobMetrics(), False),
        ],
    )
    def test_what_looks_like_trouble(self, metrics: JobMetrics, asks: bool) -> None:
        assert bool(suspected(world(metrics)).plan.evidence_request) is asks

    def test_shares_whose_straggler_has_recovered(self) -> None:
        assert suspected(world(CALM, shares=(8, 8, 7, 9))).plan.evidence_request
        assert not suspected(world(CALM, shares=(8, 8, 8, 7))).plan.evidence_request, "as equal as can be"
        unknown = world(replace(CALM, relative_time=None), shares=(8, 8, 7, 9))
        assert not suspected(unknown).plan.evidence_request

    def test_a_job_that_is_over_is_left_as_it_is(self) -> None:
        found = world(CALM, suspicion())
        over = found.with_desired(found.desired.with_lifecycle(completed_at=NOW))
        assert suspected(over) is over.desired

    def test_one_that_is_told_to_stop_is_suspected_no_more(self) -> None:
        assert suspected(world(SLOW, suspicion(), stop=Stop.SUSPEND)).state.adaptation.investigation is None
        found = world(SLOW, stop=Stop.SUSPEND)
        assert suspected(found) is found.desired

    @pytest.mark.parametrize(("known", "request_"), [(suspicion(), ""), (None, "ask"), (suspicion(), "ask")])
    def test_in_a_young_round_all_questions_are_dropped(
        self, known: StragglerInvestigation | None, request_: str
    ) -> None:
        young = change_members(world(SLOW, known, evidence_request=request_), progress={"steps_in_round": 3})
        draft = suspected(young)
        assert (draft.state.adaptation.investigation, draft.plan.evidence_request) == (None, "")

    def test_without_any_nothing_is_written(self) -> None:
        young = change_members(world(SLOW), progress={"steps_in_round": 3})
        assert suspected(young) is young.desired

    def test_one_that_the_metrics_share_no_more_is_dropped_at_the_next_question(self) -> None:
        early = world(CALM, suspicion(MIN_EVIDENCE_REQUEST_SECONDS), evidence_request="ask")
        assert suspected(early) is early.desired
        late = suspected(world(CALM, suspicion(MIN_EVIDENCE_REQUEST_SECONDS + 1), evidence_request="ask"))
        assert (late.state.adaptation.investigation, late.plan.evidence_request) == (None, "")

    @pytest.mark.parametrize(("pace", "asks"), [(4.1, False), (3.9, True), (1.4, True)])
    def test_a_rank_that_has_recovered_since_it_was_asked_is_asked_again_at_once(self, pace: float, asks: bool) -> None:
        """After minutes of shares for a broken rank questions are rare. With one sample it looks slow by its fixed
        part, however well it is; what it said while it recovered settles nothing."""
        found = answered(replace(SLOW, relative_time=pace), slow=1.0, plan={"shares": (10, 10, 1, 11)})
        of_before = suspicion(
            600.0, requested_at=NOW - 20, requested_step=(found.progress.step or 0) - 16, requested_relative_time=7.0
        )
        draft = suspected(found.with_desired(found.desired.with_adaptation(investigation=of_before)))
        assert (draft.plan.evidence_request != "ask") is asks
        assert draft.state.adaptation.investigation is not None
        assert draft.state.adaptation.investigation.requested_relative_time == (pace if asks else 7.0)
        assert draft.state.adaptation.fruitless_investigation is None

    def test_no_answer_is_awaited_to_a_question_that_has_been_taken_back(self) -> None:
        """The plan has changed since: with it the question went, and the answers."""
        waits, asks = (suspected(world(SLOW, suspicion(2.0), evidence_request=out)) for out in ("ask", ""))
        assert waits.plan.evidence_request == "ask"
        assert asks.plan.evidence_request not in ("", "ask")

    def test_a_slow_rank_is_not_looked_into_in_vain_while_it_is_slow(self) -> None:
        both = replace(SLOW, wait_share=0.5)
        for metrics, vain in ((both, False), (SLOW, False), (WAITS, True)):
            draft = suspected(world(metrics, suspicion(WAITING_INVESTIGATION_SECONDS + 1), evidence_request="ask"))
            assert (draft.state.adaptation.fruitless_investigation is not None) is vain
            assert (draft.state.adaptation.investigation is None) is vain

    def test_longer_steps_are_another_trouble_only_of_a_job_that_waits(self) -> None:
        grown = replace(WAITS, step_seconds=0.2)
        again = suspected(world(grown, suspicion(WAITING_INVESTIGATION_SECONDS + 1), evidence_request="ask"))
        assert again.state.adaptation.investigation is not None
        assert again.state.adaptation.investigation.since == NOW
        slow = suspected(world(replace(SLOW, step_seconds=0.2), suspicion(), evidence_request="ask"))
        assert slow.state.adaptation.investigation is not None
        assert slow.state.adaptation.investigation.since == NOW - 10

    def test_what_was_looked_into_in_vain_rests_until_steps_grow_or_the_time_is_over(self) -> None:
        def asks(ago: float, step_seconds: float = 0.1) -> bool:
            found = world(replace(WAITS, step_seconds=step_seconds))
            vain = FruitlessInvestigation(NOW - ago, FIRST_NEGATIVE_CACHE_SECONDS, 0.1)
            return bool(
                suspected(
                    found.with_desired(found.desired.with_adaptation(fruitless_investigation=vain))
                ).plan.evidence_request
            )

        assert not asks(FIRST_NEGATIVE_CACHE_SECONDS)
        assert asks(FIRST_NEGATIVE_CACHE_SECONDS + 1)
        assert asks(1.0, step_seconds=0.12)

    @pytest.mark.parametrize(
        ("between", "asks"),
        [
            (CALM, True),
            (WAITS, False),
            (replace(CALM, wait_share=None), False),
            (replace(CALM, step_seconds=0.19), False),
            (replace(CALM, step_seconds=None), False),
        ],
        ids=["well again", "it waits on", "unknown", "hardly faster", "not timed"],
    )
    def test_a_trouble_that_was_over_in_between_is_looked_into_at_once(self, between: JobMetrics, asks: bool) -> None:
        """A job for which nothing may be done has as many incidents as troubles."""
        calm = world(between)
        vain = FruitlessInvestigation(NOW - 10.0, 8 * FIRST_NEGATIVE_CACHE_SECONDS, 0.2, forbidden=True)
        draft = suspected(
            calm.with_desired(calm.desired.with_adaptation(fruitless_investigation=vain)),
            mode=RemediationMode.RECOMMEND,
        )
        assert draft.state.adaptation.fruitless_investigation is not None
        assert draft.state.adaptation.fruitless_investigation.cool_down_seconds == vain.cool_down_seconds, (
            "the next look is as seldom, if nothing has changed"
        )
        again = world(replace(WAITS, step_seconds=0.2)).with_desired(draft)
        assert bool(suspected(again, mode=RemediationMode.RECOMMEND).plan.evidence_request) is asks

    @pytest.mark.parametrize(
        ("waiting", "goes_on"),
        [(0.99 * MIN_WAITING_SHARE, True), (0.9 * WAITING_HYSTERESIS * MIN_WAITING_SHARE, False)],
    )
    def test_waits_about_the_threshold_are_one_trouble_and_not_many(self, waiting: float, goes_on: bool) -> None:
        """Else a job that waits so by nature would be asked again and again, and never be left in peace."""
        less = replace(CALM, wait_share=waiting)
        assert suspected(world(less)).state.adaptation.investigation is None
        known = suspected(world(less, suspicion(), evidence_request="ask")).state.adaptation.investigation
        assert (known is not None) is goes_on

    def test_a_rank_that_was_slow_for_a_moment_does_not_bring_back_waits_that_were_looked_into(self) -> None:
        found = world(WAITS, suspicion(), evidence_request="ask")
        held = found.desired.with_adaptation(
            fruitless_investigation=FruitlessInvestigation(NOW - 20.0, FIRST_NEGATIVE_CACHE_SECONDS, 0.1)
        )
        draft = suspected(found.with_desired(held))
        assert (draft.state.adaptation.investigation, draft.plan.evidence_request) == (None, "")
        assert suspected(found).state.adaptation.investigation is not None

    def test_a_pace_that_has_been_dealt_with_raises_nothing_unless_another_rank_hides_behind_it(self) -> None:
        def asks(pace: float, behind: float | None = None, *, live: bool = False) -> bool:
            found = world(replace(CALM, relative_time=pace, peer_slowdown=behind))
            draft = found.desired.with_adaptation(suppressed_relative_time=2.0, suppressed_peer_slowdown=1.5)
            if live:
                open_ = Incident(
                    "i", IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, 1, "m", NOW, NOW, NOW, live=True
                )
                draft = draft.with_incident(open_)
            return bool(suspected(found.with_desired(draft)).plan.evidence_request)

        assert not asks(2.0)
        assert asks(2.2)
        assert not asks(2.0, 1.6)
        assert asks(2.0, 1.7)
        assert not asks(2.0, 1.7, live=True), "its own remedy is still measured"

    def test_what_was_only_recommended_is_looked_at_once_it_may_be_done(self) -> None:
        found = world()
        draft = found.desired.with_adaptation(
            fruitless_investigation=FruitlessInvestigation(NOW, 60.0, 0.1, forbidden=True), suppressed_relative_time=2.0
        )
        assert (
            suspected(
                found.with_desired(draft), mode=RemediationMode.RECOMMEND
            ).state.adaptation.fruitless_investigation
            is not None
        )
        assert suspected(found.with_desired(draft)).state.adaptation.fruitless_investigation is None

    def test_left_alone_is_what_the_metrics_show_now(self) -> None:
        adaptation = straggler.suppress_bottleneck(
            world(replace(SLOW, peer_slowdown=1.7)), forbidden=True
        ).state.adaptation
        assert (adaptation.suppressed_relative_time, adaptation.suppressed_peer_slowdown) == (2.0, 1.7)
        assert adaptation.fruitless_investigation is not None
        assert (
            adaptation.fruitless_investigation.at,
            adaptation.fruitless_investigation.cool_down_seconds,
            adaptation.fruitless_investigation.forbidden,
        ) == (
            NOW,
            FIRST_NEGATIVE_CACHE_SECONDS,
            True,
        )


def test_a_slow_rank_that_an_answer_does_not_name_costs_on_what_was_expected() -> None:
    """It has fewer samples, so that by a few steps it may be as its peers, by luck: the spare is due all the same."""
    known = AccumulatedLoss(5.0, NOW - 10.0, 1.07)

    def looked_at(metrics: JobMetrics, **of_windows: Any) -> AccumulatedLoss | None:
        found = answered(metrics, plan={"shares": (9, 9, 5, 9)}, **of_windows)
        return suspected(found.with_desired(found.desired.with_adaptation(loss=known))).state.adaptation.loss

    assert looked_at(SLOW, slow=1.0) == known
    assert looked_at(replace(CALM, wait_share=WAITS.wait_share), slow=1.0) is None, "no rank is slow any more"
    named = looked_at(SLOW, slow=2.0)
    assert named is not None
    assert named.slowdown > 1.5


def _alone(window: RankWindow) -> RankWindow:
    """The same own work in mode EDiT."""
    return replace(window, sync_mode=SyncMode.EDIT, transfers=(0.01,) * 4)


class TestBrokenInLocalSgd:
    def local(self, pace: float | None, known: StragglerInvestigation | None = None) -> Observation:
        found = world(replace(CALM, relative_time=pace), known, sync_mode=SyncMode.EDIT)
        return change_members(found, training={"sync_mode": "EDiT"})

    def test_a_rank_that_is_broken_is_suspected_since_it_was_seen_first(self) -> None:
        found = suspected(self.local(SPARE_FIRST_SLOWDOWN))
        assert found.state.adaptation.investigation == StragglerInvestigation(since=NOW, step_seconds=0.1, step=500)
        known = self.local(SPARE_FIRST_SLOWDOWN, suspicion())
        assert suspected(known) is known.desired

    def test_so_is_one_that_has_cost_as_much_as_a_spare(self) -> None:
        """A restart is taken for 5 s, and the spare's first steps for half of one more."""

        def with_loss(seconds: float, slowdown: float = 1.2, **changes: Any) -> Observation:
            found = self.local(1.5, **changes)
            return found.with_desired(found.desired.with_adaptation(loss=AccumulatedLoss(seconds, NOW, slowdown)))

        assert suspected(with_loss(5.5)).state.adaptation.investigation == StragglerInvestigation(
            since=NOW, step_seconds=0.1, step=500
        )
        assert suspected(with_loss(5.4)).state.adaptation.investigation is None
        assert suspected(with_loss(5.5, slowdown=1.004)).state.adaptation.investigation is None, (
            "it costs nothing any more"
        )
        known = with_loss(5.5, known=suspicion())
        asked = known.with_desired(known.desired.with_plan(evidence_request="ask"))
        alone = tuple(replace(e, windows=tuple(_alone(w) for w in e.windows)) for e in windows(slow=1.5))
        decision = checked(replace(asked, evidence=alone))
        assert (decision.remedy, decision.rank) == (Remedy.REPLACE_WORKER, 2)
        early = asked.with_desired(asked.desired.with_adaptation(loss=AccumulatedLoss(5.4, NOW, 1.2)))
        assert straggler.check_stragglers(replace(early, evidence=alone), build_policy()) is None

    @pytest.mark.parametrize("pace", [SPARE_FIRST_SLOWDOWN - 0.1, None])
    def test_one_that_is_not_is_not(self, pace: float | None) -> None:
        assert suspected(self.local(pace, suspicion())).state.adaptation.investigation is None
        calm = self.local(pace)
        assert suspected(calm) is calm.desired


class TestDiagnosis:
    def test_of_a_whole_answer_to_a_suspicion_of_a_steady_job(self) -> None:
        found = answered()
        diagnosis = straggler.diagnose_evidence(found)
        assert diagnosis is not None
        assert (diagnosis.bottleneck, diagnosis.culprits) == (Bottleneck.COMPUTE, (2,))
        assert straggler.diagnose_evidence(replace(found, evidence=found.evidence[:3])) is None
        assert straggler.diagnose_evidence(change_members(found, progress={"steps_in_round": 3})) is None
        calm = found.with_desired(found.desired.with_adaptation(investigation=None))
        assert straggler.diagnose_evidence(calm) is None

    def test_lengths_that_are_balanced_excuse_no_slow_rank(self) -> None:
        assert checked(answered(plan={"sequence_cost": (0.0, 0.0, 1.0)})).cause is IncidentCause.STRAGGLER


class TestDecision:
    def test_a_slow_rank_is_told_by_its_worker_and_pace(self) -> None:
        decision = checked(answered(), allow=frozenset(Remedy) - {Remedy.REPLACE_WORKER})
        assert decision.message == "rank 2 on j-w2-0 takes 2.00 × its peers' time a sample"
        assert (decision.worker, decision.node, decision.rank, decision.live) == ("j-w2-0", "node-2", 2, True)
        assert decision.remedy is Remedy.REBALANCE

    def test_one_that_is_given_up_or_unknown_is_dealt_with_already(self) -> None:
        found = answered()
        record = replace(found.state.placement.workers[2], leaving="its GPU fails")
        assert straggler.check_stragglers(found.with_desired(found.desired.with_worker(record)), build_policy()) is None
        others = tuple(worker for worker in found.state.placement.workers if worker.ordinal != 2)
        forgotten = found.with_desired(found.desired.with_placement(workers=others))
        assert straggler.check_stragglers(forgotten, build_policy()) is None

    def test_a_worker_whose_node_is_not_known_names_none(self) -> None:
        found = answered()
        record = replace(found.state.placement.workers[2], node="")
        assert checked(found.with_desired(found.desired.with_worker(record))).node is None

    def test_a_slow_link_concerns_no_rank(self) -> None:
        decision = checked(answered(WAITS, Bottleneck.COMMUNICATION, **LINK))
        assert decision.message.endswith("communication takes longer than in the job's first steady steps")
        assert (decision.rank, decision.worker, decision.node) == (None, None, None)
        assert decision.remedy is Remedy.LOCAL_SGD
        assert {price.name for price in decision.remedies} == {"LocalSGD"}, "no spare would mend it"

    def test_one_rank_communicates_with_nobody(self) -> None:
        found = answered(WAITS, Bottleneck.COMMUNICATION, **LINK)
        (first, *_), members = found.evidence, found.plan.members
        one = found.with_desired(found.desired.with_plan(members=members[:1]))
        assert straggler.check_stragglers(replace(found, evidence=(first,)), build_policy()) is None, (
            "others are to answer, too"
        )
        assert straggler.check_stragglers(replace(one, evidence=(first,)), build_policy()) is None

    def test_one_about_which_nothing_can_be_done_has_time_to_name_its_place(self) -> None:
        def decided(since: float, look: LinkCheck) -> Decision | None:
            found = answered(WAITS, Bottleneck.COMMUNICATION, **LINK)
            known = replace(suspicion(last_bottleneck=Bottleneck.COMMUNICATION), since=since, requested_at=NOW)
            found = change_members(
                found.with_desired(found.desired.with_adaptation(investigation=known, link_check=look)),
                training={"managed": False},
            )
            return straggler.check_stragglers(found, build_policy())

        nothing_hot = LinkCheck(NOW, "ask", conclusive=True)
        assert decided(NOW - 10, nothing_hot) is None
        assert decided(NOW - 16, nothing_hot) is not None
        assert decided(NOW - 10, replace(nothing_hot, conclusive=False)) is not None, "nobody tells of connections"
        hot = replace(nothing_hot, hottest=HottestPlace(SpotKind.LINK, 0, 1, 1e7), hot_places=("link 0 → 1",))
        assert decided(NOW - 10, hot) is not None

    def test_transfers_of_ranks_that_all_work_for_longer_say_nothing_once_a_window_is_to_tell_why(self) -> None:
        found = answered(WAITS, Bottleneck.COMMUNICATION, **LINK)
        asked = found.with_desired(found.desired.with_plan(profile=ProfileRequest("profile-9", 600)))
        assert straggler.check_stragglers(asked, build_policy()) is not None
        slower = tuple(
            replace(answer, windows=tuple(replace(w, baseline_own_seconds=0.05) for w in answer.windows))
            for answer in found.evidence
        )
        assert straggler.check_stragglers(replace(asked, evidence=slower), build_policy()) is None
        told = found.with_desired(found.desired.with_profiling(reporting_incident="j-slow-steps", round=1))
        assert straggler.check_stragglers(replace(told, evidence=slower), build_policy()) is None
        earlier = found.with_desired(found.desired.with_profiling(reporting_incident="j-slow-steps", round=0))
        assert straggler.check_stragglers(replace(earlier, evidence=slower), build_policy()) is not None

    def test_what_is_still_open_of_the_same_trouble_goes_on(self) -> None:
        def continues(cause: IncidentCause, rank: int | None) -> str:
            found = answered()
            open_ = Incident("open", cause, IncidentClass.PERFORMANCE, 1, "m", NOW, NOW, NOW, rank=rank, live=True)
            return checked(found.with_desired(found.desired.with_incident(open_))).continued_incident

        assert continues(IncidentCause.STRAGGLER, 2) == "open"
        assert continues(IncidentCause.STRAGGLER, 1) == ""
        assert continues(IncidentCause.CRASH, 2) == ""


class TestWhyNotAMode:
    def why(self, **changes: Any) -> str:
        spec = replace(build_job().spec, **changes.pop("spec", {}))
        found = answered(WAITS, changes.pop("shown", Bottleneck.COMMUNICATION), **LINK)
        found = replace(found, job=replace(found.job, spec=spec))
        adaptation = changes.pop("adaptation", {})
        found = found.with_desired(found.desired.with_adaptation(**adaptation))
        found = change_members(found, **changes)
        choice, action = straggler._weigh_remedies(found, build_policy(), _diagnosis(found), None)
        price = next(price for price in choice.prices if price.option.remedy == Remedy.LOCAL_SGD)
        assert (action is None) is bool(price.option.refused)
        return price.option.refused

    def test_there_is_nothing_against_it(self) -> None:
        assert self.why() == ""

    def test_the_spec_wants_another(self) -> None:
        assert self.why(spec={"sync_mode": RequestedSyncMode.SYNC}) == "spec.syncMode is Sync"

    def test_one_answer_is_not_enough(self) -> None:
        assert self.why(shown=None) == "the next steps have to show the same first"
        assert self.why(shown=Bottleneck.VOLATILE) == "the next steps have to show the same first"

    def test_the_ranks_do_not_know_modes(self) -> None:
        assert self.why(training={"sync_mode": ""}).startswith("the ranks do not report the mode that they train in")

    def test_the_script_cannot_be_steered(self) -> None:
        assert self.why(training={"managed": False}).startswith("the script does not use the library")

    def test_what_ranks_do_together_is_waited_for_where_the_script_is_only_watched(self) -> None:
        found = change_members(answered(plan={"evidence_parts": (EvidencePart.WINDOWS,)}), training={"managed": False})
        assert straggler.diagnose_evidence(found) is None
        assert EvidencePart.OPERATIONS in suspected(found).plan.evidence_parts

    def test_the_ranks_have_refused_it_before(self) -> None:
        assert self.why(adaptation={"mode_refusal": "no dimension"}) == "the ranks refused it: no dimension"

    def test_it_has_changed_lately(self) -> None:
        lately = Hysteresis(first=15.0).with_change(NOW - 5)
        assert self.why(adaptation={"mode_changes": lately}).endswith("stays for another 10 s")


def _diagnosis(found: Observation) -> Any:
    diagnosis = straggler.diagnose_evidence(found)
    assert diagnosis is not None
    return diagnosis


def test_out_of_a_local_sgd_mode_there_is_the_way_back_alone() -> None:
    found = answered()
    diagnosis = _diagnosis(found)
    assert straggler._list_strategies(found, diagnosis)
    local = found.with_desired(found.desired.with_plan(sync_mode=SyncMode.EDIT))
    assert straggler._list_strategies(local, diagnosis) == ()


class TestWhyNotASpare:
    @pytest.mark.parametrize(
        ("past", "moves"),
        [
            ((), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w9-0", 9.0)), False),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w2-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 1, "j-w9-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.HANG, 2, "j-w9-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w9-0", 4000.0)), True),
        ],
        ids=["never", "on two others", "here", "another rank", "another trouble", "long ago"],
    )
    def test_it_was_slow_wherever_it_was(
        self, past: tuple[tuple[IncidentCause, int, str, float], ...], moves: bool
    ) -> None:
        found = answered(replace(CALM, relative_time=6.0), slow=6.0)
        known = tuple(
            PastIncident(cause, NOW - ago, 5.0, rank=rank, worker=worker) for cause, rank, worker, ago in past
        )
        found = found.with_desired(found.desired.with_incidents(past=known))
        assert ("too: look at the script" in self.refusal(found)) is not moves

    @pytest.mark.parametrize(("pace", "is_slow"), [(6.0, True), (3.5, True), (3.4, False)])
    def test_it_has_been_getting_well_since_it_was_asked(self, pace: float, is_slow: bool) -> None:
        """It took six times its peers' time, by its answer; the figures are of now."""
        found = answered(replace(CALM, relative_time=pace), slow=6.0)
        assert (self.refusal(found) == "no rank is so slow any more") is not is_slow

    @pytest.mark.parametrize(("since", "is_slow"), [(0, True), (15, True), (16, False)])
    def test_in_half_a_window_no_mean_shows_that_it_has(self, since: int, is_slow: bool) -> None:
        """As it has just become slow, most of the steps that the figures are of are older than that."""
        found = answered(replace(CALM, relative_time=2.0), slow=6.0)
        asked = suspicion(requested_step=(found.progress.step or 0) - since)
        found = found.with_desired(found.desired.with_adaptation(investigation=asked))
        assert (self.refusal(found) == "no rank is so slow any more") is not is_slow

    def refusal(self, found: Observation) -> str:
        choice, _ = straggler._weigh_remedies(found, build_policy(), _diagnosis(found), 2)
        return next(price.option.refused for price in choice.prices if price.option.remedy == Remedy.REPLACE_WORKER)


class TestWayBack:
    def local(self, **plan: Any) -> Observation:
        found = world(CALM, None, **{"sync_mode": SyncMode.ASYNC_EDIT, **plan})
        chosen = LocalSgdChoice(NOW - 60, Bottleneck.COMMUNICATION, "the link is slow", "i")
        return change_members(
            found.with_desired(found.desired.with_adaptation(local_sgd=chosen)), training={"sync_mode": "AsyncEDiT"}
        )

    def test_is_asked_for_now_and_then(self) -> None:
        assert revert_to_sync.consider_revert_to_sync(self.local(), build_policy()).plan.evidence_request

    def test_not_of_a_job_that_stops_nor_of_one_in_no_such_mode(self) -> None:
        stopping = self.local(stop=Stop.SUSPEND)
        assert revert_to_sync.consider_revert_to_sync(stopping, build_policy()) is stopping.desired
        assert revert_to_sync.consider_revert_to_sync(world(), build_policy()).plan == world().plan

    def test_ranks_that_cannot_follow_are_back_in_sync_at_once(self) -> None:
        draft = revert_to_sync.consider_revert_to_sync(
            change_members(self.local(), training={"refused": "no dimension"}), build_policy()
        )
        assert (draft.plan.sync_mode, draft.state.adaptation.mode_refusal) == (SyncMode.SYNC, "no dimension")

    def test_an_answer_that_nobody_asked_for_or_that_is_not_whole_is_none(self) -> None:
        found = self.local(evidence_request="ask")
        part = replace(found, evidence=windows()[:3])
        draft = revert_to_sync.consider_revert_to_sync(part, build_policy())
        assert draft.state.adaptation.local_sgd is not None
        assert draft.plan.evidence_request.startswith("revert-to-sync"), "asked again"
        unasked = replace(self.local(), evidence=windows())
        assert revert_to_sync.consider_revert_to_sync(unasked, build_policy()).plan.evidence_request.startswith(
            "revert-to-sync"
        )
        whole = replace(found, evidence=windows())
        assert revert_to_sync.consider_revert_to_sync(whole, build_policy()).plan.evidence_request == "", "judged"

    @pytest.mark.parametrize(
        ("trouble", "mode", "transfer", "seconds"),
        [
            (Bottleneck.COMMUNICATION, SyncMode.ASYNC_EDIT, 0.6, 20.0),
            (Bottleneck.COMMUNICATION, SyncMode.ASYNC_EDIT, 0.01, 10.0),
            (Bottleneck.VOLATILE, SyncMode.ASYNC_EDIT, 0.6, 20.0),
            (Bottleneck.COMMUNICATION, SyncMode.EDIT, 0.6, 10.0),
        ],
        ids=["slow link", "well again", "slow in turns", "by steps"],
    )
    def test_where_the_trouble_stays_synchronisations_get_rarer(
        self, trouble: Bottleneck, mode: SyncMode, transfer: float, seconds: float
    ) -> None:
        found = self.local(evidence_request="ask", sync_seconds=10.0, sync_mode=mode)
        chosen = LocalSgdChoice(NOW - 100, trouble, "r", "i")
        found = change_members(
            found.with_desired(found.desired.with_adaptation(local_sgd=chosen)), training={"sync_mode": mode.value}
        )
        evidence = tuple(
            replace(each, windows=tuple(replace(w, sync_mode=mode, transfers=(transfer,) * 4) for w in each.windows))
            for each in windows(slow=1.0)
        )
        draft = revert_to_sync.consider_revert_to_sync(replace(found, evidence=evidence), build_policy())
        assert draft.plan.sync_mode is mode
        assert draft.plan.sync_seconds == pytest.approx(seconds, rel=0.1)
        assert draft.plan.version == found.plan.version + 1

    def test_slow_ranks_that_come_and_go_are_over_when_all_of_many_steps_say_so(self) -> None:
        def answers(trouble: Bottleneck, *steps: int) -> Observation:
            found = self.local(evidence_request="ask")
            chosen = LocalSgdChoice(NOW - 600, trouble, "r", "i")
            found = found.with_desired(found.desired.with_adaptation(local_sgd=chosen))
            alike = tuple(
                replace(
                    each, windows=tuple(replace(w, sync_mode="AsyncEDiT", transfers=(0.01,) * 4) for w in each.windows)
                )
                for each in windows(slow=1.0)
            )
            for step in steps:
                draft = found.desired.with_plan(evidence_request="ask")
                found = change_members(replace(found.with_desired(draft), evidence=alike), progress={"step": step})
                found = found.with_desired(revert_to_sync.consider_revert_to_sync(found, build_policy()))
            return found

        assert answers(Bottleneck.COMMUNICATION, 500, 501).plan.sync_mode is SyncMode.SYNC, "two answers"
        assert answers(Bottleneck.VOLATILE, 500, 501, 531).plan.sync_mode is SyncMode.ASYNC_EDIT
        assert answers(Bottleneck.VOLATILE, 500, 501, 532).plan.sync_mode is SyncMode.SYNC


class TestWish:
    @pytest.mark.parametrize("end", ["stop", "over"])
    def test_a_job_that_ends_changes_no_mode(self, end: str) -> None:
        spec: JobSpec = replace(build_job().spec, sync_mode=RequestedSyncMode.EDIT)
        found = replace(world(), job=replace(build_job(), spec=spec))
        assert requested_sync_mode.apply_requested_sync_mode(found, build_policy()).plan.sync_mode is SyncMode.EDIT
        stop, over = found.desired.with_plan(stop=Stop.SUSPEND), found.desired.with_lifecycle(completed_at=NOW)
        ending = found.with_desired(stop if end == "stop" else over)
        assert requested_sync_mode.apply_requested_sync_mode(ending, build_policy()) is ending.desired
