"""What a probe pod runs on a node that is suspected or quarantined; it ends well if the node can be used.

That it runs at all shows that kubelet, container runtime and image are well. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

TIMEOUT_SECONDS = 20


class Unfit(Exception):
    """The node cannot be used yet; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pacekeeper_operator.probe", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs of the node the pod was given")
    gpus = parser.parse_args().gpus
    try:
        check_network(os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"]))
        if gpus:
            check_gpus(gpus, _nvidia_smi())
    except Unfit as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check_network(host: str, port: int) -> None:
    """The API server's service answers: the pod has a network, and the node routes services."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_SECONDS).close()
    except OSError as error:
        raise Unfit(f"the API server's service {host}:{port} cannot be reached: {error}") from error


def check_gpus(expected: int, listed: str) -> None:
    """All GPUs answer and none has memory errors that could not be corrected. `listed`: lines of `uuid, errors`."""
    gpus = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    if len(gpus) != expected:
        raise Unfit(f"{len(gpus)} of {expected} GPUs answer")
    for uuid, errors in gpus:
        if errors.isdecimal() and int(errors) > 0:
            raise Unfit(f"{uuid} has {errors} uncorrected memory errors since its last reset")


def _nvidia_smi() -> str:
    """Which comes into the container with the GPUs."""
    query = "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"nvidia-smi does not work: {error}") from error
    if done.returncode != 0:
        raise Unfit(f"nvidia-smi: {(done.stdout + done.stderr).strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
