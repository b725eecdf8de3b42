"""Histories of nodes: which Incidents count, that each counts once even if the operator ends at any call, and what
follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kopf
import pytest
from prometheus_client import REGISTRY

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.node_history import (
    MAX_NODE_INCIDENTS,
    NodeHistory,
    NodeHistoryStatus,
    NodeIncident,
    NodeIncidentKind,
)
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.effects import WriteIncident
from pacekeeper_operator.decide.nodes.node_history import (
    DAY_SECONDS,
    MAX_UNRELIABLE_NODES,
    NODE_INCIDENT_TTL_SECONDS,
    build_entry,
    count_incident_days,
    drop_old_entries,
    rank_unreliable_nodes,
    with_entry,
)
from pacekeeper_operator.kube.client import (
    INCIDENT_OBJECTS,
    NODE_HISTORIES,
    NODE_OBJECTS,
    Conflict,
    Denied,
    NotFound,
    Object,
    ResourceKind,
)
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime.effect_handlers import handle_effect
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import close_incidents, create_job_context
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.desired_state import Incident
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.schema import find_schema_errors, read_schema
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import NOW, build_training

INCIDENT = Incident(
    "j-r1-node-lost",
    IncidentCause.NODE_LOST,
    IncidentClass.INFRASTRUCTURE,
    1,
    "node-7 is lost",
    first_sign=NOW - 20,
    detected=NOW - 10,
    decided=NOW - 10,
    applied=NOW - 9,
    node="node-7",
    remedy=str(Remedy.REPLACE_WORKER),
    outcome=IncidentOutcome.RECOVERED,
)


def build_history(*days: float, node: str = "node-7", **changes: Any) -> NodeHistory:
    """Build a history with an Incident this many days ago each."""
    found = NodeHistory(node, f"uid-{node}")
    for number, day in enumerate(days):
        found = with_entry(found, NodeIncident("ns", f"i{number}", NodeIncidentKind.LOST, NOW - day * DAY_SECONDS))
    return replace(found, **changes)


class TestCountedIncidents:
    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            (IncidentCause.NODE_LOST, NodeIncidentKind.LOST),
            (IncidentCause.HANG, NodeIncidentKind.HUNG),
            (IncidentCause.WORKER_UNRESPONSIVE, NodeIncidentKind.HUNG),
            (IncidentCause.STRAGGLER, NodeIncidentKind.SLOW),
            (IncidentCause.SLOW_COMMUNICATION, NodeIncidentKind.SLOW),
            (IncidentCause.GPU_ERROR, NodeIncidentKind.GPU_ERROR),
            (IncidentCause.GPU_WARNING, NodeIncidentKind.GPU_ERROR),
            (IncidentCause.CRASH, None),
            (IncidentCause.OUT_OF_MEMORY, None),
            (IncidentCause.WORKER_LOST, None),
            (IncidentCause.NODE_LEAVING, None),
        ],
    )
    def test_only_causes_that_may_be_the_nodes_fault_count(
        self, cause: IncidentCause, kind: NodeIncidentKind | None
    ) -> None:
        found = build_entry("ns", replace(INCIDENT, cause=cause), NOW)
        assert (found and found.kind) == kind

    @pytest.mark.parametrize(
        "changes",
        [
            {"outcome": None},
            {"node": None},
            {"class_": IncidentClass.APPLICATION},
            {"class_": IncidentClass.DISRUPTION},
        ],
    )
    def test_open_incidents_and_those_of_no_node_do_not_count(self, changes: dict[str, Any]) -> None:
        assert build_entry("ns", replace(INCIDENT, **changes), NOW) is None

    @pytest.mark.parametrize(
        ("changes", "left"),
        [
            ({}, True),
            ({"outcome": IncidentOutcome.INEFFECTIVE}, False),
            ({"outcome": IncidentOutcome.SUPERSEDED}, None),
            ({"outcome": IncidentOutcome.RECOMMENDED, "applied": None}, None),
            ({"remedy": str(Remedy.RESTART_RANKS)}, None),
            ({"remedy": None}, None),
        ],
    )
    def test_whether_the_fault_left_with_the_node(self, changes: dict[str, Any], left: bool | None) -> None:
        found = build_entry("ns", replace(INCIDENT, **changes), NOW)
        assert found is not None
        assert found.resolved_by_move is left

    def test_a_date_in_the_future_counts_as_now(self) -> None:
        found = build_entry("ns", replace(INCIDENT, detected=NOW + 1e6), NOW)
        assert found is not None
        assert found.at == NOW

    def test_an_incident_counts_once_by_namespace_and_name(self) -> None:
        entry = NodeIncident("ns", "i", NodeIncidentKind.HUNG, NOW)
        once = with_entry(build_history(), entry)
        assert with_entry(once, replace(entry, at=NOW + 5)) == once
        assert len(with_entry(once, replace(entry, namespace="other")).incidents) == 2

    def test_the_newest_incidents_are_stored_and_a_repeated_older_one_is_not_added(self) -> None:
        found = build_history(*range(MAX_NODE_INCIDENTS + 10))
        assert len(found.incidents) == MAX_NODE_INCIDENTS
        assert [one.name for one in found.incidents[:2]] == ["i0", "i1"]
        forgotten = NodeIncident("ns", "i70", NodeIncidentKind.LOST, NOW - 70 * DAY_SECONDS)
        assert with_entry(found, forgotten) == found

    def test_an_incident_is_forgotten_after_ninety_days(self) -> None:
        found = build_history(0, 89, 91)
        assert [one.name for one in drop_old_entries(found, NOW).incidents] == ["i0", "i1"]
        assert drop_old_entries(found, NOW + NODE_INCIDENT_TTL_SECONDS).incidents == ()

    def test_a_burst_counts_as_one_day_and_faults_that_stayed_with_the_job_as_none(self) -> None:
        assert count_incident_days(build_history(0.0, 0.001, 0.002), NOW) == 1
        assert count_incident_days(build_history(0, 5, 91), NOW) == 2
        stayed = replace(build_history(5), incidents=(replace(build_history(5).incidents[0], resolved_by_move=False),))
        assert count_incident_days(stayed, NOW) == 0


ALL = {f"node-{n}": NodeView(f"node-{n}", f"uid-node-{n}") for n in range(40)}


class TestPreference:
    def test_nodes_with_incidents_on_several_days_are_avoided_worst_first(self) -> None:
        found = [
            build_history(1, node="node-1"),
            build_history(1, 2, node="node-2"),
            build_history(1, 2, 3, node="node-3"),
        ]
        assert rank_unreliable_nodes(found, ALL, NOW) == ("node-3", "node-2")
        assert rank_unreliable_nodes(found, ALL, NOW + NODE_INCIDENT_TTL_SECONDS) == ()

    def test_a_new_node_of_the_same_name_is_not_avoided(self) -> None:
        found = [build_history(1, 2, node="node-1", node_uid="of-the-one-before"), build_history(1, 2, node="gone")]
        assert rank_unreliable_nodes(found, ALL, NOW) == ()

    def test_a_pod_avoids_a_bounded_number_of_nodes(self) -> None:
        found = [build_history(1, 2, node=name) for name in ALL]
        assert len(rank_unreliable_nodes(found, ALL, NOW)) == MAX_UNRELIABLE_NODES


class TestBadInput:
    @pytest.mark.parametrize(
        "status",
        [
            None,
            {"incidents": "all"},
            {"incidents": [None, 7, [], {}]},
            {"incidents": [{"namespace": "ns", "name": "i", "kind": "Possessed", "at": "2026-01-01T00:00:00Z"}]},
            {"incidents": [{"namespace": "ns", "name": "i", "kind": "Lost", "at": "long ago"}]},
            {"incidents": [{"namespace": "ns", "name": "i", "kind": "Lost", "at": 5}]},
            {"counts": [{"kind": "Lost", "count": 1000}]},
        ],
    )
    def test_invalid_histories_count_as_empty(self, status: Any) -> None:
        body = {"metadata": {"name": "node-7"}, "spec": {"nodeUID": "u"}, "status": status}
        assert NodeHistory.parse(body) == NodeHistory("node-7", "u")

    def test_an_invalid_incident_does_not_affect_the_others(self) -> None:
        good = {"namespace": "ns", "name": "i", "kind": "Lost", "at": "2026-01-01T00:00:00Z"}
        body = {"metadata": {"name": "node-7"}, "status": {"incidents": [{**good, "kind": "Possessed"}, good]}}
        assert [one.name for one in NodeHistory.parse(body).incidents] == ["i"]

    def test_the_fullest_history_fits_into_its_definition(self) -> None:
        found = build_history()
        for number in range(2 * MAX_NODE_INCIDENTS):
            kind = list(NodeIncidentKind)[number % len(NodeIncidentKind)]
            found = with_entry(found, NodeIncident("n" * 63, f"{number:0253}", kind, NOW - number, number % 2 == 0))
        status = NodeHistoryStatus.from_incidents(found.incidents)
        assert find_schema_errors(status.to_patch(), read_schema("nodehistories")["status"]) == []
        assert NodeHistoryStatus.parse(status.to_patch()) == status
        assert {one.kind: one.count for one in status.counts} == dict.fromkeys(
            NodeIncidentKind, MAX_NODE_INCIDENTS // 4
        )


class ProcessEnded(BaseException):
    """The operator's process has ended."""


