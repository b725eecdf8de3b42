"""What a user meets on the first day, with the operator installed as users install it.

Jobs that train, jobs that cannot, what can be done to them, and who may talk to the operator.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from demo import kube
from testcluster import credentials
from testing.kubernetes.chart import SYSTEM
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.dashboards import DASHBOARDS, list_queries
from testing.kubernetes.jobs import ClusterJob, build_job_manifest, build_paced_job
from testing.operators.sidecar_calls import call_operator, create_sidecar_token

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000  # steps: until the test ends it
START = 240
"""Seconds at most: all jobs start at once, perhaps on a machine that has other things to do."""
GPT = ["pacekeeper", "run", "examples/gpt.py", "--width=32", "--heads=2", "--layers=1", "--bytes=100000"]


def build_command(source: str) -> list[str]:
    """The command of a trainer that runs these lines."""
    return ["sh", "-c", 'printf "%s" "$0" > /tmp/script.py && exec pacekeeper run /tmp/script.py', source]


@pytest.fixture(scope="module")
def jobs(cluster: KubectlCluster) -> Iterator[Callable[[str], ClusterJob]]:
    """All of them start side by side: a job's start is most of what most of these tests need."""
    with scratch_namespace(cluster) as namespace:
        for body in iterate_manifests():
            ClusterJob.apply(cluster, namespace, body)
        yield lambda name: ClusterJob(cluster, namespace, name)
        ClusterJob(cluster, namespace, "long").delete()


def iterate_manifests() -> Iterator[dict[str, Any]]:
    yield build_paced_job("long", LONG, runPolicy={"cleanPodPolicy": "None"})
    checkpoint = {"everySteps": 20, "volumeClaimName": "gpt"}
    # Where all jobs start at once, any rank is slow for a moment.
    yield build_job_manifest("gpt", [*GPT, "--steps=40"], checkpoint=checkpoint, detection={"stragglerSlowdown": 10})
    for name in ("narrow", "beside"):  # on one claim
        yield build_paced_job(name, 5, replicas=1, checkpoint={"everySteps": 5, "volumeClaimName": "narrow"})
    yield build_job_manifest(
        "exits", build_command('print("loading")\nraise SystemExit("no corpus at /data/corpus")\n')
    )
    unknown = {"image": "127.0.0.1:1/no/such-image:1", "imagePullPolicy": "Always"}
    yield build_job_manifest("image", GPT, trainer=unknown, replicas=1, schedulingTimeout="45s")
    mount = {"volumeMounts": [{"name": "read-only", "mountPath": "/checkpoints", "readOnly": True}]}
    volume = {"volumes": [{"name": "read-only", "emptyDir": {}}]}
    yield build_job_manifest("read-only", [*GPT, "--steps=40"], trainer=mount, pod=volume, replicas=1)
    yield without_a_volume()
    policy = {"activeDeadlineSeconds": 12, "cleanPodPolicy": "All"}
    yield build_job_manifest("deadline", build_command("import time\ntime.sleep(1000)\n"), replicas=1, runPolicy=policy)


def without_a_volume(**pod: Any) -> dict[str, Any]:
    """The trainer mounts what the pod does not have, unless `pod` adds it."""
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/checkpoints"}]}
    return build_job_manifest("template", [*GPT, "--steps=5"], trainer=mount, pod=pod, replicas=1)


