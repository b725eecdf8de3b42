"""What the API server says against a request, in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .objects import Kind, Object


@dataclass(frozen=True)
class Cause:
    """What is wrong with one field of an object."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiError(Exception):
    """The answer of a request that failed."""

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


class Gone(ApiError):
    """A watch asks for changes that the API server no longer has: list anew."""

    def __init__(self, version: int) -> None:
        super().__init__(410, "Expired", f"too old resource version: {version}")


def not_found(kind: Kind, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{kind.resource} "{name}" not found', _details(kind, name))


def already_exists(kind: Kind, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', _details(kind, name))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(kind: Kind, name: str, why: str = MODIFIED, resource: str = "") -> ApiError:
    """`resource`: how the message names the kind, where that is another way than usual."""
    message = f'Operation cannot be fulfilled on {resource or kind.resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(kind, name))


def forbidden(kind: Kind, name: str, why: str, causes: Sequence[Cause] = ()) -> ApiError:
    details = _details(kind, name)
    if causes:
        details["causes"] = _listed(causes)
    return ApiError(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {why}', details)


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> ApiError:
    words = [f"{cause.field}: {cause.message}" for cause in causes]
    text = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    details = {
        "name": name,
        **({"group": kind.group} if kind.group else {}),
        "kind": kind.name,
        "causes": _listed(causes),
    }
    return ApiError(422, "Invalid", f'{kind.qualified} "{name}" is invalid: {text}', details)


PATCH_OPTIONS = Kind("", "PatchOptions", "meta.k8s.io/v1")
"""What the query of a patch says, where that is invalid."""


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def _listed(causes: Sequence[Cause]) -> list[Object]:
    return [{"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes]


def _details(kind: Kind, name: str) -> Object:
    return {"name": name, **({"group": kind.group} if kind.group else {}), "kind": kind.plural}
