"""The pods of watched jobs, and which of them train together. Pure.

The pods below one owner are one training, unless their ranks show that there are several: for example two trainings on
the workers of one RayCluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pacekeeper_analysis.protocol.watched_report import ReportedRank

from ..api.watched_job import RootRef
from ..state.cluster_view import PodView
from ..state.job_metrics import GpuValue, JobMetrics
from .owners import OwnedMetadata, parse_owned_metadata
from .views import view_pod

MAX_ROOT_NAME_CHARACTERS = 54
"""Characters of the owner's name in that of a WatchedJob, which is also the value of a label (63 characters)."""
NAME_DIGITS = 8
"""Hexadecimal digits at the end of a WatchedJob's name."""


@dataclass(frozen=True)
class WatchedPod:
    """A pod into which a sidecar was injected."""

    namespace: str
    view: PodView
    metadata: OwnedMetadata


@dataclass(frozen=True)
class DescribedPod:
    """A pod below an owner, and the ranks that it has described; (): none (yet)."""

    uid: str
    created_at: float
    lives: bool
    ranks: tuple[ReportedRank, ...] = ()

    @property
    def key(self) -> tuple[str, str, int] | None:
        """What the ranks of one training have in common; None: not known."""
        first = next(iter(self.ranks), None)
        return None if first is None else (first.rendezvous, first.run_id, first.world_size)


@dataclass
class KnownTraining:
    """A training below an owner, and the ranks that each pod held last, by UID."""

    name: str
    ranks_by_pod: dict[str, frozenset[int]] = field(default_factory=dict)


def view_watched_pod(body: Mapping[str, Any]) -> WatchedPod:
    """Reduce a pod to what is needed of it."""
    metadata = body["metadata"]
    return WatchedPod(metadata.get("namespace", ""), view_pod(body), parse_owned_metadata(metadata))


def select_own_gpus(metrics: JobMetrics, pods: Collection[str]) -> JobMetrics:
    """Return the metrics without GPUs that only others use. `pods`: the job's own, as namespace/name.

    Pods of several jobs may share a node. A GPU of which the exporter names no user may be the job's.
    """

    def select(values: Iterable[GpuValue]) -> tuple[GpuValue, ...]:
        return tuple(value for value in values if not value.pods or not value.pods.isdisjoint(pods))

    return replace(metrics, gpu_values=select(metrics.gpu_values), gpu_signs=select(metrics.gpu_signs))


def build_watched_name(root: RootRef, first_pod: str = "") -> str:
    """Return the name of a WatchedJob. `first_pod`: UID of a pod, for further trainings below the same owner.

    It contains a dot, as no TrainingJob's name does.
    """
    text = "/".join((root.uid, root.api_version, root.kind, root.name, first_pod))
    stem = root.name[:MAX_ROOT_NAME_CHARACTERS].rstrip("-.")
    return f"{stem}.{hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]}"


def assign_pods(
    root: RootRef, pods: Sequence[DescribedPod], known: Iterable[KnownTraining]
) -> tuple[dict[str, str], tuple[KnownTraining, ...]]:
    """Return the name of each pod's training by its UID, and all trainings below the owner.

    A pod stays in its training. A pod that is new there joins the training whose ranks have the same rendezvous, or the
    one whose ranks it takes over from pods that are gone. Pods without ranks belong to the first training.
    """
    trainings = {training.name: KnownTraining(training.name, dict(training.ranks_by_pod)) for training in known}
    main = build_watched_name(root)
    trainings.setdefault(main, KnownTraining(main))
    by_uid = {pod.uid: pod for pod in pods}
    names: dict[str, str] = {}
    in_order = sorted(
        pods, key=lambda pod: (not pod.lives, _find_home(pod, trainings.values()) is None, pod.created_at, pod.uid)
    )
    for pod in (pod for pod in in_order if pod.ranks):
        training = _find_home(pod, trainings.values()) or _find_match(pod, trainings.values(), by_uid)
        if training is None:
            name = build_watched_name(root, pod.uid)
            training = trainings.setdefault(name, KnownTraining(name))
        training.ranks_by_pod[pod.uid] = frozenset(rank.rank for rank in pod.ranks)
        names[pod.uid] = training.name
    for pod in (pod for pod in in_order if not pod.ranks):
        home = _find_home(pod, trainings.values())
        names[pod.uid] = main if home is None else home.name
    return names, tuple(trainings.values())


def _find_home(pod: DescribedPod, trainings: Iterable[KnownTraining]) -> KnownTraining | None:
    """Return the training in which the pod has held ranks."""
    return next((training for training in trainings if pod.uid in training.ranks_by_pod), None)


def _find_match(
    pod: DescribedPod, trainings: Iterable[KnownTraining], by_uid: Mapping[str, DescribedPod]
) -> KnownTraining | None:
    """Return the training that a pod joins; None: it is another one."""
    candidates = list(trainings)
    for training in candidates:
        peers = (by_uid[uid] for uid in training.ranks_by_pod if uid in by_uid)
        if any(peer.lives and peer.key == pod.key for peer in peers) and not _is_taken(pod, training, by_uid):
            return training
    for training in candidates:
        before = frozenset[int]().union(*training.ranks_by_pod.values())
        claimed = {rank.rank for rank in pod.ranks}
        takes_over = bool(before & claimed) and not _is_taken(pod, training, by_uid)
        lives = any(by_uid[uid].lives for uid in training.ranks_by_pod if uid in by_uid)
        if takes_over or not lives:
            return training
    return None


def _is_taken(pod: DescribedPod, training: KnownTraining, by_uid: Mapping[str, DescribedPod]) -> bool:
    """Return whether a running pod of the training holds a rank that this pod has described."""
    claimed = {rank.rank for rank in pod.ranks}
    return any(
        by_uid[uid].lives and not claimed.isdisjoint(ranks)
        for uid, ranks in training.ranks_by_pod.items()
        if uid in by_uid and uid != pod.uid
    )