class TestMistakes:
    """Jobs that cannot train: each reports why."""

    def test_an_image_that_cannot_be_pulled(self, jobs: Callable[[str], ClusterJob]) -> None:
        """First by the condition Running, then, when the time for placing is over, by its end."""
        job = jobs("image")

        def reason() -> dict[str, str] | None:
            found = job.get_condition("Running")
            return found if found.get("reason") == "ImagePullFailed" else None

        assert (
            "no/such-image:1"
            in job.wait_until(reason, 120, "the condition reports that the image is missing")["message"]
        )
        job.wait_for_phase("Failed", timeout=120)
        assert "no/such-image:1" in job.get_condition("Failed")["message"]

    def test_a_script_that_exits_at_once(self, jobs: Callable[[str], ClusterJob]) -> None:
        job = jobs("exits")
        job.wait_for_phase("Failed", timeout=START)
        failed = job.get_condition("Failed")
        assert (failed["status"], failed["reason"]) == ("True", "ScriptFailed")
        assert "no corpus at /data/corpus" in failed["message"]
        assert job.status["round"] in (2, 3), "the second may go well; a third may begin before the operator has spoken"

        def closed() -> bool:
            return {incident.get("status", {}).get("outcome") for incident in job.list_incidents()} == {"Failed"}

        job.wait_until(closed, 120, "its incidents are closed")

    def test_a_checkpoint_folder_that_is_not_writable(self, jobs: Callable[[str], ClusterJob]) -> None:
        job = jobs("read-only")
        job.wait_for_phase("Failed", timeout=START)
        assert "spec.checkpoint.path: /checkpoints is not writable" in job.get_condition("Failed")["message"]

    def test_a_bad_template_is_refused_with_the_api_servers_message_and_can_be_corrected(
        self, jobs: Callable[[str], ClusterJob]
    ) -> None:
        job = jobs("template")
        job.wait_until(
            lambda: job.get_condition("InvalidTemplate").get("status") == "True", 120, "the template is refused"
        )
        assert 'volumeMounts[0].name: Not found: "scratch"' in job.get_condition("InvalidTemplate")["message"]
        assert not job.list_pods()
        job.patch(suspend=True)
        job.wait_for_phase("Suspended", timeout=120)
        corrected = without_a_volume(volumes=[{"name": "scratch", "emptyDir": {}}])
        job.patch(suspend=False, template=corrected["spec"]["template"])
        job.wait_for_phase("Complete", timeout=120)
        assert job.get_condition("InvalidTemplate")["status"] == "False"

    def test_a_deadline(self, jobs: Callable[[str], ClusterJob]) -> None:
        job = jobs("deadline")
        job.wait_for_phase("Failed", timeout=120)
        assert job.get_condition("Failed")["reason"] == "DeadlineExceeded"
        assert "spec.runPolicy.activeDeadlineSeconds = 12 s" in job.get_condition("Failed")["message"]
        job.wait_until(lambda: not job.list_pods(), 120, "cleanPodPolicy All leaves no pod")

    def test_two_jobs_on_one_claim(self, cluster: KubectlCluster, jobs: Callable[[str], ClusterJob]) -> None:
        """Each has its own folder. One that is pointed to the other's waits while that trains, and then is refused."""
        first = jobs("narrow")
        for job in (first, jobs("beside")):
            job.wait_for_phase("Complete", timeout=START)
            assert job.status["checkpointSubPath"] == job.name
            assert (first.find_claim_folder() / job.name / "step-00000005/manifest.json").exists()
        assert first.list_start_steps() == [0]

        def point_to(name: str) -> ClusterJob:
            checkpoint = {"everySteps": 5, "volumeClaimName": name, "subPath": name}
            return ClusterJob.apply(
                cluster, first.namespace, build_paced_job(f"at-{name}", 9, replicas=1, checkpoint=checkpoint)
            )

        waits, refused = point_to("long"), point_to("narrow")
        in_use = "CheckpointFolderInUse"
        waits.wait_until(lambda: waits.get_condition("Running").get("reason") == in_use, 120, "it waits for the folder")
        assert "job long writes its checkpoints to the same folder" in waits.get_condition("Running")["message"]
        assert not waits.list_pods()
        waits.delete()
        refused.wait_for_phase("Failed", timeout=120)
        message = refused.get_condition("Failed")["message"]
        assert f"holds checkpoints of another job, {first.namespace}/narrow" in message
        assert not (first.find_claim_folder() / "narrow/step-00000009").exists()


def test_a_job_trains_completes_and_is_removed_after_its_ttl(jobs: Callable[[str], ClusterJob]) -> None:
    job = jobs("gpt")
    job.wait_for_phase("Complete", timeout=START)

    status = job.status
    assert (status["step"], status["lastCheckpointStep"], status["round"], status["restarts"]) == (40, 40, 1, 0)
    assert job.get_condition("Complete")["status"] == "True"
    job.wait_until(
        lambda: {pod["status"]["phase"] for pod in job.list_pods()} == {"Succeeded"}, 120, "the sidecars end, too"
    )
    assert {pod["metadata"]["name"] for pod in job.list_pods()} == {"gpt-w0-0", "gpt-w1-0"}, "they stay for their logs"
    assert "done: 40 steps" in job.cluster.kubectl("logs", "gpt-w0-0", "-c", "trainer", "-n", job.namespace)
    assert "Complete" in job.cluster.kubectl("get", "tj", "gpt", "-n", job.namespace)

    job.patch(runPolicy={"ttlSecondsAfterFinished": 1})
    job.wait_until_deleted(timeout=120)
    assert [incident["spec"] for incident in job.list_incidents()] == []


