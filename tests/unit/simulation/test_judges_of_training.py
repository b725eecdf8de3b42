"""What judges say of rounds, steps, statuses and ends: told by hand-made rounds in a world without machines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pacekeeper.sync.training_config import TrainingConfig
from pacekeeper_analysis.protocol.plan import SyncMode
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
    """A round, as judges see one."""

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
    """With what a job trains, and who trains it."""

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
def court() -> TrainingCheckerHarness:
    return TrainingCheckerHarness()


# Rounds.


def test_rounds_follow_each_other(court: TrainingCheckerHarness) -> None:
    court.step(court.begin(1))
    court.step(court.begin(2))
    court.step(court.begin(3, membership=2))
    assert court.violated_rules == []


def test_a_round_that_was_is_found(court: TrainingCheckerHarness) -> None:
    court.begin(2)
    court.begin(2)
    assert court.violated_rules == ["one round at a time, with a higher number than all earlier ones"]


def test_an_old_round_may_take_steps_for_a_moment(court: TrainingCheckerHarness) -> None:
    old = court.begin(1)
    court.begin(2, membership=2)
    court.wait(5.0)
    court.step(old)
    assert court.violated_rules == []
    court.wait(10.0)
    court.step(old)
    assert court.violated_rules == [], "a lone rank hears of nobody"
    old.assigned_ranks = tuple(SimpleNamespace(worker=SimpleNamespace(name=name)) for name in ("j-w0-0", "j-w1-0"))
    court.step(old)
    assert court.violated_rules == ["one round at a time, with a higher number than all earlier ones"]


def test_what_was_kept_is_gone_on_from(court: TrainingCheckerHarness) -> None:
    court.training.volume.newest = SavedState(40, 1, {})
    court.begin(1, restored_step=40)
    court.begin(2, restored_step=45)
    assert court.violated_rules == []
    court.begin(3, restored_step=39)
    assert court.violated_rules == ["a round resumes from the newest checkpoint, or from newer state"]


def test_launchers_begin_as_many_rounds_as_they_may(court: TrainingCheckerHarness) -> None:
    court.write_state(court.desired.with_plan(restarts=2))
    court.checker._history.jobs[court.job.uid].most_allowed = {1: 2}
    for round_ in range(1, 4):
        court.begin(round_)
    assert court.violated_rules == []
    court.begin(4)
    assert court.violated_rules == ["launchers start no more rounds by themselves than the plan allows"]


def test_a_job_that_stands_still_is_found(court: TrainingCheckerHarness) -> None:
    run = court.begin(1)
    court.train(run, 100.0)
    assert court.violated_rules == []
    court.wait(61.0)
    court.check_world()
    assert court.violated_rules == ["a job that can train does not stall"]


def test_a_suspended_job_may_stand_still(court: TrainingCheckerHarness) -> None:
    court.step(court.begin(1))
    court.api.patch("trainingjobs", "j", "ns", {"spec": {"suspend": True}}, manager="kubectl")
    for _ in range(20):
        court.wait(5.0)
        court.check_world()
    assert court.violated_rules == []


def worker(court: TrainingCheckerHarness, run: FakeRound, **changes: Any) -> None:
    """Of the record `j-w0-0`, with one rank in `run`."""
    process = SimpleNamespace(paused=False)
    found = SimpleNamespace(is_gone=False, node="node-0", launcher=process, sidecar=process, job_uid=court.job.uid)
    found.ranks, found.script_fails, found.name = [SimpleNamespace(is_alive=True, training_round=run)], False, "j-w0-0"
    for name, value in changes.items():
        setattr(found, name, value)
    court.create_node(found.node)
    pod = court.create_pod("j-w0-0")
    cast(Any, court.world).workers[pod["metadata"]["uid"]] = found
    record = court.desired.state.placement.find_worker("j-w0-0")
    assert record is not None
    court.write_state(court.desired.with_worker(replace(record, uid=pod["metadata"]["uid"])))


def give_up(
    court: TrainingCheckerHarness, *, dead: bool = True, cause: IncidentCause = IncidentCause.WORKER_LOST
) -> None:
    record, now = court.desired.state.placement.find_worker("j-w0-0"), court.world.wall_time()
    assert record is not None
    draft = court.desired.with_worker(replace(record, leaving="nobody hears of it", dead=dead))
    court.write_state(
        draft.with_incident(Incident("i", cause, IncidentClass.UNKNOWN, 1, "m", now, now, now, worker="j-w0-0"))
    )


def test_who_trains_well_stays(court: TrainingCheckerHarness) -> None:
    run = court.begin(1)
    court.step(run)
    worker(court, run)
    give_up(court)
    assert court.violated_rules == ["a worker whose ranks train normally is not declared lost"]


def test_who_trains_well_on_a_node_that_is_none_any_more_need_not_stay(court: TrainingCheckerHarness) -> None:
    run = court.begin(1)
    court.step(run)
    worker(court, run)
    court.api.delete("nodes", "node-0")
    give_up(court)
    assert court.violated_rules == []


def test_who_runs_out_of_memory_may_be_moved_while_it_trains_again(court: TrainingCheckerHarness) -> None:
    run = court.begin(1)
    court.step(run)
    worker(court, run)
    give_up(court, cause=IncidentCause.OUT_OF_MEMORY)
    assert court.violated_rules == []


@pytest.mark.parametrize("trouble", ["stands", "over", "cut off", "gone", "slow"])
def test_who_is_lost_may_be_given_up(court: TrainingCheckerHarness, trouble: str) -> None:
    run = court.begin(1)
    court.step(run)
    worker(court, run, is_gone=trouble == "gone")
    run.is_stalled, run.over = trouble == "stands", trouble == "over"
    if trouble == "cut off":
        court.world.network.isolate("node-0")
    give_up(court, dead=trouble != "slow")  # one that is slow is replaced while it trains on
    assert court.violated_rules == []


# What is said.


def test_a_true_status_is_fine(court: TrainingCheckerHarness) -> None:
    run = court.begin(1)
    for _ in range(30):
        court.train(run, 15.0)
        court.status(phase="Running", step=run.progress.step)
    assert court.violated_rules == []


def test_running_without_steps_is_found(court: TrainingCheckerHarness) -> None:
    court.checker._history.patience = 1e9
    court.step(court.begin(1))
    court.status(phase="Running", step=1)
    for _ in range(40):
        court.wait(5.0)
        court.check_world()
    assert court.violated_rules == ["the status is never wrong for long"]


def test_an_operator_that_sees_nothing_need_not_know(court: TrainingCheckerHarness) -> None:
    court.checker._history.patience = 1e9
    court.step(court.begin(1))
    court.status(phase="Running", step=1)
    court.leader.process.paused = True
    for _ in range(40):
        court.wait(5.0)
        court.check_world()
    assert court.violated_rules == []


def test_an_old_step_is_found(court: TrainingCheckerHarness) -> None:
    court.status(phase="Running", step=1)
    run = court.begin(1)
    court.train(run, 300.0)
    assert court.violated_rules == ["the status is never wrong for long"]


@pytest.mark.parametrize(("steps", "fine"), [(9, False), (10, True)])
def test_complete_means_that_the_last_step_is_taken(court: TrainingCheckerHarness, steps: int, fine: bool) -> None:
    court.training.last_step = 10
    run = court.begin(1)
    run.progress.step = steps
    court.status(phase="Complete")
    assert court.violated_rules == ([] if fine else ["a job is Complete or Failed for the reason in its status"])


def fail(court: TrainingCheckerHarness, reason: str) -> None:
    court.status(phase="Failed", conditions=[condition("Failed", reason)])


@pytest.mark.parametrize("restarts", [9, 10])
def test_a_budget_that_is_spent_was_spent(court: TrainingCheckerHarness, restarts: int) -> None:
    for i in range(restarts):
        court.write_state(court.desired.count_restart(1000.0 + i))
    fail(court, "RestartBudgetSpent")
    assert bool(court.violated_rules) == (restarts == 9)


def test_a_script_that_was_well_is_no_reason(court: TrainingCheckerHarness) -> None:
    court.training.failed_on["j-w0-0"] = None
    fail(court, "ScriptFailed")  # on one worker, beside a spare
    assert court.violated_rules == ["a job is Complete or Failed for the reason in its status"]


UNTRUE = "a job is Complete or Failed for the reason in its status"


@pytest.mark.parametrize("errors", ["failed_on", "mistakes_on"])
def test_a_job_that_has_trained_fails_of_its_scripts_own_errors_only(
    court: TrainingCheckerHarness, errors: str
) -> None:
    getattr(court.training, errors).update({"j-w0-0": None, "j-w1-0": None})
    court.write_state(court.desired.with_lifecycle(training_since=EPOCH))
    fail(court, "ScriptFailed")
    assert court.violated_rules == ([UNTRUE] if errors == "failed_on" else [])


@pytest.mark.parametrize("rounds", [10, 11])
def test_rounds_that_an_outage_ends_spend_no_restarts(court: TrainingCheckerHarness, rounds: int) -> None:
    for i in range(rounds):
        court.training.rounds.append(FakeRound(court.training, round=i, sync_points=1, stepped_at=1.0))
    court.training.outage_at = 2.0
    court.write_state(court.desired.with_lifecycle(training_since=EPOCH))
    for i in range(10):
        court.write_state(court.desired.count_restart(1000.0 + i))
    fail(court, "RestartBudgetSpent")
    assert court.violated_rules == ([UNTRUE] if rounds == 10 else [])


@pytest.mark.parametrize("steps", [(5, 5, 5), (5, 5, 6)])
def test_no_progress_means_that_rounds_have_ended_at_one_step(
    court: TrainingCheckerHarness, steps: tuple[int, ...]
) -> None:
    for number, step in enumerate(steps):
        run = FakeRound(court.training, round=number, sync_points=1)
        run.progress.step = step
        court.training.rounds.append(run)
    fail(court, "NoProgress")
    assert court.violated_rules == ([] if steps == (5, 5, 5) else [UNTRUE])


def spec(court: TrainingCheckerHarness, **policy: int) -> None:
    court.api.patch("trainingjobs", "j", "ns", {"spec": {"runPolicy": policy}}, manager="kubectl")


@pytest.mark.parametrize("seconds", [50.0, 150.0])
def test_a_deadline_counts_by_the_api_servers_clock(court: TrainingCheckerHarness, seconds: float) -> None:
    spec(court, activeDeadlineSeconds=100)
    court.wait(seconds)
    fail(court, "DeadlineExceeded")
    assert court.violated_rules == ([UNTRUE] if seconds < 100.0 else [])


@pytest.mark.parametrize("seconds", [20.0, 150.0])
def test_a_job_is_deleted_when_its_time_is_over(court: TrainingCheckerHarness, seconds: float) -> None:
    spec(court, activeDeadlineSeconds=1, ttlSecondsAfterFinished=100)
    court.wait(10.0)
    fail(court, "DeadlineExceeded")
    court.wait(seconds)
    court.api.delete("trainingjobs", "j", "ns", manager=OPERATOR)
    expected = "no clock but the API server's ends a timeout early"
    assert court.violated_rules == ([expected] if seconds < 100.0 else [])


def test_no_operator_deletes_an_incident_of_today(court: TrainingCheckerHarness) -> None:
    reference = {"name": "j", "namespace": "ns", "uid": court.job.uid}
    content = {"jobRef": reference, "cause": "crash", "class": "Unknown", "round": 1, "message": "m"}
    for name in ("i", "k"):
        court.api.create("incidents", {"metadata": {"name": name, "namespace": "ns"}, "spec": content})
    court.api.delete("incidents", "i", "ns", manager="kubectl")
    assert court.violated_rules == []
    court.api.delete("incidents", "k", "ns", manager=OPERATOR)
    assert court.violated_rules == ["no clock but the API server's ends a timeout early"]


def test_a_deadline_that_there_is_not_is_no_reason(court: TrainingCheckerHarness) -> None:
    fail(court, "DeadlineExceeded")
    assert court.violated_rules == ["a job is Complete or Failed for the reason in its status"]


@pytest.mark.parametrize("reason", ["ErrImagePull", "ContainerCreating"])
def test_images_that_came_are_no_reason(court: TrainingCheckerHarness, reason: str) -> None:
    waits = {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": reason}}}]}
    court.create_pod("j-w0-0")
    court.api.patch("pods", "j-w0-0", court.job.namespace, {"status": waits}, subresource="status")
    fail(court, "ImagePullFailed")
    assert bool(court.violated_rules) == (reason != "ErrImagePull")


# The end.


def settled(court: TrainingCheckerHarness) -> FakeRound:
    """Everything is as it shall be."""
    run = court.begin(1)
    run.assigned_ranks = tuple(
        SimpleNamespace(worker=SimpleNamespace(name=f"j-w{i}-0", node=f"node-{i}")) for i in range(2)
    )
    court.step(run)
    counts = {"ready": 2, "spare": 1, "desired": 2, "summary": "2/2+1"}
    court.status(phase="Running", workers=counts, restarts=0, conditions=[condition("Ready", "Training")])
    return run


def condition(kind: str, reason: str) -> dict[str, str]:
    since = format_time(EPOCH)
    return {"type": kind, "status": "True", "reason": reason, "message": "m", "lastTransitionTime": since}


def test_all_is_well(court: TrainingCheckerHarness) -> None:
    settled(court)
    assert court.reasons == []


@pytest.mark.parametrize("conditions", [[], [("Ready", "Training"), ("Reconciling", "IncidentOpen")]])
def test_a_job_that_tools_do_not_find_ready_is_not_settled(
    court: TrainingCheckerHarness, conditions: list[tuple[str, str]]
) -> None:
    settled(court)
    court.status(conditions=[condition(*one) for one in conditions])
    assert court.reasons == ["j trains, but its Ready, Reconciling, and Stalled conditions do not show it"]


def test_a_job_that_takes_no_step_is_not_settled(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.wait(50.0)
    assert court.reasons == ["j takes no step in round 1, of j-w0-0, j-w1-0"]
    cast(Any, court.checker._schedule).costs = frozenset({Cost.STEPS})
    assert court.reasons == []


def test_a_job_with_too_few_workers_is_not_settled(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.api.patch("trainingjobs", "j", "ns", {"spec": {"replicas": 3}}, manager="kubectl")
    assert court.reasons == ["j: 2 members instead of 3", "j: 3 workers instead of 4"]
    cast(Any, court.checker._schedule).costs = frozenset({Cost.STRENGTH, Cost.SPARES})
    assert court.reasons == []


def test_two_operators_that_serve_are_no_end(court: TrainingCheckerHarness) -> None:
    settled(court)
    cast(Any, court.world).deployment.pods.append(court.leader)
    assert court.reasons == ["2 operators serve: operator-0, operator-0"]


def test_a_pod_of_a_job_that_is_gone_is_an_orphan(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.create_pod("j-w0-0")
    court.api.delete("trainingjobs", "j", "ns")
    assert any("pod j-w0-0 belongs to no job" in words for words in court.reasons)


def test_what_was_done_about_a_slow_node_is_undone_once_it_is_well(court: TrainingCheckerHarness) -> None:
    run = settled(court)
    run.progress.training_config = TrainingConfig(shares=(9, 8))
    assert court.reasons == [], "as even as integers allow"
    run.progress.training_config = TrainingConfig(shares=(10, 4))
    court.write_state(court.desired.with_plan(evidence_request="straggler-2"))
    assert court.reasons == [
        "j trains with shares [10, 4], but no node is slow",
        "j has a request for evidence, but no node is slow",
    ]
    run.mode = SyncMode.ASYNC_EDIT
    court.write_state(court.desired.with_plan(evidence_request=""))
    assert court.reasons == [], "shares count for nothing in this mode"
    run.mode = SyncMode.SYNC
    cast(Any, court.world).nodes["node-1"].slow = 2.0
    assert court.reasons == []


def test_a_pod_that_nobody_knows_is_left_over(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.create_pod("j-w7-0")
    assert court.reasons == ["pod j-w7-0 is in no bookkeeping"]


def test_a_node_that_is_held_without_a_quarantine_is_not_settled(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.create_node()
    court.taint()
    assert court.reasons == ["node-1 is held without an approved NodeQuarantine"]


@pytest.mark.parametrize(
    ("cause", "rank", "costs", "named"),
    [
        ("crash", 1, frozenset({Cost.SPARES}), True),
        ("worker-lost", 1, frozenset({Cost.SPARES}), True),
        ("worker-lost", None, frozenset[Cost](), True),
        ("worker-lost", None, frozenset({Cost.SPARES}), False),
    ],
)
def test_end_names_what_is_open(
    court: TrainingCheckerHarness, cause: str, rank: int | None, costs: frozenset[Cost], named: bool
) -> None:
    """A spare that cannot start keeps its Incident open."""
    settled(court)
    cast(Any, court.checker._schedule).costs = costs
    body = {"metadata": {"name": "i", "namespace": "ns"}}
    reference = {"name": "j", "namespace": "ns", "uid": court.job.uid}
    spec = {"jobRef": reference, "cause": cause, "class": "Unknown", "round": 1, "message": "m"}
    spec |= {} if rank is None else {"rank": rank}
    court.api.create("incidents", {**body, "spec": spec}, manager=OPERATOR)
    assert ("Incident i is open" in court.reasons) is named


def test_a_quarantine_ends_in_time(court: TrainingCheckerHarness) -> None:
    settled(court)
    court.create_node()
    node = SimpleNamespace(fault_message="", shared_check="", slow=1.0, images=ImagePulls.FAIL)
    cast(Any, court.world).nodes["node-1"] = node
    court.suspect(who="kubectl", approved=True, expiresAfter="60s")
    status = {"status": {"cordonedAt": format_time(court.world.wall_time())}}
    court.api.patch("nodequarantines", "node-1", "", status, subresource="status", manager=OPERATOR)
    assert court.reasons == []
    court.wait(60.0 + end_state.QUARANTINE_EXPIRY_SLACK_SECONDS + 1.0)
    complaint = "node-1 is healthy, but its quarantine does not end"
    assert complaint not in court.reasons, "no probe can pass where no image comes"
    node.images = ImagePulls.SUCCEED
    assert complaint in court.reasons
