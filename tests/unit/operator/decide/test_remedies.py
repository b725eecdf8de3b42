"""What single actions change of plan and bookkeeping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.adapt import Trouble, Way
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.price import Loss
from pacekeeper_operator.api import Cause, Class, Remedy
from pacekeeper_operator.decide import blame
from pacekeeper_operator.decide.remedies import apply
from pacekeeper_operator.decision import Action, Adapt, Decision, ReplaceWorker
from pacekeeper_operator.state import Draft, Suspicion
from pacekeeper_operator.subject import Subject
from tests.support.worlds import NOW, policy, training

DECISION = Decision(Subject(Cause.STRAGGLER, 1, rank=2), Class.PERFORMANCE, "m", NOW - 10, rank=2, slowdown_before=2.0)


def adapted(mode: SyncMode = SyncMode.SYNC, *, mended: bool = True) -> Draft:
    """After other shares, or another mode, while a suspicion is looked into."""
    world = training()
    world = replace(world, metrics=replace(world.metrics, pace=2.0))
    draft = world.draft.with_plan(evidence_request="ask").with_adaptation(suspicion=Suspicion(NOW - 9))
    way = Way(Remedy.REBALANCE, mode, 0.1, 1.05, "it fits", shares=(10, 9, 4, 9))
    decision = replace(DECISION, actions=(Adapt(way, Trouble.COMPUTE, mended),))
    return apply(decision, world.with_draft(draft)).draft


class TestAdapt:
    def test_what_mends_well_enough_ends_the_suspicion(self) -> None:
        draft = adapted()
        assert (draft.plan.shares, draft.plan.evidence_request) == ((10, 9, 4, 9), "")
        adaptation = draft.state.adaptation
        assert (adaptation.suspicion, adaptation.tolerated_pace, adaptation.local_sgd) == (None, 2.0, None)

    def test_what_it_leaves_goes_on_to_cost(self) -> None:
        assert adapted().state.adaptation.loss == Loss(5.0, NOW, 1.05)

    def test_what_does_not_leaves_it_for_a_dearer_remedy(self) -> None:
        adaptation = adapted(mended=False).state.adaptation
        assert adaptation.suspicion == Suspicion(NOW - 9)
        assert adaptation.tolerated_pace == 0.0

    def test_a_mode_is_remembered_with_what_it_is_for(self) -> None:
        draft = adapted(SyncMode.EDIT)
        chosen = draft.state.adaptation.local_sgd
        assert chosen is not None
        assert (chosen.since, chosen.trouble, chosen.incident) == (NOW, Trouble.COMPUTE, "j-r1-straggler-rank2-u1d2c")
        assert draft.plan.sync_mode is SyncMode.EDIT


class TestReplaceWorker:
    def test_thousands_of_one_event_go_together_as_they_would_one_by_one(self) -> None:
        world = training(8, 2)
        gone = [ReplaceWorker(f"j-w{n}-0", f"why {n}", dead=n % 2 == 0, disruption=n > 1) for n in (6, 0, 3, 1)]
        suspected = blame.propose(world, policy(), "node-3", "it hung")
        withheld = blame.propose(world, policy(), "elsewhere", "it hung")
        nobody = ReplaceWorker("nobody", "why", dead=True)
        actions: tuple[Action, ...] = (*gone[:2], suspected, withheld, *gone[2:], nobody)
        together, one_by_one = apply(replace(DECISION, actions=actions), world), world
        for action in actions:
            one_by_one = one_by_one.with_draft(apply(replace(DECISION, actions=(action,)), one_by_one).draft)
        assert together.draft == one_by_one.draft
        assert together.words == ("no quarantine of elsewhere: the node is not known any more",)
        left = {worker.name: worker.leaving for worker in together.draft.state.placement.workers if worker.leaving}
        assert left == {f"j-w{n}-0": f"why {n}" for n in (0, 1, 3, 6)}
        assert together.draft.state.budget.total == 2, "of those that nobody wanted away"


class TestBlame:
    def test_a_suspicion_is_handed_on_where_it_may_be(self) -> None:
        proposed = blame.propose(training(), policy(), "node-1", "it hung")
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
        assert blame.propose(training(), policy(allow=allow), node, "it hung").withheld == words
