"""Workers and nodes that nobody reaches: who says so, who vouches for them, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import FaultReport, Heartbeat, StepProgress
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.failures.node_lost import (
    WORKER_SILENCE_LIMIT_SECONDS,
    WORKER_SILENT_SECONDS,
    compute_silent_seconds,
    needs_reachability_probe,
)
from pacekeeper_operator.decide.placement.workforce import list_surplus_workers
from pacekeeper_operator.endpoint.sidecars import Caller, SidecarService
from pacekeeper_operator.observe import gather, reachability
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.peer_jobs import NodeSnapshot
from pacekeeper_operator.observe.prometheus import PrometheusSample, build_query
from pacekeeper_operator.state.cluster_view import ClusterView
from pacekeeper_operator.state.desired_state import DesiredState, Incident, PastIncident
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import (
    NOW,
    build_job,
    build_policy,
    build_stall,
    build_stalls,
    build_training,
    change_worker,
    list_decisions,
)


def seats(draft: DesiredState) -> list[str]:
    return [member.worker for member in draft.plan.members]


def looked_at(world: Observation, *lost: str, silent: float = 12.0, kubelet: bool = False) -> Observation:
    """After the operator's probes: `lost` were neither heard for `silent` seconds nor reached; all others were."""
    for view in world.workers:
        world = change_worker(world, view.name, reachable=True, node_reachable=True)
    for name in lost:
        world = change_worker(world, name, reachable=False, node_reachable=kubelet, silent_seconds=silent)
    return world


def node(world: Observation, name: str, *, ready: bool) -> Observation:
    nodes = {**world.cluster_view.nodes, name: replace(world.cluster_view.nodes[name], ready=ready)}
    return replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))


def training_on(world: Observation) -> Observation:
    """Those who are heard have just been heard to complete a step."""
    for view in world.members:
        if view.silent_seconds < WORKER_SILENT_SECONDS:
            world = change_worker(world, view.name, seconds_since_step=1.0)
    return world


def complaining(world: Observation, *unreachable: str) -> Observation:
    faults = (build_stall("j-w0-0", 0, unreachable=unreachable), build_stall("j-w2-0", 2, unreachable=unreachable))
    return replace(world, faults=faults)


def suspicions(draft: DesiredState) -> list[tuple[str, Witness]]:
    return [(wanted.node, wanted.witness) for wanted in draft.state.incidents.quarantine_requests]


