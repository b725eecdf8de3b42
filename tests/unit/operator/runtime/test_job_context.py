"""A pass's surroundings: under which rules, when the next one comes, what is said and how often, and how a job ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.conditions import Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import (
    CleanPodPolicy,
    JobPhase,
    RemediationMode,
    RequestedSyncMode,
    RunPolicySpec,
)
from pacekeeper_operator.decide.effects import DeletePod, RequestQuarantine
from pacekeeper_operator.kube.client import EVENTS, INCIDENT_OBJECTS, PODS, TRAINING_JOBS, ObjectRejected
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry, WorkerContact
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime import job_state
from pacekeeper_operator.runtime import reconcile as reconciling
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import (
    IDLE_PASS_INTERVAL_SECONDS,
    MAX_IDLE_PASSES_PER_SECOND,
    MAX_STATUSES_PER_SECOND,
    MIN_STATUS_INTERVAL_SECONDS,
    PASS_INTERVAL_JITTER,
    STATUS_INTERVAL_JITTER,
    build_policy,
    clean_up,
    close_incidents,
    create_job_context,
    reconcile_job,
)
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.shared.node_priority import NODE_PRIORITY_THRESHOLD
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import (
    NOW,
    build_crash,
    build_fresh,
    build_job,
    build_remediation,
    build_training,
    change_heartbeat,
    change_members,
)


class Patched(FakeCluster):
    """One that counts what is said of jobs, and how pods are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[dict[str, Any]] = []
        self.graces: dict[str, int | None] = {}

    async def patch(self, kind: Any, name: str, body: Any, namespace: str = "", **named: Any) -> Any:
        if kind is TRAINING_JOBS:
            self.said.append(body["status"])
        return await super().patch(kind, name, body, namespace, **named)

    async def delete(
        self, kind: Any, name: str, namespace: str = "", *, grace: int | None = None, **named: Any
    ) -> None:
        if kind is PODS:
            self.graces[name] = grace
        await super().delete(kind, name, namespace, **named)


class Place:
    """An operator that knows what there is, at one job. Time stands still unless it is moved."""

    def __init__(self, world: Observation, settings: Settings | None = None) -> None:
        self.cluster, self.world, self.runtime = Patched(), world, FixedTimeRuntime()
        settings = settings or Settings(network_policies=False)
        prometheus = PrometheusClient("", "", "")
        self.operator = Operator(
            settings, self.cluster, JobRegistry(0.0), INSTALLATION, prometheus, self.runtime, paused=""
        )
        self.desk: JobContext

    async def open(self) -> Place:
        await store_job(self.cluster, self.world)
        for view in self.world.cluster_view.nodes.values():
            status = {"conditions": [{"type": "Ready", "status": "True" if view.ready else "False"}]}
            self.cluster._store(
                ("nodes", "", view.name), {"metadata": {"name": view.name, "uid": view.uid}, "status": status}
            )
        await self.operator.stores.pods.refresh(self.cluster, ())
        await self.operator.stores.nodes.refresh(self.cluster, ())
        self.desk = create_job_context(self.operator, self.world.job, {})
        for member in self.world.workers:
            if member.heartbeat is not None:
                self.desk.cache.contacts[member.name] = WorkerContact(member.heartbeat, NOW, open_polls=1)
        return self

    def condition(self, name: str) -> str:
        """Its reason, as it was said last."""
        return next(str(one["reason"]) for one in self.cluster.said[-1]["conditions"] if one["type"] == name)

    async def step(self) -> float:
        pause = await reconcile_job(self.operator, self.desk)
        await self.desk.effect_runner.wait_until_idle()
        await self.operator.stores.pods.refresh(self.cluster, ())
        for _ in range(3):  # figures are written beside the pass, and this API server answers at once
            await asyncio.sleep(0)
        return pause


async def at(world: Observation, settings: Settings | None = None) -> Place:
    return await Place(world, settings).open()


class TestPolicy:
    @pytest.mark.parametrize("own", [RemediationMode.ACT, RemediationMode.RECOMMEND])
    @pytest.mark.parametrize("cap", [RemediationMode.ACT, RemediationMode.RECOMMEND])
    async def test_a_job_acts_only_where_both_it_and_the_platform_say_so(
        self, own: RemediationMode, cap: RemediationMode
    ) -> None:
        place = Place(build_training(), Settings(mode=cap))
        wish = build_job(remediation=build_remediation(mode=own))
        assert (build_policy(place.operator, wish).mode is RemediationMode.ACT) is (own is cap is RemediationMode.ACT)


