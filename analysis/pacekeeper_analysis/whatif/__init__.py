"""What-if analysis: how fast would a job be without its stragglers, and who is to blame (arXiv 2505.05713)?"""

from pacekeeper_analysis.whatif.figures import WorkerSetImpact, Decomposition, WhatIf, analyze_window
from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.published import build_window_from_trace
from pacekeeper_analysis.whatif.scenario import (
    IDEAL_SCENARIO,
    RECORDED_SCENARIO,
    IDEAL,
    PEERS,
    RECORDED,
    UNINTERRUPTED,
    ScenarioChange,
    DurationRule,
    ScaledSeconds,
    WhatIfScenario,
    FixedSeconds,
    OperationSelection,
)
from pacekeeper_analysis.whatif.trace import TraceMetadata, JobTrace, TraceError, build_trace_from_columns
from pacekeeper_analysis.whatif.window import SkippedStep, RecordedWindow

__all__ = [
    "IDEAL_SCENARIO",
    "RECORDED_SCENARIO",
    "IDEAL",
    "PEERS",
    "RECORDED",
    "UNINTERRUPTED",
    "WorkerSetImpact",
    "ScenarioChange",
    "Decomposition",
    "TraceMetadata",
    "Operation",
    "DurationRule",
    "ScaledSeconds",
    "WhatIfScenario",
    "FixedSeconds",
    "SkippedStep",
    "JobTrace",
    "TraceError",
    "WhatIf",
    "OperationSelection",
    "RecordedWindow",
    "analyze_window",
    "build_trace_from_columns",
    "build_window_from_trace",
]
