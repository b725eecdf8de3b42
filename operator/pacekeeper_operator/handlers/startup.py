"""How kopf runs: its settings, its login."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, cast

import kopf

from ..api import FINALIZER_JOB


class _NoDifferences(kopf.DiffBaseStorage):
    """kopf would copy every object that a watch tells of three times over, to find what has changed for handlers of
    changes. There are none: that took 2 ms an event, of 3 in all."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return cast(kopf.BodyEssence, {})

    def store(self, **_: Any) -> None:
        return None


@kopf.on.startup()
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.peering.standalone = True  # leadership is by our own Lease
    settings.persistence.finalizer = FINALIZER_JOB
    settings.persistence.diffbase_storage = _NoDifferences()
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 3] + [
        5
    ] * 200  # an API server may be away for a quarter of an hour
    settings.queueing.error_delays = [1, 1, 2, 3, 5, 8]
    settings.posting.enabled = False  # we tell Events ourselves
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.background.cancellation_polling = 1
    settings.background.instant_exit_timeout = 2  # a loop ends after the call to the API server that it is in
    settings.process.ultimate_exiting_timeout = 8


@kopf.on.login()
def log_in(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """By the pod's service account or, outside of a cluster, the kubeconfig."""
    found = kopf.login_with_service_account(settings=settings)
    if found is None:
        return kopf.login_with_kubeconfig(settings=settings)
    # kopf calls the API server by its name; the address that every pod is given needs no DNS.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return dataclasses.replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
