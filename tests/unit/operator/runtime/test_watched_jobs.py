"""Watched jobs from end to end: pods in the API server, reports of sidecars, and what the operator writes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.protocol.reports import Evidence, FaultKind, FaultReport, RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.protocol.watched_container import STACK_SIGNAL_NUMBER
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import LABEL_JOB
from pacekeeper_operator.decide.injection_breaker import InjectionFailure
from pacekeeper_operator.decide.watched.rounds import MAX_RESTART_GAP_SECONDS
from pacekeeper_operator.endpoint import sidecars
from pacekeeper_operator.endpoint.sidecars import RetryLater, SidecarService
from pacekeeper_operator.endpoint.token_review import Forbidden, PodIdentity
from pacekeeper_operator.kube.client import NAMESPACES, PODS, Denied
from pacekeeper_operator.observe.prometheus import PrometheusSample
from pacekeeper_operator.runtime import watched_jobs
from pacekeeper_operator.state.job_metrics import GpuValue
from testing.kubernetes.fake_cluster import FakeCluster
from testing.network.link_evidence import build_mesh
from testing.operators.observations import NOW, build_crash, build_stall, build_training
from testing.operators.watched_pods import build_pod_body, build_rank_metrics, describe_ranks
from testing.operators.watching_operator import WatchingOperator


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.01)  # it is settled by the next pass
    return FakeCluster()


async def start_training(cluster: FakeCluster, **settings: Any) -> WatchingOperator:
    """Start an operator that watches a Job of two pods with two ranks each. `settings`: of the operator."""
    for name in ("train-a", "train-b"):
        await cluster.create(PODS, build_pod_body(name))
    watching = WatchingOperator(cluster, **settings)
    await watching.start()
    await watching.report("train-a", describe_ranks([0, 1], 4))
    await watching.report("train-b", describe_ranks([2, 3], 4))
    await watching.run_pass()
    await watching.run_pass()
    return watching


def list_objects(cluster: FakeCluster, plural: str) -> list[dict[str, Any]]:
    return [body for (kind, _, _), body in cluster.objects.items() if kind == plural]


async def test_a_job_of_others_is_described(cluster: FakeCluster) -> None:
    await start_training(cluster)
    (watched,) = list_objects(cluster, "watchedjobs")
    assert watched["spec"]["root"]["name"] == "train"
    status = watched["status"]
    assert (status["phase"], status["pods"], status["ranks"], status["step"]) == ("Watched", "2/2", "4/4", 500)
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Covered": "True",
        "Reporting": "True",
        "Recording": "True",
        "Broken": "False",
    }


async def test_a_job_has_the_team_of_its_namespace(cluster: FakeCluster) -> None:
    for name, labels in (("ns", {"org/team": "vision"}), ("other", {"org/team": "speech"})):
        await cluster.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})
    await cluster.create(PODS, build_pod_body("train-a"))
    watching = WatchingOperator(cluster)
    watching.operator.watched.settings = replace(watching.operator.settings, watch_team_label="org/team")
    await watching.start()
    (watched,) = list_objects(cluster, "watchedjobs")
    assert watched["spec"]["team"] == "vision"


async def test_a_crash_is_reported_and_the_next_round_ends_its_incident(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    await watching.report_fault(
        FaultReport(
            "train-b-rank-3-round-1",
            FaultKind.RANK_FAILED,
            "train-b",
            1,
            NOW - 3,
            rank=3,
            exit_code=1,
            completed_step=True,
            step=500,
            error="ValueError: no such column",
        )
    )
    await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["spec"]["jobRef"]["kind"] == "WatchedJob"
    assert incident["spec"]["message"].startswith("rank 3 on train-b exited with 1")
    assert incident["status"].get("outcome") is None
    considered = {option["name"]: option["chosen"] for option in incident["status"]["considered"]}
    assert considered == {"RestartRanks": True, "ReplaceWorker": False}
    watching.move_time(20.0)  # torchrun has restarted its ranks: the same pods, other processes
    restarted = {"started_at": NOW + 1, "pid": 900, "resumed_from": 400}
    for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):
        await watching.report(pod, describe_ranks(ranks, 4, **restarted), step=10, round=2)
    for _ in range(2):
        await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["status"]["outcome"] == "Observed"
    assert incident["status"]["recoveredSeconds"] == pytest.approx(9, abs=1.5)
    (watched,) = list_objects(cluster, "watchedjobs")
    first, second = watched["status"]["rounds"]
    assert (first["round"], first["lastStep"], second["round"]) == (1, 500, 2)
    assert first["cause"].startswith("rank 3 on train-b")
    assert second["resumedFrom"] == 400
    savings = watched["status"]["potentialSavings"]
    assert savings == {"saved": (9.0 - 5.0) * 4, "incidents": 1}, "four ranks for all but the cost of the restart"


async def test_a_crash_that_is_diagnosed_after_the_restart_ends_its_round(cluster: FakeCluster) -> None:
    """The time from the crash on is no time of the step that it interrupted."""
    watching = await start_training(cluster)
    watching.move_time(11.0)
    for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):
        await watching.report(pod, describe_ranks(ranks, 4, started_at=NOW + 10, pid=900), step=10, round=2)
    await watching.run_pass()
    watching.move_time(12.0)
    await watching.report_fault(build_crash("train-b", 3, exit_code=1, noticed_at=NOW + 8, membership=0))
    for _ in range(2):
        await watching.run_pass()
    watching.move_time(30.0)  # metrics are due
    await watching.run_pass()
    status = list_objects(cluster, "watchedjobs")[0]["status"]
    assert (status["rounds"][0]["ended"], "cause" in status["rounds"][1]) == (format_time(NOW + 8), False)
    assert status["rounds"][0]["cause"].startswith("rank 3 on train-b")
    assert status["account"]["lost"]["idle"] == pytest.approx(2.0 * 4), "four ranks from the crash to their restart"


async def test_an_evicted_pod_is_the_cause_of_its_round(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    watching.move_time(15.0)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    failed = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    conditions = {"conditions": [{**condition, "lastTransitionTime": format_time(NOW + 8)}]}
    await cluster.patch(PODS, "train-b", {"status": {**failed, **conditions}}, "ns", subresource="status")
    await watching.report_fault(build_crash("train-b", 3, exit_code=0, noticed_at=NOW + 9, membership=0))
    await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert (incident["spec"]["cause"], incident["spec"]["class"]) == ("worker-lost", "Disruption")
    assert "low on resource: memory" in incident["spec"]["message"]
    await cluster.create(PODS, build_pod_body("train-c"))
    watching.move_time(30.0)
    await watching.run_pass()
    for pod, ranks in (("train-a", [0, 1]), ("train-c", [2, 3])):
        await watching.report(pod, describe_ranks(ranks, 4, started_at=NOW + 25, pid=900), step=10, round=2)
    for _ in range(3):
        await watching.run_pass()
    (watched,) = list_objects(cluster, "watchedjobs")
    first, second = watched["status"]["rounds"]
    assert (first["ended"], second.get("cause")) == (format_time(NOW + 8), None)
    assert "low on resource: memory" in first["cause"]
    assert watched["status"]["account"]["lost"]["idle"] > 0
    (incident,) = list_objects(cluster, "incidents")
    assert incident["status"]["outcome"] == "Observed"


@pytest.mark.parametrize("succeeds", [False, True])
async def test_the_last_round_ends_with_the_job(succeeds: bool, cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    await watching.report_fault(build_crash("train-b", 3, exit_code=1, noticed_at=NOW - 3, membership=0))
    await watching.run_pass()
    for pod in ("train-a", "train-b"):
        status = {"phase": "Succeeded" if succeeds else "Failed"}
        await cluster.patch(PODS, pod, {"status": status}, "ns", subresource="status")
    for seconds in (10.0, 20.0 + MAX_RESTART_GAP_SECONDS):
        watching.move_time(seconds)
        await watching.run_pass()
    await watching.run_pass()
    (watched,) = list_objects(cluster, "watchedjobs")
    (last,) = watched["status"]["rounds"]
    assert (watched["status"]["phase"], "cause" in last) == ("Ended", not succeeds)
    assert last["ended"] == format_time(NOW + 10 if succeeds else NOW - 3)


async def test_a_crash_within_the_second_in_which_its_pod_is_deleted_is_a_crash(cluster: FakeCluster) -> None:
    """As when the failure policy of a JobSet deletes all of its pods: times of deletions are cut to whole seconds."""
    watching = await start_training(cluster)
    await cluster.patch(PODS, "train-b", {"status": {"phase": "Failed"}}, "ns")
    await watching.run_pass()
    for name in ("train-b", "train-a"):
        deletion = {"deletionTimestamp": format_time(NOW), "finalizers": ["batch.kubernetes.io/job-tracking"]}
        await cluster.patch(PODS, name, {"metadata": deletion}, "ns")
    await watching.report_fault(build_crash("train-b", 3, exit_code=0, noticed_at=NOW + 0.1, membership=0))
    await watching.report_fault(build_crash("train-a", 0, exit_code=-15, noticed_at=NOW + 0.5, membership=0))
    for seconds in (0.6, 10.0):
        watching.move_time(seconds)
        await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert (incident["spec"]["cause"], incident["spec"]["rank"]) == ("crash", 3)


async def test_a_rank_that_the_library_makes_fail_is_reported_before_its_fault_is_settled(
    cluster: FakeCluster,
) -> None:
    """Otherwise an operator that dies in between would have forgotten it."""
    watching, calls = await start_training(cluster), list[tuple[str, float]]()

    async def stop(failure: InjectionFailure, created_at: float) -> None:
        calls.append((failure.message, created_at))
        if len(calls) == 1:
            raise Denied("the API server is away")

    watching.operator.watched.on_library_failure = stop
    await watching.report_fault(
        build_crash("train-b", 3, exit_code=-STACK_SIGNAL_NUMBER, noticed_at=NOW - 3, membership=0)
    )
    with pytest.raises(Denied):
        await watching.run_pass()
    assert not list_objects(cluster, "incidents")
    await watching.run_pass()
    assert len(list_objects(cluster, "incidents")) == 1
    await watching.run_pass()
    message, created_at = calls[-1]
    assert len(calls) == 2, "a settled fault is not reported again"
    assert message.startswith("rank 3 of ns/")
    (created,) = {pod.view.created_at for pod in watching.operator.watched.pods}
    assert created_at == created


async def test_a_rank_that_is_killed_explains_the_errors_of_its_peers_that_come_first(cluster: FakeCluster) -> None:
    """The sidecar of a killed rank waits for torchrun's agent, so that it reports later than those of its peers."""
    watching = await start_training(cluster)
    reset = build_crash(
        "train-a", 0, exit_code=1, error="RuntimeError: Connection reset by peer", noticed_at=NOW, membership=0
    )
    await watching.report_fault(reset)
    watching.move_time(3.0)
    await watching.run_pass()
    assert list_objects(cluster, "incidents") == []
    await watching.report_fault(build_crash("train-b", 3, exit_code=0, noticed_at=NOW + 0.2, membership=0))
    watching.move_time(6.0)
    await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["spec"]["rank"] == 3


