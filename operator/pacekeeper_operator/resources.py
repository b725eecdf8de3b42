"""What a container asks for and gets at most, as the platform says it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import abbreviate_value, parse_json

Resources = Mapping[str, Mapping[str, str]]
"""Kubernetes' ResourceRequirements: quantities by name, under `requests` and `limits`."""
SIDECAR_RESOURCES: Resources = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}

_QUANTITY_PATTERN = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([num]|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?")
_QUANTITY_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_QUANTITY_UNITS |= {letter: 1e3**power for power, letter in enumerate("MGTPE", 2)}
_QUANTITY_UNITS |= {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


def parse_resources(text: str) -> Resources:
    """From JSON. Raises InputError: pods that the API server refuses for them would be taken for their jobs' fault."""
    example = '{"requests": {"cpu": "20m"}, "limits": {"memory": "256Mi"}}'
    try:
        resources = parse_json(text)
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not JSON: write resources like {example}") from error
    if not isinstance(resources, dict) or not resources.keys() <= {"requests", "limits"}:
        raise InputError(f"{abbreviate_value(text)}: resources have `requests` and `limits`, like {example}")
    read = {kind: _parse_quantities(kind, quantities) for kind, quantities in resources.items()}
    for name, limit in read.get("limits", {}).items():
        request = read.get("requests", {}).get(name, "0")
        if _parse_amount(request) > _parse_amount(limit):
            raise InputError(f"requests of {abbreviate_value(name)}, {request}, are above its limit, {limit}: raise the limit")
    return read


def explain_denial(denial: str, resources: Resources, container: str) -> str:
    """Return what to add to the API server's denial of a pod for the resources of `container`, which the user has not
    written; "": they have no part in it.

    resources: that this container has. A LimitRange does not name containers, but says which figure it refuses.
    """
    if _is_refused(denial, resources, container):
        what = f"this is about container {container}, which Pacekeeper adds to each worker"
    elif _counts(denial, resources):
        what = f"container {container}, which Pacekeeper adds to each worker, counts in"
    else:
        return ""
    has = "; ".join(
        f"{kind}: {', '.join(f'{name} {quantity}' for name, quantity in quantities.items())}"
        for kind, quantities in resources.items()
    )
    remedy = "the platform team may change them by the chart's value sidecarResources"
    return f" ({what} with {has or 'no requests and limits'}: {remedy})"


_LACKS = re.compile(r"must specify ([^;\]]+(?:;[^;\]]+ for: [^;\]]+)*)")
_REQUESTED = re.compile(r"exceeded quota: [^,]+, requested: (\S+), used: ")
_LIMIT = re.compile(
    r"([a-z][\w./-]*) (?:usage|max limit to request ratio) per (Container|Pod) is [^\s,]+?(?:,|\.)\s+(?:but )?"
    r"(?:(no) )?(request|limit|provided ratio) is ([^\s,\]]+)",
    re.IGNORECASE,
)
"""Of a LimitRange: resource, per what, whether the figure is missing, which figure, and its value."""


def _is_refused(denial: str, resources: Resources, container: str) -> bool:
    """Return whether a quota misses something in this container, or a LimitRange refuses a figure that it has."""
    if lacking := _LACKS.search(denial):
        if " for: " in lacking[1]:
            return any(container in part.rpartition(" for: ")[2].split(",") for part in lacking[1].split("; "))
        return any(_quantity(resources, name.strip()) is None for name in lacking[1].split(","))
    return any(of == "Container" and _has(resources, name, *told) for name, of, *told in _LIMIT.findall(denial))


def _counts(denial: str, resources: Resources) -> bool:
    """Return whether a sum is too large in which this container's resources count."""
    requested = _REQUESTED.search(denial)
    names = [each.partition("=")[0] for each in requested[1].split(",")] if requested else []
    names += [name for name, of, *_ in _LIMIT.findall(denial) if of == "Pod"]
    return any(_quantity(resources, name) or _quantity(resources, f"limits.{name}") for name in names)


def _has(resources: Resources, name: str, missing: str, what: str, value: str) -> bool:
    request, limit = _quantity(resources, f"requests.{name}"), _quantity(resources, f"limits.{name}")
    if missing:
        return (request if what.lower() == "request" else limit) is None
    if what == "provided ratio":
        has = _parse_amount(limit) / _parse_amount(request) if limit and request and _parse_amount(request) else None
        return has is not None and abs(has - float(value)) < 1e-3 * has
    found = request if what == "request" else limit
    return bool(found and _QUANTITY_PATTERN.fullmatch(value)) and _parse_amount(found or "0") == _parse_amount(value)


def _quantity(resources: Resources, name: str) -> str | None:
    """Return the quantity of `cpu`, `requests.cpu` or `limits.cpu`, as quotas name them; None: there is none."""
    kind, dot, rest = name.partition(".")
    if dot and kind in ("requests", "limits"):
        return resources.get(kind, {}).get(rest)
    return resources.get("requests", {}).get(name)


def _parse_quantities(kind: str, found: object) -> Mapping[str, str]:
    if not isinstance(found, dict):
        raise InputError(f'{kind} must be quantities by name, like {{"memory": "256Mi"}}')
    quantities = {name: str(quantity) for name, quantity in found.items() if not isinstance(quantity, bool)}
    for name, quantity in found.items():
        if not _QUANTITY_PATTERN.fullmatch(quantities.get(name, "")):
            what = f"{kind} of {abbreviate_value(name)}"
            raise InputError(f"{abbreviate_value(quantity)} is no quantity for {what}: write one like 20m or 256Mi")
    return quantities


def _parse_amount(quantity: str) -> float:
    found = _QUANTITY_PATTERN.fullmatch(quantity)
    assert found is not None  # it has been read
    number, unit = found[1], found[2] or ""
    return float(number) * _QUANTITY_UNITS[unit] if unit in _QUANTITY_UNITS else float(number + unit)
