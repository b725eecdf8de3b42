"""Container images without a registry and without Docker. Containers use the machine's own programs.

The images are nearly empty. Each containerd adds read-only bind mounts to every container (`build_runtime_spec`): the
machine's /usr, the Python installation, the virtual environment, and the checkout. Manifests need not mention them. A
changed source file is in the next container without a build. The paths inside are fixed, wherever the checkout is:
/opt/venv (the environment, on the PATH) and /opt/pacekeeper (the checkout, the working directory).
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

from testcluster.programs import Programs
from testcluster.settings import REPOSITORY
from testcluster.shell import run_command

PAUSE_IMAGE = "pacekeeper.dev/pause:dev"
DEV_IMAGE = "pacekeeper.dev/dev:dev"
TRAINER_IMAGE = "pacekeeper.dev/trainer:dev"
OPERATOR_IMAGE = "pacekeeper.dev/operator:dev"

UNPRIVILEGED_USER_ID = 65532
_VENV = "/opt/venv"
_CHECKOUT = "/opt/pacekeeper"
_ENVIRONMENT = {
    "PATH": f"/opt/bin:{_VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": ":".join(f"{_CHECKOUT}/{package}" for package in ("analysis", "operator", "trainer")),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
}
_PASSWD = (
    "root:x:0:0:root:/tmp:/bin/sh\n"
    f"pacekeeper:x:{UNPRIVILEGED_USER_ID}:{UNPRIVILEGED_USER_ID}:pacekeeper:/tmp:/bin/sh\n"
)
_GROUP = f"root:x:0:\npacekeeper:x:{UNPRIVILEGED_USER_ID}:\n"
# The environment's console script names its interpreter by the checkout's path, which containers do not have.
_CONSOLE_SCRIPT = f"#!{_VENV}/bin/python\nfrom pacekeeper.cli import main\n\nraise SystemExit(main())\n"


def build_archive(pause: Path) -> bytes:
    """Build an OCI layout (a tar) with all images. The same input gives the same bytes."""
    layout = _Layout()
    pause_layer = layout.add_layer({"pause": (0o755, pause.read_bytes())})
    layout.add_image([PAUSE_IMAGE], pause_layer, {"Entrypoint": ["/pause"], "User": f"{UNPRIVILEGED_USER_ID}"})

    layer = layout.add_layer(
        {
            "etc/passwd": (0o644, _PASSWD.encode()),
            "etc/group": (0o644, _GROUP.encode()),
            "opt/bin/pacekeeper": (0o755, _CONSOLE_SCRIPT.encode()),
            "tmp/": (0o1777, b""),
        }
    )
    environment = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
    common = {"Env": environment, "WorkingDir": _CHECKOUT, "Cmd": ["python"]}
    layout.add_image([TRAINER_IMAGE, DEV_IMAGE], layer, common)
    layout.add_image([OPERATOR_IMAGE], layer, common | {"User": f"{UNPRIVILEGED_USER_ID}:{UNPRIVILEGED_USER_ID}"})
    return layout.to_tar()


def build_runtime_spec(programs: Programs) -> str:
    """Build containerd's base_runtime_spec: its own default, and the bind mounts."""
    spec = json.loads(run_command(programs["ctr"], "oci", "spec"))
    for source, destination in _list_binds():
        options = ["rbind", "ro", "nosuid", "nodev"]
        spec["mounts"].append({"destination": destination, "type": "bind", "source": str(source), "options": options})
    return json.dumps(spec, indent=1)


def _list_binds() -> list[tuple[Path, str]]:
    """Return (folder or file of the machine, its path in a container)."""
    system = [
        Path(entry) for entry in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
    ]
    binds = [(path, str(path)) for path in system if path.exists()]
    python = Path(sys.base_prefix)
    if not python.is_relative_to("/usr"):
        binds.append((python, str(python)))
    return [*binds, (Path(sys.prefix), _VENV), (REPOSITORY, _CHECKOUT)]


class _Layout:
    """Collects the blobs and the index of an OCI image layout."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._manifests: list[dict[str, Any]] = []

    def add_layer(self, files: dict[str, tuple[int, bytes]]) -> dict[str, Any]:
        """Add a layer. `files`: path → (mode, content); a path that ends with / is a folder."""
        return self._add("application/vnd.oci.image.layer.v1.tar", _build_tar(files))

    def add_image(self, names: list[str], layer: dict[str, Any], config: dict[str, Any]) -> None:
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
        image = {
            "architecture": architecture,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        }
        config_blob = self._add("application/vnd.oci.image.config.v1+json", json.dumps(image).encode())
        manifest_type = "application/vnd.oci.image.manifest.v1+json"
        manifest = {"schemaVersion": 2, "mediaType": manifest_type, "config": config_blob, "layers": [layer]}
        descriptor = self._add(manifest_type, json.dumps(manifest).encode())
        self._manifests += [descriptor | {"annotations": {"io.containerd.image.name": name}} for name in names]

    def to_tar(self) -> bytes:
        files = {f"blobs/sha256/{digest}": (0o644, content) for digest, content in self._blobs.items()}
        files["oci-layout"] = (0o644, json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        files["index.json"] = (0o644, json.dumps({"schemaVersion": 2, "manifests": self._manifests}).encode())
        return _build_tar(files)

    def _add(self, media_type: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        self._blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _build_tar(files: dict[str, tuple[int, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, (mode, content) in files.items():
            entry = tarfile.TarInfo(path.rstrip("/"))
            entry.type = tarfile.DIRTYPE if path.endswith("/") else tarfile.REGTYPE
            entry.mode, entry.size = mode, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
