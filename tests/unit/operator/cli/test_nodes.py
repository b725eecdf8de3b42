"""Workers and nodes that the operator cannot reach: which witnesses count, and what follows."""

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


def list_member_names(desired: DesiredState) -> list[str]:
    return [member.worker for member in desired.plan.members]


def apply_probe_results(
    observation: Observation, *lost: str, silent: float = 12.0, kubelet: bool = False
) -> Observation:
    """Apply probes in which `lost` are unreachable and silent for `silent` seconds, and all others are reachable."""
    for view in observation.workers:
        observation = change_worker(observation, view.name, reachable=True, node_reachable=True)
    for name in lost:
        observation = change_worker(observation, name, reachable=False, node_reachable=kubelet, silent_seconds=silent)
    return observation


def set_node_ready(observation: Observation, name: str, *, ready: bool) -> Observation:
    nodes = {**observation.cluster_view.nodes, name: replace(observation.cluster_view.nodes[name], ready=ready)}
    return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))


def mark_members_stepping(observation: Observation) -> Observation:
    """Let each reporting member have just completed a step."""
    for view in observation.members:
        if view.silent_seconds < WORKER_SILENT_SECONDS:
            observation = change_worker(observation, view.name, seconds_since_step=1.0)
    return observation


def report_unreachable(observation: Observation, *unreachable: str) -> Observation:
    faults = (build_stall("j-w0-0", 0, unreachable=unreachable), build_stall("j-w2-0", 2, unreachable=unreachable))
    return replace(observation, faults=faults)


def list_suspicions(desired: DesiredState) -> list[tuple[str, Witness]]:
    return [(wanted.node, wanted.witness) for wanted in desired.state.incidents.quarantine_requests]


class TestOneWorker:
    def test_reports_of_peers_make_a_worker_lost_at_once(self) -> None:
        observation = report_unreachable(apply_probe_results(build_training(), "j-w1-0", silent=4.0), "10.0.0.1")
        result = evaluate_job(observation, build_policy())
        assert list_member_names(result.desired)[1] == "j-w4-0"
        (view,) = list_surplus_workers(result.observation)
        assert (view.name, view.record.force) == ("j-w1-0", True)
        assert list_suspicions(result.desired) == [("node-1", Witness.NONE)]
        assert result.desired.state.incidents.current[0].cause is IncidentCause.NODE_LOST

    def test_a_node_that_answers_is_not_blamed(self) -> None:
        result = evaluate_job(
            report_unreachable(apply_probe_results(build_training(), "j-w1-0", silent=4.0, kubelet=True), "10.0.0.1"),
            build_policy(),
        )
        assert list_member_names(result.desired)[1] == "j-w4-0"
        assert not list_suspicions(result.desired)
        assert result.desired.state.incidents.current[0].cause is IncidentCause.WORKER_LOST

    @pytest.mark.parametrize("silent", [12.0, 10_000.0])
    def test_a_training_worker_stays_however_long_the_operator_cannot_reach_it(self, silent: float) -> None:
        """Operator and node are cut off from each other. The peers go on with steps that need this worker."""
        result = evaluate_job(
            mark_members_stepping(apply_probe_results(build_training(), "j-w1-0", silent=silent)), build_policy()
        )
        assert not list_decisions(result)
        assert list_member_names(result.desired)[1] == "j-w1-0"

    def test_a_worker_is_lost_once_its_peers_stall(self) -> None:
        result = evaluate_job(report_unreachable(apply_probe_results(build_training(), "j-w1-0")), build_policy())
        (incident,) = result.desired.state.incidents.current
        assert (incident.worker, incident.cause) == ("j-w1-0", IncidentCause.WORKER_LOST)
        assert not list_suspicions(result.desired), "a stalled job is no evidence against the node"

    def test_the_node_condition_is_a_witness_against_worker_and_node(self) -> None:
        observation = apply_probe_results(build_training(), "j-w1-0")
        assert not list_decisions(evaluate_job(observation, build_policy()))
        result = evaluate_job(set_node_ready(observation, "node-1", ready=False), build_policy())
        assert list_member_names(result.desired)[1] == "j-w4-0"
        assert list_suspicions(result.desired) == [("node-1", Witness.NODE_CONDITION)]

    def test_a_deleted_node_is_a_witness_against_its_worker(self) -> None:
        observation = apply_probe_results(build_training(), "j-w1-0")
        nodes = {name: view for name, view in observation.cluster_view.nodes.items() if name != "node-1"}
        observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))
        assert list_decisions(evaluate_job(observation, build_policy()))[0].cause is IncidentCause.NODE_LOST

    def test_a_worker_that_trains_is_not_lost_because_its_node_is_not_ready(self) -> None:
        observation = mark_members_stepping(apply_probe_results(build_training(), "j-w1-0"))
        assert not list_decisions(evaluate_job(set_node_ready(observation, "node-1", ready=False), build_policy()))

    def test_without_a_witness_a_silent_worker_is_lost_late_and_no_node_is_blamed(self) -> None:
        observation = apply_probe_results(build_training(), "j-w1-0", silent=WORKER_SILENCE_LIMIT_SECONDS - 1)
        assert not list_decisions(evaluate_job(observation, build_policy()))
        result = evaluate_job(
            apply_probe_results(build_training(), "j-w1-0", silent=WORKER_SILENCE_LIMIT_SECONDS + 1), build_policy()
        )
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.WORKER_LOST, Remedy.REPLACE_WORKER)
        assert not list_suspicions(result.desired)
        worker = result.desired.state.placement.find_worker("j-w1-0")
        assert worker is None or not worker.force, "the kubelet ends it: it may live"

    def test_slow_steps_extend_the_silence_limit(self) -> None:
        observation = apply_probe_results(
            build_training(metrics=JobMetrics(step_seconds=100.0)), "j-w1-0", silent=250.0
        )
        assert not list_decisions(evaluate_job(observation, build_policy()))

    def test_a_new_operator_waits_before_it_calls_a_worker_lost(self) -> None:
        observation = set_node_ready(
            apply_probe_results(build_training(operator_age=5.0), "j-w1-0", silent=60.0), "node-1", ready=False
        )
        assert not list_decisions(evaluate_job(observation, build_policy()))
        assert list_decisions(evaluate_job(replace(observation, operator_age=60.0), build_policy()))

    def test_a_worker_that_may_not_be_replaced_is_only_recorded(self) -> None:
        observation = set_node_ready(apply_probe_results(build_training(), "j-w1-0"), "node-1", ready=False)
        result = evaluate_job(observation, build_policy(allow=frozenset({Remedy.RESTART_RANKS})))
        assert list_member_names(result.desired)[1] == "j-w1-0"
        assert "spec.remediation.allow" in result.desired.state.incidents.current[0].remedies[0].reason


