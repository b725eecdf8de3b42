"""What a job has around it is kept, not looked through: held against looking through all jobs, as drawn lives go on."""

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


class Lives:
    """Jobs that come, go, change and are heard, as dice say; and what others would find by looking at all of them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.memory = JobRegistry(0.0)
        self.jobs: dict[Key, JobCache] = {}
        self.heard: dict[str, float] = {}  # by UID
        self.held = Counter[str]()  # the same
        self.now, self.made = NOW, 0

    def go_on(self) -> None:
        self.now += self.dice.choice((0.0, 0.5, 4.0, 30.0, 900.0))
        act = self.dice.choice(
            (self.make, self.change, self.change, self.change, self.phase, self.speak, self.hold, self.drop)
        )
        act()

    def make(self) -> None:
        """A new job; now and then under the name of one that is still known."""
        self.made += 1
        key = self.dice.choice(NAMESPACES), f"job-{self.dice.randrange(6)}"
        created = self.now - self.dice.randrange(3)
        made = replace(build_job(), namespace=key[0], name=key[1], uid=f"uid-{self.made}", created_at=created)
        known = self.memory.get_or_create(made)
        if self.memory.find(*key) is known:
            self.jobs[key] = known
            known.update(phase=JobPhase.PENDING)

    def one(self) -> JobCache | None:
        return self.dice.choice(list(self.jobs.values())) if self.jobs else None

    def change(self) -> None:
        if (one := self.one()) is None:
            return
        draft = one.desired or DesiredState(Plan(), State())
        incidents, dice = draft.state.incidents, self.dice
        node = dice.choice((None, "node-1", "node-2", "node-3"))
        cause, class_ = dice.choice(CAUSES), dice.choice((IncidentClass.INFRASTRUCTURE, IncidentClass.UNKNOWN))
        match dice.randrange(7):
            case 0:
                at = self.now - dice.choice(
                    (0.0, 30.0, SUSPECT_NODE_SECONDS, HUNG_NODE_SECONDS - 1, 2 * HUNG_NODE_SECONDS)
                )
                past = PastIncident(cause, at, dice.randrange(1, 99), node=node, class_=class_)
                draft = draft.with_incidents(past=(*incidents.past, past)[-4:])
            case 1:
                name = f"i-{dice.randrange(3)}"
                draft = draft.with_incident(Incident(name, cause, class_, 1, "m", 0, self.now, 0, node=node))
            case 2:
                draft = draft.with_incidents(current=incidents.current[1:], past=incidents.past[1:])
            case 3 | 4 | 5:
                placement = Placement(attempts=dice.randrange(4), template_accepted=dice.choice((1, 1, 1, 2)))
                draft = replace(draft, state=replace(draft.state, placement=placement))
            case _:
                draft = replace(draft, plan=replace(draft.plan, members=dice.choice(((), (), MEMBERS))))
        one.update(desired=draft)

    def phase(self) -> None:
        if (one := self.one()) is not None and one.job is not None:
            one.update(phase=self.dice.choice((JobPhase.PENDING, JobPhase.PENDING, JobPhase.RUNNING)))
            one.update(job=replace(one.job, spec=replace(one.job.spec, suspend=self.dice.random() < 0.2)))

    def speak(self) -> None:
        if (one := self.one()) is not None and one.job is not None and one.desired is not None:
            self.memory.mark_reporting(one, self.now)
            self.heard[one.job.uid] = self.now

    def hold(self) -> None:
        """A poll is held, or ends."""
        if (one := self.one()) is not None and one.job is not None and one.desired is not None:
            polls = -1 if self.held[one.job.uid] and self.dice.random() < 0.7 else 1
            self.memory.adjust_held_polls(one, polls)
            self.held[one.job.uid] += polls

    def drop(self) -> None:
        if (one := self.one()) is not None and one.job is not None and self.dice.random() < 0.5:
            self.memory.forget(one.job)
            del self.jobs[one.job.namespace, one.job.name]

    def found(self, mine: TrainingJob, draft: DesiredState) -> ClusterView:
        """By looking at all jobs."""
        suspects: set[str] = set()
        hung: Counter[str] = Counter()
        hung_elsewhere: set[str] = set()
        durations: dict[IncidentCause, list[float]] = {}
        older: list[tuple[float, str, str]] = []
        heard = False
        for other in self.jobs.values():
            if other.desired is None or other.job is None:
                continue
            incidents, another = other.desired.state.incidents, other.job.uid != mine.uid
            hangs = [
                past.node
                for past in incidents.past
                if past.cause is IncidentCause.HANG and past.node and self.now - past.at < HUNG_NODE_SECONDS and another
            ]
            lately = self.now - self.heard.get(other.job.uid, -9e9) < RECENT_POLL_SECONDS
            heard = heard or (another and (lately or self.held[other.job.uid] > 0))
            if other.job.namespace != mine.namespace:
                hung_elsewhere |= set(hangs)
                continue
            hung.update(hangs)
            named = [(i, i.detected) for i in incidents.current] + [(past, past.at) for past in incidents.past]
            for one, at in named:
                lost = (
                    one.cause in (IncidentCause.NODE_LOST, IncidentCause.GPU_ERROR)
                    and one.class_ is IncidentClass.INFRASTRUCTURE
                )
                if lost and one.node and self.now - at < SUSPECT_NODE_SECONDS:
                    suspects.add(one.node)
            for past in incidents.past:
                durations.setdefault(past.cause, []).append(past.seconds)
            if goes_first(other, mine, draft):
                older.append((other.job.created_at or 0.0, other.job.uid, other.job.name))
        return ClusterView(
            suspects=frozenset(suspects),
            older_waiting_job=min(older)[2] if older else "",
            hung_nodes=dict(hung),
            hung_elsewhere=frozenset(hung_elsewhere),
            past_durations={cause: tuple(sorted(seconds)) for cause, seconds in durations.items()},
            reached_elsewhere=heard,
        )

    def kept(self, mine: TrainingJob, draft: DesiredState) -> ClusterView:
        seen = self.memory.build_cluster_view(mine, draft, self.now)
        durations = {cause: tuple(sorted(seconds)) for cause, seconds in seen.past_durations.items()}
        return replace(seen, past_durations=durations)


def goes_first(other: JobCache, mine: TrainingJob, draft: DesiredState) -> bool:
    assert other.job is not None
    assert other.desired is not None
    own, its = draft.state.placement, other.desired.state.placement
    waits = other.phase is JobPhase.PENDING and not other.job.spec.suspend and not other.desired.plan.members
    if not waits or other.job.uid == mine.uid or own.attempts == 0 or draft.plan.members:
        return False
    older = (other.job.created_at, other.job.uid) < (mine.created_at, mine.uid)
    return older and its.template_accepted == other.job.generation and 0 < its.attempts <= own.attempts


def askers(lives: Lives) -> Iterator[tuple[TrainingJob, DesiredState]]:
    """All jobs that are known, and some that nobody knows."""
    for known in lives.jobs.values():
        if known.job is not None and known.desired is not None:
            yield known.job, known.desired
    for namespace in (*NAMESPACES, "nobody's"):
        waits = DesiredState(Plan(), State(placement=Placement(attempts=2)))
        yield replace(build_job(), namespace=namespace, name="job-1", uid="stranger", created_at=lives.now), waits


def test_what_is_kept_is_what_looking_at_all_jobs_would_find() -> None:
    told = Counter[str]()
    for lives in map(Lives, range(12)):
        for _ in range(400):
            lives.go_on()
            for mine, draft in askers(lives):
                kept, found = lives.kept(mine, draft), lives.found(mine, draft)
                assert kept == found
                told.update(name for name, value in vars(found).items() if value)
    wanted = {"suspects", "hung_nodes", "hung_elsewhere", "past_durations", "older_waiting_job", "reached_elsewhere"}
    assert wanted <= {name for name, count in told.items() if count > 100}, "the dice have drawn all of it"


def test_a_job_that_nobody_knows_any_more_is_not_heard_for_ever() -> None:
    memory, mine = JobRegistry(0.0), build_job()
    for n in range(100):
        other = memory.get_or_create(replace(build_job(), name="other", uid=f"uid-{n}", created_at=NOW + n))
        other.update(desired=build_training().desired)
        memory.mark_reporting(other, NOW)
        memory.adjust_held_polls(other, 1)
    assert memory.build_cluster_view(mine, build_training().desired, NOW).reached_elsewhere
    assert other.job is not None
    memory.forget(other.job)
    memory.mark_reporting(other, NOW)
    memory.adjust_held_polls(other, -1)
    assert not memory.build_cluster_view(mine, build_training().desired, NOW).reached_elsewhere


class TestFolders:
    """Of checkpoints: one job at a time writes to each."""

    def put(self, memory: JobRegistry, name: str, age: float, workers: bool = False, **changes: Any) -> TrainingJob:
        checkpoint = CheckpointSpec(volume_claim_name="claim", **changes)
        its = replace(build_job(checkpoint=checkpoint), name=name, uid=f"uid-{name}", created_at=NOW - age)
        known, draft = memory.get_or_create(its), DesiredState(Plan(), State())
        known.update(desired=draft.with_placement(workers=(WorkerRecord("w", 0, 0),)) if workers else draft)
        return its

    def holder(self, memory: JobRegistry, mine: TrainingJob) -> str:
        draft = memory.get_or_create(mine).desired
        assert draft is not None
        return memory.build_cluster_view(mine, draft, NOW).folder_owner

    def test_who_has_workers_has_it_and_else_who_is_older(self) -> None:
        memory = JobRegistry(0.0)
        old = self.put(memory, "old", 9, sub_path="shared")
        young = self.put(memory, "young", 5, sub_path="shared")
        assert (self.holder(memory, old), self.holder(memory, young)) == ("", "old")
        self.put(memory, "young", 5, workers=True, sub_path="shared")
        assert (self.holder(memory, old), self.holder(memory, young)) == ("young", "")
        memory.forget(young)
        assert self.holder(memory, old) == ""

    def test_a_job_that_has_ended_or_is_suspended_or_writes_elsewhere_holds_nothing(self) -> None:
        memory = JobRegistry(0.0)
        mine = self.put(memory, "mine", 1, sub_path="shared")
        self.put(memory, "own", 9)
        self.put(memory, "evaluation", 9, workers=True, sub_path="shared", read_only=True)
        other = self.put(memory, "other", 9, sub_path="shared")
        known = memory.get_or_create(other)
        assert self.holder(memory, mine) == "other"
        assert known.desired is not None
        known.update(job=replace(other, spec=replace(other.spec, suspend=True)))
        assert self.holder(memory, mine) == ""
        known.update(job=other, desired=known.desired.with_lifecycle(completed_at=NOW))
        assert self.holder(memory, mine) == ""

    def test_of_a_claim_each_job_has_its_own_unless_both_use_its_root(self) -> None:
        cases: tuple[tuple[dict[str, Any], str], ...] = (({}, ""), ({"sub_path": ""}, "other"))
        for changes, holder in cases:
            memory = JobRegistry(0.0)
            mine, _ = self.put(memory, "mine", 1, **changes), self.put(memory, "other", 9, workers=True, **changes)
            assert self.holder(memory, mine) == holder


class TestNodes:
    def node(self, name: str, version: int, **spec: object) -> dict[str, object]:
        return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, "spec": spec}

    def test_are_looked_through_when_one_has_changed_and_not_before(self) -> None:
        shelf = ResourceStore(NODE_OBJECTS, lambda body: view_node(body, NodeHealthRules()))
        shelf.apply_event(self.node("node-1", 1), deleted=False)
        first = NodeSnapshot().refresh(shelf, NOW)
        assert first.views.keys() == {"node-1"}
        shelf.apply_event(self.node("node-1", 2), deleted=False)
        assert first.refresh(shelf, NOW + 1) is first, "nothing about it is news to decisions"
        shelf.apply_event(self.node("node-2", 3, unschedulable=True), deleted=False)
        second = first.refresh(shelf, NOW + 2)
        assert second.views.keys() == {"node-1", "node-2"}
        assert first.views.keys() == {"node-1"}, "an observation is a value"
        shelf.apply_event(self.node("node-1", 4), deleted=True)
        third = second.refresh(shelf, NOW + 5)
        assert third.views.keys() == {"node-2"}
        assert third.leaving_since == {"node-2": NOW + 2}, "since it was first seen to be so"
