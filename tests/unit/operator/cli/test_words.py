"""What `kubectl pacekeeper` makes of objects that the operator has written."""

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


def hang() -> PassResult:
    return evaluate_job(replace(build_training(), faults=build_stalls(build_training(), culprit=2)), build_policy())


def hung() -> Incident:
    (incident,) = hang().desired.state.incidents.current
    return incident


def seen(incident: Incident) -> LoadedIncident:
    return LoadedIncident.from_object(build_incident_object(build_training().job, incident))


def status(world: Observation, *of: LoadedIncident, **changes: Any) -> str:
    return fits(jobs.format_status(LoadedJob.from_object(build_job_object(world, **changes)), of, NOW + 60))


def why(world: Observation, *of: LoadedIncident, **changes: Any) -> str:
    return fits(jobs.explain_job(LoadedJob.from_object(build_job_object(world, **changes)), of, NOW + 60))


def fits(text: str) -> str:
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    return " ".join(text.split())


class TestAJob:
    def test_that_trains(self) -> None:
        words = status(build_training())
        for part in ("j in ns: Running for 60 s", "step 500", "4 of 4 train, 1 of 1 as spares; round 1", "Sync"):
            assert part in words
        assert words.endswith("next nothing is to be done")
        assert "No problem is known." in why(build_training())

    def test_that_says_how_far_it_is(self) -> None:
        world = change_members(build_training(), progress={"total_steps": 1000})
        world = world.with_desired(world.desired.with_lifecycle(progress_since=NOW - 500))
        assert "500 of 1000 (50%), about 8m left at its pace; the newest" in status(world)

    def test_that_nobody_has_looked_at(self) -> None:
        for words in (status(build_training(), seen=False), why(build_training(), seen=False)):
            assert "no operator has observed generation 1" in words

    def test_that_waits_for_room(self) -> None:
        world = with_pods(build_fresh().with_desired(evaluate_job(build_fresh(), build_policy()).desired), placed=False)
        for words in (status(world), why(world)):
            assert "0 of 2 workers are ready" in words

    def test_that_hangs_says_what_was_chosen_and_why(self) -> None:
        world, incident = hang().observation, seen(replace(hung(), applied=None))
        assert "next RestartRanks is under way" in status(world, incident)
        words = why(world, incident)
        for part in (
            "rank 2 blocks all others (Stopped)",
            "Process: the process of rank 2 is stopped",
            "RestartRanks: chosen, costs 6.0 s of training, wins all (the job stands still)",
            "once is no reason to blame the worker",
        ):
            assert part in words

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"mode": RemediationMode.RECOMMEND}, "RestartRanks would be taken, but remedies are only recommended"),
            ({"applied": NOW}, "RestartRanks is applied; its effect is being measured"),
            ({"remedy": None}, "no remedy is taken so far; RestartRanks: the job stands still"),
        ],
    )
    def test_what_comes_next(self, changes: dict[str, Any], words: str) -> None:
        incident = replace(hung(), remedies=(RemedyPrice("RestartRanks", reason="the job stands still"),), **changes)
        assert words in status(hang().observation, seen(incident))

    def test_that_is_hindered_refused_slow_or_paused(self) -> None:
        blocked = replace(
            build_training(), blocked_actions=(BlockedAction("create pod j-w5-0", "exceeded quota: gpus"),)
        )
        assert "ActionBlocked: ActionFailed: create pod j-w5-0: exceeded quota: gpus." in why(blocked)
        refused = build_fresh().with_desired(
            build_fresh().desired.with_placement(template_rejected=1, rejection="no such volume")
        )
        assert "nothing, until the cause is fixed: PodRefused: no such volume" in status(refused)
        slow = replace(build_training(), metrics=JobMetrics(relative_time=2.0, slowdown=1.6, slowest_rank=3))
        assert "slowdown 1.60: rank 3 on j-w3-0 delays the others" in status(slow)
        assert "Paused: by hand" in why(build_training(), paused="by hand")
        assert "kubectl pacekeeper resume j" in status(build_training(), spec={"remediation": {"mode": "Recommend"}})

    def test_that_has_failed_is_not_to_be_changed_but_made_again(self) -> None:
        world = build_training(metrics=JobMetrics(prometheus_error="Prometheus is not configured"))
        message = "worker j-w0-0 cannot start: container trainer: CreateContainerConfigError: no secret"
        life = {"failed_reason": "ContainerCannotStart", "failed_message": message, "stopped_at": NOW - 5}
        world = world.with_desired(world.desired.with_plan(stop=Stop.FINISH).with_lifecycle(**life))
        for words in (
            status(world, paused="by hand", spec={"remediation": {"mode": "Recommend"}}),
            why(world, paused="by hand"),
        ):
            assert message in words
            assert "Fix the cause, delete the job, and apply it again" in words
            for other in ("until somebody changes", "pacekeeper resume", "Paused", "MetricsAvailable"):
                assert other not in words
        conditions = build_job_object(world)["status"]["conditions"]
        stalled = next(condition for condition in conditions if condition["type"] == "Stalled")
        assert stalled["message"].startswith(f"{message}; a job that has failed does not start again")

    def test_many_in_a_table(self) -> None:
        rows = [
            LoadedJob.from_object(build_job_object(world))
            for world in (build_training(), hang().observation, build_fresh())
        ]
        lines = jobs.format_overview(rows, namespaces=True).splitlines()
        assert max(map(len, lines)) <= TEXT_WIDTH
        assert [line.split()[:4] for line in lines[1:]] == [
            ["ns", "j", "Running", "500"],
            ["ns", "j", "Recovering", "500"],
            ["ns", "j", "Pending", "–"],
        ]
        assert "WaitingForPods" in lines[3]

    def test_of_a_newer_operator_says_what_to_do(self) -> None:
        body = build_job_object(build_training())
        body["status"]["phase"] = "Levitating"
        with pytest.raises(InputError, match=r"TrainingJob j: status.phase: 'Levitating'.* pip install --upgrade"):
            LoadedJob.from_object(body)