class TestSingleWorker:
    """No other worker exists whose steps could show that it lives."""

    def build_silent_worker(self, **metrics: float) -> Observation:
        seen = JobMetrics(step_seconds=0.1, queried_at=NOW - 2, **metrics)  # type: ignore[arg-type]  # only numbers are given
        return apply_probe_results(
            build_training(1, 1, metrics=seen), "j-w0-0", silent=WORKER_SILENCE_LIMIT_SECONDS + 1
        )

    def test_a_worker_that_prometheus_shows_training_is_not_lost(self) -> None:
        assert not list_decisions(
            evaluate_job(self.build_silent_worker(reporting_ranks=1, min_step=900, scrape_age=5.0), build_policy())
        )

    @pytest.mark.parametrize(
        "metrics",
        [
            {},
            {"reporting_ranks": 1, "min_step": 500, "scrape_age": 5.0},  # the step that it reported itself
            {"reporting_ranks": 1, "min_step": 900, "scrape_age": 290.0},  # a scrape from before it fell silent
            {"reporting_ranks": 0, "min_step": 900, "scrape_age": 5.0},
        ],
    )
    def test_a_worker_without_fresh_metrics_is_lost(self, metrics: dict[str, float]) -> None:
        assert list_decisions(evaluate_job(self.build_silent_worker(**metrics), build_policy()))[0].worker == "j-w0-0"

    def test_silence_counts_from_the_last_scrape_of_prometheus(self) -> None:
        """The age of a scrape counts from the time of the query."""
        values = {"reporting_ranks": 1.0, "min_step": 900.0, "scrape_age": 5.0}
        sample = PrometheusSample(NOW - 2, {name: {("ns", "j"): value} for name, value in values.items()}, error="")
        observation = replace(self.build_silent_worker(), metrics=sample.get_metrics("ns", "j"))
        assert compute_silent_seconds(observation, observation.members[0]) == 7.0
        assert all(f'"pacekeeper_query", "{name}"' in build_query("") for name in values)

    def test_without_a_witness_a_single_worker_is_not_lost_soon(self) -> None:
        assert not list_decisions(evaluate_job(apply_probe_results(build_training(1, 1), "j-w0-0"), build_policy()))

    def test_the_node_condition_is_a_witness_for_a_single_worker(self) -> None:
        observation = set_node_ready(apply_probe_results(build_training(1, 1), "j-w0-0"), "node-0", ready=False)
        assert list_decisions(evaluate_job(observation, build_policy()))[0].cause is IncidentCause.NODE_LOST


