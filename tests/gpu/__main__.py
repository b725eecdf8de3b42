"""`python -m tests.gpu [TEST …]`: all tests, or those named (tests.gpu.test_modes). Exit status 77: no GPU here."""

from __future__ import annotations

import json
import sys
import unittest

from bench.__main__ import NOT_RUN
from bench.scripts.gpu.machine import DEVICE, explain_missing_gpu, read_machine_facts

print(json.dumps({"device": str(DEVICE), **read_machine_facts()}), file=sys.stderr, flush=True)
if reason := explain_missing_gpu():
    print(f"not run: {reason}", file=sys.stderr)
    sys.exit(NOT_RUN)
unittest.main(
    module=None,
    argv=["tests.gpu", *(sys.argv[1:] or ["discover", "--start-directory", "tests/gpu", "--top-level-directory", "."])],
    verbosity=2,
)
