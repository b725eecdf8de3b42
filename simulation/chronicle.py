"""Tells the story of what operators write: who the workers are, what befalls them, what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pacekeeper_operator.api import LABEL_JOB, LABEL_PROBE
from pacekeeper_operator.ledger import read_runs

if TYPE_CHECKING:
    from .kubernetes.api_server import ObjectChange
    from .world import World


class ChangeLogger:
    """Of one world. `reached`: what coverage counts of it."""

    def __init__(self, world: World) -> None:
        self.reached: set[str] = set()
        self._world = world
        self._loggers: Mapping[str, Callable[[ObjectChange], None]] = {
            "trainingjobs": self._log_job,
            "trainingjobstates": self._log_state,
            "incidents": self._log_incident,
            "nodequarantines": self._log_quarantine,
            "pods": self._log_pod,
        }
        world.api.subscribe(self._on_change)

    def _on_change(self, change: ObjectChange) -> None:
        teller = self._loggers.get(change.plural)
        if teller is not None:
            teller(change)
        self._world.log.record_for_digest(change.verb, change.plural, change.version)

    def _log_job(self, change: ObjectChange) -> None:
        status, before = _get_before_and_after(change, "status")
        phase = status.get("phase")
        if change.type == "DELETED":
            self._log_change(change, "is gone")
        elif phase != before.get("phase"):
            self.reached.add(f"phase {phase}")
            message = status.get("message") or ""
            self._log_change(change, f"is {phase}" + (f": {message[:100]}" if message else ""))

    def _log_state(self, change: ObjectChange) -> None:
        if change.type == "DELETED":
            self._log_change(change, "its bookkeeping is gone")
            return
        job = change.object["metadata"]["name"]
        plan, before = change.object["plan"], change.previous["plan"] if change.previous is not None else {}
        head = f"plan {plan['version']}"
        if any(plan.get(key) != before.get(key) for key in ("membership", "members")):
            names = " ".join(_build_worker_names(plan["members"], job)) or "nobody"
            self._log_change(change, f"{head}, membership {plan['membership']}: {names}")
        elif plan["round"] != before.get("round"):
            self._log_change(change, f"{head}, round {plan['round']}")
        for key in ("stop", "syncMode", "shares"):
            if change.previous is not None and plan.get(key) != before.get(key):
                self._log_change(change, f"{head}: {key} {plan.get(key) or 'is over'}")
        for worker, why in self._list_given_up(change):
            self._log_change(change, f"gives {worker} up: {why}")
        life, once = (body["state"]["life"] if body is not None else {} for body in (change.object, change.previous))
        if life.get("failedReason") != once.get("failedReason", ""):
            self._log_change(change, f"fails: {life['failedReason']}: {life.get('failedMessage', '')[:100]}")

    @staticmethod
    def _list_given_up(change: ObjectChange) -> list[tuple[str, str]]:
        """(worker, why) of those that were not before."""
        columns = change.object["state"]["placement"]["workers"]
        marks = {int(place): mark["leaving"] for place, mark in columns.get("marks", {}).items() if "leaving" in mark}
        if not marks:
            return []
        job = change.object["metadata"]["name"]
        names, before = _build_worker_names(columns, job), dict[str, Any]()
        if change.previous is not None:
            old = change.previous["state"]["placement"]["workers"]
            old_names = _build_worker_names(old, job)
            before = {old_names[int(place)]: mark.get("leaving") for place, mark in old.get("marks", {}).items()}
        return [(names[place], why) for place, why in marks.items() if before.get(names[place]) != why]

    def _log_incident(self, change: ObjectChange) -> None:
        spec = change.object["spec"]
        status, before = _get_before_and_after(change, "status")
        if change.type == "ADDED":
            self.reached.add(f"cause {spec['cause']}")
            self._log_change(change, f"opens: {spec.get('message', '')[:110]}")
        for key in ("remedy", "outcome"):
            if status.get(key) != before.get(key) and status.get(key):
                self.reached.update(f"{key} {word}" for word in str(status[key]).split(", "))
                self._log_change(change, f"{key}: {status[key]}")

    def _log_quarantine(self, change: ObjectChange) -> None:
        status, before = _get_before_and_after(change, "status")
        if change.type == "ADDED":
            self._log_change(change, f"begins: {change.object['spec'].get('reason', '')[:100]}")
        elif change.type == "DELETED":
            self._log_change(change, "is gone")
        if status.get("phase") != before.get("phase"):
            self.reached.add(f"quarantine {status.get('phase')}")
            self._log_change(change, f"is {status.get('phase')}: {(status.get('message') or '')[:100]}")
        for condition in status.get("conditions", ()):
            held = condition["type"] == "Witnessed" and condition["status"] == "True"
            self.reached.add(f"{'witness' if held else 'verdict'} {condition['reason']}")

    def _log_pod(self, change: ObjectChange) -> None:
        metadata = change.object["metadata"]
        labels = metadata.get("labels") or {}
        if LABEL_JOB not in labels and LABEL_PROBE not in labels:
            return
        before = change.previous["metadata"] if change.previous is not None else {}
        if change.type == "ADDED":
            self._log_change(change, "is made")
        elif change.type == "DELETED":
            self._log_change(change, f"is gone, by {change.actor}")
        elif "deletionTimestamp" in metadata and "deletionTimestamp" not in before:
            self._log_change(change, f"is being deleted, by {change.actor}")

    def _log_change(self, change: ObjectChange, words: str) -> None:
        self._world.log.record(f"{_PLURAL_TO_NOUN[change.plural]} {change.object['metadata']['name']}", words)


_PLURAL_TO_NOUN = {
    "trainingjobs": "job",
    "trainingjobstates": "job",
    "incidents": "incident",
    "nodequarantines": "quarantine",
    "pods": "pod",
}


def _build_worker_names(columns: Mapping[str, Any], job: str) -> list[str]:
    """Names, as a TrainingJobState writes them."""
    numbers = zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True)
    return [f"{job}-w{ordinal}-{incarnation}" for ordinal, incarnation in numbers]


def _get_before_and_after(change: ObjectChange, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As it is, and as it was."""
    before = change.previous.get(key) if change.previous is not None else None
    return change.object.get(key) or {}, before or {}