class TestOneWorker:
    def test_its_peers_word_is_enough_at_once(self) -> None:
        world = complaining(looked_at(build_training(), "j-w1-0", silent=4.0), "10.0.0.1")
        thought = evaluate_job(world, build_policy())
        assert seats(thought.desired)[1] == "j-w4-0"
        (view,) = list_surplus_workers(thought.observation)
        assert (view.name, view.record.force) == ("j-w1-0", True)
        assert suspicions(thought.desired) == [("node-1", Witness.NONE)]
        assert thought.desired.state.incidents.current[0].cause is IncidentCause.NODE_LOST

    def test_a_node_that_answers_is_not_blamed(self) -> None:
        thought = evaluate_job(
            complaining(looked_at(build_training(), "j-w1-0", silent=4.0, kubelet=True), "10.0.0.1"), build_policy()
        )
        assert seats(thought.desired)[1] == "j-w4-0"
        assert not suspicions(thought.desired)
        assert thought.desired.state.incidents.current[0].cause is IncidentCause.WORKER_LOST

    @pytest.mark.parametrize("silent", [12.0, 10_000.0])
    def test_who_trains_on_is_left_alone_however_long_the_operator_does_not_reach_it(self, silent: float) -> None:
        """Operator and node are cut from each other: the peers' steps, which need its own, go on."""
        thought = evaluate_job(training_on(looked_at(build_training(), "j-w1-0", silent=silent)), build_policy())
        assert not list_decisions(thought)
        assert seats(thought.desired)[1] == "j-w1-0"

    def test_as_soon_as_the_peers_stand_still_it_is_lost(self) -> None:
        thought = evaluate_job(complaining(looked_at(build_training(), "j-w1-0")), build_policy())
        (incident,) = thought.desired.state.incidents.current
        assert (incident.worker, incident.cause) == ("j-w1-0", IncidentCause.WORKER_LOST)
        assert not suspicions(thought.desired), "that the job stands still says nothing of the node"

    def test_its_nodes_condition_is_a_witness_against_worker_and_node(self) -> None:
        world = looked_at(build_training(), "j-w1-0")
        assert not list_decisions(evaluate_job(world, build_policy()))
        thought = evaluate_job(node(world, "node-1", ready=False), build_policy())
        assert seats(thought.desired)[1] == "j-w4-0"
        assert suspicions(thought.desired) == [("node-1", Witness.NODE_CONDITION)]

    def test_a_node_that_is_gone_is_one_too(self) -> None:
        world = looked_at(build_training(), "j-w1-0")
        nodes = {name: view for name, view in world.cluster_view.nodes.items() if name != "node-1"}
        world = replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))
        assert list_decisions(evaluate_job(world, build_policy()))[0].cause is IncidentCause.NODE_LOST

    def test_a_worker_that_trains_is_not_lost_because_its_node_is_not_ready(self) -> None:
        world = training_on(looked_at(build_training(), "j-w1-0"))
        assert not list_decisions(evaluate_job(node(world, "node-1", ready=False), build_policy()))

    def test_without_any_witness_patience_ends_and_nobodys_node_is_blamed(self) -> None:
        world = looked_at(build_training(), "j-w1-0", silent=WORKER_SILENCE_LIMIT_SECONDS - 1)
        assert not list_decisions(evaluate_job(world, build_policy()))
        thought = evaluate_job(
            looked_at(build_training(), "j-w1-0", silent=WORKER_SILENCE_LIMIT_SECONDS + 1), build_policy()
        )
        (incident,) = thought.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.WORKER_LOST, Remedy.REPLACE_WORKER)
        assert not suspicions(thought.desired)
        worker = thought.desired.state.placement.find_worker("j-w1-0")
        assert worker is None or not worker.force, "the kubelet ends it: it may live"

    def test_slow_steps_have_more_patience(self) -> None:
        world = looked_at(build_training(metrics=JobMetrics(step_seconds=100.0)), "j-w1-0", silent=250.0)
        assert not list_decisions(evaluate_job(world, build_policy()))

    def test_a_young_operator_has_not_heard_anybody_yet(self) -> None:
        world = node(looked_at(build_training(operator_age=5.0), "j-w1-0", silent=60.0), "node-1", ready=False)
        assert not list_decisions(evaluate_job(world, build_policy()))
        assert list_decisions(evaluate_job(replace(world, operator_age=60.0), build_policy()))

    def test_what_may_not_be_replaced_is_only_written_down(self) -> None:
        world = node(looked_at(build_training(), "j-w1-0"), "node-1", ready=False)
        thought = evaluate_job(world, build_policy(allow=frozenset({Remedy.RESTART_RANKS})))
        assert seats(thought.desired)[1] == "j-w1-0"
        assert "spec.remediation.allow" in thought.desired.state.incidents.current[0].remedies[0].reason


class TestSingleWorker:
    """Nobody else is there whose steps could show that it lives."""

    def world(self, **metrics: float) -> Observation:
        seen = JobMetrics(step_seconds=0.1, queried_at=NOW - 2, **metrics)  # type: ignore[arg-type]  # only numbers are given
        return looked_at(build_training(1, 1, metrics=seen), "j-w0-0", silent=WORKER_SILENCE_LIMIT_SECONDS + 1)

    def test_prometheus_sees_it_train(self) -> None:
        assert not list_decisions(
            evaluate_job(self.world(reporting_ranks=1, min_step=900, scrape_age=5.0), build_policy())
        )

    @pytest.mark.parametrize(
        "metrics",
        [
            {},
            {"reporting_ranks": 1, "min_step": 500, "scrape_age": 5.0},  # the step that it told of itself
            {"reporting_ranks": 1, "min_step": 900, "scrape_age": 290.0},  # a look from before it fell silent
            {"reporting_ranks": 0, "min_step": 900, "scrape_age": 5.0},
        ],
    )
    def test_nobody_does(self, metrics: dict[str, float]) -> None:
        assert list_decisions(evaluate_job(self.world(**metrics), build_policy()))[0].worker == "j-w0-0"

    def test_what_prometheus_has_told_of_it(self) -> None:
        """The age of a scrape is that at the time of the question."""
        told = {"reporting_ranks": 1.0, "min_step": 900.0, "scrape_age": 5.0}
        sample = PrometheusSample(NOW - 2, {name: {("ns", "j"): value} for name, value in told.items()}, error="")
        world = replace(self.world(), metrics=sample.get_metrics("ns", "j"))
        assert compute_silent_seconds(world, world.members[0]) == 7.0
        assert all(f'"pacekeeper_query", "{name}"' in build_query("") for name in told)

    def test_without_witnesses_it_is_not_lost_soon(self) -> None:
        assert not list_decisions(evaluate_job(looked_at(build_training(1, 1), "j-w0-0"), build_policy()))

    def test_its_nodes_condition_is_a_witness(self) -> None:
        world = node(looked_at(build_training(1, 1), "j-w0-0"), "node-0", ready=False)
        assert list_decisions(evaluate_job(world, build_policy()))[0].cause is IncidentCause.NODE_LOST


