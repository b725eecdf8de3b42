"""`python -m demo`: exit status 0 only if every fault was healed and the job is Complete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo import story, traffic
from demo.kube import DemoError
from testcluster.shell import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Training jobs that heal themselves, live.")
    parser.add_argument("--story", choices=("faults", "traffic"), default="faults", help="which one is told (faults)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the report (build/demo)")
    parser.add_argument("--only", action="append", metavar="FAULT", help="make only faults whose name contains this")
    arguments = parser.parse_args()
    if arguments.story == "traffic" and arguments.only:
        parser.error("--only: chooses among the story of faults; the story of traffic is told whole")
    try:
        told = arguments.story == "traffic"
        report = traffic.run(arguments.out) if told else story.run(arguments.out, arguments.only)
    except (DemoError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {arguments.out / 'report.html'}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
