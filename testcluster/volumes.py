"""The test cluster's volumes: folders that all nodes share, as they are one machine, emptied once their claim is gone.

A process of ours does that. Kubernetes' own recycler takes the pod of an earlier recycling that is still there for its
own: it hands the volume on full, and the late pod then empties it under the next job.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from testcluster import api, programs
from testcluster.daemons import Daemon
from testcluster.settings import KUBECONFIG, REPOSITORY, VOLUMES
from testcluster.shell import ClusterError, run_command, log_progress

VOLUME_COUNT = 8
_RECYCLE_INTERVAL_SECONDS = 0.5
_RELEASE_PATCH = '[{"op": "remove", "path": "/spec/claimRef"}]'


def create_volumes() -> str:
    """The folders; the manifests of their volumes."""
    for index in range(VOLUME_COUNT):
        folder = _get_folder(f"checkpoints-{index}")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # containers write to it as any user
    return "\n---\n".join(_build_volume(f"checkpoints-{index}") for index in range(VOLUME_COUNT))


def ensure_recycler() -> None:
    """Volumes whose claim is gone are emptied and free again a moment later."""
    build_daemon().ensure_running()


def build_daemon() -> Daemon:
    """Its source is its configuration: a changed one restarts it."""
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.volumes")
    return Daemon("volumes", command, configuration=Path(__file__).read_text())


def main() -> None:
    """Until it is ended. While the API server is away, nothing is given back."""
    while True:
        try:
            for volume in api.get_path("/api/v1/persistentvolumes")["items"]:
                if volume["status"].get("phase") in ("Released", "Failed"):
                    _recycle_volume(volume["metadata"]["name"])
        except (ClusterError, OSError) as error:
            log_progress(str(error))
        time.sleep(_RECYCLE_INTERVAL_SECONDS)


def _recycle_volume(name: str) -> None:
    for left in _get_folder(name).iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
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
