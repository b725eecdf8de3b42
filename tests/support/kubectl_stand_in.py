"""A stand-in for kubectl and its cluster: it answers from a file of objects and writes down what it was asked to do.

    STAND_IN=<folder>: objects.json, a list of objects; asked.json, which it writes; refusal, words to refuse with

The real one is asked by tests/cluster/test_first_day.py.
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
    if verb != "get":
        return 0
    kind = rest[0].partition(".")[0]
    found = [body for body in json.loads((folder / "objects.json").read_text()) if body["kind"].lower() + "s" == kind]
    if rest[1] == "-o":
        print(json.dumps({"items": found}))
        return 0
    one = next((body for body in found if body["metadata"]["name"] == rest[1]), None)
    if one is None:
        print(f'Error from server (NotFound): {rest[0]} "{rest[1]}" not found', file=sys.stderr)
        return 1
    print(json.dumps(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
