"""A profile window as one HTML file: the diagnosis, flame graphs of a suspect and a usual peer, and pattern plots.

All values are computed here, and `report.html` draws them. Names of functions come from tenants: they are data of the
file's script, and never markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from ..failures.finding import Finding
from ..pages import render_single_file
from .localize import MIN_PEER_SPREAD, MIN_SUSPECT_SPREADS
from .page import FunctionPlot, ProfilePage
from .pattern import FoldedStack, ProcessSetup, ProfileAnswer, RankPattern, TimeOwner

OWNER_LABELS = {
    TimeOwner.GPU_COMPUTE: "GPU",
    TimeOwner.GPU_MEMORY: "GPU memory",
    TimeOwner.COLLECTIVE: "wait for peers",
    TimeOwner.DATA: "data",
    TimeOwner.GC: "garbage",
    TimeOwner.PYTHON: "Python",
}
MIN_BOUND_SLOPE = 1e-9
"""Slope below which a line has no bound: it is 0, apart from rounding."""
PLOTTED_USES = np.linspace(0.0, 1.0, 41)
"""Values of use at which the usual range of a plot is drawn."""
WHOLE_STEP = "(a whole step)"
OMITTED_STACKS = "(stacks that did not fit)"


def render_profile_html(page: ProfilePage, title: str) -> str:
    """Render the page as HTML text."""
    template = files("pacekeeper_analysis.profiling").joinpath("report.html").read_text(encoding="utf-8")
    return render_single_file(template, build_report_data(page, title))


def build_report_data(page: ProfilePage, title: str) -> dict[str, Any]:
    """Return the data that the page shows."""
    localization = page.localization
    shown_patterns = _list_shown_patterns(page)
    common_frames = _find_common_frames(
        [stack for shown_pattern in shown_patterns for stack in shown_pattern.pattern.stacks]
    )
    names = {WHOLE_STEP: 0}  # and their positions: stacks of tenants may repeat long names
    patterns = [_encode_pattern(shown_pattern, len(common_frames), names) for shown_pattern in shown_patterns]
    return {
        "title": title,
        "verdict": _encode_finding(localization.finding),
        "causes": [
            _encode_finding(cause.finding) | {"saved": cause.saved_seconds, "explained": cause.explained}
            for cause in localization.explanations
        ],
        "step": localization.step_seconds,
        "excess": localization.excess_seconds,
        "explained": localization.explained,
        "reported": localization.reported,
        "expected": localization.expected,
        "remarks": localization.remarks,
        "outer": common_frames,
        "owners": [OWNER_LABELS[owner] for owner in TimeOwner],
        "names": list(names),
        "patterns": patterns,
        "plots": [_encode_plot(plot, localization.suspects, localization.step_seconds) for plot in page.plots],
    }


# Flame graphs


@dataclass
class FlameFrame:
    """A function as called on one path. `sample_count` is the number of samples in it, or in what it called."""

    sample_count: int = 0
    callees: dict[str, FlameFrame] = field(default_factory=dict)


def build_flame_graph(stacks: Sequence[FoldedStack], sample_count: int, skipped_frames: int = 0) -> FlameFrame:
    """Merge all stacks into one tree, without their `skipped_frames` outermost frames.

    Samples of `sample_count` that are in no stack become a frame of their own.
    """
    root = FlameFrame(max(sample_count, sum(stack.sample_count for stack in stacks)))
    for stack in stacks:
        frame = root
        for name in stack.frames[skipped_frames:]:
            frame = frame.callees.setdefault(name, FlameFrame())
            frame.sample_count += stack.sample_count
    omitted = root.sample_count - sum(stack.sample_count for stack in stacks)
    if omitted:
        root.callees[OMITTED_STACKS] = FlameFrame(omitted)
    return root


def _find_common_frames(stacks: Sequence[FoldedStack]) -> list[str]:
    """Return the frames that all stacks begin with, without the innermost one. They show no differences."""
    if not stacks:
        return []
    first, last = min(stack.frames for stack in stacks), max(stack.frames for stack in stacks)
    depth = 0
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return list(first[: max(0, depth - 1)])


def _encode_tree(name: str, frame: FlameFrame, names: dict[str, int]) -> list[Any]:
    """Encode a frame as a list. Callees are sorted by name, so that a function has the same place in both graphs."""
    position = names.setdefault(name, len(names))
    return [position, frame.sample_count, [_encode_tree(*callee, names) for callee in sorted(frame.callees.items())]]


# Patterns


@dataclass(frozen=True)
class _ShownPattern:
    """A pattern that the page shows."""

    pattern: RankPattern
    early: bool  # whether it is of the rank's early steps
    suspect: bool


def _list_shown_patterns(page: ProfilePage) -> list[_ShownPattern]:
    """Return the patterns, suspects first, each followed by that of the same rank's early steps."""
    suspects = page.localization.suspects
    answers: list[ProfileAnswer] = sorted(page.answers, key=lambda answer: answer.pattern.rank not in suspects)
    candidates = [(answer, early) for answer in answers for early in (False, True)]
    return [
        _ShownPattern(pattern, early, not early and pattern.rank in suspects)
        for answer, early in candidates
        if (pattern := answer.baseline if early else answer.pattern) is not None
    ]