def pod(name: str = "j-w1-0", phase: str = "Pending", age: float = 60.0, node: str = "node-3") -> Object:
    made = build_metadata(name, f"uid-{name}") | {"creationTimestamp": format_time(NOW - age)}
    return {"kind": "Pod", "metadata": made, "spec": {"nodeName": node}, "status": {"phase": phase}}


def event(reason: str, message: str, ago: float, **changes: Any) -> Object:
    at = {"lastTimestamp": format_time(NOW - ago)}
    return {"kind": "Event", "metadata": {}, "type": "Warning", "reason": reason, "message": message} | at | changes


class TestPods:
    MOUNT = 'MountVolume.SetUp failed for volume "data" : configmap "settings" not found'

    def told(self, *events: Object) -> str:
        return fits(pods.describe_pod(pod(), events, NOW))

    def test_the_newest_warning_of_each_reason(self) -> None:
        words = self.told(
            event("FailedMount", "an older one", 300.0),
            event("FailedMount", self.MOUNT, 5.0, count=7),
            event("FailedCreatePodSandBox", "no address is left", 20.0, lastTimestamp=None,
                  eventTime=format_time(NOW - 20), series={"count": 3, "lastObservedTime": format_time(NOW - 2)}),
            event("Scheduled", "assigned to node-3", 1.0, type="Normal"),
        )  # fmt: skip
        assert words == (
            "Pod j-w1-0 on node-3 is Pending (kubectl describe pod j-w1-0): "
            "FailedCreatePodSandBox (3 times, the last 2.0 s ago): no address is left "
            f"FailedMount (7 times, the last 5.0 s ago): {self.MOUNT}"
        )

    def test_without_a_warning_the_last_of_all(self) -> None:
        pulled = event("Pulling", 'Pulling image "large"', 600.0, type="Normal")
        words = self.told(event("Scheduled", "assigned", 601.0, type="Normal"), pulled)
        assert words.endswith('is Pending (kubectl describe pod j-w1-0): Pulling (10 min ago): Pulling image "large"')
        assert pods.describe_pod(pod(), (), NOW) == ""

    def test_of_many_the_newest_that_wait(self) -> None:
        found = [pod("a", "Failed", 1.0), pod("b", age=90.0), pod("c", age=10.0), pod("d", age=50.0)]
        assert [each["metadata"]["name"] for each in pods.choose_waiting_pods(found)] == ["c", "d", "b"]

    def test_a_time_that_is_none(self) -> None:
        assert "FailedMount: x" in self.told(event("FailedMount", "x", 0.0, lastTimestamp="soon"))


