"""ResourceQuotas: charged when a pod is made, given back by their controller a while after it has ended or gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .errors import forbidden
from .objects import Kind, Object, ended

if TYPE_CHECKING:
    from .api_server import ApiServer, Change

CONTROLLER = "resourcequota-controller"
RECOUNT_SECONDS = 300.0
"""So often it counts without a reason."""
_COUNTS: Mapping[str, Callable[[Object], bool]] = {
    "pods": lambda pod: not ended(pod),
    "count/pods": lambda _: True,
}
"""What of a quota is simulated: which pods count. Those that are being deleted do."""


class Quotas:
    """Of all namespaces."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    def charge(self, kind: Kind, namespace: str, name: str, *, dry_run: bool) -> None:
        """Raises ApiError where there is no room for one pod more.

        Also what exists already is charged, as the server notices that last; the next count gives it back.
        """
        charged = [(quota, _charged(quota, kind, name)) for quota in self._api.all("resourcequotas", namespace)]
        if dry_run:
            return
        for quota, used in charged:
            self._write(quota, used)
        if charged and self._api.get("pods", name, namespace) is not None:
            self._api.later((0.0, RECOUNT_SECONDS), self._count, namespace)

    def hear(self, change: Change) -> None:
        """Counts anew, a while after there is a reason to."""
        body, before = change.object, change.before
        match change.plural:
            case "pods" if change.type == "DELETED" or (before is not None and ended(body) != ended(before)):
                if not self._api.all("resourcequotas", body["metadata"]["namespace"]):
                    return
            case "resourcequotas" if change.type != "DELETED" and (before is None or before["spec"] != body["spec"]):
                pass
            case _:
                return
        self._api.later(self._api.faults.quota_lag, self._count, body["metadata"]["namespace"])

    def _count(self, namespace: str) -> None:
        pods = self._api.all("pods", namespace)
        for quota in self._api.all("resourcequotas", namespace):
            self._write(quota, {name: str(sum(map(_COUNTS[name], pods))) for name in _limits(quota)})

    def _write(self, quota: Object, used: Mapping[str, str]) -> None:
        metadata = quota["metadata"]
        status = {"hard": quota["spec"].get("hard", {}), "used": dict(used)}
        self._api.patch(
            "resourcequotas",
            metadata["name"],
            metadata["namespace"],
            {"status": status},
            subresource="status",
            manager=CONTROLLER,
        )


def _limits(quota: Object) -> list[str]:
    """What it limits."""
    return [name for name in quota["spec"].get("hard", {}) if name in _COUNTS]


def _charged(quota: Object, kind: Kind, name: str) -> dict[str, str]:
    """What is used with one pod more."""
    title, status, limits = quota["metadata"]["name"], quota.get("status", {}), _limits(quota)
    unknown = [key for key in limits if key not in status.get("used", {}) or key not in status.get("hard", {})]
    if unknown:
        raise forbidden(kind, name, f"status unknown for quota: {title}, resources: {','.join(unknown)}")
    used, hard = status.get("used", {}), status.get("hard", {})
    over = [key for key in limits if int(used[key]) + 1 > int(hard[key])]
    if over:
        asked = ",".join(f"{key}=1" for key in over)
        taken = ",".join(f"{key}={used[key]}" for key in over)
        most = ",".join(f"{key}={hard[key]}" for key in over)
        raise forbidden(kind, name, f"exceeded quota: {title}, requested: {asked}, used: {taken}, limited: {most}")
    return {key: str(int(used[key]) + 1) for key in limits}
