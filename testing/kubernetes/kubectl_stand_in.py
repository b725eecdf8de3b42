"""A stand-in for kubectl and its cluster: it answers from a file of objects and records its calls.

    STAND_IN=<folder>: objects.json, a list of objects; later.json, those that are there once something was annotated;
    pods/<pod>/, what is in its container's folder of rings, and answer, with which its sidecar fills a file that is
    touched; refusal, a message to refuse with; asked.json, which it writes

The real one is called by tests/cluster/test_first_day.py and test_links.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    folder, arguments = Path(os.environ["STAND_IN"]), sys.argv[1:]
    with (folder / "asked.json").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    verb, *rest = [argument for argument in arguments if not argument.startswith("--")]
    refusal = folder / "refusal"
    if refusal.exists():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    if "--local" in arguments:
        return parse_manifests(arguments)
    if verb == "exec":
        return execute_program(folder / "pods" / rest[0], *arguments[arguments.index("--") + 1 :])
    if verb == "annotate" and (folder / "later.json").exists():
        (folder / "later.json").rename(folder / "now.json")
    if verb != "get":
        return 0
    kind = rest[0].partition(".")[0]
    files = (folder / name for name in ("objects.json", "now.json") if (folder / name).exists())
    bodies = [body for objects in files for body in json.loads(objects.read_text())]
    matching = [body for body in bodies if get_plural(body["kind"]) == kind]
    if rest[1] == "-o":
        print(json.dumps({"items": matching}))
        return 0
    match = next((body for body in matching if body["metadata"]["name"] == rest[1]), None)
    if match is None:
        print(f'Error from server (NotFound): {rest[0]} "{rest[1]}" not found', file=sys.stderr)
        return 1
    print(json.dumps(match))
    return 0


def parse_manifests(arguments: list[str]) -> int:
    """Print the objects of a file, as `kubectl patch --local` does with an empty patch."""
    import yaml  # most calls do without it

    file, output = (arguments[arguments.index(option) + 1] for option in ("-f", "-o"))
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        bodies = [body for body in yaml.safe_load_all(text) if body is not None]
    except (OSError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not bodies:
        print("error: no objects passed to patch", file=sys.stderr)
        return 1
    for body in bodies:
        print(json.dumps(body, indent=2) if output == "json" else yaml.safe_dump(body), end="")
    return 0


def get_plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def execute_program(folder: Path, program: str, path: str) -> int:
    if program == "ls" and folder.exists():
        print("\n".join(entry.name for entry in folder.iterdir()))
        return 0
    if program == "touch" and (folder / "answer").exists():
        (folder / Path(path).name).write_bytes((folder / "answer").read_bytes())
        return 0
    if program == "rm":
        (folder / Path(path).name).unlink()
        return 0
    if program == "cat":
        sys.stdout.buffer.write((folder / Path(path).name).read_bytes())
        return 0
    print(f"ls: {path}: No such file or directory", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
