"""A court for tests of judges: an API server, and a judge that listens to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from pacekeeper_analysis.plan import Member
from pacekeeper_operator import ledger, manifests
from pacekeeper_operator.api import TAINT_QUARANTINE, Job, format_time
from pacekeeper_operator.state import Draft, WantedQuarantine
from simulation.judges import behaviour, bookkeeping, nodes, promises
from simulation.judges.judge import Judge
from simulation.kubernetes.api_server import ApiServer
from simulation.loop import VirtualLoop
from simulation.network import Network
from simulation.story import Story
from simulation.world import EPOCH, WorldSettings
from tests.support import worlds

OPERATOR = "operator-0"
Object = dict[str, Any]


class Empty:
    """A world in which there is nothing but an API server."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.story = Story(self.now)
        self.network = Network(self.loop, self.random("network"))
        self.settings = WorldSettings()
        self.prometheus = SimpleNamespace(last_error={})
        self.api = ApiServer(self)

    def now(self) -> float:
        return self.loop.time()

    def wall(self, _place: str = "") -> float:
        return EPOCH + self.now()

    def random(self, purpose: str) -> random.Random:
        return random.Random(purpose)

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> object:
        return self.loop.call_later(seconds, call, *arguments)


class Court:
    """A judge, and the API server that it listens to. A job `j` of two replicas is there."""

    def __init__(self) -> None:
        self.world = Empty()
        self.api = self.world.api
        rules = (*bookkeeping.RULES, *promises.RULES, *nodes.RULES, *behaviour.RULES)
        self.judge = Judge(cast(Any, self.world), cast(Any, None), rules=rules)
        for name in ("ns", "pacekeeper-system"):
            self.api.create("namespaces", {"metadata": {"name": name}})
        self.draft = worlds.training(replicas=2, spares=1).draft
        self.job = self.make_job()

    def make_job(self, **spec: Any) -> Job:
        wanted = {"replicas": 2, "spares": 1, "template": dict(worlds.TEMPLATE), **spec}
        body = {"metadata": {"name": "j", "namespace": "ns"}, "spec": wanted}
        return Job.parse(self.api.create("trainingjobs", body, manager="kubectl"))

    @property
    def complaints(self) -> list[str]:
        return [found.rule for found in self.judge.violations]

    def wait(self, seconds: float) -> None:
        self.world.loop._now += seconds

    def look(self) -> None:
        self.judge._look()

    def write(self, draft: Draft, who: str = OPERATOR) -> None:
        """As the job's bookkeeping."""
        self.draft = draft
        found = self.api.get("trainingjobstates", "j", "ns")
        version = "" if found is None else found["metadata"]["resourceVersion"]
        body = manifests.state_object(self.job, ledger.write(draft, "j"), version)
        (self.api.update if found else self.api.create)("trainingjobstates", body, manager=who)

    def begin_round(self, *workers: str, **plan: Any) -> Draft:
        """The draft with the next membership."""
        now = self.draft.plan
        members = tuple(Member(worker, f"10.0.0.{i}", (i,)) for i, worker in enumerate(workers)) or now.members
        return self.draft.with_plan(
            **{"membership": now.membership + 1, "round": now.round + 1, "members": members, **plan}
        )

    def create_pod(self, name: str, who: str = OPERATOR) -> Object:
        installation = manifests.Installation("https://operator", "")
        ordinal, incarnation = map(int, name.removeprefix("j-w").split("-"))
        return self.api.create("pods", manifests.worker_pod(self.job, ordinal, incarnation, installation), manager=who)

    def create_node(self, name: str = "node-1", **parts: Object) -> Object:
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}, **parts.get("metadata", {})}
        self.api.create("nodes", {"metadata": metadata, "spec": {}})
        return self.set_ready(name, True)

    def set_ready(self, node: str, ready: bool) -> Object:
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        return self.api.patch("nodes", node, "", {"status": {"conditions": conditions}}, subresource="status")

    def ask_for_quarantine(self, node: str = "node-1", incident: str = "i") -> None:
        wanted = WantedQuarantine(node, "", "because", incident)
        self.write(self.draft.with_incidents(quarantines=(*self.draft.state.incidents.quarantines, wanted)))

    def suspect(self, node: str = "node-1", incident: str = "i", who: str = OPERATOR, **spec: Any) -> None:
        sign = {"namespace": "ns", "incident": incident, "reason": "because", "at": format_time(self.world.wall())}
        reference = {"namespace": "ns", "name": incident}
        found = self.api.get("nodes", node)
        assert found is not None
        wanted = {"reason": "because", "nodeUID": found["metadata"]["uid"], "incidentRef": reference, "signs": [sign]}
        self.api.create("nodequarantines", {"metadata": {"name": node}, "spec": wanted | spec}, manager=who)

    def approve(self, node: str = "node-1", who: str = OPERATOR) -> None:
        self.api.patch("nodequarantines", node, "", {"spec": {"approved": True}}, manager=who)

    def taint(self, node: str = "node-1", who: str = OPERATOR) -> None:
        taints = [{"key": TAINT_QUARANTINE, "effect": "NoSchedule"}]
        self.api.patch("nodes", node, "", {"spec": {"taints": taints}}, manager=who)
