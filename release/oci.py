"""OCI image layouts: images of one or several platforms, and other artifacts, as one tar."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from release.archives import Entry, build_tar, compress_archive

Descriptor = dict[str, Any]
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
VARIANTS = {"arm64": {"variant": "v8"}}


@dataclass(frozen=True)
class Layer:
    """A layer of an image: its blob, and the digest of the tar in it."""

    descriptor: Descriptor
    diff_id: str


class Layout:
    """Collects the blobs and the index of a layout. A blob that is added twice is stored once."""

    def __init__(self, seconds: int = 0) -> None:
        self._seconds = seconds
        self._blobs: dict[str, bytes] = {}
        self._named: list[Descriptor] = []

    def add_blob(self, media_type: str, content: bytes) -> Descriptor:
        digest = hashlib.sha256(content).hexdigest()
        self._blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def add_layer(self, tar: bytes, *, compressed: bool = True) -> Layer:
        diff_id = f"sha256:{hashlib.sha256(tar).hexdigest()}"
        if compressed:
            return Layer(self.add_blob(f"{LAYER}+gzip", compress_archive(tar)), diff_id)
        return Layer(self.add_blob(LAYER, tar), diff_id)

    def add_image(self, architecture: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> Descriptor:
        """Add an image for Linux, and return the descriptor of its manifest. `config`: user, command, ...."""
        platform = {"architecture": architecture, "os": "linux", **VARIANTS.get(architecture, {})}
        image = {
            "created": datetime.fromtimestamp(self._seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **platform,
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        blob = self.add_blob(CONFIG, _encode_json(image))
        return self.add_manifest(blob, [layer.descriptor for layer in layers]) | {"platform": platform}

    def add_manifest(
        self, config: Descriptor, layers: Sequence[Descriptor], annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": list(layers)}
        if annotations:
            manifest["annotations"] = dict(annotations)
        return self.add_blob(MANIFEST, _encode_json(manifest))

    def add_index(self, manifests: Sequence[Descriptor], annotations: Mapping[str, str]) -> Descriptor:
        """Add one image of several platforms."""
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests), "annotations": dict(annotations)}
        return self.add_blob(INDEX, _encode_json(index))

    def add_name(self, descriptor: Descriptor, tag: str, image: str) -> None:
        """Name a manifest or an index: by its tag, as tools of OCI read it, and in full, as containerd does."""
        names = {"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": image}
        self._named.append(descriptor | {"annotations": names})

    def build_archive(self) -> bytes:
        """Build the tar of the layout."""
        entries = {f"blobs/sha256/{digest}": Entry(content) for digest, content in self._blobs.items()}
        entries["oci-layout"] = Entry(_encode_json({"imageLayoutVersion": "1.0.0"}))
        entries["index.json"] = Entry(_encode_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": self._named}))
        return build_tar(entries, self._seconds)


def _encode_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
