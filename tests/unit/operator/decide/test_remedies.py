"""What single actions change in the plan and the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.requests import EvidenceRequest
from pacekeeper_analysis.stragglers.price import AccumulatedLoss
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Strategy
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.decision import Action, Adapt, Decision, ReplaceWorker
from pacekeeper_operator.decide.nodes import quarantine_proposal
from pacekeeper_operator.decide.remedies import apply_actions
from pacekeeper_operator.state.desired_state import DesiredState, StragglerInvestigation
from pacekeeper_operator.state.incident_key import IncidentKey
from testing.operators.observations import NOW, build_policy, build_training

DECISION = Decision(
    IncidentKey(IncidentCause.STRAGGLER, 1, rank=2),
    IncidentClass.PERFORMANCE,
    "m",
    NOW - 10,
    rank=2,
    slowdown_before=2.0,
)


def apply_adaptation(mode: SyncMode = SyncMode.SYNC, *, is_sufficient: bool = True) -> DesiredState:
    """Return the desired state after other shares or another mode, applied during an investigation."""
    observation = build_training()
    observation = replace(observation, metrics=replace(observation.metrics, relative_time=2.0))
    desired = observation.desired.with_requests(evidence=EvidenceRequest("ask")).with_adaptation(
        investigation=StragglerInvestigation(NOW - 9)
    )
    strategy = Strategy(Remedy.REBALANCE, mode, 0.1, 1.05, "it fits", shares=(10, 9, 4, 9))
    decision = replace(DECISION, actions=(Adapt(strategy, Bottleneck.COMPUTE, is_sufficient),))
    return apply_actions(decision, observation.with_desired(desired)).desired


class TestAdapt:
    def test_a_sufficient_remedy_ends_the_investigation(self) -> None:
        desired = apply_adaptation()
        assert (desired.plan.shares, desired.requests.evidence_name) == ((10, 9, 4, 9), "")
        adaptation = desired.state.adaptation
        assert (adaptation.investigation, adaptation.suppressed_relative_time, adaptation.local_sgd) == (
            None,
            2.0,
            None,
        )

    def test_the_remaining_slowdown_is_recorded_as_a_loss(self) -> None:
        assert apply_adaptation().state.adaptation.loss == AccumulatedLoss(5.0, NOW, 1.05)

    def test_an_insufficient_remedy_continues_the_investigation(self) -> None:
        adaptation = apply_adaptation(is_sufficient=False).state.adaptation
        assert adaptation.investigation == StragglerInvestigation(NOW - 9)
        assert adaptation.suppressed_relative_time is None

    def test_a_mode_is_recorded_with_its_bottleneck_and_incident(self) -> None:
        desired = apply_adaptation(SyncMode.EDIT)
        choice = desired.state.adaptation.local_sgd
        assert choice is not None
        assert (choice.since, choice.bottleneck, choice.incident) == (
            NOW,
            Bottleneck.COMPUTE,
            "j-r1-straggler-rank2-u1d2c",
        )
        assert desired.plan.sync_mode is SyncMode.EDIT


class TestReplaceWorker:
    def test_applying_actions_together_equals_applying_them_one_by_one(self) -> None:
        observation = build_training(8, 2)
        replacements = [ReplaceWorker(f"j-w{n}-0", f"why {n}", dead=n % 2 == 0, disruption=n > 1) for n in (6, 0, 3, 1)]
        proposed = quarantine_proposal.propose_quarantine(observation, build_policy(), "node-3", "it hung")
        withheld = quarantine_proposal.propose_quarantine(observation, build_policy(), "elsewhere", "it hung")
        unknown = ReplaceWorker("unknown", "why", dead=True)
        actions: tuple[Action, ...] = (*replacements[:2], proposed, withheld, *replacements[2:], unknown)
        together, one_by_one = apply_actions(replace(DECISION, actions=actions), observation), observation
        for action in actions:
            one_by_one = one_by_one.with_desired(
                apply_actions(replace(DECISION, actions=(action,)), one_by_one).desired
            )
        assert together.desired == one_by_one.desired
        assert together.notes == ("no quarantine of elsewhere: the node is not known any more",)
        leaving = {worker.name: worker.leaving for worker in together.desired.state.placement.workers if worker.leaving}
        assert leaving == {f"j-w{n}-0": f"why {n}" for n in (0, 1, 3, 6)}
        assert together.desired.state.budget.total_restarts == 2, "only losses without a disruption count"


class TestQuarantineProposal:
    def test_an_allowed_quarantine_is_proposed(self) -> None:
        proposed = quarantine_proposal.propose_quarantine(build_training(), build_policy(), "node-1", "it hung")
        assert (proposed.uid, proposed.withheld) == ("node-uid-1", "")

    @pytest.mark.parametrize(
        ("node", "allow", "message"),
        [
            ("node-1", frozenset(Remedy) - {Remedy.QUARANTINE_NODE}, "spec.remediation.allow does not list it"),
            ("gone", frozenset(Remedy), "the node is not known any more"),
            ("gone", frozenset[Remedy](), "spec.remediation.allow does not list it"),
        ],
    )
    def test_a_quarantine_that_is_not_possible_is_withheld(
        self, node: str, allow: frozenset[Remedy], message: str
    ) -> None:
        assert (
            quarantine_proposal.propose_quarantine(
                build_training(), build_policy(allow=allow), node, "it hung"
            ).withheld
            == message
        )
