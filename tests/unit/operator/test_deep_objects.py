"""A tenant may nest an object as deeply as the API server allows. An operator that cannot read it ends, and so
does each successor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pacekeeper_operator.kube.client import parse_response

LEVELS = 9_900
READS = """
import copy, json, sys
from pacekeeper_operator.kube.client import parse_response
from pacekeeper_operator.async_runtime import raise_recursion_limit
raise_recursion_limit()
levels = int(sys.argv[1])
text = json.dumps({"items": [{"spec": {"template": {"x": 0}}}]}).replace("0", "[" * levels + "]" * levels)
copy.deepcopy(json.loads(text))  # as kopf does
inner, found = parse_response(text.encode())["items"][0]["spec"]["template"]["x"], 0
while inner:
    inner, found = inner[0], found + 1
print(found + 1)
"""


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="the depth of its JSON parser cannot be changed")
def test_kopfs_parser_and_ours_read_a_deep_object() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS, str(LEVELS)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip() == str(LEVELS), done.stderr


def test_a_body_that_is_not_json_becomes_the_message() -> None:
    assert parse_response(b"upstream [[[ gone") == {"message": "upstream [[[ gone"}