class Cluster(FakeCluster):
    """A cluster with a node that ends the operator's process at one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dies_at: int | None = None  # twice the number of the call; odd: after its effect
        self.denied: dict[str, Exception] = {}
        self.node("uid-1")

    def node(self, uid: str, created_at: float = NOW - 1000) -> None:
        metadata = {"name": "node-7", "uid": uid, "creationTimestamp": format_time(created_at)}
        self._store(("nodes", "", "node-7"), {"metadata": metadata, "spec": {}})

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        found: Object | None = await self._call_unless_dead(kind, super().find(kind, name, namespace))
        return found

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        made: Object = await self._call_unless_dead(kind, super().create(kind, body, dry_run=dry_run))
        return made

    async def patch(self, kind: ResourceKind, name: str, body: Any, namespace: str = "", **more: Any) -> Object:
        patched: Object = await self._call_unless_dead(kind, super().patch(kind, name, body, namespace, **more))
        return patched

    async def delete(self, kind: ResourceKind, name: str, namespace: str = "", **more: Any) -> None:
        await self._call_unless_dead(kind, super().delete(kind, name, namespace, **more))

    async def _call_unless_dead(self, kind: ResourceKind, call: Any) -> Any:
        self.calls += 1
        if self.dies_at == 2 * self.calls or kind.plural in self.denied:
            call.close()
            raise self.denied.get(kind.plural, ProcessEnded())
        answer = await call
        if self.dies_at == 2 * self.calls + 1:
            raise ProcessEnded
        return answer

    def history(self) -> NodeHistory | None:
        body = self.objects.get(("nodehistories", "", "node-7"))
        return None if body is None else NodeHistory.parse(body)

    def names(self) -> list[str]:
        found = self.history()
        return [] if found is None else [one.name for one in found.incidents]


class OperatorProcess:
    """The process of one operator."""

    def __init__(self, cluster: Cluster) -> None:
        prometheus = PrometheusClient("", "", "")
        self.operator = Operator(
            Settings(), cluster, JobRegistry(0.0), INSTALLATION, prometheus, FixedTimeRuntime(), paused=""
        )
        self.desk: JobContext = create_job_context(self.operator, build_training().job, {})
        self.desk.cache.update(desired=build_training().desired)

    async def record_incident(self, incident: Incident = INCIDENT, before: Incident | None = None) -> None:
        await handle_effect(self.operator, self.desk, WriteIncident(incident, before))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


class TestRecording:
    async def test_history_is_written_when_the_incident_ends_and_deleted_with_its_node(self, cluster: Cluster) -> None:
        process, opened = OperatorProcess(cluster), replace(INCIDENT, outcome=None)
        await process.record_incident(opened)
        assert cluster.history() is None
        await process.record_incident(INCIDENT, opened)
        body = cluster.objects["nodehistories", "", "node-7"]
        assert find_schema_errors(body["spec"], read_schema("nodehistories")["spec"]) == []
        assert find_schema_errors(body["status"], read_schema("nodehistories")["status"]) == []
        assert [(one["kind"], one["uid"]) for one in body["metadata"]["ownerReferences"]] == [("Node", "uid-1")]
        (entry,) = NodeHistory.parse(body).incidents
        assert (entry.namespace, entry.name, entry.kind, entry.at) == ("ns", INCIDENT.name, "Lost", INCIDENT.detected)

    async def test_the_next_operator_writes_nothing_again(self, cluster: Cluster) -> None:
        await OperatorProcess(cluster).record_incident()
        before = cluster.objects["nodehistories", "", "node-7"]["metadata"]["resourceVersion"]
        await OperatorProcess(cluster).record_incident()
        assert cluster.objects["nodehistories", "", "node-7"]["metadata"]["resourceVersion"] == before

    async def test_an_operator_that_ends_between_two_calls_loses_nothing_and_counts_nothing_twice(self) -> None:
        """Also while the history of an earlier node of the name is replaced."""
        moments = 0
        for moment in range(2, 200):
            cluster = Cluster()
            await OperatorProcess(cluster).record_incident(replace(INCIDENT, name="of-the-node-before"))
            cluster.node("uid-2", NOW - 500)
            cluster.calls, cluster.dies_at = 0, moment
            try:
                await OperatorProcess(cluster).record_incident()
            except ProcessEnded:
                moments += 1
                cluster.dies_at = None
                await OperatorProcess(cluster).record_incident()
            found = cluster.history()
            assert found is not None
            assert (found.node_uid, cluster.names()) == ("uid-2", [INCIDENT.name])
            if cluster.dies_at is not None:
                break  # the write was complete before that call
        assert moments > 10

    async def test_a_node_created_after_the_incident_has_no_history_of_it(self, cluster: Cluster) -> None:
        cluster.node("uid-2", created_at=INCIDENT.detected + 1)
        await OperatorProcess(cluster).record_incident()
        assert cluster.history() is None

    async def test_a_deleted_node_gets_no_history(self, cluster: Cluster) -> None:
        await cluster.delete(NODE_OBJECTS, "node-7")
        await OperatorProcess(cluster).record_incident()
        assert cluster.history() is None

    @pytest.mark.parametrize("error", [Denied("forbidden"), NotFound("no such resource")])
    async def test_incidents_are_closed_where_the_definition_is_missing(
        self, cluster: Cluster, error: Exception
    ) -> None:
        cluster.denied["nodehistories"] = error
        process = OperatorProcess(cluster)
        await process.record_incident()
        assert process.desk.written_incidents == {INCIDENT.name: INCIDENT}
        assert (await cluster.get(INCIDENT_OBJECTS, INCIDENT.name, "ns"))["status"]["outcome"] == "Recovered"

    async def test_a_temporary_error_is_retried(self, cluster: Cluster) -> None:
        cluster.denied["nodehistories"] = kopf.TemporaryError("the API server does not answer")
        process = OperatorProcess(cluster)
        with pytest.raises(kopf.TemporaryError):
            await process.record_incident()
        assert process.desk.written_incidents == {}, "the effect is retried"
        cluster.denied.clear()
        await process.record_incident()
        assert cluster.names() == [INCIDENT.name]

    async def test_two_writers_do_not_overwrite_each_other(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await OperatorProcess(cluster).record_incident()
        outdated_view = await cluster.find(NODE_HISTORIES, "node-7")
        await OperatorProcess(cluster).record_incident(replace(INCIDENT, name="second"))
        find = cluster.find

        async def late(kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
            return outdated_view if kind is NODE_HISTORIES else await find(kind, name, namespace)

        monkeypatch.setattr(cluster, "find", late)
        with pytest.raises(Conflict):
            await OperatorProcess(cluster).record_incident(replace(INCIDENT, name="third"))
        monkeypatch.undo()
        await OperatorProcess(cluster).record_incident(replace(INCIDENT, name="third"))
        assert sorted(cluster.names()) == sorted([INCIDENT.name, "second", "third"])

    async def test_histories_of_nodes_outlive_a_deleted_job(self, cluster: Cluster) -> None:
        process, other = OperatorProcess(cluster), replace(INCIDENT, name="other", outcome=None)
        process.desk.cache.update(desired=build_training().desired.with_incident(INCIDENT).with_incident(other))
        await close_incidents(process.operator, process.desk)
        assert sorted(cluster.names()) == sorted([INCIDENT.name, "other"])


class TestUpkeep:
    async def test_histories_are_read_pruned_and_published(self, cluster: Cluster) -> None:
        await cluster.create(NODE_HISTORIES, self.build_body("node-1", 1, 2, 95))
        await cluster.create(NODE_HISTORIES, self.build_body("node-2", 91))
        process = OperatorProcess(cluster)
        process.operator.stores.nodes.update(
            {"metadata": {"name": "node-1", "uid": "uid-node-1", "resourceVersion": "1"}, "status": {}}
        )
        await process.operator.node_histories.clean_up()
        histories = {
            key[2]: NodeHistory.parse(body) for key, body in cluster.objects.items() if key[0] == "nodehistories"
        }
        assert {name: len(found.incidents) for name, found in histories.items()} == {"node-1": 2}
        assert list(process.operator.node_histories.unreliable_nodes) == ["node-1"]
        labels = {"node": "node-1", "kind": "Lost"}
        assert REGISTRY.get_sample_value("pacekeeper_node_incidents", labels) == 2
        await cluster.delete(NODE_HISTORIES, "node-1")  # a repair replaces the node, for example
        await process.operator.node_histories.clean_up()
        assert list(process.operator.node_histories.unreliable_nodes) == []
        assert REGISTRY.get_sample_value("pacekeeper_node_incidents", labels) is None

    async def test_without_the_definition_nothing_happens(self, cluster: Cluster) -> None:
        cluster.failures["nodehistories"] = [NotFound("the server could not find the requested resource")]
        await OperatorProcess(cluster).operator.node_histories.clean_up()

    async def test_a_history_that_cannot_be_pruned_does_not_block_the_others(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await cluster.create(NODE_HISTORIES, self.build_body("node-1", 95))
        await cluster.create(NODE_HISTORIES, self.build_body("node-2", 95))
        delete = cluster.delete

        async def refuse_one(kind: ResourceKind, name: str, namespace: str = "", **more: Any) -> None:
            if name == "node-1":
                raise Denied("forbidden")
            await delete(kind, name, namespace, **more)

        monkeypatch.setattr(cluster, "delete", refuse_one)
        await OperatorProcess(cluster).operator.node_histories.clean_up()
        assert [key[2] for key in cluster.objects if key[0] == "nodehistories"] == ["node-1"]

    def build_body(self, node: str, *days: float) -> Object:
        status = NodeHistoryStatus.from_incidents(build_history(*days).incidents)
        return {"metadata": {"name": node}, "spec": {"nodeUID": f"uid-{node}"}, "status": status.to_patch()}
