"""Kubernetes Events about what the operator does. They are best effort: a lost one changes nothing."""

from __future__ import annotations

import logging

import kopf

from ..api.formats import format_time
from ..api.names import API_VERSION
from ..api.training_job import TrainingJob
from ..async_runtime import OperatorRuntime
from ..kube.client import EVENTS, Cluster, Object
from .operator import Operator

MAX_NOTE_CHARACTERS = 1024
log = logging.getLogger(__name__)


async def emit_job_event(
    operator: Operator, job: TrainingJob, reason: str, note: str, action: str, *, warning: bool = False
) -> None:
    """Emit an Event about `job`. `action`: what was done, in UpperCamelCase."""
    regarding = {
        "apiVersion": API_VERSION,
        "kind": str(job.kind),
        "name": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
    }
    await emit_event(operator.cluster, operator.runtime, regarding, reason, note, action, warning=warning)


async def emit_event(
    cluster: Cluster,
    runtime: OperatorRuntime,
    regarding: Object,
    reason: str,
    note: str,
    action: str,
    *,
    warning: bool = False,
) -> None:
    """Emit an Event about any object, given as an ObjectReference. Without a namespace, the Event is in `default`."""
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{regarding['name']}.{runtime.create_identifier()[:16]}",
            "namespace": regarding.get("namespace", "default"),
        },
        "eventTime": format_time(runtime.now()),
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "action": action,
        "note": note[:MAX_NOTE_CHARACTERS],
        "reportingController": "pacekeeper.dev/operator",
        "reportingInstance": "operator",
        "regarding": regarding,
    }
    try:
        await cluster.create(EVENTS, body)
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("an Event could not be written and is lost: %s", error)
