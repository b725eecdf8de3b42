"""A behaviour window as one HTML file: what was found, flame graphs of a suspect beside a usual peer, the pattern plot.

What is computed is computed here; `report.html` draws it. Names of functions come from tenants: they are data of the
file's script, and never markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from ..diagnose.finding import Finding
from ..pages import render_single_file
from .localise import MIN_PEER_SPREAD, MIN_SUSPECT_SPREADS
from .page import ProfilePage, FunctionPlot
from .pattern import ProfileAnswer, TimeOwner, RankPattern, ProcessSetup, FoldedStack

OWNER_LABELS = {
    TimeOwner.GPU_COMPUTE: "GPU",
    TimeOwner.GPU_MEMORY: "GPU memory",
    TimeOwner.COLLECTIVE: "wait for peers",
    TimeOwner.DATA: "data",
    TimeOwner.GARBAGE: "garbage",
    TimeOwner.PYTHON: "Python",
}
PLOTTED_USES = np.linspace(0.0, 1.0, 41)
"""At which the usual range of a plot is drawn."""
WHOLE_STEP = "(a whole step)"
OMITTED_STACKS = "(stacks that did not fit)"


def render_profile_html(page: ProfilePage, title: str) -> str:
    """The page as HTML text."""
    template = files("pacekeeper_analysis.behaviour").joinpath("report.html").read_text(encoding="utf-8")
    return render_single_file(template, build_report_data(page, title))


def build_report_data(page: ProfilePage, title: str) -> dict[str, Any]:
    """What the page shows."""
    found = page.localisation
    shown = _list_shown_patterns(page)
    outer = _find_common_frames([stack for one in shown for stack in one.pattern.stacks])
    names = {WHOLE_STEP: 0}  # and their places: stacks of tenants may repeat long ones
    patterns = [_encode_pattern(one, len(outer), names) for one in shown]
    return {
        "title": title,
        "verdict": _encode_finding(found.finding),
        "causes": [
            _encode_finding(cause.finding) | {"saved": cause.saved_seconds, "explained": cause.explained}
            for cause in found.explanations
        ],
        "step": found.step_seconds,
        "excess": found.excess_seconds,
        "explained": found.explained,
        "heard": found.heard,
        "expected": found.expected,
        "remarks": found.remarks,
        "outer": outer,
        "owners": [OWNER_LABELS[owner] for owner in TimeOwner],
        "names": list(names),
        "patterns": patterns,
        "plots": [_encode_plot(plot, found.suspects, found.step_seconds) for plot in page.plots],
    }


# Flame graphs


@dataclass
class FlameFrame:
    """A function as it was called on one path; `looks`: into it, or what it called."""

    looks: int = 0
    callees: dict[str, FlameFrame] = field(default_factory=dict)


def build_flame_graph(stacks: Sequence[FoldedStack], looks: int, outer: int = 0) -> FlameFrame:
    """All stacks as one tree, without their `outer` outermost frames. What of the `looks` is in none of them stands
    beside them."""
    root = FlameFrame(max(looks, sum(stack.looks for stack in stacks)))
    for stack in stacks:
        frame = root
        for name in stack.frames[outer:]:
            frame = frame.callees.setdefault(name, FlameFrame())
            frame.looks += stack.looks
    left_out = root.looks - sum(stack.looks for stack in stacks)
    if left_out:
        root.callees[OMITTED_STACKS] = FlameFrame(left_out)
    return root


def _find_common_frames(stacks: Sequence[FoldedStack]) -> list[str]:
    """Frames that all stacks begin with, but the innermost of them: they say nothing about differences."""
    if not stacks:
        return []
    first, last = min(stack.frames for stack in stacks), max(stack.frames for stack in stacks)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return list(first[: max(0, same - 1)])


def _encode_tree(name: str, frame: FlameFrame, names: dict[str, int]) -> list[Any]:
    """Callees by name: the same function stands at the same place in both graphs."""
    place = names.setdefault(name, len(names))
    return [place, frame.looks, [_encode_tree(*callee, names) for callee in sorted(frame.callees.items())]]


# Patterns


@dataclass(frozen=True)
class _ShownPattern:
    """A pattern to look at."""

    pattern: RankPattern
    early: bool  # of the rank's early steps
    suspect: bool


def _list_shown_patterns(page: ProfilePage) -> list[_ShownPattern]:
    """Suspects first, each pattern before that of the same rank's early steps."""
    suspects = page.localisation.suspects
    answers: list[ProfileAnswer] = sorted(page.answers, key=lambda answer: answer.pattern.rank not in suspects)
    both = [(answer, early) for answer in answers for early in (False, True)]
    return [
        _ShownPattern(pattern, early, not early and pattern.rank in suspects)
        for answer, early in both
        if (pattern := answer.baseline if early else answer.pattern) is not None
    ]


