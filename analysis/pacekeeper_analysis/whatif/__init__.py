"""What-if analysis: how fast a job would be without its stragglers, and which workers cause them (arXiv 2505.05713)."""

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.published import build_window_from_trace
from pacekeeper_analysis.whatif.scenario import (
    IDEAL,
    IDEAL_SCENARIO,
    PEERS,
    RECORDED,
    RECORDED_SCENARIO,
    UNINTERRUPTED,
    DurationRule,
    FixedSeconds,
    OperationSelection,
    ScaledSeconds,
    ScenarioChange,
    WhatIfScenario,
)
from pacekeeper_analysis.whatif.slowdown_statistics import Decomposition, WhatIf, WorkerSetImpact, analyze_window
from pacekeeper_analysis.whatif.trace import JobTrace, TraceError, TraceMetadata, build_trace_from_columns
from pacekeeper_analysis.whatif.window import RecordedWindow, SkippedStep

__all__ = [
    "IDEAL",
    "IDEAL_SCENARIO",
    "PEERS",
    "RECORDED",
    "RECORDED_SCENARIO",
    "UNINTERRUPTED",
    "Decomposition",
    "DurationRule",
    "FixedSeconds",
    "JobTrace",
    "Operation",
    "OperationSelection",
    "RecordedWindow",
    "ScaledSeconds",
    "ScenarioChange",
    "SkippedStep",
    "TraceError",
    "TraceMetadata",
    "WhatIf",
    "WhatIfScenario",
    "WorkerSetImpact",
    "analyze_window",
    "build_trace_from_columns",
    "build_window_from_trace",
]
