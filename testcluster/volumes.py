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
from testcluster.shell import ClusterError, run, say

COUNT = 8
_LOOK_SECONDS = 0.5
_FREE = '[{"op": "remove", "path": "/spec/claimRef"}]'


def make() -> str:
    """The folders; the manifests of their volumes."""
    for index in range(COUNT):
        folder = _folder(f"checkpoints-{index}")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # containers write to it as any user
    return "\n---\n".join(_volume(f"checkpoints-{index}") for index in range(COUNT))


def ensure() -> None:
    """Volumes whose claim is gone are emptied and free again a moment later."""
    daemon().ensure()


def daemon() -> Daemon:
    """Its source is its configuration: a changed one restarts it."""
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.volumes")
    return Daemon("volumes", command, configuration=Path(__file__).read_text())


def main() -> None:
    """Until it is ended. While the API server is away, nothing is given back."""
    while True:
        try:
            for volume in api.get("/api/v1/persistentvolumes")["items"]:
                if volume["status"].get("phase") in ("Released", "Failed"):
                    _give_back(volume["metadata"]["name"])
        except (ClusterError, OSError) as error:
            say(str(error))
        time.sleep(_LOOK_SECONDS)


def _give_back(name: str) -> None:
    for left in _folder(name).iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    kubectl = (programs.kubectl(), f"--kubeconfig={KUBECONFIG}")
    run(*kubectl, "patch", "persistentvolume", name, "--type=json", "-p", _FREE)


def _folder(name: str) -> Path:
    return VOLUMES / name


def _volume(name: str) -> str:
    return f"""
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  storageClassName: shared
  accessModes: [ReadWriteMany, ReadWriteOnce]
  capacity: {{storage: 100Gi}}
  persistentVolumeReclaimPolicy: Retain
  hostPath: {{path: {_folder(name)}, type: Directory}}
"""


if __name__ == "__main__":
    main()
