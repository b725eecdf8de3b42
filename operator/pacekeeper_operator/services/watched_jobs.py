"""The jobs that others have created and that are watched: their pods, their owners, and their WatchedJobs.

Each of them is described by a `TrainingJob` without a template, in a registry of its own: TrainingJobs do not see
watched jobs, and nothing about nodes is concluded from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from ..api.formats import format_time, parse_time
from ..api.names import ANNOTATION_RETAIN_UNTIL, API_VERSION, LABEL_WATCHED
from ..api.training_job import JobKind, JobSpec, TrainingJob
from ..api.watched_job import RootRef, WatchedJobPhase, WatchedJobSpec
from ..async_runtime import OperatorRuntime
from ..decide.injection_breaker import InjectionFailure
from ..endpoint.token_review import PodIdentity
from ..kube.client import (
    NAMESPACES,
    PODS,
    TRAINING_JOB_STATES,
    WATCHED_JOBS,
    Cluster,
    Conflict,
    Object,
    ResourceKind,
)
from ..kube.reflector import Reflector
from ..kube.store import Key, ResourceStore
from ..observe.job_cache import JobRegistry
from ..observe.owners import READABLE_KINDS, OwnedMetadata, UnreadOwner, find_root, parse_owned_metadata
from ..observe.watched_pods import DescribedPod, KnownTraining, WatchedPod, assign_pods, view_watched_pod
from ..settings import Settings
from ..state import state_codec
from ..state.desired_state import DesiredState

Owner = tuple[str, RootRef]
"""Namespace and outermost owner of pods."""
log = logging.getLogger(__name__)


@dataclass
class WatchedJobs:
    """All watched jobs."""

    settings: Settings
    cluster: Cluster
    runtime: OperatorRuntime
    jobs: JobRegistry
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a pod has changed."""
    ended: set[Key] = field(default_factory=set)
    """Jobs whose end is written."""
    injection_stop: str | None = None
    """Why new pods are not watched; None: they are, or it is not known."""
    on_library_failure: Callable[[InjectionFailure, float], Awaitable[None]] | None = None
    """Called when the watch's library has made a rank fail. It takes the creation time of the rank's pod (seconds since
    the epoch), and raises the errors of the cluster client."""
    pods: ResourceStore[WatchedPod] = field(init=False)
    reflector: Reflector = field(init=False)
    _roots: dict[str, RootRef] = field(default_factory=dict)  # by UID of a pod
    _trainings: dict[Owner, tuple[KnownTraining, ...]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # name of its WatchedJob, by UID of a pod
    _ended_by_itself: dict[str, bool] = field(default_factory=dict)
    """By UID of a pod that has ended or is being deleted or evicted: whether its end came first."""
    _objects: dict[Key, TrainingJob] = field(default_factory=dict)  # WatchedJobs that exist

    def __post_init__(self) -> None:
        self.pods = ResourceStore(
            PODS, view_watched_pod, f"{LABEL_WATCHED}=true", on_change=lambda key, pod: self._on_pod_changed(key, pod)
        )
        self.reflector = Reflector(self.cluster, self.runtime, (self.pods,), self.settings.watch_namespaces)

    def find_job(self, identity: PodIdentity) -> str | None:
        """Return the name of the watched job of this very pod; None: it is not watched, or not known yet."""
        pod = self.pods.get((identity.namespace, identity.pod))
        if pod is None or pod.view.uid != identity.uid or pod.view.job:
            return None
        return self._names.get(identity.uid)

    def is_pod_alive(self, identity: PodIdentity) -> bool:
        """Return whether that very pod is known to exist and not to terminate."""
        pod = self.pods.get((identity.namespace, identity.pod))
        return pod is not None and pod.view.uid == identity.uid and not pod.view.deleting and not pod.view.ended

    def has_jobs(self) -> bool:
        """Return whether some job is observed now."""
        return len(self.ended) < len(self._objects)

    def wake_jobs_on_nodes(self, nodes: Collection[str]) -> None:
        """Start a pass over the jobs with pods on these nodes."""
        for (namespace, _), pod in self.pods.items():
            if pod.view.node in nodes:
                self.jobs.wake(namespace, self._names.get(pod.view.uid, ""))

    def select_pods(self, job: TrainingJob) -> tuple[WatchedPod, ...]:
        """Return the job's pods."""
        pods = (pod for (namespace, _), pod in self.pods.items() if namespace == job.namespace)
        return tuple(self._add_order(pod) for pod in pods if self._names.get(pod.view.uid) == job.name)

    def has_other_trainings(self, job: TrainingJob) -> bool:
        """Return whether pods of other trainings run below the owners of this one's pods."""
        owners = {(job.namespace, self._roots.get(pod.view.uid)) for pod in self.select_pods(job)}
        return any(
            (pod.namespace, self._roots.get(pod.view.uid)) in owners and self._names.get(pod.view.uid) != job.name
            for pod in self.pods
            if not pod.view.ended
        )

    async def load(self) -> None:
        """Read the WatchedJobs of earlier leaders, and which pods held which ranks. Raises the cluster's errors."""
        for scope in WATCHED_JOBS.list_scopes(self.settings.watch_namespaces):
            bodies = await self.cluster.collect(WATCHED_JOBS, _reduce_watched_job, scope)
            states = dict(await self.cluster.collect(TRAINING_JOB_STATES, _read_ranks_by_pod, scope))
            for body in bodies:
                self._remember(body, states.get((body["metadata"]["namespace"], body["metadata"]["name"]), {}))

    async def refresh(self) -> Sequence[TrainingJob]:
        """Assign the pods to trainings, create missing WatchedJobs, and return the jobs that have not ended.

        Raises the cluster's errors.
        """
        await self._find_roots()
        alive: set[Key] = set()
        for (namespace, root), pods in self._group_pods().items():
            described = [self._describe_pod(pod) for pod in pods]
            names, trainings = assign_pods(root, described, self._trainings.get((namespace, root), ()))
            self._trainings[namespace, root] = trainings
            for pod in described:
                if pod.lives:
                    alive.add((namespace, names[pod.uid]))
                    await self._ensure_object(namespace, names[pod.uid], root)
            self._names.update(names)
        self.ended -= alive
        return [job for key, job in self._objects.items() if key not in self.ended]

    async def clean_up(self, now: float) -> None:
        """Delete the WatchedJobs whose retention is over. Raises the cluster's errors."""
        for scope in WATCHED_JOBS.list_scopes(self.settings.watch_namespaces):
            for body in await self.cluster.collect(WATCHED_JOBS, _reduce_watched_job, scope):
                metadata = body["metadata"]
                until = (metadata.get("annotations") or {}).get(ANNOTATION_RETAIN_UNTIL)
                if until is not None and until < format_time(now):
                    await self.cluster.delete(
                        WATCHED_JOBS, metadata["name"], metadata["namespace"], uid=metadata["uid"]
                    )
                    self._forget((metadata["namespace"], metadata["name"]))

    async def _find_roots(self) -> None:
        """Find the owners of new pods. A pod whose owner cannot be read now is tried again at the next change."""
        present = {pod.view.uid for pod in self.pods}
        self._roots = {uid: root for uid, root in self._roots.items() if uid in present}
        self._names = {uid: name for uid, name in self._names.items() if uid in present}
        self._ended_by_itself = {uid: value for uid, value in self._ended_by_itself.items() if uid in present}
        read: dict[str, dict[RootRef, OwnedMetadata | None]] = defaultdict(dict)
        for pod in self.pods:
            if pod.view.uid in self._roots or pod.view.job:
                continue
            try:
                self._roots[pod.view.uid] = await self._find_root(pod, read[pod.namespace])
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("the owner of pod %s/%s cannot be read: %s", pod.namespace, pod.view.name, error)

    async def _find_root(self, pod: WatchedPod, read: dict[RootRef, OwnedMetadata | None]) -> RootRef:
        while True:
            found = find_root(pod.metadata, read)
            if not isinstance(found, UnreadOwner):
                return found or RootRef("Pod", pod.view.name, "v1", pod.view.uid)
            read[found.owner] = await self._read_owner(found.owner, pod.namespace)

    async def _read_owner(self, owner: RootRef, namespace: str) -> OwnedMetadata | None:
        group = owner.api_version.partition("/")[0]
        kind = ResourceKind(f"/apis/{owner.api_version}", READABLE_KINDS[group, owner.kind])
        metadata = await self.cluster.find_metadata(kind, owner.name, namespace)
        if metadata is None or (owner.uid and metadata.get("uid") != owner.uid):
            return None
        return parse_owned_metadata(metadata)

    def _group_pods(self) -> Mapping[Owner, list[WatchedPod]]:
        groups: dict[Owner, list[WatchedPod]] = defaultdict(list)
        for pod in self.pods:
            if pod.view.uid in self._roots:
                groups[pod.namespace, self._roots[pod.view.uid]].append(pod)
        return groups

    def _describe_pod(self, pod: WatchedPod) -> DescribedPod:
        """Return the pod with the ranks that its sidecar reports."""
        lives = not pod.view.ended and not pod.view.deleting
        cache = self.jobs.find(pod.namespace, self._names.get(pod.view.uid, ""))
        contact = None if cache is None else cache.contacts.get(pod.view.name)
        report = None if contact is None else contact.heartbeat.watched
        return DescribedPod(pod.view.uid, pod.view.created_at, lives, () if report is None else report.ranks)

    async def _ensure_object(self, namespace: str, name: str, root: RootRef) -> None:
        """Create the WatchedJob if there is none."""
        if (namespace, name) in self._objects:
            return
        body: Object = {
            "apiVersion": API_VERSION,
            "kind": str(JobKind.WATCHED_JOB),
            "metadata": {"name": name, "namespace": namespace},
            "spec": WatchedJobSpec(root, await self._find_team(namespace)).to_json(),
        }
        try:
            stored = await self.cluster.create(WATCHED_JOBS, body)
        except Conflict:
            stored = await self.cluster.get(WATCHED_JOBS, name, namespace)
        self._objects[namespace, name] = _build_job(stored)

    async def _find_team(self, namespace: str) -> str | None:
        """Return the team that the namespace's label names; None: none. Raises the cluster's errors."""
        label = self.settings.watch_team_label
        if not label:
            return None
        found = await self.cluster.list(NAMESPACES, labels=label, fields=f"metadata.name={namespace}")
        return next((body["metadata"]["labels"][label] or None for body in found), None)

    def _add_order(self, pod: WatchedPod) -> WatchedPod:
        """Return the pod with the order of its end and its deletion: times of the API server are too coarse for it."""
        ended_by_itself = self._ended_by_itself.get(pod.view.uid, False)
        return replace(pod, view=replace(pod.view, ended_by_itself=True)) if ended_by_itself else pod

    async def is_gone(self, job: TrainingJob) -> bool:
        """Return whether the WatchedJob has been deleted. The next refresh creates it again if the job runs."""
        stored = await self.cluster.find(WATCHED_JOBS, job.name, job.namespace)
        if stored is not None and stored["metadata"]["uid"] == job.uid:
            return False
        self._forget((job.namespace, job.name))
        return True

    def _remember(self, body: Object, ranks_by_pod: Mapping[str, frozenset[int]]) -> None:
        """Record a WatchedJob of an earlier leader."""
        metadata = body["metadata"]
        key = metadata["namespace"], metadata["name"]
        try:
            owner = key[0], WatchedJobSpec.parse(body["spec"]).root
        except InputError as error:
            log.warning("WatchedJob %s/%s cannot be read: %s", *key, error)
            return
        self._objects[key] = _build_job(body)
        self._trainings[owner] = (*self._trainings.get(owner, ()), KnownTraining(key[1], dict(ranks_by_pod)))
        if body["phase"] == WatchedJobPhase.ENDED:
            self.ended.add(key)

    def _forget(self, key: Key) -> None:
        job = self._objects.pop(key, None)
        self.ended.discard(key)
        if job is not None:
            self.jobs.forget(job)
        for owner, trainings in list(self._trainings.items()):
            if owner[0] == key[0]:
                self._trainings[owner] = tuple(training for training in trainings if training.name != key[1])

    def _on_pod_changed(self, key: Key, pod: WatchedPod) -> None:
        self.changed.set()
        is_disrupted = pod.view.deleting or bool(pod.view.disruption_reason)
        if pod.view.ended or is_disrupted:
            self._ended_by_itself.setdefault(pod.view.uid, not is_disrupted)
        name = self._names.get(pod.view.uid)
        if name is not None:
            self.jobs.wake(key[0], name)


def _build_job(body: Object) -> TrainingJob:
    metadata = body["metadata"]
    created_at = parse_time(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None
    return TrainingJob(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        0,
        JobSpec(template={}),
        created_at,
        kind=JobKind.WATCHED_JOB,
    )


def _reduce_watched_job(body: Object) -> Object:
    return {
        "metadata": body["metadata"],
        "spec": body["spec"],
        "phase": (body.get("status") or {}).get("phase"),
    }


def _read_ranks_by_pod(body: Object) -> tuple[Key, Mapping[str, frozenset[int]]]:
    """Return which pods held which ranks by a stored state, by UID; nothing of a TrainingJob."""
    metadata = body["metadata"]
    key = metadata.get("namespace", ""), metadata["name"]
    if all(owner["kind"] != JobKind.WATCHED_JOB for owner in metadata.get("ownerReferences", ())):
        return key, {}
    try:
        return key, list_ranks_by_pod(state_codec.decode_state(body, metadata["name"]).desired)
    except InputError:
        return key, {}


def list_ranks_by_pod(desired: DesiredState) -> dict[str, frozenset[int]]:
    """Return the ranks of each pod by the plan, by the pod's UID."""
    uids: Mapping[str, Any] = {record.name: record.uid for record in desired.state.placement.workers}
    return {uids[member.worker]: frozenset(member.ranks) for member in desired.plan.members if member.worker in uids}
