"""What tenants do with their jobs, and what people do with what the operator keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from pacekeeper_operator.api import API_VERSION, LABEL_JOB, PAUSE
from pacekeeper_operator.codec import camel_case, to_json
from pacekeeper_operator.legacy import LEFT_BEHIND, RENAMED

from ..kubernetes.errors import ApiError
from ..world import NAMESPACE, OPERATOR_NAMESPACE
from .fault import Fault, Heal, JobFault, Missed, NodeFault
from .scene import PERSON

if TYPE_CHECKING:
    from .scene import Scene

Object = dict[str, Any]


@dataclass(frozen=True)
class JobScaled(JobFault):
    """To so many replicas, for good."""

    replicas: int = 2

    def strike(self, scene: Scene) -> None:
        spec: Object = {"replicas": self.replicas}
        if scene.job(self.job)["spec"].get("minReplicas", 0) > self.replicas:
            spec["minReplicas"] = self.replicas
        scene.tell(f"job {scene.settings(self.job).name} is scaled to {self.replicas}")
        scene.edit(self.job, spec)


@dataclass(frozen=True)
class JobSuspended(JobFault):
    """And resumed; `edits`: its template is changed meanwhile, as soon as it may be."""

    edits: bool = False

    def strike(self, scene: Scene) -> Heal:
        scene.tell(f"job {scene.settings(self.job).name} is suspended")
        uid = scene.job(self.job)["metadata"]["uid"]
        scene.edit(self.job, {"suspend": True})

        def heal() -> None:
            if self._there(scene, uid):
                if self.edits:
                    attempt(scene, lambda: scene.edit(self.job, {"template": {"metadata": {"labels": {"new": "yes"}}}}))
                scene.tell(f"job {scene.settings(self.job).name} is resumed")
                scene.edit(self.job, {"suspend": False})

        return heal

    def _there(self, scene: Scene, uid: str) -> bool:
        try:
            return bool(scene.job(self.job)["metadata"]["uid"] == uid)
        except Missed:
            return False


class Edit(StrEnum):
    """What a tenant changes of a job that runs."""

    SYNC_MODE = "sync-mode"
    RECOMMEND = "recommend"
    ACT = "act"
    MAX_RESTARTS = "max-restarts"
    SPARES = "spares"
    NO_SPARES = "no-spares"
    DETECTION = "detection"
    ALLOW_LITTLE = "allow-little"


EDITS: dict[Edit, Object] = {
    Edit.SYNC_MODE: {"syncMode": "EDiT"},
    Edit.RECOMMEND: {"remediation": {"mode": "Recommend"}},
    Edit.ACT: {"remediation": {"mode": "Act"}},
    Edit.MAX_RESTARTS: {"remediation": {"maxRestarts": 200}},
    Edit.SPARES: {"spares": 2},
    Edit.NO_SPARES: {"spares": 0},
    Edit.DETECTION: {"detection": {"stragglerSlowdown": 1.5}},
    Edit.ALLOW_LITTLE: {"remediation": {"allow": ["RestartRanks", "ReplaceWorker"]}},
}


@dataclass(frozen=True)
class JobEdited(JobFault):
    """What is changed is changed back where the job could not end well under it."""

    edit: Edit = Edit.SYNC_MODE

    def strike(self, scene: Scene) -> Heal | None:
        before = scene.job(self.job)["spec"]
        scene.tell(f"job {scene.settings(self.job).name}: {EDITS[self.edit]}")
        scene.edit(self.job, EDITS[self.edit])
        if self.edit not in (Edit.RECOMMEND, Edit.ALLOW_LITTLE):
            return None
        back = {"remediation": before["remediation"]}

        def heal() -> None:
            try:
                scene.edit(self.job, back)
            except Missed:
                return

        return heal


INVALID: tuple[Object, ...] = (
    {"replicas": 0},
    {"replicas": 1, "minReplicas": 3},
    {"syncMode": "Fast"},
    {"nprocPerNode": 2},
    {"template": {"spec": {"nodeName": "node-0"}}},
    {"schedulingTimeout": "soon"},
)


@dataclass(frozen=True)
class InvalidEdit(JobFault):
    """One that the API server refuses."""

    number: int = 0

    def strike(self, scene: Scene) -> None:
        attempt(scene, lambda: scene.edit(self.job, INVALID[self.number % len(INVALID)]))


@dataclass(frozen=True)
class JobDeleted(JobFault):
    """With `again` it is made anew under its name as soon as it is gone; `by_force` its finalizers are taken off."""

    again: bool = False
    by_force: bool = False

    def strike(self, scene: Scene) -> None:
        body, name, api = scene.job(self.job), scene.settings(self.job).name, scene.world.api
        scene.tell(f"job {name} is deleted" + (" by force" if self.by_force else ""))
        uid = body["metadata"]["uid"]
        api.delete("trainingjobs", name, NAMESPACE)
        if self.by_force and api.get("trainingjobs", name, NAMESPACE) is not None:
            api.patch("trainingjobs", name, NAMESPACE, {"metadata": {"finalizers": None}}, manager=PERSON)
        if self.again:
            scene.when_gone("trainingjobs", name, uid, lambda: attempt(scene, lambda: scene.make_job(self.job)))


@dataclass(frozen=True)
class JobFinishes(JobFault):
    """After so many steps more."""

    steps: int = 5

    def strike(self, scene: Scene) -> None:
        training = scene.training(self.job)
        until = max((run.progress.step for run in training.runs), default=0) + self.steps
        training.until = until if training.until is None else min(until, training.until)
        scene.tell(f"job {scene.settings(self.job).name} will be done after step {training.until}")


@dataclass(frozen=True)
class IncidentsDeleted(Fault):
    """All, by a tenant."""

    def strike(self, scene: Scene) -> None:
        incidents = scene.world.api.all("incidents", NAMESPACE)
        if not incidents:
            raise Missed("there are no incidents")
        scene.tell("all incidents are deleted")
        for body in incidents:
            scene.world.api.delete("incidents", body["metadata"]["name"], NAMESPACE)


@dataclass(frozen=True)
class StateDeleted(JobFault):
    """A job's TrainingJobState, by somebody who may."""

    def strike(self, scene: Scene) -> None:
        name = scene.settings(self.job).name
        if scene.world.api.get("trainingjobstates", name, NAMESPACE) is None:
            raise Missed(f"nothing is written of job {name}")
        scene.tell(f"TrainingJobState {name} is deleted")
        scene.world.api.delete("trainingjobstates", name, NAMESPACE)


