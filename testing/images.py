"""Images of the Dockerfile, built by buildah upon a base of Debian packages: without Docker, without a registry."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from testcluster import programs
from testcluster.settings import CACHE

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
_RUN = "/run/pacekeeper-images"
_BASE = "localhost/base"
_PIP_SOURCE_OPTIONS = (
    *("index-url", "extra-index-url", "no-index", "find-links", "trusted-host"),
    *("cert", "client-cert", "proxy", "timeout", "default-timeout", "retries"),
)
"""Of pip's settings, those that define where packages come from."""


class Images:
    """Layers are kept in the cache, one set per version of the locks: a build makes what has changed since the last."""

    def __init__(self, scratch: Path) -> None:
        locks = b"".join(path.read_bytes() for path in sorted((REPOSITORY_ROOT / "locks").iterdir()))
        digest = hashlib.sha256(locks).hexdigest()[:12]
        store = ["--root", str(CACHE / f"images-{digest}"), "--runroot", _RUN]
        self._command = [str(programs.find_buildah()), *store, "--storage-driver", "overlay"]
        if subprocess.run([*self._command, "info"], capture_output=True, check=False).returncode != 0:
            self._command[-1] = "vfs"  # copies all of an image for each of its layers
        self._layers = f"--layers={self._command[-1] == 'overlay'}".lower()
        self._volumes = list(_build_pip_options(scratch))
        self._make_base()

    def build(self, target: str, *options: str) -> None:
        """The Dockerfile's `target`; its image has the same name."""
        base = ["--isolation=chroot", self._layers, "--build-arg", f"BASE={_BASE}", *self._volumes]
        self._run_buildah("bud", *base, "--target", target, "--tag", target, *options, str(REPOSITORY_ROOT))

    def config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._run_buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
        return config

    def run(self, name: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`command` in a new container of the image, as the image's user."""
        container = self._run_buildah("from", name).strip()
        variables = [f"--env={variable}={value}" for variable, value in environment.items()]
        try:
            arguments = ["run", "--isolation=chroot", *variables, container, "--", *command]
            return subprocess.run(
                [*self._command, *arguments], capture_output=True, text=True, timeout=300, check=False
            )
        finally:
            self._run_buildah("rm", container)

    def _make_base(self) -> None:
        if self._run_buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
            return
        container = self._run_buildah("from", "scratch").strip()
        self._run_buildah("add", container, str(programs.build_python_base()), "/")
        self._run_buildah("commit", "--rm", container, _BASE)

    def _run_buildah(self, *arguments: str) -> str:
        result = subprocess.run([*self._command, *arguments], capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout


def _build_pip_options(scratch: Path) -> Iterator[str]:
    """Options of buildah: builds see where this machine's pip gets packages from, and images hold nothing of it."""
    config = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = ConfigParser(interpolation=None)
    settings["global"] = {}
    for line in sorted(config.stdout.splitlines(), reverse=True):  # those of the environment come last, and win
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in _PIP_SOURCE_OPTIONS:
            settings["global"][option] = ast.literal_eval(value)
    scratch.mkdir(mode=0o700)
    with scratch.joinpath("pip.conf").open("w") as file:
        settings.write(file)
    yield f"--volume={scratch}/pip.conf:/etc/pip.conf:ro"
    paths = {word for value in settings["global"].values() for word in value.split() if word.startswith("/")}
    yield from (f"--volume={path}:{path}:ro" for path in sorted(paths) if Path(path).exists())
