"""Bills of materials in the format CycloneDX."""

from __future__ import annotations

import json
from pathlib import Path

from release import sbom
from release.debian import LockedPackage


def test_a_bill_lists_packages_by_version_license_and_digest(tmp_path: Path) -> None:
    for name, fields in (
        ("one", "License-Expression: MIT"),
        ("two_b", "License: BSD\n lines"),
        ("three", "License: BSD"),
    ):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1+local\n{fields}\n\nText\n")
    image = sbom.describe_image("operator", "1.0", "sha256:00", "arm64")
    package = sbom.describe_debian_package(LockedPackage("arm64", "libstdc++6", "1:2+b1", "00"))
    contents = [package, *sbom.iterate_python_packages(tmp_path)]
    bill = sbom.build_bill(image, contents, 0)
    assert bill == sbom.build_bill(image, contents[::-1], 0)
    read = json.loads(bill)
    assert read["metadata"]["component"]["purl"] == "pkg:oci/operator@sha256%3A00?arch=arm64&tag=1.0"
    assert {each["purl"]: each.get("licenses", each.get("hashes")) for each in read["components"]} == {
        "pkg:deb/debian/libstdc%2B%2B6@1%3A2%2Bb1?arch=arm64&distro=bookworm": [{"alg": "SHA-256", "content": "00"}],
        "pkg:pypi/one@1%2Blocal": [{"expression": "MIT"}],
        "pkg:pypi/three@1%2Blocal": [{"license": {"name": "BSD"}}],
        "pkg:pypi/two-b@1%2Blocal": None,
    }
