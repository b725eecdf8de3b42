"""The analysis as a page: one self-contained HTML file."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np

from pacekeeper_analysis.pages import render_single_file
from pacekeeper_analysis.whatif.causes import CauseFinding
from pacekeeper_analysis.whatif.report.document import build_document
from pacekeeper_analysis.whatif.slowdown_statistics import WhatIf
from pacekeeper_analysis.whatif.window import RecordedWindow

MAX_PAGE_NUMBERS = 400_000
"""Upper limit of numbers in the page. Details of single workers are left out above it."""


def render_page(whatif: WhatIf, finding: CauseFinding, title: str) -> str:
    """Render the page as HTML text."""
    template = files("pacekeeper_analysis.whatif.report").joinpath("page.html").read_text(encoding="utf-8")
    return render_single_file(template, build_page_data(whatif, finding, title))


def build_page_data(whatif: WhatIf, finding: CauseFinding, title: str) -> dict[str, Any]:
    """Return the data of the page, rounded to visible precision."""
    decomposition = whatif.decomposition
    data = build_document(whatif, finding)
    for key in ("per_type", "per_step"):
        data[key] = None if data[key] is None else [[name, round(value, 4)] for name, value in data[key].items()]
    for key in ("per_dp", "per_stage", "per_worker"):
        data[key] = None if data[key] is None else np.round(np.array(data[key]), 4).tolist()
    data |= {
        "title": title,
        "remedy": finding.remedy,
        "blamed": finding.workers[:200],
        "warnings": whatif.warnings,
        "skipped": [[skipped.step, skipped.reason] for skipped in whatif.skipped[:50]],
        "worst": [] if decomposition is None else decomposition.worst_workers.workers[:200],
        "replica_steps": None,
        "own_seconds": None,
    }
    if decomposition is not None and decomposition.replica_slowdown_per_step.size <= MAX_PAGE_NUMBERS:
        data["replica_steps"] = np.round(decomposition.replica_slowdown_per_step, 4).tolist()
    if decomposition is not None:
        data["own_seconds"] = _tabulate_own_seconds(whatif.window, decomposition.slowdown_by_worker.shape)
    return data


def _tabulate_own_seconds(window: RecordedWindow, workers: tuple[int, ...]) -> list[dict[str, Any]] | None:
    """Tabulate by type: mean seconds per operation [replica][stage], ideal seconds, and count per step [stage].

    None if that were too many numbers.
    """
    types = sorted({operation.type for operation in window.operations})
    if len(types) * int(np.prod(workers)) > MAX_PAGE_NUMBERS:
        return None
    tables = []
    for name in types:
        mean, count = np.full(workers, np.nan), np.zeros(workers[1], dtype=int)
        nodes = [node for node, operation in enumerate(window.operations) if operation.type == name]
        for stage in {window.operations[node].stage for node in nodes}:
            own = [node for node in nodes if window.operations[node].stage == stage]
            count[stage] = len(own)
            mean[:, stage] = window.seconds[own].reshape(len(own), window.replicas, -1).mean(axis=(0, 2))
        rounded = [[None if np.isnan(value) else float(f"{value:.4g}") for value in row] for row in mean]
        ideal = float(f"{float(window.ideal[nodes[0]]):.4g}")
        tables.append({"type": name, "mean": rounded, "ideal": ideal, "count": count.tolist()})
    return tables
