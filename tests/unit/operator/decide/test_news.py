"""What errands have brought back: the API server's word on the template, what became of nodes that were blamed."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api import Cause, Class, Verdict
from pacekeeper_operator.decide import news
from pacekeeper_operator.observation import Observation, Ruling, TemplateVerdict
from pacekeeper_operator.state import Incident, WantedQuarantine
from tests.support.worlds import NOW, fresh, policy, training


def blaming(*names: str) -> Observation:
    """Each incident of these names blames a node; of "forgotten" the incident is no longer kept."""
    world = training()
    incidents = tuple(
        Incident(name, Cause.NODE_LOST, Class.INFRASTRUCTURE, 1, "m", NOW, NOW, NOW)
        for name in names
        if name != "forgotten"
    )
    wanted = tuple(WantedQuarantine(f"node-{name}", "uid", "why", name) for name in names)
    return world.with_draft(world.draft.with_incidents(current=incidents, quarantines=wanted))


class TestRulings:
    def test_what_became_of_a_node_stands_in_its_incident(self) -> None:
        world = replace(
            blaming("a", "b"), rulings={("a", "node-a"): Ruling(Verdict.SUSPECTED, "no witness has spoken yet")}
        )
        incidents = news.step(world, policy()).state.incidents
        one, other = sorted(incidents.current, key=lambda incident: incident.name)
        assert (one.quarantine, one.verdict) == ("no witness has spoken yet", Verdict.SUSPECTED)
        assert (other.quarantine, other.verdict) == ("", None)
        assert incidents.quarantines == world.state.incidents.quarantines, "both are asked for again"

    def test_what_stands_in_a_quarantine_is_remembered_over_a_restart_of_the_operator(self) -> None:
        raised, refused = Ruling(Verdict.SUSPECTED, "new", raised=True), Ruling(Verdict.PAUSED, "paused")
        world = replace(blaming("a", "b"), rulings={("a", "node-a"): raised, ("b", "node-b"): refused})
        world = replace(world.with_draft(news.step(world, policy())), rulings={("a", "node-a"): refused})
        quarantines = news.step(world, policy()).state.incidents.quarantines
        assert [(wanted.incident, wanted.raised) for wanted in quarantines] == [("a", True), ("b", False)]

    def test_a_final_one_is_asked_for_no_more(self) -> None:
        held, paused = Ruling(Verdict.QUARANTINED, "quarantined"), Ruling(Verdict.PAUSED, "paused")
        rulings = {("a", "node-a"): held, ("b", "node-b"): paused}
        incidents = news.step(replace(blaming("a", "b"), rulings=rulings), policy()).state.incidents
        assert [wanted.incident for wanted in incidents.quarantines] == ["b"]

    def test_of_an_incident_that_is_not_kept_nothing_is_written(self) -> None:
        world = replace(
            blaming("forgotten"), rulings={("forgotten", "node-forgotten"): Ruling(Verdict.CLEARED, "cleared")}
        )
        incidents = news.step(world, policy()).state.incidents
        assert (incidents.current, incidents.quarantines) == ((), ())

    def test_each_node_of_an_incident_has_its_own(self) -> None:
        """One that is held says nothing of the other one, which is asked for further, and which the status tells of."""
        world = blaming("a")
        wanted = (*world.state.incidents.quarantines, WantedQuarantine("other", "uid", "why", "a"))
        held, paused = Ruling(Verdict.QUARANTINED, "node-a is held"), Ruling(Verdict.PAUSED, "other is not")
        world = world.with_draft(world.draft.with_incidents(quarantines=wanted))
        incidents = news.step(
            replace(world, rulings={("a", "node-a"): held, ("a", "other"): paused}), policy()
        ).state.incidents
        assert [wanted.node for wanted in incidents.quarantines] == ["other"]
        (incident,) = incidents.current
        assert (incident.quarantine, incident.verdict) == ("node-a is held; other is not", Verdict.PAUSED)

    def test_no_news_change_nothing(self) -> None:
        world = blaming("a", "b")
        assert news.step(world, policy()) is world.draft


class TestTemplate:
    def told(self, verdict: TemplateVerdict) -> Observation:
        world = fresh()
        world = world.with_draft(world.draft.with_placement(template_accepted=-1))
        return world.with_draft(news.step(replace(world, template=verdict), policy()))

    def test_accepted(self) -> None:
        world = self.told(TemplateVerdict(1))
        assert world.state.placement.template_accepted == 1
        assert news.step(replace(world, template=TemplateVerdict(1)), policy()) is world.draft, "once"

    def test_rejected_until_it_is_accepted_after_all(self) -> None:
        world = self.told(TemplateVerdict(1, "no such priority class"))
        placement = world.state.placement
        assert (placement.template_accepted, placement.template_rejected) == (-1, 1)
        assert placement.rejection == "no such priority class"
        placement = news.step(replace(world, template=TemplateVerdict(1)), policy()).state.placement
        assert (placement.template_accepted, placement.template_rejected, placement.rejection) == (1, -1, "")

    def test_a_word_on_another_generation_is_none_on_this_one(self) -> None:
        assert self.told(TemplateVerdict(2)).state.placement.template_accepted == -1
        assert self.told(TemplateVerdict(0, "refused")).state.placement.template_rejected == -1
