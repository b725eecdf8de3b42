"""Fabrics as they are looked after: their status, the jobs that are woken, and what happens when parts fail."""

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
    """Nodes node-0 … of leaves a, b, a, b, …; what is applied is counted."""

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


class Links(PrometheusClient):
    """Tells what it is told to tell."""

    def __init__(self) -> None:
        super().__init__("", "", "")
        self.answer = LinkRatesResult({})

    async def read_link_rates(self, query: str) -> LinkRatesResult:
        assert query == "link_bits"
        return self.answer


class Runtime(VirtualRuntime):
    """Nobody waits for real threads in virtual time."""

    seconds = 0.0
    """That each piece of work takes."""

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        if self.seconds:
            await self.sleep(self.seconds)
        return work()


class Place:
    def __init__(self) -> None:
        self.cluster, self.prometheus, self.timeline = Cluster(), Links(), Timeline()
        self.runtime = Runtime(self.timeline)
        self.memory = JobRegistry(self.runtime.now())
        settings = Settings(namespace="system")
        self.operator = Operator(settings, self.cluster, self.memory, INSTALLATION, self.prometheus, self.runtime)
        self.keeper = FabricReconciler(self.operator)

    async def listed(self) -> None:
        """As the operator's own resync does it."""
        task = self.runtime.start_task(self.operator.stores.resync(), "resync")
        await self.timeline.run(0.1)
        task.cancel()

    async def look(self) -> Mapping[str, Any]:
        """The Fabric's status after a look, once watches have told it."""
        await self.listed()
        await self.keeper.reconcile()
        await self.listed()
        return (await self.cluster.get(FABRICS, "f")).get("status", {})  # type: ignore[no-any-return]

    def job(self, name: str = "j", desired: DesiredState | None = None, **changes: Any) -> JobCache:
        """One that trains on node-0 … node-3."""
        world = build_training(4, 0)
        memory = self.memory.get_or_create(replace(world.job, name=name, uid=f"uid-{name}"))
        memory.update(desired=desired or world.desired, phase=changes.pop("phase", JobPhase.RUNNING))
        for field, value in changes.items():
            setattr(memory, field, value)
        return memory


@pytest.fixture
def place() -> Place:
    return Place()


def reasons(status: Mapping[str, Any]) -> dict[str, str]:
    return {condition["type"]: condition["reason"] for condition in status["conditions"]}


