"""An operator that is killed right after its n-th write ($CRASH_TEST_WRITES) to the API server.

Events, the Lease, reviews of tokens and dry runs do not count: an operator that dies after these has done nothing more
than before. Nor do statuses: they are written again whenever they differ.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pacekeeper_operator.__main__ import main
from pacekeeper_operator.kube.client import Cluster

UNCOUNTED_PATHS = ("/events", "/leases", "/tokenreviews", "/status")

_call = Cluster._call
_writes_left = int(os.environ["CRASH_TEST_WRITES"])


async def _call_and_crash(self: Cluster, method: str, path: str, *rest: Any, **options: Any) -> Any:
    global _writes_left
    result = await _call(self, method, path, *rest, **options)
    if _is_counted(method, path, *rest, **options):
        _writes_left -= 1
        if _writes_left <= 0:
            os._exit(9)
    return result


def _is_counted(method: str, path: str, query: Mapping[str, str] | None = None, *_: Any, **__: Any) -> bool:
    uncounted = any(part in path for part in UNCOUNTED_PATHS) or "dryRun" in (query or {})
    return method != "GET" and not uncounted


if __name__ == "__main__":
    Cluster._call = _call_and_crash  # type: ignore[method-assign]
    sys.argv = sys.argv[:1]
    sys.exit(main())
