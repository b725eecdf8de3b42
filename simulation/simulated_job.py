"""A job of a schedule, as its user creates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_operator.api.names import API_VERSION, TRAINER_CONTAINER

from .workers.training_script import REPLICA_RANKS
from .world import NAMESPACE


@dataclass(frozen=True)
class SimulatedJob:
    """A TrainingJob that a user creates."""

    name: str = "a"
    replicas: int = 3
    spares: int = 1
    min_replicas: int | None = None
    ranks: int = 1  # per worker
    replica_ranks: int = 1  # only multiples of this number of ranks can train
    start_seconds: float = 0.0  # virtual time of its creation
    spec: Mapping[str, Any] = field(default_factory=dict)  # further fields of its spec

    def build_manifest(self) -> dict[str, Any]:
        variable = {"name": REPLICA_RANKS, "value": str(self.replica_ranks)}
        environment = {"env": [variable]} if self.replica_ranks > 1 else {}
        template = {
            "spec": {
                "terminationGracePeriodSeconds": 20,
                "containers": [
                    {
                        "name": TRAINER_CONTAINER,
                        "image": "trainer",
                        "resources": {"requests": {"cpu": "900m"}},
                        **environment,
                    }
                ],
            }
        }
        min_replicas = {} if self.min_replicas is None else {"minReplicas": self.min_replicas}
        return {
            "apiVersion": API_VERSION,
            "kind": "TrainingJob",
            "metadata": {"name": self.name, "namespace": NAMESPACE},
            "spec": {
                "replicas": self.replicas,
                "spares": self.spares,
                **min_replicas,
                "nprocPerNode": self.ranks,
                "template": template,
                **self.spec,
            },
        }
