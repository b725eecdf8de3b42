"""What single actions change of plan and bookkeeping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import SyncMode
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


def adapted(mode: SyncMode = SyncMode.SYNC, *, mended: bool = True) -> DesiredState:
    """After other shares, or another mode, while a suspicion is looked into."""
    world = build_training()
    world = replace(world, metrics=replace(world.metrics, relative_time=2.0))
    draft = world.desired.with_plan(evidence_request="ask").with_adaptation(
        investigation=StragglerInvestigation(NOW - 9)
    )
    way = Strategy(Remedy.REBALANCE, mode, 0.1, 1.05, "it fits", shares=(10, 9, 4, 9))
    decision = replace(DECISION, actions=(Adapt(way, Bottleneck.COMPUTE, mended),))
    return apply_actions(decision, world.with_desired(draft)).desired


class TestAdapt:
    def test_what_mends_well_enough_ends_the_suspicion(self) -> None:
        draft = adapted()
        assert (draft.plan.shares, draft.plan.evidence_request) == ((10, 9, 4, 9), "")
        adaptation = draft.state.adaptation
        assert (adaptation.investigation, adaptation.suppressed_relative_time, adaptation.local_sgd) == (
            None,
            2.0,
            None,
        )

    def test_what_it_leaves_goes_on_to_cost(self) -> None:
        assert adapted().state.adaptation.loss == AccumulatedLoss(5.0, NOW, 1.05)

    def test_what_does_not_leaves_it_for_a_dearer_remedy(self) -> None:
        adaptation = adapted(mended=False).state.adaptation
        assert adaptation.investigation == StragglerInvestigation(NOW - 9)
        assert adaptation.suppressed_relative_time is None

    def test_a_mode_is_remembered_with_what_it_is_for(self) -> None:
        draft = adapted(SyncMode.EDIT)
        chosen = draft.state.adaptation.local_sgd
        assert chosen is not None
        assert (chosen.since, chosen.bottleneck, chosen.incident) == (
            NOW,
            Bottleneck.COMPUTE,
            "j-r1-straggler-rank2-u1d2c",
        )
        assert draft.plan.sync_mode is SyncMode.EDIT


class TestReplaceWorker:
    def test_thousands_of_one_event_go_together_as_they_would_one_by_one(self) -> None:
        world = build_training(8, 2)
        gone = [ReplaceWorker(f"j-w{n}-0", f"why {n}", dead=n % 2 == 0, disruption=n > 1) for n in (6, 0, 3, 1)]
        suspected = quarantine_proposal.propose_quarantine(world, build_policy(), "node-3", "it hung")
        withheld = quarantine_proposal.propose_quarantine(world, build_policy(), "elsewhere", "it hung")
        nobody = ReplaceWorker("nobody", "why", dead=True)
        actions: tuple[Action, ...] = (*gone[:2], suspected, withheld, *gone[2:], nobody)
        together, one_by_one = apply_actions(replace(DECISION, actions=actions), world), world
        for action in actions:
            one_by_one = one_by_one.with_desired(
                apply_actions(replace(DECISION, actions=(action,)), one_by_one).desired
            )
        assert together.desired == one_by_one.desired
        assert together.notes == ("no quarantine of elsewhere: the node is not known any more",)
        left = {worker.name: worker.leaving for worker in together.desired.state.placement.workers if worker.leaving}
        assert left == {f"j-w{n}-0": f"why {n}" for n in (0, 1, 3, 6)}
        assert together.desired.state.budget.total_restarts == 2, "of those that nobody wanted away"


class TestBlame:
    def test_a_suspicion_is_handed_on_where_it_may_be(self) -> None:
        proposed = quarantine_proposal.propose_quarantine(build_training(), build_policy(), "node-1", "it hung")
        assert (proposed.uid, proposed.withheld) == ("node-uid-1", "")

    @pytest.mark.parametrize(
        ("node", "allow", "words"),
        [
            ("node-1", frozenset(Remedy) - {Remedy.QUARANTINE_NODE}, "spec.remediation.allow does not list it"),
            ("gone", frozenset(Remedy), "the node is not known any more"),
            ("gone", frozenset[Remedy](), "spec.remediation.allow does not list it"),
        ],
    )
    def test_elsewhere_it_is_only_written_down(self, node: str, allow: frozenset[Remedy], words: str) -> None:
        assert (
            quarantine_proposal.propose_quarantine(
                build_training(), build_policy(allow=allow), node, "it hung"
            ).withheld
            == words
        )
