"""What-if analysis: how fast would a job be without its stragglers, and who is to blame (arXiv 2505.05713)?"""

from pacekeeper_analysis.whatif.figures import Blame, Decomposition, WhatIf, analyse
from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.published import window_from_trace
from pacekeeper_analysis.whatif.scenario import (
    ALL_IDEAL,
    AS_RECORDED,
    IDEAL,
    PEERS,
    RECORDED,
    UNINTERRUPTED,
    Change,
    Pace,
    Scaled,
    Scenario,
    Seconds,
    Where,
)
from pacekeeper_analysis.whatif.trace import Metadata, Trace, TraceError, trace_from_columns
from pacekeeper_analysis.whatif.window import Skipped, Window

__all__ = [
    "ALL_IDEAL",
    "AS_RECORDED",
    "IDEAL",
    "PEERS",
    "RECORDED",
    "UNINTERRUPTED",
    "Blame",
    "Change",
    "Decomposition",
    "Metadata",
    "Operation",
    "Pace",
    "Scaled",
    "Scenario",
    "Seconds",
    "Skipped",
    "Trace",
    "TraceError",
    "WhatIf",
    "Where",
    "Window",
    "analyse",
    "trace_from_columns",
    "window_from_trace",
]
