"""What-if of a job that trains now: the rings of its ranks are copied out of its workers, and looked at here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import STATE
from pacekeeper_analysis.whatif.causes import diagnose
from pacekeeper_analysis.whatif.figures import analyse
from pacekeeper_analysis.whatif.inputs import load
from pacekeeper_analysis.whatif.report.terminal import render

from ..api import LABEL_JOB, TRAINER
from ..manifests import RUNTIME_PATH
from .kubectl import Kubectl, KubectlError
from .seen import SeenJob
from .text import WIDTH

RINGS = f"{RUNTIME_PATH}/rings"
MOST_RANKS = 256
"""A ring has some megabytes."""
AT_ONCE = 8


def told(kubectl: Kubectl, seen: SeenJob) -> str:
    """What stragglers cost in the last steps, and who they are. Raises InputError."""
    if seen.status.sync_mode not in (None, SyncMode.SYNC):
        raise InputError(f"{seen.job.name} trains in {seen.status.sync_mode}, in which no rank waits for another")
    ranks = seen.job.spec.replicas * seen.job.spec.nproc_per_node
    if ranks > MOST_RANKS:
        raise InputError(f"{ranks} ranks are too many to copy: read the Incidents, or take a trace (docs/whatif.md)")
    pods = [body["metadata"]["name"] for body in kubectl.list("pods", labels=f"{LABEL_JOB}={seen.job.name}")]
    with ThreadPoolExecutor(AT_ONCE) as pool, tempfile.TemporaryDirectory() as folder:
        found = [ring for rings in pool.map(lambda pod: _rings(kubectl, pod), pods) for ring in rings]
        paths = []
        for rank, content in _newest(found).items():
            paths.append(Path(folder, str(rank)))
            paths[-1].write_bytes(content)
        if not paths:
            raise InputError(f"{seen.job.name} has no ranks that train: kubectl pacekeeper why {seen.job.name}")
        whatif = analyse(load(paths).window)
    return render(whatif, diagnose(whatif), width=WIDTH, colour=False)


def _rings(kubectl: Kubectl, pod: str) -> list[bytes]:
    """Of the ranks in a pod: none in a spare, or in one that has just gone."""
    try:
        names = kubectl.run("exec", pod, *kubectl.place, "-c", TRAINER, "--", "ls", RINGS).split()
    except KubectlError as error:
        if "forbidden" in str(error).lower():
            raise
        return []
    return [kubectl.read(pod, TRAINER, f"{RINGS}/{name}") for name in names if name.isdigit()]


def _newest(rings: list[bytes]) -> Mapping[int, bytes]:
    """By rank; those of earlier rounds are left out."""
    heads = [(np.frombuffer(ring[: STATE.itemsize], STATE)[0], ring) for ring in rings if len(ring) >= STATE.itemsize]
    newest = max((int(head["round"]) for head, _ in heads), default=0)
    return {int(head["rank"]): ring for head, ring in heads if head["round"] == newest}