class TestAllWorkers:
    LOST = ("j-w0-0", "j-w1-0")

    def test_reachable_spares_show_that_the_nodes_of_all_members_are_lost(self) -> None:
        observation = apply_probe_results(build_training(2, 2), *self.LOST, silent=10.5)
        assert needs_reachability_probe(observation)
        result = evaluate_job(observation, build_policy())
        assert list_member_names(result.desired) == ["j-w2-0", "j-w3-0"]
        (incident,) = list_decisions(result)
        assert incident.cause is IncidentCause.NODE_LOST, "one event is one incident, however many workers it has taken"
        assert "2 workers are lost (j-w0-0, j-w1-0)" in incident.message
        assert list_suspicions(result.desired) == [("node-0", Witness.NONE), ("node-1", Witness.NONE)]

    def test_reachable_workers_elsewhere_show_that_the_nodes_of_all_members_are_lost(self) -> None:
        observation = apply_probe_results(build_training(2, 0), *self.LOST)
        assert not list_decisions(evaluate_job(observation, build_policy())), "it may be the operator that is cut off"
        elsewhere = replace(observation, cluster_view=replace(observation.cluster_view, reached_elsewhere=True))
        assert list_suspicions(evaluate_job(elsewhere, build_policy()).desired) == [
            ("node-0", Witness.NONE),
            ("node-1", Witness.NONE),
        ]

    def test_an_operator_that_reaches_no_node_blames_no_worker(self) -> None:
        observation = build_training()
        names = [view.name for view in observation.workers]
        assert not list_decisions(
            evaluate_job(apply_probe_results(observation, *names, silent=100_000.0), build_policy())
        )

    def test_no_worker_is_lost_where_no_node_is_ready(self) -> None:
        observation = apply_probe_results(build_training(), *[view.name for view in build_training().workers])
        observation = set_node_ready(observation, "node-1", ready=False)
        assert [incident.worker for incident in list_decisions(evaluate_job(observation, build_policy()))] == ["j-w1-0"]
        for name in observation.cluster_view.nodes:
            observation = set_node_ready(observation, name, ready=False)
        assert not list_decisions(evaluate_job(observation, build_policy()))

    def test_a_worker_lost_without_its_node_is_a_separate_incident(self) -> None:
        observation = report_unreachable(
            apply_probe_results(build_training(6, 3), "j-w1-0", "j-w3-0"), "10.0.0.1", "10.0.0.3"
        )
        observation = change_worker(observation, "j-w3-0", node_reachable=True)
        result = evaluate_job(observation, build_policy())
        assert {(i.worker, i.cause) for i in list_decisions(result)} == {
            ("j-w1-0", IncidentCause.NODE_LOST),
            ("j-w3-0", IncidentCause.WORKER_LOST),
        }
        assert list_suspicions(result.desired) == [("node-1", Witness.NONE)]
        assert len(result.desired.state.incidents.settled_faults) == len(observation.faults)

    def test_hundreds_of_lost_workers_are_one_incident_within_the_schema(self) -> None:
        observation = build_training(200, 1)
        result = evaluate_job(
            apply_probe_results(observation, *[view.name for view in observation.members]), build_policy()
        )
        (incident,) = list_decisions(result)
        assert_within_the_schema(incident)
        assert "and 192 more" in incident.message

    def test_several_lost_workers_on_one_node_wait_for_a_witness(self) -> None:
        """One broken network path explains it."""
        observation = apply_probe_results(build_training(2, 1), *self.LOST)
        observation = change_worker(observation, "j-w1-0", pod={"node": "node-0"})
        assert not list_decisions(evaluate_job(observation, build_policy()))

    def test_a_job_that_lost_many_nodes_gets_replacements(self) -> None:
        observation = report_unreachable(
            apply_probe_results(build_training(6, 3), "j-w1-0", "j-w3-0", "j-w4-0"), "10.0.0.1", "10.0.0.3", "10.0.0.4"
        )
        result = evaluate_job(observation, build_policy())
        assert not {"j-w1-0", "j-w3-0", "j-w4-0"} & set(list_member_names(result.desired))
        assert len(list_suspicions(result.desired)) == 3, (
            "whether that is too many is decided where all jobs' are known"
        )