class TestAnIncident:
    FINDING = Finding(FaultClass.NETWORK, "link 0 → 1", (Signal(SignalKind.PROBE, "slow"),), 0.98, "look at the path")

    def test_in_full(self) -> None:
        incident = replace(
            hung(),
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
            finding=self.FINDING,
            remedy_result="a probe has passed",
            evidence=("x" * 300, 'File "/job/train.py", line 88\n  in load'),
        )
        words = fits(incidents.format_incident(seen(incident)))
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
            "a probe has passed",
            "line 88 in load",
        ):
            assert part in words

    def test_a_tenants_words_do_nothing_to_a_terminal(self) -> None:
        incident = replace(hung(), message="\x1b[2Jgone\x07", evidence=("a\tb\x9b31m",))
        words = incidents.format_incident(seen(incident)) + incidents.summarize_incident(seen(incident), NOW)
        assert all(line.isprintable() for line in words.split("\n"))
        assert "?[2Jgone?" in words

    @pytest.mark.parametrize("outcome", IncidentOutcome)
    def test_each_outcome_has_its_words(self, outcome: IncidentOutcome) -> None:
        assert f"{outcome}: " in incidents.describe_outcome(seen(replace(hung(), outcome=outcome)))

    def test_many_in_a_table_the_newest_first(self) -> None:
        old = replace(hung(), name="j-r1-crash-rank0-u1d2c", first_sign=NOW - 900, outcome=IncidentOutcome.RECOVERED)
        found = parse_newest_first([build_incident_object(build_training().job, one) for one in (old, hung())])
        lines = incidents.format_overview(found, NOW).splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["j-r1-hang-u1d2c", "j-r1-crash-rank0-u1d2c"]
        assert ["open" in line for line in lines[1:]] == [True, False]


class TestAQuarantine:
    def body(self, **status: Any) -> Object:
        sign = {"namespace": "team-a", "incident": "i", "reason": "hang", "at": "2026-01-31T12:00:00Z"}
        spec = {"reason": "XID 79", "expiresAfter": "6h", "suspicions": [{**sign, "witness": "Probe"}]}
        return {
            "apiVersion": API_VERSION,
            "kind": "NodeQuarantine",
            "metadata": build_metadata("node-7", "u"),
            "spec": spec,
        } | {"status": status}

    def test_approving_says_what_will_happen(self) -> None:
        words = fits(
            nodes.describe_approval(
                LoadedQuarantine.from_object(self.body(phase="Pending", message="a witness has spoken"))
            )
        )
        for part in ("node node-7", "Pending: a witness", "XID 79", "team-a/i: hang (Probe)", "After 6h", "cordoned"):
            assert part in words

    def test_releasing_leaves_a_cordon_that_was_there(self) -> None:
        active = self.body(phase="Active", cordonedAt="2026-01-31T12:00:00Z", previouslyCordoned=True)
        assert "it was cordoned before, and stays so" in fits(
            nodes.describe_release(LoadedQuarantine.from_object(active))
        )
        assert "its node is untouched" in fits(
            nodes.describe_release(LoadedQuarantine.from_object(self.body(phase="Blocked")))
        )
