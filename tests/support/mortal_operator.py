"""An operator that is killed right after its n-th write ($MORTAL_WRITES) to the API server.

Events, the Lease, reviews of tokens and dry runs do not count: whoever dies after these has done nothing more than
before. Nor do statuses: they are written anew whenever they differ.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pacekeeper_operator.__main__ import main
from pacekeeper_operator.cluster import Cluster

UNCOUNTED = ("/events", "/leases", "/tokenreviews", "/status")

_call = Cluster._call
_left = int(os.environ["MORTAL_WRITES"])


async def _mortal_call(self: Cluster, method: str, path: str, *rest: Any, **named: Any) -> Any:
    global _left
    answer = await _call(self, method, path, *rest, **named)
    if _counts(method, path, *rest, **named):
        _left -= 1
        if _left <= 0:
            os._exit(9)
    return answer


def _counts(method: str, path: str, query: Mapping[str, str] | None = None, *_: Any, **__: Any) -> bool:
    uncounted = any(part in path for part in UNCOUNTED) or "dryRun" in (query or {})
    return method != "GET" and not uncounted


if __name__ == "__main__":
    Cluster._call = _mortal_call  # type: ignore[method-assign]
    sys.argv = sys.argv[:1]
    sys.exit(main())
