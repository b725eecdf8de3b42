"""What-if analysis of a job that trains now. The rings of its ranks are copied from its workers, and analyzed here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.records import RING_STATE
from pacekeeper_analysis.whatif.causes import diagnose_cause
from pacekeeper_analysis.whatif.inputs import load_window
from pacekeeper_analysis.whatif.report.terminal import render_summary
from pacekeeper_analysis.whatif.slowdown_statistics import analyze_window

from ..api.names import Object, find_trainer_name
from ..pods.manifests import RUNTIME_PATH
from .kubectl import Kubectl, KubectlError
from .loaded_objects import LoadedJob
from .text import TEXT_WIDTH

RINGS_PATH = f"{RUNTIME_PATH}/rings"
MAX_COPIED_RANKS = 256
"""Ranks whose rings are copied, at most. A ring has some megabytes."""
MAX_CONCURRENT_KUBECTL = 8


def report_whatif(kubectl: Kubectl, loaded: LoadedJob) -> str:
    """Report what stragglers cost in the last steps, and which ranks they are.

    Raises InputError.
    """
    if loaded.status.sync_mode not in (None, SyncMode.SYNC):
        raise InputError(f"{loaded.job.name} trains in {loaded.status.sync_mode}, in which no rank waits for another")
    ranks = loaded.job.spec.replicas * loaded.job.spec.nproc_per_node
    if ranks > MAX_COPIED_RANKS:
        raise InputError(f"{ranks} ranks are too many to copy: read the Incidents, or take a trace (docs/whatif.md)")
    pods = [body["metadata"] for body in kubectl.list("pods", labels=loaded.job.selector)]
    with ThreadPoolExecutor(MAX_CONCURRENT_KUBECTL) as pool, tempfile.TemporaryDirectory() as folder:
        all_rings = [ring for rings in pool.map(lambda pod: _copy_rings(kubectl, pod), pods) for ring in rings]
        paths = []
        for rank, content in _select_newest_round(all_rings).items():
            paths.append(Path(folder, str(rank)))
            paths[-1].write_bytes(content)
        if not paths:
            raise InputError(f"{loaded.job.name} has no ranks that train: kubectl pacekeeper why {loaded.job.name}")
        whatif = analyze_window(load_window(paths).window)
    return render_summary(whatif, diagnose_cause(whatif), width=TEXT_WIDTH, color=False)


def _copy_rings(kubectl: Kubectl, metadata: Object) -> list[bytes]:
    """Copy the rings of the ranks in a pod, which `metadata` is of. A spare, or a pod that has just ended, has none."""
    pod, container = metadata["name"], find_trainer_name(metadata)
    try:
        names = kubectl.run("exec", pod, *kubectl.namespace_options, "-c", container, "--", "ls", RINGS_PATH).split()
    except KubectlError as error:
        if "forbidden" in str(error).lower():
            raise
        return []
    return [kubectl.read_file(pod, container, f"{RINGS_PATH}/{name}") for name in names if name.isdigit()]


def _select_newest_round(rings: list[bytes]) -> Mapping[int, bytes]:
    """Return the rings of the newest round, by rank."""
    states = [
        (np.frombuffer(ring[: RING_STATE.itemsize], RING_STATE)[0], ring)
        for ring in rings
        if len(ring) >= RING_STATE.itemsize
    ]
    newest = max((int(state["round"]) for state, _ in states), default=0)
    return {int(state["rank"]): ring for state, ring in states if state["round"] == newest}
