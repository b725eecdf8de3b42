"""ResourceQuotas: charged when a pod is made, given back by their controller a while after it has ended or gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .errors import build_forbidden
from .objects import ServedKind, Object, has_ended

if TYPE_CHECKING:
    from .api_server import ApiServer, ObjectChange

QUOTA_CONTROLLER_NAME = "resourcequota-controller"
QUOTA_RECOUNT_SECONDS = 300.0
"""So often it counts without a reason."""
_RESOURCE_COUNTERS: Mapping[str, Callable[[Object], bool]] = {
    "pods": lambda pod: not has_ended(pod),
    "count/pods": lambda _: True,
}
"""What of a quota is simulated: which pods count. Those that are being deleted do."""


class QuotaController:
    """Of all namespaces."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    def charge(self, kind: ServedKind, namespace: str, name: str, *, dry_run: bool) -> None:
        """Raises ApiError where there is no room for one pod more.

        Also what exists already is charged, as the server notices that last; the next count gives it back.
        """
        charged = [(quota, _charge_one(quota, kind, name)) for quota in self._api.list_all("resourcequotas", namespace)]
        if dry_run:
            return
        for quota, used in charged:
            self._write_status(quota, used)
        if charged and self._api.get("pods", name, namespace) is not None:
            self._api.call_later((0.0, QUOTA_RECOUNT_SECONDS), self._recount, namespace)

    def on_change(self, change: ObjectChange) -> None:
        """Counts anew, a while after there is a reason to."""
        body, before = change.object, change.previous
        match change.plural:
            case "pods" if change.type == "DELETED" or (before is not None and has_ended(body) != has_ended(before)):
                if not self._api.list_all("resourcequotas", body["metadata"]["namespace"]):
                    return
            case "resourcequotas" if change.type != "DELETED" and (before is None or before["spec"] != body["spec"]):
                pass
            case _:
                return
        self._api.call_later(self._api.faults.quota_lag, self._recount, body["metadata"]["namespace"])

    def _recount(self, namespace: str) -> None:
        pods = self._api.list_all("pods", namespace)
        for quota in self._api.list_all("resourcequotas", namespace):
            self._write_status(quota, {name: str(sum(map(_RESOURCE_COUNTERS[name], pods))) for name in _read_limits(quota)})

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
    """What it limits."""
    return [name for name in quota["spec"].get("hard", {}) if name in _RESOURCE_COUNTERS]


def _charge_one(quota: Object, kind: ServedKind, name: str) -> dict[str, str]:
    """What is used with one pod more."""
    title, status, limits = quota["metadata"]["name"], quota.get("status", {}), _read_limits(quota)
    unknown = [key for key in limits if key not in status.get("used", {}) or key not in status.get("hard", {})]
    if unknown:
        raise build_forbidden(kind, name, f"status unknown for quota: {title}, resources: {','.join(unknown)}")
    used, hard = status.get("used", {}), status.get("hard", {})
    over = [key for key in limits if int(used[key]) + 1 > int(hard[key])]
    if over:
        asked = ",".join(f"{key}=1" for key in over)
        taken = ",".join(f"{key}={used[key]}" for key in over)
        most = ",".join(f"{key}={hard[key]}" for key in over)
        raise build_forbidden(kind, name, f"exceeded quota: {title}, requested: {asked}, used: {taken}, limited: {most}")
    return {key: str(int(used[key]) + 1) for key in limits}
