"""An OCI layout whose parts refer to each other by digest and size."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

from release.archives import Entry, build_tar
from release.oci import Layout
from testing.oci import Archive


def build_two_platforms(text: bytes = b"text") -> bytes:
    layout = Layout(60)
    shared = layout.add_layer(build_tar({"shared": Entry(text)}, 0))
    manifests = [
        layout.add_image(name, [shared, layout.add_layer(build_tar({name: Entry()}, 0))], {"User": "1:1"})
        for name in ("amd64", "arm64")
    ]
    layout.add_name(layout.add_index(manifests, {"key": "value"}), "1.0", "example/image:1.0")
    return layout.build_archive()


def test_an_image_of_two_platforms_is_read_by_its_digests() -> None:
    archive = Archive(build_two_platforms())
    (named,) = archive.index["manifests"]
    assert named["annotations"]["org.opencontainers.image.ref.name"] == "1.0"
    platforms: dict[str, Any] = {}
    for descriptor in archive.read_json(named)["manifests"]:
        manifest = archive.read_json(descriptor)
        config = archive.read_json(manifest["config"])
        tars = [gzip.decompress(archive.read(layer)) for layer in manifest["layers"]]
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
        assert (config["created"], config["config"]) == ("1970-01-01T00:01:00Z", {"User": "1:1"})
        assert config["architecture"] == descriptor["platform"]["architecture"]
        platforms[config["architecture"]] = descriptor["platform"]
    assert platforms == {
        "amd64": {"architecture": "amd64", "os": "linux"},
        "arm64": {"architecture": "arm64", "os": "linux", "variant": "v8"},
    }


def test_a_layer_that_platforms_share_is_stored_once() -> None:
    assert len(Archive(build_two_platforms()).blobs) == 3 + 2 + 2 + 1  # layers, configs, manifests, index


def test_the_same_images_give_the_same_bytes() -> None:
    assert build_two_platforms() == build_two_platforms()
    assert build_two_platforms() != build_two_platforms(b"other")
    assert json.loads(Archive(build_two_platforms()).files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
