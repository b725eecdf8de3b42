"""Small packages of Debian, as tests unpack them."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Mapping


def build_package(files: Mapping[str, bytes], links: Mapping[str, str] | None = None, compression: str = "xz") -> bytes:
    """Build a package with executable files and symbolic links, by their paths in it."""
    content = b"!<arch>\n"
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(_build_tar({"./control": b"Package: example\nVersion: 1\n"}, {})),
        f"data.tar.{compression}": lzma.compress(_build_tar(files, links or {})),
    }
    for name, data in members.items():
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
        content += data + b"\n" * (len(data) % 2)
    return content


def _build_tar(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            header = tarfile.TarInfo(path)
            header.size, header.mode = len(content), 0o755
            tar.addfile(header, io.BytesIO(content))
        for path, target in links.items():
            header = tarfile.TarInfo(path)
            header.type, header.linkname = tarfile.SYMTYPE, target
            tar.addfile(header)
    return buffer.getvalue()
