"""The command `pacekeeper whatif`: analyzes a trace and shows what stragglers cost, and which workers they are."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.whatif.causes import CauseFinding, diagnose_cause
from pacekeeper_analysis.whatif.inputs import load_window
from pacekeeper_analysis.whatif.report.document import build_document
from pacekeeper_analysis.whatif.report.terminal import render_summary
from pacekeeper_analysis.whatif.slowdown_statistics import WhatIf, analyze_window


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 if the input cannot be analyzed (with a message on standard error)."""
    arguments = _build_parser().parse_args(argv)
    try:
        loaded = load_window(arguments.trace, arguments.meta)
        whatif = analyze_window(loaded.window, loaded.worker_ranks)
        finding = diagnose_cause(whatif)
        print(render_summary(whatif, finding, width=_get_terminal_width(), color=_use_color(arguments.color)))
        _write_reports(arguments, whatif, finding, loaded.title)
    except (InputError, OSError) as error:
        print(f"pacekeeper whatif: {error}", file=sys.stderr)
        return 2
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pacekeeper whatif",
        description="Show how fast the job would be without its stragglers, and what causes them.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="a parquet file in the published schema, or the PyTorch profiler's traces or the rings of all ranks",
    )
    parser.add_argument("--meta", type=Path, help="the job's sizes (JSON, or lines `key: value`); parquet only")
    parser.add_argument("--html", type=Path, help="write an HTML page with all results")
    parser.add_argument("--json", type=Path, help="write all results as JSON")
    parser.add_argument("--perfetto", type=Path, help="write the timelines for ui.perfetto.dev (.json.gz)")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="color in the terminal")
    return parser


def _write_reports(arguments: argparse.Namespace, whatif: WhatIf, finding: CauseFinding, title: str) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(build_document(whatif, finding), indent=2, allow_nan=False) + "\n")
    if arguments.html:
        from pacekeeper_analysis.whatif.report.page import render_page

        arguments.html.write_text(render_page(whatif, finding, title), encoding="utf-8")
    if arguments.perfetto:
        from pacekeeper_analysis.whatif.report.perfetto import write_perfetto

        steps = write_perfetto(arguments.perfetto, whatif.window, whatif.slowdown_per_step)
        if len(steps) < len(whatif.steps):
            print(f"{arguments.perfetto}: the {len(steps)} slowest steps of {len(whatif.steps)}", file=sys.stderr)


def _get_terminal_width() -> int:
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))


def _use_color(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"


if __name__ == "__main__":
    sys.exit(main())
