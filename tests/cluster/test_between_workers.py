"""Workers among strangers: whoever reaches the port where launchers meet changes nothing for the job."""

from __future__ import annotations

import pickle

import pytest

from tests.support.cluster import Cluster
from tests.support.jobs import Job, paced

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
said = b""
with socket.create_connection((address, port), timeout=10) as connection:  # the launcher hangs up after two
    try:
        connection.sendall(content)
        while part := connection.recv(1 << 16):
            said += part
    except ConnectionError:
        pass
print(said.hex())
"""


def test_strangers_at_the_meetings_port_are_hung_up_on_and_end_no_round(cluster: Cluster, namespace: str) -> None:
    job = Job.apply(cluster, namespace, paced("guarded", LONG))
    job.until_phase("Running", timeout=120)
    plan, first = job.plan(), job.plan()["members"][0]
    assert plan["secret"]
    for content in HOSTILE:
        said = knock(job, job.worker(1), first["address"], plan["store_port"], content)
        assert said == b"" or (said.startswith(b"pacekeeper ") and len(said) < 64), "no more than a nonce"
    job.until_trained_on()
    assert job.plan()["membership"] == plan["membership"]
    assert job.incidents() == []
    log = cluster.kubectl("logs", first["worker"], "-c", "trainer", "-n", namespace)
    assert log.count("turned away") == 1, "said once, not for each of them"
    assert plan["secret"] not in log

    job.crash(1)
    job.until_healed("crash")
    job.until_trained_on()
    job.delete()


def test_no_other_container_has_what_is_the_sidecars(cluster: Cluster, namespace: str) -> None:
    """The condition says it in the operator's words, and no pod is made."""
    spy = {"name": "spy", "image": "spy", "volumeMounts": [{"name": "pacekeeper-token", "mountPath": "/token"}]}
    body = paced("spying", LONG)
    body["spec"]["template"]["spec"]["containers"].append(spy)
    job = Job.apply(cluster, namespace, body)
    job.until(lambda: job.condition("InvalidTemplate").get("status") == "True", 20, "the template is refused")
    assert "containers[1].volumeMounts[0]: pacekeeper-token" in job.condition("InvalidTemplate")["message"]
    assert job.pods() == []
    job.delete()


def knock(job: Job, worker: str, address: str, port: int, content: bytes) -> bytes:
    """All that the host of the meeting says until it hangs up, to somebody in that worker's pod: the NetworkPolicy
    keeps out whoever is not of the job."""
    command = ["python", "-c", KNOCK, address, str(port), content.hex()]
    said = job.cluster.kubectl("exec", worker, "-c", "trainer", "-n", job.namespace, "--", *command)
    return bytes.fromhex(said.strip())
