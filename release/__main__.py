"""`python -m release`: what `make release`, `make reproduce`, and `make lock` run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from release import debian
from release.build import build_release, find_differences
from release.commands import ReleaseError, log_step

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
OUTPUT, CACHE = BUILD / "release", BUILD / "release-cache"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument(
        "action",
        choices=("build", "reproduce", "lock"),
        help="build: into build/release. reproduce: build again, and compare. lock: renew locks/debian.txt",
    )
    action = parser.parse_args().action
    try:
        return {"build": _build, "reproduce": _reproduce, "lock": _lock}[action]()
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _build() -> int:
    build_release(ROOT, OUTPUT, CACHE)
    for path in sorted(OUTPUT.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(ROOT)}")
    return 0


def _reproduce() -> int:
    """Build in another folder, without what the first build compiled."""
    if not OUTPUT.exists():
        raise ReleaseError("there is no release to compare with: run `make release` first")
    with tempfile.TemporaryDirectory(dir=BUILD, prefix=".reproduced-release-") as folder:
        again = Path(folder, "elsewhere")
        build_release(ROOT, again, CACHE)
        differences = find_differences(OUTPUT, again)
    if differences:
        raise ReleaseError(f"not the same bytes: {', '.join(differences)}. Was {OUTPUT.name}/ built from this commit?")
    print(f"both builds have the same bytes: {len(list(OUTPUT.iterdir()))} files")
    return 0


def _lock() -> int:
    BUILD.mkdir(exist_ok=True)
    with log_step("locks/debian.txt"), tempfile.TemporaryDirectory(dir=BUILD) as work:
        debian.renew_lock(ROOT / "locks/debian.txt", Path(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
