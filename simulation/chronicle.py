"""Tells the story of what operators write: who the workers are, what befalls them, what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pacekeeper_operator.api import LABEL_JOB, LABEL_PROBE
from pacekeeper_operator.ledger import read_runs

if TYPE_CHECKING:
    from .kubernetes.api_server import Change
    from .world import World


class Chronicle:
    """Of one world. `reached`: what coverage counts of it."""

    def __init__(self, world: World) -> None:
        self.reached: set[str] = set()
        self._world = world
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
        if change.type == "DELETED":
            self._tell(change, "its bookkeeping is gone")
            return
        job = change.object["metadata"]["name"]
        plan, before = change.object["plan"], change.before["plan"] if change.before is not None else {}
        head = f"plan {plan['version']}"
        if any(plan.get(key) != before.get(key) for key in ("membership", "members")):
            names = " ".join(_workers(plan["members"], job)) or "nobody"
            self._tell(change, f"{head}, membership {plan['membership']}: {names}")
        elif plan["round"] != before.get("round"):
            self._tell(change, f"{head}, round {plan['round']}")
        for key in ("stop", "syncMode", "shares"):
            if change.before is not None and plan.get(key) != before.get(key):
                self._tell(change, f"{head}: {key} {plan.get(key) or 'is over'}")
        for worker, why in self._given_up(change):
            self._tell(change, f"gives {worker} up: {why}")
        life, once = (body["state"]["life"] if body is not None else {} for body in (change.object, change.before))
        if life.get("failedReason") != once.get("failedReason", ""):
            self._tell(change, f"fails: {life['failedReason']}: {life.get('failedMessage', '')[:100]}")

    @staticmethod
    def _given_up(change: Change) -> list[tuple[str, str]]:
        """(worker, why) of those that were not before."""
        columns = change.object["state"]["placement"]["workers"]
        marks = {int(place): mark["leaving"] for place, mark in columns.get("marks", {}).items() if "leaving" in mark}
        if not marks:
            return []
        job = change.object["metadata"]["name"]
        names, before = _workers(columns, job), dict[str, Any]()
        if change.before is not None:
            old = change.before["state"]["placement"]["workers"]
            old_names = _workers(old, job)
            before = {old_names[int(place)]: mark.get("leaving") for place, mark in old.get("marks", {}).items()}
        return [(names[place], why) for place, why in marks.items() if before.get(names[place]) != why]

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


def _workers(columns: Mapping[str, Any], job: str) -> list[str]:
    """Names, as a TrainingJobState writes them."""
    numbers = zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True)
    return [f"{job}-w{ordinal}-{incarnation}" for ordinal, incarnation in numbers]


def _part(change: Change, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As it is, and as it was."""
    before = change.before.get(key) if change.before is not None else None
    return change.object.get(key) or {}, before or {}