def build_stalled(worker: str, ranks: Sequence[int], culprit: int | None, state: str = "S") -> FaultReport:
    """Return the stall of a pod whose ranks wait in a collective that `culprit` has never entered."""
    states = tuple(
        replace(build_stall(worker, rank, culprit=rank == culprit).ranks[0], rank=rank, process_state=state)
        for rank in ranks
    )
    return FaultReport(f"{worker}-stall-1", FaultKind.STALLED, worker, 1, NOW - 0.1, step=500, ranks=states)


async def test_a_hang_names_the_rank_for_which_the_others_wait(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    await watching.report_fault(build_stalled("train-a", [0, 1], None))
    await watching.report_fault(build_stalled("train-b", [2, 3], 2))
    await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["spec"]["cause"] == "hang"
    assert incident["spec"]["rank"] == 2
    (watched,) = list_objects(cluster, "watchedjobs")
    assert watched["status"]["waiting"] == incident["spec"]["message"]
    for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):  # it goes on by itself
        await watching.report(pod, describe_ranks(ranks, 4), step=501)
    await watching.run_pass()
    assert list_objects(cluster, "incidents")[0]["status"]["outcome"] == "Observed"


@pytest.mark.parametrize(("state", "blamed"), [("S", False), ("T", True)])
async def test_of_a_partly_watched_job_only_a_stopped_rank_is_blamed(
    state: str, blamed: bool, cluster: FakeCluster
) -> None:
    await cluster.create(PODS, build_pod_body("train-a"))
    watching = WatchingOperator(cluster)
    await watching.start()
    await watching.report("train-a", describe_ranks([0, 1], 4))
    for _ in range(2):
        await watching.run_pass()
    await watching.report_fault(build_stalled("train-a", [0, 1], 0, state))
    await watching.run_pass()
    (watched,) = list_objects(cluster, "watchedjobs")
    assert (watched["status"]["phase"], watched["status"]["ranks"]) == ("PartlyWatched", "2/4")
    assert [incident["spec"]["cause"] for incident in list_objects(cluster, "incidents")] == ["hang"] * blamed


