"""Tolerations of the operator's own probe pods, as the platform says them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import brief, parse_json

Toleration = Mapping[str, str | int]
"""Kubernetes' Toleration."""
_WORDS = {
    "key": (),
    "operator": ("Exists", "Equal"),
    "value": (),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
}
_EXAMPLE = '[{"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}]'


def parse_tolerations(text: str) -> tuple[Toleration, ...]:
    """From a JSON list. Raises InputError: probe pods that the API server refuses would say nothing about any node."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"{brief(text)} is not JSON: write tolerations like {_EXAMPLE}") from error
    if not isinstance(found, list):
        raise InputError(f"{brief(text)} is no list: write tolerations like {_EXAMPLE}")
    return tuple(_toleration(one) for one in found)


def _toleration(found: object) -> Toleration:
    if not isinstance(found, dict):
        raise InputError(f"{brief(found)} is no toleration: write one like {_EXAMPLE}")
    for name, value in found.items():
        if name == "tolerationSeconds" and isinstance(value, int) and not isinstance(value, bool):
            continue
        if name not in _WORDS or not isinstance(value, str) or (_WORDS[name] and value not in _WORDS[name]):
            raise InputError(f"{brief(name)}: {brief(value)} fits no toleration: write one like {_EXAMPLE}")
    return found
