"""`python -m demo`: exit status 0 only if every fault was healed and the job is Complete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.kube import DemoError
from demo.story import run
from testcluster.shell import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="A training job that heals itself, live.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the report (build/demo)")
    parser.add_argument("--only", action="append", metavar="FAULT", help="make only faults whose name contains this")
    arguments = parser.parse_args()
    try:
        report = run(arguments.out, arguments.only)
    except (DemoError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {arguments.out / 'report.html'}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
