"""What watches tell of pods and nodes goes into the store, which wakes the jobs that it concerns."""

from __future__ import annotations

from typing import Any

import kopf

from ..api import LABEL_JOB
from ..services.operator import Operator


@kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT})
async def pod_changed(memo: kopf.Memo, body: kopf.Body, type: str | None, **_: Any) -> None:
    operator: Operator = memo.operator
    operator.pods.hear(body, deleted=type == "DELETED")


@kopf.on.event("", "v1", "nodes")
async def node_changed(memo: kopf.Memo, body: kopf.Body, type: str | None, **_: Any) -> None:
    operator: Operator = memo.operator
    operator.nodes.hear(body, deleted=type == "DELETED")
    operator.fleet.nodes.hear(body, deleted=type == "DELETED")
