"""Reads what a program or library in ELF needs, and what it exports. Only 64-bit little-endian files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MACHINES = {62: "x86_64", 183: "aarch64"}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERSION_NEED = struct.Struct("<HHIII")
_VERSION_AUXILIARY = struct.Struct("<IHHII")
_DYNAMIC_SECTION, _SYMBOL_SECTION, _VERSION_SECTION = 6, 11, 0x6FFFFFFE
_NEEDED = 1
_GLOBAL_BINDINGS = (1, 2)  # global and weak


@dataclass(frozen=True)
class ElfFile:
    """Libraries that it needs, versions of their symbols, and symbols that it exports."""

    machine: str
    needed: tuple[str, ...]
    versions: frozenset[str]  # such as GLIBC_2.17
    exported: frozenset[str]

    @property
    def is_static(self) -> bool:
        return not self.needed


@dataclass(frozen=True)
class _Section:
    type: int
    offset: int
    size: int
    link: int


def is_elf(content: bytes) -> bool:
    return content.startswith(b"\x7fELF\x02\x01")


def read_elf(content: bytes) -> ElfFile:
    """Read a file. Raises ValueError if it is of another kind or damaged."""
    if not is_elf(content):
        raise ValueError("no 64-bit little-endian ELF file")
    try:
        header = _HEADER.unpack_from(content)
        sections = [_read_section(content, header[6] + index * header[11]) for index in range(header[12])]
        return ElfFile(
            machine=MACHINES.get(header[2], f"machine {header[2]}"),
            needed=tuple(_iterate_needed(content, sections)),
            versions=frozenset(_iterate_versions(content, sections)),
            exported=frozenset(_iterate_exported(content, sections)),
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged ELF file: {error}") from error


def _read_section(content: bytes, offset: int) -> _Section:
    _, kind, _, _, start, size, link, _, _, _ = _SECTION.unpack_from(content, offset)
    return _Section(kind, start, size, link)


def _iterate_needed(content: bytes, sections: list[_Section]) -> Iterator[str]:
    for section in sections:
        if section.type == _DYNAMIC_SECTION:
            for tag, value in _DYNAMIC.iter_unpack(_read_data(content, section)):
                if tag == _NEEDED:
                    yield _read_text(content, sections[section.link], value)


def _iterate_versions(content: bytes, sections: list[_Section]) -> Iterator[str]:
    for section in sections:
        if section.type != _VERSION_SECTION:
            continue
        offset = section.offset
        while True:
            _, count, _, first, following = _VERSION_NEED.unpack_from(content, offset)
            auxiliary = offset + first
            for _ in range(count):
                _, _, _, name, step = _VERSION_AUXILIARY.unpack_from(content, auxiliary)
                yield _read_text(content, sections[section.link], name)
                auxiliary += step
            if following == 0:
                break
            offset += following


def _iterate_exported(content: bytes, sections: list[_Section]) -> Iterator[str]:
    for section in sections:
        if section.type == _SYMBOL_SECTION:
            for name, info, _, index, _, _ in _SYMBOL.iter_unpack(_read_data(content, section)):
                if index != 0 and info >> 4 in _GLOBAL_BINDINGS:
                    yield _read_text(content, sections[section.link], name)


def _read_data(content: bytes, section: _Section) -> bytes:
    data = content[section.offset : section.offset + section.size]
    if len(data) != section.size:
        raise ValueError("damaged ELF file: a section ends after the file")
    return data


def _read_text(content: bytes, strings: _Section, offset: int) -> str:
    start = strings.offset + offset
    end = content.find(b"\0", start)
    if end < 0:
        raise ValueError("damaged ELF file: a name has no end")
    return content[start:end].decode("ascii", "replace")
