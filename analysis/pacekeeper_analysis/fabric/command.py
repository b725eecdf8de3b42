"""The command `pacekeeper fabric show`: the planned loads of the network's links, as a table and as a picture."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pacekeeper_analysis.protocol.decoding import parse_json

from ..errors import InputError
from .drawing import render_svg
from .text import render_text
from .view import FabricView

MAX_KUBECTL_OUTPUT_BYTES = 2**24
"""Upper limit of kubectl's output: several Fabrics, each as large as an object can be."""
KUBECTL_COMMAND = ("kubectl", "get", "fabrics.pacekeeper.dev", "-o", "json", "--request-timeout=10s")
FABRIC_READ_TIMEOUT_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 if there is nothing to show (with a message on standard error)."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.before is not None and arguments.svg is None:
        parser.error("--before needs --svg: it appears in the picture")
    try:
        fabrics = parse_fabrics(_fetch_fabrics() if arguments.file is None else _read_fabrics(arguments.file))
        chosen = choose_fabric(fabrics, arguments.name)
        before = (
            None
            if arguments.before is None
            else choose_fabric(parse_fabrics(_read_fabrics(arguments.before)), chosen.name)
        )
        print(render_text(chosen, shutil.get_terminal_size((100, 24)).columns))
        if other_names := [view.name for view in fabrics if view != chosen]:
            print(f"Also there: {', '.join(other_names)}. Only the oldest Fabric is in force.")
        if arguments.svg is not None:
            arguments.svg.write_text(render_svg(chosen, before), encoding="utf-8")
    except (InputError, OSError) as error:
        print(f"pacekeeper fabric: {error}", file=sys.stderr)
        return 2
    return 0


def parse_fabrics(data: bytes) -> list[FabricView]:
    """Parse one Fabric or a list of them, as `kubectl get -o json` writes them. Raises InputError."""
    content = parse_json(data)
    listed = content.get("items") if isinstance(content, Mapping) else None
    return [FabricView.from_json(body) for body in (listed if isinstance(listed, list) else [content])]


def choose_fabric(views: Sequence[FabricView], name: str | None = None) -> FabricView:
    """Return the Fabric of this name, or the one in force.

    Raises InputError if there is none, or if it is ambiguous.
    """
    if not views:
        raise InputError("there is no Fabric in this cluster: describe its network by one (docs/traffic.md)")
    names = ", ".join(view.name for view in views)
    matching = [view for view in views if view.name == name] if name else views
    if not matching:
        raise InputError(f"there is no Fabric {name!r}, only {names}")
    in_force = [view for view in matching if view.is_in_force] if len(matching) > 1 else matching
    if not in_force:
        raise InputError(f"there are several Fabrics, and none is in force yet: give one's name, of {names}")
    return in_force[0]


def _fetch_fabrics() -> bytes:
    """Fetch the Fabrics with kubectl, with the user's credentials and context. Raises InputError."""
    try:
        completed = subprocess.run(
            KUBECTL_COMMAND, capture_output=True, timeout=FABRIC_READ_TIMEOUT_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise InputError("there is no kubectl on the PATH: install it, or give --file what it writes") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"kubectl has not ended within {FABRIC_READ_TIMEOUT_SECONDS:.0f} s: is the API server reachable?"
        ) from error
    if completed.returncode:
        raise InputError(_explain_kubectl_error(completed.stderr.decode(errors="replace")))
    return completed.stdout


def _explain_kubectl_error(errors: str) -> str:
    """Explain kubectl's last line of errors, and the remedy."""
    last_line = "".join(errors.splitlines()[-1:])
    if "(Forbidden)" in last_line:
        return f"you may not read Fabrics; ask for the chart's ClusterRole <release>-platform ({last_line})"
    if "doesn't have a resource type" in last_line:
        return f"this cluster has no Fabric resource: is Pacekeeper installed in it? ({last_line})"
    return last_line or "kubectl failed without a message"


def _read_fabrics(path: Path) -> bytes:
    """Read the file, or standard input for `-`. Raises InputError for more than Fabrics can be."""
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as stream:
        data = stream.read(MAX_KUBECTL_OUTPUT_BYTES + 1)
    if len(data) > MAX_KUBECTL_OUTPUT_BYTES:
        raise InputError(f"{path}: is longer than {MAX_KUBECTL_OUTPUT_BYTES} bytes, the limit of a list of Fabrics")
    return data


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pacekeeper fabric", description="The network that a Fabric describes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="show the planned loads of its links, and dead or slow links")
    show.add_argument("name", nargs="?", metavar="NAME", help="name of the Fabric; without it, the one in force")
    show.add_argument(
        "--file", type=Path, help="from `kubectl get fabrics -o json`; -: standard input. Without it, kubectl is run"
    )
    show.add_argument("--svg", type=Path, metavar="PICTURE", help="write the picture to this file")
    show.add_argument(
        "--before",
        type=Path,
        metavar="FILE",
        help="an earlier state, written like --file, for comparison in the picture",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
