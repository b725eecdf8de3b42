"""The Dockerfile's operator, built by buildah: it starts, without privileges, with what is locked and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testing.images import Images

EVERYTHING = """
import importlib, json, os, pkgutil, pacekeeper_operator
for module in pkgutil.walk_packages(pacekeeper_operator.__path__, "pacekeeper_operator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from importlib.metadata import distributions
packages = {distribution.name: distribution.version for distribution in distributions()}
print(json.dumps({"user": os.getuid(), "groups": os.getgroups(), "packages": packages}))
"""
"""Imports all of the operator, and prints what is installed."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    images = Images(tmp_path_factory.mktemp("images") / "settings")
    images.build("operator")
    return images


@pytest.fixture(scope="module")
def inside(images: Images) -> Any:
    result = images.run("operator", "python", "-c", EVERYTHING)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_its_command_starts_and_reports_an_invalid_setting(images: Images) -> None:
    command = images.config("operator")["Cmd"]
    result = images.run("operator", *command, PACEKEEPER_PORT="https")
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: PACEKEEPER_PORT" in result.stderr


def test_the_operator_is_complete_without_root_and_without_torch(inside: Any) -> None:
    assert inside["user"] == 65532
    assert 0 not in inside["groups"]
    assert {"pacekeeper", "kopf", "kubernetes"} <= set(inside["packages"])
    assert not [name for name in inside["packages"] if "torch" in name or "nvidia" in name]


def test_it_holds_nothing_of_the_machine_that_built_it(images: Images) -> None:
    assert not [line for line in images.config("operator")["Env"] if line.startswith("PIP_") and "/" in line]
    assert images.run("operator", "cat", "/etc/pip.conf").stdout == ""


def test_its_bill_of_materials_lists_what_is_installed(images: Images, inside: Any, tmp_path: Path) -> None:
    images.build("sbom", "--output", str(tmp_path))
    listed = json.loads((tmp_path / "sbom.json").read_text())["components"]
    assert {component["name"]: component["version"] for component in listed} == inside["packages"]
