"""NodeQuarantines: asking for one, bringing the node to what it says, releasing all of them."""

from __future__ import annotations

from ..api import ObjectRef
from ..cluster import Cluster
from ..settings import Settings


async def quarantine(
    cluster: Cluster, node: str, node_uid: str, reason: str, incident: ObjectRef, settings: Settings, approved: bool
) -> str:
    """Creates the NodeQuarantine of `node`, where opt-out, pause and budget allow; what became of it, in words.

    Without `approved` it waits, and touches nothing, until a person of the platform team approves it.
    """
    raise NotImplementedError


async def reconcile(cluster: Cluster, name: str, settings: Settings, now: float) -> float:
    """Brings node and probe pod to what the NodeQuarantine `name` says; seconds until it wants to be called again.

    Level-triggered and idempotent. `now`: seconds since the epoch. math.inf: when the NodeQuarantine changes, only.
    """
    raise NotImplementedError


async def release_all(cluster: Cluster, timeout: float) -> None:
    """Deletes all NodeQuarantines and returns when their nodes are released, whether the operator runs or not.

    Raises TimeoutError, naming those that are left, after `timeout` seconds.
    """
    raise NotImplementedError
