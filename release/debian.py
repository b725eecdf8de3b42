"""Debian packages: the lock of those that images are made of, and what is in them.

Packages are unpacked, and none of their scripts runs. So no emulation, no root, and no container is needed, and the
result depends on the packages only.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release.commands import ReleaseError, run_command

SUITE = "bookworm"
PYTHON = "3.11"
"""Of that suite, and the one that the operator needs (docs/threat-model.md)."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of Debian and of OCI, by those of wheels and compilers."""
SOURCES_VARIABLE = "PACEKEEPER_DEBIAN_SOURCES"
HEADERS = f"libpython{PYTHON}-dev"
IMAGE_PACKAGES = (
    *("base-files", "ca-certificates", "gcc-12-base", "libbz2-1.0", "libc6", "libcrypt1", "libdb5.3", "libexpat1"),
    *("libffi8", "libgcc-s1", "liblzma5", "libncursesw6", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("libreadline8", "libsqlite3-0", "libssl3", "libstdc++6", "libtinfo6", "libuuid1", "media-types", "netbase"),
    *(f"python{PYTHON}-minimal", "tzdata", "zlib1g"),
)
"""What Python and the wheels load. The build fails if a library is missing."""
_MERGED = re.compile(r"^(bin|sbin|lib|lib32|lib64|libx32)(?=/|$)")
"""Folders of / that are links to those of /usr."""
_UPDATE_SECONDS, _DOWNLOAD_SECONDS = 300, 600
_ARCHIVE_MAGIC = b"!<arch>\n"
_MEMBER_HEADER_BYTES = 60


@dataclass(frozen=True, order=True)
class LockedPackage:
    architecture: str
    name: str
    version: str
    sha256: str


def read_lock(path: Path) -> list[LockedPackage]:
    """Read the lock. Raises ReleaseError if it does not have the packages of each architecture."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    try:
        locked = [LockedPackage(*line) for line in lines]
    except TypeError as error:
        raise ReleaseError(f"{path}: a line has no four words; `make lock` writes this file") from error
    wanted = {(architecture, name) for architecture in ARCHITECTURES.values() for name in (*IMAGE_PACKAGES, HEADERS)}
    if {(package.architecture, package.name) for package in locked} != wanted:
        raise ReleaseError(f"{path} does not list the packages of release/debian.py: renew it by `make lock`")
    return locked


def renew_lock(path: Path, work: Path) -> None:
    """Write the newest version of each package into the lock, and no address."""
    lines = ["# Packages of Debian in the released images: `make lock` renews this file.\n"]
    for architecture in ARCHITECTURES.values():
        variables = _create_apt(work / architecture, architecture)
        shown = run_command(
            *("apt-cache", "show", "--no-all-versions", *sorted((*IMAGE_PACKAGES, HEADERS))),
            variables=variables, timeout_seconds=_UPDATE_SECONDS,
        )  # fmt: skip
        for fields in map(_parse_fields, filter(None, shown.split("\n\n"))):
            lines.append(f"{architecture} {fields['Package']} {fields['Version']} {fields['SHA256']}\n")
    path.write_text("".join(lines))


def download_packages(packages: Sequence[LockedPackage], cache: Path, work: Path) -> dict[LockedPackage, Path]:
    """Return the files of packages. Those that the cache lacks are downloaded. Raises ReleaseError."""
    cache.mkdir(parents=True, exist_ok=True)
    files = {package: cache / f"{package.sha256}.deb" for package in packages}
    missing = [package for package in packages if not _has_digest(files[package], package.sha256)]
    for architecture in sorted({package.architecture for package in missing}):
        folder = work / architecture
        variables = _create_apt(folder, architecture)
        wanted = [package for package in missing if package.architecture == architecture]
        try:
            run_command(
                *("apt-get", "download", "--quiet", *(f"{package.name}={package.version}" for package in wanted)),
                folder=folder, variables=variables, timeout_seconds=_DOWNLOAD_SECONDS,
            )  # fmt: skip
        except ReleaseError as error:
            raise ReleaseError(
                f"{error}\nIf Debian has replaced a version, renew the lock by `make lock` and commit it, or name an "
                f"archive that still has it in {SOURCES_VARIABLE} (lines of a sources.list)."
            ) from error
        downloaded = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.deb")}
        for package in wanted:
            if package.sha256 not in downloaded:
                raise ReleaseError(
                    f"{package.name} {package.version} ({architecture}) is not the locked file: its sha256 differs"
                )
            os.replace(downloaded[package.sha256], files[package])
    return files


def unpack_package(content: bytes, target: Path) -> str:
    """Unpack a package's files into `target`, and return its control file. Raises ValueError for other content."""
    members = dict(_iterate_members(content))
    with _open_tar(members, "data.tar") as tar:
        for member in tar:
            path = target / _normalize_path(member.name)
            if path == target:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
                path.chmod(0o1777 if member.mode & 0o1000 else 0o755)
            elif member.issym():
                path.symlink_to(member.linkname)
            elif member.islnk():
                os.link(target / _normalize_path(member.linkname), path)
            elif member.isfile() and (file := tar.extractfile(member)):
                path.write_bytes(file.read())
                path.chmod(0o755 if member.mode & 0o111 else 0o644)
            else:
                raise ValueError(f"{member.name}: neither file, folder, nor link")
    with _open_tar(members, "control.tar") as tar:
        control = tar.extractfile("./control")
        assert control is not None
        return control.read().decode()


def _iterate_members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of an ar archive, which a package is."""
    if not content.startswith(_ARCHIVE_MAGIC):
        raise ValueError("no package of Debian")
    offset = len(_ARCHIVE_MAGIC)
    while offset + _MEMBER_HEADER_BYTES <= len(content):
        header = content[offset : offset + _MEMBER_HEADER_BYTES].decode("ascii")
        name, size = header[:16].strip().rstrip("/"), int(header[48:58])
        offset += _MEMBER_HEADER_BYTES
        yield name, content[offset : offset + size]
        offset += size + size % 2


def _open_tar(members: Mapping[str, bytes], name: str) -> tarfile.TarFile:
    """Open the tar of a package, which is compressed by xz in this suite."""
    if f"{name}.xz" not in members:
        raise ValueError(f"a package without {name}.xz, but {', '.join(members)}")
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(members[f"{name}.xz"])))


def _normalize_path(name: str) -> str:
    """Return the path below the root, with folders of / in /usr. Raises ValueError for a path that leaves it."""
    path = name.removeprefix("./").strip("/")
    if path == ".":
        return ""
    if ".." in path.split("/"):
        raise ValueError(f"{name} leaves the package")
    return _MERGED.sub(r"usr/\1", path)


def _create_apt(folder: Path, architecture: str) -> dict[str, str]:
    """Set apt up for another architecture, apart from this machine's packages, and return its environment."""
    folder = folder.resolve()
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("")
    (folder / "sources.list").write_text(_find_sources())
    (folder / "apt.conf").write_text(
        f'Dir::State "{folder}/state";\nDir::State::status "{folder}/status";\nDir::Cache "{folder}/cache";\n'
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
        f'APT::Architecture "{architecture}";\nAPT::Architectures {{"{architecture}";}};\n'
    )
    variables = {"APT_CONFIG": str(folder / "apt.conf")}
    run_command("apt-get", "update", "--quiet", variables=variables, timeout_seconds=_UPDATE_SECONDS)
    return variables


def _find_sources() -> str:
    """Return lines of a sources.list: the given ones, or where this machine has the suite's C library from."""
    if given := os.environ.get(SOURCES_VARIABLE):
        return given.rstrip("\n") + "\n"
    policy = run_command("apt-cache", "policy", "libc6", timeout_seconds=_UPDATE_SECONDS)
    found = re.findall(r" (\S+://\S+) (\S+)/(\S+) \S+ Packages$", policy, re.MULTILINE)
    lines = [
        f"deb {url} {suite} {component}\n" for url, suite, component in dict.fromkeys(found) if suite.startswith(SUITE)
    ]
    if not lines:
        raise ReleaseError(
            f"apt has no source of Debian's {SUITE} here, of which the images are made: run `apt-get update`, or "
            f"name it in {SOURCES_VARIABLE} (lines of a sources.list, such as `deb MIRROR {SUITE} main`)"
        )
    return "".join(lines)


def _parse_fields(text: str) -> dict[str, str]:
    """Return the fields of a paragraph of which each is one line."""
    return dict(re.findall(r"^(\S+): (.*)$", text, re.MULTILINE))


def _has_digest(path: Path, sha256: str) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
