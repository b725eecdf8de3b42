"""Users' actions on their jobs, and on the operator's objects."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pacekeeper_operator.api.names import API_VERSION, PAUSE_CONFIG_MAP

from ..kubernetes.api.errors import ApiError
from ..world import NAMESPACE, OPERATOR_NAMESPACE
from .context import PERSON_MANAGER, FaultContext
from .fault import Fault, HealCallback, JobFault, NodeFault
from .targets import TargetMissing

Object = dict[str, Any]


@dataclass(frozen=True)
class JobScaled(JobFault):
    """A job is scaled permanently."""

    replicas: int = 2

    def inject(self, context: FaultContext) -> None:
        spec: Object = {"replicas": self.replicas}
        if context.get_job(self.job)["spec"].get("minReplicas", 0) > self.replicas:
            spec["minReplicas"] = self.replicas
        context.log(f"job {context.get_job_settings(self.job).name} is scaled to {self.replicas}")
        context.edit_job(self.job, spec)


@dataclass(frozen=True)
class JobSuspended(JobFault):
    """A job is suspended and resumed. `edits`: its template is changed in between, as soon as that is allowed."""

    edits: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        context.log(f"job {context.get_job_settings(self.job).name} is suspended")
        uid = context.get_job(self.job)["metadata"]["uid"]
        context.edit_job(self.job, {"suspend": True})

        def heal() -> None:
            if self._is_same_job(context, uid):
                if self.edits:
                    attempt_write(
                        context,
                        lambda: context.edit_job(self.job, {"template": {"metadata": {"labels": {"new": "yes"}}}}),
                    )
                context.log(f"job {context.get_job_settings(self.job).name} is resumed")
                context.edit_job(self.job, {"suspend": False})

        return heal

    def _is_same_job(self, context: FaultContext, uid: str) -> bool:
        try:
            return bool(context.get_job(self.job)["metadata"]["uid"] == uid)
        except TargetMissing:
            return False


class JobEdit(StrEnum):
    """What a user changes in a running job."""

    SYNC_MODE = "sync-mode"
    RECOMMEND = "recommend"
    ACT = "act"
    MAX_RESTARTS = "max-restarts"
    SPARES = "spares"
    NO_SPARES = "no-spares"
    DETECTION = "detection"
    ALLOW_LITTLE = "allow-little"


JOB_EDITS: dict[JobEdit, Object] = {
    JobEdit.SYNC_MODE: {"syncMode": "EDiT"},
    JobEdit.RECOMMEND: {"remediation": {"mode": "Recommend"}},
    JobEdit.ACT: {"remediation": {"mode": "Act"}},
    JobEdit.MAX_RESTARTS: {"remediation": {"maxRestarts": 200}},
    JobEdit.SPARES: {"spares": 2},
    JobEdit.NO_SPARES: {"spares": 0},
    JobEdit.DETECTION: {"detection": {"stragglerSlowdown": 1.5}},
    JobEdit.ALLOW_LITTLE: {"remediation": {"allow": ["RestartRanks", "ReplaceWorker"]}},
}


@dataclass(frozen=True)
class JobEdited(JobFault):
    """A job's spec is edited. The edit is reverted if the job could not end well with it."""

    edit: JobEdit = JobEdit.SYNC_MODE

    def inject(self, context: FaultContext) -> HealCallback | None:
        old_spec = context.get_job(self.job)["spec"]
        context.log(f"job {context.get_job_settings(self.job).name}: {JOB_EDITS[self.edit]}")
        context.edit_job(self.job, JOB_EDITS[self.edit])
        if self.edit not in (JobEdit.RECOMMEND, JobEdit.ALLOW_LITTLE):
            return None
        revert = {"remediation": old_spec["remediation"]}

        def heal() -> None:
            try:
                context.edit_job(self.job, revert)
            except TargetMissing:
                return

        return heal


INVALID_SPECS: tuple[Object, ...] = (
    {"replicas": 0},
    {"replicas": 1, "minReplicas": 3},
    {"syncMode": "Fast"},
    {"nprocPerNode": 2},
    {"template": {"spec": {"nodeName": "node-0"}}},
    {"schedulingTimeout": "soon"},
)


@dataclass(frozen=True)
class InvalidEdit(JobFault):
    """An edit that the API server rejects."""

    number: int = 0

    def inject(self, context: FaultContext) -> None:
        attempt_write(context, lambda: context.edit_job(self.job, INVALID_SPECS[self.number % len(INVALID_SPECS)]))


@dataclass(frozen=True)
class JobDeleted(JobFault):
    """A job is deleted.

    `recreate`: a job of its name is created when it is gone. `force`: its finalizers are removed.
    """

    recreate: bool = False
    force: bool = False

    def inject(self, context: FaultContext) -> None:
        body, name, api = context.get_job(self.job), context.get_job_settings(self.job).name, context.world.api
        context.log(f"job {name} is deleted" + (" by force" if self.force else ""))
        uid = body["metadata"]["uid"]
        api.delete("trainingjobs", name, NAMESPACE)
        if self.force and api.get("trainingjobs", name, NAMESPACE) is not None:
            api.patch("trainingjobs", name, NAMESPACE, {"metadata": {"finalizers": None}}, manager=PERSON_MANAGER)
        if self.recreate:
            context.call_when_deleted(
                "trainingjobs", name, uid, lambda: attempt_write(context, lambda: context.create_job(self.job))
            )


@dataclass(frozen=True)
class JobFinishes(JobFault):
    """A job finishes after `steps` more steps."""

    steps: int = 5

    def inject(self, context: FaultContext) -> None:
        training = context.find_training(self.job)
        last_step = max((training_round.progress.step for training_round in training.rounds), default=0) + self.steps
        training.last_step = last_step if training.last_step is None else min(last_step, training.last_step)
        context.log(f"job {context.get_job_settings(self.job).name} will be done after step {training.last_step}")


