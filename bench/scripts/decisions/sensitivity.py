"""How much the result depends on each constant of a deciding policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from .outcome import Outcome
from .outcome_statistics import compute_aggregates
from .policies import DECIDING_POLICIES, Variant

FACTORS = (0.5, 1.0, 2.0)
NOT_VALID = "not valid"


def build_variants(variant: Variant) -> Mapping[str, Variant]:
    """Return the policy as it is, and with each of its constants times each factor, by `name_variant`.

    A value that the constants' own class refuses, with a ValueError, is left out.
    """
    parameters = DECIDING_POLICIES[variant.policy].parameters
    variants = {variant.policy: variant}
    for name, value in list_constants(parameters).items():
        for factor in FACTORS:
            try:
                changed = replace(parameters, **{name: scale_value(value, factor)})
            except ValueError:
                continue
            if factor != 1.0:
                variants[name_variant(variant.policy, name, factor)] = replace(variant, parameters=changed)
    return variants


def list_constants(parameters: Any) -> dict[str, float]:
    """Return the numbers among the fields of a dataclass instance."""
    values = {field.name: getattr(parameters, field.name) for field in fields(parameters)}
    return {
        name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def scale_value(value: float, factor: float) -> float:
    """Return the value times the factor. An integer stays one, and at least 1."""
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def name_variant(policy: str, constant: str, factor: float) -> str:
    return policy if factor == 1.0 else f"{policy}, {constant} × {factor:g}"


def format_sensitivity(outcomes: Sequence[Outcome], policy: str) -> Iterable[str]:
    """A Markdown table: of each constant, the cost (mean / 95 % / most) and the false alarms at each factor."""
    columns = " | ".join(f"cost at × {factor:g}" for factor in FACTORS)
    yield f"| constant of {policy} | value | {columns} | false alarms |"
    yield "|---|---|---|---|---|---|"
    for constant, value in list_constants(DECIDING_POLICIES[policy].parameters).items():
        names = [name_variant(policy, constant, factor) for factor in FACTORS]
        figures = [compute_aggregates(outcomes, name) if name in outcomes[0].lost else None for name in names]
        costs = [
            NOT_VALID if each is None else f"{each['mean']:.3f} / {each['95 %']:.2f} / {each['most']:.2f}"
            for each in figures
        ]
        alarms = ["–" if each is None else f"{each['false alarms']:g}" for each in figures]
        yield f"| {constant} | {value:g} | {' | '.join(costs)} | {', '.join(alarms)} |"
