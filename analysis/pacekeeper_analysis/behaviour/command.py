"""The command `pacekeeper behaviour`: says what a behaviour window has shown, and makes a page of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pacekeeper_analysis.reading import parse_json

from ..errors import InputError
from .localise import describe_localization
from .page import MAX_PAGE_BYTES, ProfilePage
from .report import render_profile_html

MAX_READ_BYTES = 4 * MAX_PAGE_BYTES
"""Of an object as kubectl writes it: what is kept stands in it as a string."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 where the input cannot be read (the message is on standard error)."""
    arguments = _build_parser().parse_args(argv)
    try:
        page, title = parse_profile_window(_read_window(arguments.window))
        print("\n".join((title, *describe_localization(page.localisation), f"to do: {page.localisation.finding.advice}")))
        if arguments.output:
            arguments.output.write_text(render_profile_html(page, title), encoding="utf-8")
    except (InputError, OSError) as error:
        print(f"pacekeeper behaviour: {error}", file=sys.stderr)
        return 2
    return 0


def parse_profile_window(data: bytes) -> tuple[ProfilePage, str]:
    """A page and its title, from a BehaviourWindow as `kubectl get -o json` writes it, or from its `spec.content`.

    Raises InputError.
    """
    content = parse_json(data)
    if not isinstance(content, Mapping) or "spec" not in content:
        return ProfilePage.from_json(data), "Behaviour window"
    kept, name = _get_nested(content, "spec", "content"), _get_nested(content, "metadata", "name")
    if not isinstance(kept, str):
        raise InputError("spec.content: must be a string; is this one BehaviourWindow?")
    return ProfilePage.from_json(kept.encode(errors="replace")), f"{name}"


def _get_nested(content: Mapping[str, object], outer: str, inner: str) -> object:
    within = content.get(outer)
    return within.get(inner) if isinstance(within, Mapping) else None


def _read_window(path: Path) -> bytes:
    """Of standard input where the path is `-`. Raises InputError for more than a window can be."""
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as stream:
        data = stream.read(MAX_READ_BYTES + 1)
    if len(data) > MAX_READ_BYTES:
        raise InputError(f"{path}: is longer than {MAX_READ_BYTES} bytes, which no behaviour window is")
    return data


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pacekeeper behaviour",
        description="Which function makes a job slow, on which ranks, and what kind of fault is it?",
    )
    parser.add_argument(
        "window", type=Path, metavar="FILE", help="from `kubectl get behaviourwindow NAME -o json`; -: standard input"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE", help="write a page with flame graphs (HTML)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
