"""Quarantines on real nodes: what a user sees by kubectl, and an operator that is killed after any of its writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio import client, config

from pacekeeper_operator.api.incident import ObjectRef
from pacekeeper_operator.api.names import (
    FIELD_MANAGER_CONDITION,
    FIELD_MANAGER_CORDON,
    LABEL_NO_QUARANTINE,
    PAUSE_CONFIG_MAP,
    TAINT_QUARANTINE,
)
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict, Witness
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.nodes.node_suspicion import CONFIRMED_SUSPICION_HOLD_SECONDS
from pacekeeper_operator.kube.client import NODE_QUARANTINES, ApiConnection, HttpConnection, Object
from pacekeeper_operator.kube.client import Cluster as Api
from pacekeeper_operator.services.node_registry import NodeRegistry
from pacekeeper_operator.services.quarantine import (
    NodeAccusation,
    find_decision,
    raise_suspicion,
    reconcile_node,
    release_all,
    run_quarantine_loop,
)
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.effect_results import QuarantineDecision
from testcluster.images import OPERATOR_IMAGE
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for

pytestmark = pytest.mark.usefixtures("resources")

NODE, OTHER = "node-5", "node-6"
STAND_IN = "stand-in"  # a node without a machine
INCIDENT = ObjectRef("gpt-r3-gpu-error", "team-a")
HOUR = 3600.0
CONTROLLER_TAINT = "node.kubernetes.io/unschedulable"  # the node controller's own, at any cordon


class Killed(BaseException):
    """The operator is gone: nothing of it may catch this."""


class MortalApi(Api):
    """The API server of an operator that is killed right after its first write, or lives."""

    def __init__(self, connection: ApiConnection, *, lives: bool = False) -> None:
        super().__init__(connection)
        self.connection = connection
        self.lives = lives

    async def _call(self, method: str, path: str, *rest: Any, **named: Any) -> Object:
        answer = await super()._call(method, path, *rest, **named)
        if self.lives or method == "GET" or "/events" in path:  # who dies after these has done no more than before
            return answer
        raise Killed(f"after {method} {path}")


class At(OperatorRuntime):
    """A moment at which time stands still."""

    def __init__(self, moment: float) -> None:
        super().__init__()
        self.moment = moment

    def now(self) -> float:
        return self.moment


@pytest.fixture
async def api(cluster: KubectlCluster) -> AsyncIterator[MortalApi]:
    configuration = client.Configuration()
    await config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=str(cluster.kubeconfig), client_configuration=configuration
    )
    async with client.ApiClient(configuration) as connection:
        yield MortalApi(HttpConnection(connection), lives=True)


@pytest.fixture(scope="module")
def namespace(cluster: KubectlCluster) -> Iterator[str]:
    """For the probes of all tests."""
    with scratch_namespace(cluster) as name:
        yield name


@pytest.fixture
def settings(namespace: str) -> Settings:
    return Settings(namespace=namespace, image=OPERATOR_IMAGE, quarantine_mode=RemediationMode.ACT)


@pytest.fixture(autouse=True)
def untouched_nodes(cluster: KubectlCluster) -> Iterator[None]:
    """All changes of a test to its nodes are undone."""
    yield
    for name in (NODE, OTHER, STAND_IN):
        if cluster.get("nodequarantine", name) is None:
            continue
        cluster.kubectl("patch", "nq", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        cluster.kubectl("delete", "nq", name, "--ignore-not-found")
    if cluster.get("node", STAND_IN) is not None:
        cluster.kubectl("delete", "node", STAND_IN)
    for name in (NODE, OTHER):
        if list_taints(cluster, name) or is_cordoned(cluster, name):
            marks = '{"spec":{"taints":null,"unschedulable":null}}'
            cluster.kubectl("patch", "node", name, "--type=merge", "-p", marks)
        if LABEL_NO_QUARANTINE in cluster.get("node", name)["metadata"]["labels"]:
            cluster.kubectl("label", "node", name, f"{LABEL_NO_QUARANTINE}-")


def read_uid(cluster: KubectlCluster, node: str = NODE) -> str:
    return str(cluster.get("node", node)["metadata"]["uid"])


def list_taints(cluster: KubectlCluster, node: str = NODE) -> set[str]:
    return {taint["key"] for taint in cluster.get("node", node)["spec"].get("taints", ())} - {CONTROLLER_TAINT}


def is_cordoned(cluster: KubectlCluster, node: str = NODE) -> bool:
    return bool(cluster.get("node", node)["spec"].get("unschedulable"))


def is_held(cluster: KubectlCluster, node: str = NODE) -> bool:
    return TAINT_QUARANTINE in list_taints(cluster, node) and is_cordoned(cluster, node)


def is_ending(cluster: KubectlCluster) -> bool:
    found = cluster.get("nodequarantine", NODE)
    return found is None or "deletionTimestamp" in found["metadata"]


def is_free(cluster: KubectlCluster, node: str = NODE) -> bool:
    """Nothing of ours is left on it, not even in the fields that the API server keeps for itself."""
    managers = [entry["manager"] for entry in cluster.get("node", node)["metadata"]["managedFields"]]
    ours = {FIELD_MANAGER_CORDON, FIELD_MANAGER_CONDITION}.intersection(managers)
    return not ours and not list_taints(cluster, node) and not is_cordoned(cluster, node)


def list_events(cluster: KubectlCluster, node: str = NODE) -> dict[str, set[str]]:
    """Reason → kinds of the objects of its events."""
    about = [event for event in cluster.list("events.events.k8s.io") if event["regarding"]["name"] == node]
    return {e["reason"]: {o["regarding"]["kind"] for o in about if o["reason"] == e["reason"]} for e in about}


async def accuse_node(
    api: Api, cluster: KubectlCluster, settings: Settings, node: str = NODE, **changes: Any
) -> QuarantineDecision:
    """A job's suspicion, which a witness confirms unless `changes` set something else."""
    blame = NodeAccusation(node, read_uid(cluster, node), "XID 79", INCIDENT, time.time(), Witness.GPU_SERIES)
    return await raise_suspicion(NodeRegistry(api, OperatorRuntime(), settings), replace(blame, **changes))


