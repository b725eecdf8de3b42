"""Workers among strangers, and ranks that wait for one another: a client that reaches the rendezvous port changes
nothing for the job, and the rank that holds the others is found across workers."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_job_manifest, build_paced_job

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000  # steps: until the test ends it
NONCE = b"0" * 32
HOSTILE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 30_000,
    pickle.dumps({"worker": "stranger"}) + b"\n",
    b"pacekeeper " + NONCE + b' 1\n{"worker": "stranger", "membership": 1, "status": "Ending", "round": 9}\n',
    b"pacekeeper " + NONCE + b" 1\n" + b"0" * 64 + b' {"worker": "stranger"}\n',
    b"",
)
KNOCK = """
import socket, sys
address, port, content = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
received = b""
with socket.create_connection((address, port), timeout=60) as connection:  # the launcher hangs up after two
    try:
        connection.sendall(content)
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionError:
        pass
print(received.hex())
"""


@pytest.fixture(scope="module")
def job(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """Two workers with four ranks each: 2 replicas × 2 stages × 2 parts of a layer."""
    with scratch_namespace(cluster) as namespace:
        body = build_job_manifest(
            "guarded",
            ["pacekeeper", "run", "testing/scripts/nested.py"],
            environment={"FOLDER": "/checkpoints", "STEPS": str(LONG), "SLEEP": "0.2"},
            nprocPerNode=4,
            checkpoint={"everySteps": LONG, "volumeClaimName": "guarded"},
            detection={"stragglerSlowdown": 10},
        )
        job = ClusterJob.apply(cluster, namespace, body)
        job.wait_for_phase("Running", timeout=120)
        yield job
        job.delete()


def test_strangers_at_the_rendezvous_port_are_disconnected_and_end_no_round(job: ClusterJob) -> None:
    plan, first = job.read_plan(), job.read_plan()["members"][0]
    assert plan["secret"]
    for content in HOSTILE:
        received = send_from_worker(job, job.find_worker(1), first["address"], plan["store_port"], content)
        assert received == b"" or (received.startswith(b"pacekeeper ") and len(received) < 64), "no more than a nonce"
    job.wait_for_more_steps()
    assert job.read_plan()["membership"] == plan["membership"]
    assert job.list_incidents() == []
    log = job.cluster.kubectl("logs", first["worker"], "-c", "trainer", "-n", job.namespace)
    assert log.count("were rejected") == 1, "logged once, not for each of them"
    assert plan["secret"] not in log


def test_a_rank_that_hangs_inside_one_tensor_group_is_named_among_all_that_wait(job: ClusterJob) -> None:
    """Its partner waits for it in that group, the other stage to be sent something, and the other replica, on another
    worker, in the data groups. The round after it is met for as before the strangers came."""
    job.wait_for_more_steps()
    (job.find_checkpoint_folder() / "fault-3").write_text("deadlock")
    (incident,) = job.wait_until_healed("hang")
    assert (incident["spec"]["rank"], incident["spec"]["worker"]) == (3, job.find_worker(3))
    diagnosis = incident["status"]["diagnosis"]
    assert (diagnosis["fault"], diagnosis["culprit"]) == ("Code", "rank 3"), diagnosis
    witnesses = {witness["kind"]: witness["message"] for witness in diagnosis["signals"]}
    assert re.search(r"rank 2 waits in ALL_REDUCE \d+ of group 'tensor' of ranks 2-3 for rank 3", witnesses["Waits"])
    assert "in begin" in witnesses["Stack"]
    job.wait_for_more_steps()


def test_no_other_container_mounts_the_sidecars_token(cluster: KubectlCluster, namespace: str) -> None:
    """The condition has the operator's message, and no pod is created."""
    spy = {"name": "spy", "image": "spy", "volumeMounts": [{"name": "pacekeeper-token", "mountPath": "/token"}]}
    body = build_paced_job("spying", LONG)
    body["spec"]["template"]["spec"]["containers"].append(spy)
    job = ClusterJob.apply(cluster, namespace, body)
    job.wait_until(lambda: job.get_condition("InvalidTemplate").get("status") == "True", 120, "the template is refused")
    assert "containers[1].volumeMounts[0]: pacekeeper-token" in job.get_condition("InvalidTemplate")["message"]
    assert job.list_pods() == []
    job.delete()


def send_from_worker(job: ClusterJob, worker: str, address: str, port: int, content: bytes) -> bytes:
    """All that the rendezvous server sends until it hangs up, to a client in that worker's pod: the NetworkPolicy
    keeps out pods of other jobs."""
    command = ["python", "-c", KNOCK, address, str(port), content.hex()]
    received = job.cluster.kubectl("exec", worker, "-c", "trainer", "-n", job.namespace, "--", *command)
    return bytes.fromhex(received.strip())
