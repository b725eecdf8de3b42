"""Packages the Helm chart: as `helm package` does, but the same bytes each time; and as an OCI artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from release.archives import Entry, build_tar, compress_archive
from release.oci import Layout

CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def build_package(chart: Path, seconds: int) -> bytes:
    """Build the chart's archive. Links are followed, and what .helmignore names is left out.

    Raises ValueError for a line of .helmignore that is no folder's name.
    """
    name = read_metadata(chart)["name"]
    ignored = _read_ignored_folders(chart)
    entries = {}
    for path in chart.rglob("*"):
        relative = path.relative_to(chart)
        if path.is_file() and relative.parts[0] not in ignored and relative.name != ".helmignore":
            entries[f"{name}/{relative.as_posix()}"] = Entry(path.read_bytes())
    return compress_archive(build_tar(entries, seconds))


def build_artifact(chart: Path, package: bytes, seconds: int) -> bytes:
    """Build an OCI layout with the package, as `helm push` stores it in a registry."""
    metadata = read_metadata(chart)
    layout = Layout(seconds)
    manifest = layout.add_manifest(
        layout.add_blob(CONFIG, json.dumps(metadata, sort_keys=True).encode()),
        [layout.add_blob(CONTENT, package)],
        {
            "org.opencontainers.image.title": metadata["name"],
            "org.opencontainers.image.description": metadata["description"],
            "org.opencontainers.image.version": metadata["version"],
        },
    )
    layout.add_name(manifest, metadata["version"], f"pacekeeper.dev/charts/{metadata['name']}:{metadata['version']}")
    return layout.build_archive()


def read_metadata(chart: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    return metadata


def _read_ignored_folders(chart: Path) -> set[str]:
    lines = [line for line in (chart / ".helmignore").read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        if not line.endswith("/") or "/" in line[:-1] or set(line) & set("*?[!"):
            raise ValueError(f".helmignore: {line!r} is not understood here; name folders of the chart, like ci/")
    return {line[:-1] for line in lines}
