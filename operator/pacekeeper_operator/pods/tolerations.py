"""Tolerations of the operator's own probe pods, as the platform configures them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json

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
    """Parse tolerations from a JSON list.

    Raises InputError: otherwise the API server would reject probe pods, and no node could be probed.
    """
    try:
        tolerations = parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{abbreviate_value(text)} is not JSON: write tolerations like {_TOLERATION_EXAMPLE}"
        ) from error
    if not isinstance(tolerations, list):
        raise InputError(f"{abbreviate_value(text)} is not a list: write tolerations like {_TOLERATION_EXAMPLE}")
    return tuple(_check_toleration(toleration) for toleration in tolerations)


def _check_toleration(toleration: object) -> Toleration:
    if not isinstance(toleration, dict):
        raise InputError(f"{abbreviate_value(toleration)} is not a toleration: write one like {_TOLERATION_EXAMPLE}")
    for name, value in toleration.items():
        if name == "tolerationSeconds" and isinstance(value, int) and not isinstance(value, bool):
            continue
        if (
            name not in _TOLERATION_FIELD_VALUES
            or not isinstance(value, str)
            or (_TOLERATION_FIELD_VALUES[name] and value not in _TOLERATION_FIELD_VALUES[name])
        ):
            raise InputError(
                f"{abbreviate_value(name)}: {abbreviate_value(value)} fits no toleration: write one like "
                f"{_TOLERATION_EXAMPLE}"
            )
    return toleration