async def test_a_pod_without_ranks_is_unwatched_and_the_condition_says_why(cluster: FakeCluster) -> None:
    await cluster.create(PODS, build_pod_body("train-a"))
    watching = WatchingOperator(cluster)
    await watching.start()
    await watching.report("train-a", ())
    for _ in range(2):
        await watching.run_pass()
    status = list_objects(cluster, "watchedjobs")[0]["status"]
    covered = next(condition for condition in status["conditions"] if condition["type"] == "Covered")
    assert (status["phase"], covered["status"], covered["reason"]) == ("Unwatched", "False", "NoRanks")


async def test_two_trainings_below_one_owner_stay_apart(cluster: FakeCluster) -> None:
    """Two trainings on the workers of one RayCluster. Rank 0 of both has the same number."""
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "ray", "uid": "ray-uid", "controller": True}
    for name in ("ray-a", "ray-b"):
        await cluster.create(PODS, build_pod_body(name, owner))
    watching = WatchingOperator(cluster)
    await watching.start()
    for name in ("ray-a", "ray-b"):
        await watching.report(name, describe_ranks([0, 1], 2, rendezvous=f"{name}:29500"))
    await watching.run_pass()
    watching.move_time(30.0)
    await watching.report("ray-a", describe_ranks([0, 1], 2, rendezvous="ray-a:29500"), step=700)
    await watching.report("ray-b", describe_ranks([0, 1], 2, rendezvous="ray-b:29500"), step=300)
    for _ in range(2):
        await watching.run_pass()
    statuses = [body["status"] for body in list_objects(cluster, "watchedjobs")]
    assert sorted((status["step"], status["ranks"], status["phase"]) for status in statuses) == [
        (300, "2/2", "Watched"),
        (700, "2/2", "Watched"),
    ]