class TestLong:
    """One job that trains until the tests end it."""

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, jobs: Callable[[str], ClusterJob]) -> ClusterJob:
        job = jobs("long")
        job.wait_for_phase("Running", timeout=START)
        job.wait_for_step(10)
        return job

    def test_tools_see_a_ready_job(self, job: ClusterJob) -> None:
        job.cluster.kubectl("wait", "tj", job.name, "--for=condition=Ready", "--timeout=120s", "-n", job.namespace)
        assert job.status["observedGeneration"] == job.read()["metadata"]["generation"]

    def test_on_call_sees_the_jobs_state(self, job: ClusterJob, tmp_path: Path) -> None:
        assert "Running" in job.run_cli("status")
        assert "2 of 2 train" in job.run_cli("status", job.name)
        assert f"{job.name} in {job.namespace} is Running" in job.run_cli("why", job.name)
        assert "Slowdown" in job.run_cli("whatif", job.name)
        page = tmp_path / "page.html"
        assert job.run_cli("report", job.name, f"--output={page}") == f"{page}\n"
        assert f"{job.name} in {job.namespace}" in page.read_text()
        with pytest.raises(subprocess.CalledProcessError) as refused:
            job.run_cli("why", "no-such-job")
        assert re.search(r"there are: .*\bdeadline\b", refused.value.stderr)

    def test_on_call_chooses_its_mode(self, job: ClusterJob) -> None:
        for mode in ("Sync", "Auto"):
            job.run_cli("mode", job.name, mode)
            assert job.read()["spec"]["syncMode"] == mode

    def test_on_call_raises_its_restart_budget(self, job: ClusterJob) -> None:
        job.run_cli("restarts", job.name, "30")
        assert job.read()["spec"]["remediation"]["maxRestarts"] == 30
        with pytest.raises(subprocess.CalledProcessError) as refused:
            job.run_cli("restarts", job.name, "-1")
        assert "maxRestarts" in refused.value.stderr

    def test_a_profile_names_the_slow_function_of_the_script(self, job: ClusterJob) -> None:
        slow = job.find_checkpoint_folder() / "slow-1"
        slow.write_text("0.1")
        try:
            output = " ".join(job.run_cli("profile", job.name, timeout=240).split())
        finally:
            slow.unlink()
        assert "in a profile window of 2 ranks a step took" in output
        incident = next(found for found in job.list_incidents() if found["spec"]["cause"] == "slow-steps")
        diagnosis = incident["status"]["diagnosis"]
        assert (diagnosis["fault"], diagnosis["culprit"].partition(":")[2]) == ("Code", "sleep_if_slow on rank 1"), (
            diagnosis
        )
        assert diagnosis["culprit"] in output
        assert len({witness["kind"] for witness in diagnosis["signals"]}) >= 2

    def test_a_worker_may_report_for_itself(self, job: ClusterJob) -> None:
        worker = job.find_worker(0)
        status, answer = call_operator(job, "/v1/plan", create_sidecar_token(job, worker), {"worker": worker})
        assert (status, answer["role"]) == (200, "Member")

    def test_a_call_without_a_token_is_refused(self, job: ClusterJob) -> None:
        status, answer = call_operator(job, "/v1/plan", "", {})
        assert status == 401
        assert "audience pacekeeper" in answer["error"]

    def test_a_token_of_another_audience_is_refused(self, job: ClusterJob) -> None:
        assert (
            call_operator(job, "/v1/plan", create_sidecar_token(job, job.find_worker(0), audience="vault"), {})[0]
            == 401
        )

    def test_a_token_that_is_bound_to_no_pod_is_refused(self, job: ClusterJob) -> None:
        plain = job.cluster.kubectl("create", "token", "default", "--audience=pacekeeper", "-n", job.namespace)
        assert call_operator(job, "/v1/plan", plain.strip(), {})[0] == 403

    def test_a_token_of_a_pod_that_is_no_worker_is_refused(self, job: ClusterJob) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "long-w0-7"},
            "spec": {"schedulerName": "none", "containers": [{"name": "main", "image": "none"}]},
        }
        job.cluster.apply(pod, job.namespace)
        assert call_operator(job, "/v1/plan", create_sidecar_token(job, "long-w0-7"), {})[0] == 403

    def test_a_report_for_another_worker_is_refused(self, job: ClusterJob) -> None:
        mine, other = job.find_worker(0), job.find_worker(1)
        fault = {"name": "forged", "kind": "Stalled", "worker": other, "round": 1, "noticed_at": time.time()}
        assert call_operator(job, "/v1/faults", create_sidecar_token(job, mine), fault)[0] == 403
        assert call_operator(job, "/v1/plan", create_sidecar_token(job, mine), {"worker": other})[0] == 403

    def test_an_expired_token_is_refused(self, job: ClusterJob) -> None:
        """The signature by itself would be good: the same token with other times is let in."""
        worker, now = job.find_worker(0), int(time.time())
        good, me = create_sidecar_token(job, worker), {"worker": worker}
        assert call_operator(job, "/v1/plan", sign_again(good, now, now + 600), me)[0] == 200
        assert call_operator(job, "/v1/plan", sign_again(good, now - 1200, now - 600), me)[0] == 401

    def test_invalid_reports_are_refused(self, job: ClusterJob) -> None:
        worker = job.find_worker(0)
        mine, heartbeat = create_sidecar_token(job, worker), {"worker": worker}
        for query in ("wait=nan", "wait=1e309", "wait=-1", "after=x"):
            assert call_operator(job, f"/v1/plan?{query}", mine, heartbeat)[0] == 400, query
        assert call_operator(job, "/v1/plan", mine, heartbeat | {"refused": "x" * 70_000})[0] == 413
        forged = {
            "name": f"{job.find_worker(1)}-forged",
            "kind": "Stalled",
            "worker": worker,
            "round": 1,
            "noticed_at": 0.0,
        }
        assert call_operator(job, "/v1/faults", mine, forged)[0] == 400
        assert call_operator(job, "/v1/plan", mine, heartbeat)[0] == 200

    def test_the_authority_stays_the_same_after_its_secret_was_deleted(self, job: ClusterJob) -> None:
        worker, cluster = job.find_worker(0), job.cluster
        before = cluster.get("secret", "pacekeeper-ca", SYSTEM)["data"]
        cluster.kubectl("delete", "secret", "pacekeeper-ca", "-n", SYSTEM)
        job.wait_until(lambda: cluster.get("secret", "pacekeeper-ca", SYSTEM), 120, "the operator writes it again")
        assert before.items() <= cluster.get("secret", "pacekeeper-ca", SYSTEM)["data"].items()
        assert call_operator(job, "/v1/plan", create_sidecar_token(job, worker), {"worker": worker})[0] == 200

    def test_the_leader_stays_the_same_after_its_lease_was_deleted(self, job: ClusterJob) -> None:
        cluster = job.cluster

        def holder() -> str:
            lease = cluster.get("lease", "pacekeeper-operator", SYSTEM)
            return str(lease["spec"].get("holderIdentity") or "") if lease else ""

        def lives(pod: str) -> int:
            return int(cluster.get("pod", pod, SYSTEM)["status"]["containerStatuses"][0]["restartCount"])

        before = job.wait_until(holder, 120, "one leads")
        restarts = lives(before)
        cluster.kubectl("delete", "lease", "pacekeeper-operator", "-n", SYSTEM)
        assert job.wait_until(holder, 120, "there is one again") == before, "the same replica leads"
        assert lives(before) == restarts

    def test_forged_tokens_are_limited_and_do_not_block_known_callers(self, job: ClusterJob) -> None:
        """Of one address only a limited number is reviewed; a known caller is served at the same time."""
        worker = job.find_worker(0)
        good, me = create_sidecar_token(job, worker), {"worker": worker}
        assert call_operator(job, "/v1/plan", good, me)[0] == 200
        unsigned = good.rsplit(".", 1)[0]
        forged = [f"{unsigned}.{encode_base64(number.to_bytes(64))}" for number in range(200)]
        with ThreadPoolExecutor(8) as pool:  # however slow the machine is, faster than they may come
            statuses = set(pool.map(lambda text: call_operator(job, "/v1/plan", text, me)[0], forged))
        assert statuses == {401, 429}
        assert call_operator(job, "/v1/plan", good, me)[0] == 200
        queries = [
            query for name in DASHBOARDS for query in list_queries(name, namespace=job.namespace, trainingjob=job.name)
        ]
        (refusals,) = [query for query in queries if "pacekeeper_refused_calls_total" in query]
        job.wait_until(lambda: kube.has_answers(refusals, time.time() - 10, time.time()), 120, "the dashboard shows it")

    def test_mode_recommend_reports_its_remedy_and_acts_after_the_switch(self, job: ClusterJob) -> None:
        """With cleanPodPolicy None: nothing of ours ends a pod that has come to its end or waits for us."""
        job.run_cli("pause", job.name)
        job.wait_until_observed()
        membership, pods, known = job.read_plan()["membership"], list_uids(job), job.list_incident_names()

        job.crash_rank(1)
        incident = job.wait_until_incident_ended("crash", known)
        assert (incident["status"]["mode"], incident["status"]["outcome"]) == ("Act", "Recovered")
        job.wait_for_more_steps()
        assert (job.read_plan()["membership"], list_uids(job)) == (membership, pods), "as torchrun restarts them"
        round_, began = job.status["round"], job.list_start_steps()

        job.hang_rank(1)
        incident = job.wait_until_incident_ended("hang", known)
        assert (incident["status"]["mode"], incident["status"]["outcome"]) == ("Recommend", "Recommended")
        assert incident["status"]["remedy"] == "RestartRanks"
        assert "applied" not in incident["status"]
        assert (job.read_plan()["membership"], job.status["round"], list_uids(job)) == (membership, round_, pods)
        assert job.list_start_steps() == began

        assert "only recommended" in job.run_cli("incidents", incident["metadata"]["name"])
        job.run_cli("resume", job.name)
        job.wait_until(
            lambda: len(job.list_start_steps()) > len(began), 120, "the ranks are restarted once that is allowed"
        )
        job.wait_for_more_steps()
        assert list_uids(job) == pods

    def test_a_job_is_suspended_resumed_and_scaled(self, job: ClusterJob) -> None:
        job.wait_for_phase("Running")
        known, spent, rounds, worker = (
            job.list_incident_names(),
            job.status["restarts"],
            job.list_start_steps(),
            job.find_worker(1),
        )
        late = create_sidecar_token(job, worker)

        job.patch(suspend=True)
        job.wait_until(lambda: job.get_condition("Suspended")["status"] == "True", 120, "the job is suspended")
        assert not job.list_pods()
        assert job.phase == "Suspended"
        first = list_steps(job)
        job.patch(suspend=False)
        job.wait_for_phase("Running", timeout=120)
        assert job.list_start_steps() == [*rounds, first], "it goes on from the step at which it was suspended"
        assert call_operator(job, "/v1/plan", late, {"worker": worker})[0] == 401, "the token of a pod that is gone"

        job.cluster.kubectl("scale", "tj", job.name, "--replicas=3", "-n", job.namespace)
        job.wait_until(lambda: job.status["workers"]["ready"] == 3, 120, "three workers train")
        job.wait_for_phase("Running")
        job.wait_for_more_steps()
        assert job.status["workers"]["desired"] == 3
        third = job.list_start_steps()[len(rounds) + 1 :]
        assert len(third) == 1, "a change of size is one round"
        assert third[0] > first
        assert job.status["restarts"] == spent, "what the user requests costs no budget"
        assert job.list_incident_names() == known


def list_steps(job: ClusterJob) -> int:
    """Completed by rank 0."""
    return int(job.read_diary()[-1]["step"])


def list_uids(job: ClusterJob) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.list_pods()}


def sign_again(good: str, begin: int, end: int) -> str:
    """The token with other times (seconds since the epoch), signed by the cluster's own key."""
    header, payload, _ = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    text = f"{header}.{encode_base64(json.dumps(claims | {'iat': begin, 'nbf': begin, 'exp': end}).encode())}"
    key = serialization.load_pem_private_key(credentials.SERVICE_ACCOUNTS.with_suffix(".key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = utils.decode_dss_signature(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{text}.{encode_base64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