class TestLooking:
    async def test_the_status_says_what_is_planned_for_all_jobs(self, place: Place) -> None:
        place.cluster.fabric()
        place.job("j")
        place.job("k")
        status = await place.look()
        figures = {name: status[name] for name in ("leaves", "flows", "maxLoad", "lowerBound", "deadLinks")}
        assert figures == {"leaves": 2, "flows": 8, "maxLoad": 2, "lowerBound": 2, "deadLinks": 0}
        assert reasons(status) == {
            "InForce": "Oldest",
            "LeavesResolved": "Labeled",
            "LinksResolved": "LinksConsistent",
            "Planned": "AtLowerBound",
        }
        assert status["observedGeneration"] == 3
        assert place.operator.network is not None
        assert set(place.operator.network.jobs) == {("ns", "j"), ("ns", "k")}

    async def test_what_is_as_it_was_is_not_written_again(self, place: Place) -> None:
        place.cluster.fabric()
        place.job()
        await place.look()
        await place.look()
        await place.look()
        assert place.cluster.applied == 1

    async def test_jobs_whose_plans_name_other_ways_are_woken(self, place: Place) -> None:
        place.cluster.fabric()
        behind, done = place.job("j"), place.job("k")
        await place.look()
        assert behind.wake.is_set()
        assert place.operator.network is not None
        assert place.operator.network.traffic is not None
        for memory, name in ((behind, "j"), (done, "k")):
            ways = place.operator.network.traffic.routes["ns", name]
            paths = Paths(
                tuple(PlannedPath(*pair, f"s{way + 1}") for pair, way in ways.items()),
                (Hop("10.0.0.1", "s1"), Hop("10.0.0.2", "s2")),
            )
            assert memory.desired is not None
            memory.update(desired=memory.desired.with_plan(paths=paths))
            memory.wake.clear()
        await place.look()
        assert not behind.wake.is_set()
        assert not done.wake.is_set()

    async def test_without_path_control_nobody_is(self, place: Place) -> None:
        place.cluster.fabric(pathControl={"mode": "Off"})
        memory = place.job()
        await place.listed()
        memory.wake.clear()
        await place.look()
        memory.wake.clear()
        await place.keeper.reconcile()
        assert not memory.wake.is_set()

    async def test_a_fabric_that_goes_leaves_paths_to_nobody(self, place: Place) -> None:
        place.cluster.fabric()
        await place.look()
        place.cluster.objects.pop(("fabrics", "", "f"))
        await place.listed()
        await place.keeper.reconcile()
        assert place.operator.network is NO_FABRIC
        assert place.operator.stores.levels == ()

    async def test_a_fabric_that_is_made_while_jobs_run_is_told_of_the_nodes_labels(self, place: Place) -> None:
        """Labels that no Fabric names are not kept."""
        await place.listed()
        node = place.operator.stores.nodes.get(("", "node-0"))
        assert node is not None
        assert node.labels == {}
        body = place.cluster.fabric()
        place.operator.stores.fabrics.apply_event(body, deleted=False)
        await place.keeper.reconcile()
        node = place.operator.stores.nodes.get(("", "node-0"))
        assert node is not None
        assert node.labels == {"leaf": "a"}
        assert (await place.cluster.get(FABRICS, "f"))["status"]["leaves"] == 2

    async def test_only_the_oldest_counts(self, place: Place) -> None:
        place.cluster.fabric()
        place.cluster.fabric("second", "2026-02-01T00:00:00Z", spines=9)
        await place.look()
        second = await place.cluster.get(FABRICS, "second")
        assert reasons(second["status"]) == {"InForce": "AnotherIsOlder"}
        assert place.operator.network is not None
        assert place.operator.network.spec.spines == 2

    async def test_one_that_cannot_be_read_is_as_if_there_were_none(self, place: Place) -> None:
        place.cluster.fabric(spines="many")
        status = await place.look()
        assert reasons(status) == {"InForce": "Unreadable"}
        assert place.operator.network is NO_FABRIC

    async def test_a_job_on_a_node_without_labels_is_named(self, place: Place) -> None:
        place.cluster.fabric()
        place.cluster.objects["nodes", "", "node-3"]["metadata"]["labels"] = {}
        place.job()
        status = await place.look()
        assert reasons(status)["LeavesResolved"] == "NodesUnlabeled"
        (known,) = [one for one in status["conditions"] if one["type"] == "LeavesResolved"]
        assert "node-3" in known["message"]


