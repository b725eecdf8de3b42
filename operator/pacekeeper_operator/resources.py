"""What a container asks for and gets at most, as the platform says it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import brief, parse_json

Resources = Mapping[str, Mapping[str, str]]
"""Kubernetes' ResourceRequirements: quantities by name, under `requests` and `limits`."""
SIDECAR_RESOURCES: Resources = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}

_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([num]|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?")
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_UNITS |= {letter: 1e3**power for power, letter in enumerate("MGTPE", 2)}
_UNITS |= {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


def parse_resources(text: str) -> Resources:
    """From JSON. Raises InputError: pods that the API server refuses for them would be taken for their jobs' fault."""
    example = '{"requests": {"cpu": "20m"}, "limits": {"memory": "256Mi"}}'
    try:
        resources = parse_json(text)
    except ValueError as error:
        raise InputError(f"{brief(text)} is not JSON: write resources like {example}") from error
    if not isinstance(resources, dict) or not resources.keys() <= {"requests", "limits"}:
        raise InputError(f"{brief(text)}: resources have `requests` and `limits`, like {example}")
    read = {kind: _quantities(kind, quantities) for kind, quantities in resources.items()}
    for name, limit in read.get("limits", {}).items():
        request = read.get("requests", {}).get(name, "0")
        if _amount(request) > _amount(limit):
            raise InputError(f"requests of {brief(name)}, {request}, are above its limit, {limit}: raise the limit")
    return read


def _quantities(kind: str, found: object) -> Mapping[str, str]:
    if not isinstance(found, dict):
        raise InputError(f'{kind} must be quantities by name, like {{"memory": "256Mi"}}')
    quantities = {name: str(quantity) for name, quantity in found.items() if not isinstance(quantity, bool)}
    for name, quantity in found.items():
        if not _QUANTITY.fullmatch(quantities.get(name, "")):
            what = f"{kind} of {brief(name)}"
            raise InputError(f"{brief(quantity)} is no quantity for {what}: write one like 20m or 256Mi")
    return quantities


def _amount(quantity: str) -> float:
    found = _QUANTITY.fullmatch(quantity)
    assert found is not None  # it has been read
    number, unit = found[1], found[2] or ""
    return float(number) * _UNITS[unit] if unit in _UNITS else float(number + unit)
