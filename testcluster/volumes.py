"""The test cluster's volumes: folders on the machine, which all nodes share, emptied when their claim is deleted.

A process of the test cluster empties them. Kubernetes' own recycler may take the pod of an earlier recycling for its
own. It then releases a volume that is not empty, and the late pod empties it while the next job uses it.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from testcluster import api, programs
from testcluster.daemons import Daemon
from testcluster.settings import KUBECONFIG, REPOSITORY, VOLUMES
from testcluster.shell import ClusterError, log_progress, run_command

VOLUME_COUNT = 8
_RECYCLE_INTERVAL_SECONDS = 0.5
_RELEASE_PATCH = '[{"op": "remove", "path": "/spec/claimRef"}]'


def create_volumes() -> str:
    """Create the folders, and return the manifests of their volumes."""
    for index in range(VOLUME_COUNT):
        folder = _get_folder(f"checkpoints-{index}")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # containers write to it as any user
    return "\n---\n".join(_build_volume(f"checkpoints-{index}") for index in range(VOLUME_COUNT))


def ensure_recycler() -> None:
    """Ensure the process that empties and releases volumes whose claim is deleted."""
    build_daemon().ensure_running()


def build_daemon() -> Daemon:
    """Build the daemon. Its source counts as configuration: a change restarts it."""
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.volumes")
    return Daemon("volumes", command, configuration=Path(__file__).read_text())


def main() -> None:
    """Recycle volumes until the process is ended. While the API server is unavailable, no volume is released."""
    while True:
        try:
            for volume in api.get_path("/api/v1/persistentvolumes")["items"]:
                if volume["status"].get("phase") in ("Released", "Failed"):
                    _recycle_volume(volume["metadata"]["name"])
        except (ClusterError, OSError) as error:
            log_progress(str(error))
        time.sleep(_RECYCLE_INTERVAL_SECONDS)


def _recycle_volume(name: str) -> None:
    for entry in _get_folder(name).iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    kubectl = (programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}")
    run_command(*kubectl, "patch", "persistentvolume", name, "--type=json", "-p", _RELEASE_PATCH)


def _get_folder(name: str) -> Path:
    return VOLUMES / name


def _build_volume(name: str) -> str:
    return f"""
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  storageClassName: shared
  accessModes: [ReadWriteMany, ReadWriteOnce]
  capacity: {{storage: 100Gi}}
  persistentVolumeReclaimPolicy: Retain
  hostPath: {{path: {_get_folder(name)}, type: Directory}}
"""


if __name__ == "__main__":
    main()
