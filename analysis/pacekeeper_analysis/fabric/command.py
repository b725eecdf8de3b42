"""The command `pacekeeper fabric show`: what the network's links carry by plan, as a table and as a picture."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pacekeeper_analysis.reading import parse_json

from ..errors import InputError
from .drawing import render_svg
from .text import render_text
from .view import FabricView

MAX_KUBECTL_OUTPUT_BYTES = 2**24
"""Of what kubectl writes: several Fabrics, each as large as an object can be."""
KUBECTL_COMMAND = ("kubectl", "get", "fabrics.pacekeeper.dev", "-o", "json", "--request-timeout=10s")
FABRIC_READ_TIMEOUT_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 where there is nothing to show (the message is on standard error)."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.before is not None and arguments.svg is None:
        parser.error("--before stands beside it in the picture: give --svg, too")
    try:
        found = parse_fabrics(_fetch_fabrics() if arguments.file is None else _read_fabrics(arguments.file))
        shown = choose_fabric(found, arguments.name)
        before = None if arguments.before is None else choose_fabric(parse_fabrics(_read_fabrics(arguments.before)), shown.name)
        print(render_text(shown, shutil.get_terminal_size((100, 24)).columns))
        if others := [view.name for view in found if view != shown]:
            print(f"Beside it: {', '.join(others)}. One Fabric counts, the oldest.")
        if arguments.svg is not None:
            arguments.svg.write_text(render_svg(shown, before), encoding="utf-8")
    except (InputError, OSError) as error:
        print(f"pacekeeper fabric: {error}", file=sys.stderr)
        return 2
    return 0


def parse_fabrics(data: bytes) -> list[FabricView]:
    """One Fabric or a list of them, as `kubectl get -o json` writes them. Raises InputError."""
    content = parse_json(data)
    listed = content.get("items") if isinstance(content, Mapping) else None
    return [FabricView.from_json(body) for body in (listed if isinstance(listed, list) else [content])]


def choose_fabric(views: Sequence[FabricView], name: str | None = None) -> FabricView:
    """The one of this name, or the one that counts. Raises InputError where there is none, or nobody knows which."""
    if not views:
        raise InputError("there is no Fabric in this cluster: describe its network by one (docs/traffic.md)")
    names = ", ".join(view.name for view in views)
    fitting = [view for view in views if view.name == name] if name else views
    if not fitting:
        raise InputError(f"there is no Fabric {name!r}, only {names}")
    counting = [view for view in fitting if view.is_in_force] if len(fitting) > 1 else fitting
    if not counting:
        raise InputError(f"there are several Fabrics, and none is in force yet: give one's name, of {names}")
    return counting[0]


def _fetch_fabrics() -> bytes:
    """As whoever runs this, of the cluster that kubectl is set to. Raises InputError."""
    try:
        done = subprocess.run(KUBECTL_COMMAND, capture_output=True, timeout=FABRIC_READ_TIMEOUT_SECONDS, check=False)
    except FileNotFoundError as error:
        raise InputError("there is no kubectl on the PATH: install it, or give --file what it writes") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"kubectl has not ended within {FABRIC_READ_TIMEOUT_SECONDS:.0f} s: is the API server there?") from error
    if done.returncode:
        raise InputError(_explain_kubectl_error(done.stderr.decode(errors="replace")))
    return done.stdout


def _explain_kubectl_error(errors: str) -> str:
    """What kubectl says in its last line, below what its parts have logged, and what to do about it."""
    words = "".join(errors.splitlines()[-1:])
    if "(Forbidden)" in words:
        return f"you may not read Fabrics; ask for the chart's ClusterRole <release>-platform ({words})"
    if "doesn't have a resource type" in words:
        return f"this cluster knows no Fabrics: is Pacekeeper installed in it? ({words})"
    return words or "kubectl has failed, and does not say why"


def _read_fabrics(path: Path) -> bytes:
    """Of standard input where the path is `-`. Raises InputError for more than Fabrics can be."""
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as stream:
        data = stream.read(MAX_KUBECTL_OUTPUT_BYTES + 1)
    if len(data) > MAX_KUBECTL_OUTPUT_BYTES:
        raise InputError(f"{path}: is longer than {MAX_KUBECTL_OUTPUT_BYTES} bytes, which no list of Fabrics is")
    return data


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pacekeeper fabric", description="The network that a Fabric describes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="what its links carry by plan, and which are dead or slow")
    show.add_argument("name", nargs="?", metavar="NAME", help="of the Fabric; without it, the one in force")
    show.add_argument(
        "--file", type=Path, help="from `kubectl get fabrics -o json`; -: standard input. Without it, kubectl is asked"
    )
    show.add_argument("--svg", type=Path, metavar="PICTURE", help="write the picture to this file")
    show.add_argument(
        "--before", type=Path, metavar="FILE", help="an earlier state, written like --file, to stand beside it there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
