"""Tolerations of the operator's own probe pods, as the platform says them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import abbreviate_value, parse_json

Toleration = Mapping[str, str | int]
"""Kubernetes' Toleration."""
_TOLERATION_FIELD_VALUES = {
    "key": (),
    "operator": ("Exists", "Equal"),
    "value": (),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
}
_TOLERATION_EXAMPLE = '[{"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}]'


def parse_tolerations(text: str) -> tuple[Toleration, ...]:
    """From a JSON list. Raises InputError: probe pods that the API server refuses would say nothing about any node."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not JSON: write tolerations like {_TOLERATION_EXAMPLE}") from error
    if not isinstance(found, list):
        raise InputError(f"{abbreviate_value(text)} is no list: write tolerations like {_TOLERATION_EXAMPLE}")
    return tuple(_check_toleration(one) for one in found)


def _check_toleration(found: object) -> Toleration:
    if not isinstance(found, dict):
        raise InputError(f"{abbreviate_value(found)} is no toleration: write one like {_TOLERATION_EXAMPLE}")
    for name, value in found.items():
        if name == "tolerationSeconds" and isinstance(value, int) and not isinstance(value, bool):
            continue
        if name not in _TOLERATION_FIELD_VALUES or not isinstance(value, str) or (_TOLERATION_FIELD_VALUES[name] and value not in _TOLERATION_FIELD_VALUES[name]):
            raise InputError(f"{abbreviate_value(name)}: {abbreviate_value(value)} fits no toleration: write one like {_TOLERATION_EXAMPLE}")
    return found
