"""Errors of the API server, with its own messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .objects import Object, ServedKind


@dataclass(frozen=True)
class FieldError:
    """An error of one field of an object."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiError(Exception):
    """The answer to a request that failed."""

    def __init__(self, status: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.details = details

    def body(self) -> Object:
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
        }
        return body if self.details is None else {**body, "details": self.details}


class WatchExpired(ApiError):
    """A watch requests changes that the API server no longer has: the client must list again."""

    def __init__(self, version: int) -> None:
        super().__init__(410, "Expired", f"too old resource version: {version}")


def build_not_found(kind: ServedKind, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{kind.resource} "{name}" not found', _build_details(kind, name))


def build_already_exists(kind: ServedKind, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', _build_details(kind, name))


MODIFIED_MESSAGE = "the object has been modified; please apply your changes to the latest version and try again"


def build_conflict(kind: ServedKind, name: str, detail: str = MODIFIED_MESSAGE, resource: str = "") -> ApiError:
    """Build a conflict error. `resource`: how the message names the kind; "": as usual."""
    message = f'Operation cannot be fulfilled on {resource or kind.resource} "{name}": {detail}'
    return ApiError(409, "Conflict", message, _build_details(kind, name))


def build_forbidden(kind: ServedKind, name: str, detail: str, causes: Sequence[FieldError] = ()) -> ApiError:
    details = _build_details(kind, name)
    if causes:
        details["causes"] = _list_causes(causes)
    return ApiError(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {detail}', details)


def build_invalid(kind: ServedKind, name: str, causes: Sequence[FieldError]) -> ApiError:
    messages = [f"{cause.field}: {cause.message}" for cause in causes]
    text = messages[0] if len(messages) == 1 else f"[{', '.join(messages)}]"
    details = {
        "name": name,
        **({"group": kind.group} if kind.group else {}),
        "kind": kind.name,
        "causes": _list_causes(causes),
    }
    return ApiError(422, "Invalid", f'{kind.qualified_name} "{name}" is invalid: {text}', details)


PATCH_OPTIONS_KIND = ServedKind("", "PatchOptions", "meta.k8s.io/v1")
"""The kind in errors about the query parameters of a patch."""


def build_bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def _list_causes(causes: Sequence[FieldError]) -> list[Object]:
    return [{"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes]


def _build_details(kind: ServedKind, name: str) -> Object:
    return {"name": name, **({"group": kind.group} if kind.group else {}), "kind": kind.plural}
