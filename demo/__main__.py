"""`python -m demo`: exit status 0 only if every fault was healed and the job is Complete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo import shards, story, torchrun, traffic
from demo.kube import DemoError
from demo.report import Report
from testcluster.shell import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Training jobs that heal themselves, live.")
    parser.add_argument(
        "--story",
        choices=("faults", "shards", "traffic", "torchrun"),
        default="faults",
        help="which one is told (faults; shards: what a sharded model loses; traffic: jobs that share links; torchrun: "
        "the crash and the hang of the faults told last, without Pacekeeper)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the report (build/demo)")
    parser.add_argument("--only", action="append", metavar="FAULT", help="make only faults whose name contains this")
    arguments = parser.parse_args()
    if arguments.story != "faults" and arguments.only:
        parser.error(f"--only: chooses among the story of faults; the story of {arguments.story} is told whole")
    try:
        report = tell(arguments.story, arguments.out, arguments.only)
    except (DemoError, ClusterError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {arguments.out / 'report.html'}")
    return 0 if report.passed else 1


def tell(which: str, out: Path, only: list[str] | None) -> Report:
    others = {"shards": shards.run, "traffic": traffic.run, "torchrun": torchrun.run}
    return others[which](out) if which in others else story.run(out, only)


if __name__ == "__main__":
    sys.exit(main())
