"""When a job has a checkpoint server, and what replaces one that does not serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, Stop
from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.training_job import AccessMode, CheckpointSpec, JobStatus
from pacekeeper_operator.decide.effects import CreateCheckpointServer, DeletePod
from pacekeeper_operator.decide.evaluate import evaluate_job, list_effects
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.decide.placement.checkpoint_server import choose_server_effect, update_checkpoint_server
from pacekeeper_operator.pods.checkpoint_server import build_checkpoint_server_name
from pacekeeper_operator.state.cluster_view import NodeView, PodView
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_job, build_policy, build_training, change_members

SERVER = CheckpointEndpoint("5a" * 32, "10.0.1.1")
JOB = build_job(checkpoint=CheckpointSpec(volume_claim_name="claim", access_mode=AccessMode.READ_WRITE_ONCE))
NAME = build_checkpoint_server_name(JOB, SERVER.secret)
POD = PodView(NAME, "server-uid", "Running", "node-9", "10.0.1.1", NOW - 400)
CREATE, DELETE = CreateCheckpointServer(NAME), DeletePod(NAME, "server-uid")


def build_served(pod: PodView | None = POD, **changes: Any) -> Observation:
    """A job that trains, and whose server has this pod."""
    observation = build_training(job=JOB, checkpoint_server=pod, **changes)
    return observation.with_desired(observation.desired.with_plan(checkpoint_server=SERVER))


def test_the_server_is_created_with_the_workers() -> None:
    observation = build_fresh(job=JOB, nonce="unpredictable")
    assert choose_server_effect(observation) is None, "there is no worker yet"
    result = evaluate_job(observation, build_policy()).observation
    server = result.plan.checkpoint_server
    assert server is not None
    assert (len(server.secret), server.address) == (64, "")
    assert CreateCheckpointServer(build_checkpoint_server_name(JOB, server.secret)) in list_effects(
        result, build_policy(), {}
    )
    other = evaluate_job(replace(observation, nonce="other"), build_policy()).observation.plan.checkpoint_server
    assert other is not None
    assert other.secret != server.secret


def test_other_jobs_have_none() -> None:
    job = build_job(checkpoint=CheckpointSpec(volume_claim_name="claim"))
    observation = build_training(job=job)
    assert update_checkpoint_server(observation, build_policy()) is observation.desired
    assert choose_server_effect(observation) is None
    before = observation.with_desired(observation.desired.with_plan(checkpoint_server=SERVER))
    assert update_checkpoint_server(before, build_policy()).plan.checkpoint_server is None


@pytest.mark.parametrize(
    ("pod", "address"),
    [
        (POD, "10.0.1.1"),
        (replace(POD, address="10.0.1.2"), "10.0.1.2"),
        (replace(POD, address="", phase="Pending"), "10.0.1.1"),
        (replace(POD, address="10.0.1.2", phase="Failed"), "10.0.1.1"),
        (None, "10.0.1.1"),
    ],
)
def test_the_plan_follows_the_pods_address_and_keeps_the_secret(pod: PodView | None, address: str) -> None:
    observation = build_served(pod)
    desired = update_checkpoint_server(observation, build_policy())
    assert desired.plan.checkpoint_server == CheckpointEndpoint(SERVER.secret, address)
    assert (desired is observation.desired) == (address == SERVER.address), "a plan without a change has no new version"


LOST_NODE = NodeView("node-9", "node-uid-9", ready=False)


@pytest.mark.parametrize(
    ("pod", "effect"),
    [
        (POD, None),
        (replace(POD, phase="Pending", address=""), None),
        (None, CREATE),
        (replace(POD, phase="Failed"), DELETE),
        (replace(POD, phase="Failed", created_at=NOW - 5), None),
        (replace(POD, node="node-10"), DELETE),
        (replace(POD, deleting=True, delete_by=NOW + 5), None),
        (replace(POD, deleting=True, delete_by=NOW - 60), replace(DELETE, force=True)),
        (replace(POD, deleting=True, delete_by=NOW + 5, node="node-10"), replace(DELETE, force=True)),
    ],
    ids=[
        "serves",
        "starts",
        "gone",
        "evicted",
        "refused now",
        "node gone",
        "ends",
        "does not end",
        "ends on a lost node",
    ],
)
def test_a_server_that_does_not_serve_is_replaced(pod: PodView | None, effect: object) -> None:
    observation = build_served(pod)
    assert choose_server_effect(observation) == effect
    assert [found for found in list_effects(observation, build_policy(), {}) if found in (CREATE, DELETE, effect)] == (
        [] if effect is None else [effect]
    )


def test_a_server_on_a_node_that_is_not_ready_is_replaced() -> None:
    observation = build_served()
    nodes = {**observation.cluster_view.nodes, "node-9": LOST_NODE}
    observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))
    assert choose_server_effect(observation) == DELETE


def test_the_server_stays_until_the_last_worker_has_saved() -> None:
    leaving = build_served()
    leaving = replace(leaving, job=replace(JOB, spec=replace(JOB.spec, suspend=True)))
    leaving = leaving.with_desired(leaving.desired.with_plan(stop=Stop.SUSPEND))
    assert choose_server_effect(leaving) is None
    *others, last = leaving.workers
    ended = [replace(view, pod=None) for view in others]
    assert choose_server_effect(replace(leaving, workers=(*ended, last))) is None
    assert last.pod is not None
    last = replace(last, pod=replace(last.pod, phase="Succeeded"))
    assert choose_server_effect(replace(leaving, workers=(*ended, last))) == DELETE
    assert choose_server_effect(replace(leaving, workers=(*ended, last), checkpoint_server=None)) is None


def test_all_workers_at_once_are_lost_without_their_server() -> None:
    observation = build_served()
    lost = tuple(replace(view, pod=None) for view in observation.workers)
    assert choose_server_effect(replace(observation, workers=lost)) is None


@pytest.mark.parametrize(
    ("pod", "explanation"),
    [
        (POD, ""),
        (None, "its pod does not exist yet"),
        (replace(POD, phase="Pending", unschedulable_message="0/6 nodes"), "cannot be scheduled: 0/6 nodes"),
        (replace(POD, phase="Pending", waiting_reason="ErrImagePull"), "does not start: ErrImagePull"),
        (replace(POD, phase="Pending"), "still attached to a node that is lost, taint"),
    ],
)
def test_the_condition_says_why_checkpoints_fail(pod: PodView | None, explanation: str) -> None:
    observation = change_members(build_served(pod), checkpoint={"error": "no answer", "failed_rank": 1})
    conditions = build_job_status(observation, build_policy(), JobStatus()).conditions
    degraded = next(found for found in conditions if found.type == JobCondition.DEGRADED)
    assert degraded.reason == Reason.CHECKPOINT_FAILING
    message = degraded.message or ""
    assert explanation in message
    assert ("the checkpoint server does not serve" in message) == bool(explanation)
