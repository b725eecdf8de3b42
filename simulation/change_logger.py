"""Logs what operators write: the workers, what happens to them, and the remedies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pacekeeper_operator.api.names import LABEL_JOB, LABEL_PROBE
from pacekeeper_operator.state.state_codec import read_runs

from .kubernetes.api.changes import ObjectChange
from .world import World


class ChangeLogger:
    """Logs the changes of one world. `reached`: what they count for coverage."""

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
        logger = self._loggers.get(change.plural)
        if logger is not None:
            logger(change)
        self._world.log.record_for_digest(change.verb, change.plural, change.version)

    def _log_job(self, change: ObjectChange) -> None:
        status, old_status = _get_before_and_after(change, "status")
        phase = status.get("phase")
        if change.type == "DELETED":
            self._log_change(change, "is gone")
        elif phase != old_status.get("phase"):
            self.reached.add(f"phase {phase}")
            message = status.get("message") or ""
            self._log_change(change, f"is {phase}" + (f": {message[:100]}" if message else ""))

    def _log_state(self, change: ObjectChange) -> None:
        if change.type == "DELETED":
            self._log_change(change, "its bookkeeping is gone")
            return
        job = change.object["metadata"]["name"]
        plan, old_plan = change.object["plan"], change.previous["plan"] if change.previous is not None else {}
        prefix = f"plan {plan['version']}"
        if any(plan.get(key) != old_plan.get(key) for key in ("membership", "members")):
            names = " ".join(_build_worker_names(plan["members"], job)) or "nobody"
            self._log_change(change, f"{prefix}, membership {plan['membership']}: {names}")
        elif plan["round"] != old_plan.get("round"):
            self._log_change(change, f"{prefix}, round {plan['round']}")
        for key in ("stop", "syncMode", "shares"):
            if change.previous is not None and plan.get(key) != old_plan.get(key):
                self._log_change(change, f"{prefix}: {key} {plan.get(key) or 'is over'}")
        for worker, reason in self._list_given_up(change):
            self._log_change(change, f"gives {worker} up: {reason}")
        lifecycle, old_lifecycle = (
            body["state"]["lifecycle"] if body is not None else {} for body in (change.object, change.previous)
        )
        if lifecycle.get("failedReason") != old_lifecycle.get("failedReason", ""):
            self._log_change(change, f"fails: {lifecycle['failedReason']}: {lifecycle.get('failedMessage', '')[:100]}")

    @staticmethod
    def _list_given_up(change: ObjectChange) -> list[tuple[str, str]]:
        """Return (worker, reason) of the workers that are given up since the previous version."""
        columns = change.object["state"]["placement"]["workers"]
        marks = {int(index): mark["leaving"] for index, mark in columns.get("marks", {}).items() if "leaving" in mark}
        if not marks:
            return []
        job = change.object["metadata"]["name"]
        names, old_reasons = _build_worker_names(columns, job), dict[str, Any]()
        if change.previous is not None:
            old_columns = change.previous["state"]["placement"]["workers"]
            old_names = _build_worker_names(old_columns, job)
            old_reasons = {
                old_names[int(index)]: mark.get("leaving") for index, mark in old_columns.get("marks", {}).items()
            }
        return [(names[index], reason) for index, reason in marks.items() if old_reasons.get(names[index]) != reason]

    def _log_incident(self, change: ObjectChange) -> None:
        spec = change.object["spec"]
        status, old_status = _get_before_and_after(change, "status")
        if change.type == "ADDED":
            self.reached.add(f"cause {spec['cause']}")
            self._log_change(change, f"opens: {spec.get('message', '')[:110]}")
        for key in ("remedy", "outcome"):
            if status.get(key) != old_status.get(key) and status.get(key):
                self.reached.update(f"{key} {value}" for value in str(status[key]).split(", "))
                self._log_change(change, f"{key}: {status[key]}")

    def _log_quarantine(self, change: ObjectChange) -> None:
        status, old_status = _get_before_and_after(change, "status")
        if change.type == "ADDED":
            self._log_change(change, f"begins: {change.object['spec'].get('reason', '')[:100]}")
        elif change.type == "DELETED":
            self._log_change(change, "is gone")
        if status.get("phase") != old_status.get("phase"):
            self.reached.add(f"quarantine {status.get('phase')}")
            self._log_change(change, f"is {status.get('phase')}: {(status.get('message') or '')[:100]}")
        for condition in status.get("conditions", ()):
            is_witnessed = condition["type"] == "Witnessed" and condition["status"] == "True"
            self.reached.add(f"{'witness' if is_witnessed else 'verdict'} {condition['reason']}")

    def _log_pod(self, change: ObjectChange) -> None:
        metadata = change.object["metadata"]
        labels = metadata.get("labels") or {}
        if LABEL_JOB not in labels and LABEL_PROBE not in labels:
            return
        old_metadata = change.previous["metadata"] if change.previous is not None else {}
        if change.type == "ADDED":
            self._log_change(change, "is made")
        elif change.type == "DELETED":
            self._log_change(change, f"is gone, by {change.actor}")
        elif "deletionTimestamp" in metadata and "deletionTimestamp" not in old_metadata:
            self._log_change(change, f"is being deleted, by {change.actor}")

    def _log_change(self, change: ObjectChange, message: str) -> None:
        self._world.log.record(f"{_PLURAL_TO_NOUN[change.plural]} {change.object['metadata']['name']}", message)


_PLURAL_TO_NOUN = {
    "trainingjobs": "job",
    "trainingjobstates": "job",
    "incidents": "incident",
    "nodequarantines": "quarantine",
    "pods": "pod",
}


def _build_worker_names(columns: Mapping[str, Any], job: str) -> list[str]:
    """Return the worker names that a TrainingJobState encodes."""
    numbers = zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True)
    return [f"{job}-w{ordinal}-{incarnation}" for ordinal, incarnation in numbers]


def _get_before_and_after(change: ObjectChange, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the present and the previous value."""
    previous = change.previous.get(key) if change.previous is not None else None
    return change.object.get(key) or {}, previous or {}
