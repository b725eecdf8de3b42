"""ResourceQuotas: pods are charged on creation, and released by the controller some time after they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .changes import ObjectChange
from .errors import build_forbidden
from .objects import Object, ServedKind, has_ended
from .ports import ControllerApi

QUOTA_CONTROLLER_NAME = "resourcequota-controller"
QUOTA_RECOUNT_SECONDS = 300.0
"""Seconds within which the controller recounts without a trigger."""
_RESOURCE_COUNTERS: Mapping[str, Callable[[Object], bool]] = {
    "pods": lambda pod: not has_ended(pod),
    "count/pods": lambda _: True,
}
"""The simulated quota resources: which pods count. Pods that are being deleted count."""


class QuotaController:
    """The quotas of all namespaces."""

    def __init__(self, api: ControllerApi) -> None:
        self._api = api

    def charge(self, kind: ServedKind, namespace: str, name: str, *, dry_run: bool) -> None:
        """Charge one pod. Raises ApiError if the quota is exceeded.

        A pod that exists already is charged, too, because the server notices that last. The next recount corrects it.
        """
        charged = [(quota, _charge_one(quota, kind, name)) for quota in self._api.list_all("resourcequotas", namespace)]
        if dry_run:
            return
        for quota, used in charged:
            self._write_status(quota, used)
        if charged and self._api.get("pods", name, namespace) is not None:
            self._api.call_later((0.0, QUOTA_RECOUNT_SECONDS), self._recount, namespace)

    def on_change(self, change: ObjectChange) -> None:
        """Recount some time after a relevant change."""
        body, previous = change.object, change.previous
        match change.plural:
            case "pods" if change.type == "DELETED" or (
                previous is not None and has_ended(body) != has_ended(previous)
            ):
                if not self._api.list_all("resourcequotas", body["metadata"]["namespace"]):
                    return
            case "resourcequotas" if change.type != "DELETED" and (
                previous is None or previous["spec"] != body["spec"]
            ):
                pass
            case _:
                return
        self._api.call_later(self._api.faults.quota_lag, self._recount, body["metadata"]["namespace"])

    def _recount(self, namespace: str) -> None:
        pods = self._api.list_all("pods", namespace)
        for quota in self._api.list_all("resourcequotas", namespace):
            self._write_status(
                quota, {name: str(sum(map(_RESOURCE_COUNTERS[name], pods))) for name in _read_limits(quota)}
            )

    def _write_status(self, quota: Object, used: Mapping[str, str]) -> None:
        metadata = quota["metadata"]
        status = {"hard": quota["spec"].get("hard", {}), "used": dict(used)}
        self._api.patch(
            "resourcequotas",
            metadata["name"],
            metadata["namespace"],
            {"status": status},
            subresource="status",
            manager=QUOTA_CONTROLLER_NAME,
        )


def _read_limits(quota: Object) -> list[str]:
    """Return the simulated resources that the quota limits."""
    return [name for name in quota["spec"].get("hard", {}) if name in _RESOURCE_COUNTERS]


def _charge_one(quota: Object, kind: ServedKind, name: str) -> dict[str, str]:
    """Return the usage with one more pod. Raises ApiError if it exceeds the quota."""
    quota_name, status, limits = quota["metadata"]["name"], quota.get("status", {}), _read_limits(quota)
    unknown = [key for key in limits if key not in status.get("used", {}) or key not in status.get("hard", {})]
    if unknown:
        raise build_forbidden(kind, name, f"status unknown for quota: {quota_name}, resources: {','.join(unknown)}")
    used, hard = status.get("used", {}), status.get("hard", {})
    exceeded = [key for key in limits if int(used[key]) + 1 > int(hard[key])]
    if exceeded:
        requested = ",".join(f"{key}=1" for key in exceeded)
        current = ",".join(f"{key}={used[key]}" for key in exceeded)
        limited = ",".join(f"{key}={hard[key]}" for key in exceeded)
        raise build_forbidden(
            kind, name, f"exceeded quota: {quota_name}, requested: {requested}, used: {current}, limited: {limited}"
        )
    return {key: str(int(used[key]) + 1) for key in limits}
