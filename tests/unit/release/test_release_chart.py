"""The chart's archives are what Helm packages, pulls, and installs."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from release import chart
from testing.kubernetes.chart import CHART, REPOSITORY, render_chart, run_helm
from testing.oci import Archive, serve_archive


def list_files(package: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(package))) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member))}


def test_the_package_has_what_helm_packages(tmp_path: Path) -> None:
    run_helm("package", str(CHART), "--destination", str(tmp_path))
    (theirs,) = tmp_path.iterdir()
    expected = list_files(theirs.read_bytes())
    found = list_files(chart.build_package(CHART, 0))
    assert found.keys() == expected.keys() - {"pacekeeper/.helmignore"}
    assert [name for name in found if found[name] != expected[name]] in (
        [],
        ["pacekeeper/Chart.yaml"],
    )  # which Helm formats


def test_a_copy_of_the_chart_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("crds", "charts"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, symlinks=True, copy_function=shutil.copy)
    copy = tmp_path / CHART.relative_to(REPOSITORY)
    os.utime(copy / "values.yaml", (0, 0))
    package = chart.build_package(copy, 1000)
    assert package == chart.build_package(CHART, 1000)
    assert chart.build_artifact(copy, package, 1000) == chart.build_artifact(CHART, package, 1000)


def test_helm_pulls_the_artifact_from_a_registry_and_renders_the_same(tmp_path: Path) -> None:
    version = chart.read_metadata(CHART)["version"]
    package = chart.build_package(CHART, 0)
    with serve_archive(Archive(chart.build_artifact(CHART, package, 0))) as registry:
        url = f"oci://{registry}/charts/pacekeeper"
        run_helm("pull", url, "--version", version, "--plain-http", "--destination", str(tmp_path))
    (pulled,) = tmp_path.iterdir()
    assert pulled.read_bytes() == package
    assert render_chart(chart=pulled) == render_chart()


@pytest.mark.parametrize("line", ["*.md", "ci", "a/b/"])
def test_an_ignored_pattern_that_is_no_folder_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "Chart.yaml").write_text("name: example\n")
    (tmp_path / ".helmignore").write_text(f"# comment\n\n{line}\n")
    with pytest.raises(ValueError, match=r"\.helmignore: .* is not understood"):
        chart.build_package(tmp_path, 0)