def silence_all_workers(observation: Observation) -> Observation:
    """Let every worker be silent for 20 s."""
    return replace(observation, workers=tuple(replace(view, silent_seconds=20.0) for view in observation.workers))


class TestReachabilityProbes:
    @pytest.fixture
    def probed_addresses(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Addresses of the nodes that were probed; only 192.0.2.9 answers."""
        nodes: list[str] = []

        async def can_reach_node(address: str) -> bool:
            nodes.append(address)
            return address == "192.0.2.9"

        async def can_reach_worker(_address: str, _port: int) -> bool:
            return False

        monkeypatch.setattr(reachability, "can_reach_node", can_reach_node)
        monkeypatch.setattr(reachability, "can_reach_worker", can_reach_worker)
        return nodes

    async def test_other_nodes_are_probed_where_no_node_of_the_job_answers(self, probed_addresses: list[str]) -> None:
        seen = await gather.probe_suspected_workers(silence_all_workers(build_training(2, 1)))
        assert {view.reachable for view in seen.workers} == {False}
        assert seen.cluster_view.reached_elsewhere
        assert set(probed_addresses) == {f"192.0.2.{n}" for n in range(10)}

    async def test_a_reporting_worker_is_probed_only_where_a_peer_cannot_reach_it(
        self, probed_addresses: list[str]
    ) -> None:
        observation = report_unreachable(build_training(4, 1), "10.0.0.2")
        seen = await gather.probe_suspected_workers(observation)
        assert probed_addresses == ["192.0.2.2"]
        assert [view.name for view in seen.workers if view.reachable is not None] == ["j-w2-0"]
        assert not seen.cluster_view.reached_elsewhere, (
            "the reports of the others show that the operator is not cut off"
        )

    async def test_no_other_nodes_are_probed_where_one_of_the_job_answers(self, probed_addresses: list[str]) -> None:
        observation = silence_all_workers(change_worker(build_training(2, 1), "j-w2-0", pod={"node": "node-9"}))
        seen = await gather.probe_suspected_workers(observation)
        assert not seen.cluster_view.reached_elsewhere
        assert set(probed_addresses) == {"192.0.2.0", "192.0.2.1", "192.0.2.9"}

    async def test_of_many_nodes_a_spread_sample_is_probed(self, probed_addresses: list[str]) -> None:
        observation = silence_all_workers(build_training(1, 0))
        some = observation.cluster_view.nodes["node-1"]
        nodes = {f"n{n:04}": replace(some, name=f"n{n:04}", address=f"10.1.{n // 250}.{n % 250}") for n in range(1000)}
        await gather.probe_suspected_workers(replace(observation, cluster_view=ClusterView(nodes=nodes)))
        assert len(probed_addresses) == gather.MAX_PROBED_OTHER_NODES
        assert len({address.split(".")[2] for address in probed_addresses}) == 4

    def test_a_fresh_heartbeat_of_another_job_shows_that_the_operator_is_connected(self) -> None:
        memory, observation = JobRegistry(0.0), build_training()
        other = memory.get_or_create(replace(build_job(), namespace="another", name="other", uid="o"))
        other.update(desired=observation.desired)
        memory.mark_reporting(other, NOW - 1)
        assert gather.collect_cluster_view(
            memory, observation.job, observation.desired, NodeSnapshot(), NOW
        ).reached_elsewhere
        assert not gather.collect_cluster_view(
            memory, observation.job, observation.desired, NodeSnapshot(), NOW + 5
        ).reached_elsewhere

    def test_a_heartbeat_of_the_job_itself_does_not_show_that_the_operator_is_connected(self) -> None:
        memory, observation = JobRegistry(0.0), build_training()
        memory.get_or_create(observation.job).update(desired=observation.desired)
        memory.mark_reporting(memory.get_or_create(observation.job), NOW - 1)
        assert not gather.collect_cluster_view(
            memory, observation.job, observation.desired, NodeSnapshot(), NOW
        ).reached_elsewhere


async def test_the_time_of_a_step_is_when_its_heartbeat_arrived() -> None:
    memory, observation = JobRegistry(0.0), build_training(1, 0)
    cached = memory.get_or_create(observation.job)
    cached.update(desired=observation.desired)
    clock = FixedTimeRuntime()
    sidecars = SidecarService(FakeCluster(), memory, clock)
    caller = Caller("ns", "j", "j-w0-0")
    await sidecars.poll(caller, Heartbeat(worker="j-w0-0", progress=StepProgress(step=7)), after=-1, wait=0.0)
    assert cached.contacts["j-w0-0"].stepped_at is None, "when it was completed is not known"
    for clock.passed in (3.0, 6.0):
        await sidecars.poll(caller, Heartbeat(worker="j-w0-0", progress=StepProgress(step=8)), after=-1, wait=0.0)
    (view,) = gather.build_observation(0.0, cached, (), ClusterView(), NOW + 10).workers
    assert view.seconds_since_step == 7.0


class TestHangs:
    def build_job_near_hang(self, namespace: str, seconds_ago: float) -> Observation:
        """Return a job whose rank 2 hangs on node-2, where a job of `namespace` hung `seconds_ago`."""
        memory, observation = JobRegistry(0.0), build_training()
        other = memory.get_or_create(replace(build_job(), namespace=namespace, name="secret-project", uid="o"))
        past = PastIncident(
            IncidentCause.HANG, NOW - seconds_ago, 5.0, rank=7, worker="secret-project-w7-0", node="node-2"
        )
        other.update(desired=build_training().desired.with_incidents(past=(past,)))
        nodes = NodeSnapshot(observation.cluster_view.nodes)
        cluster_view = gather.collect_cluster_view(memory, observation.job, observation.desired, nodes, NOW)
        return replace(observation, cluster_view=cluster_view, faults=build_stalls(observation, culprit=2))

    def test_a_node_where_another_job_of_the_namespace_hung_is_blamed(self) -> None:
        result = evaluate_job(self.build_job_near_hang("ns", 60), build_policy())
        (incident,) = list_decisions(result)
        assert (incident.class_, incident.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        assert list_suspicions(result.desired) == [("node-2", Witness.NONE)]

    @pytest.mark.parametrize("namespace", ["ns", "another"])
    def test_a_hang_of_another_job_weeks_ago_is_ignored(self, namespace: str) -> None:
        result = evaluate_job(self.build_job_near_hang(namespace, 14 * 86_400), build_policy())
        (incident,) = list_decisions(result)
        assert (incident.class_, incident.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)
        assert not list_suspicions(result.desired)

    def test_a_hang_of_the_same_job_weeks_ago_is_ignored(self) -> None:
        observation = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 14 * 86_400, 5.0, rank=3, worker="j-w8-0", node="node-2")
        observation = observation.with_desired(observation.desired.with_incidents(past=(past,)))
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        assert list_decisions(result)[0].remedy is Remedy.RESTART_RANKS
        assert not list_suspicions(result.desired)

    def test_a_hang_of_another_tenant_only_raises_a_suspicion(self) -> None:
        result = evaluate_job(self.build_job_near_hang("another", 60), build_policy())
        (incident,) = list_decisions(result)
        assert (incident.class_, incident.remedy) == (IncidentClass.UNKNOWN, Remedy.RESTART_RANKS)
        assert list_suspicions(result.desired) == [("node-2", Witness.NONE)]
        (wanted,) = result.desired.state.incidents.quarantine_requests
        for text in (incident.message, *incident.evidence, wanted.reason):
            assert "secret-project" not in text
            assert "another" not in text


def build_large_hang(ranks: int, per_worker: int) -> tuple[Observation, tuple[FaultReport, ...]]:
    """Return a job of this many ranks, all of which stall outside of any collective."""
    observation = build_training(ranks // per_worker, 0)
    members = tuple(
        replace(member, ranks=tuple(range(n * per_worker, (n + 1) * per_worker)))
        for n, member in enumerate(observation.plan.members)
    )
    observation = observation.with_desired(observation.desired.with_plan(members=members))
    faults = []
    for member in members:
        one = build_stall(member.worker, member.ranks[0], culprit=True)
        states = tuple(replace(one.ranks[0], rank=rank, stack="x" * 500) for rank in member.ranks)
        faults.append(replace(one, ranks=states))
    return observation, tuple(faults)


@pytest.mark.parametrize(("ranks", "per_worker"), [(600, 1), (80_000, 8)])
def test_the_message_of_a_hang_of_many_ranks_is_short(ranks: int, per_worker: int) -> None:
    observation, faults = build_large_hang(ranks, per_worker)
    result = evaluate_job(replace(observation, faults=faults), build_policy())
    (incident,) = list_decisions(result)
    assert "rank 0, 1, 2, 3, 4, 5, 6, 7 and" in incident.message
    assert f"and {ranks - 8} more" in incident.message
    assert_within_the_schema(incident)
    assert result.desired.plan.membership == 2


def assert_within_the_schema(incident: Incident) -> None:
    assert len(incident.message) <= 4096
    assert len(incident.evidence) <= 64
    assert max(map(len, incident.evidence)) <= 8192
