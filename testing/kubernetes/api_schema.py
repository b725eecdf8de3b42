"""The API server's own schemas of built-in kinds, as the Kubernetes client has them: fields, types, what must be."""

from __future__ import annotations

from typing import Any

from kubernetes.client import models
from pydantic import ValidationError


def is_known(body: dict[str, Any]) -> bool:
    return hasattr(models, _get_model_name(body))


def find_schema_errors(body: dict[str, Any]) -> list[str]:
    """Where the API server would refuse the object, if it validates strictly. AttributeError: it is not known."""
    try:
        getattr(models, _get_model_name(body)).model_validate(body, strict=True)
    except ValidationError as validation_error:
        return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in validation_error.errors()]
    return []


def _get_model_name(body: dict[str, Any]) -> str:
    return f"{body['apiVersion'].rpartition('/')[2].capitalize()}{body['kind']}"