async def reconcile_all(api: Api, settings: Settings, node: str = NODE, now: float | None = None) -> None:
    """Reconcile until there is nothing left to do now; `now` stands still."""
    moment = time.time() if now is None else now
    async with asyncio.timeout(60):
        while await reconcile_node(NodeRegistry(api, At(moment), settings), node) <= 1:  # noqa: ASYNC110  # no event: other processes act
            await asyncio.sleep(0.2)


async def hold_node(api: Api, cluster: KubectlCluster, settings: Settings, node: str = NODE) -> None:
    await accuse_node(api, cluster, settings, node)
    await reconcile_all(api, settings, node, time.time() + CONFIRMED_SUSPICION_HOLD_SECONDS)
    assert is_held(cluster, node)
    assert (await accuse_node(api, cluster, settings, node)).verdict is QuarantineVerdict.QUARANTINED


def create_manually(cluster: KubectlCluster, node: str = NODE, **spec: Any) -> None:
    body = {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "NodeQuarantine",
        "metadata": {"name": node},
        "spec": {"reason": "noisy fan"} | spec,
    }
    cluster.apply(body)


def create_stand_in(cluster: KubectlCluster) -> str:
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": STAND_IN}})
    return read_uid(cluster, STAND_IN)


class TestLife:
    async def test_from_creation_to_three_passed_probes(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        found = cluster.get("nodequarantine", NODE)
        assert found["spec"]["nodeUID"] == read_uid(cluster)
        assert found["spec"]["incidentRef"] == {"namespace": "team-a", "name": "gpt-r3-gpu-error"}
        assert (found["status"]["phase"], found["status"]["previouslyCordoned"]) == ("Active", False)
        assert list_events(cluster)["NodeQuarantined"] >= {"Node", "NodeQuarantine"}

        expiry = time.time() + HOUR + CONFIRMED_SUSPICION_HOLD_SECONDS + 1
        await reconcile_all(api, settings, now=expiry)
        (first,) = cluster.get("nodequarantine", NODE)["status"]["probes"]
        assert first["passed"], first
        assert len(first["metrics"]["links"]) == 2, "the routes to both nodes of its probe group"
        await reconcile_all(api, settings, now=expiry + 10)
        assert is_held(cluster)
        await reconcile_all(api, settings, now=expiry + 20)

        assert is_free(cluster), cluster.get("nodequarantine", NODE)["status"]
        assert cluster.get("nodequarantine", NODE) is None
        assert list_events(cluster)["ProbePassed"] >= {"Node", "NodeQuarantine"}
        assert not cluster.list("pods", settings.namespace)

    async def test_a_probe_without_an_image_keeps_the_node(
        self, api: Api, cluster: KubectlCluster, namespace: str
    ) -> None:
        settings = Settings(
            namespace=namespace, image="pacekeeper.dev/no-such-image:dev", quarantine_mode=RemediationMode.ACT
        )
        await hold_node(api, cluster, settings)
        expiry = time.time() + HOUR + CONFIRMED_SUSPICION_HOLD_SECONDS + 1
        for seconds in (0, 11, 21):  # the two that keep it company have no image either, and are done without
            await reconcile_node(NodeRegistry(api, At(expiry + seconds), settings), NODE)

        def waits() -> bool:
            pods = [pod for pod in cluster.list("pods", namespace) if pod["spec"]["nodeName"] == NODE]
            return any("ImagePull" in json.dumps(pod["status"]) for pod in pods)

        wait_for(waits, 120, "a probe pod without an image")
        await reconcile_all(api, settings, now=expiry + 61)

        status = cluster.get("nodequarantine", NODE)["status"]
        assert status["phase"] == "Active"
        assert "was inconclusive: did not end within 60 s" in status["message"]
        assert "image" in status["probes"][0]["message"].lower()
        assert status["probes"][0]["inconclusive"] == "Image"
        assert is_held(cluster)
        assert not cluster.list("pods", namespace)

    async def test_deletion_releases_the_node(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        await hold_node(api, cluster, settings)
        cluster.kubectl("delete", "nodequarantine", NODE, "--wait=false")
        assert is_held(cluster)  # the finalizer guarantees that the marks are removed first
        await reconcile_all(api, settings)
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE) is None

    async def test_a_quarantine_waits_for_approval(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        approving = replace(settings, quarantine_mode=RemediationMode.RECOMMEND)
        await accuse_node(api, cluster, approving)
        await reconcile_all(api, approving, now=time.time() + CONFIRMED_SUSPICION_HOLD_SECONDS)
        assert (await accuse_node(api, cluster, approving)).verdict is QuarantineVerdict.AWAITS_APPROVAL
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE)["status"]["phase"] == "Pending"
        assert "cordoned and tainted" in cluster.run_cli("approve", NODE, "--yes")
        await reconcile_all(api, settings)
        assert is_held(cluster)

    async def test_the_loop_follows_changes_by_users(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        registry = NodeRegistry(api, OperatorRuntime(), settings)
        loop = asyncio.create_task(run_quarantine_loop(registry))

        async def within_seconds(condition: Callable[[], bool]) -> None:
            await registry.refresh()  # instead of a watch
            await asyncio.to_thread(wait_for, condition, 120, "what the user requested")

        create_manually(cluster, approved=True)
        await within_seconds(lambda: is_held(cluster))
        released = asyncio.create_task(asyncio.to_thread(cluster.run_cli, "release", NODE, "--yes"))
        await asyncio.to_thread(wait_for, lambda: is_ending(cluster), 120, "the user has requested it")
        await within_seconds(lambda: is_free(cluster) and cluster.get("nodequarantine", NODE) is None)
        assert "is released" in await released
        loop.cancel()


class TestOthers:
    """The node also has taints of others."""

    async def test_an_earlier_cordon_stays(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        cluster.kubectl("cordon", NODE)
        await hold_node(api, cluster, settings)
        assert cluster.get("nodequarantine", NODE)["status"]["previouslyCordoned"] is True
        cluster.kubectl("delete", "nodequarantine", NODE, "--wait=false")
        await reconcile_all(api, settings)
        assert is_cordoned(cluster)
        assert not list_taints(cluster)

    async def test_a_cordon_that_others_apply_during_the_quarantine_stays(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        cordon = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"unschedulable": True}}
        cluster.kubectl("apply", "--server-side", "--field-manager=maintenance", "-f", "-", stdin=json.dumps(cordon))
        await reconcile_all(api, settings)
        assert cluster.get("nodequarantine", NODE)["status"]["previouslyCordoned"] is True
        cluster.kubectl("delete", "nodequarantine", NODE, "--wait=false")
        await reconcile_all(api, settings)
        assert is_cordoned(cluster)

    async def test_removed_marks_are_restored(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        await hold_node(api, cluster, settings)
        cluster.kubectl("uncordon", NODE)
        assert not is_cordoned(cluster)
        await reconcile_all(api, settings)
        assert is_held(cluster)
        cluster.kubectl("taint", "node", NODE, f"{TAINT_QUARANTINE}-")
        await reconcile_all(api, settings)
        assert is_held(cluster)
        assert "QuarantineRestored" in list_events(cluster)

    async def test_taints_of_others_stay(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        cluster.kubectl("taint", "node", NODE, "before=1:NoSchedule")
        await hold_node(api, cluster, settings)
        cluster.kubectl("taint", "node", NODE, "meanwhile=1:NoSchedule")
        assert list_taints(cluster) == {"before", TAINT_QUARANTINE, "meanwhile"}
        cluster.kubectl("delete", "nodequarantine", NODE, "--wait=false")
        await reconcile_all(api, settings)
        assert list_taints(cluster) == {"before", "meanwhile"}

    async def test_opting_out_releases_the_node(self, api: Api, cluster: KubectlCluster, settings: Settings) -> None:
        await hold_node(api, cluster, settings)
        cluster.kubectl("label", "node", NODE, "pacekeeper.dev/no-quarantine=")
        await reconcile_all(api, settings)
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE) is None
        assert (await accuse_node(api, cluster, settings)).verdict is QuarantineVerdict.OPTED_OUT


class TestSuspicion:
    async def test_a_probe_pod_clears_a_node_that_a_job_blames(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await accuse_node(api, cluster, settings, witness=Witness.NONE)
        await reconcile_all(api, settings)
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE)["status"]["phase"] == "Cleared"
        assert list_events(cluster)["NodeCleared"] >= {"Node", "NodeQuarantine"}
        assert not cluster.list("pods", settings.namespace)
        await reconcile_all(api, settings, now=time.time() + HOUR)
        assert cluster.get("nodequarantine", NODE) is None

    async def test_a_node_without_a_machine_is_confirmed_by_its_condition(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        create_stand_in(cluster)
        await accuse_node(api, cluster, settings, STAND_IN, witness=Witness.NONE)
        await reconcile_all(api, settings, STAND_IN, time.time() + CONFIRMED_SUSPICION_HOLD_SECONDS)
        assert is_held(cluster, STAND_IN)
        conditions = cluster.get("nodequarantine", STAND_IN)["status"]["conditions"]
        assert {c["type"]: c["reason"] for c in conditions} == {
            "Witnessed": "NodeCondition",
            "Quarantined": "Quarantined",
        }


class TestNodesThatGo:
    @pytest.mark.parametrize("deleted", [False, True])
    async def test_the_quarantine_of_a_deleted_node_is_removed(
        self, api: Api, cluster: KubectlCluster, settings: Settings, deleted: bool
    ) -> None:
        create_stand_in(cluster)
        await hold_node(api, cluster, settings, STAND_IN)
        cluster.kubectl("delete", "node", STAND_IN)
        if deleted:
            cluster.kubectl("delete", "nodequarantine", STAND_IN, "--wait=false")
        await reconcile_all(api, settings, STAND_IN)
        assert cluster.get("nodequarantine", STAND_IN) is None

    async def test_a_node_that_is_deleted_between_read_and_release_is_no_error(
        self, api: MortalApi, cluster: KubectlCluster, settings: Settings
    ) -> None:
        """Server-side apply creates what does not exist: a release must not bring the node back."""
        create_stand_in(cluster)
        await hold_node(api, cluster, settings, STAND_IN)
        cluster.kubectl("taint", "node", STAND_IN, f"{TAINT_QUARANTINE}-")
        cluster.kubectl("delete", "nodequarantine", STAND_IN, "--wait=false")

        class LateApi(MortalApi):
            async def apply(self, *arguments: Any, **named: Any) -> Object:
                cluster.kubectl("delete", "node", STAND_IN)
                return await super().apply(*arguments, **named)

        await reconcile_all(LateApi(api.connection, lives=True), settings, STAND_IN)
        assert cluster.get("nodequarantine", STAND_IN) is None
        assert cluster.get("node", STAND_IN) is None

    async def test_another_node_of_the_same_name_is_not_touched(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        old = create_stand_in(cluster)
        await hold_node(api, cluster, settings, STAND_IN)
        cluster.kubectl("delete", "node", STAND_IN)
        assert create_stand_in(cluster) != old
        assert (await accuse_node(api, cluster, settings, STAND_IN)).verdict is QuarantineVerdict.RELEASING
        await reconcile_all(api, settings, STAND_IN)
        assert cluster.get("nodequarantine", STAND_IN) is None
        assert TAINT_QUARANTINE not in list_taints(cluster, STAND_IN)
        assert not is_cordoned(cluster, STAND_IN)
        assert (await accuse_node(api, cluster, settings, STAND_IN, uid=old)).verdict is QuarantineVerdict.UNKNOWN_NODE


class TestLimits:
    async def test_the_budget_admits_one_of_many_quarantines(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await asyncio.gather(*(accuse_node(api, cluster, settings, node) for node in (NODE, OTHER)))
        for node in (NODE, OTHER):
            await reconcile_all(api, settings, node, time.time() + CONFIRMED_SUSPICION_HOLD_SECONDS)
        assert is_held(cluster)
        assert is_free(cluster, OTHER)
        refused = await find_decision(NodeRegistry(api, OperatorRuntime(), Settings()), OTHER, read_uid(cluster, OTHER))
        assert refused is not None
        assert refused.verdict is QuarantineVerdict.BUDGET_SPENT
        assert "1 of 6 nodes" in refused.message

    async def test_quarantines_by_users_are_not_bound_by_the_budget(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        flagging = replace(settings, repair_condition="PacekeeperFaulty")
        await hold_node(api, cluster, settings)
        create_manually(cluster, OTHER, approved=True)
        await reconcile_all(api, flagging, OTHER)
        conditions = {one["type"]: one for one in cluster.get("node", OTHER)["status"]["conditions"]}
        assert {"Ready", "PacekeeperFaulty"} <= conditions.keys(), "the kubelet's conditions stay"
        assert (conditions["PacekeeperFaulty"]["status"], conditions["PacekeeperFaulty"]["reason"]) == (
            "True",
            "Person",
        )
        assert is_held(cluster, OTHER)
        cluster.kubectl("delete", "nodequarantine", OTHER, "--wait=false")
        await reconcile_all(api, flagging, OTHER)
        assert is_free(cluster, OTHER), "of that condition, too"

    async def test_the_pause_stops_new_quarantines_but_no_release(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        cluster.kubectl("create", "configmap", PAUSE_CONFIG_MAP, "--namespace", settings.namespace)
        try:
            assert (await accuse_node(api, cluster, settings, OTHER)).verdict is QuarantineVerdict.PAUSED
            assert cluster.get("nodequarantine", OTHER) is None
            cluster.kubectl("delete", "nodequarantine", NODE, "--wait=false")
            await reconcile_all(api, settings)
            assert is_free(cluster)
        finally:
            cluster.kubectl("delete", "configmap", PAUSE_CONFIG_MAP, "--namespace", settings.namespace)


class TestReleaseAll:
    async def test_release_all_works_without_an_operator(
        self, api: Api, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        create_manually(cluster, OTHER, approved=True)
        await reconcile_all(api, settings, OTHER)
        cluster.kubectl("patch", "nq", OTHER, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        cluster.kubectl("delete", "nq", OTHER)
        assert is_held(cluster, OTHER)  # a user has forced the deletion: only the node itself has the marks

        await release_all(api, OperatorRuntime(), 30, settings)

        assert is_free(cluster)
        assert is_free(cluster, OTHER)
        assert "PacekeeperFaulty" not in {one["type"] for one in cluster.get("node", OTHER)["status"]["conditions"]}
        assert not cluster.list("nodequarantines")

    async def test_release_all_names_the_nodes_that_are_left(self, api: Api, cluster: KubectlCluster) -> None:
        create_manually(cluster)
        keep = '{"metadata":{"finalizers":["example.com/keeps-it"]}}'
        cluster.kubectl("patch", "nq", NODE, "--type=merge", "-p", keep)
        with pytest.raises(TimeoutError, match=f"not released within 2 s: {NODE}"):
            await release_all(api, OperatorRuntime(), 2)


Stage = Callable[[Api, Settings], Awaitable[None]]


async def expire_quarantine(api: Api, settings: Settings) -> None:
    await reconcile_all(
        api, replace(settings, release_probes=1), now=time.time() + HOUR + CONFIRMED_SUSPICION_HOLD_SECONDS + 1
    )


class TestKilled:
    """After each write; the next operator goes on, and is killed after its first one."""

    async def test_while_it_holds_the_node(self, api: MortalApi, cluster: KubectlCluster, settings: Settings) -> None:
        def stage(mortal: Api, settings: Settings) -> Awaitable[None]:
            return hold_node(mortal, cluster, settings)

        assert await count_writes_until_done(api, settings, stage) == 5
        status = cluster.get("nodequarantine", NODE)["status"]
        assert (status["phase"], status["previouslyCordoned"]) == ("Active", False)

    async def test_while_it_releases_a_node_whose_quarantine_is_deleted(
        self, api: MortalApi, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        await api.delete(NODE_QUARANTINES, NODE)
        assert await count_writes_until_done(api, settings, reconcile_all) == 3
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE) is None

    async def test_while_it_releases_a_node_whose_quarantine_has_expired(
        self, api: MortalApi, cluster: KubectlCluster, settings: Settings
    ) -> None:
        await hold_node(api, cluster, settings)
        assert await count_writes_until_done(api, settings, expire_quarantine) == 13
        assert is_free(cluster)
        assert cluster.get("nodequarantine", NODE) is None


async def count_writes_until_done(api: MortalApi, settings: Settings, stage: Stage) -> int:
    """How many operators die in `stage`, each right after its first write, until one finds nothing left to write."""
    for died in itertools.count():
        try:
            await stage(MortalApi(api.connection), settings)
        except Killed:
            continue
        return died
    raise AssertionError("unreachable: count does not end")
