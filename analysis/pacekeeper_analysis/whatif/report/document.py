"""The analysis as JSON."""

from __future__ import annotations

from typing import Any

from pacekeeper_analysis.whatif.causes import CauseFinding
from pacekeeper_analysis.whatif.slowdown_statistics import WhatIf


def build_document(whatif: WhatIf, finding: CauseFinding) -> dict[str, Any]:
    """Return all results: seconds and ratios as numbers. Values that were not decomposed or measured are null."""
    decomposition, measured = whatif.decomposition, whatif.window.measured_s
    steps = zip(whatif.steps, whatif.slowdown_per_step, strict=True)
    return {
        "slowdown": whatif.slowdown,
        "step_s": float(whatif.step_s.mean()),
        "ideal_step_s": whatif.ideal_step_s,
        "measured_step_s": None if measured is None else float(measured.mean()),
        "launch_slowdown": whatif.launch_slowdown,
        "waste": whatif.waste,
        "per_step": {str(step): float(slowdown) for step, slowdown in steps},
        "per_type": None if decomposition is None else decomposition.slowdown_by_type,
        "per_dp": None if decomposition is None else decomposition.slowdown_by_replica.tolist(),
        "per_stage": None if decomposition is None else decomposition.slowdown_by_stage.tolist(),
        "per_worker": None if decomposition is None else decomposition.slowdown_by_worker.tolist(),
        "m_w": None if decomposition is None else decomposition.worst_workers.share,
        "m_s": None if decomposition is None else decomposition.last_stage.share,
        "cause": {"name": finding.cause.value, "confidence": finding.confidence, "evidence": finding.evidence},
        "skipped_steps": len(whatif.skipped),
    }
