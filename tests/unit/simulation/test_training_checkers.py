"""Checkers of rounds, steps, statuses, and ends, with hand-made rounds in a world without machines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pacekeeper.sync.training_config import TrainingConfig
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.requests import EvidenceRequest, WorkerRequests
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.state.desired_state import Incident
from simulation.checkers import end_state, status_accuracy, training
from simulation.checkers.checker import Checker
from simulation.checkers.cluster_history import NEVER_HAPPENED
from simulation.faults.fault import Cost
from simulation.kubernetes.machine import ImagePulls
from simulation.workers.volume import SavedState
from simulation.world import EPOCH
from testing.simulated.checker_harness import OPERATOR, CheckerHarness


@dataclass
class FakeRound:
    """A round, as checkers see one."""

    training: Any
    round: int = 1
    membership: int = 1
    restored_step: int = -1
    sync_points: int = 0
    began_at: float = 0.0
    stepped_at: float = 0.0
    over: bool = False
    is_stalled: bool = False
    progress: Any = field(default_factory=lambda: SimpleNamespace(step=0, training_config=TrainingConfig()))
    mode: SyncMode = SyncMode.SYNC
    assigned_ranks: tuple[Any, ...] = ()


class TrainingCheckerHarness(CheckerHarness):
    """A harness with a training job and its workers."""

    def __init__(self) -> None:
        super().__init__()
        volume = SimpleNamespace(newest=None)
        self.training = SimpleNamespace(
            uid=self.job.uid,
            rounds=[],
            last_step=None,
            volume=volume,
            failed_on={},
            mistakes_on={},
            outage_at=NEVER_HAPPENED,
        )
        self.leader = SimpleNamespace(
            name=OPERATOR,
            operator=SimpleNamespace(is_leader=lambda: True),
            process=SimpleNamespace(paused=False, dead=False),
        )
        world = cast(Any, self.world)
        world.trainings = SimpleNamespace(
            on_step=[], find_training=lambda uid: self.training if uid == self.job.uid else None
        )
        world.workers, world.nodes = {}, {f"node-{i}": SimpleNamespace(slow=1.0) for i in range(2)}
        world.deployment = SimpleNamespace(pods=[self.leader], leader=self.leader)
        self.checker = Checker(
            world,
            cast(Any, SimpleNamespace(costs=frozenset())),
            60.0,
            (*training.TRAINING_RULES, *status_accuracy.STATUS_RULES),
        )
        self.checker._history.record_change(self._made())
        self.write_state(self.desired)

    def _made(self) -> Any:
        body = self.api.get("trainingjobs", "j", "ns")
        return SimpleNamespace(
            plural="trainingjobs", type="ADDED", object=body, previous=None, time=0.0, actor="kubectl"
        )

    def begin(self, round_: int, membership: int = 1, restored_step: int = -1) -> FakeRound:
        run = FakeRound(self.training, round_, membership, restored_step, began_at=self.world.now())
        self.training.rounds.append(run)
        self.notify_step(run)
        return run

    def step(self, run: FakeRound) -> None:
        run.sync_points += 1
        run.progress.step += 1
        run.stepped_at = self.world.now()
        self.notify_step(run)

    def notify_step(self, run: FakeRound) -> None:
        for call in cast(Any, self.world).trainings.on_step:
            call(run)
        self.check_world()

    def status(self, **status: Any) -> None:
        self.api.patch("trainingjobs", "j", "ns", {"status": status}, subresource="status", manager=OPERATOR)

    def train(self, run: FakeRound, seconds: float) -> None:
        for _ in range(int(seconds / 5.0)):
            self.wait(5.0)
            self.step(run)

    @property
    def reasons(self) -> list[str]:
        return self.checker.check_end()


@pytest.fixture
def harness() -> TrainingCheckerHarness:
    return TrainingCheckerHarness()


# Rounds.


def test_rounds_follow_each_other(harness: TrainingCheckerHarness) -> None:
    harness.step(harness.begin(1))
    harness.step(harness.begin(2))
    harness.step(harness.begin(3, membership=2))
    assert harness.violated_rules == []


def test_steps_of_an_earlier_round_are_found(harness: TrainingCheckerHarness) -> None:
    harness.begin(2)
    harness.begin(2)
    assert harness.violated_rules == ["one round at a time, with a higher number than all earlier ones"]


def test_an_old_round_may_take_steps_for_a_moment(harness: TrainingCheckerHarness) -> None:
    old = harness.begin(1)
    harness.begin(2, membership=2)
    harness.wait(5.0)
    harness.step(old)
    assert harness.violated_rules == []
    harness.wait(10.0)
    harness.step(old)
    assert harness.violated_rules == [], "a single rank has no peers"
    old.assigned_ranks = tuple(SimpleNamespace(worker=SimpleNamespace(name=name)) for name in ("j-w0-0", "j-w1-0"))
    harness.step(old)
    assert harness.violated_rules == ["one round at a time, with a higher number than all earlier ones"]


def test_training_continues_from_the_published_checkpoint(harness: TrainingCheckerHarness) -> None:
    harness.training.volume.newest = SavedState(40, 1, {})
    harness.begin(1, restored_step=40)
    harness.begin(2, restored_step=45)
    assert harness.violated_rules == []
    harness.begin(3, restored_step=39)
    assert harness.violated_rules == ["a round resumes from the newest checkpoint, or from newer state"]


def test_more_rounds_than_the_launchers_may_start_are_found(harness: TrainingCheckerHarness) -> None:
    harness.write_state(harness.desired.with_plan(restarts=2))
    harness.checker._history.jobs[harness.job.uid].most_allowed = {1: 2}
    for round_ in range(1, 4):
        harness.begin(round_)
    assert harness.violated_rules == []
    harness.begin(4)
    assert harness.violated_rules == ["launchers start no more rounds by themselves than the plan allows"]


def test_a_job_without_steps_is_found(harness: TrainingCheckerHarness) -> None:
    run = harness.begin(1)
    harness.train(run, 100.0)
    assert harness.violated_rules == []
    harness.wait(61.0)
    harness.check_world()
    assert harness.violated_rules == ["a job that can train does not stall"]


def test_a_suspended_job_needs_no_steps(harness: TrainingCheckerHarness) -> None:
    harness.step(harness.begin(1))
    harness.api.patch("trainingjobs", "j", "ns", {"spec": {"suspend": True}}, manager="kubectl")
    for _ in range(20):
        harness.wait(5.0)
        harness.check_world()
    assert harness.violated_rules == []


def write_worker(harness: TrainingCheckerHarness, run: FakeRound, **changes: Any) -> None:
    """Write the worker of the record `j-w0-0`, with one rank in `run`."""
    process = SimpleNamespace(paused=False)
    found = SimpleNamespace(is_gone=False, node="node-0", launcher=process, sidecar=process, job_uid=harness.job.uid)
    found.ranks, found.script_fails, found.name = [SimpleNamespace(is_alive=True, training_round=run)], False, "j-w0-0"
    for name, value in changes.items():
        setattr(found, name, value)
    harness.create_node(found.node)
    pod = harness.create_pod("j-w0-0")
    cast(Any, harness.world).workers[pod["metadata"]["uid"]] = found
    record = harness.desired.state.placement.find_worker("j-w0-0")
    assert record is not None
    harness.write_state(harness.desired.with_worker(replace(record, uid=pod["metadata"]["uid"])))


def give_up_worker(
    harness: TrainingCheckerHarness, *, dead: bool = True, cause: IncidentCause = IncidentCause.WORKER_LOST
) -> None:
    record, now = harness.desired.state.placement.find_worker("j-w0-0"), harness.world.wall_time()
    assert record is not None
    desired = harness.desired.with_worker(replace(record, leaving="it is silent", dead=dead))
    harness.write_state(
        desired.with_incident(Incident("i", cause, IncidentClass.UNKNOWN, 1, "m", now, now, now, worker="j-w0-0"))
    )


def test_replacing_a_healthy_worker_is_found(harness: TrainingCheckerHarness) -> None:
    run = harness.begin(1)
    harness.step(run)
    write_worker(harness, run)
    give_up_worker(harness)
    assert harness.violated_rules == ["a worker whose ranks train normally is not declared lost"]


def test_a_healthy_worker_on_a_deleted_node_may_be_replaced(harness: TrainingCheckerHarness) -> None:
    run = harness.begin(1)
    harness.step(run)
    write_worker(harness, run)
    harness.api.delete("nodes", "node-0")
    give_up_worker(harness)
    assert harness.violated_rules == []


def test_a_worker_that_ran_out_of_memory_may_be_moved_while_it_trains(harness: TrainingCheckerHarness) -> None:
    run = harness.begin(1)
    harness.step(run)
    write_worker(harness, run)
    give_up_worker(harness, cause=IncidentCause.OUT_OF_MEMORY)
    assert harness.violated_rules == []


@pytest.mark.parametrize("fault", ["stands", "over", "cut off", "gone", "slow"])
def test_a_lost_worker_may_be_given_up(harness: TrainingCheckerHarness, fault: str) -> None:
    run = harness.begin(1)
    harness.step(run)
    write_worker(harness, run, is_gone=fault == "gone")
    run.is_stalled, run.over = fault == "stands", fault == "over"
    if fault == "cut off":
        harness.world.network.isolate("node-0")
    give_up_worker(harness, dead=fault != "slow")  # a slow worker is replaced while it trains
    assert harness.violated_rules == []


# The status.


def test_an_accurate_status_violates_no_rule(harness: TrainingCheckerHarness) -> None:
    run = harness.begin(1)
    for _ in range(30):
        harness.train(run, 15.0)
        harness.status(phase="Running", step=run.progress.step)
    assert harness.violated_rules == []


def test_running_without_steps_is_found(harness: TrainingCheckerHarness) -> None:
    harness.checker._history.patience = 1e9
    harness.step(harness.begin(1))
    harness.status(phase="Running", step=1)
    for _ in range(40):
        harness.wait(5.0)
        harness.check_world()
    assert harness.violated_rules == ["the status is never wrong for long"]


def test_a_cut_off_operator_may_have_an_outdated_status(harness: TrainingCheckerHarness) -> None:
    harness.checker._history.patience = 1e9
    harness.step(harness.begin(1))
    harness.status(phase="Running", step=1)
    harness.leader.process.paused = True
    for _ in range(40):
        harness.wait(5.0)
        harness.check_world()
    assert harness.violated_rules == []


def test_an_outdated_step_is_found(harness: TrainingCheckerHarness) -> None:
    harness.status(phase="Running", step=1)
    run = harness.begin(1)
    harness.train(run, 300.0)
    assert harness.violated_rules == ["the status is never wrong for long"]


@pytest.mark.parametrize(("steps", "allowed"), [(9, False), (10, True)])
def test_complete_requires_the_last_step(harness: TrainingCheckerHarness, steps: int, allowed: bool) -> None:
    harness.training.last_step = 10
    run = harness.begin(1)
    run.progress.step = steps
    harness.status(phase="Complete")
    assert harness.violated_rules == ([] if allowed else ["a job is Complete or Failed for the reason in its status"])


def fail_job(harness: TrainingCheckerHarness, reason: str) -> None:
    harness.status(phase="Failed", conditions=[build_condition("Failed", reason)])


@pytest.mark.parametrize("restarts", [9, 10])
def test_a_spent_budget_requires_the_restarts(harness: TrainingCheckerHarness, restarts: int) -> None:
    for i in range(restarts):
        harness.write_state(harness.desired.count_restart(1000.0 + i))
    fail_job(harness, "RestartBudgetSpent")
    assert bool(harness.violated_rules) == (restarts == 9)


def test_failing_for_a_healthy_script_is_found(harness: TrainingCheckerHarness) -> None:
    harness.training.failed_on["j-w0-0"] = None
    fail_job(harness, "ScriptFailed")  # on one worker, while a spare exists
    assert harness.violated_rules == ["a job is Complete or Failed for the reason in its status"]


UNTRUE = "a job is Complete or Failed for the reason in its status"


@pytest.mark.parametrize("errors", ["failed_on", "mistakes_on"])
def test_a_job_that_has_trained_fails_only_by_errors_of_its_script(
    harness: TrainingCheckerHarness, errors: str
) -> None:
    getattr(harness.training, errors).update({"j-w0-0": None, "j-w1-0": None})
    harness.write_state(harness.desired.with_lifecycle(training_since=EPOCH))
    fail_job(harness, "ScriptFailed")
    assert harness.violated_rules == ([UNTRUE] if errors == "failed_on" else [])


@pytest.mark.parametrize("rounds", [10, 11])
def test_rounds_that_an_outage_ends_spend_no_restarts(harness: TrainingCheckerHarness, rounds: int) -> None:
    for i in range(rounds):
        harness.training.rounds.append(FakeRound(harness.training, round=i, sync_points=1, stepped_at=1.0))
    harness.training.outage_at = 2.0
    harness.write_state(harness.desired.with_lifecycle(training_since=EPOCH))
    for i in range(10):
        harness.write_state(harness.desired.count_restart(1000.0 + i))
    fail_job(harness, "RestartBudgetSpent")
    assert harness.violated_rules == ([UNTRUE] if rounds == 10 else [])


@pytest.mark.parametrize("steps", [(5, 5, 5), (5, 5, 6)])
def test_no_progress_requires_rounds_that_ended_at_one_step(
    harness: TrainingCheckerHarness, steps: tuple[int, ...]
) -> None:
    for number, step in enumerate(steps):
        run = FakeRound(harness.training, round=number, sync_points=1)
        run.progress.step = step
        harness.training.rounds.append(run)
    fail_job(harness, "NoProgress")
    assert harness.violated_rules == ([] if steps == (5, 5, 5) else [UNTRUE])


def write_spec(harness: TrainingCheckerHarness, **policy: int) -> None:
    harness.api.patch("trainingjobs", "j", "ns", {"spec": {"runPolicy": policy}}, manager="kubectl")


@pytest.mark.parametrize("seconds", [50.0, 150.0])
def test_a_deadline_counts_by_the_api_servers_clock(harness: TrainingCheckerHarness, seconds: float) -> None:
    write_spec(harness, activeDeadlineSeconds=100)
    harness.wait(seconds)
    fail_job(harness, "DeadlineExceeded")
    assert harness.violated_rules == ([UNTRUE] if seconds < 100.0 else [])


@pytest.mark.parametrize("seconds", [20.0, 150.0])
def test_a_job_is_deleted_only_after_its_ttl(harness: TrainingCheckerHarness, seconds: float) -> None:
    write_spec(harness, activeDeadlineSeconds=1, ttlSecondsAfterFinished=100)
    harness.wait(10.0)
    fail_job(harness, "DeadlineExceeded")
    harness.wait(seconds)
    harness.api.delete("trainingjobs", "j", "ns", manager=OPERATOR)
    expected = "no clock but the API server's ends a timeout early"
    assert harness.violated_rules == ([expected] if seconds < 100.0 else [])


def test_deleting_an_incident_of_today_is_found(harness: TrainingCheckerHarness) -> None:
    reference = {"name": "j", "namespace": "ns", "uid": harness.job.uid}
    content = {"jobRef": reference, "cause": "crash", "class": "Unknown", "round": 1, "message": "m"}
    for name in ("i", "k"):
        harness.api.create("incidents", {"metadata": {"name": name, "namespace": "ns"}, "spec": content})
    harness.api.delete("incidents", "i", "ns", manager="kubectl")
    assert harness.violated_rules == []
    harness.api.delete("incidents", "k", "ns", manager=OPERATOR)
    assert harness.violated_rules == ["no clock but the API server's ends a timeout early"]


def test_failing_for_a_deadline_that_is_not_set_is_found(harness: TrainingCheckerHarness) -> None:
    fail_job(harness, "DeadlineExceeded")
    assert harness.violated_rules == ["a job is Complete or Failed for the reason in its status"]


@pytest.mark.parametrize("reason", ["ErrImagePull", "ContainerCreating"])
def test_failing_for_images_that_were_pulled_is_found(harness: TrainingCheckerHarness, reason: str) -> None:
    waits = {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": reason}}}]}
    harness.create_pod("j-w0-0")
    harness.api.patch("pods", "j-w0-0", harness.job.namespace, {"status": waits}, subresource="status")
    fail_job(harness, "ImagePullFailed")
    assert bool(harness.violated_rules) == (reason != "ErrImagePull")


# The end.


def settle_job(harness: TrainingCheckerHarness) -> FakeRound:
    """Bring the job into a settled state."""
    run = harness.begin(1)
    run.assigned_ranks = tuple(
        SimpleNamespace(
            worker=SimpleNamespace(
                name=f"j-w{i}-0", node=f"node-{i}", folder=SimpleNamespace(requests=WorkerRequests())
            )
        )
        for i in range(2)
    )
    harness.step(run)
    counts = {"ready": 2, "spare": 1, "desired": 2, "summary": "2/2+1"}
    harness.status(phase="Running", workers=counts, restarts=0, conditions=[build_condition("Ready", "Training")])
    return run


def build_condition(kind: str, reason: str) -> dict[str, str]:
    since = format_time(EPOCH)
    return {"type": kind, "status": "True", "reason": reason, "message": "m", "lastTransitionTime": since}


def test_a_settled_job_violates_no_rule(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    assert harness.reasons == []


@pytest.mark.parametrize("conditions", [[], [("Ready", "Training"), ("Reconciling", "IncidentOpen")]])
def test_a_job_that_is_not_ready_is_not_settled(
    harness: TrainingCheckerHarness, conditions: list[tuple[str, str]]
) -> None:
    settle_job(harness)
    harness.status(conditions=[build_condition(*one) for one in conditions])
    assert harness.reasons == ["j trains, but its Ready, Reconciling, and Stalled conditions do not show it"]


def test_a_job_that_takes_no_step_is_not_settled(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.wait(50.0)
    assert harness.reasons == ["j takes no step in round 1, of j-w0-0, j-w1-0"]
    cast(Any, harness.checker._schedule).costs = frozenset({Cost.STEPS})
    assert harness.reasons == []


def test_a_job_with_too_few_workers_is_not_settled(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.api.patch("trainingjobs", "j", "ns", {"spec": {"replicas": 3}}, manager="kubectl")
    assert harness.reasons == ["j: 2 members instead of 3", "j: 3 workers instead of 4"]
    cast(Any, harness.checker._schedule).costs = frozenset({Cost.STRENGTH, Cost.SPARES})
    assert harness.reasons == []


def test_two_serving_operators_are_not_settled(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    cast(Any, harness.world).deployment.pods.append(harness.leader)
    assert harness.reasons == ["2 operators serve: operator-0, operator-0"]


def test_a_pod_of_a_job_that_is_gone_is_an_orphan(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.create_pod("j-w0-0")
    harness.api.delete("trainingjobs", "j", "ns")
    assert any("pod j-w0-0 belongs to no job" in message for message in harness.reasons)


def test_remedies_for_a_slow_node_are_reverted_once_it_is_healthy(harness: TrainingCheckerHarness) -> None:
    run = settle_job(harness)
    run.progress.training_config = TrainingConfig(shares=(9, 8))
    assert harness.reasons == [], "as even as integers allow"
    run.progress.training_config = TrainingConfig(shares=(10, 4))
    folder = run.assigned_ranks[1].worker.folder
    folder.requests = WorkerRequests("straggler-2", EvidenceRequest("straggler-2"))
    assert harness.reasons == [
        "j trains with shares [10, 4], but no node is slow",
        "j has a request for evidence, but no node is slow",
    ]
    run.mode = SyncMode.ASYNC_EDIT
    folder.requests = WorkerRequests()
    assert harness.reasons == [], "shares have no effect in this mode"
    run.mode = SyncMode.SYNC
    cast(Any, harness.world).nodes["node-1"].slow = 2.0
    assert harness.reasons == []


def test_a_pod_that_is_not_in_the_state_is_left_over(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.create_pod("j-w7-0")
    assert harness.reasons == ["pod j-w7-0 is in no bookkeeping"]


def test_a_marked_node_without_a_quarantine_is_not_settled(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.create_node()
    harness.taint()
    assert harness.reasons == ["node-1 is held without an approved NodeQuarantine"]


@pytest.mark.parametrize(
    ("cause", "rank", "costs", "named"),
    [
        ("crash", 1, frozenset({Cost.SPARES}), True),
        ("worker-lost", 1, frozenset({Cost.SPARES}), True),
        ("worker-lost", None, frozenset[Cost](), True),
        ("worker-lost", None, frozenset({Cost.SPARES}), False),
    ],
)
def test_the_end_names_open_incidents(
    harness: TrainingCheckerHarness, cause: str, rank: int | None, costs: frozenset[Cost], named: bool
) -> None:
    """A spare that cannot start keeps its Incident open."""
    settle_job(harness)
    cast(Any, harness.checker._schedule).costs = costs
    body = {"metadata": {"name": "i", "namespace": "ns"}}
    reference = {"name": "j", "namespace": "ns", "uid": harness.job.uid}
    spec = {"jobRef": reference, "cause": cause, "class": "Unknown", "round": 1, "message": "m"}
    spec |= {} if rank is None else {"rank": rank}
    harness.api.create("incidents", {**body, "spec": spec}, manager=OPERATOR)
    assert ("Incident i is open" in harness.reasons) is named


def test_a_quarantine_that_does_not_end_is_found(harness: TrainingCheckerHarness) -> None:
    settle_job(harness)
    harness.create_node()
    node = SimpleNamespace(fault_message="", shared_check="", slow=1.0, images=ImagePulls.FAIL)
    cast(Any, harness.world).nodes["node-1"] = node
    harness.suspect(who="kubectl", approved=True, expiresAfter="60s")
    status = {"status": {"cordonedAt": format_time(harness.world.wall_time())}}
    harness.api.patch("nodequarantines", "node-1", "", status, subresource="status", manager=OPERATOR)
    assert harness.reasons == []
    harness.wait(60.0 + end_state.QUARANTINE_EXPIRY_SLACK_SECONDS + 1.0)
    complaint = "node-1 is healthy, but its quarantine does not end"
    assert complaint not in harness.reasons, "no probe can pass where no image comes"
    node.images = ImagePulls.SUCCEED
    assert complaint in harness.reasons