class TestPlanningThatTakesLong:
    @staticmethod
    async def planned(place: Place) -> tuple[str, str]:
        """Status and reason of the condition; empty where there is none yet."""
        await place.listed()
        status = (await place.cluster.get(FABRICS, "f")).get("status", {"conditions": []})
        found = [one for one in status["conditions"] if one["type"] == "Planned"]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    async def test_it_is_said_while_it_lasts(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        place.cluster.fabric()
        place.job()
        place.runtime.seconds = 3.0
        await place.listed()
        task = place.runtime.start_task(run_fabric_loop(place.operator), "fabrics")
        await place.timeline.run(SLOW_PLANNING_SECONDS - 0.3)
        assert await self.planned(place) == ("", "")
        await place.timeline.run(0.5)
        assert await self.planned(place) == ("Unknown", "Planning")
        await place.timeline.run(2.5)
        assert await self.planned(place) == ("True", "AtLowerBound")
        assert "the flows of 1 jobs are being planned" in caplog.text
        assert "planned in 3.0 s" in caplog.text
        task.cancel()

    async def test_what_stood_there_before_is_said_again(self, place: Place) -> None:
        place.cluster.fabric()
        place.job()
        await place.look()
        place.runtime.seconds = 3.0
        task = place.runtime.start_task(run_fabric_loop(place.operator), "fabrics")
        await place.timeline.run(SLOW_PLANNING_SECONDS + 0.1)
        assert await self.planned(place) == ("Unknown", "Planning")
        await place.timeline.run(3.0 + FABRIC_POLL_SECONDS)
        assert await self.planned(place) == ("True", "AtLowerBound")
        task.cancel()

    async def test_whoever_cannot_be_told_does_not_hold_up_the_plan(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.cluster.fabric()
        place.runtime.seconds = 3.0
        await place.listed()
        apply = place.cluster.apply

        async def away(*_: Any, **__: Any) -> Object:
            monkeypatch.setattr(place.cluster, "apply", apply)
            raise kopf.TemporaryError("away")

        monkeypatch.setattr(place.cluster, "apply", away)
        look = place.runtime.start_task(place.keeper.reconcile(), "look")
        await place.timeline.run(SLOW_PLANNING_SECONDS + 0.1)
        assert not look.done()
        await place.timeline.run(3.0)
        assert look.done()
        assert await self.planned(place) == ("True", "NoFlows")

    async def test_a_plan_that_fails_leaves_nothing_behind(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        place.cluster.fabric()
        await place.listed()

        async def failing(_: Callable[[], Result]) -> Result:
            raise RuntimeError("a bug")

        monkeypatch.setattr(place.runtime, "compute_in_thread", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            await place.keeper.reconcile()
        await place.timeline.run(SLOW_PLANNING_SECONDS + 1)
        assert await self.planned(place) == ("", "")


class TestLinks:
    async def test_what_the_query_tells_counts(self, place: Place) -> None:
        place.cluster.fabric(linkQuery="link_bits")
        place.job()
        place.prometheus.answer = LinkRatesResult({("a", "s1"): 0.0})
        status = await place.look()
        assert (status["deadLinks"], status["maxLoad"]) == (1, 2)

    async def test_while_nobody_answers_links_are_as_they_were(self, place: Place) -> None:
        place.cluster.fabric(linkQuery="link_bits")
        place.prometheus.answer = LinkRatesResult({("a", "s1"): 0.0})
        await place.look()
        place.prometheus.answer = LinkRatesResult({}, "Prometheus does not answer")
        status = await place.look()
        assert (status["deadLinks"], reasons(status)["LinksResolved"]) == (1, FabricReason.QUERY_FAILED)
        place.prometheus.answer = LinkRatesResult({})
        assert (await place.look())["deadLinks"] == 0

    async def test_exceptions_go_before_it(self, place: Place) -> None:
        place.cluster.fabric(linkQuery="link_bits", exceptions=[{"leaf": "b", "spine": "s2"}])
        place.prometheus.answer = LinkRatesResult({("b", "s2"): 4e11})
        assert (await place.look())["deadLinks"] == 1


class TestWords:
    """What jobs' own flows have shown of links."""

    def word(
        self, spine: str = "s1", source: str = "a", destination: str = "b", ratio: float = 4.0
    ) -> RouteObservation:
        return RouteObservation(NOW, source, spine, destination, "node-0", "node-1", ratio)

    def saying(self, place: Place, name: str, *words: RouteObservation, namespace: str = "ns") -> JobCache:
        world = build_training(4, 0)
        memory = place.memory.get_or_create(
            replace(world.job, namespace=namespace, name=name, uid=f"uid-{namespace}-{name}")
        )
        now = tuple(replace(word, at=place.runtime.now()) for word in words)
        memory.update(desired=world.desired.with_adaptation(route_observations=now), phase=JobPhase.RUNNING)
        return memory

    def shown(self, status: Mapping[str, Any]) -> dict[str, str]:
        return {f"{link['leaf']}{link['spine']}": link["state"] for link in status["links"] if link["state"] != "Up"}

    async def test_of_the_only_namespace_count_for_all(self, place: Place) -> None:
        place.cluster.fabric()
        self.saying(place, "j", self.word())
        status = await place.look()
        assert self.shown(status) == {"as1": "Slow", "bs1": "Slow"}
        (known,) = [one for one in status["conditions"] if one["type"] == "LinksResolved"]
        assert known["status"] == "True"
        assert known["message"].endswith("carry less than they should: a–s1 (25%), b–s1 (25%)")

    async def test_of_one_of_two_for_itself_alone_and_people_are_shown_nothing(self, place: Place) -> None:
        place.cluster.fabric()
        self.saying(place, "j", self.word(ratio=0.0))
        self.saying(place, "k", namespace="other")
        status = await place.look()
        assert (self.shown(status), status["deadLinks"]) == ({}, 0)
        assert place.operator.network is not None
        assert set(place.operator.network.wiring.namespace_topologies) == {"ns"}

    async def test_of_both_for_all(self, place: Place) -> None:
        place.cluster.fabric()
        self.saying(place, "j", self.word(ratio=0.0))
        self.saying(place, "k", self.word(ratio=0.0), namespace="other")
        status = await place.look()
        assert (self.shown(status), status["deadLinks"]) == ({"bs1": "Down"}, 1)

    async def test_exceptions_go_before_them(self, place: Place) -> None:
        place.cluster.fabric(exceptions=[{"leaf": "a", "spine": "s1", "state": "Slow", "capacity": "300G"}])
        self.saying(place, "j", self.word(), replace(self.word(), destination="c"))
        assert place.operator.network is None
        await place.look()
        assert place.operator.network is not None
        wiring = place.operator.network.wiring
        assert wiring.topology is not None
        assert wiring.topology.up[wiring.leaves.index("a"), 0] == 300_000

    async def test_they_are_forgotten(self, place: Place) -> None:
        place.cluster.fabric()
        self.saying(place, "j", self.word())
        await place.look()
        await place.timeline.run(ROUTE_REPORT_TTL_SECONDS)
        assert self.shown(await place.look()) == {}

    async def test_the_next_operator_knows_them_from_what_is_written(self, place: Place) -> None:
        place.cluster.fabric()
        self.saying(place, "j", self.word())
        await place.look()
        again = Place()
        again.cluster = place.cluster
        again.operator.cluster = place.cluster
        self.saying(again, "j", self.word())
        assert self.shown(await again.look()) == {"as1": "Slow", "bs1": "Slow"}

    async def test_what_a_pass_has_just_written_is_not_looked_at_yet(self, place: Place) -> None:
        """So that the job waits for joint planning to look."""
        place.cluster.fabric()
        memory = self.saying(place, "j")
        await place.look()
        memory.update(desired=self.saying(place, "j", self.word()).desired)
        assert memory.job is not None
        update_traffic(place.operator, memory.job)
        assert place.operator.network is not None
        assert place.operator.network.jobs["ns", "j"].route_observations == ()
        await place.keeper.reconcile()
        assert len(place.operator.network.jobs["ns", "j"].route_observations) == 1


class TestSwitchedOff:
    async def test_by_the_installation_ranks_are_ordered_and_no_more(self, place: Place) -> None:
        place.operator.settings = replace(place.operator.settings, traffic_planning=False)
        place.cluster.fabric()
        memory = place.job()
        await place.listed()
        memory.wake.clear()
        await place.keeper.reconcile()
        assert not memory.wake.is_set()
        assert place.operator.network is not None
        assert place.operator.network.spec.path_control.mode is PathControl.OFF
        status = await place.look()
        assert reasons(status)["Planned"] == "PathControlOff"
        (planned,) = [one for one in status["conditions"] if one["type"] == "Planned"]
        assert "policy.traffic.planning" in planned["message"]


class TestLoop:
    async def test_it_looks_again_and_again_and_at_once_when_a_fabric_changes(self, place: Place) -> None:
        await place.listed()
        task = place.runtime.start_task(run_fabric_loop(place.operator), "fabrics")
        await place.timeline.run(1)
        assert place.operator.network is NO_FABRIC
        place.operator.stores.fabrics.apply_event(place.cluster.fabric(), deleted=False)
        await place.timeline.run(0.1)
        assert (await place.cluster.get(FABRICS, "f"))["status"]["flows"] == 0
        place.job()
        await place.timeline.run(FABRIC_POLL_SECONDS + 0.1)
        assert (await place.cluster.get(FABRICS, "f"))["status"]["flows"] == 4
        task.cancel()

    async def test_what_fails_is_tried_again(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        await place.listed()
        place.operator.stores.fabrics.apply_event(place.cluster.fabric(), deleted=False)
        troubles: list[Exception] = [kopf.TemporaryError("away"), RuntimeError("a bug")]
        apply = place.cluster.apply

        async def failing(*args: Any, **named: Any) -> Object:
            if troubles:
                raise troubles.pop(0)
            return await apply(*args, **named)

        monkeypatch.setattr(place.cluster, "apply", failing)
        task = place.runtime.start_task(run_fabric_loop(place.operator), "fabrics")
        await place.timeline.run(30)
        assert not task.done()
        assert (await place.cluster.get(FABRICS, "f"))["status"]["flows"] == 0
        task.cancel()

    async def test_one_that_has_gone_meanwhile_is_no_trouble(self, place: Place) -> None:
        place.cluster.fabric()
        await place.listed()
        del place.cluster.objects["fabrics", "", "f"]
        assert await place.keeper.reconcile() == FABRIC_POLL_SECONDS

    async def test_an_installation_that_does_not_know_fabrics_goes_on(self, place: Place) -> None:
        place.cluster.without_fabrics = True
        await place.listed()
        assert place.operator.stores.nodes.listed.is_set()
        assert place.operator.stores.fabric is None

    async def test_nor_does_one_that_may_not_list_them_hold_up_the_rest(self, place: Place) -> None:
        place.cluster.failures["fabrics"] = [kopf.TemporaryError("denied")]
        await place.listed()
        assert place.operator.stores.nodes.listed.is_set()


def of_job(memory: JobCache, now: float = NOW) -> JobTraffic | None:
    return traffic.build_job_traffic(("ns", "j"), memory, now)


class TestTraffic:
    """What planning is told of a job."""

    def test_seats_and_prices(self, place: Place) -> None:
        found = of_job(place.job(metrics=JobMetrics(wait_share=0.337)))
        assert found is not None
        assert found.node_ranks == tuple(NodeRanks(f"node-{n}", (n,)) for n in range(4))
        assert (found.wait_share, found.round_seconds, found.uses_nccl, found.ports) == (0.3, 5.0, False, None)

    def test_who_does_not_train_yet_pays_nothing_for_a_round(self, place: Place) -> None:
        found = of_job(place.job(phase=JobPhase.STARTING, metrics=JobMetrics(wait_share=0.5)))
        assert found is not None
        assert (found.wait_share, found.round_seconds) == (0.0, None)

    @pytest.mark.parametrize("measured", ["restart_seconds", "spare_restart_seconds"])
    def test_what_a_round_took_last_is_what_it_takes(self, place: Place, measured: str) -> None:
        draft = build_training(4, 0).desired.with_budget(**{measured: 1.5})
        found = of_job(place.job(desired=draft))
        assert found is not None
        assert found.round_seconds == 1.5

    def test_who_was_replanned_lately_is_left_alone_for_longer_each_time(self, place: Place) -> None:
        def replanned(*ages: float) -> float:
            past = tuple(PastIncident(IncidentCause.SLOW_COMMUNICATION, NOW - age, 1.0) for age in ages)
            found = of_job(place.job(desired=build_training(4, 0).desired.with_incidents(past=past)))
            assert found is not None
            assert found.round_seconds is not None
            return found.round_seconds

        assert replanned(REROUTE_HOLD_SECONDS - 1) == math.inf
        assert replanned(REROUTE_HOLD_SECONDS + 1) == 5.0
        assert replanned(REROUTE_HOLD_SECONDS + 1, 2000) == math.inf
        assert replanned(2 * REROUTE_HOLD_SECONDS + 1, 2000) == 5.0
        assert replanned(REROUTE_HOLD_SECONDS + 1, REROUTE_HISTORY_SECONDS + 1) == 5.0

    def test_nor_is_one_whose_ways_are_being_tried(self, place: Place) -> None:
        draft = build_training(4, 0).desired.with_adaptation(route_trial=RouteTrial("i", 2, 0.1))
        found = of_job(place.job(desired=draft))
        assert found is not None
        assert found.round_seconds == math.inf

    @pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STARTING])
    @pytest.mark.parametrize(("age", "held"), [(TRIED_ROUTE_TTL_SECONDS - 1, True), (TRIED_ROUTE_TTL_SECONDS, False)])
    def test_who_has_tried_others_in_vain_keeps_its_ways_for_a_while(
        self, phase: JobPhase, age: float, held: bool
    ) -> None:
        draft = build_training(4, 0).desired.with_adaptation(failed_routes=(FailedRoute(NOW - age, 1, 0),))
        found = of_job(Place().job(desired=draft, phase=phase))
        assert found is not None
        assert found.keeps_routes is held

    @pytest.mark.parametrize(
        ("platform", "mode", "acts"), [(True, RemediationMode.ACT, True), (False, RemediationMode.ACT, False)]
    )
    def test_who_may_act(self, platform: bool, mode: RemediationMode, acts: bool) -> None:
        memory = Place().job()
        for wish, expected in ((mode, acts), (RemediationMode.RECOMMEND, False)):
            memory.update(job=build_job(4, 0, remediation=RemediationSpec(mode=wish)))
            found = traffic.build_job_traffic(("ns", "j"), memory, NOW, acts=platform)
            assert found is not None
            assert found.can_move is expected

    def test_who_may_not_be_replanned_is_not_moved_for_anybody(self, place: Place) -> None:
        memory = place.job()
        memory.update(job=build_job(4, 0, remediation=RemediationSpec(allow=(Remedy.RESTART_RANKS,))))
        found = of_job(memory)
        assert found is not None
        assert found.round_seconds == math.inf

    def test_who_has_no_members_or_ends_sends_nothing(self, place: Place) -> None:
        draft = build_training(4, 0).desired
        assert of_job(place.job(desired=draft.with_plan(members=()))) is None
        assert of_job(place.job(desired=draft.with_plan(stop=Stop.SUSPEND))) is None
        assert of_job(place.job(desired=draft.with_lifecycle(completed_at=1.0))) is None
        assert of_job(JobCache()) is None
        assert traffic.collect_traffic(JobRegistry(0.0), NOW) == {}

    @pytest.mark.parametrize(("limit", "by_nccl"), [("8", True), (8, True), ("0", False), (None, False)])
    def test_gpus_talk_by_nccl(self, limit: object, by_nccl: bool) -> None:
        limits = {} if limit is None else {"nvidia.com/gpu": limit}
        template = {"spec": {"containers": [{"name": "x"}, {"name": "trainer", "resources": {"limits": limits}}]}}
        memory = Place().job()
        memory.update(job=replace(build_job(), spec=JobSpec(template=template)))
        found = of_job(memory)
        assert found is not None
        assert found.uses_nccl is by_nccl

    @pytest.mark.parametrize("template", [{}, {"spec": None}, {"spec": {"containers": [{"name": "trainer"}]}}])
    def test_a_template_that_says_nothing_of_them(self, template: Any) -> None:
        memory = Place().job()
        assert isinstance(memory.job, TrainingJob)
        memory.update(job=replace(memory.job, spec=JobSpec(template=template)))
        found = of_job(memory)
        assert found is not None
        assert not found.uses_nccl

    def test_bytes_that_were_measured_between_nodes(self, place: Place) -> None:
        draft = build_training(4, 0).desired
        memory = place.job(desired=draft.with_plan(evidence_request="q"))

        def end(worker: int, local: str, remote: str, acked: int) -> Evidence:
            window = LinkWindow(local, remote, rank=worker, acked_bytes=acked, busy_seconds=1.0, seconds=5.0)
            return Evidence("q", f"j-w{worker}-0", 1, links=(window,))

        memory.evidence = {"j-w0-0": end(0, "a:1", "b:2", 1000), "j-w1-0": end(1, "b:2", "a:1", 70)}
        found = of_job(memory)
        assert found is not None
        answers = traffic.collect_link_answers(place.memory)
        assert traffic.add_sent_bytes(found, answers["ns", "j"]).bytes_sent == {(0, 1): 1000, (1, 0): 70}
        together = replace(found, node_ranks=(NodeRanks("node-0", (0, 1, 2, 3)),))
        assert traffic.add_sent_bytes(together, answers["ns", "j"]).bytes_sent == {}, "what stays on its node"
        memory.evidence = {name: replace(one, request="older") for name, one in memory.evidence.items()}
        assert traffic.collect_link_answers(place.memory) == {}

    async def test_they_count_in_the_plan(self, place: Place) -> None:
        place.cluster.fabric()
        memory = place.job(desired=build_training(4, 0).desired.with_plan(evidence_request="q"))
        windows = (("a:1", "b:2", 0, 16000), ("b:2", "a:1", 1, 1000))
        for local, remote, rank, acked in windows:
            window = LinkWindow(local, remote, rank=rank, acked_bytes=acked, busy_seconds=1.0, seconds=5.0)
            memory.evidence[f"j-w{rank}-0"] = Evidence("q", f"j-w{rank}-0", 1, links=(window,))
        await place.look()
        assert place.operator.network is not None
        assert place.operator.network.jobs["ns", "j"].bytes_sent == {(0, 1): 16000, (1, 0): 1000}
        assert memory.job is not None
        update_traffic(place.operator, memory.job)
        assert place.operator.network.jobs["ns", "j"].bytes_sent, (
            "what was found out takes too long to be found out again"
        )


async def test_what_a_job_has_just_been_given_counts_for_the_next_one_at_once(place: Place) -> None:
    place.cluster.fabric()
    await place.look()
    memory = place.job("j")
    assert memory.job is not None
    update_traffic(place.operator, memory.job)
    assert place.operator.network is not None
    assert set(place.operator.network.jobs) == {("ns", "j")}
    await place.keeper.reconcile()
    assert place.operator.network.traffic is not None
    assert set(place.operator.network.traffic.routes) == {("ns", "j")}
    assert memory.desired is not None
    memory.update(desired=memory.desired.with_plan(membership=9))
    update_traffic(place.operator, memory.job)
    assert place.operator.network.traffic.routes == {}, "what was planned for the one before"
    memory.update(desired=memory.desired.with_plan(stop=Stop.FINISH))
    update_traffic(place.operator, memory.job)
    assert place.operator.network.jobs == {}


async def test_metrics_are_those_of_the_fabric_in_force(place: Place) -> None:
    place.cluster.fabric()
    place.job()
    await place.look()
    value = metrics.FABRIC_LINK_LOAD.labels("f", "a", "s1", "up")._value.get()
    other = metrics.FABRIC_LINK_LOAD.labels("f", "a", "s2", "up")._value.get()
    assert (value, other) == (1, 1)
    assert metrics.FABRIC_FLOWS.labels("f")._value.get() == 4
    metrics.publish_fabric_metrics("", None)
    assert not [sample for metric in metrics.FABRIC_LINK_LOAD.collect() for sample in metric.samples]


class TestSeries:
    """Of the metric of links: as many as a Fabric's status lists."""

    @pytest.fixture(autouse=True)
    def _nothing_shown(self) -> Iterator[None]:
        metrics.publish_fabric_metrics("", None)
        yield
        metrics.publish_fabric_metrics("", None)

    @staticmethod
    def series() -> dict[tuple[str, ...], float]:
        samples = [sample for metric in metrics.FABRIC_LINK_LOAD.collect() for sample in metric.samples]
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def test_links_that_go_take_theirs_along(self) -> None:
        metrics.publish_fabric_metrics(
            "f", FabricStatus(max_load=2, links=(FabricLink("a", "s1", 1, 2), FabricLink("a", "s2", 0, 1)))
        )
        assert len(self.series()) == 4
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=3, links=(FabricLink("a", "s1", 3, 2),)))
        assert self.series() == {("f", "a", "s1", "up"): 3, ("f", "a", "s1", "down"): 2}
        metrics.publish_fabric_metrics("g", FabricStatus(max_load=3, links=(FabricLink("a", "s1", 3, 2),)))
        assert {labels[0] for labels in self.series()} == {"g"}
        metrics.publish_fabric_metrics("", None)
        assert self.series() == {}
        assert not [sample for metric in metrics.FABRIC_FLOWS.collect() for sample in metric.samples]

    def test_where_no_ways_are_planned_there_are_none(self) -> None:
        metrics.publish_fabric_metrics("f", FabricStatus(flows=2, max_load=None, links=(FabricLink("a", "s1", 0, 0),)))
        assert self.series() == {}
        assert metrics.FABRIC_FLOWS.labels("f")._value.get() == 2

    def test_no_scrape_finds_a_link_missing_that_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They come from a thread of their own, at any moment."""
        link = FabricLink("a", "s1", 1, 1)
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=1, links=(link, FabricLink("a", "s2", 1, 1))))
        seen: list[set[tuple[str, ...]]] = []
        remove = metrics.FABRIC_LINK_LOAD.remove

        def scraped(*labels: str) -> None:
            remove(*labels)
            seen.append(set(self.series()))

        monkeypatch.setattr(metrics.FABRIC_LINK_LOAD, "remove", scraped)
        metrics.publish_fabric_metrics("f", FabricStatus(max_load=1, links=(link,)))
        assert len(seen) == 2
        assert all(("f", "a", "s1", "up") in series for series in seen)

    async def test_of_a_large_fabric_only_those_that_are_listed(self, place: Place) -> None:
        place.cluster.fabric(spines=1000, hops={f"10.0.0.{n}": f"s{n}" for n in range(1, 255)})
        status = await place.look()
        assert len(status["links"]) == MAX_REPORTED_LINKS
        assert len(self.series()) == 2 * MAX_REPORTED_LINKS
