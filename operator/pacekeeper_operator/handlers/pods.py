"""Pods and nodes that change wake the loops of the jobs they concern."""

from __future__ import annotations

from typing import Any

import kopf

from ..api import LABEL_JOB
from ..services.operator import Operator


@kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT})
async def pod_changed(memo: kopf.Memo, namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
    operator: Operator = memo.operator
    operator.missed_events = 0
    operator.memory.wake_for_pod(namespace or "", labels[LABEL_JOB])


@kopf.on.event("", "v1", "nodes")
async def node_changed(memo: kopf.Memo, name: str, body: kopf.Body, type: str | None, **_: Any) -> None:
    operator: Operator = memo.operator
    operator.node_changed(name, None if type == "DELETED" else dict(body))
