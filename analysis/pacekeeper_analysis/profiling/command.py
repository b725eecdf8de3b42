"""The command `pacekeeper profile`: prints what a profile window has shown, and writes it as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pacekeeper_analysis.protocol.decoding import parse_json

from ..errors import InputError
from .localize import describe_localization
from .page import MAX_PAGE_BYTES, ProfilePage
from .report import render_profile_html

MAX_READ_BYTES = 4 * MAX_PAGE_BYTES
"""Upper limit of an object as kubectl writes it: the stored content is a string in it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 if the input cannot be read (with a message on standard error)."""
    arguments = _build_parser().parse_args(argv)
    try:
        page, title = parse_profile_window(_read_window(arguments.window))
        print(
            "\n".join((title, *describe_localization(page.localization), f"to do: {page.localization.finding.advice}"))
        )
        if arguments.output:
            arguments.output.write_text(render_profile_html(page, title), encoding="utf-8")
    except (InputError, OSError) as error:
        print(f"pacekeeper profile: {error}", file=sys.stderr)
        return 2
    return 0


def parse_profile_window(data: bytes) -> tuple[ProfilePage, str]:
    """Return a page and its title, from a ProfileWindow as `kubectl` writes it in JSON, or from its content.

    Raises InputError.
    """
    content = parse_json(data)
    if not isinstance(content, Mapping) or "spec" not in content:
        return ProfilePage.from_json(data), "Profile window"
    stored, name = _get_nested(content, "spec", "content"), _get_nested(content, "metadata", "name")
    if not isinstance(stored, str):
        raise InputError("spec.content: must be a string; is this one ProfileWindow?")
    return ProfilePage.from_json(stored.encode(errors="replace")), f"{name}"


def _get_nested(content: Mapping[str, object], outer: str, inner: str) -> object:
    section = content.get(outer)
    return section.get(inner) if isinstance(section, Mapping) else None


def _read_window(path: Path) -> bytes:
    """Read the file, or standard input for `-`. Raises InputError for more than a window can be."""
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as stream:
        data = stream.read(MAX_READ_BYTES + 1)
    if len(data) > MAX_READ_BYTES:
        raise InputError(f"{path}: is longer than {MAX_READ_BYTES} bytes, the limit of a profile window")
    return data


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pacekeeper profile",
        description="Show which function slows a job down, on which ranks, and the class of the fault.",
    )
    parser.add_argument(
        "window", type=Path, metavar="FILE", help="from `kubectl get profilewindow NAME -o json`; -: standard input"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE", help="write a page with flame graphs (HTML)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
