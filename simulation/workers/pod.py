"""A worker's pod, as the processes in it see it."""

from __future__ import annotations

from pacekeeper_analysis.protocol.reports import Heartbeat
from pacekeeper_operator.api.names import LABEL_JOB, TRAINER_CONTAINER

from ..kubernetes.api.objects import Object
from ..ports import SharedWorld
from .folder import PodFolder
from .ports import ObservingLauncher, ReportingSidecar
from .training_script import TrainingScript

BAD_VALUE = "ValueError: the script has a mistake"
MISTAKE = "NameError: name 'model' is not defined"
"""Errors of a script. The second one is in its source code: no outage causes it."""


class WorkerPod:
    """What a worker's launcher, sidecar, and ranks share, and what faults change there."""

    training: TrainingScript
    launcher: ObservingLauncher
    sidecar: ReportingSidecar

    def __init__(self, world: SharedWorld, pod: Object, node: str, address: str) -> None:
        metadata = pod["metadata"]
        trainer = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER_CONTAINER)
        self.pod = pod
        self.name: str = metadata["name"]
        self.uid: str = metadata["uid"]
        self.namespace: str = metadata["namespace"]
        self.job: str = metadata["labels"][LABEL_JOB]
        self.job_uid: str = metadata["ownerReferences"][0]["uid"]
        self.node = node
        self.address = address
        self.environment: dict[str, str] = {
            item["name"]: str(item["value"]) for item in trainer.get("env", ()) if "value" in item
        }
        self.arguments: list[str] = trainer.get("args", [])
        self.window_steps = int(self.environment.get("PACEKEEPER_WINDOW_STEPS") or 32)
        self.folder = PodFolder(Heartbeat(worker=self.name, commands_may_follow=False))
        self.is_gone = False
        """Whether all of its processes have ended."""
        self.script_fails = False
        """Whether each rank that starts here fails before its first step."""
        self.script_error = BAD_VALUE
        """The error of such a rank."""
        self.wrong_metrics = ""
        """How its sidecar's metrics are wrong: "huge", or "foreign"; "": they are not."""
        self.refuses_requests = False
        """Whether the ranks here refuse any training config but the simplest."""
        self.loss_is_bad = False
        self._network = world.network

    @property
    def has_no_power(self) -> bool:
        return not self._network.can_reach(self.node, self.node)