async def test_a_pod_that_claims_ranks_of_another_one_gets_none(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    await cluster.create(PODS, build_pod_body("train-c"))
    await watching.run_pass()
    await watching.report("train-c", describe_ranks([0, 1, 2, 3], 4, pid=900), step=9000)
    for _ in range(2):
        await watching.run_pass()
    by_step = {body["status"].get("step"): body["status"] for body in list_objects(cluster, "watchedjobs")}
    assert by_step[500]["ranks"] == "4/4"
    assert by_step[500]["rounds"] == [{"round": 1, **by_step[500]["rounds"][0]}], "no round has begun"


async def test_the_next_operator_goes_on_where_the_last_one_ended(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    await watching.report_fault(build_stalled("train-a", [0, 1], None))
    await watching.report_fault(build_stalled("train-b", [2, 3], 2))
    await watching.run_pass()
    states = list_objects(cluster, "trainingjobstates")
    before = list_objects(cluster, "watchedjobs")[0]["status"]["account"]
    successor = WatchingOperator(cluster)
    successor.move_time(100.0)
    await successor.start()
    for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):
        await successor.report(pod, describe_ranks(ranks, 4), step=501)
    await successor.run_pass()
    assert len(list_objects(cluster, "watchedjobs")) == 1
    assert [body["plan"]["membership"] for body in list_objects(cluster, "trainingjobstates")] == [
        body["plan"]["membership"] for body in states
    ]
    (incident,) = list_objects(cluster, "incidents")
    assert incident["status"]["outcome"] == "Observed", "the successor knows of it, and sees its end"
    status = list_objects(cluster, "watchedjobs")[0]["status"]
    assert len(status["rounds"]) == 1
    assert status["account"]["gpuSeconds"] == pytest.approx(before["gpuSeconds"] + 4 * 100.0), "four ranks"


async def test_a_job_ends_with_its_pods_and_its_watched_job_stays_for_a_while(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    for name in ("train-a", "train-b"):
        await cluster.patch(PODS, name, {"status": {"phase": "Succeeded"}}, "ns")
    await watching.run_pass()
    (watched,) = list_objects(cluster, "watchedjobs")
    assert watched["status"]["phase"] == "Ended"
    assert "pacekeeper.dev/retain-until" in watched["metadata"]["annotations"]
    await watching.operator.watched.clean_up(NOW + 29 * 86400)
    assert len(list_objects(cluster, "watchedjobs")) == 1
    await watching.operator.watched.clean_up(NOW + 31 * 86400)
    assert list_objects(cluster, "watchedjobs") == []
    await watching.run_pass()
    assert list_objects(cluster, "watchedjobs") == [], "ended pods bring it back to nothing"


async def test_gpu_series_are_read_while_a_job_is_watched_and_no_training_job_runs(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[Sequence[object]] = []
    watching = WatchingOperator(cluster)
    poller = watching.operator.prometheus

    async def query(jobs: Sequence[object]) -> None:
        queries.append(jobs)

    monkeypatch.setattr(poller, "_query", query)
    poller.start_query()
    await cluster.create(PODS, build_pod_body("train-a"))
    await watching.start()
    poller.start_query()
    await asyncio.sleep(0)
    assert queries == [()]


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [("DCGM_FI_DEV_XID_ERRORS", 79.0, "XID 79"), ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0, "uncorrectable memory error")],
)
async def test_gpu_errors_of_the_pods_gpus_are_incidents(
    metric: str, value: float, words: str, cluster: FakeCluster
) -> None:
    """Of a node that the job shares with others, and without a look at the GPUs from within the pod."""
    watching = await start_training(cluster)
    poller = watching.operator.prometheus

    async def show(*errors: GpuValue) -> None:
        poller._on_gpu_errors(errors)
        poller.sample = PrometheusSample(watching.runtime.now(), gpu_values=errors, error="")
        await watching.run_pass()

    await show()
    (job,) = watching.contexts.values()
    job.base.cache.wake.clear()
    error = GpuValue("node-train-b", "0", metric, value, trusted=True)
    await show(replace(error, gpu="1", pods=frozenset({"ns/other"})), replace(error, node="node-of-others"))
    assert list_objects(cluster, "incidents") == []
    poller._on_gpu_errors((error,))
    assert job.base.cache.wake.is_set()
    await show(replace(error, pods=frozenset({"ns/train-b", "ns/other"})))
    (incident,) = list_objects(cluster, "incidents")
    assert (incident["spec"]["cause"], incident["spec"]["worker"]) == ("gpu-error", "train-b")
    assert words in incident["spec"]["message"]
    assert incident["status"].get("applied") is None
    watching.move_time(30.0)
    for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):
        await watching.report(pod, describe_ranks(ranks, 4, started_at=NOW + 25, pid=900), step=10, round=2)
    for _ in range(2):
        await watching.run_pass()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["status"]["outcome"] == "Observed"