class StateEdit(StrEnum):
    """What somebody writes into a TrainingJobState."""

    NEWER = "newer"  # fields that only a newer operator knows
    OLDER = "older"  # without what a newer schema has brought
    SPOILT = "spoilt"  # words that cannot be read, in a place that can be done without
    TOUCHED = "touched"  # nothing that matters: its version alone is another one


@dataclass(frozen=True)
class StateEdited(JobFault):
    """By hand, or by another version of the operator."""

    edit: StateEdit = StateEdit.TOUCHED

    def strike(self, scene: Scene) -> None:
        api, name = scene.world.api, scene.settings(self.job).name
        found = api.get("trainingjobstates", name, NAMESPACE)
        if found is None:
            raise Missed(f"nothing is written of job {name}")
        body = deepcopy(found)
        match self.edit:
            case StateEdit.NEWER:
                body["state"]["inventions"] = {"first": [1, 2], "second": "x"}
                body["state"]["budget"]["invented"] = 3
            case StateEdit.OLDER:
                for owner, key in (("placement", "startingSince"), ("adaptation", "toleratedBehind")):
                    body["state"][owner].pop(key, None)
                body["state"]["placement"]["workers"].pop("startingSince", None)
                body["state"].pop("gpus", None)
            case StateEdit.SPOILT:
                body["state"]["adaptation"]["vain"] = "never"
            case StateEdit.TOUCHED:
                body["metadata"].setdefault("annotations", {})["example.com/seen"] = f"{scene.world.now():.3f}"
        scene.tell(f"TrainingJobState {name} is edited: {self.edit}")
        attempt(scene, lambda: api.update("trainingjobstates", body, manager=PERSON))


