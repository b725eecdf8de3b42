"""Container images without a registry and without Docker. Containers use the machine's own programs.

The images are nearly empty. Each containerd adds read-only bind mounts to every container (`build_runtime_spec`): the
machine's /usr, the Python installation, the virtual environment, and the checkout. Manifests need not mention them. A
changed source file is in the next container without a build. The paths inside are fixed, wherever the checkout is:
/opt/venv (the environment, on the PATH) and /opt/pacekeeper (the checkout, the working directory).
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from release.archives import Entry, build_tar, create_folder
from release.oci import Layout
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
# The environment's console scripts name their interpreter by the checkout's path, which containers do not have.
_CONSOLE_SCRIPT = f"#!{_VENV}/bin/python\nfrom pacekeeper.cli import main\n\nraise SystemExit(main())\n"
_TORCHRUN_SCRIPT = f"#!{_VENV}/bin/python\nfrom torch.distributed.run import main\n\nmain()\n"


def build_archive(pause: Path) -> bytes:
    """Build an OCI layout (a tar) with all images. The same input gives the same bytes."""
    layout = Layout()
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

    def add_image(names: list[str], entries: dict[str, Entry], config: dict[str, object]) -> None:
        layer = layout.add_layer(build_tar(entries, 0), compressed=False)
        descriptor = layout.add_image(architecture, [layer], config)
        for name in names:
            layout.add_name(descriptor, name.rpartition(":")[2], name)

    pause_files = {"pause": Entry(pause.read_bytes(), 0o755)}
    add_image([PAUSE_IMAGE], pause_files, {"Entrypoint": ["/pause"], "User": f"{UNPRIVILEGED_USER_ID}"})

    files = {
        "etc/passwd": Entry(_PASSWD.encode()),
        "etc/group": Entry(_GROUP.encode()),
        "opt/bin/pacekeeper": Entry(_CONSOLE_SCRIPT.encode(), 0o755),
        "opt/bin/torchrun": Entry(_TORCHRUN_SCRIPT.encode(), 0o755),
        "tmp": create_folder(0o1777),
    }
    environment = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
    common: dict[str, object] = {"Env": environment, "WorkingDir": _CHECKOUT, "Cmd": ["python"]}
    add_image([TRAINER_IMAGE, DEV_IMAGE], files, common)
    add_image([OPERATOR_IMAGE], files, common | {"User": f"{UNPRIVILEGED_USER_ID}:{UNPRIVILEGED_USER_ID}"})
    return layout.build_archive()


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