async def test_a_job_that_its_controller_restarts_later_has_not_ended(cluster: FakeCluster) -> None:
    """A Job's controller waits for up to 6 minutes before it creates the next pods."""
    watching = await start_training(cluster)
    for name in ("train-a", "train-b"):
        await cluster.delete(PODS, name, "ns")
    await watching.run_pass()
    watching.move_time(300.0)
    await watching.run_pass()
    assert list_objects(cluster, "watchedjobs")[0]["status"]["phase"] != "Ended"
    for name in ("train-c", "train-d"):
        await cluster.create(PODS, build_pod_body(name))
    await watching.run_pass()
    for name, ranks in (("train-c", [0, 1]), ("train-d", [2, 3])):
        await watching.report(name, describe_ranks(ranks, 4, started_at=NOW + 290), step=5)
    for _ in range(2):
        await watching.run_pass()
    (watched,) = list_objects(cluster, "watchedjobs")
    assert [round_["round"] for round_ in watched["status"]["rounds"]] == [1, 2]
    assert watched["status"]["phase"] == "Watched"


async def test_a_slow_rank_is_named_and_priced(cluster: FakeCluster) -> None:
    watching = await start_training(cluster)
    training = Training(watching)
    for _ in range(6):
        await training.run_window()
    assert list_objects(cluster, "incidents") == []
    training.slowdowns[2] = 2.0
    for _ in range(6):
        await training.run_window()
    (incident,) = list_objects(cluster, "incidents")
    assert (incident["spec"]["cause"], incident["spec"]["rank"]) == ("straggler", 2)
    assert incident["status"]["slowdownBefore"] == pytest.approx(1.9, abs=0.15)
    (spare,) = incident["status"]["considered"]
    assert spare["name"] == "ReplaceWorker"
    assert spare["chosen"], "its loss has reached the price of a spare"
    assert spare["gainSeconds"] > 0
    assert incident["status"].get("outcome") is None
    status = list_objects(cluster, "watchedjobs")[0]["status"]
    assert status["slowdown"] == pytest.approx(1.9, abs=0.15)
    assert status["culprits"][0].startswith("rank 2 on train-b takes")
    training.slowdowns[2] = 1.0
    for _ in range(8):
        await training.run_window()
    assert list_objects(cluster, "incidents")[0]["status"]["outcome"] == "Observed"


