"""What a control group has left."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pacekeeper.cgroup import compute_memory_left, read_cpu_wait_seconds

MIB = 1 << 20


def write_group(folder: Path, limit: str, taken: int, unused: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {unused}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    path = tmp_path / "membership"
    path.write_text("0::/pod/container\n")
    return path


def test_the_tightest_limit_counts_and_unused_files_do_not(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "cgroup"
    write_group(root / "pod/container", "max", 60 * MIB)
    assert compute_memory_left(root, membership) == math.inf
    write_group(root / "pod", str(100 * MIB), 90 * MIB, unused=20 * MIB)
    assert compute_memory_left(root, membership) == 30 * MIB
    write_group(root / "pod/container", str(65 * MIB), 60 * MIB)
    assert compute_memory_left(root, membership) == 5 * MIB
    write_group(root / "pod/container", str(50 * MIB), 60 * MIB)
    assert compute_memory_left(root, membership) == 0


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/pod\n")
    folder = root / "memory/pod"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(100 * MIB))
    (folder / "memory.usage_in_bytes").write_text(str(90 * MIB))
    (folder / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {15 * MIB}\ntotal_active_file {5 * MIB}\n"
    )
    assert compute_memory_left(root, membership) == 30 * MIB


def test_without_a_readable_file_there_is_no_limit(tmp_path: Path, membership: Path) -> None:
    assert compute_memory_left(tmp_path / "none", membership) == math.inf
    assert compute_memory_left(tmp_path / "none", tmp_path / "none") == math.inf


def test_time_waited_for_a_processor_is_read_of_the_group_or_of_the_machine(tmp_path: Path, membership: Path) -> None:
    machine = tmp_path / "pressure"
    assert read_cpu_wait_seconds(tmp_path / "cgroup", membership, machine) is None
    machine.write_text("some avg10=1.00 avg60=1.00 avg300=1.00 total=5000000\nfull avg10=0.00 total=9\n")
    assert read_cpu_wait_seconds(tmp_path / "cgroup", membership, machine) == 5.0
    group = tmp_path / "cgroup/pod/container"
    group.mkdir(parents=True)
    (group / "cpu.pressure").write_text("some avg10=1.00 avg60=1.00 avg300=1.00 total=2500000\n")
    assert read_cpu_wait_seconds(tmp_path / "cgroup", membership, machine) == 2.5