def _encode_pattern(one: _ShownPattern, outer: int, names: dict[str, int]) -> dict[str, Any]:
    pattern = one.pattern
    kind = ", early steps" if one.early else " (suspect)" if one.suspect else ""
    return {
        "label": f"rank {pattern.rank}{kind}",
        "rank": pattern.rank,
        "early": one.early,
        "suspect": one.suspect,
        "step": pattern.step_seconds,
        "steps": pattern.steps,
        "first": pattern.first_step,
        "looks": pattern.looks,
        "functions": [[f.name, int(f.owner), f.share, f.error, f.use] for f in pattern.function_patterns],
        "tree": _encode_tree(WHOLE_STEP, build_flame_graph(pattern.stacks, pattern.looks, outer), names),
        "setup": _describe_setup(pattern.setup),
    }


def _describe_setup(setup: ProcessSetup) -> list[tuple[str, str]]:
    """What is known, in words."""

    def part(share: float) -> str:
        return "" if share < 0 else f"{share:.0%}"

    rows = (
        ("threads of an operation", f"{setup.threads}" if setup.threads else ""),
        ("processors", f"{setup.processors:g}" if setup.processors else ""),
        ("ranks on them", f"{setup.ranks}" if setup.ranks else ""),
        ("held up by its quota, of the periods", part(setup.throttled)),
        ("on a processor, of the time", part(setup.ran)),
        ("ready, and others had the processors", part(setup.delayed)),
        ("InfiniBand", "yes" if setup.infiniband else ""),
        ("looks for anomalies", "yes" if setup.anomalies else ""),
    )
    variables = (given.partition("=")[::2] for given in setup.variables)
    return [(name, words) for name, words in (*rows, *variables) if words]


def _encode_finding(finding: Finding) -> dict[str, Any]:
    return {
        "fault": finding.fault.value,
        "culprit": finding.culprit,
        "confidence": finding.confidence,
        "advice": finding.advice,
        "witnesses": [[witness.kind.value, witness.words] for witness in finding.witnesses],
    }


# The pattern plot


def _encode_plot(plot: FunctionPlot, suspects: Sequence[int], step_seconds: float) -> dict[str, Any]:
    """Points: rank, β and μ (None: not measured)."""
    step = step_seconds or 1.0
    shares = np.array(plot.seconds) / step
    busy = np.array(plot.busy) / step
    measured = bool(busy.any())  # where nothing of a function is measured, it has used nothing on all ranks
    uses = np.minimum(np.divide(busy, shares, out=np.zeros_like(shares), where=shares > 0), 1.0)
    usual = ~np.isin(plot.ranks, suspects)
    early = np.array(plot.early)
    early = early[early >= 0] / step
    of_early = not suspects and len(early) > 0
    if of_early:  # how much of it was used then is not kept
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
        "than": "the early steps" if of_early else "its peers",
        "points": [
            [rank, round(float(share), 5), round(float(use), 4) if measured else None, rank in suspects]
            for rank, share, use in zip(plot.ranks, shares, uses, strict=True)
        ],
        "expected": expected,
    }


def compute_usual_range(shares: np.ndarray[Any, Any], busy: np.ndarray[Any, Any]) -> list[list[float]]:
    """Where a rank is like its peers, as `localise` has it but for σ: |Δβ| + |Δβμ| ≤ MIN_SUSPECT_SPREADS spreads.
    Rows of μ, lowest β and highest β; a use at which no β is usual has none."""
    if not len(shares):
        return []
    share, part = float(np.median(shares)), float(np.median(busy))
    spread = max(1.48 * float(np.median(np.abs(shares - share))), MIN_PEER_SPREAD)
    room = MIN_SUSPECT_SPREADS * spread
    rows = []
    for use in PLOTTED_USES.tolist():
        # A sum of two distances along a line is convex: its bounds lie where each of the four slopes reaches `room`.
        ends = [
            (room + a * share + b * part) / (a + b * use) for a in (1, -1) for b in (1, -1) if abs(a + b * use) > 1e-9
        ]
        inside = [end for end in ends if abs(end - share) + abs(end * use - part) <= room * (1 + 1e-9)]
        if inside and max(inside) > 0:
            rows.append([round(use, 4), round(max(0.0, min(inside)), 5), round(min(1.0, max(inside)), 5)])
    return rows