async def test_a_rank_that_was_slow_before_the_estimator_began_is_named_and_charged(cluster: FakeCluster) -> None:
    """Its first steps, from before, are reported with its newest ones."""
    training = Training(await start_training(cluster))
    training.slowdowns[2] = 2.0
    for _ in range(8):
        await training.run_window()
    (incident,) = list_objects(cluster, "incidents")
    assert (incident["spec"]["cause"], incident["spec"]["rank"]) == ("straggler", 2)
    assert list_objects(cluster, "watchedjobs")[0]["status"]["account"]["lost"]["straggler"] > 0


async def test_a_rank_that_is_slow_does_not_recover_by_a_change_of_the_leader(cluster: FakeCluster) -> None:
    training = Training(await start_training(cluster))
    for slowdown in (1.0, 2.0):
        training.slowdowns[2] = slowdown
        for _ in range(6):
            await training.run_window()
    training.watching = WatchingOperator(cluster)
    training.watching.move_time(training.passed)
    await training.watching.start()
    for _ in range(6):
        await training.run_window()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["status"].get("outcome") is None
    (culprit,) = list_objects(cluster, "watchedjobs")[0]["status"]["culprits"]
    assert culprit.startswith("rank 2 on train-b takes")


async def test_a_new_suspect_is_written_at_once_and_its_later_estimates_are_not(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_jobs, "MIN_STATUS_INTERVAL_SECONDS", math.inf)
    training = Training(await start_training(cluster))
    for _ in range(6):
        await training.run_window()
    training.slowdowns[2] = 2.0
    written = []
    for _ in range(6):
        await training.run_window()
        written.append(tuple(list_objects(cluster, "watchedjobs")[0]["status"]["culprits"]))
    (culprit,) = {culprits for culprits in written if culprits}
    assert culprit[0].startswith("rank 2 on train-b takes")


async def test_a_slow_link_is_named_by_the_connections(cluster: FakeCluster) -> None:
    watching = await start_training(cluster, watch_links=True)
    training = Training(watching)
    for _ in range(6):
        await training.run_window()
    assert list_objects(cluster, "incidents") == []
    training.transfer_seconds, training.slow_sender = 0.15, 2
    for _ in range(8):
        await training.run_window()
    (incident,) = list_objects(cluster, "incidents")
    assert incident["spec"]["cause"] == "slow-communication"
    assert incident["status"]["diagnosis"]["culprit"] == "the sender side of rank 2's worker"
    status = list_objects(cluster, "watchedjobs")[0]["status"]
    assert status["culprits"][0].startswith("the slow sending side of rank 2 on train-b (node-train-b) makes steps")
    training.transfer_seconds, training.slow_sender = 0.01, -1
    for _ in range(8):
        await training.run_window()
    assert list_objects(cluster, "incidents")[0]["status"]["outcome"] == "Observed"
    assert list_objects(cluster, "watchedjobs")[0]["status"]["culprits"] == []


