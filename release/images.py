"""Makes the images of both platforms: Debian's Python, the locked packages, and Pacekeeper, one layer each.

The Dockerfile makes the same for your own base and platform. Here nothing runs in the image, so that any machine can
build images of both platforms.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release import debian
from release.archives import Entry, build_tar, create_folder, create_link, read_tree
from release.commands import ReleaseError, run_command
from release.elf import is_elf, read_elf

USER_ID = 65532
VENV = "opt/venv"
PACKAGES = f"{VENV}/lib/python{debian.PYTHON}/site-packages"
STANDARD_LIBRARY = f"usr/lib/python{debian.PYTHON}"
ENVIRONMENT = {
    "PATH": f"/{VENV}/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
}
_UV_PLATFORM = "manylinux_2_36"
"""The suite's glibc."""
_INSTALL_SECONDS, _COMPILE_SECONDS = 900, 600
_MERGED_FOLDERS = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = (
    "usr/share/man",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/bug",
    "usr/share/doc-base",
    "usr/share/info",
)
_LEFT_OUT_MODULES = ("nis",)
"""Modules of Python whose libraries are not in the images: it needs Kerberos."""
_STATE_FOLDER = "var/lib/dpkg/status.d"
"""One control file per package: scanners of images read them there."""
_BUNDLE = "etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class Image:
    """What differs between images. `lock`: the packages of Python in it, a file of `locks/`."""

    name: str
    title: str
    lock: str
    command: tuple[str, ...]


IMAGES = (
    Image("operator", "Pacekeeper's operator", "operator.txt", ("python", "-m", "pacekeeper_operator")),
    Image("watch", "Pacekeeper's watch", "watch.txt", ("python", "-m", "pacekeeper.sidecar")),
)


def build_base(packages: Mapping[debian.LockedPackage, Path], target: Path) -> None:
    """Unpack Debian's packages into `target`, as a system that runs Python. Raises ReleaseError."""
    target.mkdir(parents=True)
    for package in sorted(packages):
        try:
            control = debian.unpack_package(packages[package].read_bytes(), target)
        except (OSError, ValueError) as error:
            raise ReleaseError(f"{package.name} {package.version} cannot be unpacked: {error}") from error
        _write_file(target / _STATE_FOLDER / package.name, control)
    for name in _MERGED_FOLDERS:
        (target / "usr" / name).mkdir(exist_ok=True)
        (target / name).symlink_to(f"usr/{name}")
    for folder in _LEFT_OUT:
        shutil.rmtree(target / folder, ignore_errors=True)
    for path in (target / "usr/share/doc").rglob("*"):
        if not path.is_dir() and path.name != "copyright":
            path.unlink()
    for name in _LEFT_OUT_MODULES:
        for path in (target / STANDARD_LIBRARY / "lib-dynload").glob(f"{name}.*"):
            path.unlink()
    _configure_system(target)
    _compile_modules(target, STANDARD_LIBRARY)


def _configure_system(root: Path) -> None:
    """Write what scripts of the packages would."""
    _write_file(
        root / "etc/passwd",
        f"root:x:0:0:root:/root:/usr/sbin/nologin\npacekeeper:x:{USER_ID}:{USER_ID}:pacekeeper:/tmp:/usr/sbin/nologin\n",
    )
    _write_file(root / "etc/group", f"root:x:0:\npacekeeper:x:{USER_ID}:\n")
    _write_file(root / "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    authorities = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    _write_file(root / _BUNDLE, "".join(path.read_text().rstrip("\n") + "\n" for path in authorities))
    link = root / "usr/lib/ssl/cert.pem"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"/{_BUNDLE}")
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)


def install_packages(lock: Path, machine: str, target: Path) -> None:
    """Install what a lock lists for a machine into `target`, as wheels, of which nothing runs. Raises ReleaseError."""
    site = target / PACKAGES
    run_command(
        *(sys.executable, "-m", "uv", "pip", "install", "--target", site, "--requirements", lock, "--require-hashes"),
        *("--no-deps", "--only-binary", ":all:", "--python-version", debian.PYTHON, "--link-mode", "copy", "--quiet"),
        *("--python-platform", f"{machine}-{_UV_PLATFORM}"),
        timeout_seconds=_INSTALL_SECONDS,
    )  # fmt: skip
    shutil.rmtree(site / "bin", ignore_errors=True)  # scripts that name this machine's Python
    for path in sorted(site.rglob("*")):
        if path.name == "tests" and path.is_dir():
            shutil.rmtree(path)
    for path in (*site.glob(".*"), *site.glob("*.dist-info/REQUESTED"), *site.glob("*.dist-info/direct_url.json")):
        path.unlink()
    _compile_modules(target, PACKAGES)


def install_wheel(wheel: Path, target: Path) -> None:
    """Unpack Pacekeeper's own wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / PACKAGES)
    _compile_modules(target, PACKAGES)


def create_environment() -> dict[str, Entry]:
    """Return the entries that make a folder of packages a virtual environment, as `python -m venv` does."""
    return {
        f"{VENV}/pyvenv.cfg": Entry(
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {debian.PYTHON}\n".encode()
        ),
        f"{VENV}/bin": create_folder(),
        f"{VENV}/bin/python": create_link(f"/usr/bin/python{debian.PYTHON}"),
        f"{VENV}/bin/python3": create_link("python"),
        f"{VENV}/bin/pacekeeper": _create_script("pacekeeper.cli"),
        f"{VENV}/bin/kubectl-pacekeeper": _create_script("pacekeeper_operator.cli.command"),
    }


def find_missing_libraries(trees: Sequence[Mapping[str, Entry]], machine: str) -> list[str]:
    """Return the libraries that a program or library in the image needs, and that the image does not have.

    A file for another machine counts, too.
    """
    files = {path: entry for tree in trees for path, entry in tree.items()}
    names = {path.rpartition("/")[2] for path in files}
    missing = []
    for path, entry in sorted(files.items()):
        if not is_elf(entry.content):
            continue
        read = read_elf(entry.content)
        if read.machine != machine:
            missing.append(f"{path} is for {read.machine}")
        missing += [f"{path} needs {name}" for name in read.needed if name not in names]
    return missing


def build_layer(tree: Mapping[str, Entry], seconds: int) -> bytes:
    """Build a layer's tar: with the folders that files are in."""
    folders = {parent.as_posix() for path in tree for parent in Path(path).parents if parent != Path(".")}
    return build_tar({folder: create_folder() for folder in folders} | dict(tree), seconds)


def create_config(image: Image, version: str, commit: str) -> dict[str, object]:
    """Return what a container of the image runs as, by OCI's names."""
    return {
        "User": f"{USER_ID}:{USER_ID}",
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "Cmd": list(image.command),
        "Labels": {
            "org.opencontainers.image.title": image.title,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.revision": commit,
        },
    }


def read_layer(root: Path) -> dict[str, Entry]:
    try:
        return read_tree(root)
    except ValueError as error:
        raise ReleaseError(str(error)) from error


def _create_script(module: str) -> Entry:
    return Entry(f"#!/{VENV}/bin/python\nfrom {module} import main\n\nraise SystemExit(main())\n".encode(), 0o755)


def _compile_modules(root: Path, folder: str) -> None:
    """Compile Python modules: containers may not write, and would compile at each start.

    The result depends on nothing but the source: no time, no path of this machine, no order of sets.
    """
    run_command(
        *(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
        *("-s", root, "-p", "/", root / folder),
        variables={"PYTHONHASHSEED": "0"}, timeout_seconds=_COMPILE_SECONDS,
    )  # fmt: skip


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
