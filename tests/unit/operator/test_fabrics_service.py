"""Reconciliation of Fabrics: their status, the jobs that are woken, and what happens when parts fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.fabric.view import FabricLink
from pacekeeper_analysis.protocol.plan import Hop, Paths, PlannedPath, Stop
from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow
from pacekeeper_analysis.protocol.requests import EvidenceRequest
from pacekeeper_operator import metrics
from pacekeeper_operator.api.conditions import FabricReason
from pacekeeper_operator.api.fabric import FabricStatus, PathControl
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import (
    JobPhase,
    JobSpec,
    RemediationMode,
    RemediationSpec,
    Remedy,
    TrainingJob,
)
from pacekeeper_operator.decide.network.fabric_status import MAX_REPORTED_LINKS
from pacekeeper_operator.decide.network.link_state import ROUTE_REPORT_TTL_SECONDS
from pacekeeper_operator.kube.client import FABRICS, Listing, NotFound, Object, ResourceKind
from pacekeeper_operator.observe import traffic
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry
from pacekeeper_operator.observe.prometheus import LinkRatesResult, PrometheusClient
from pacekeeper_operator.observe.traffic import REROUTE_HISTORY_SECONDS, REROUTE_HOLD_SECONDS
from pacekeeper_operator.services.fabrics import (
    FABRIC_POLL_SECONDS,
    SLOW_PLANNING_SECONDS,
    FabricReconciler,
    run_fabric_loop,
    update_traffic,
)
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    FailedRoute,
    PastIncident,
    RouteObservation,
    RouteTrial,
)
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.network import NO_FABRIC, JobTraffic, NodeRanks
from pacekeeper_operator.state.restart_estimates import RestartKind, RestartMeasurements
from pacekeeper_operator.state.routes import TRIED_ROUTE_TTL_SECONDS
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.observations import NOW, build_job, build_training
from testing.operators.virtual_time import Result, Timeline, VirtualRuntime

SPEC: Object = {
    "spines": 2,
    "levels": [{"nodeLabel": "leaf"}],
    "hops": {"10.0.0.1": "s1", "10.0.0.2": "s2"},
    "pathControl": {"mode": "Probe"},
}


class Cluster(FakeCluster):
    """It has nodes node-0 … of leaves a, b, a, b, …, and counts what is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.applied = 0
        self.without_fabrics = False
        for n in range(5):
            labels = {"leaf": "ab"[n % 2], "kubernetes.io/os": "linux"}
            self._store(
                ("nodes", "", f"node-{n}"), {"metadata": {"name": f"node-{n}", "uid": f"u{n}", "labels": labels}}
            )

    async def list_with_version(self, kind: ResourceKind, namespace: str = "", **named: Any) -> Listing:
        if kind == FABRICS and self.without_fabrics:
            raise NotFound("the server could not find the requested resource")
        return await super().list_with_version(kind, namespace, **named)

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        self.applied += 1
        assert (kind, manager, subresource) == (FABRICS, "pacekeeper-fabric", "status")
        return await super().apply(kind, body, manager=manager, subresource=subresource)

    def fabric(self, name: str = "f", created: str = "2026-01-01T00:00:00Z", **spec: Any) -> Object:
        body = {
            "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created, "generation": 3},
            "spec": SPEC | spec,
        }
        return self._store(("fabrics", "", name), body)


class FakeLinkRates(PrometheusClient):
    """It returns `answer`."""

    def __init__(self) -> None:
        super().__init__("", "", "")
        self.answer = LinkRatesResult({})

    async def read_link_rates(self, query: str) -> LinkRatesResult:
        assert query == "link_bits"
        return self.answer


class Runtime(VirtualRuntime):
    """It computes without threads, since virtual time cannot wait for them."""

    seconds = 0.0
    """Duration of each computation."""

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        if self.seconds:
            await self.sleep(self.seconds)
        return work()