def _encode_pattern(shown: _ShownPattern, skipped_frames: int, names: dict[str, int]) -> dict[str, Any]:
    pattern = shown.pattern
    suffix = ", early steps" if shown.early else " (suspect)" if shown.suspect else ""
    return {
        "label": f"rank {pattern.rank}{suffix}",
        "rank": pattern.rank,
        "early": shown.early,
        "suspect": shown.suspect,
        "step": pattern.step_seconds,
        "steps": pattern.steps,
        "first": pattern.first_step,
        "stack_samples": pattern.stack_samples,
        "functions": [[f.name, int(f.owner), f.share, f.error, f.use] for f in pattern.function_patterns],
        "tree": _encode_tree(
            WHOLE_STEP, build_flame_graph(pattern.stacks, pattern.stack_samples, skipped_frames), names
        ),
        "setup": _describe_setup(pattern.setup),
    }


def _describe_setup(setup: ProcessSetup) -> list[tuple[str, str]]:
    """Return the known settings as pairs of name and text."""

    def part(share: float | None) -> str:
        return "" if share is None else f"{share:.0%}"

    rows = (
        ("threads of an operation", "" if setup.threads is None else f"{setup.threads}"),
        ("processors", "" if setup.processors is None else f"{setup.processors:g}"),
        ("ranks on them", "" if setup.ranks is None else f"{setup.ranks}"),
        ("throttled by its quota, of the periods", part(setup.throttled)),
        ("on a processor, of the time", part(setup.ran)),
        ("ready, and others had the processors", part(setup.delayed)),
        ("InfiniBand", "yes" if setup.infiniband else ""),
        ("anomaly detection", "yes" if setup.anomalies else ""),
    )
    variables = (variable.partition("=")[::2] for variable in setup.variables)
    return [(name, text) for name, text in (*rows, *variables) if text]


def _encode_finding(finding: Finding) -> dict[str, Any]:
    return {
        "fault": finding.fault.value,
        "culprit": finding.culprit,
        "confidence": finding.confidence,
        "advice": finding.advice,
        "signals": [[signal.kind.value, signal.message] for signal in finding.signals],
    }


# The pattern plot


def _encode_plot(plot: FunctionPlot, suspects: Sequence[int], step_seconds: float) -> dict[str, Any]:
    """Encode a plot. Points are rank, β and μ (None: not measured)."""
    step = step_seconds or 1.0
    shares = np.array(plot.seconds) / step
    busy = np.array(plot.busy) / step
    measured = bool(busy.any())  # if no use of a function was measured, it is zero on all ranks
    uses = np.minimum(np.divide(busy, shares, out=np.zeros_like(shares), where=shares > 0), 1.0)
    usual = ~np.isin(plot.ranks, suspects)
    early = np.array(plot.early)
    early = early[early >= 0] / step
    uses_early = not suspects and len(early) > 0
    if uses_early:  # the use in the early steps is not stored
        expected = compute_usual_range(early, early * float(np.median(uses)))
    elif usual.any():
        expected = compute_usual_range(shares[usual], busy[usual])
    else:
        expected = compute_usual_range(shares, busy)
    if expected and not measured:
        expected = [[0.0, *expected[0][1:]], [1.0, *expected[0][1:]]]
    return {
        "function": plot.function,
        "owner": int(plot.owner),
        "measured": measured,
        "than": "the early steps" if uses_early else "its peers",
        "points": [
            [rank, round(float(share), 5), round(float(use), 4) if measured else None, rank in suspects]
            for rank, share, use in zip(plot.ranks, shares, uses, strict=True)
        ],
        "expected": expected,
    }


def compute_usual_range(shares: np.ndarray[Any, Any], busy: np.ndarray[Any, Any]) -> list[list[float]]:
    """Return the range in which a rank is like its peers, as `localize` defines it without σ.

    The condition is |Δβ| + |Δβμ| ≤ MIN_SUSPECT_SPREADS spreads. Rows are μ, lowest β and highest β. A use without a
    usual β has no row.
    """
    if not len(shares):
        return []
    median_share, median_busy = float(np.median(shares)), float(np.median(busy))
    spread = max(1.48 * float(np.median(np.abs(shares - median_share))), MIN_PEER_SPREAD)
    limit = MIN_SUSPECT_SPREADS * spread
    rows = []
    for use in PLOTTED_USES.tolist():
        # A sum of two distances along a line is convex: its bounds are where each of the four slopes reaches `limit`.
        bounds = [
            (limit + a * median_share + b * median_busy) / (a + b * use)
            for a in (1, -1)
            for b in (1, -1)
            if abs(a + b * use) > MIN_BOUND_SLOPE
        ]
        inside = [
            bound
            for bound in bounds
            if abs(bound - median_share) + abs(bound * use - median_busy) <= limit * (1 + 1e-9)
        ]
        if inside and max(inside) > 0:
            rows.append([round(use, 4), round(max(0.0, min(inside)), 5), round(min(1.0, max(inside)), 5)])
    return rows
