"""How well the prices of remedies were predicted: the ratio of predicted to measured, over all Incidents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

MAX_MEDIAN_RATIO = 1.5
"""Limit of the median ratio, and of its inverse."""
PRICE_FIELDS = {"cost": ("predictedCost", "measuredCost"), "gain": ("predictedGain", "measuredGain")}


@dataclass(frozen=True)
class PriceAccuracy:
    """The ratios of predicted to measured seconds of training. Live changes cost nothing, and have no ratio."""

    ratios_by_remedy: Mapping[str, tuple[float, ...]]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(ratio for ratios in self.ratios_by_remedy.values() for ratio in ratios)

    @property
    def is_accurate(self) -> bool:
        return not self.ratios or 1 / MAX_MEDIAN_RATIO <= median(self.ratios) <= MAX_MEDIAN_RATIO

    def to_json(self) -> dict[str, Any]:
        return {
            "remedies": len(self.ratios),
            "median_ratio": median(self.ratios) if self.ratios else None,
            "by_remedy": {name: sorted(round(r, 3) for r in found) for name, found in self.ratios_by_remedy.items()},
        }


def compare_prices(incidents: Iterable[Mapping[str, Any]]) -> dict[str, PriceAccuracy]:
    """Return the accuracy of costs and of gains. `incidents`: objects as the API server has them."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in PRICE_FIELDS}
    for incident in incidents:
        status = incident.get("status") or {}
        kind = f"{incident['spec']['cause']} {status.get('remedy')}"
        for name, (predicted, measured) in PRICE_FIELDS.items():
            if status.get(predicted, 0.0) > 0 and status.get(measured, 0.0) > 0:
                found[name][kind].append(status[predicted] / status[measured])
    return {
        name: PriceAccuracy({kind: tuple(ratios) for kind, ratios in by_kind.items()})
        for name, by_kind in found.items()
    }


def format_prices(incidents: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each Incident that has a measured cost, with what it consists of."""
    for incident in incidents:
        status = incident.get("status") or {}
        if status.get("measuredCost", 0.0) > 0:
            fields = ("remedy", "predictedCost", "measuredCost", "stepsLost", "restart")
            yield f"{incident['metadata']['name']}: " + ", ".join(f"{name} {status.get(name)}" for name in fields)
