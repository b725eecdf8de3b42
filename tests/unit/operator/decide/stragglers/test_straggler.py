"""When slowness is investigated, how answers are evaluated, and what prevents a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest, ProfileRequest
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
    Incident,
    LocalSgdChoice,
    PastIncident,
    StragglerInvestigation,
)
from pacekeeper_operator.state.job_metrics import MIN_WAITING_SHARE, JobMetrics
from pacekeeper_operator.state.job_requests import HottestPlace, InvestigationRequest, LinkCheck
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
HEALTHY = JobMetrics(step_seconds=0.1, relative_time=1.0, wait_share=0.0, peer_slowdown=1.0)
SLOW = replace(HEALTHY, relative_time=2.0)
WAITING = replace(HEALTHY, wait_share=MIN_WAITING_SHARE)
ASKED = EvidenceRequest("ask")
LINK: dict[str, Any] = {"exposed": 0.25, "slow": 1.0}
"""Parameters of windows in which all ranks wait for a link."""


def build_investigation(age_seconds: float = 10.0, **changes: Any) -> StragglerInvestigation:
    return StragglerInvestigation(**({"since": NOW - age_seconds, "step_seconds": 0.1} | changes))


def with_last_request(found: Observation, **changes: Any) -> Observation:
    """Return the observation of a leader that has requested evidence, by default when the investigation began."""
    investigation = found.state.adaptation.investigation
    assert investigation is not None
    request = InvestigationRequest(**({"requested_at": investigation.since} | changes))
    return found.with_desired(found.desired.with_requests(investigation=request))


def build_sync(
    metrics: JobMetrics = HEALTHY,
    investigation: StragglerInvestigation | None = None,
    *,
    evidence: EvidenceRequest | None = None,
    **plan: Any,
) -> Observation:
    """Build a job of four ranks that train in mode Sync. If it is investigated, this leader has requested evidence."""
    found = change_members(replace(build_training(), metrics=metrics), training={"sync_mode": "Sync"})
    desired = found.desired.with_plan(**plan) if plan else found.desired
    found = found.with_desired(desired.with_adaptation(investigation=investigation).with_requests(evidence=evidence))
    return found if investigation is None else with_last_request(found)


def build_windows(slow: float = 2.0, exposed: float = 0.01, rank: int = 2, first: float = 0.08) -> tuple[Evidence, ...]:
    """Build windows of four ranks with 0.07 s of work in a step, one of them slower; all wait `exposed` seconds."""
    own_seconds = [0.07 * (slow if position == rank else 1.0) for position in range(4)]
    step = max(own_seconds) + exposed
    return build_evidence(
        "ask",
        (
            RankWindow(
                position,
                tuple(range(STEPS)),
                (step,) * STEPS,
                (own_seconds[position],) * STEPS,
                (8,) * STEPS,
                sync_mode=SyncMode.SYNC,
                baseline_seconds=first,
            )
            for position in range(4)
        ),
    )


def build_answered(
    metrics: JobMetrics = SLOW,
    last_bottleneck: Bottleneck | None = None,
    *,
    plan: dict[str, Any] | None = None,
    parts: tuple[EvidencePart, ...] = tuple(EvidencePart),
    **window_values: Any,
) -> Observation:
    """Build a job in which all ranks have answered the request for all parts, or for these."""
    investigation = build_investigation(last_bottleneck=last_bottleneck)
    found = build_sync(metrics, investigation, evidence=EvidenceRequest("ask", parts), **(plan or {}))
    return replace(found, evidence=build_windows(**window_values))


def update_investigation(found: Observation, **policy_values: Any) -> DesiredState:
    return straggler.update_investigation(found, build_policy(**policy_values))


def decide_straggler(found: Observation, **policy_values: Any) -> Decision:
    decision = straggler.check_stragglers(found, build_policy(**policy_values))
    assert decision is not None
    return decision


def find_reason(decision: Decision, remedy: Remedy) -> str:
    return next(price.reason for price in decision.remedies if price.name == remedy)


class TestSteady:
    def test_a_round_is_steady_if_it_is_old_enough_and_undisturbed(self) -> None:
        assert is_steady(build_sync())
        assert is_steady(change_members(build_sync(), progress={"steps_in_round": 32}))
        assert not is_steady(change_members(build_sync(), progress={"steps_in_round": 31}))
        long = replace(HEALTHY, step_seconds=2.0)
        assert is_steady(change_members(build_sync(long), progress={"steps_in_round": 8})), (
            "it has as many steps as the windows"
        )
        assert not is_steady(change_members(build_sync(long), progress={"steps_in_round": 7}))
        assert not is_steady(change_members(build_sync(), start={"first_step_at": None}))
        assert not is_steady(build_sync(replace(HEALTHY, unreported_members=("j-w1-0",))))
        assert is_steady(build_sync(replace(HEALTHY, prometheus_error="unavailable"))), (
            "sidecars report how ranks train"
        )
        assert not is_steady(change_worker(build_sync(), "j-w1-0", heartbeat={"training": {"sync_mode": "EDiT"}}))
        assert is_steady(change_members(build_sync(), training={"sync_mode": ""})), (
            "an older library does not report it"
        )

    def test_a_job_with_an_incident_that_is_not_live_is_not_steady(self) -> None:
        def with_incident(**changes: Any) -> Observation:
            found = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW - 9, NOW - 8, NOW - 7)
            desired = build_sync().desired.with_incident(replace(found, **changes))
            return build_sync().with_desired(desired)

        assert not is_steady(with_incident())
        assert is_steady(with_incident(live=True))
        assert is_steady(with_incident(recovered=NOW))


class TestInvestigation:
    @pytest.mark.parametrize(
        ("metrics", "is_requested"),
        [
            (HEALTHY, False),
            (SLOW, True),
            (replace(HEALTHY, relative_time=1.1), True),
            (replace(HEALTHY, relative_time=1.09), False),
            (WAITING, True),
            (replace(HEALTHY, wait_share=0.09), False),
            (JobMetrics(), False),
        ],
    )
    def test_slow_or_waiting_ranks_begin_an_investigation(self, metrics: JobMetrics, is_requested: bool) -> None:
        assert bool(update_investigation(build_sync(metrics)).requests.evidence_name) is is_requested

    def test_uneven_shares_of_a_healthy_job_begin_an_investigation(self) -> None:
        assert update_investigation(build_sync(HEALTHY, shares=(8, 8, 7, 9))).requests.evidence_name
        assert not update_investigation(build_sync(HEALTHY, shares=(8, 8, 8, 7))).requests.evidence_name, (
            "as equal as can be"
        )
        unknown = build_sync(replace(HEALTHY, relative_time=None), shares=(8, 8, 7, 9))
        assert not update_investigation(unknown).requests.evidence_name

    def test_an_ended_job_is_unchanged(self) -> None:
        found = build_sync(HEALTHY, build_investigation())
        ended = found.with_desired(found.desired.with_lifecycle(completed_at=NOW))
        assert update_investigation(ended) is ended.desired

    def test_a_stopping_job_is_not_investigated(self) -> None:
        assert (
            update_investigation(
                build_sync(SLOW, build_investigation(), stop=Stop.SUSPEND)
            ).state.adaptation.investigation
            is None
        )
        found = build_sync(SLOW, stop=Stop.SUSPEND)
        assert update_investigation(found) is found.desired

    @pytest.mark.parametrize(
        ("investigation", "request_"), [(build_investigation(), None), (None, ASKED), (build_investigation(), ASKED)]
    )
    def test_a_young_round_drops_investigation_and_request(
        self, investigation: StragglerInvestigation | None, request_: EvidenceRequest | None
    ) -> None:
        young = change_members(build_sync(SLOW, investigation, evidence=request_), progress={"steps_in_round": 3})
        desired = update_investigation(young)
        assert (desired.state.adaptation.investigation, desired.requests.evidence_name) == (None, "")

    def test_a_young_round_without_an_investigation_is_unchanged(self) -> None:
        young = change_members(build_sync(SLOW), progress={"steps_in_round": 3})
        assert update_investigation(young) is young.desired

    def test_an_investigation_ends_at_the_next_request_if_metrics_are_healthy(self) -> None:
        early = build_sync(HEALTHY, build_investigation(MIN_EVIDENCE_REQUEST_SECONDS), evidence=ASKED)
        assert update_investigation(early) is early.desired
        late = update_investigation(
            build_sync(HEALTHY, build_investigation(MIN_EVIDENCE_REQUEST_SECONDS + 1), evidence=ASKED)
        )
        assert (late.state.adaptation.investigation, late.requests.evidence_name) == (None, "")

    @pytest.mark.parametrize(("relative_time", "is_requested"), [(4.1, False), (3.9, True), (1.4, True)])
    def test_evidence_is_requested_again_at_once_from_a_recovered_rank(
        self, relative_time: float, is_requested: bool
    ) -> None:
        """Requests are rare after minutes of shares for a broken rank.

        With one sample, the rank seems slow by its fixed part even when it is healthy. Its answers during the recovery
        decide nothing."""
        found = build_answered(replace(SLOW, relative_time=relative_time), slow=1.0, plan={"shares": (10, 10, 1, 11)})
        found = found.with_desired(found.desired.with_adaptation(investigation=build_investigation(600.0)))
        step = (found.progress.step or 0) - 16
        desired = update_investigation(with_last_request(found, requested_at=NOW - 20, step=step, relative_time=7.0))
        assert (desired.requests.evidence_name != "ask") is is_requested
        assert desired.requests.investigation is not None
        assert desired.requests.investigation.relative_time == (relative_time if is_requested else 7.0)
        assert desired.state.adaptation.fruitless_investigation is None

    def test_evidence_is_requested_again_if_the_request_was_withdrawn(self) -> None:
        """The plan has changed since, so the request and the answers are gone."""
        pending, requesting = (
            update_investigation(build_sync(SLOW, build_investigation(2.0), evidence=request))
            for request in (ASKED, None)
        )
        assert pending.requests.evidence_name == "ask"
        assert requesting.requests.evidence_name not in ("", "ask")

    def test_an_answer_that_changes_nothing_is_not_written(self) -> None:
        """Only its time is known then, and only to this leader."""
        found = build_answered(replace(HEALTHY, relative_time=1.3), Bottleneck.NONE, slow=1.0)
        desired = update_investigation(found)
        assert desired.requests.evidence_name not in ("", "ask")
        assert desired.is_stored_as(found.desired)
        assert desired.requests.investigation is not None
        assert desired.requests.investigation.last_clear_at == NOW

    @pytest.mark.parametrize(
        ("last_bottleneck", "first_sign"), [(Bottleneck.NONE, NOW), (Bottleneck.COMPUTE, NOW - 300)]
    )
    def test_a_new_leader_counts_no_time_in_which_answers_may_have_shown_nothing(
        self, last_bottleneck: Bottleneck, first_sign: float
    ) -> None:
        investigation = build_investigation(600.0, last_bottleneck=last_bottleneck, last_clear_at=NOW - 300)
        found = build_sync(SLOW, investigation)
        found = found.with_desired(found.desired.with_requests(investigation=None))
        desired = update_investigation(found)
        assert desired.requests.evidence is not None, "requested at once"
        assert straggler._get_first_sign(found.with_desired(desired)) == first_sign

    def test_an_investigation_is_not_fruitless_while_a_rank_is_slow(self) -> None:
        slow_and_waiting = replace(SLOW, wait_share=0.5)
        for metrics, is_fruitless in ((slow_and_waiting, False), (SLOW, False), (WAITING, True)):
            desired = update_investigation(
                build_sync(metrics, build_investigation(WAITING_INVESTIGATION_SECONDS + 1), evidence=ASKED)
            )
            assert (desired.state.adaptation.fruitless_investigation is not None) is is_fruitless
            assert (desired.state.adaptation.investigation is None) is is_fruitless

    def test_longer_steps_restart_only_the_investigation_of_waits(self) -> None:
        longer_steps = replace(WAITING, step_seconds=0.2)
        next_desired = update_investigation(
            build_sync(longer_steps, build_investigation(WAITING_INVESTIGATION_SECONDS + 1), evidence=ASKED)
        )
        assert next_desired.state.adaptation.investigation is not None
        assert next_desired.state.adaptation.investigation.since == NOW
        slow = update_investigation(build_sync(replace(SLOW, step_seconds=0.2), build_investigation(), evidence=ASKED))
        assert slow.state.adaptation.investigation is not None
        assert slow.state.adaptation.investigation.since == NOW - 10

    def test_a_fruitless_investigation_is_repeated_after_the_cool_down_or_with_longer_steps(self) -> None:
        def has_request(age_seconds: float, step_seconds: float = 0.1) -> bool:
            found = build_sync(replace(WAITING, step_seconds=step_seconds))
            fruitless = FruitlessInvestigation(NOW - age_seconds, FIRST_NEGATIVE_CACHE_SECONDS, 0.1)
            return bool(
                update_investigation(
                    found.with_desired(found.desired.with_adaptation(fruitless_investigation=fruitless))
                ).requests.evidence_name
            )

        assert not has_request(FIRST_NEGATIVE_CACHE_SECONDS)
        assert has_request(FIRST_NEGATIVE_CACHE_SECONDS + 1)
        assert has_request(1.0, step_seconds=0.12)

    @pytest.mark.parametrize(
        ("metrics_between", "is_requested"),
        [
            (HEALTHY, True),
            (WAITING, False),
            (replace(HEALTHY, wait_share=None), False),
            (replace(HEALTHY, step_seconds=0.19), False),
            (replace(HEALTHY, step_seconds=None), False),
        ],
        ids=["recovered", "still waiting", "unknown", "slightly faster", "not measured"],
    )
    def test_a_bottleneck_that_had_ended_is_investigated_at_once(
        self, metrics_between: JobMetrics, is_requested: bool
    ) -> None:
        """A job without allowed remedies has one incident for each bottleneck."""
        healthy = build_sync(metrics_between)
        fruitless = FruitlessInvestigation(NOW - 10.0, 8 * FIRST_NEGATIVE_CACHE_SECONDS, 0.2, forbidden=True)
        desired = update_investigation(
            healthy.with_desired(healthy.desired.with_adaptation(fruitless_investigation=fruitless)),
            mode=RemediationMode.RECOMMEND,
        )
        assert desired.state.adaptation.fruitless_investigation is not None
        assert desired.state.adaptation.fruitless_investigation.cool_down_seconds == fruitless.cool_down_seconds, (
            "the cool-down stays, if nothing has changed"
        )
        waiting = build_sync(replace(WAITING, step_seconds=0.2)).with_desired(desired)
        assert (
            bool(update_investigation(waiting, mode=RemediationMode.RECOMMEND).requests.evidence_name) is is_requested
        )

    @pytest.mark.parametrize(
        ("waiting", "continues"),
        [(0.99 * MIN_WAITING_SHARE, True), (0.9 * WAITING_HYSTERESIS * MIN_WAITING_SHARE, False)],
    )
    def test_waits_near_the_threshold_continue_the_investigation(self, waiting: float, continues: bool) -> None:
        """Otherwise a job that always waits this much would be investigated repeatedly without end."""
        below_threshold = replace(HEALTHY, wait_share=waiting)
        assert update_investigation(build_sync(below_threshold)).state.adaptation.investigation is None
        kept_investigation = update_investigation(
            build_sync(below_threshold, build_investigation(), evidence=ASKED)
        ).state.adaptation.investigation
        assert (kept_investigation is not None) is continues

    def test_a_fruitless_investigation_of_waits_is_not_continued(self) -> None:
        found = build_sync(WAITING, build_investigation(), evidence=ASKED)
        suppressed = found.desired.with_adaptation(
            fruitless_investigation=FruitlessInvestigation(NOW - 20.0, FIRST_NEGATIVE_CACHE_SECONDS, 0.1)
        )
        desired = update_investigation(found.with_desired(suppressed))
        assert (desired.state.adaptation.investigation, desired.requests.evidence_name) == (None, "")
        assert update_investigation(found).state.adaptation.investigation is not None

    def test_a_suppressed_slowdown_is_not_investigated_unless_another_rank_is_slower(self) -> None:
        def has_request(relative_time: float, peer_slowdown: float | None = None, *, live: bool = False) -> bool:
            found = build_sync(replace(HEALTHY, relative_time=relative_time, peer_slowdown=peer_slowdown))
            desired = found.desired.with_adaptation(suppressed_relative_time=2.0, suppressed_peer_slowdown=1.5)
            if live:
                open_incident = Incident(
                    "i", IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, 1, "m", NOW, NOW, NOW, live=True
                )
                desired = desired.with_incident(open_incident)
            return bool(update_investigation(found.with_desired(desired)).requests.evidence_name)

        assert not has_request(2.0)
        assert has_request(2.2)
        assert not has_request(2.0, 1.6)
        assert has_request(2.0, 1.7)
        assert not has_request(2.0, 1.7, live=True), "its own remedy is still measured"

    def test_a_recommended_remedy_is_investigated_again_once_it_is_allowed(self) -> None:
        found = build_sync()
        desired = found.desired.with_adaptation(
            fruitless_investigation=FruitlessInvestigation(NOW, 60.0, 0.1, forbidden=True), suppressed_relative_time=2.0
        )
        assert (
            update_investigation(
                found.with_desired(desired), mode=RemediationMode.RECOMMEND
            ).state.adaptation.fruitless_investigation
            is not None
        )
        assert update_investigation(found.with_desired(desired)).state.adaptation.fruitless_investigation is None

    def test_suppressing_a_bottleneck_records_the_current_metrics(self) -> None:
        adaptation = straggler.suppress_bottleneck(
            build_sync(replace(SLOW, peer_slowdown=1.7)), forbidden=True
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


def test_the_expected_loss_stays_if_an_answer_does_not_name_the_slow_rank() -> None:
    """With fewer samples, the rank may match its peers in a few steps by chance. The spare is still due."""
    expected_loss = AccumulatedLoss(5.0, NOW - 10.0, 1.07)

    def update_loss(metrics: JobMetrics, **window_values: Any) -> AccumulatedLoss | None:
        found = build_answered(metrics, plan={"shares": (9, 9, 5, 9)}, **window_values)
        return update_investigation(
            found.with_desired(found.desired.with_adaptation(loss=expected_loss))
        ).state.adaptation.loss

    assert update_loss(SLOW, slow=1.0) == expected_loss
    assert update_loss(replace(HEALTHY, wait_share=WAITING.wait_share), slow=1.0) is None, "no rank is slow"
    loss = update_loss(SLOW, slow=2.0)
    assert loss is not None
    assert loss.slowdown > 1.5


def _with_edit_mode(window: RankWindow) -> RankWindow:
    """Return the window with the same own work in mode EDiT."""
    return replace(window, sync_mode=SyncMode.EDIT, transfers=(0.01,) * 4)


class TestBrokenInLocalSgd:
    def build_local_sgd(
        self, relative_time: float | None, investigation: StragglerInvestigation | None = None
    ) -> Observation:
        found = build_sync(replace(HEALTHY, relative_time=relative_time), investigation, sync_mode=SyncMode.EDIT)
        return change_members(found, training={"sync_mode": "EDiT"})

    def test_a_very_slow_rank_is_investigated_since_its_first_detection(self) -> None:
        found = update_investigation(self.build_local_sgd(SPARE_FIRST_SLOWDOWN))
        assert found.state.adaptation.investigation == StragglerInvestigation(since=NOW, step_seconds=0.1, step=500)
        known = self.build_local_sgd(SPARE_FIRST_SLOWDOWN, build_investigation())
        assert update_investigation(known) is known.desired

    def test_a_rank_whose_loss_reaches_the_price_of_a_spare_is_investigated(self) -> None:
        """A restart is assumed to take 5 s, and three steps of 0.1 s until the checkpoint cost a sixth."""

        def with_loss(seconds: float, slowdown: float = 1.2, **changes: Any) -> Observation:
            found = self.build_local_sgd(1.5, **changes)
            return found.with_desired(found.desired.with_adaptation(loss=AccumulatedLoss(seconds, NOW, slowdown)))

        assert update_investigation(with_loss(5.06)).state.adaptation.investigation == StragglerInvestigation(
            since=NOW, step_seconds=0.1, step=500
        )
        assert update_investigation(with_loss(5.04)).state.adaptation.investigation is None
        assert update_investigation(with_loss(5.5, slowdown=1.004)).state.adaptation.investigation is None, (
            "the rank no longer costs time"
        )
        suspected = with_loss(5.5, investigation=build_investigation())
        requested = suspected.with_desired(suspected.desired.with_requests(evidence=ASKED))
        edit_windows = tuple(
            replace(answer, windows=tuple(_with_edit_mode(window) for window in answer.windows))
            for answer in build_windows(slow=1.5)
        )
        decision = decide_straggler(replace(requested, evidence=edit_windows))
        assert (decision.remedy, decision.rank) == (Remedy.REPLACE_WORKER, 2)
        early = requested.with_desired(requested.desired.with_adaptation(loss=AccumulatedLoss(5.04, NOW, 1.2)))
        assert straggler.check_stragglers(replace(early, evidence=edit_windows), build_policy()) is None

    @pytest.mark.parametrize("relative_time", [SPARE_FIRST_SLOWDOWN - 0.1, None])
    def test_a_less_slow_rank_is_not_investigated(self, relative_time: float | None) -> None:
        assert (
            update_investigation(
                self.build_local_sgd(relative_time, build_investigation())
            ).state.adaptation.investigation
            is None
        )
        healthy = self.build_local_sgd(relative_time)
        assert update_investigation(healthy) is healthy.desired


class TestDiagnosis:
    def test_complete_evidence_of_a_steady_job_is_diagnosed(self) -> None:
        found = build_answered()
        diagnosis = straggler.diagnose_evidence(found)
        assert diagnosis is not None
        assert (diagnosis.bottleneck, diagnosis.culprits) == (Bottleneck.COMPUTE, (2,))
        assert straggler.diagnose_evidence(replace(found, evidence=found.evidence[:3])) is None
        assert straggler.diagnose_evidence(change_members(found, progress={"steps_in_round": 3})) is None
        healthy = found.with_desired(found.desired.with_adaptation(investigation=None))
        assert straggler.diagnose_evidence(healthy) is None

    def test_balanced_lengths_do_not_excuse_a_slow_rank(self) -> None:
        assert (
            decide_straggler(build_answered(plan={"sequence_cost": (0.0, 0.0, 1.0)})).cause is IncidentCause.STRAGGLER
        )


class TestDecision:
    def test_the_message_names_rank_worker_and_relative_time(self) -> None:
        decision = decide_straggler(build_answered(), allow=frozenset(Remedy) - {Remedy.REPLACE_WORKER})
        assert decision.message == "rank 2 on j-w2-0 takes 2.00 × its peers' time a sample"
        assert (decision.worker, decision.node, decision.rank, decision.live) == ("j-w2-0", "node-2", 2, True)
        assert decision.remedy is Remedy.REBALANCE

    def test_a_leaving_or_unknown_worker_is_ignored(self) -> None:
        found = build_answered()
        record = replace(found.state.placement.workers[2], leaving="its GPU fails")
        assert straggler.check_stragglers(found.with_desired(found.desired.with_worker(record)), build_policy()) is None
        others = tuple(worker for worker in found.state.placement.workers if worker.ordinal != 2)
        without_record = found.with_desired(found.desired.with_placement(workers=others))
        assert straggler.check_stragglers(without_record, build_policy()) is None

    def test_a_worker_without_a_node_names_no_node(self) -> None:
        found = build_answered()
        record = replace(found.state.placement.workers[2], node="")
        assert decide_straggler(found.with_desired(found.desired.with_worker(record))).node is None

    def test_a_slow_link_concerns_no_rank(self) -> None:
        decision = decide_straggler(build_answered(WAITING, Bottleneck.COMMUNICATION, **LINK))
        assert decision.message.endswith("communication takes longer than in the job's first steady steps")
        assert (decision.rank, decision.worker, decision.node) == (None, None, None)
        assert decision.remedy is Remedy.LOCAL_SGD
        assert {price.name for price in decision.remedies} == {"LocalSGD"}, "no spare would resolve it"

    def test_a_single_rank_has_no_slow_communication(self) -> None:
        found = build_answered(WAITING, Bottleneck.COMMUNICATION, **LINK)
        (first, *_), members = found.evidence, found.plan.members
        single_member = found.with_desired(found.desired.with_plan(members=members[:1]))
        assert straggler.check_stragglers(replace(found, evidence=(first,)), build_policy()) is None, (
            "the other ranks have to answer, too"
        )
        assert straggler.check_stragglers(replace(single_member, evidence=(first,)), build_policy()) is None

    def test_without_a_remedy_the_decision_waits_for_the_place_of_the_bottleneck(self) -> None:
        def make_decision(since: float, link_check: LinkCheck) -> Decision | None:
            found = build_answered(WAITING, Bottleneck.COMMUNICATION, **LINK)
            investigation = replace(build_investigation(last_bottleneck=Bottleneck.COMMUNICATION), since=since)
            desired = found.desired.with_adaptation(investigation=investigation).with_requests(link_check=link_check)
            found = with_last_request(found.with_desired(desired), requested_at=NOW)
            found = change_members(found, training={"managed": False})
            return straggler.check_stragglers(found, build_policy())

        nothing_hot = LinkCheck(NOW, "ask", conclusive=True)
        assert make_decision(NOW - 10, nothing_hot) is None
        assert make_decision(NOW - 16, nothing_hot) is not None
        assert make_decision(NOW - 10, replace(nothing_hot, conclusive=False)) is not None, (
            "no rank reports connections"
        )
        hot = replace(nothing_hot, hottest=HottestPlace(SpotKind.LINK, 0, 1, 1e7), hot_places=("link 0 → 1",))
        assert make_decision(NOW - 10, hot) is not None

    def test_slow_transfers_of_longer_work_are_ignored_while_a_profile_is_expected(self) -> None:
        found = build_answered(WAITING, Bottleneck.COMMUNICATION, **LINK)
        requested = found.with_desired(found.desired.with_requests(profile=ProfileRequest("profile-9", 600)))
        assert straggler.check_stragglers(requested, build_policy()) is not None
        slower = tuple(
            replace(answer, windows=tuple(replace(window, baseline_own_seconds=0.05) for window in answer.windows))
            for answer in found.evidence
        )
        assert straggler.check_stragglers(replace(requested, evidence=slower), build_policy()) is None
        reported = found.with_desired(found.desired.with_profiling(reporting_incident="j-slow-steps", round=1))
        assert straggler.check_stragglers(replace(reported, evidence=slower), build_policy()) is None
        earlier = found.with_desired(found.desired.with_profiling(reporting_incident="j-slow-steps", round=0))
        assert straggler.check_stragglers(replace(earlier, evidence=slower), build_policy()) is not None

    def test_a_decision_continues_an_open_incident_of_the_same_cause_and_rank(self) -> None:
        def find_continued_incident(cause: IncidentCause, rank: int | None) -> str:
            found = build_answered()
            open_incident = Incident(
                "open", cause, IncidentClass.PERFORMANCE, 1, "m", NOW, NOW, NOW, rank=rank, live=True
            )
            return decide_straggler(found.with_desired(found.desired.with_incident(open_incident))).continued_incident

        assert find_continued_incident(IncidentCause.STRAGGLER, 2) == "open"
        assert find_continued_incident(IncidentCause.STRAGGLER, 1) == ""
        assert find_continued_incident(IncidentCause.CRASH, 2) == ""


class TestRefusedMode:
    def find_refusal(self, **changes: Any) -> str:
        spec = replace(build_job().spec, **changes.pop("spec", {}))
        found = build_answered(WAITING, changes.pop("shown", Bottleneck.COMMUNICATION), **LINK)
        found = replace(found, job=replace(found.job, spec=spec))
        adaptation = changes.pop("adaptation", {})
        found = found.with_desired(found.desired.with_adaptation(**adaptation))
        found = change_members(found, **changes)
        choice, action = straggler._weigh_remedies(found, build_policy(), _diagnose(found), None)
        price = next(price for price in choice.prices if price.option.remedy == Remedy.LOCAL_SGD)
        assert (action is None) is bool(price.option.refused)
        return price.option.refused

    def test_local_sgd_is_not_refused_by_default(self) -> None:
        assert self.find_refusal() == ""

    def test_local_sgd_is_refused_if_the_spec_requests_another_mode(self) -> None:
        assert self.find_refusal(spec={"sync_mode": RequestedSyncMode.SYNC}) == "spec.syncMode is Sync"

    def test_local_sgd_is_refused_after_a_single_answer(self) -> None:
        assert self.find_refusal(shown=None) == "the next steps have to show the same first"
        assert self.find_refusal(shown=Bottleneck.VOLATILE) == "the next steps have to show the same first"

    def test_local_sgd_is_refused_if_ranks_report_no_mode(self) -> None:
        assert self.find_refusal(training={"sync_mode": ""}).startswith(
            "the ranks do not report the mode that they train in"
        )

    def test_local_sgd_is_refused_for_an_unmanaged_script(self) -> None:
        assert self.find_refusal(training={"managed": False}).startswith("the script does not use the library")

    def test_the_diagnosis_of_an_unmanaged_script_waits_for_operations(self) -> None:
        found = change_members(build_answered(parts=(EvidencePart.WINDOWS,)), training={"managed": False})
        assert straggler.diagnose_evidence(found) is None
        assert EvidencePart.OPERATIONS in update_investigation(found).requests.evidence_parts

    def test_local_sgd_is_refused_if_ranks_have_refused_it(self) -> None:
        assert self.find_refusal(adaptation={"mode_refusal": "no dimension"}) == "the ranks refused it: no dimension"

    def test_local_sgd_is_refused_shortly_after_a_change_of_mode(self) -> None:
        recent_change = Hysteresis(first=15.0).with_change(NOW - 5)
        assert self.find_refusal(adaptation={"mode_changes": recent_change}).endswith("stays for another 10 s")


def _diagnose(found: Observation) -> Any:
    diagnosis = straggler.diagnose_evidence(found)
    assert diagnosis is not None
    return diagnosis


def test_there_is_no_strategy_in_a_local_sgd_mode() -> None:
    found = build_answered()
    diagnosis = _diagnose(found)
    assert straggler._list_strategies(found, diagnosis)
    local_sgd = found.with_desired(found.desired.with_plan(sync_mode=SyncMode.EDIT))
    assert straggler._list_strategies(local_sgd, diagnosis) == ()


class TestRefusedSpare:
    @pytest.mark.parametrize(
        ("past", "is_allowed"),
        [
            ((), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w9-0", 9.0)), False),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w2-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 1, "j-w9-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.HANG, 2, "j-w9-0", 9.0)), True),
            (((IncidentCause.STRAGGLER, 2, "j-w8-0", 9.0), (IncidentCause.STRAGGLER, 2, "j-w9-0", 4000.0)), True),
        ],
        ids=["never", "on two others", "here", "another rank", "another cause", "long ago"],
    )
    def test_a_spare_is_refused_if_the_rank_was_slow_on_two_other_workers(
        self, past: tuple[tuple[IncidentCause, int, str, float], ...], is_allowed: bool
    ) -> None:
        found = build_answered(replace(HEALTHY, relative_time=6.0), slow=6.0)
        incidents = tuple(
            PastIncident(cause, NOW - age_seconds, 5.0, rank=rank, worker=worker)
            for cause, rank, worker, age_seconds in past
        )
        found = found.with_desired(found.desired.with_incidents(past=incidents))
        assert ("too: look at the script" in self.find_refusal(found)) is not is_allowed

    @pytest.mark.parametrize(("relative_time", "is_slow"), [(6.0, True), (3.5, True), (3.4, False)])
    def test_a_spare_is_refused_if_the_rank_is_recovering(self, relative_time: float, is_slow: bool) -> None:
        """In its answer, the rank took six times as long as its peers; the metrics are current."""
        found = build_answered(replace(HEALTHY, relative_time=relative_time), slow=6.0)
        assert (self.find_refusal(found) == "no rank is so slow any more") is not is_slow

    @pytest.mark.parametrize(("steps_since", "is_slow"), [(0, True), (15, True), (16, False)])
    def test_a_recovery_is_not_assumed_within_half_a_window(self, steps_since: int, is_slow: bool) -> None:
        """The rank has only just become slow, so most of the steps in the metrics are older."""
        found = build_answered(replace(HEALTHY, relative_time=2.0), slow=6.0)
        found = with_last_request(found, step=(found.progress.step or 0) - steps_since)
        assert (self.find_refusal(found) == "no rank is so slow any more") is not is_slow

    def find_refusal(self, found: Observation) -> str:
        choice, _ = straggler._weigh_remedies(found, build_policy(), _diagnose(found), 2)
        return next(price.option.refused for price in choice.prices if price.option.remedy == Remedy.REPLACE_WORKER)


class TestRevertToSync:
    def build_local_sgd(self, **plan: Any) -> Observation:
        found = build_sync(HEALTHY, None, **{"sync_mode": SyncMode.ASYNC_EDIT, **plan})
        choice = LocalSgdChoice(NOW - 60, Bottleneck.COMMUNICATION, "the link is slow", "i")
        return change_members(
            found.with_desired(found.desired.with_adaptation(local_sgd=choice)), training={"sync_mode": "AsyncEDiT"}
        )

    def test_evidence_for_a_revert_is_requested(self) -> None:
        assert revert_to_sync.consider_revert_to_sync(self.build_local_sgd(), build_policy()).requests.evidence_name

    def test_a_stopping_job_and_a_job_in_sync_are_unchanged(self) -> None:
        stopping = self.build_local_sgd(stop=Stop.SUSPEND)
        assert revert_to_sync.consider_revert_to_sync(stopping, build_policy()) is stopping.desired
        assert revert_to_sync.consider_revert_to_sync(build_sync(), build_policy()).plan == build_sync().plan

    def test_ranks_that_refuse_the_mode_revert_to_sync_at_once(self) -> None:
        desired = revert_to_sync.consider_revert_to_sync(
            change_members(self.build_local_sgd(), training={"refused": "no dimension"}), build_policy()
        )
        assert (desired.plan.sync_mode, desired.state.adaptation.mode_refusal) == (SyncMode.SYNC, "no dimension")

    def test_incomplete_or_unrequested_answers_are_ignored(self) -> None:
        found = self.build_local_sgd(evidence=ASKED)
        partial = replace(found, evidence=build_windows()[:3])
        desired = revert_to_sync.consider_revert_to_sync(partial, build_policy())
        assert desired.state.adaptation.local_sgd is not None
        assert desired.requests.evidence_name.startswith("revert-to-sync"), "requested again"
        not_requested = replace(self.build_local_sgd(), evidence=build_windows())
        assert revert_to_sync.consider_revert_to_sync(not_requested, build_policy()).requests.evidence_name.startswith(
            "revert-to-sync"
        )
        complete = replace(found, evidence=build_windows())
        assert revert_to_sync.consider_revert_to_sync(complete, build_policy()).requests.evidence_name == "", (
            "evaluated"
        )

    @pytest.mark.parametrize(
        ("bottleneck", "mode", "transfer", "seconds"),
        [
            (Bottleneck.COMMUNICATION, SyncMode.ASYNC_EDIT, 0.6, 20.0),
            (Bottleneck.COMMUNICATION, SyncMode.ASYNC_EDIT, 0.01, 10.0),
            (Bottleneck.VOLATILE, SyncMode.ASYNC_EDIT, 0.6, 20.0),
            (Bottleneck.COMMUNICATION, SyncMode.EDIT, 0.6, 10.0),
        ],
        ids=["slow link", "recovered", "volatile", "by steps"],
    )
    def test_synchronizations_become_less_frequent_while_the_bottleneck_stays(
        self, bottleneck: Bottleneck, mode: SyncMode, transfer: float, seconds: float
    ) -> None:
        found = self.build_local_sgd(evidence=ASKED, sync_seconds=10.0, sync_mode=mode)
        choice = LocalSgdChoice(NOW - 100, bottleneck, "r", "i")
        found = change_members(
            found.with_desired(found.desired.with_adaptation(local_sgd=choice)), training={"sync_mode": mode.value}
        )
        evidence = tuple(
            replace(
                answer,
                windows=tuple(replace(window, sync_mode=mode, transfers=(transfer,) * 4) for window in answer.windows),
            )
            for answer in build_windows(slow=1.0)
        )
        desired = revert_to_sync.consider_revert_to_sync(replace(found, evidence=evidence), build_policy())
        assert desired.plan.sync_mode is mode
        assert desired.plan.sync_seconds == pytest.approx(seconds, rel=0.1)
        is_changed = desired.plan.sync_seconds != found.plan.sync_seconds
        assert desired.plan.version == found.plan.version + is_changed

    def test_a_volatile_bottleneck_ends_only_after_many_steps_without_it(self) -> None:
        def run_answers(bottleneck: Bottleneck, *steps: int) -> Observation:
            found = self.build_local_sgd(evidence=ASKED)
            choice = LocalSgdChoice(NOW - 600, bottleneck, "r", "i")
            found = found.with_desired(found.desired.with_adaptation(local_sgd=choice))
            healthy_evidence = tuple(
                replace(
                    answer,
                    windows=tuple(
                        replace(window, sync_mode="AsyncEDiT", transfers=(0.01,) * 4) for window in answer.windows
                    ),
                )
                for answer in build_windows(slow=1.0)
            )
            for step in steps:
                desired = found.desired.with_requests(evidence=ASKED)
                found = change_members(
                    replace(found.with_desired(desired), evidence=healthy_evidence), progress={"step": step}
                )
                found = found.with_desired(revert_to_sync.consider_revert_to_sync(found, build_policy()))
            return found

        assert run_answers(Bottleneck.COMMUNICATION, 500, 501).plan.sync_mode is SyncMode.SYNC, "two answers"
        assert run_answers(Bottleneck.VOLATILE, 500, 501, 531).plan.sync_mode is SyncMode.ASYNC_EDIT
        assert run_answers(Bottleneck.VOLATILE, 500, 501, 532).plan.sync_mode is SyncMode.SYNC


class TestRequestedMode:
    @pytest.mark.parametrize("end", ["stop", "over"])
    def test_a_job_that_ends_changes_no_mode(self, end: str) -> None:
        spec: JobSpec = replace(build_job().spec, sync_mode=RequestedSyncMode.EDIT)
        found = replace(build_sync(), job=replace(build_job(), spec=spec))
        assert requested_sync_mode.apply_requested_sync_mode(found, build_policy()).plan.sync_mode is SyncMode.EDIT
        stopping, completed = found.desired.with_plan(stop=Stop.SUSPEND), found.desired.with_lifecycle(completed_at=NOW)
        ending = found.with_desired(stopping if end == "stop" else completed)
        assert requested_sync_mode.apply_requested_sync_mode(ending, build_policy()) is ending.desired
