"""Workers on two nodes, and a claim that one node can mount: they save and resume through the checkpoint server."""

from __future__ import annotations

import pytest

from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob, build_paced_job

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000
EVERY = 20
"""Steps between two checkpoints."""


def list_servers(job: ClusterJob) -> list[str]:
    return [name for name in job.list_nodes() if "-checkpoints-" in name]


def wait_for_checkpoint(job: ClusterJob, after: int) -> int:
    """The step of the first checkpoint that is published after that of step `after`."""

    def newer() -> int | None:
        step = job.status.get("lastCheckpointStep")
        return step if step is not None and step > after else None

    return job.wait_until(newer, 120, f"a checkpoint of {job.name} after step {after}")


def test_a_job_on_two_nodes_resumes_from_a_claim_that_one_node_can_mount(
    cluster: KubectlCluster, namespace: str
) -> None:
    """Its server is deleted, then all its pods at once. There are no snapshots."""
    checkpoint = {"everySteps": EVERY, "volumeClaimName": "once", "accessMode": "ReadWriteOnce"}
    environment = {"FOLDER": "/tmp", "SNAPSHOT_EVERY": "0"}
    job = ClusterJob.apply(
        cluster, namespace, build_paced_job("once", LONG, environment=environment, checkpoint=checkpoint)
    )
    job.wait_until_calm()
    (server,) = list_servers(job)
    assert len({node for name, node in job.list_nodes().items() if name != server}) == 2
    step = wait_for_checkpoint(job, after=0)

    cluster.kubectl("delete", "pod", server, "-n", namespace)
    # One may have been published just before.
    step = wait_for_checkpoint(job, after=wait_for_checkpoint(job, after=step))
    assert list_servers(job) == [server], "it has the same name"
    assert job.status["round"] == 1, "no rank was disturbed"

    cluster.kubectl("delete", "pods", "-l", f"pacekeeper.dev/job={job.name}", "-n", namespace, "--force")
    job.wait_until(lambda: job.status.get("resumedFrom", {}).get("source") == "Checkpoint", 120, "a resumed round")
    assert job.status["resumedFrom"]["step"] >= step
    wait_for_checkpoint(job, after=step + EVERY)

    job.patch(suspend=True)
    job.wait_for_phase("Suspended")
    job.wait_until(lambda: not job.list_pods(), 120, "the server ends with the workers")
    newest = max(job.find_checkpoint_folder().glob("step-*/manifest.json"), key=lambda path: path.parent.name)
    assert int(newest.parent.name.split(".")[0].removeprefix("step-")) == job.status["lastCheckpointStep"]