@dataclass(frozen=True)
class IncidentsDeleted(Fault):
    """A user deletes all incidents."""

    def inject(self, context: FaultContext) -> None:
        incidents = context.world.api.list_all("incidents", NAMESPACE)
        if not incidents:
            raise TargetMissing("there are no incidents")
        context.log("all incidents are deleted")
        for body in incidents:
            context.world.api.delete("incidents", body["metadata"]["name"], NAMESPACE)


@dataclass(frozen=True)
class StateDeleted(JobFault):
    """A user with permission deletes a job's TrainingJobState.

    `unattended`: all operator pods are killed first, so that the next operator has never read it.
    """

    unattended: bool = False

    def inject(self, context: FaultContext) -> None:
        name = context.get_job_settings(self.job).name
        if context.world.api.get("trainingjobstates", name, NAMESPACE) is None:
            raise TargetMissing(f"job {name} has no bookkeeping")
        if self.unattended:
            for pod in list(context.world.deployment.pods):
                pod.kill()
        context.log(f"TrainingJobState {name} is deleted")
        context.world.api.delete("trainingjobstates", name, NAMESPACE)


class StateEdit(StrEnum):
    """How a TrainingJobState is edited."""

    NEWER = "newer"  # with fields of a newer operator
    OLDER = "older"  # without fields of a newer schema
    CORRUPTED = "corrupted"  # with an unreadable value in a field that can be omitted
    TOUCHED = "touched"  # only its version changes


@dataclass(frozen=True)
class StateEdited(JobFault):
    """A TrainingJobState is edited by hand, or by another version of the operator."""

    edit: StateEdit = StateEdit.TOUCHED

    def inject(self, context: FaultContext) -> None:
        api, name = context.world.api, context.get_job_settings(self.job).name
        stored = api.get("trainingjobstates", name, NAMESPACE)
        if stored is None:
            raise TargetMissing(f"job {name} has no bookkeeping")
        body = deepcopy(stored)
        match self.edit:
            case StateEdit.NEWER:
                body["state"]["inventions"] = {"first": [1, 2], "second": "x"}
                body["state"]["budget"]["invented"] = 3
            case StateEdit.OLDER:
                for owner, key in (("placement", "startingSince"), ("adaptation", "suppressedPeerSlowdown")):
                    body["state"][owner].pop(key, None)
                body["state"]["placement"]["workers"].pop("startingSince", None)
                body["state"].pop("gpus", None)
            case StateEdit.CORRUPTED:
                body["state"]["adaptation"]["fruitlessInvestigation"] = "never"
            case StateEdit.TOUCHED:
                body["metadata"].setdefault("annotations", {})["example.com/seen"] = f"{context.world.now():.3f}"
        context.log(f"TrainingJobState {name} is edited: {self.edit}")
        attempt_write(context, lambda: api.update("trainingjobstates", body, manager=PERSON_MANAGER))


@dataclass(frozen=True)
class QuarantineMade(NodeFault):
    """A user quarantines a node."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        body = {
            "apiVersion": API_VERSION,
            "kind": "NodeQuarantine",
            "metadata": {"name": node.name},
            "spec": {"reason": "it smells", "approved": True},
        }
        context.log(f"a person quarantines {node.name}")
        attempt_write(context, lambda: context.world.api.create("nodequarantines", body, manager=PERSON_MANAGER))
        return lambda: _end_quarantine(context, node.name)


@dataclass(frozen=True)
class _QuarantineFault(Fault):
    """Affects an existing quarantine."""

    __abstract__: ClassVar = True
    index: int = 0

    def find_name(self, context: FaultContext) -> str:
        quarantines = context.world.api.list_all("nodequarantines")
        if not quarantines:
            raise TargetMissing("there is no quarantine")
        return str(quarantines[self.index % len(quarantines)]["metadata"]["name"])


@dataclass(frozen=True)
class QuarantineApproved(_QuarantineFault):
    """A user approves a quarantine."""

    def inject(self, context: FaultContext) -> None:
        name = self.find_name(context)
        context.log(f"a person approves the quarantine of {name}")
        context.world.api.patch("nodequarantines", name, "", {"spec": {"approved": True}}, manager=PERSON_MANAGER)


@dataclass(frozen=True)
class QuarantineDeleted(_QuarantineFault):
    """A user deletes a quarantine."""

    def inject(self, context: FaultContext) -> None:
        _end_quarantine(context, self.find_name(context))


@dataclass(frozen=True)
class RemediesPaused(Fault):
    """The platform team pauses remedies."""

    def inject(self, context: FaultContext) -> HealCallback:
        api = context.world.api
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PAUSE_CONFIG_MAP, "namespace": OPERATOR_NAMESPACE},
            "data": {"reason": "maintenance of the network"},
        }
        context.log("remedies are paused")
        attempt_write(context, lambda: api.create("configmaps", body, manager=PERSON_MANAGER))

        def heal() -> None:
            if api.get("configmaps", PAUSE_CONFIG_MAP, OPERATOR_NAMESPACE) is not None:
                context.log("remedies resume")
                api.delete("configmaps", PAUSE_CONFIG_MAP, OPERATOR_NAMESPACE)

        return heal


def attempt_write(context: FaultContext, write: Callable[[], object]) -> None:
    """Write as a user. A rejection is logged and otherwise ignored."""
    try:
        write()
    except ApiError as error:
        context.log(f"refused: {error.message[:120]}")


def _end_quarantine(context: FaultContext, node: str) -> None:
    if context.world.api.get("nodequarantines", node) is not None:
        context.log(f"a person ends the quarantine of {node}")
        context.world.api.delete("nodequarantines", node)
