"""Builds everything that a release consists of."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from release import chart, debian, images, native, sbom, wheels
from release.archives import Entry
from release.commands import ReleaseError, log_step
from release.oci import Descriptor, Layout
from release.source import Source, export_source, read_notes

CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True)
class _Platform:
    """What images of one platform share. `packages`: of Debian, with their files."""

    machine: str
    wheel: Path
    packages: Mapping[debian.LockedPackage, Path]
    base: Mapping[str, Entry]

    @property
    def architecture(self) -> str:
        return debian.ARCHITECTURES[self.machine]


def build_release(root: Path, output: Path, cache: Path) -> None:
    """Build the release of the checked-out commit into `output`, which is replaced. Raises ReleaseError.

    cache: a folder for downloads, which the next release uses again.
    """
    if sys.version_info[:2] != tuple(int(part) for part in debian.PYTHON.split(".")):
        raise ReleaseError(
            f"images hold modules that this Python compiles, so a release needs Python {debian.PYTHON}: "
            f"remove build/release-tools, then run `make release PYTHON=python{debian.PYTHON}`"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".release-") as folder:
        work, result = Path(folder), Path(folder, "result")
        result.mkdir()
        source = export_source(root, work / "source")
        with log_step("Debian packages"):
            locked = debian.read_lock(work / "source/locks/debian.txt")
            packages = debian.download_packages(locked, cache / "debian", work / "apt")
        platforms = [_build_platform(machine, source, packages, work, result) for machine in debian.ARCHITECTURES]
        with log_step("Pure wheel"):
            wheels.build_wheel(work / "source", result, source.seconds, native=None)
        for image in images.IMAGES:
            _build_image(image, platforms, source, work, result)
        with log_step("Chart"):
            _write_chart(work / "source/charts/pacekeeper", source, result)
        (result / f"CHANGELOG-{source.version}.md").write_text(read_notes(work / "source", source.version))
        (result / CHECKSUMS).write_text(format_checksums(result))
        shutil.rmtree(output, ignore_errors=True)
        result.rename(output)


def find_differences(first: Path, second: Path) -> list[str]:
    """Return the names of files that are not the same in both folders."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    return sorted(name for name in names if _read_digest(first / name) != _read_digest(second / name))


def format_checksums(folder: Path) -> str:
    """Return the lines of a file for `sha256sum --check`."""
    return "".join(
        f"{_read_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != CHECKSUMS
    )


def _build_platform(
    machine: str, source: Source, packages: Mapping[debian.LockedPackage, Path], work: Path, result: Path
) -> _Platform:
    own = {key: path for key, path in packages.items() if key.architecture == debian.ARCHITECTURES[machine]}
    headers, parts, base = work / machine / "headers", work / machine / "native", work / machine / "base"
    with log_step(f"Wheel for {machine}"):
        (file,) = (path for key, path in own.items() if key.name == debian.HEADERS)
        debian.unpack_package(file.read_bytes(), headers)
        native.build_parts(work / "source", parts, machine, headers, work / "zig")
        wheel = wheels.build_wheel(work / "source", result, source.seconds, native=parts, machine=machine)
    with log_step(f"Python for images of {machine}"):
        own = {key: path for key, path in own.items() if key.name != debian.HEADERS}
        images.build_base(own, base)
        return _Platform(machine, wheel, own, images.read_layer(base))


def _build_image(image: images.Image, platforms: list[_Platform], source: Source, work: Path, result: Path) -> None:
    """Write the image of all platforms, and a bill of materials for each."""
    layout = Layout(source.seconds)
    manifests = []
    for platform in platforms:
        with log_step(f"Image {image.name} for {platform.machine}"):
            manifest, bill = _add_platform(layout, image, platform, source, work)
        manifests.append(manifest)
        (result / f"pacekeeper-{image.name}-{source.version}-{platform.architecture}.cdx.json").write_bytes(bill)
    annotations = {"org.opencontainers.image.version": source.version, "org.opencontainers.image.title": image.title}
    index = layout.add_index(manifests, annotations)
    layout.add_name(index, source.version, f"pacekeeper.dev/{image.name}:{source.version}")
    (result / f"pacekeeper-{image.name}-{source.version}.oci.tar").write_bytes(layout.build_archive())


def _add_platform(
    layout: Layout, image: images.Image, platform: _Platform, source: Source, work: Path
) -> tuple[Descriptor, bytes]:
    """Add the image of a platform, and return the descriptor of its manifest and its bill of materials."""
    packages, product = (work / platform.machine / f"{image.name}-{part}" for part in ("packages", "product"))
    images.install_packages(work / "source/locks" / image.lock, platform.machine, packages)
    images.install_wheel(platform.wheel, product)
    own = images.read_layer(product) | images.create_environment()
    trees = (platform.base, images.read_layer(packages), own)
    if missing := images.find_missing_libraries(trees, platform.machine):
        raise ReleaseError(
            f"image {image.name} for {platform.machine}: {'; '.join(missing)}. Add Debian's packages with these "
            "libraries to release/debian.py, then run `make lock`"
        )
    layers = [layout.add_layer(images.build_layer(tree, source.seconds)) for tree in trees]
    config = images.create_config(image, source.version, source.commit)
    manifest = layout.add_image(platform.architecture, layers, config)

    contents = [sbom.describe_debian_package(package) for package in platform.packages]
    for folder in (packages, product):
        contents += sbom.iterate_python_packages(folder / images.PACKAGES)
    described = sbom.describe_image(image.name, source.version, manifest["digest"], platform.architecture)
    bill = sbom.build_bill(described, contents, source.seconds)
    sbom.check_bill(bill)
    return manifest, bill


def _write_chart(folder: Path, source: Source, result: Path) -> None:
    try:
        package = chart.build_package(folder, source.seconds)
    except ValueError as error:
        raise ReleaseError(f"{folder.name}: {error}") from error
    (result / f"pacekeeper-{source.version}.tgz").write_bytes(package)
    artifact = chart.build_artifact(folder, package, source.seconds)
    (result / f"pacekeeper-chart-{source.version}.oci.tar").write_bytes(artifact)


def _read_digest(path: Path) -> str:
    """Return the digest of a file. Empty: it does not exist."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
