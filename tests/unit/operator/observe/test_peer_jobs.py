"""The incremental view of other jobs, compared with a scan of all jobs, over random changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import CheckpointSpec, JobPhase, TrainingJob
from pacekeeper_operator.kube.client import NODE_OBJECTS
from pacekeeper_operator.kube.store import Key, ResourceStore
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry
from pacekeeper_operator.observe.peer_jobs import HUNG_NODE_SECONDS, SUSPECT_NODE_SECONDS, NodeSnapshot
from pacekeeper_operator.observe.views import view_node
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.state.cluster_view import RECENT_POLL_SECONDS, ClusterView
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    Incident,
    PastIncident,
    Placement,
    State,
    WorkerRecord,
)
from testing.operators.observations import NOW, build_job, build_training

NAMESPACES = ("red", "blue", "green")
CAUSES = (IncidentCause.HANG, IncidentCause.NODE_LOST, IncidentCause.GPU_ERROR, IncidentCause.CRASH)
MEMBERS = build_training().plan.members


class RandomJobs:
    """Jobs that appear, change, report, and vanish at random, and a scan of all of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.registry = JobRegistry(0.0)
        self.jobs: dict[Key, JobCache] = {}
        self.reported_at: dict[str, float] = {}  # by UID
        self.held_polls = Counter[str]()  # by UID
        self.now, self.made = NOW, 0

    def act_at_random(self) -> None:
        self.now += self.rng.choice((0.0, 0.5, 4.0, 30.0, 900.0))
        act = self.rng.choice(
            (
                self.create_job,
                self.change_desired,
                self.change_desired,
                self.change_desired,
                self.change_phase,
                self.report_heartbeat,
                self.change_held_polls,
                self.delete_job,
            )
        )
        act()

    def create_job(self) -> None:
        """Create a job, sometimes with the name of one that is still known."""
        self.made += 1
        key = self.rng.choice(NAMESPACES), f"job-{self.rng.randrange(6)}"
        created = self.now - self.rng.randrange(3)
        made = replace(build_job(), namespace=key[0], name=key[1], uid=f"uid-{self.made}", created_at=created)
        known = self.registry.get_or_create(made)
        if self.registry.find(*key) is known:
            self.jobs[key] = known
            known.update(phase=JobPhase.PENDING)

    def pick_job(self) -> JobCache | None:
        return self.rng.choice(list(self.jobs.values())) if self.jobs else None

    def change_desired(self) -> None:
        if (cache := self.pick_job()) is None:
            return
        desired = cache.desired or DesiredState(Plan(), State())
        incidents, rng = desired.state.incidents, self.rng
        node_name = rng.choice((None, "node-1", "node-2", "node-3"))
        cause, class_ = rng.choice(CAUSES), rng.choice((IncidentClass.INFRASTRUCTURE, IncidentClass.UNKNOWN))
        match rng.randrange(7):
            case 0:
                at = self.now - rng.choice(
                    (0.0, 30.0, SUSPECT_NODE_SECONDS, HUNG_NODE_SECONDS - 1, 2 * HUNG_NODE_SECONDS)
                )
                past = PastIncident(cause, at, rng.randrange(1, 99), node=node_name, class_=class_)
                desired = desired.with_incidents(past=(*incidents.past, past)[-4:])
            case 1:
                name = f"i-{rng.randrange(3)}"
                desired = desired.with_incident(Incident(name, cause, class_, 1, "m", 0, self.now, 0, node=node_name))
            case 2:
                desired = desired.with_incidents(current=incidents.current[1:], past=incidents.past[1:])
            case 3 | 4 | 5:
                placement = Placement(attempts=rng.randrange(4), template_accepted=rng.choice((1, 1, 1, 2)))
                desired = replace(desired, state=replace(desired.state, placement=placement))
            case _:
                desired = replace(desired, plan=replace(desired.plan, members=rng.choice(((), (), MEMBERS))))
        cache.update(desired=desired)

    def change_phase(self) -> None:
        if (cache := self.pick_job()) is not None and cache.job is not None:
            cache.update(phase=self.rng.choice((JobPhase.PENDING, JobPhase.PENDING, JobPhase.RUNNING)))
            cache.update(job=replace(cache.job, spec=replace(cache.job.spec, suspend=self.rng.random() < 0.2)))

    def report_heartbeat(self) -> None:
        if (cache := self.pick_job()) is not None and cache.job is not None and cache.desired is not None:
            self.registry.mark_reporting(cache, self.now)
            self.reported_at[cache.job.uid] = self.now

    def change_held_polls(self) -> None:
        """Hold a poll, or end one."""
        if (cache := self.pick_job()) is not None and cache.job is not None and cache.desired is not None:
            polls = -1 if self.held_polls[cache.job.uid] and self.rng.random() < 0.7 else 1
            self.registry.adjust_held_polls(cache, polls)
            self.held_polls[cache.job.uid] += polls

    def delete_job(self) -> None:
        if (cache := self.pick_job()) is not None and cache.job is not None and self.rng.random() < 0.5:
            self.registry.forget(cache.job)
            del self.jobs[cache.job.namespace, cache.job.name]

    def scan_jobs(self, mine: TrainingJob, desired: DesiredState) -> ClusterView:
        """Build the view by a scan of all jobs."""
        suspects: set[str] = set()
        hung: Counter[str] = Counter()
        hung_elsewhere: set[str] = set()
        durations: dict[IncidentCause, list[float]] = {}
        older: list[tuple[float, str, str]] = []
        reports_elsewhere = False
        for other in self.jobs.values():
            if other.desired is None or other.job is None:
                continue
            incidents, another = other.desired.state.incidents, other.job.uid != mine.uid
            hangs = [
                past.node
                for past in incidents.past
                if past.cause is IncidentCause.HANG and past.node and self.now - past.at < HUNG_NODE_SECONDS and another
            ]
            lately = self.now - self.reported_at.get(other.job.uid, -9e9) < RECENT_POLL_SECONDS
            reports_elsewhere = reports_elsewhere or (another and (lately or self.held_polls[other.job.uid] > 0))
            if other.job.namespace != mine.namespace:
                hung_elsewhere |= set(hangs)
                continue
            hung.update(hangs)
            named = [(i, i.detected) for i in incidents.current] + [(past, past.at) for past in incidents.past]
            for incident, at in named:
                lost = (
                    incident.cause in (IncidentCause.NODE_LOST, IncidentCause.GPU_ERROR)
                    and incident.class_ is IncidentClass.INFRASTRUCTURE
                )
                if lost and incident.node and self.now - at < SUSPECT_NODE_SECONDS:
                    suspects.add(incident.node)
            for past in incidents.past:
                durations.setdefault(past.cause, []).append(past.seconds)
            if is_ahead_in_queue(other, mine, desired):
                older.append((other.job.created_at or 0.0, other.job.uid, other.job.name))
        return ClusterView(
            suspects=frozenset(suspects),
            older_waiting_job=min(older)[2] if older else "",
            hung_nodes=dict(hung),
            hung_elsewhere=frozenset(hung_elsewhere),
            past_durations={cause: tuple(sorted(seconds)) for cause, seconds in durations.items()},
            reached_elsewhere=reports_elsewhere,
        )

    def read_cluster_view(self, mine: TrainingJob, desired: DesiredState) -> ClusterView:
        seen = self.registry.build_cluster_view(mine, desired, self.now)
        durations = {cause: tuple(sorted(seconds)) for cause, seconds in seen.past_durations.items()}
        return replace(seen, past_durations=durations)


