"""What a library needs and exports, and damaged ones."""

from __future__ import annotations

import subprocess

import pytest

from release.elf import ElfFile, is_elf, read_elf
from release.native import find_problem

SOURCE = """
#include <math.h>
#include <stdio.h>
__attribute__((visibility("default"))) const int shown = 1;
__attribute__((visibility("default"))) double root(double value) { return printf("%f", value) + sqrt(value); }
int hidden(void) { return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.c").write_text(SOURCE)
    options = ("-shared", "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-Wl,--no-as-needed")
    command = ["cc", *options, "-o", str(folder / "library.so"), str(folder / "library.c"), "-lm"]
    subprocess.run(command, check=True, timeout=60)
    return (folder / "library.so").read_bytes()


def test_a_library_is_read_as_the_linker_wrote_it(library: bytes) -> None:
    found = read_elf(library)
    assert set(found.needed) == {"libc.so.6", "libm.so.6"}
    assert {"shown", "root"} <= found.exported
    assert not {"hidden", "sqrt", "printf"} & found.exported
    assert any(version.startswith("GLIBC_2.") for version in found.versions)


def test_damaged_files_are_errors_of_one_kind(library: bytes) -> None:
    for size in [0, 3, 16, 63, 64, *range(100, len(library), 997)]:
        with pytest.raises(ValueError, match="ELF"):
            read_elf(library[:size])
    assert not is_elf(b"#!/bin/sh\n")


RECORDING = "pacekeeper_rank/native/recording"
RECORDER = "pacekeeper/native/environment_recorder"


@pytest.mark.parametrize(
    ("name", "built", "problem"),
    [
        (RECORDING, ElfFile("aarch64", ("libc.so.6",), frozenset({"GLIBC_2.17"}), frozenset({"PyInit_recording"})), ""),
        (RECORDING, ElfFile("x86_64", (), frozenset(), frozenset({"PyInit_recording"})), "it is for x86_64"),
        (RECORDING, ElfFile("aarch64", (), frozenset(), frozenset()), "it does not export PyInit_recording"),
        (
            RECORDING,
            ElfFile("aarch64", ("libpython3.11.so",), frozenset(), frozenset({"PyInit_recording"})),
            "it needs libpython3.11.so",
        ),
        (
            RECORDING,
            ElfFile("aarch64", (), frozenset({"GLIBC_2.2.5", "GLIBC_2.34"}), frozenset({"PyInit_recording"})),
            "it needs GLIBC_2.34, and wheels promise 2.17",
        ),
        (RECORDER, ElfFile("aarch64", (), frozenset(), frozenset()), ""),
        (
            RECORDER,
            ElfFile("aarch64", ("libc.so.6",), frozenset(), frozenset()),
            "it needs libc.so.6, which an image may not have",
        ),
    ],
)
def test_a_part_that_would_not_run_everywhere_is_not_released(name: str, built: ElfFile, problem: str) -> None:
    assert find_problem(name, built, "aarch64") == problem
