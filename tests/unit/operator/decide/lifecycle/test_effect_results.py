"""Results of effects: the API server's verdict on the template, and the decisions on quarantine requests."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.decide.lifecycle import effect_results
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.effect_results import QuarantineDecision, TemplateVerdict
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_policy, build_training


def build_with_requests(*names: str) -> Observation:
    """Build a job with one quarantine request for each incident name; the incident "forgotten" is deleted."""
    observation = build_training()
    incidents = tuple(
        Incident(name, IncidentCause.NODE_LOST, IncidentClass.INFRASTRUCTURE, 1, "m", NOW, NOW, NOW)
        for name in names
        if name != "forgotten"
    )
    requests = tuple(QuarantineRequest(f"node-{name}", "uid", "why", name) for name in names)
    return observation.with_desired(observation.desired.with_incidents(current=incidents, quarantine_requests=requests))


class TestQuarantineDecisions:
    def test_the_decision_on_a_node_is_recorded_in_its_incident(self) -> None:
        observation = replace(
            build_with_requests("a", "b"),
            quarantine_decisions={
                ("a", "node-a"): QuarantineDecision(QuarantineVerdict.SUSPECTED, "no witness has spoken yet")
            },
        )
        incidents = effect_results.apply_effect_results(observation, build_policy()).state.incidents
        first, second = sorted(incidents.current, key=lambda incident: incident.name)
        assert (first.quarantine_summary, first.verdict) == ("no witness has spoken yet", QuarantineVerdict.SUSPECTED)
        assert (second.quarantine_summary, second.verdict) == ("", None)
        assert incidents.quarantine_requests == observation.state.incidents.quarantine_requests, (
            "both are requested again"
        )

    def test_a_recorded_request_stays_recorded_over_a_restart_of_the_operator(self) -> None:
        recorded, refused = (
            QuarantineDecision(QuarantineVerdict.SUSPECTED, "new", recorded=True),
            QuarantineDecision(QuarantineVerdict.PAUSED, "paused"),
        )
        observation = replace(
            build_with_requests("a", "b"), quarantine_decisions={("a", "node-a"): recorded, ("b", "node-b"): refused}
        )
        observation = replace(
            observation.with_desired(effect_results.apply_effect_results(observation, build_policy())),
            quarantine_decisions={("a", "node-a"): refused},
        )
        quarantines = effect_results.apply_effect_results(
            observation, build_policy()
        ).state.incidents.quarantine_requests
        assert [(request.incident, request.recorded) for request in quarantines] == [("a", True), ("b", False)]

    def test_a_request_with_a_final_decision_is_removed(self) -> None:
        quarantined, paused = (
            QuarantineDecision(QuarantineVerdict.QUARANTINED, "quarantined"),
            QuarantineDecision(QuarantineVerdict.PAUSED, "paused"),
        )
        decisions = {("a", "node-a"): quarantined, ("b", "node-b"): paused}
        incidents = effect_results.apply_effect_results(
            replace(build_with_requests("a", "b"), quarantine_decisions=decisions), build_policy()
        ).state.incidents
        assert [request.incident for request in incidents.quarantine_requests] == ["b"]

    def test_a_decision_for_a_deleted_incident_is_dropped(self) -> None:
        observation = replace(
            build_with_requests("forgotten"),
            quarantine_decisions={
                ("forgotten", "node-forgotten"): QuarantineDecision(QuarantineVerdict.CLEARED, "cleared")
            },
        )
        incidents = effect_results.apply_effect_results(observation, build_policy()).state.incidents
        assert (incidents.current, incidents.quarantine_requests) == ((), ())

    def test_each_node_of_an_incident_has_a_separate_decision(self) -> None:
        """A final decision on one node leaves the request for the other, and the summary names both."""
        observation = build_with_requests("a")
        requests = (*observation.state.incidents.quarantine_requests, QuarantineRequest("other", "uid", "why", "a"))
        quarantined, paused = (
            QuarantineDecision(QuarantineVerdict.QUARANTINED, "node-a is held"),
            QuarantineDecision(QuarantineVerdict.PAUSED, "other is not"),
        )
        observation = observation.with_desired(observation.desired.with_incidents(quarantine_requests=requests))
        incidents = effect_results.apply_effect_results(
            replace(observation, quarantine_decisions={("a", "node-a"): quarantined, ("a", "other"): paused}),
            build_policy(),
        ).state.incidents
        assert [requests.node for requests in incidents.quarantine_requests] == ["other"]
        (incident,) = incidents.current
        assert (incident.quarantine_summary, incident.verdict) == (
            "node-a is held; other is not",
            QuarantineVerdict.PAUSED,
        )

    def test_without_results_the_desired_state_is_unchanged(self) -> None:
        observation = build_with_requests("a", "b")
        assert effect_results.apply_effect_results(observation, build_policy()) is observation.desired


class TestTemplate:
    def apply_verdict(self, verdict: TemplateVerdict) -> Observation:
        observation = build_fresh()
        observation = observation.with_desired(observation.desired.with_placement(template_accepted=None))
        return observation.with_desired(
            effect_results.apply_effect_results(replace(observation, template=verdict), build_policy())
        )

    def test_an_accepted_template_is_recorded_once(self) -> None:
        observation = self.apply_verdict(TemplateVerdict(1))
        assert observation.state.placement.template_accepted == 1
        assert (
            effect_results.apply_effect_results(replace(observation, template=TemplateVerdict(1)), build_policy())
            is observation.desired
        ), "it is recorded once"

    def test_a_rejected_template_is_accepted_later(self) -> None:
        observation = self.apply_verdict(TemplateVerdict(1, "no such priority class"))
        placement = observation.state.placement
        assert (placement.template_accepted, placement.template_rejected) == (None, 1)
        assert placement.rejection == "no such priority class"
        placement = effect_results.apply_effect_results(
            replace(observation, template=TemplateVerdict(1)), build_policy()
        ).state.placement
        assert (placement.template_accepted, placement.template_rejected, placement.rejection) == (1, None, "")

    def test_a_verdict_on_another_generation_is_ignored(self) -> None:
        assert self.apply_verdict(TemplateVerdict(2)).state.placement.template_accepted is None
        assert self.apply_verdict(TemplateVerdict(0, "refused")).state.placement.template_rejected is None
