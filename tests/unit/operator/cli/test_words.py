"""How `kubectl pacekeeper` presents objects that the operator has written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.incident import IncidentOutcome, RemedyPrice, Restart, RestartPart, RestartPartName
from pacekeeper_operator.api.names import API_VERSION, Object
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.cli import incidents, jobs, nodes, pods
from pacekeeper_operator.cli.loaded_objects import LoadedIncident, LoadedJob, LoadedQuarantine, parse_newest_first
from pacekeeper_operator.cli.text import TEXT_WIDTH
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.effect_results import BlockedAction
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.cli_objects import build_incident_object, build_job_object, build_metadata
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    with_pods,
)


def evaluate_hang() -> PassResult:
    return evaluate_job(replace(build_training(), faults=build_stalls(build_training(), culprit=2)), build_policy())


def build_hang_incident() -> Incident:
    (incident,) = evaluate_hang().desired.state.incidents.current
    return incident


def load_incident(incident: Incident) -> LoadedIncident:
    return LoadedIncident.from_object(build_incident_object(build_training().job, incident))


def format_status(observation: Observation, *loaded: LoadedIncident, **changes: Any) -> str:
    return check_width(
        jobs.format_status(LoadedJob.from_object(build_job_object(observation, **changes)), loaded, NOW + 60)
    )


def explain_job(observation: Observation, *loaded: LoadedIncident, **changes: Any) -> str:
    return check_width(
        jobs.explain_job(LoadedJob.from_object(build_job_object(observation, **changes)), loaded, NOW + 60)
    )


def check_width(text: str) -> str:
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    return " ".join(text.split())


class TestJob:
    def test_a_training_job(self) -> None:
        text = format_status(build_training())
        for part in ("j in ns: Running for 60 s", "step 500", "4 of 4 train, 1 of 1 as spares; round 1", "Sync"):
            assert part in text
        assert text.endswith("next nothing is to be done")
        assert "No problem is known." in explain_job(build_training())

    def test_a_job_with_a_total_shows_its_progress(self) -> None:
        observation = change_members(build_training(), progress={"total_steps": 1000})
        observation = observation.with_desired(observation.desired.with_lifecycle(progress_since=NOW - 500))
        assert "500 of 1000 (50%), about 8m left at its pace; the newest" in format_status(observation)

    def test_a_job_that_no_operator_has_observed(self) -> None:
        for text in (format_status(build_training(), seen=False), explain_job(build_training(), seen=False)):
            assert "no operator has observed generation 1" in text

    def test_a_job_that_waits_for_nodes(self) -> None:
        observation = with_pods(
            build_fresh().with_desired(evaluate_job(build_fresh(), build_policy()).desired), placed=False
        )
        for text in (format_status(observation), explain_job(observation)):
            assert "0 of 2 workers are ready" in text

    def test_a_hung_job_shows_the_chosen_remedy_and_its_reason(self) -> None:
        observation, incident = evaluate_hang().observation, load_incident(replace(build_hang_incident(), applied=None))
        assert "next RestartRanks is under way" in format_status(observation, incident)
        text = explain_job(observation, incident)
        for part in (
            "rank 2 blocks all others (Stopped)",
            "Process: the process of rank 2 is stopped",
            "RestartRanks: chosen, costs 6.0 s of training, wins all (the job stands still)",
            "once is no reason to blame the worker",
        ):
            assert part in text

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"mode": RemediationMode.RECOMMEND}, "RestartRanks would be taken, but remedies are only recommended"),
            ({"applied": NOW}, "RestartRanks is applied; its effect is being measured"),
            ({"remedy": None}, "no remedy is taken so far; RestartRanks: the job stands still"),
        ],
    )
    def test_status_shows_the_next_step(self, changes: dict[str, Any], text: str) -> None:
        incident = replace(
            build_hang_incident(), remedies=(RemedyPrice("RestartRanks", reason="the job stands still"),), **changes
        )
        assert text in format_status(evaluate_hang().observation, load_incident(incident))

    def test_a_job_that_is_blocked_refused_slow_or_paused(self) -> None:
        blocked = replace(
            build_training(), blocked_actions=(BlockedAction("create pod j-w5-0", "exceeded quota: gpus"),)
        )
        assert "ActionBlocked: ActionFailed: create pod j-w5-0: exceeded quota: gpus." in explain_job(blocked)
        refused = build_fresh().with_desired(
            build_fresh().desired.with_placement(template_rejected=1, rejection="no such volume")
        )
        assert "nothing, until the cause is fixed: PodRefused: no such volume" in format_status(refused)
        slow = replace(build_training(), metrics=JobMetrics(relative_time=2.0, slowdown=1.6, slowest_rank=3))
        assert "slowdown 1.60: rank 3 on j-w3-0 delays the others" in format_status(slow)
        assert "Paused: by hand" in explain_job(build_training(), paused="by hand")
        assert "kubectl pacekeeper resume j" in format_status(
            build_training(), spec={"remediation": {"mode": "Recommend"}}
        )

    def test_a_failed_job_is_to_be_created_again(self) -> None:
        observation = build_training(metrics=JobMetrics(prometheus_error="Prometheus is not configured"))
        message = "worker j-w0-0 cannot start: container trainer: CreateContainerConfigError: no secret"
        life = {"failed_reason": "ContainerCannotStart", "failed_message": message, "stopped_at": NOW - 5}
        observation = observation.with_desired(observation.desired.with_plan(stop=Stop.FINISH).with_lifecycle(**life))
        for text in (
            format_status(observation, paused="by hand", spec={"remediation": {"mode": "Recommend"}}),
            explain_job(observation, paused="by hand"),
        ):
            assert message in text
            assert "Fix the cause, delete the job, and apply it again" in text
            for other in ("until somebody changes", "pacekeeper resume", "Paused", "MetricsAvailable"):
                assert other not in text
        conditions = build_job_object(observation)["status"]["conditions"]
        stalled = next(condition for condition in conditions if condition["type"] == "Stalled")
        assert stalled["message"].startswith(f"{message}; a job that has failed does not start again")

    def test_many_jobs_are_a_table(self) -> None:
        rows = [
            LoadedJob.from_object(build_job_object(observation))
            for observation in (build_training(), evaluate_hang().observation, build_fresh())
        ]
        lines = jobs.format_overview(rows, namespaces=True).splitlines()
        assert max(map(len, lines)) <= TEXT_WIDTH
        assert [line.split()[:4] for line in lines[1:]] == [
            ["ns", "j", "Running", "500"],
            ["ns", "j", "Recovering", "500"],
            ["ns", "j", "Pending", "–"],
        ]
        assert "WaitingForPods" in lines[3]

    def test_an_object_of_a_newer_operator_asks_for_an_upgrade(self) -> None:
        build_body = build_job_object(build_training())
        build_body["status"]["phase"] = "Levitating"
        with pytest.raises(InputError, match=r"TrainingJob j: status.phase: 'Levitating'.* pip install --upgrade"):
            LoadedJob.from_object(build_body)


def build_pod(name: str = "j-w1-0", phase: str = "Pending", age: float = 60.0, node: str = "node-3") -> Object:
    made = build_metadata(name, f"uid-{name}") | {"creationTimestamp": format_time(NOW - age)}
    return {"kind": "Pod", "metadata": made, "spec": {"nodeName": node}, "status": {"phase": phase}}


def build_event(reason: str, message: str, ago: float, **changes: Any) -> Object:
    at = {"lastTimestamp": format_time(NOW - ago)}
    return {"kind": "Event", "metadata": {}, "type": "Warning", "reason": reason, "message": message} | at | changes


class TestPods:
    MOUNT = 'MountVolume.SetUp failed for volume "data" : configmap "settings" not found'

    def describe_pod(self, *events: Object) -> str:
        return check_width(pods.describe_pod(build_pod(), events, NOW))

    def test_the_newest_warning_of_each_reason_is_shown(self) -> None:
        text = self.describe_pod(
            build_event("FailedMount", "an older one", 300.0),
            build_event("FailedMount", self.MOUNT, 5.0, count=7),
            build_event("FailedCreatePodSandBox", "no address is left", 20.0, lastTimestamp=None,
                  eventTime=format_time(NOW - 20), series={"count": 3, "lastObservedTime": format_time(NOW - 2)}),
            build_event("Scheduled", "assigned to node-3", 1.0, type="Normal"),
        )  # fmt: skip
        assert text == (
            "Pod j-w1-0 on node-3 is Pending (kubectl describe pod j-w1-0): "
            "FailedCreatePodSandBox (3 times, the last 2.0 s ago): no address is left "
            f"FailedMount (7 times, the last 5.0 s ago): {self.MOUNT}"
        )

    def test_without_a_warning_the_last_event_is_shown(self) -> None:
        pulled = build_event("Pulling", 'Pulling image "large"', 600.0, type="Normal")
        text = self.describe_pod(build_event("Scheduled", "assigned", 601.0, type="Normal"), pulled)
        assert text.endswith('is Pending (kubectl describe pod j-w1-0): Pulling (10 min ago): Pulling image "large"')
        assert pods.describe_pod(build_pod(), (), NOW) == ""

    def test_the_newest_waiting_pods_are_chosen(self) -> None:
        found = [
            build_pod("a", "Failed", 1.0),
            build_pod("b", age=90.0),
            build_pod("c", age=10.0),
            build_pod("d", age=50.0),
        ]
        assert [each["metadata"]["name"] for each in pods.choose_waiting_pods(found)] == ["c", "d", "b"]

    def test_an_event_without_a_valid_time_is_shown(self) -> None:
        assert "FailedMount: x" in self.describe_pod(build_event("FailedMount", "x", 0.0, lastTimestamp="soon"))


class TestIncident:
    FINDING = Finding(FaultClass.NETWORK, "link 0 → 1", (Signal(SignalKind.PROBE, "slow"),), 0.98, "look at the path")

    def test_an_incident_is_shown_in_full(self) -> None:
        incident = replace(
            build_hang_incident(),
            applied=NOW + 1,
            recovered=NOW + 3.2,
            outcome=IncidentOutcome.MITIGATED,
            steps_lost=1,
            restart=Restart(
                (RestartPart(RestartPartName.WAIT, 2.0), RestartPart(RestartPartName.LOAD, 4.3, 1)), "Peer"
            ),
            slowdown_before=1.6,
            slowdown_after=1.05,
            predicted_gain=50.0,
            measured_gain=40.0,
            measured_cost=4.2,
            remedies=(RemedyPrice("RestartRanks", None, 5.5, chosen=True),),
            finding=self.FINDING,
            remedy_result="a probe has passed",
            evidence=("x" * 300, 'File "/job/train.py", line 88\n  in load'),
        )
        text = check_width(incidents.format_incident(load_incident(incident)))
        for part in (
            "hang of job j, round 1",
            "recovered after 6.3 s",
            "link 0 → 1; kind of fault: Network; such evidence was right 98% of the times it was tried",
            "Probe: slow to do: look at the path",
            "Mitigated: better than before the remedy",
            "1 step lost",
            "its time: Wait 2.0 s, Load 4.3 s (rank 1); the state came from: Peer",
            "from 1.60 to 1.05",
            "the remedy has won 40 s of training, 50 s were expected",
            "the remedy has cost 4.2 s of training, 5.5 s were expected",
            "a probe has passed",
            "line 88 in load",
        ):
            assert part in text

    def test_control_characters_of_tenants_are_replaced(self) -> None:
        incident = replace(build_hang_incident(), message="\x1b[2Jgone\x07", evidence=("a\tb\x9b31m",))
        text = incidents.format_incident(load_incident(incident)) + incidents.summarize_incident(
            load_incident(incident), NOW
        )
        assert all(line.isprintable() for line in text.split("\n"))
        assert "?[2Jgone?" in text

    @pytest.mark.parametrize("outcome", IncidentOutcome)
    def test_each_outcome_has_a_description(self, outcome: IncidentOutcome) -> None:
        assert f"{outcome}: " in incidents.describe_outcome(
            load_incident(replace(build_hang_incident(), outcome=outcome))
        )

    def test_many_incidents_are_a_table_newest_first(self) -> None:
        old = replace(
            build_hang_incident(),
            name="j-r1-crash-rank0-u1d2c",
            first_sign=NOW - 900,
            outcome=IncidentOutcome.RECOVERED,
        )
        found = parse_newest_first(
            [build_incident_object(build_training().job, one) for one in (old, build_hang_incident())]
        )
        lines = incidents.format_overview(found, NOW).splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["j-r1-hang-u1d2c", "j-r1-crash-rank0-u1d2c"]
        assert ["open" in line for line in lines[1:]] == [True, False]


class TestQuarantine:
    def build_body(self, **fields: Any) -> Object:
        sign = {"namespace": "team-a", "incident": "i", "reason": "hang", "at": "2026-01-31T12:00:00Z"}
        spec = {"reason": "XID 79", "expiresAfter": "6h", "suspicions": [{**sign, "witness": "Probe"}]}
        return {
            "apiVersion": API_VERSION,
            "kind": "NodeQuarantine",
            "metadata": build_metadata("node-7", "u"),
            "spec": spec,
        } | {"status": fields}

    def test_an_approval_describes_its_effects(self) -> None:
        text = check_width(
            nodes.describe_approval(
                LoadedQuarantine.from_object(self.build_body(phase="Pending", message="a witness has spoken"))
            )
        )
        for part in ("node node-7", "Pending: a witness", "XID 79", "team-a/i: hang (Probe)", "After 6h", "cordoned"):
            assert part in text

    def test_a_release_keeps_an_earlier_cordon(self) -> None:
        active = self.build_body(phase="Active", cordonedAt="2026-01-31T12:00:00Z", previouslyCordoned=True)
        assert "it was cordoned before, and stays so" in check_width(
            nodes.describe_release(LoadedQuarantine.from_object(active))
        )
        assert "its node is untouched" in check_width(
            nodes.describe_release(LoadedQuarantine.from_object(self.build_body(phase="Blocked")))
        )
