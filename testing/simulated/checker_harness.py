"""A harness for tests of checkers: an API server, and a checker that watches it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from pacekeeper_analysis.protocol.plan import Member
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import TAINT_QUARANTINE
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods import manifests
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import DesiredState, QuarantineRequest
from simulation.checkers import behavior, bookkeeping, nodes, write_ahead
from simulation.checkers.checker import Checker
from simulation.kubernetes.api.api_server import ApiServer
from simulation.loop import VirtualLoop
from simulation.network import SimulatedNetwork
from simulation.run_log import RunLog
from simulation.world import EPOCH, WorldSettings
from testing.operators import observations

OPERATOR = "operator-0"
Object = dict[str, Any]


class EmptyWorld:
    """A world in which there is nothing but an API server."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.log = RunLog(self.now)
        self.network = SimulatedNetwork(self.loop, self.create_random("network"))
        self.settings = WorldSettings()
        self.prometheus = SimpleNamespace(last_error={})
        self.api = ApiServer(self)

    def now(self) -> float:
        return self.loop.time()

    def wall_time(self, _place: str = "") -> float:
        return EPOCH + self.now()

    def create_random(self, purpose: str) -> random.Random:
        return random.Random(purpose)

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, call, *arguments)


class CheckerHarness:
    """A checker, and the API server that it watches. A job `j` of two replicas exists."""

    def __init__(self) -> None:
        self.world = EmptyWorld()
        self.api = self.world.api
        rules = (
            *bookkeeping.BOOKKEEPING_RULES,
            *write_ahead.WRITE_AHEAD_RULES,
            *nodes.NODE_RULES,
            *behavior.BEHAVIOR_RULES,
        )
        self.checker = Checker(cast(Any, self.world), cast(Any, None), rules=rules)
        for name in ("ns", "pacekeeper-system"):
            self.api.create("namespaces", {"metadata": {"name": name}})
        self.desired = observations.build_training(replicas=2, spares=1).desired
        self.job = self.create_job()

    def create_job(self, **spec: Any) -> TrainingJob:
        full_spec = {"replicas": 2, "spares": 1, "template": dict(observations.TEMPLATE), **spec}
        body = {"metadata": {"name": "j", "namespace": "ns"}, "spec": full_spec}
        return TrainingJob.parse(self.api.create("trainingjobs", body, manager="kubectl"))

    @property
    def violated_rules(self) -> list[str]:
        return [violation.rule for violation in self.checker.violations]

    def wait(self, seconds: float) -> None:
        self.world.loop._now += seconds

    def check_world(self) -> None:
        self.checker._check_world()

    def write_state(self, desired: DesiredState, who: str = OPERATOR) -> None:
        """As the job's bookkeeping."""
        self.desired = desired
        current = self.api.get("trainingjobstates", "j", "ns")
        version = "" if current is None else current["metadata"]["resourceVersion"]
        body = manifests.build_state_object(self.job, state_codec.encode_state(desired, "j"), version)
        (self.api.update if current else self.api.create)("trainingjobstates", body, manager=who)

    def begin_round(self, *workers: str, **plan: Any) -> DesiredState:
        """The draft with the next membership."""
        current_plan = self.desired.plan
        members = tuple(Member(worker, f"10.0.0.{i}", (i,)) for i, worker in enumerate(workers)) or current_plan.members
        return self.desired.with_plan(
            **{"membership": current_plan.membership + 1, "round": current_plan.round + 1, "members": members, **plan}
        )

    def create_pod(self, name: str, who: str = OPERATOR) -> Object:
        installation = manifests.Installation("https://operator", "")
        ordinal, incarnation = map(int, name.removeprefix("j-w").split("-"))
        return self.api.create(
            "pods", manifests.build_worker_pod(self.job, ordinal, incarnation, installation), manager=who
        )

    def create_node(self, name: str = "node-1", **parts: Object) -> Object:
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}, **parts.get("metadata", {})}
        self.api.create("nodes", {"metadata": metadata, "spec": {}})
        return self.set_ready(name, True)

    def set_ready(self, node: str, ready: bool) -> Object:
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        return self.api.patch("nodes", node, "", {"status": {"conditions": conditions}}, subresource="status")

    def request_quarantine(self, node: str = "node-1", incident: str = "i") -> None:
        request = QuarantineRequest(node, "", "because", incident)
        self.write_state(
            self.desired.with_incidents(
                quarantine_requests=(*self.desired.state.incidents.quarantine_requests, request)
            )
        )

    def suspect(self, node: str = "node-1", incident: str = "i", who: str = OPERATOR, **spec: Any) -> None:
        suspicion = {
            "namespace": "ns",
            "incident": incident,
            "reason": "because",
            "at": format_time(self.world.wall_time()),
        }
        reference = {"namespace": "ns", "name": incident}
        node_body = self.api.get("nodes", node)
        assert node_body is not None
        base_spec = {
            "reason": "because",
            "nodeUID": node_body["metadata"]["uid"],
            "incidentRef": reference,
            "suspicions": [suspicion],
        }
        self.api.create("nodequarantines", {"metadata": {"name": node}, "spec": base_spec | spec}, manager=who)

    def approve(self, node: str = "node-1", who: str = OPERATOR) -> None:
        self.api.patch("nodequarantines", node, "", {"spec": {"approved": True}}, manager=who)

    def taint(self, node: str = "node-1", who: str = OPERATOR) -> None:
        taints = [{"key": TAINT_QUARANTINE, "effect": "NoSchedule"}]
        self.api.patch("nodes", node, "", {"spec": {"taints": taints}}, manager=who)