class Training:
    """Ranks that train, and answer the operator's requests for steps and connections."""

    STEPS = 32

    def __init__(self, watching: WatchingOperator) -> None:
        self.watching = watching
        self.slowdowns = np.ones(4)
        self.transfer_seconds, self.slow_sender = 0.01, -1
        self.step, self.rng, self.passed = 500, np.random.default_rng(0), 0.0

    async def run_window(self) -> None:
        """Train for a window of steps, report it, and run a pass."""
        own = 0.1 * self.slowdowns * np.exp(0.02 * self.rng.standard_normal((self.STEPS, 4)))
        took = own.max(axis=1) + self.transfer_seconds
        self.step += self.STEPS
        self.passed += float(took.sum())
        self.watching.move_time(self.passed)
        for pod, ranks in (("train-a", [0, 1]), ("train-b", [2, 3])):
            metrics = tuple(
                build_rank_metrics(rank, float(own[:, rank].mean()), float(took.mean()), self.step) for rank in ranks
            )
            await self.watching.report(pod, describe_ranks(ranks, 4), self.step, rank_metrics=metrics)
            self.answer(pod, ranks, own, took)
        await self.watching.run_pass()

    def answer(self, pod: str, ranks: Sequence[int], own: Any, took: Any) -> None:
        caller = self.watching.identify(pod)
        cache = self.watching.operator.watched.jobs.find("ns", caller.job)
        if cache is None or cache.requests.evidence is None:
            return
        request = cache.requests.evidence
        if EvidencePart.LINKS in request.parts:
            mesh = build_mesh(4, self.slow_sender)
            own_addresses = tuple(f"10.0.0.{rank}:" for rank in ranks)  # on one node, nothing is slow
            links = tuple(
                link for rank in ranks for link in mesh[rank].links if not link.remote.startswith(own_addresses)
            )
            self.watching.sidecars.receive_evidence(caller, Evidence(request.name, pod, 1, links=links))
            return
        windows = tuple(
            RankWindow(
                rank=rank,
                steps=tuple(range(self.step - self.STEPS + 1, self.step + 1)),
                step_seconds=tuple(took),
                compute_seconds=tuple(own[:, rank]),
                samples=(1,) * self.STEPS,
                baseline_seconds=0.11,
                baseline_own_seconds=0.1,
            )
            for rank in ranks
        )
        self.watching.sidecars.receive_evidence(caller, Evidence(request.name, pod, 1, windows))


class TestCallers:
    """Which pod is which caller."""

    async def test_a_watched_pod_is_known_by_its_uid_alone(self, cluster: FakeCluster) -> None:
        await cluster.create(PODS, build_pod_body("bench-w1-0"))  # named as a worker of a TrainingJob
        watching = WatchingOperator(cluster)
        await watching.start()
        assert watching.identify("bench-w1-0").watched
        with pytest.raises(RetryLater):  # an earlier pod of that name
            watching.sidecars._identify_worker(PodIdentity("ns", "bench-w1-0", "another-uid"))
        with pytest.raises(RetryLater):  # one that the watch of pods has not shown yet
            watching.identify("train-z")

    async def test_the_worker_of_a_training_job_is_not_watched_with_any_labels(self, cluster: FakeCluster) -> None:
        await cluster.create(PODS, build_pod_body("j-w0-0", labels={LABEL_JOB: "j"}))
        watching = WatchingOperator(cluster)
        await watching.start()
        assert list_objects(cluster, "watchedjobs") == []
        job = build_training(1, 0)
        watching.operator.jobs.get_or_create(job.job).publish(job.desired, "1")
        caller = watching.sidecars._identify_worker(PodIdentity("ns", "j-w0-0", "uid-0"))
        assert not caller.watched

    async def test_without_the_watch_its_pods_are_refused(self, cluster: FakeCluster) -> None:
        watching = WatchingOperator(cluster)
        service = SidecarService(cluster, watching.operator.jobs, watching.runtime)
        with pytest.raises(Forbidden):
            service._identify_worker(PodIdentity("ns", "train-a", "uid-train-a"))