class Harness:
    def __init__(self) -> None:
        self.cluster, self.prometheus, self.timeline = Cluster(), FakeLinkRates(), Timeline()
        self.runtime = Runtime(self.timeline)
        self.memory = JobRegistry(self.runtime.now())
        settings = Settings(namespace="system")
        self.operator = Operator(settings, self.cluster, self.memory, INSTALLATION, self.prometheus, self.runtime)
        self.keeper = FabricReconciler(self.operator)

    async def resync(self) -> None:
        """Run the operator's resync."""
        task = self.runtime.start_task(self.operator.stores.resync(), "resync")
        await self.timeline.run(0.1)
        task.cancel()

    async def reconcile(self) -> Mapping[str, Any]:
        """Reconcile, and return the Fabric's status once watches have reported it."""
        await self.resync()
        await self.keeper.reconcile()
        await self.resync()
        return (await self.cluster.get(FABRICS, "f")).get("status", {})  # type: ignore[no-any-return]

    def job(self, name: str = "j", desired: DesiredState | None = None, **changes: Any) -> JobCache:
        """Build a job that trains on node-0 … node-3."""
        observation = build_training(4, 0)
        memory = self.memory.get_or_create(replace(observation.job, name=name, uid=f"uid-{name}"))
        memory.update(desired=desired or observation.desired, phase=changes.pop("phase", JobPhase.RUNNING))
        for field, value in changes.items():
            setattr(memory, field, value)
        return memory


@pytest.fixture
def harness() -> Harness:
    return Harness()


def index_reasons(status: Mapping[str, Any]) -> dict[str, str]:
    return {condition["type"]: condition["reason"] for condition in status["conditions"]}


class TestReconcile:
    async def test_the_status_shows_the_plan_for_all_jobs(self, harness: Harness) -> None:
        harness.cluster.fabric()
        harness.job("j")
        harness.job("k")
        status = await harness.reconcile()
        figures = {name: status[name] for name in ("leaves", "flows", "maxLoad", "lowerBound", "deadLinks")}
        assert figures == {"leaves": 2, "flows": 8, "maxLoad": 2, "lowerBound": 2, "deadLinks": 0}
        assert index_reasons(status) == {
            "InForce": "Oldest",
            "LeavesResolved": "Labeled",
            "LinksResolved": "LinksConsistent",
            "Planned": "AtLowerBound",
        }
        assert status["observedGeneration"] == 3
        assert harness.operator.network is not None
        assert set(harness.operator.network.jobs) == {("ns", "j"), ("ns", "k")}

    async def test_an_unchanged_status_is_not_written_again(self, harness: Harness) -> None:
        harness.cluster.fabric()
        harness.job()
        await harness.reconcile()
        await harness.reconcile()
        await harness.reconcile()
        assert harness.cluster.applied == 1

    async def test_jobs_whose_plans_name_other_routes_are_woken(self, harness: Harness) -> None:
        harness.cluster.fabric()
        woken, planned = harness.job("j"), harness.job("k")
        await harness.reconcile()
        assert woken.wake.is_set()
        assert harness.operator.network is not None
        assert harness.operator.network.traffic is not None
        for memory, name in ((woken, "j"), (planned, "k")):
            routes = harness.operator.network.traffic.routes["ns", name]
            paths = Paths(
                tuple(PlannedPath(*pair, f"s{route + 1}") for pair, route in routes.items()),
                (Hop("10.0.0.1", "s1"), Hop("10.0.0.2", "s2")),
            )
            assert memory.desired is not None
            memory.update(desired=memory.desired.with_plan(paths=paths))
            memory.wake.clear()
        await harness.reconcile()
        assert not woken.wake.is_set()
        assert not planned.wake.is_set()

    async def test_without_path_control_no_job_is_woken(self, harness: Harness) -> None:
        harness.cluster.fabric(pathControl={"mode": "Off"})
        memory = harness.job()
        await harness.resync()
        memory.wake.clear()
        await harness.reconcile()
        memory.wake.clear()
        await harness.keeper.reconcile()
        assert not memory.wake.is_set()

    async def test_deleting_the_fabric_ends_path_control(self, harness: Harness) -> None:
        harness.cluster.fabric()
        await harness.reconcile()
        harness.cluster.objects.pop(("fabrics", "", "f"))
        await harness.resync()
        await harness.keeper.reconcile()
        assert harness.operator.network is NO_FABRIC
        assert harness.operator.stores.levels == ()

    async def test_a_fabric_created_while_jobs_run_reads_the_nodes_labels(self, harness: Harness) -> None:
        """Labels that no Fabric names are not stored."""
        await harness.resync()
        node = harness.operator.stores.nodes.get(("", "node-0"))
        assert node is not None
        assert node.labels == {}
        body = harness.cluster.fabric()
        harness.operator.stores.fabrics.apply_event(body, deleted=False)
        await harness.keeper.reconcile()
        node = harness.operator.stores.nodes.get(("", "node-0"))
        assert node is not None
        assert node.labels == {"leaf": "a"}
        assert (await harness.cluster.get(FABRICS, "f"))["status"]["leaves"] == 2

    async def test_only_the_oldest_fabric_is_used(self, harness: Harness) -> None:
        harness.cluster.fabric()
        harness.cluster.fabric("second", "2026-02-01T00:00:00Z", spines=9)
        await harness.reconcile()
        second = await harness.cluster.get(FABRICS, "second")
        assert index_reasons(second["status"]) == {"InForce": "AnotherIsOlder"}
        assert harness.operator.network is not None
        assert harness.operator.network.spec.spines == 2

    async def test_an_invalid_fabric_is_ignored(self, harness: Harness) -> None:
        harness.cluster.fabric(spines="many")
        status = await harness.reconcile()
        assert index_reasons(status) == {"InForce": "Unreadable"}
        assert harness.operator.network is NO_FABRIC

    async def test_a_job_on_a_node_without_labels_is_named(self, harness: Harness) -> None:
        harness.cluster.fabric()
        harness.cluster.objects["nodes", "", "node-3"]["metadata"]["labels"] = {}
        harness.job()
        status = await harness.reconcile()
        assert index_reasons(status)["LeavesResolved"] == "NodesUnlabeled"
        (known,) = [one for one in status["conditions"] if one["type"] == "LeavesResolved"]
        assert "node-3" in known["message"]


