"""Requests and limits of a container, as the platform configures them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json

Resources = Mapping[str, Mapping[str, str]]
"""Kubernetes' ResourceRequirements: quantities by name, under `requests` and `limits`."""
SIDECAR_RESOURCES: Resources = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}

_QUANTITY_PATTERN = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([num]|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?")
_QUANTITY_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_QUANTITY_UNITS |= {letter: 1e3**power for power, letter in enumerate("MGTPE", 2)}
_QUANTITY_UNITS |= {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


def parse_resources(text: str) -> Resources:
    """Parse resources from JSON.

    Raises InputError: otherwise the API server would reject pods, which would look like a fault of their jobs.
    """
    example = '{"requests": {"cpu": "20m"}, "limits": {"memory": "256Mi"}}'
    try:
        resources = parse_json(text)
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not JSON: write resources like {example}") from error
    if not isinstance(resources, dict) or not resources.keys() <= {"requests", "limits"}:
        raise InputError(f"{abbreviate_value(text)}: resources have `requests` and `limits`, like {example}")
    parsed = {kind: _parse_quantities(kind, quantities) for kind, quantities in resources.items()}
    for name, limit in parsed.get("limits", {}).items():
        request = parsed.get("requests", {}).get(name, "0")
        if _parse_amount(request) > _parse_amount(limit):
            raise InputError(
                f"requests of {abbreviate_value(name)}, {request}, are above its limit, {limit}: raise the limit"
            )
    return parsed


def is_same_quantity(one: str, other: str) -> bool:
    """Return whether two quantities of Kubernetes are equal, like `1` and `1000m`. Raises InputError."""
    return one == other or math.isclose(parse_quantity(one), parse_quantity(other))


def parse_quantity(quantity: str) -> float:
    """Return the amount of a quantity of Kubernetes. Raises InputError."""
    if not _QUANTITY_PATTERN.fullmatch(quantity):
        raise InputError(f"{abbreviate_value(quantity)} is no quantity: write one like 20m or 256Mi")
    return _parse_amount(quantity)


def explain_denial(denial: str, resources: Resources, container: str) -> str:
    """Return an explanation to append to the API server's denial of a pod; "": `container` has no part in it.

    `container` is one that the user did not write, and `resources` are its own. A LimitRange does not name containers,
    but it names the refused value.
    """
    if is_denied_for(denial, resources, container):
        cause = f"this is about container {container}, which Pacekeeper adds to each worker"
    elif _counts_resources(denial, resources):
        cause = f"container {container}, which Pacekeeper adds to each worker, counts in"
    else:
        return ""
    values = "; ".join(
        f"{kind}: {', '.join(f'{name} {quantity}' for name, quantity in quantities.items())}"
        for kind, quantities in resources.items()
    )
    remedy = "the platform team may change them by the chart's value sidecarResources"
    return f" ({cause} with {values or 'no requests and limits'}: {remedy})"


_LACKS = re.compile(r"must specify ([^;\]]+(?:;[^;\]]+ for: [^;\]]+)*)")
_REQUESTED = re.compile(r"exceeded quota: [^,]+, requested: (\S+), used: ")
_LIMIT = re.compile(
    r"([a-z][\w./-]*) (?:usage|max limit to request ratio) per (Container|Pod) is [^\s,]+?(?:,|\.)\s+(?:but )?"
    r"(?:(no) )?(request|limit|provided ratio) is ([^\s,\]]+)",
    re.IGNORECASE,
)
"""The parts of a LimitRange's message: resource, scope, whether the value is missing, which value, and the value."""


def is_denied_for(denial: str, resources: Resources, container: str) -> bool:
    """Return whether the denial is about this container.

    A quota requires a value that it lacks, or a LimitRange refuses a value that it has.
    """
    if lacking := _LACKS.search(denial):
        if " for: " in lacking[1]:
            return any(container in part.rpartition(" for: ")[2].split(",") for part in lacking[1].split("; "))
        return any(_get_quantity(resources, name.strip()) is None for name in lacking[1].split(","))
    return any(
        scope == "Container" and _exceeds_limit(resources, name, *details)
        for name, scope, *details in _LIMIT.findall(denial)
    )


def _counts_resources(denial: str, resources: Resources) -> bool:
    """Return whether a sum that includes this container's resources is too large."""
    requested = _REQUESTED.search(denial)
    names = [part.partition("=")[0] for part in requested[1].split(",")] if requested else []
    names += [name for name, scope, *_ in _LIMIT.findall(denial) if scope == "Pod"]
    return any(_get_quantity(resources, name) or _get_quantity(resources, f"limits.{name}") for name in names)


def _exceeds_limit(resources: Resources, name: str, missing: str, kind: str, value: str) -> bool:
    request, limit = _get_quantity(resources, f"requests.{name}"), _get_quantity(resources, f"limits.{name}")
    if missing:
        return (request if kind.lower() == "request" else limit) is None
    if kind == "provided ratio":
        ratio = _parse_amount(limit) / _parse_amount(request) if limit and request and _parse_amount(request) else None
        return ratio is not None and abs(ratio - float(value)) < 1e-3 * ratio
    actual = request if kind == "request" else limit
    return bool(actual and _QUANTITY_PATTERN.fullmatch(value)) and _parse_amount(actual or "0") == _parse_amount(value)


def _get_quantity(resources: Resources, name: str) -> str | None:
    """Return the quantity of `cpu`, `requests.cpu`, or `limits.cpu`, as quotas name them; None: it is not set."""
    kind, dot, rest = name.partition(".")
    if dot and kind in ("requests", "limits"):
        return resources.get(kind, {}).get(rest)
    return resources.get("requests", {}).get(name)


def _parse_quantities(kind: str, raw: object) -> Mapping[str, str]:
    if not isinstance(raw, dict):
        raise InputError(f'{kind} must be quantities by name, like {{"memory": "256Mi"}}')
    quantities = {name: str(quantity) for name, quantity in raw.items() if not isinstance(quantity, bool)}
    for name, quantity in raw.items():
        if not _QUANTITY_PATTERN.fullmatch(quantities.get(name, "")):
            subject = f"{kind} of {abbreviate_value(name)}"
            raise InputError(f"{abbreviate_value(quantity)} is no quantity for {subject}: write one like 20m or 256Mi")
    return quantities


def _parse_amount(quantity: str) -> float:
    match = _QUANTITY_PATTERN.fullmatch(quantity)
    assert match is not None  # it was checked when it was parsed
    number, unit = match[1], match[2] or ""
    return float(number) * _QUANTITY_UNITS[unit] if unit in _QUANTITY_UNITS else float(number + unit)
