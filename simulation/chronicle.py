"""Tells the story of what operators write: who the workers are, what befalls them, what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pacekeeper_operator import ledger
from pacekeeper_operator.api import LABEL_JOB, LABEL_PROBE
from pacekeeper_operator.state import Draft

if TYPE_CHECKING:
    from .kubernetes.api_server import Change
    from .world import World


class Chronicle:
    """Of one world. `reached`: what coverage counts of it."""

    def __init__(self, world: World) -> None:
        self.reached: set[str] = set()
        self._world = world
        self._drafts: dict[str, Draft] = {}  # by the uid of the TrainingJobState
        self._tellers: Mapping[str, Callable[[Change], None]] = {
            "trainingjobs": self._job,
            "trainingjobstates": self._state,
            "incidents": self._incident,
            "nodequarantines": self._quarantine,
            "pods": self._pod,
        }
        world.api.subscribe(self._heard)

    def _heard(self, change: Change) -> None:
        teller = self._tellers.get(change.plural)
        if teller is not None:
            teller(change)
        self._world.story.note(change.verb, change.plural, change.version)

    def _job(self, change: Change) -> None:
        status, before = _part(change, "status")
        phase = status.get("phase")
        if change.type == "DELETED":
            self._tell(change, "is gone")
        elif phase != before.get("phase"):
            self.reached.add(f"phase {phase}")
            message = status.get("message") or ""
            self._tell(change, f"is {phase}" + (f": {message[:100]}" if message else ""))

    def _state(self, change: Change) -> None:
        metadata = change.object["metadata"]
        if change.type == "DELETED":
            self._tell(change, "its bookkeeping is gone")
            return
        before = self._drafts.get(metadata["uid"])
        draft = self._drafts[metadata["uid"]] = ledger.read(change.object, metadata["name"]).draft
        plan = draft.plan
        if before is None or plan.membership != before.plan.membership or plan.members != before.plan.members:
            names = " ".join(member.worker for member in plan.members) or "nobody"
            self._tell(change, f"plan {plan.version}, membership {plan.membership}: {names}")
        elif plan.round != before.plan.round:
            self._tell(change, f"plan {plan.version}, round {plan.round}")
        if before is not None and plan.stop != before.plan.stop:
            self._tell(change, f"plan {plan.version}: {plan.stop or 'train'}")
        if before is not None and plan.sync_mode != before.plan.sync_mode:
            self._tell(change, f"plan {plan.version}: mode {plan.sync_mode}")
        if before is not None and plan.shares != before.plan.shares:
            self._tell(change, f"plan {plan.version}: shares {plan.shares}")
        known = {} if before is None else {worker.name: worker for worker in before.state.placement.workers}
        for worker in draft.state.placement.workers:
            if worker.leaving and (worker.name not in known or not known[worker.name].leaving):
                self._tell(change, f"gives {worker.name} up: {worker.leaving}")
        life = draft.state.life
        if life.failed_reason and (before is None or not before.state.life.failed_reason):
            self._tell(change, f"fails: {life.failed_reason}: {life.failed_message[:100]}")

    def _incident(self, change: Change) -> None:
        spec = change.object["spec"]
        status, before = _part(change, "status")
        if change.type == "ADDED":
            self.reached.add(f"cause {spec['cause']}")
            self._tell(change, f"opens: {spec.get('message', '')[:110]}")
        for key in ("remedy", "outcome"):
            if status.get(key) != before.get(key) and status.get(key):
                self.reached.update(f"{key} {word}" for word in str(status[key]).split(", "))
                self._tell(change, f"{key}: {status[key]}")

    def _quarantine(self, change: Change) -> None:
        status, before = _part(change, "status")
        if change.type == "ADDED":
            self._tell(change, f"begins: {change.object['spec'].get('reason', '')[:100]}")
        elif change.type == "DELETED":
            self._tell(change, "is gone")
        if status.get("phase") != before.get("phase"):
            self.reached.add(f"quarantine {status.get('phase')}")
            self._tell(change, f"is {status.get('phase')}: {(status.get('message') or '')[:100]}")
        for condition in status.get("conditions", ()):
            held = condition["type"] == "Witnessed" and condition["status"] == "True"
            self.reached.add(f"{'witness' if held else 'verdict'} {condition['reason']}")

    def _pod(self, change: Change) -> None:
        metadata = change.object["metadata"]
        labels = metadata.get("labels") or {}
        if LABEL_JOB not in labels and LABEL_PROBE not in labels:
            return
        before = change.before["metadata"] if change.before is not None else {}
        if change.type == "ADDED":
            self._tell(change, "is made")
        elif change.type == "DELETED":
            self._tell(change, f"is gone, by {change.who}")
        elif "deletionTimestamp" in metadata and "deletionTimestamp" not in before:
            self._tell(change, f"is being deleted, by {change.who}")

    def _tell(self, change: Change, words: str) -> None:
        self._world.story.tell(f"{_WORDS[change.plural]} {change.object['metadata']['name']}", words)


_WORDS = {
    "trainingjobs": "job",
    "trainingjobstates": "job",
    "incidents": "incident",
    "nodequarantines": "quarantine",
    "pods": "pod",
}


def _part(change: Change, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As it is, and as it was."""
    before = change.before.get(key) if change.before is not None else None
    return change.object.get(key) or {}, before or {}