class TestSlowPlanning:
    @staticmethod
    async def read_planned_condition(harness: Harness) -> tuple[str, str]:
        """Return status and reason of the condition; empty where there is none yet."""
        await harness.resync()
        status = (await harness.cluster.get(FABRICS, "f")).get("status", {"conditions": []})
        found = [one for one in status["conditions"] if one["type"] == "Planned"]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    async def test_slow_planning_is_reported_while_it_lasts(
        self, harness: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        harness.cluster.fabric()
        harness.job()
        harness.runtime.seconds = 3.0
        await harness.resync()
        task = harness.runtime.start_task(run_fabric_loop(harness.operator), "fabrics")
        await harness.timeline.run(SLOW_PLANNING_SECONDS - 0.3)
        assert await self.read_planned_condition(harness) == ("", "")
        await harness.timeline.run(0.5)
        assert await self.read_planned_condition(harness) == ("Unknown", "Planning")
        await harness.timeline.run(2.5)
        assert await self.read_planned_condition(harness) == ("True", "AtLowerBound")
        assert "the flows of 1 jobs are being planned" in caplog.text
        assert "planned in 3.0 s" in caplog.text
        task.cancel()

    async def test_the_condition_returns_after_slow_planning(self, harness: Harness) -> None:
        harness.cluster.fabric()
        harness.job()
        await harness.reconcile()
        harness.runtime.seconds = 3.0
        task = harness.runtime.start_task(run_fabric_loop(harness.operator), "fabrics")
        await harness.timeline.run(SLOW_PLANNING_SECONDS + 0.1)
        assert await self.read_planned_condition(harness) == ("Unknown", "Planning")
        await harness.timeline.run(3.0 + FABRIC_POLL_SECONDS)
        assert await self.read_planned_condition(harness) == ("True", "AtLowerBound")
        task.cancel()

    async def test_a_status_that_cannot_be_written_does_not_delay_the_plan(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.cluster.fabric()
        harness.runtime.seconds = 3.0
        await harness.resync()
        apply = harness.cluster.apply

        async def away(*_: Any, **__: Any) -> Object:
            monkeypatch.setattr(harness.cluster, "apply", apply)
            raise kopf.TemporaryError("away")

        monkeypatch.setattr(harness.cluster, "apply", away)
        task = harness.runtime.start_task(harness.keeper.reconcile(), "look")
        await harness.timeline.run(SLOW_PLANNING_SECONDS + 0.1)
        assert not task.done()
        await harness.timeline.run(3.0)
        assert task.done()
        assert await self.read_planned_condition(harness) == ("True", "NoFlows")

    async def test_planning_that_fails_leaves_nothing_behind(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.cluster.fabric()
        await harness.resync()

        async def failing(_: Callable[[], Result]) -> Result:
            raise RuntimeError("a bug")

        monkeypatch.setattr(harness.runtime, "compute_in_thread", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            await harness.keeper.reconcile()
        await harness.timeline.run(SLOW_PLANNING_SECONDS + 1)
        assert await self.read_planned_condition(harness) == ("", "")


class TestLinks:
    async def test_link_rates_of_the_query_are_used(self, harness: Harness) -> None:
        harness.cluster.fabric(linkQuery="link_bits")
        harness.job()
        harness.prometheus.answer = LinkRatesResult({("a", "s1"): 0.0})
        status = await harness.reconcile()
        assert (status["deadLinks"], status["maxLoad"]) == (1, 2)

    async def test_without_an_answer_links_stay_as_they_were(self, harness: Harness) -> None:
        harness.cluster.fabric(linkQuery="link_bits")
        harness.prometheus.answer = LinkRatesResult({("a", "s1"): 0.0})
        await harness.reconcile()
        harness.prometheus.answer = LinkRatesResult({}, "Prometheus does not answer")
        status = await harness.reconcile()
        assert (status["deadLinks"], index_reasons(status)["LinksResolved"]) == (1, FabricReason.QUERY_FAILED)
        harness.prometheus.answer = LinkRatesResult({})
        assert (await harness.reconcile())["deadLinks"] == 0

    async def test_exceptions_override_the_query(self, harness: Harness) -> None:
        harness.cluster.fabric(linkQuery="link_bits", exceptions=[{"leaf": "b", "spine": "s2"}])
        harness.prometheus.answer = LinkRatesResult({("b", "s2"): 4e11})
        assert (await harness.reconcile())["deadLinks"] == 1


class TestRouteObservations:
    """Jobs report what their own flows show of links."""

    def build_observation(
        self, spine: str = "s1", source: str = "a", destination: str = "b", ratio: float = 4.0
    ) -> RouteObservation:
        return RouteObservation(NOW, source, spine, destination, "node-0", "node-1", ratio)

    def report_observations(
        self, harness: Harness, name: str, *observations: RouteObservation, namespace: str = "ns"
    ) -> JobCache:
        observation = build_training(4, 0)
        memory = harness.memory.get_or_create(
            replace(observation.job, namespace=namespace, name=name, uid=f"uid-{namespace}-{name}")
        )
        now = tuple(replace(each, at=harness.runtime.now()) for each in observations)
        memory.update(desired=observation.desired.with_adaptation(route_observations=now), phase=JobPhase.RUNNING)
        return memory

    def list_degraded_links(self, status: Mapping[str, Any]) -> dict[str, str]:
        return {f"{link['leaf']}{link['spine']}": link["state"] for link in status["links"] if link["state"] != "Up"}

    async def test_observations_of_the_only_namespace_count_for_all_jobs(self, harness: Harness) -> None:
        harness.cluster.fabric()
        self.report_observations(harness, "j", self.build_observation())
        status = await harness.reconcile()
        assert self.list_degraded_links(status) == {"as1": "Slow", "bs1": "Slow"}
        (known,) = [one for one in status["conditions"] if one["type"] == "LinksResolved"]
        assert known["status"] == "True"
        assert known["message"].endswith("carry less than they should: a–s1 (25%), b–s1 (25%)")

    async def test_observations_of_one_of_two_namespaces_count_only_there_and_stay_out_of_the_status(
        self, harness: Harness
    ) -> None:
        harness.cluster.fabric()
        self.report_observations(harness, "j", self.build_observation(ratio=0.0))
        self.report_observations(harness, "k", namespace="other")
        status = await harness.reconcile()
        assert (self.list_degraded_links(status), status["deadLinks"]) == ({}, 0)
        assert harness.operator.network is not None
        assert set(harness.operator.network.wiring.namespace_topologies) == {"ns"}

    async def test_observations_of_both_namespaces_count_for_all_jobs(self, harness: Harness) -> None:
        harness.cluster.fabric()
        self.report_observations(harness, "j", self.build_observation(ratio=0.0))
        self.report_observations(harness, "k", self.build_observation(ratio=0.0), namespace="other")
        status = await harness.reconcile()
        assert (self.list_degraded_links(status), status["deadLinks"]) == ({"bs1": "Down"}, 1)

    async def test_exceptions_override_observations(self, harness: Harness) -> None:
        harness.cluster.fabric(exceptions=[{"leaf": "a", "spine": "s1", "state": "Slow", "capacity": "300G"}])
        self.report_observations(
            harness, "j", self.build_observation(), replace(self.build_observation(), destination="c")
        )
        assert harness.operator.network is None
        await harness.reconcile()
        assert harness.operator.network is not None
        wiring = harness.operator.network.wiring
        assert wiring.topology is not None
        assert wiring.topology.up[wiring.leaves.index("a"), 0] == 300_000

    async def test_observations_expire(self, harness: Harness) -> None:
        harness.cluster.fabric()
        self.report_observations(harness, "j", self.build_observation())
        await harness.reconcile()
        await harness.timeline.run(ROUTE_REPORT_TTL_SECONDS)
        assert self.list_degraded_links(await harness.reconcile()) == {}

    async def test_the_next_operator_reads_observations_from_the_state(self, harness: Harness) -> None:
        harness.cluster.fabric()
        self.report_observations(harness, "j", self.build_observation())
        await harness.reconcile()
        again = Harness()
        again.cluster = harness.cluster
        again.operator.cluster = harness.cluster
        self.report_observations(again, "j", self.build_observation())
        assert self.list_degraded_links(await again.reconcile()) == {"as1": "Slow", "bs1": "Slow"}

    async def test_an_observation_of_a_pass_counts_only_from_the_next_joint_plan(self, harness: Harness) -> None:
        """The job waits for the next joint planning."""
        harness.cluster.fabric()
        memory = self.report_observations(harness, "j")
        await harness.reconcile()
        memory.update(desired=self.report_observations(harness, "j", self.build_observation()).desired)
        assert memory.job is not None
        update_traffic(harness.operator, memory.job)
        assert harness.operator.network is not None
        assert harness.operator.network.jobs["ns", "j"].route_observations == ()
        await harness.keeper.reconcile()
        assert len(harness.operator.network.jobs["ns", "j"].route_observations) == 1


class TestPlanningOff:
    async def test_with_planning_off_ranks_are_only_ordered(self, harness: Harness) -> None:
        harness.operator.settings = replace(harness.operator.settings, traffic_planning=False)
        harness.cluster.fabric()
        memory = harness.job()
        await harness.resync()
        memory.wake.clear()
        await harness.keeper.reconcile()
        assert not memory.wake.is_set()
        assert harness.operator.network is not None
        assert harness.operator.network.spec.path_control.mode is PathControl.OFF
        status = await harness.reconcile()
        assert index_reasons(status)["Planned"] == "PathControlOff"
        (planned,) = [one for one in status["conditions"] if one["type"] == "Planned"]
        assert "policy.traffic.planning" in planned["message"]


class TestLoop:
    async def test_the_loop_polls_periodically_and_at_once_when_a_fabric_changes(self, harness: Harness) -> None:
        await harness.resync()
        task = harness.runtime.start_task(run_fabric_loop(harness.operator), "fabrics")
        await harness.timeline.run(1)
        assert harness.operator.network is NO_FABRIC
        harness.operator.stores.fabrics.apply_event(harness.cluster.fabric(), deleted=False)
        await harness.timeline.run(0.1)
        assert (await harness.cluster.get(FABRICS, "f"))["status"]["flows"] == 0
        harness.job()
        await harness.timeline.run(FABRIC_POLL_SECONDS + 0.1)
        assert (await harness.cluster.get(FABRICS, "f"))["status"]["flows"] == 4
        task.cancel()

    async def test_a_failed_write_is_retried(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        await harness.resync()
        harness.operator.stores.fabrics.apply_event(harness.cluster.fabric(), deleted=False)
        troubles: list[Exception] = [kopf.TemporaryError("away"), RuntimeError("a bug")]
        apply = harness.cluster.apply

        async def failing(*args: Any, **named: Any) -> Object:
            if troubles:
                raise troubles.pop(0)
            return await apply(*args, **named)

        monkeypatch.setattr(harness.cluster, "apply", failing)
        task = harness.runtime.start_task(run_fabric_loop(harness.operator), "fabrics")
        await harness.timeline.run(30)
        assert not task.done()
        assert (await harness.cluster.get(FABRICS, "f"))["status"]["flows"] == 0
        task.cancel()

    async def test_a_fabric_deleted_during_planning_is_no_error(self, harness: Harness) -> None:
        harness.cluster.fabric()
        await harness.resync()
        del harness.cluster.objects["fabrics", "", "f"]
        assert await harness.keeper.reconcile() == FABRIC_POLL_SECONDS

    async def test_the_operator_runs_without_the_fabric_definition(self, harness: Harness) -> None:
        harness.cluster.without_fabrics = True
        await harness.resync()
        assert harness.operator.stores.nodes.listed.is_set()
        assert harness.operator.stores.fabric is None

    async def test_the_operator_runs_without_the_right_to_list_fabrics(self, harness: Harness) -> None:
        harness.cluster.failures["fabrics"] = [kopf.TemporaryError("denied")]
        await harness.resync()
        assert harness.operator.stores.nodes.listed.is_set()


def build_traffic(memory: JobCache, now: float = NOW) -> JobTraffic | None:
    return traffic.build_job_traffic(("ns", "j"), memory, now)


class TestTraffic:
    """Planning receives this of a job."""

    def test_traffic_contains_node_ranks_and_prices(self, harness: Harness) -> None:
        found = build_traffic(harness.job(metrics=JobMetrics(wait_share=0.337)))
        assert found is not None
        assert found.node_ranks == tuple(NodeRanks(f"node-{n}", (n,)) for n in range(4))
        assert (found.wait_share, found.round_seconds, found.uses_nccl, found.ports) == (0.3, 5.0, False, None)

    def test_a_job_that_does_not_train_yet_pays_nothing_for_a_round(self, harness: Harness) -> None:
        found = build_traffic(harness.job(phase=JobPhase.STARTING, metrics=JobMetrics(wait_share=0.5)))
        assert found is not None
        assert (found.wait_share, found.round_seconds) == (0.0, None)

    @pytest.mark.parametrize("kind", RestartKind)
    def test_the_last_rounds_duration_is_the_price_of_a_round(self, harness: Harness, kind: RestartKind) -> None:
        measurements = RestartMeasurements().add_restart(kind, 1.5)
        desired = build_training(4, 0).desired.with_budget(measurements=measurements)
        found = build_traffic(harness.job(desired=desired))
        assert found is not None
        assert found.round_seconds == 1.5

    def test_a_replanned_job_is_left_alone_for_longer_each_time(self, harness: Harness) -> None:
        def replanned(*ages: float) -> float:
            past = tuple(PastIncident(IncidentCause.SLOW_COMMUNICATION, NOW - age, 1.0) for age in ages)
            found = build_traffic(harness.job(desired=build_training(4, 0).desired.with_incidents(past=past)))
            assert found is not None
            assert found.round_seconds is not None
            return found.round_seconds

        assert replanned(REROUTE_HOLD_SECONDS - 1) == math.inf
        assert replanned(REROUTE_HOLD_SECONDS + 1) == 5.0
        assert replanned(REROUTE_HOLD_SECONDS + 1, 2000) == math.inf
        assert replanned(2 * REROUTE_HOLD_SECONDS + 1, 2000) == 5.0
        assert replanned(REROUTE_HOLD_SECONDS + 1, REROUTE_HISTORY_SECONDS + 1) == 5.0

    def test_a_job_with_a_route_trial_is_not_replanned(self, harness: Harness) -> None:
        desired = build_training(4, 0).desired.with_adaptation(route_trial=RouteTrial("i", 2, 0.1))
        found = build_traffic(harness.job(desired=desired))
        assert found is not None
        assert found.round_seconds == math.inf

    @pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STARTING])
    @pytest.mark.parametrize(("age", "keeps"), [(TRIED_ROUTE_TTL_SECONDS - 1, True), (TRIED_ROUTE_TTL_SECONDS, False)])
    def test_a_job_that_tried_routes_without_result_keeps_its_routes_for_a_while(
        self, phase: JobPhase, age: float, keeps: bool
    ) -> None:
        desired = build_training(4, 0).desired.with_adaptation(failed_routes=(FailedRoute(NOW - age, 1, 0),))
        found = build_traffic(Harness().job(desired=desired, phase=phase))
        assert found is not None
        assert found.keeps_routes is keeps

    @pytest.mark.parametrize(
        ("platform", "mode", "acts"), [(True, RemediationMode.ACT, True), (False, RemediationMode.ACT, False)]
    )
    def test_a_job_can_move_only_if_platform_and_job_allow_it(
        self, platform: bool, mode: RemediationMode, acts: bool
    ) -> None:
        memory = Harness().job()
        for job_mode, expected in ((mode, acts), (RemediationMode.RECOMMEND, False)):
            memory.update(job=build_job(4, 0, remediation=RemediationSpec(mode=job_mode)))
            found = traffic.build_job_traffic(("ns", "j"), memory, NOW, acts=platform)
            assert found is not None
            assert found.can_move is expected

    def test_a_job_that_may_not_be_replanned_is_not_moved(self, harness: Harness) -> None:
        memory = harness.job()
        memory.update(job=build_job(4, 0, remediation=RemediationSpec(allow=(Remedy.RESTART_RANKS,))))
        found = build_traffic(memory)
        assert found is not None
        assert found.round_seconds == math.inf

    def test_a_job_without_members_or_at_its_end_has_no_traffic(self, harness: Harness) -> None:
        desired = build_training(4, 0).desired
        assert build_traffic(harness.job(desired=desired.with_plan(members=()))) is None
        assert build_traffic(harness.job(desired=desired.with_plan(stop=Stop.SUSPEND))) is None
        assert build_traffic(harness.job(desired=desired.with_lifecycle(completed_at=1.0))) is None
        assert build_traffic(JobCache()) is None
        assert traffic.collect_traffic(JobRegistry(0.0), NOW) == {}

    @pytest.mark.parametrize(("limit", "by_nccl"), [("8", True), (8, True), ("0", False), (None, False)])
    def test_jobs_with_gpus_use_nccl(self, limit: object, by_nccl: bool) -> None:
        limits = {} if limit is None else {"nvidia.com/gpu": limit}
        template = {"spec": {"containers": [{"name": "x"}, {"name": "trainer", "resources": {"limits": limits}}]}}
        memory = Harness().job()
        memory.update(job=replace(build_job(), spec=JobSpec(template=template)))
        found = build_traffic(memory)
        assert found is not None
        assert found.uses_nccl is by_nccl

    @pytest.mark.parametrize("template", [{}, {"spec": None}, {"spec": {"containers": [{"name": "trainer"}]}}])
    def test_a_template_without_gpus_does_not_use_nccl(self, template: Any) -> None:
        memory = Harness().job()
        assert isinstance(memory.job, TrainingJob)
        memory.update(job=replace(memory.job, spec=JobSpec(template=template)))
        found = build_traffic(memory)
        assert found is not None
        assert not found.uses_nccl

    def test_measured_bytes_between_nodes_are_summed(self, harness: Harness) -> None:
        desired = build_training(4, 0).desired
        memory = harness.job(desired=desired.with_requests(evidence=EvidenceRequest("q")))

        def end(worker: int, local: str, remote: str, acked: int) -> Evidence:
            window = LinkWindow(local, remote, rank=worker, acked_bytes=acked, busy_seconds=1.0, seconds=5.0)
            return Evidence("q", f"j-w{worker}-0", 1, links=(window,))

        memory.evidence = {"j-w0-0": end(0, "a:1", "b:2", 1000), "j-w1-0": end(1, "b:2", "a:1", 70)}
        found = build_traffic(memory)
        assert found is not None
        answers = traffic.collect_link_answers(harness.memory)
        assert traffic.add_sent_bytes(found, answers["ns", "j"]).bytes_sent == {(0, 1): 1000, (1, 0): 70}
        together = replace(found, node_ranks=(NodeRanks("node-0", (0, 1, 2, 3)),))
        assert traffic.add_sent_bytes(together, answers["ns", "j"]).bytes_sent == {}, (
            "traffic within a node does not count"
        )
        memory.evidence = {name: replace(one, request="older") for name, one in memory.evidence.items()}
        assert traffic.collect_link_answers(harness.memory) == {}

    async def test_measured_bytes_count_in_the_plan(self, harness: Harness) -> None:
        harness.cluster.fabric()
        memory = harness.job(desired=build_training(4, 0).desired.with_requests(evidence=EvidenceRequest("q")))
        windows = (("a:1", "b:2", 0, 16000), ("b:2", "a:1", 1, 1000))
        for local, remote, rank, acked in windows:
            window = LinkWindow(local, remote, rank=rank, acked_bytes=acked, busy_seconds=1.0, seconds=5.0)
            memory.evidence[f"j-w{rank}-0"] = Evidence("q", f"j-w{rank}-0", 1, links=(window,))
        await harness.reconcile()
        assert harness.operator.network is not None
        assert harness.operator.network.jobs["ns", "j"].bytes_sent == {(0, 1): 16000, (1, 0): 1000}
        assert memory.job is not None
        update_traffic(harness.operator, memory.job)
        assert harness.operator.network.jobs["ns", "j"].bytes_sent, "measuring again would take too long"


async def test_a_new_plan_of_a_job_counts_for_the_next_job_at_once(harness: Harness) -> None:
    harness.cluster.fabric()
    await harness.reconcile()
    memory = harness.job("j")
    assert memory.job is not None
    update_traffic(harness.operator, memory.job)
    assert harness.operator.network is not None
    assert set(harness.operator.network.jobs) == {("ns", "j")}
    await harness.keeper.reconcile()
    assert harness.operator.network.traffic is not None
    assert set(harness.operator.network.traffic.routes) == {("ns", "j")}
    assert memory.desired is not None
    memory.update(desired=memory.desired.with_plan(membership=9))
    update_traffic(harness.operator, memory.job)
    assert harness.operator.network.traffic.routes == {}, "the plan was for the earlier membership"
    memory.update(desired=memory.desired.with_plan(stop=Stop.FINISH))
    update_traffic(harness.operator, memory.job)
    assert harness.operator.network.jobs == {}


async def test_metrics_are_those_of_the_fabric_in_force(harness: Harness) -> None:
    harness.cluster.fabric()
    harness.job()
    await harness.reconcile()
    value = metrics.FABRIC_LINK_LOAD.labels("f", "a", "s1", "up")._value.get()
    other = metrics.FABRIC_LINK_LOAD.labels("f", "a", "s2", "up")._value.get()
    assert (value, other) == (1, 1)
    assert metrics.FABRIC_FLOWS.labels("f")._value.get() == 4
    metrics.publish_fabric_metrics("", None)
    assert not [sample for metric in metrics.FABRIC_LINK_LOAD.collect() for sample in metric.samples]


class TestSeries:
    """The metric of links has as many series as a Fabric's status lists."""

    @pytest.fixture(autouse=True)
    def _nothing_shown(self) -> Iterator[None]:
        metrics.publish_fabric_metrics("", None)
        yield
        metrics.publish_fabric_metrics("", None)

    @staticmethod
    def read_series() -> dict[tuple[str, ...], float]:
        samples = [sample for metric in metrics.FABRIC_LINK_LOAD.collect() for sample in metric.samples]
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def test_series_of_removed_links_are_removed(self) -> None:
        metrics.publish_fabric_metrics(
            "f", FabricStatus(max_load=2, links=(FabricLink("a", "s1", 1, 2), FabricLink("a", "s2", 0, 1)))
        )
        assert len(self.read_series()) == 4
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=3, links=(FabricLink("a", "s1", 3, 2),)))
        assert self.read_series() == {("f", "a", "s1", "up"): 3, ("f", "a", "s1", "down"): 2}
        metrics.publish_fabric_metrics("g", FabricStatus(max_load=3, links=(FabricLink("a", "s1", 3, 2),)))
        assert {labels[0] for labels in self.read_series()} == {"g"}
        metrics.publish_fabric_metrics("", None)
        assert self.read_series() == {}
        assert not [sample for metric in metrics.FABRIC_FLOWS.collect() for sample in metric.samples]

    def test_without_planned_routes_there_are_no_series(self) -> None:
        metrics.publish_fabric_metrics("f", FabricStatus(flows=2, max_load=None, links=(FabricLink("a", "s1", 0, 0),)))
        assert self.read_series() == {}
        assert metrics.FABRIC_FLOWS.labels("f")._value.get() == 2

    def test_no_scrape_misses_a_link_that_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scrapes come from another thread, at any moment."""
        link = FabricLink("a", "s1", 1, 1)
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=1, links=(link, FabricLink("a", "s2", 1, 1))))
        seen: list[set[tuple[str, ...]]] = []
        remove = metrics.FABRIC_LINK_LOAD.remove

        def scraped(*labels: str) -> None:
            remove(*labels)
            seen.append(set(self.read_series()))

        monkeypatch.setattr(metrics.FABRIC_LINK_LOAD, "remove", scraped)
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=1, links=(link,)))
        assert len(seen) == 2
        assert all(("f", "a", "s1", "up") in series for series in seen)

    async def test_a_large_fabric_has_series_only_for_listed_links(self, harness: Harness) -> None:
        harness.cluster.fabric(spines=1000, hops={f"10.0.0.{n}": f"s{n}" for n in range(1, 255)})
        status = await harness.reconcile()
        assert len(status["links"]) == MAX_REPORTED_LINKS
        assert len(self.read_series()) == 2 * MAX_REPORTED_LINKS