def is_ahead_in_queue(other: JobCache, mine: TrainingJob, desired: DesiredState) -> bool:
    assert other.job is not None
    assert other.desired is not None
    own, peer = desired.state.placement, other.desired.state.placement
    waits = other.phase is JobPhase.PENDING and not other.job.spec.suspend and not other.desired.plan.members
    if not waits or other.job.uid == mine.uid or own.attempts == 0 or desired.plan.members:
        return False
    older = (other.job.created_at, other.job.uid) < (mine.created_at, mine.uid)
    return older and peer.template_accepted == other.job.generation and 0 < peer.attempts <= own.attempts


def list_viewers(random_jobs: RandomJobs) -> Iterator[tuple[TrainingJob, DesiredState]]:
    """Yield all known jobs, and some unknown ones."""
    for known in random_jobs.jobs.values():
        if known.job is not None and known.desired is not None:
            yield known.job, known.desired
    for namespace in (*NAMESPACES, "unused"):
        waits = DesiredState(Plan(), State(placement=Placement(attempts=2)))
        yield replace(build_job(), namespace=namespace, name="job-1", uid="absent", created_at=random_jobs.now), waits


def test_the_index_of_jobs_equals_a_scan_of_all_jobs() -> None:
    seen_values = Counter[str]()
    for random_jobs in map(RandomJobs, range(12)):
        for _ in range(400):
            random_jobs.act_at_random()
            for mine, desired in list_viewers(random_jobs):
                view, scanned = random_jobs.read_cluster_view(mine, desired), random_jobs.scan_jobs(mine, desired)
                assert view == scanned
                seen_values.update(name for name, value in vars(scanned).items() if value)
    wanted = {"suspects", "hung_nodes", "hung_elsewhere", "past_durations", "older_waiting_job", "reached_elsewhere"}
    assert wanted <= {name for name, count in seen_values.items() if count > 100}, (
        "the random changes have covered all of it"
    )