class TestAllWorkers:
    LOST = ("j-w0-0", "j-w1-0")

    def test_a_power_cut_of_all_members_nodes_is_seen_because_spares_answer(self) -> None:
        world = looked_at(build_training(2, 2), *self.LOST, silent=10.5)
        assert needs_reachability_probe(world)
        thought = evaluate_job(world, build_policy())
        assert seats(thought.desired) == ["j-w2-0", "j-w3-0"]
        (incident,) = list_decisions(thought)
        assert incident.cause is IncidentCause.NODE_LOST, "one event is one incident, however many workers it has taken"
        assert "2 workers are lost (j-w0-0, j-w1-0)" in incident.message
        assert suspicions(thought.desired) == [("node-0", Witness.NONE), ("node-1", Witness.NONE)]

    def test_or_because_others_are_reached(self) -> None:
        world = looked_at(build_training(2, 0), *self.LOST)
        assert not list_decisions(evaluate_job(world, build_policy())), "it may be the operator that is cut off"
        elsewhere = replace(world, cluster_view=replace(world.cluster_view, reached_elsewhere=True))
        assert suspicions(evaluate_job(elsewhere, build_policy()).desired) == [
            ("node-0", Witness.NONE),
            ("node-1", Witness.NONE),
        ]

    def test_an_operator_that_reaches_nobody_blames_nobody_however_long(self) -> None:
        world = build_training()
        names = [view.name for view in world.workers]
        assert not list_decisions(evaluate_job(looked_at(world, *names, silent=100_000.0), build_policy()))

    def test_when_no_node_at_all_is_ready_it_is_the_api_server_that_hears_of_none(self) -> None:
        world = looked_at(build_training(), *[view.name for view in build_training().workers])
        world = node(world, "node-1", ready=False)
        assert [incident.worker for incident in list_decisions(evaluate_job(world, build_policy()))] == ["j-w1-0"]
        for name in world.cluster_view.nodes:
            world = node(world, name, ready=False)
        assert not list_decisions(evaluate_job(world, build_policy()))

    def test_who_is_lost_without_his_nodes_fault_is_an_incident_of_its_own(self) -> None:
        world = complaining(looked_at(build_training(6, 3), "j-w1-0", "j-w3-0"), "10.0.0.1", "10.0.0.3")
        world = change_worker(world, "j-w3-0", node_reachable=True)
        thought = evaluate_job(world, build_policy())
        assert {(i.worker, i.cause) for i in list_decisions(thought)} == {
            ("j-w1-0", IncidentCause.NODE_LOST),
            ("j-w3-0", IncidentCause.WORKER_LOST),
        }
        assert suspicions(thought.desired) == [("node-1", Witness.NONE)]
        assert len(thought.desired.state.incidents.settled_faults) == len(world.faults)

    def test_hundreds_at_once_are_one_incident_within_the_schema(self) -> None:
        world = build_training(200, 1)
        thought = evaluate_job(looked_at(world, *[view.name for view in world.members]), build_policy())
        (incident,) = list_decisions(thought)
        assert_within_the_schema(incident)
        assert "and 192 more" in incident.message

    def test_several_on_one_node_wait_for_a_witness(self) -> None:
        """One broken path explains it."""
        world = looked_at(build_training(2, 1), *self.LOST)
        world = change_worker(world, "j-w1-0", pod={"node": "node-0"})
        assert not list_decisions(evaluate_job(world, build_policy()))

    def test_many_nodes_at_once_and_the_job_is_healed_all_the_same(self) -> None:
        world = complaining(
            looked_at(build_training(6, 3), "j-w1-0", "j-w3-0", "j-w4-0"), "10.0.0.1", "10.0.0.3", "10.0.0.4"
        )
        thought = evaluate_job(world, build_policy())
        assert not {"j-w1-0", "j-w3-0", "j-w4-0"} & set(seats(thought.desired))
        assert len(suspicions(thought.desired)) == 3, "whether that is too many is decided where all jobs' are known"


