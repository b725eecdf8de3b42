"""What errands have brought back: the API server's word on the template, what became of nodes that were blamed."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.decide.lifecycle import effect_results
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.effect_results import QuarantineDecision, TemplateVerdict
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_policy, build_training


def blaming(*names: str) -> Observation:
    """Each incident of these names blames a node; of "forgotten" the incident is no longer kept."""
    world = build_training()
    incidents = tuple(
        Incident(name, IncidentCause.NODE_LOST, IncidentClass.INFRASTRUCTURE, 1, "m", NOW, NOW, NOW)
        for name in names
        if name != "forgotten"
    )
    wanted = tuple(QuarantineRequest(f"node-{name}", "uid", "why", name) for name in names)
    return world.with_desired(world.desired.with_incidents(current=incidents, quarantine_requests=wanted))


class TestRulings:
    def test_what_became_of_a_node_stands_in_its_incident(self) -> None:
        world = replace(
            blaming("a", "b"),
            quarantine_decisions={
                ("a", "node-a"): QuarantineDecision(QuarantineVerdict.SUSPECTED, "no witness has spoken yet")
            },
        )
        incidents = effect_results.apply_effect_results(world, build_policy()).state.incidents
        one, other = sorted(incidents.current, key=lambda incident: incident.name)
        assert (one.quarantine_summary, one.verdict) == ("no witness has spoken yet", QuarantineVerdict.SUSPECTED)
        assert (other.quarantine_summary, other.verdict) == ("", None)
        assert incidents.quarantine_requests == world.state.incidents.quarantine_requests, "both are asked for again"

    def test_what_stands_in_a_quarantine_is_remembered_over_a_restart_of_the_operator(self) -> None:
        raised, refused = (
            QuarantineDecision(QuarantineVerdict.SUSPECTED, "new", recorded=True),
            QuarantineDecision(QuarantineVerdict.PAUSED, "paused"),
        )
        world = replace(blaming("a", "b"), quarantine_decisions={("a", "node-a"): raised, ("b", "node-b"): refused})
        world = replace(
            world.with_desired(effect_results.apply_effect_results(world, build_policy())),
            quarantine_decisions={("a", "node-a"): refused},
        )
        quarantines = effect_results.apply_effect_results(world, build_policy()).state.incidents.quarantine_requests
        assert [(wanted.incident, wanted.recorded) for wanted in quarantines] == [("a", True), ("b", False)]

    def test_a_final_one_is_asked_for_no_more(self) -> None:
        held, paused = (
            QuarantineDecision(QuarantineVerdict.QUARANTINED, "quarantined"),
            QuarantineDecision(QuarantineVerdict.PAUSED, "paused"),
        )
        rulings = {("a", "node-a"): held, ("b", "node-b"): paused}
        incidents = effect_results.apply_effect_results(
            replace(blaming("a", "b"), quarantine_decisions=rulings), build_policy()
        ).state.incidents
        assert [wanted.incident for wanted in incidents.quarantine_requests] == ["b"]

    def test_of_an_incident_that_is_not_kept_nothing_is_written(self) -> None:
        world = replace(
            blaming("forgotten"),
            quarantine_decisions={
                ("forgotten", "node-forgotten"): QuarantineDecision(QuarantineVerdict.CLEARED, "cleared")
            },
        )
        incidents = effect_results.apply_effect_results(world, build_policy()).state.incidents
        assert (incidents.current, incidents.quarantine_requests) == ((), ())

    def test_each_node_of_an_incident_has_its_own(self) -> None:
        """One that is held says nothing of the other one, which is asked for further, and which the status tells of."""
        world = blaming("a")
        wanted = (*world.state.incidents.quarantine_requests, QuarantineRequest("other", "uid", "why", "a"))
        held, paused = (
            QuarantineDecision(QuarantineVerdict.QUARANTINED, "node-a is held"),
            QuarantineDecision(QuarantineVerdict.PAUSED, "other is not"),
        )
        world = world.with_desired(world.desired.with_incidents(quarantine_requests=wanted))
        incidents = effect_results.apply_effect_results(
            replace(world, quarantine_decisions={("a", "node-a"): held, ("a", "other"): paused}), build_policy()
        ).state.incidents
        assert [wanted.node for wanted in incidents.quarantine_requests] == ["other"]
        (incident,) = incidents.current
        assert (incident.quarantine_summary, incident.verdict) == (
            "node-a is held; other is not",
            QuarantineVerdict.PAUSED,
        )

    def test_no_news_change_nothing(self) -> None:
        world = blaming("a", "b")
        assert effect_results.apply_effect_results(world, build_policy()) is world.desired


class TestTemplate:
    def told(self, verdict: TemplateVerdict) -> Observation:
        world = build_fresh()
        world = world.with_desired(world.desired.with_placement(template_accepted=None))
        return world.with_desired(effect_results.apply_effect_results(replace(world, template=verdict), build_policy()))

    def test_accepted(self) -> None:
        world = self.told(TemplateVerdict(1))
        assert world.state.placement.template_accepted == 1
        assert (
            effect_results.apply_effect_results(replace(world, template=TemplateVerdict(1)), build_policy())
            is world.desired
        ), "once"

    def test_rejected_until_it_is_accepted_after_all(self) -> None:
        world = self.told(TemplateVerdict(1, "no such priority class"))
        placement = world.state.placement
        assert (placement.template_accepted, placement.template_rejected) == (None, 1)
        assert placement.rejection == "no such priority class"
        placement = effect_results.apply_effect_results(
            replace(world, template=TemplateVerdict(1)), build_policy()
        ).state.placement
        assert (placement.template_accepted, placement.template_rejected, placement.rejection) == (1, None, "")

    def test_a_word_on_another_generation_is_none_on_this_one(self) -> None:
        assert self.told(TemplateVerdict(2)).state.placement.template_accepted is None
        assert self.told(TemplateVerdict(0, "refused")).state.placement.template_rejected is None
