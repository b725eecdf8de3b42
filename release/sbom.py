"""Bills of materials in the format CycloneDX: what is in an image, by name, version, license, and digest."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from release.commands import ReleaseError
from release.debian import SUITE, LockedPackage

Component = dict[str, Any]


def build_bill(component: Component, contents: Sequence[Component], seconds: int) -> bytes:
    """Build the bill of `component`. Its serial number is computed from its content."""
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": component,
        },
        "components": sorted(contents, key=lambda each: str(each["bom-ref"])),
    }
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill, sort_keys=True))
    return (json.dumps({**bill, "serialNumber": f"urn:uuid:{serial}"}, indent=1, sort_keys=True) + "\n").encode()


def describe_image(name: str, version: str, digest: str, architecture: str) -> Component:
    """Describe an image by its manifest's digest (sha256:...)."""
    url = f"pkg:oci/{name}@{digest.replace(':', '%3A')}?arch={architecture}&tag={version}"
    return {"type": "container", "bom-ref": url, "name": name, "version": version, "purl": url}


def describe_debian_package(package: LockedPackage) -> Component:
    name, version = package.name.replace("+", "%2B"), package.version.replace("+", "%2B").replace(":", "%3A")
    url = f"pkg:deb/debian/{name}@{version}?arch={package.architecture}&distro={SUITE}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
    }


def iterate_python_packages(site: Path) -> Iterator[Component]:
    """Yield the packages that are installed in a folder. Licenses that are no expressions are names."""
    for folder in sorted(site.glob("*.dist-info")):
        fields = HeaderParser().parsestr((folder / "METADATA").read_text())
        url = f"pkg:pypi/{fields['Name'].lower().replace('_', '-')}@{fields['Version'].replace('+', '%2B')}"
        component = {
            "type": "library", "bom-ref": url, "name": fields["Name"], "version": fields["Version"], "purl": url,
        }  # fmt: skip
        if expression := fields["License-Expression"]:
            component["licenses"] = [{"expression": expression}]
        elif (license_name := fields["License"]) and "\n" not in license_name:
            component["licenses"] = [{"license": {"name": license_name}}]
        yield component


def check_bill(bill: bytes) -> None:
    """Check a bill against the format's schema. Raises ReleaseError."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.decode()):
        raise ReleaseError(f"a bill of materials is not valid CycloneDX: {error}")