def silent(world: Observation) -> Observation:
    """Nobody has been heard for a while."""
    return replace(world, workers=tuple(replace(view, silent_seconds=20.0) for view in world.workers))


class TestLookingClosely:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Addresses of the nodes that were asked; only 192.0.2.9 answers."""
        nodes: list[str] = []

        async def reaches_node(address: str) -> bool:
            nodes.append(address)
            return address == "192.0.2.9"

        async def reaches_worker(_address: str, _port: int) -> bool:
            return False

        monkeypatch.setattr(reachability, "can_reach_node", reaches_node)
        monkeypatch.setattr(reachability, "can_reach_worker", reaches_worker)
        return nodes

    async def test_other_nodes_are_asked_where_none_of_the_jobs_own_answers(self, asked: list[str]) -> None:
        seen = await gather.probe_suspected_workers(silent(build_training(2, 1)))
        assert {view.reachable for view in seen.workers} == {False}
        assert seen.cluster_view.reached_elsewhere
        assert set(asked) == {f"192.0.2.{n}" for n in range(10)}

    async def test_who_is_heard_is_asked_only_where_a_peer_does_not_reach_it(self, asked: list[str]) -> None:
        world = complaining(build_training(4, 1), "10.0.0.2")
        seen = await gather.probe_suspected_workers(world)
        assert asked == ["192.0.2.2"]
        assert [view.name for view in seen.workers if view.reachable is not None] == ["j-w2-0"]
        assert not seen.cluster_view.reached_elsewhere, "the others' words show that the operator is not cut off"

    async def test_no_others_are_asked_where_one_answers(self, asked: list[str]) -> None:
        world = silent(change_worker(build_training(2, 1), "j-w2-0", pod={"node": "node-9"}))
        seen = await gather.probe_suspected_workers(world)
        assert not seen.cluster_view.reached_elsewhere
        assert set(asked) == {"192.0.2.0", "192.0.2.1", "192.0.2.9"}

    async def test_of_many_nodes_some_from_everywhere(self, asked: list[str]) -> None:
        world = silent(build_training(1, 0))
        some = world.cluster_view.nodes["node-1"]
        nodes = {f"n{n:04}": replace(some, name=f"n{n:04}", address=f"10.1.{n // 250}.{n % 250}") for n in range(1000)}
        await gather.probe_suspected_workers(replace(world, cluster_view=ClusterView(nodes=nodes)))
        assert len(asked) == gather.MAX_PROBED_OTHER_NODES
        assert len({address.split(".")[2] for address in asked}) == 4

    def test_another_jobs_fresh_word_shows_that_the_operator_is_not_cut_off(self) -> None:
        memory, world = JobRegistry(0.0), build_training()
        other = memory.get_or_create(replace(build_job(), namespace="another", name="other", uid="o"))
        other.update(desired=world.desired)
        memory.mark_reporting(other, NOW - 1)
        assert gather.collect_cluster_view(memory, world.job, world.desired, NodeSnapshot(), NOW).reached_elsewhere
        assert not gather.collect_cluster_view(
            memory, world.job, world.desired, NodeSnapshot(), NOW + 5
        ).reached_elsewhere

    def test_nor_does_its_own(self) -> None:
        memory, world = JobRegistry(0.0), build_training()
        memory.get_or_create(world.job).update(desired=world.desired)
        memory.mark_reporting(memory.get_or_create(world.job), NOW - 1)
        assert not gather.collect_cluster_view(memory, world.job, world.desired, NodeSnapshot(), NOW).reached_elsewhere


async def test_when_a_worker_was_heard_to_complete_a_step() -> None:
    memory, world = JobRegistry(0.0), build_training(1, 0)
    known = memory.get_or_create(world.job)
    known.update(desired=world.desired)
    clock = FixedTimeRuntime()
    sidecars = SidecarService(FakeCluster(), memory, clock)
    caller = Caller("ns", "j", "j-w0-0")
    await sidecars.poll(caller, Heartbeat(worker="j-w0-0", progress=StepProgress(step=7)), after=-1, wait=0.0)
    assert known.contacts["j-w0-0"].stepped_at is None, "when it was completed is not known"
    for clock.passed in (3.0, 6.0):
        await sidecars.poll(caller, Heartbeat(worker="j-w0-0", progress=StepProgress(step=8)), after=-1, wait=0.0)
    (view,) = gather.build_observation(0.0, known, (), ClusterView(), NOW + 10).workers
    assert view.seconds_since_step == 7.0


class TestHangs:
    def around(self, namespace: str, seconds_ago: float) -> Observation:
        """A job of `namespace` has hung on node-2 so long ago; then rank 2 of ours hangs there."""
        memory, world = JobRegistry(0.0), build_training()
        other = memory.get_or_create(replace(build_job(), namespace=namespace, name="secret-project", uid="o"))
        past = PastIncident(
            IncidentCause.HANG, NOW - seconds_ago, 5.0, rank=7, worker="secret-project-w7-0", node="node-2"
        )
        other.update(desired=build_training().desired.with_incidents(past=(past,)))
        nodes = NodeSnapshot(world.cluster_view.nodes)
        around = gather.collect_cluster_view(memory, world.job, world.desired, nodes, NOW)
        return replace(world, cluster_view=around, faults=build_stalls(world, culprit=2))

    def test_another_job_of_the_namespace_hung_there_too(self) -> None:
        thought = evaluate_job(self.around("ns", 60), build_policy())
        (incident,) = list_decisions(thought)
        assert (incident.class_, incident.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        assert suspicions(thought.desired) == [("node-2", Witness.NONE)]

    @pytest.mark.parametrize("namespace", ["ns", "another"])
    def test_weeks_ago_is_no_reason_for_anything(self, namespace: str) -> None:
        thought = evaluate_job(self.around(namespace, 14 * 86_400), build_policy())
        (incident,) = list_decisions(thought)
        assert (incident.class_, incident.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)
        assert not suspicions(thought.desired)

    def test_its_own_of_weeks_ago_neither(self) -> None:
        world = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 14 * 86_400, 5.0, rank=3, worker="j-w8-0", node="node-2")
        world = world.with_desired(world.desired.with_incidents(past=(past,)))
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        assert list_decisions(thought)[0].remedy is Remedy.RESTART_RANKS
        assert not suspicions(thought.desired)

    def test_another_tenants_is_a_reason_to_ask_about_the_node_and_changes_nothing_else(self) -> None:
        thought = evaluate_job(self.around("another", 60), build_policy())
        (incident,) = list_decisions(thought)
        assert (incident.class_, incident.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)
        assert suspicions(thought.desired) == [("node-2", Witness.NONE)]
        (wanted,) = thought.desired.state.incidents.quarantine_requests
        for words in (incident.message, *incident.evidence, wanted.reason):
            assert "secret-project" not in words
            assert "another" not in words


def huge(ranks: int, per_worker: int) -> tuple[Observation, tuple[FaultReport, ...]]:
    """A job of so many ranks, all of which stand still outside of any collective."""
    world = build_training(ranks // per_worker, 0)
    members = tuple(
        replace(member, ranks=tuple(range(n * per_worker, (n + 1) * per_worker)))
        for n, member in enumerate(world.plan.members)
    )
    world = world.with_desired(world.desired.with_plan(members=members))
    faults = []
    for member in members:
        one = build_stall(member.worker, member.ranks[0], culprit=True)
        states = tuple(replace(one.ranks[0], rank=rank, stack="x" * 500) for rank in member.ranks)
        faults.append(replace(one, ranks=states))
    return world, tuple(faults)


@pytest.mark.parametrize(("ranks", "per_worker"), [(600, 1), (80_000, 8)])
def test_a_hang_of_very_many_ranks_is_told_in_few_words(ranks: int, per_worker: int) -> None:
    world, faults = huge(ranks, per_worker)
    thought = evaluate_job(replace(world, faults=faults), build_policy())
    (incident,) = list_decisions(thought)
    assert "rank 0, 1, 2, 3, 4, 5, 6, 7 and" in incident.message
    assert f"and {ranks - 8} more" in incident.message
    assert_within_the_schema(incident)
    assert thought.desired.plan.membership == 2


def assert_within_the_schema(incident: Incident) -> None:
    assert len(incident.message) <= 4096
    assert len(incident.evidence) <= 64
    assert max(map(len, incident.evidence)) <= 8192