class TestPause:
    """Seconds until the next pass, if nothing wakes it before."""

    async def test_a_job_that_trains_is_looked_at_with_prometheus(self) -> None:
        place = await at(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        assert await place.step() == 3.0

    async def test_many_that_train_wait_for_each_other(self) -> None:
        place = await at(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        place.operator.passes.active_jobs = 1000
        pauses = [await place.step() for _ in range(20)]
        mean = 1000 / MAX_IDLE_PASSES_PER_SECOND
        assert (
            (1 - PASS_INTERVAL_JITTER) * mean <= min(pauses) < mean < max(pauses) <= (1 + PASS_INTERVAL_JITTER) * mean
        ), "and they part"

    async def test_one_of_thousands_of_workers_is_not_looked_at_all_the_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reconciling, "MAX_CHECKED_WORKERS_PER_SECOND", 1.0)  # of its four
        place = await at(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        pauses = [await place.step() for _ in range(20)]
        assert (1 - PASS_INTERVAL_JITTER) * 4.0 <= min(pauses) < 4.0 < max(pauses) <= (1 + PASS_INTERVAL_JITTER) * 4.0
        place.desk.cache.contacts["j-w1-0"].is_cut_off = True
        assert await place.step() == 3.0, "there is news"

    async def test_but_not_one_of_which_there_is_news(self) -> None:
        """A worker whose poll has ended; an incident that is open."""
        place = await at(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        place.operator.passes.active_jobs = 1000
        contact = place.desk.cache.contacts["j-w1-0"]
        contact.open_polls, contact.last_seen_at = 0, NOW - 2.9
        assert await place.step() > 10.0, "its next one is on its way"
        contact.is_cut_off = True
        assert await place.step() == 3.0
        contact.is_cut_off = False
        contact.last_seen_at = NOW - 3.1
        assert await place.step() == 3.0
        opened = Incident(
            "slow",
            IncidentCause.STRAGGLER,
            IncidentClass.PERFORMANCE,
            1,
            "m",
            NOW - 9,
            NOW - 8,
            NOW - 7,
            remedy="Rebalance",
            live=True,
        )
        world = build_training()
        place = await at(world.with_desired(world.desired.with_incidents(current=(opened,))))
        place.operator.passes.active_jobs = 1000
        assert await place.step() <= place.operator.settings.sample_seconds

    async def test_nor_one_that_a_new_operator_does_not_hear_whole_once_its_grace_is_over(self) -> None:
        place = await at(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        place.operator.passes.active_jobs = 1000
        await place.step()
        place.operator.jobs.started_at = NOW - 4.0
        del place.desk.cache.contacts["j-w1-0"]
        assert await place.step() == place.operator.settings.grace_after_start - 4.0

    async def test_one_that_recovers_or_has_news_soon(self) -> None:
        place = await at(change_members(build_training(), start={"first_step_at": None}))
        assert await place.step() == 0.5
        assert place.desk.cache.phase is JobPhase.RECOVERING
        place = await at(build_training())
        place.desk.cache.faults.add(replace(build_crash("j-w1-0", 1), noticed_at=NOW), workers=5)
        assert await place.step() == 0.5

    async def test_one_that_is_suspended_when_pods_still_leave_or_hardly_ever(self) -> None:
        world = build_training(job=build_job(suspend=True))
        place = await at(world)
        await place.step()
        place.runtime.passed = 3.0
        assert await place.step() == 5.0
        for key in [key for key in place.cluster.objects if key[0] == "pods"]:
            del place.cluster.objects[key]
        await place.operator.stores.pods.refresh(place.cluster, ())
        place.desk.cache.contacts.clear()
        await place.step()
        assert await place.step() == IDLE_PASS_INTERVAL_SECONDS

    @pytest.mark.parametrize(("ttl", "after", "pause"), [(None, 0, 5.0), (8, 5, 3.0), (8, 7.9, 0.5), (600, 0, 5.0)])
    async def test_one_that_is_over_when_its_time_is(self, ttl: int | None, after: float, pause: float) -> None:
        """Its pods still run."""
        keeps = RunPolicySpec(ttl_seconds_after_finished=ttl, clean_pod_policy=CleanPodPolicy.NONE)
        world = build_training(job=build_job(run_policy=keeps))
        world = world.with_desired(world.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        place = await at(world)
        place.runtime.passed = after
        assert await place.step() == pytest.approx(pause, abs=0.05)

    async def test_and_hardly_ever_once_its_pods_have_ended(self) -> None:
        world = build_training()
        world = world.with_desired(world.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        place = await at(world)
        for (plural, _, _), body in place.cluster.objects.items():
            if plural == "pods":
                body["status"]["phase"] = "Succeeded"
                body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 100)
        place.cluster.version += 200
        await place.operator.stores.pods.refresh(place.cluster, ())
        assert await place.step() == IDLE_PASS_INTERVAL_SECONDS


class TestSaid:
    async def test_figures_now_and_then_and_conditions_at_once(self) -> None:
        place = await at(build_training())
        await place.step()
        first = len(place.cluster.said)
        for _ in range(3):
            await place.step()
        assert len(place.cluster.said) == first, "nothing has changed"
        contact = place.desk.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        place.runtime.passed = MIN_STATUS_INTERVAL_SECONDS - 1
        await place.step()
        assert len(place.cluster.said) == first
        place.runtime.passed = (1 + STATUS_INTERVAL_JITTER) * MIN_STATUS_INTERVAL_SECONDS
        await place.step()
        assert len(place.cluster.said) == first + 1
        place.operator.paused = "maintenance"
        await place.step()
        assert len(place.cluster.said) == first + 2

    async def test_figures_are_not_said_anew_only_because_the_operator_is(self) -> None:
        """A thousand jobs that all did would have a new operator wait for the API server."""
        place = await at(build_training())
        await place.step()
        contact = place.desk.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        status, said = place.cluster.said[-1], len(place.cluster.said)
        place.desk = create_job_context(place.operator, place.world.job, {**place.desk.body, "status": status})
        await place.step()
        assert len(place.cluster.said) == said
        place.runtime.passed = (1 + STATUS_INTERVAL_JITTER) * MIN_STATUS_INTERVAL_SECONDS
        await place.step()
        assert len(place.cluster.said) == said + 1

    async def test_what_is_as_before_again_while_it_is_written_is_written_once_more(self) -> None:
        """Or the status would stay what it was only for a moment."""
        place = await at(build_training())
        await place.step()
        slow, patch = asyncio.Event(), place.cluster.patch

        async def slowly(*what: Any, **named: Any) -> Any:
            await slow.wait()
            return await patch(*what, **named)

        place.cluster.patch = slowly  # type: ignore[method-assign]
        place.operator.paused = "maintenance"
        await place.step()
        place.operator.paused = ""
        await place.step()
        place.desk.cache.wake.clear()
        slow.set()
        await asyncio.wait_for(place.desk.cache.wake.wait(), 60)
        assert place.condition("Degraded") == Reason.PAUSED
        await place.step()
        assert place.condition("Degraded") != Reason.PAUSED

    async def test_one_whose_writing_has_failed_is_written_though_it_is_as_before(self) -> None:
        """The API server may have carried it out, and its answer was lost."""
        place = await at(build_training())
        await place.step()
        said, patch = len(place.cluster.said), place.cluster.patch

        async def fail(*_: Any, **__: Any) -> Any:
            raise kopf.TemporaryError("no answer")

        place.cluster.patch = fail  # type: ignore[method-assign]
        place.operator.paused = "maintenance"
        await place.step()
        place.operator.paused, place.cluster.patch = "", patch  # type: ignore[method-assign]
        await asyncio.wait_for(place.desk.cache.wake.wait(), 60)
        await place.step()
        assert len(place.cluster.said) == said + 1

    async def test_figures_of_many_jobs_more_seldom(self) -> None:
        place = await at(build_training())
        place.operator.passes.active_jobs = 1000
        await place.step()
        first = len(place.cluster.said)
        contact = place.desk.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        for passed, said in (
            (MIN_STATUS_INTERVAL_SECONDS, first),
            ((1 + STATUS_INTERVAL_JITTER) * 1000 / MAX_STATUSES_PER_SECOND, first + 1),
        ):
            place.runtime.passed = passed
            await place.step()
            assert len(place.cluster.said) == said

    async def test_what_is_not_written_is_not_said(self) -> None:
        place = await at(build_training())
        await place.step()
        await place.cluster.delete(PODS, "j-w1-0", "ns")
        await place.operator.stores.pods.refresh(place.cluster, ())
        place.cluster.refusals["trainingjobstates"] = [ObjectRejected("etcdserver: request is too large")]
        with pytest.raises(ObjectRejected):
            await reconcile_job(place.operator, place.desk)
        assert place.condition("Recovering") == Reason.NO_INCIDENT, "it is not written, so it is not so"
        await reconcile_job(place.operator, place.desk)
        await place.desk.effect_runner.wait_until_idle()
        assert place.condition("Recovering") == Reason.INCIDENT_OPEN

    async def test_a_change_of_mode_is_an_event_and_nothing_else_of_the_plan_is(self) -> None:
        world = build_training(job=build_job(sync_mode=RequestedSyncMode.EDIT))
        place = await at(world)
        await place.step()
        await place.step()
        (event,) = (body for key, body in place.cluster.objects.items() if key[0] == EVENTS.plural)
        assert (event["reason"], event["note"]) == ("SyncModeChanged", "Sync → EDiT: spec.syncMode is EDiT")
        assert place.desk.cache.desired is not None
        version = place.desk.cache.desired.plan.version
        place.desk.job = replace(place.desk.job, spec=replace(place.desk.job.spec, replicas=3))
        await place.step()
        assert place.desk.cache.desired.plan.version > version
        assert len([key for key in place.cluster.objects if key[0] == EVENTS.plural]) == 1


class TestSwept:
    """Incidents that are over, and whose end is written in the cluster, need no bookkeeping any more."""

    def over(self, name: str = "i") -> Incident:
        known = Incident(
            name, IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW - 9, NOW - 8, NOW - 7, applied=NOW - 7
        )
        return replace(known, outcome=IncidentOutcome.RECOVERED, recovered=NOW - 1)

    async def test_once_they_are_written(self) -> None:
        world = build_training()
        place = await at(world.with_desired(world.desired.with_incident(self.over())))
        await place.step()
        assert place.desk.written_incidents.keys() == {"i"}
        await place.step()
        assert place.desk.cache.desired is not None
        assert place.desk.cache.desired.state.incidents.current == ()
        assert place.desk.written_incidents == {}
        assert len([key for key in place.cluster.objects if key[0] == INCIDENT_OBJECTS.plural]) == 1

    async def test_one_that_blames_a_node_stays_until_it_is_known_what_became_of_that(self) -> None:
        world = build_training()
        wanted = QuarantineRequest("node-9", "nobody's", "why", "blaming", at=NOW)
        draft = world.desired.with_incident(self.over("blaming")).with_incident(self.over())
        place = await at(world.with_desired(draft.with_incidents(quarantine_requests=(wanted,))))
        await place.step()
        assert place.desk.written_incidents.keys() == {"blaming", "i"}
        await place.step()
        assert place.desk.written_incidents.keys() == {"blaming"}, "its ruling is written first"
        for _ in range(3):
            await place.step()
        assert place.desk.written_incidents == {}

    async def test_an_open_one_stays(self) -> None:
        world = change_members(build_training(), start={"first_step_at": None})
        open_ = replace(self.over(), outcome=None, recovered=None)
        place = await at(world.with_desired(world.desired.with_incident(open_)))
        for _ in range(3):
            await place.step()
        assert place.desk.cache.desired is not None
        assert place.desk.cache.desired.state.incidents.open == (open_,)
        assert place.desk.written_incidents == {"i": open_}


class TestDeleted:
    async def test_pods_that_nothing_takes_along_go_with_their_grace(self) -> None:
        place = await at(build_training(2, 1))
        place.desk.cache.update(desired=build_training(2, 1).desired)
        assert not await clean_up(place.operator, place.desk)
        assert place.cluster.graces == {"j-w0-0": None, "j-w1-0": None, "j-w2-0": None}
        assert await clean_up(place.operator, place.desk)

    @pytest.mark.parametrize("why", ["not ready", "no such node", "overdue", "by force"])
    async def test_what_nobody_will_confirm_is_struck_off(self, why: str) -> None:
        world = build_training(2, 0)
        draft = world.desired
        nodes = dict(world.cluster_view.nodes)
        if why == "not ready":
            nodes["node-1"] = replace(nodes["node-1"], ready=False)
        elif why == "no such node":
            del nodes["node-1"]
        elif why == "by force":
            draft = draft.with_worker(replace(draft.state.placement.workers[1], force=True))
        place = await at(replace(world, cluster_view=replace(world.cluster_view, nodes=nodes)))
        place.desk.cache.update(desired=draft)
        for (plural, _, name), body in place.cluster.objects.items():
            if plural == "pods":
                late = why == "overdue" and name == "j-w1-0"
                body["metadata"]["finalizers"] = ["somebody's"]
                body["metadata"]["deletionTimestamp"] = "1970-01-01T00:00:00Z" if late else "2200-01-01T00:00:00Z"
        assert not await clean_up(place.operator, place.desk)
        assert place.cluster.graces == {"j-w1-0": 0}, "the other one is going already"

    async def test_a_pod_that_was_never_placed_is_on_no_lost_node(self) -> None:
        world = build_training(1, 0)
        world = world.with_desired(world.desired.with_worker(replace(world.state.placement.workers[0], node="")))
        place = await at(world)
        assert not await clean_up(place.operator, place.desk)
        assert place.cluster.graces == {"j-w0-0": None}

    async def test_open_incidents_are_closed_and_others_keep_their_outcome(self) -> None:
        swept = TestSwept()
        world = build_training()
        draft = world.desired.with_incident(swept.over()).with_incident(replace(swept.over("open"), outcome=None))
        place = await at(world.with_desired(draft))
        await close_incidents(place.operator, place.desk)
        found = {key[2]: body for key, body in place.cluster.objects.items() if key[0] == INCIDENT_OBJECTS.plural}
        assert {name: body["status"]["outcome"] for name, body in found.items()} == {
            "i": "Recovered",
            "open": "Superseded",
        }

    async def test_of_a_job_of_which_nothing_was_ever_written_nothing_is_closed(self) -> None:
        place = Place(build_fresh())
        place.desk = create_job_context(place.operator, build_fresh().job, {})
        await close_incidents(place.operator, place.desk)
        assert place.cluster.objects == {}


async def test_what_somebody_else_has_written_is_read_before_the_next_pass() -> None:
    place = await at(build_training())
    await place.step()
    memory = place.desk.cache
    assert memory.desired is not None
    other = JobCache(place.world.job)
    await job_state.load_state(place.cluster, place.world.job, other)
    await job_state.write_state(
        place.cluster, place.world.job, other, memory.desired.with_lifecycle(completed_at=NOW - 1)
    )
    memory.resource_version = ""
    await place.step()
    assert memory.desired.state.lifecycle.completed_at == NOW - 1


async def test_a_new_spare_prefers_nodes_without_incidents() -> None:
    """From what the operator has read of all nodes to the pod that the API server gets."""
    place = await at(build_training())
    del place.cluster.objects["pods", "ns", "j-w4-0"]
    await place.operator.stores.pods.refresh(place.cluster, ())
    place.operator.node_histories.unreliable_nodes = ("node-9",)
    await reconcile_job(place.operator, place.desk)
    await place.desk.effect_runner.wait_until_idle()
    body = place.cluster.objects["pods", "ns", "j-w4-1"]
    (wish,) = body["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (requirement,) = wish["preference"]["matchFields"]
    assert (requirement["operator"], requirement["values"]) == ("NotIn", ["node-9"])


class TestNodesFirst:
    @pytest.mark.parametrize("waiting", [NODE_PRIORITY_THRESHOLD - 1, NODE_PRIORITY_THRESHOLD])
    async def test_where_very_many_wait_to_be_held_all_else_waits_for_them(self, waiting: int) -> None:
        place = await at(build_training(replicas=2))
        node = next(iter(place.world.cluster_view.nodes.values()))
        wanted = QuarantineRequest(node.name, node.uid, "it shows an XID", "incident", at=NOW)
        place.operator.node_registry.priority_gate.set_backlog(waiting)
        await place.desk.effect_runner.submit([RequestQuarantine(wanted), DeletePod("j-w0-0", "u-w0")])
        assert place.cluster.objects.get(("nodequarantines", "", node.name)) is not None
        assert place.desk.cache.results.quarantine_decisions[wanted.node_key].recorded, (
            "who deletes it now has ended it"
        )
        assert ("j-w0-0" in place.cluster.graces) == (waiting < NODE_PRIORITY_THRESHOLD), (
            "the one of which there is news now counts, too"
        )
        place.operator.node_registry.priority_gate.set_backlog(0)
        await asyncio.wait_for(place.desk.effect_runner.wait_until_idle(), 60)
        assert "j-w0-0" in place.cluster.graces