def test_a_deleted_job_does_not_count_as_reporting() -> None:
    registry, mine = JobRegistry(0.0), build_job()
    for n in range(100):
        other = registry.get_or_create(replace(build_job(), name="other", uid=f"uid-{n}", created_at=NOW + n))
        other.update(desired=build_training().desired)
        registry.mark_reporting(other, NOW)
        registry.adjust_held_polls(other, 1)
    assert registry.build_cluster_view(mine, build_training().desired, NOW).reached_elsewhere
    assert other.job is not None
    registry.forget(other.job)
    registry.mark_reporting(other, NOW)
    registry.adjust_held_polls(other, -1)
    assert not registry.build_cluster_view(mine, build_training().desired, NOW).reached_elsewhere


class TestCheckpointFolders:
    """One job at a time writes to each checkpoint folder."""

    def add_job(
        self, registry: JobRegistry, name: str, age: float, workers: bool = False, **changes: Any
    ) -> TrainingJob:
        checkpoint = CheckpointSpec(volume_claim_name="claim", **changes)
        peer = replace(build_job(checkpoint=checkpoint), name=name, uid=f"uid-{name}", created_at=NOW - age)
        known, desired = registry.get_or_create(peer), DesiredState(Plan(), State())
        known.update(desired=desired.with_placement(workers=(WorkerRecord("w", 0, 0),)) if workers else desired)
        return peer

    def find_folder_owner(self, registry: JobRegistry, mine: TrainingJob) -> str:
        desired = registry.get_or_create(mine).desired
        assert desired is not None
        return registry.build_cluster_view(mine, desired, NOW).folder_owner

    def test_a_folder_belongs_to_the_job_with_workers_or_the_older_one(self) -> None:
        registry = JobRegistry(0.0)
        old = self.add_job(registry, "old", 9, sub_path="shared")
        young = self.add_job(registry, "young", 5, sub_path="shared")
        assert (self.find_folder_owner(registry, old), self.find_folder_owner(registry, young)) == ("", "old")
        self.add_job(registry, "young", 5, workers=True, sub_path="shared")
        assert (self.find_folder_owner(registry, old), self.find_folder_owner(registry, young)) == ("young", "")
        registry.forget(young)
        assert self.find_folder_owner(registry, old) == ""

    def test_an_ended_suspended_or_read_only_job_owns_no_folder(self) -> None:
        registry = JobRegistry(0.0)
        mine = self.add_job(registry, "mine", 1, sub_path="shared")
        self.add_job(registry, "own", 9)
        self.add_job(registry, "evaluation", 9, workers=True, sub_path="shared", read_only=True)
        other = self.add_job(registry, "other", 9, sub_path="shared")
        known = registry.get_or_create(other)
        assert self.find_folder_owner(registry, mine) == "other"
        assert known.desired is not None
        known.update(job=replace(other, spec=replace(other.spec, suspend=True)))
        assert self.find_folder_owner(registry, mine) == ""
        known.update(job=other, desired=known.desired.with_lifecycle(completed_at=NOW))
        assert self.find_folder_owner(registry, mine) == ""

    def test_each_job_has_its_own_folder_unless_both_use_the_root_of_a_claim(self) -> None:
        cases: tuple[tuple[dict[str, Any], str], ...] = (({}, ""), ({"sub_path": ""}, "other"))
        for changes, owner in cases:
            registry = JobRegistry(0.0)
            mine, _ = (
                self.add_job(registry, "mine", 1, **changes),
                self.add_job(registry, "other", 9, workers=True, **changes),
            )
            assert self.find_folder_owner(registry, mine) == owner


class TestNodes:
    def build_node(self, name: str, version: int, **spec: object) -> dict[str, object]:
        return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, "spec": spec}

    def test_nodes_are_read_again_only_after_a_change(self) -> None:
        store = ResourceStore(NODE_OBJECTS, lambda body: view_node(body, NodeHealthRules()))
        store.apply_event(self.build_node("node-1", 1), deleted=False)
        first = NodeSnapshot().refresh(store, NOW)
        assert first.views.keys() == {"node-1"}
        store.apply_event(self.build_node("node-1", 2), deleted=False)
        assert first.refresh(store, NOW + 1) is first, "nothing relevant to decisions changed"
        store.apply_event(self.build_node("node-2", 3, unschedulable=True), deleted=False)
        second = first.refresh(store, NOW + 2)
        assert second.views.keys() == {"node-1", "node-2"}
        assert first.views.keys() == {"node-1"}, "an observation is a value"
        store.apply_event(self.build_node("node-1", 4), deleted=True)
        third = second.refresh(store, NOW + 5)
        assert third.views.keys() == {"node-2"}
        assert third.leaving_since == {"node-2": NOW + 2}, "since it was first seen to be so"
