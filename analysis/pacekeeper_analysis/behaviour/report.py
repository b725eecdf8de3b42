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
from ..pages import one_file
from .localise import LEAST_SPREAD, SUSPECT
from .page import Page, Plot
from .pattern import Answer, Owner, RankPattern, Setup, Stack

OWNERS = {
    Owner.GPU_COMPUTE: "GPU",
    Owner.GPU_MEMORY: "GPU memory",
    Owner.COLLECTIVE: "wait for peers",
    Owner.DATA: "data",
    Owner.GARBAGE: "garbage",
    Owner.PYTHON: "Python",
}
USES = np.linspace(0.0, 1.0, 41)
"""At which the usual range of a plot is drawn."""
WHOLE = "(a whole step)"
LEFT_OUT = "(stacks that did not fit)"


def html(page: Page, title: str) -> str:
    """The page as HTML text."""
    template = files("pacekeeper_analysis.behaviour").joinpath("report.html").read_text(encoding="utf-8")
    return one_file(template, report(page, title))


def report(page: Page, title: str) -> dict[str, Any]:
    """What the page shows."""
    found = page.localisation
    shown = _shown(page)
    outer = _outer([stack for one in shown for stack in one.pattern.stacks])
    names = {WHOLE: 0}  # and their places: stacks of tenants may repeat long ones
    patterns = [_pattern(one, len(outer), names) for one in shown]
    return {
        "title": title,
        "verdict": _finding(found.finding),
        "causes": [
            _finding(cause.finding) | {"saved": cause.saved_seconds, "explained": cause.explained}
            for cause in found.explanations
        ],
        "step": found.step_seconds,
        "excess": found.excess_seconds,
        "explained": found.explained,
        "heard": found.heard,
        "expected": found.expected,
        "remarks": found.remarks,
        "outer": outer,
        "owners": [OWNERS[owner] for owner in Owner],
        "names": list(names),
        "patterns": patterns,
        "plots": [_plot(plot, found.suspects, found.step_seconds) for plot in page.plots],
    }


# Flame graphs


@dataclass
class Frame:
    """A function as it was called on one path; `looks`: into it, or what it called."""

    looks: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)


def flame(stacks: Sequence[Stack], looks: int, outer: int = 0) -> Frame:
    """All stacks as one tree, without their `outer` outermost frames. What of the `looks` is in none of them stands
    beside them."""
    root = Frame(max(looks, sum(stack.looks for stack in stacks)))
    for stack in stacks:
        frame = root
        for name in stack.frames[outer:]:
            frame = frame.callees.setdefault(name, Frame())
            frame.looks += stack.looks
    left_out = root.looks - sum(stack.looks for stack in stacks)
    if left_out:
        root.callees[LEFT_OUT] = Frame(left_out)
    return root


def _outer(stacks: Sequence[Stack]) -> list[str]:
    """Frames that all stacks begin with, but the innermost of them: they say nothing about differences."""
    if not stacks:
        return []
    first, last = min(stack.frames for stack in stacks), max(stack.frames for stack in stacks)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return list(first[: max(0, same - 1)])


def _tree(name: str, frame: Frame, names: dict[str, int]) -> list[Any]:
    """Callees by name: the same function stands at the same place in both graphs."""
    place = names.setdefault(name, len(names))
    return [place, frame.looks, [_tree(*callee, names) for callee in sorted(frame.callees.items())]]


# Patterns


@dataclass(frozen=True)
class _Shown:
    """A pattern to look at."""

    pattern: RankPattern
    early: bool  # of the rank's early steps
    suspect: bool


def _shown(page: Page) -> list[_Shown]:
    """Suspects first, each pattern before that of the same rank's early steps."""
    suspects = page.localisation.suspects
    answers: list[Answer] = sorted(page.answers, key=lambda answer: answer.pattern.rank not in suspects)
    both = [(answer, early) for answer in answers for early in (False, True)]
    return [
        _Shown(pattern, early, not early and pattern.rank in suspects)
        for answer, early in both
        if (pattern := answer.baseline if early else answer.pattern) is not None
    ]


def _pattern(one: _Shown, outer: int, names: dict[str, int]) -> dict[str, Any]:
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
        "functions": [[f.name, int(f.owner), f.share, f.error, f.use] for f in pattern.by_function],
        "tree": _tree(WHOLE, flame(pattern.stacks, pattern.looks, outer), names),
        "setup": _setup(pattern.setup),
    }


def _setup(setup: Setup) -> list[tuple[str, str]]:
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


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "fault": finding.fault.value,
        "culprit": finding.culprit,
        "confidence": finding.confidence,
        "advice": finding.advice,
        "witnesses": [[witness.kind.value, witness.words] for witness in finding.witnesses],
    }


# The pattern plot


def _plot(plot: Plot, suspects: Sequence[int], step_seconds: float) -> dict[str, Any]:
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
        expected = usual_range(early, early * float(np.median(uses)))
    elif usual.any():
        expected = usual_range(shares[usual], busy[usual])
    else:
        expected = usual_range(shares, busy)
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


def usual_range(shares: np.ndarray[Any, Any], busy: np.ndarray[Any, Any]) -> list[list[float]]:
    """Where a rank is like its peers, as `localise` has it but for σ: |Δβ| + |Δβμ| ≤ SUSPECT spreads.
    Rows of μ, lowest β and highest β; a use at which no β is usual has none."""
    if not len(shares):
        return []
    share, part = float(np.median(shares)), float(np.median(busy))
    spread = max(1.48 * float(np.median(np.abs(shares - share))), LEAST_SPREAD)
    room = SUSPECT * spread
    rows = []
    for use in USES.tolist():
        # A sum of two distances along a line is convex: its bounds lie where each of the four slopes reaches `room`.
        ends = [
            (room + a * share + b * part) / (a + b * use) for a in (1, -1) for b in (1, -1) if abs(a + b * use) > 1e-9
        ]
        inside = [end for end in ends if abs(end - share) + abs(end * use - part) <= room * (1 + 1e-9)]
        if inside and max(inside) > 0:
            rows.append([round(use, 4), round(max(0.0, min(inside)), 5), round(min(1.0, max(inside)), 5)])
    return rows
