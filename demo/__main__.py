"""`python -m demo`: exit status 0 only if every fault was healed and the job is Complete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo import fault_demo, shards, torchrun, traffic
from demo.kube import DemoError
from demo.report import DemoReport
from testcluster.shell import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Training jobs that heal themselves, live.")
    parser.add_argument(
        "--scenario",
        choices=("faults", "shards", "traffic", "torchrun"),
        default="faults",
        help="which one to run (faults; shards: what a sharded model loses; traffic: jobs that share links; torchrun: "
        "the crash and the hang of the last run of faults, without Pacekeeper)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the report (build/demo)")
    parser.add_argument("--only", action="append", metavar="FAULT", help="only faults whose name contains this")
    arguments = parser.parse_args()
    if arguments.scenario != "faults" and arguments.only:
        parser.error(f"--only: applies to the faults scenario only; the {arguments.scenario} scenario runs completely")
    try:
        report = run_demo(arguments.scenario, arguments.out, arguments.only)
    except (DemoError, ClusterError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {arguments.out / 'report.html'}")
    return 0 if report.passed else 1


def run_demo(scenario: str, out: Path, only: list[str] | None) -> DemoReport:
    scenarios = {
        "shards": shards.run_shards_demo,
        "traffic": traffic.run_traffic_demo,
        "torchrun": torchrun.run_torchrun_demo,
    }
    return scenarios[scenario](out) if scenario in scenarios else fault_demo.run_fault_demo(out, only)


if __name__ == "__main__":
    sys.exit(main())