@dataclass(frozen=True)
class StateOfOldOperator(JobFault):
    """The operator is replaced by one that finds the ConfigMap of a version before TrainingJobStates."""

    def strike(self, scene: Scene) -> None:
        api, name = scene.world.api, scene.settings(self.job).name
        draft, metadata = scene.draft(self.job), scene.job(self.job)["metadata"]
        owner = {
            "apiVersion": API_VERSION,
            "kind": "TrainingJob",
            "name": name,
            "uid": metadata["uid"],
            "controller": True,
        }
        old: Object = {}
        for part in (draft.state.life, draft.state.placement, draft.state.budget, draft.state.adaptation):
            old |= to_json(part, {})
        for new, then in RENAMED.items():
            old[then] = old.pop(camel_case(new), None)
        for name_ in LEFT_BEHIND:
            old.pop(camel_case(name_), None)
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"{name}-plan",
                "namespace": NAMESPACE,
                "labels": {LABEL_JOB: name},
                "ownerReferences": [owner],
            },
            "data": {"plan.json": json.dumps(draft.plan.to_json()), "state.json": json.dumps(old)},
        }
        scene.tell(f"job {name} is as an operator of an older version has left it")
        for pod in list(scene.world.deployment.pods):
            pod.kill()
        api.delete("trainingjobstates", name, NAMESPACE)
        attempt(scene, lambda: api.create("configmaps", body, manager="pacekeeper"))


@dataclass(frozen=True)
class QuarantineMade(NodeFault):
    """By a person, of a node."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        body = {
            "apiVersion": API_VERSION,
            "kind": "NodeQuarantine",
            "metadata": {"name": node.name},
            "spec": {"reason": "it smells", "approved": True},
        }
        scene.tell(f"a person quarantines {node.name}")
        attempt(scene, lambda: scene.world.api.create("nodequarantines", body, manager=PERSON))
        return lambda: _end_quarantine(scene, node.name)


@dataclass(frozen=True)
class _QuarantineFault(Fault):
    """Strikes one that there is."""

    __abstract__: ClassVar = True
    index: int = 0

    def name(self, scene: Scene) -> str:
        found = scene.world.api.all("nodequarantines")
        if not found:
            raise Missed("there is no quarantine")
        return str(found[self.index % len(found)]["metadata"]["name"])


@dataclass(frozen=True)
class QuarantineApproved(_QuarantineFault):
    """By a person."""

    def strike(self, scene: Scene) -> None:
        name = self.name(scene)
        scene.tell(f"a person approves the quarantine of {name}")
        scene.world.api.patch("nodequarantines", name, "", {"spec": {"approved": True}}, manager=PERSON)


@dataclass(frozen=True)
class QuarantineDeleted(_QuarantineFault):
    """By a person."""

    def strike(self, scene: Scene) -> None:
        _end_quarantine(scene, self.name(scene))


@dataclass(frozen=True)
class RemediesPaused(Fault):
    """By the platform team's switch."""

    def strike(self, scene: Scene) -> Heal:
        api = scene.world.api
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PAUSE, "namespace": OPERATOR_NAMESPACE},
            "data": {"reason": "maintenance of the network"},
        }
        scene.tell("remedies are paused")
        attempt(scene, lambda: api.create("configmaps", body, manager=PERSON))

        def heal() -> None:
            if api.get("configmaps", PAUSE, OPERATOR_NAMESPACE) is not None:
                scene.tell("remedies go on")
                api.delete("configmaps", PAUSE, OPERATOR_NAMESPACE)

        return heal


def attempt(scene: Scene, write: Callable[[], object]) -> None:
    """People read what the API server says against it, and leave it."""
    try:
        write()
    except ApiError as error:
        scene.tell(f"refused: {error.message[:120]}")


def _end_quarantine(scene: Scene, node: str) -> None:
    if scene.world.api.get("nodequarantines", node) is not None:
        scene.tell(f"a person ends the quarantine of {node}")
        scene.world.api.delete("nodequarantines", node)
