"""Released images: as the Dockerfile's, complete, and the same bytes each time."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from release import debian, images
from release.archives import Entry
from release.elf import read_elf
from testing.packages import build_package

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("image", images.IMAGES, ids=[image.name for image in images.IMAGES])
def test_an_image_runs_as_the_dockerfiles_does(image: images.Image) -> None:
    text = (ROOT / "Dockerfile").read_text()
    stage = re.search(rf"^FROM \S+ AS {image.name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert stage is not None
    config = images.create_config(image, "1.0", "commit")
    labels = config["Labels"]
    assert isinstance(labels, dict)
    assert f"USER {config['User']}\n" in stage[1]
    assert f"CMD {json.dumps(config['Cmd'])}\n" in stage[1]
    assert f'title="{labels["org.opencontainers.image.title"]}"' in stage[1]
    variables = dict(re.findall(r"(\w+)=(\S+)", re.findall(r"^ENV (.*)$", text, re.MULTILINE)[0]))
    assert {name: variables[name] for name in images.ENVIRONMENT if name != "PATH"} == {
        name: value for name, value in images.ENVIRONMENT.items() if name != "PATH"
    }
    assert variables["PATH"].split(":")[0] == images.ENVIRONMENT["PATH"].split(":")[0]
    assert f"locks/{image.lock}" in text


def build_base(folder: Path) -> dict[str, Entry]:
    """Build a base of two small packages."""
    library = f"./{images.STANDARD_LIBRARY}"
    contents = {
        "one": {f"{library}/module.py": b"names = {'b', 'a', 'c'}\n", "./usr/share/doc/one/README": b""},
        "two": {"./usr/share/ca-certificates/mozilla/x.crt": b"X\n", f"{library}/lib-dynload/nis.so": b""},
    }
    packages = {}
    for name, files in contents.items():
        path = folder / f"{name}.deb"
        path.write_bytes(build_package(files))
        packages[debian.LockedPackage("amd64", name, "1", name)] = path
    images.build_base(packages, folder / "root")
    return images.read_layer(folder / "root")


def test_a_base_is_configured_and_the_same_in_each_folder(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other folder").mkdir()
    tree = build_base(tmp_path / "one")
    assert images.build_layer(tree, 0) == images.build_layer(build_base(tmp_path / "other folder"), 0)
    (compiled,) = (path for path in tree if path.endswith(".pyc"))
    assert str(tmp_path).encode() not in tree[compiled].content
    assert f"/{images.STANDARD_LIBRARY}/module.py".encode() in tree[compiled].content
    assert tree["lib"].content == b"usr/lib"
    assert tree["etc/ssl/certs/ca-certificates.crt"].content == b"X\n"
    assert tree["tmp"].mode == 0o1777
    assert tree["var/lib/dpkg/status.d/one"].content.startswith(b"Package: example\n")
    assert not [path for path in tree if "nis" in path or path.endswith("README")]


def test_a_layer_has_the_folders_of_its_files() -> None:
    with tarfile.open(fileobj=io.BytesIO(images.build_layer(images.create_environment(), 0))) as tar:
        members = {member.name: member for member in tar}
    assert members["opt"].isdir()
    assert members["opt/venv/bin/python"].linkname == "/usr/bin/python3.11"
    assert members["opt/venv/bin/pacekeeper"].mode == 0o755


def test_a_library_that_is_missing_or_foreign_is_found() -> None:
    """A program of this machine stands for one of an image."""
    program = Path("/bin/sh").read_bytes()
    read = read_elf(program)
    libraries = {f"usr/lib/{name}": Entry() for name in read.needed}
    tree = {"bin/sh": Entry(program), "text": Entry(b"text")}
    assert images.find_missing_libraries([tree, libraries], read.machine) == []
    missing = [f"bin/sh needs {name}" for name in read.needed]
    assert missing
    assert images.find_missing_libraries([tree], read.machine) == missing
    other = "x86_64" if read.machine == "aarch64" else "aarch64"
    assert images.find_missing_libraries([tree, libraries], other) == [f"bin/sh is for {read.machine}"]
