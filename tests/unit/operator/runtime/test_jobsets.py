"""JobSets that the operator runs, from end to end: the loop over them, and a simulated API server with its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pacekeeper_operator.api.names import Object
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime.jobsets import LONGEST_JOBSET_BACKOFF_SECONDS, run_jobset_loop
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from simulation.kubernetes.api import admission, objects
from simulation.kubernetes.api.connection import SimulatedApiConnection
from simulation.kubernetes.api.objects import ServedKind
from simulation.loop import Process
from simulation.operators.runtime import SimulatedRuntime
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.managed_jobsets import JOBSET_NAME, build_managed_jobset, build_replicated_job
from testing.simulated.simulated_api import NAMESPACE, ApiServerOnlyWorld

FLAVOR = {"nodeSelector": {"pool": "a"}}
JOBSET_KIND = ServedKind("jobsets", "JobSet", "jobset.x-k8s.io/v1alpha2", has_status=True, has_generation=True)


class JobSetWorld(ApiServerOnlyWorld):
    """An API server that serves JobSets, and an operator of which only the loop over JobSets runs."""

    def __init__(self) -> None:
        super().__init__()
        self._starts = 0
        self.start_operator()

    def start_operator(self) -> None:
        self._starts += 1
        self.process = process = Process(self.loop, f"operator-{self._starts}")
        self.operator = Operator(
            Settings(jobsets_enabled=True),
            Cluster(SimulatedApiConnection(self.api, "operator", process)),
            JobRegistry(0.0),
            INSTALLATION,
            PrometheusClient("", "", ""),
            SimulatedRuntime(self, "operator", process.name),
            paused="",
        )
        process.spawn(run_jobset_loop(self.operator), "JobSets")

    def apply(self, *jobs: Object, **changes: Any) -> None:
        body = build_managed_jobset(*jobs, **changes)
        metadata = {"name": body["metadata"]["name"], "namespace": NAMESPACE}
        self.api.create("jobsets", {**body, "metadata": metadata | {"labels": body["metadata"].get("labels", {})}})
        self.pass_time(2.0)

    def find(self, plural: str) -> Object:
        """Return the JobSet or its TrainingJob; {}: there is none."""
        return self.api.get(plural, JOBSET_NAME, NAMESPACE) or {}

    def change(self, plural: str, patch: Object, subresource: str = "") -> None:
        """Change an object as another one does, and let the operator react. kopf reports changes of TrainingJobs."""
        self.api.patch(plural, JOBSET_NAME, NAMESPACE, patch, subresource=subresource)
        self.report_job()
        self.pass_time(2.0)

    def report_job(self) -> None:
        if job := self.find("trainingjobs"):
            self.operator.jobsets.wake_for_job((NAMESPACE, JOBSET_NAME), job)

    def set_phase(self, phase: str, **status: Any) -> None:
        """Report the phase of the TrainingJob as its loop does."""
        state = "True" if phase == "Suspended" else "False"
        condition = {"type": "Suspended", "status": state, "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        generation = self.find("trainingjobs")["metadata"]["generation"]
        reported = {"phase": phase, "observedGeneration": generation, "conditions": [condition], **status}
        self.change("trainingjobs", {"status": reported}, "status")

    def read_conditions(self) -> dict[str, tuple[str, str]]:
        conditions = self.find("jobsets").get("status", {}).get("conditions", ())
        return {item["type"]: (item["status"], item["reason"]) for item in conditions}

    def list_events(self) -> list[tuple[str, str]]:
        events = self.api.list_all("events")
        return [(event["type"], event["reason"]) for event in events if event["regarding"]["kind"] == "JobSet"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSetWorld]:
    monkeypatch.setitem(objects.KINDS, "jobsets", JOBSET_KIND)
    monkeypatch.setitem(objects.KINDS_BY_NAME, (JOBSET_KIND.group, JOBSET_KIND.name), JOBSET_KIND)
    monkeypatch.setitem(admission.ADMISSION_POLICIES, "trainingjobs", {})  # as with jobSets.enabled
    world = JobSetWorld()
    yield world
    world.process.kill()
    world.loop.close()


def test_a_jobset_in_a_queue_trains_where_kueue_admits_it_and_completes(world: JobSetWorld) -> None:
    world.apply(build_replicated_job("node"), queue="team", suspend=True)
    job = world.find("trainingjobs")
    assert job["spec"]["suspend"] is True
    assert world.find("jobsets")["status"]["replicatedJobsStatus"][0]["suspended"] == 1

    def admit(**pod: Any) -> None:
        replicated = [build_replicated_job("node", **pod)]
        world.change("jobsets", {"spec": {"suspend": False, "replicatedJobs": replicated}})

    admit(**FLAVOR)
    assert world.find("trainingjobs")["spec"]["suspend"] is False
    assert world.find("trainingjobs")["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}
    world.set_phase("Running", workers={"desired": 2, "ready": 2, "spare": 0, "summary": "2/2"}, restarts=1)
    status = world.find("jobsets")["status"]
    assert (status["restarts"], status["replicatedJobsStatus"][0]["ready"]) == (1, 1)
    assert world.read_conditions()["Suspended"] == ("False", "ResumeJobs")

    world.change("jobsets", {"spec": {"suspend": True}})  # preempted
    assert world.find("jobsets")["status"]["replicatedJobsStatus"][0]["active"] == 1, "its pods leave"
    world.set_phase("Suspended")
    assert world.find("jobsets")["status"]["replicatedJobsStatus"][0]["active"] == 0
    admit(nodeSelector={"pool": "b"})
    assert world.find("trainingjobs")["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "b"}

    world.set_phase("Complete")
    assert world.find("jobsets")["status"]["terminalState"] == "Completed"
    assert world.read_conditions()["Completed"] == ("True", "AllJobsCompleted")
    assert [reason for _, reason in world.list_events()] == [
        *("InSync", "SuspendedJobs", "ResumeJobs", "SuspendedJobs", "ResumeJobs", "AllJobsCompleted")
    ]


def test_a_ttl_deletes_only_a_job_whose_end_is_reported(world: JobSetWorld) -> None:
    world.apply(ttlSecondsAfterFinished=0)
    assert "ttlSecondsAfterFinished" not in world.find("trainingjobs")["spec"].get("runPolicy", {})
    world.set_phase("Complete")
    assert world.find("trainingjobs")["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 0
    world.api.delete("trainingjobs", JOBSET_NAME, NAMESPACE)
    world.pass_time(120.0)
    assert world.find("trainingjobs") == {}, "it does not run again"


def test_a_jobset_that_cannot_be_converted_fails_with_an_event(world: JobSetWorld) -> None:
    world.apply(volumeClaimPolicies=[{}])
    assert (world.find("trainingjobs"), world.find("jobsets")["status"]["terminalState"]) == ({}, "Failed")
    assert world.list_events() == [("Warning", "ConversionRefused")] * 2


def test_the_next_operator_continues(world: JobSetWorld) -> None:
    world.apply()
    uid = world.find("trainingjobs")["metadata"]["uid"]
    world.process.kill()
    world.change("jobsets", {"spec": {"suspend": True}})
    assert not world.find("trainingjobs")["spec"].get("suspend")
    world.start_operator()
    world.pass_time(5.0)
    job = world.find("trainingjobs")
    assert (job["metadata"]["uid"], job["spec"]["suspend"]) == (uid, True)


def test_a_deleted_jobset_takes_its_job_along_and_a_deleted_job_is_created_again(world: JobSetWorld) -> None:
    world.apply()
    world.api.delete("trainingjobs", JOBSET_NAME, NAMESPACE)
    world.pass_time(70.0)
    assert world.find("trainingjobs"), "a resync notices it"
    world.api.delete("jobsets", JOBSET_NAME, NAMESPACE)
    world.pass_time(120.0)
    assert world.find("trainingjobs") == {}


def test_a_job_of_that_name_is_left_alone_until_it_is_gone(world: JobSetWorld) -> None:
    spec = {"template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}}
    world.api.create("trainingjobs", {"metadata": {"name": JOBSET_NAME, "namespace": NAMESPACE}, "spec": spec})
    other = world.find("trainingjobs")
    world.apply()
    assert world.find("trainingjobs") == other
    assert world.read_conditions() == {"TrainingJobSynced": ("False", "NameTaken")}
    world.api.delete("trainingjobs", JOBSET_NAME, NAMESPACE)
    world.pass_time(LONGEST_JOBSET_BACKOFF_SECONDS + 1)
    assert world.read_conditions() == {"TrainingJobSynced": ("True", "InSync")}


def test_a_job_that_the_api_server_rejects_is_tried_again(world: JobSetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse: Callable[[Object | None, Object | None], str] = lambda *_: "not now"  # noqa: E731  # as the table has it
    with monkeypatch.context() as patched:
        patched.setitem(admission.ADMISSION_POLICIES, "trainingjobs", {"jobs": refuse})
        world.apply()
        assert world.read_conditions() == {"TrainingJobSynced": ("False", "TrainingJobRejected")}
        assert "terminalState" not in world.find("jobsets")["status"]
    world.pass_time(LONGEST_JOBSET_BACKOFF_SECONDS + 1)
    assert world.find("trainingjobs")


@pytest.mark.parametrize("manager", ["jobset.sigs.k8s.io/jobset-controller", "kueue.x-k8s.io/multikueue", None])
def test_jobsets_of_others_are_not_touched(world: JobSetWorld, manager: str | None) -> None:
    world.apply(managedBy=manager)
    assert (world.find("trainingjobs"), "status" in world.find("jobsets")) == ({}, False)


def test_steps_of_a_job_cause_no_pass(world: JobSetWorld) -> None:
    world.apply()
    world.set_phase("Running", step=1)
    jobsets = world.operator.jobsets
    assert jobsets.get_delay(9.0) == 9.0
    world.api.patch("trainingjobs", JOBSET_NAME, NAMESPACE, {"status": {"step": 2}}, subresource="status")
    world.report_job()
    assert jobsets.get_delay(9.0) == 9.0
    world.api.patch("trainingjobs", JOBSET_NAME, NAMESPACE, {"status": {"restarts": 1}}, subresource="status")
    world.report_job()
    assert jobsets.get_delay(9.0) == 0.0
