"""expert_network.memory against made-up control groups and, as root, a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expert_network import memory

MB = 10**6
GB = 10**9


def fake_proc(tmp_path: Path, cgroup: str, mounts: list[str]) -> Path:
    """A /proc/self folder that says `cgroup`, with the given lines of mountinfo."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return proc


def group(folder: Path, **files: object) -> None:
    """One control group's folder; a name's double underscore is the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2_mount(point: Path, root: str = "/") -> str:
    return f"41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def v1_mount(point: Path, root: str = "/") -> str:
    return f"35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory"


def test_v2_room_is_limit_minus_use_plus_file_cache(tmp_path: Path) -> None:
    """A version 2 group leaves its limit less its use, and the file cache counts as free."""
    group(
        tmp_path / "cg" / "app",
        memory__max=2 * GB,
        memory__high="max",
        memory__current=GB,
        memory__stat=f"anon 5\ninactive_file {300 * MB}\nactive_file {100 * MB}\nshmem 7",
    )
    proc = fake_proc(tmp_path, "0::/app\n", [v2_mount(tmp_path / "cg")])
    assert memory.control_group_room(proc) == [2 * GB - GB + 400 * MB]


def test_v2_high_is_a_limit_too(tmp_path: Path) -> None:
    """memory.high, beyond which a process is slowed to a standstill, counts like a limit."""
    group(tmp_path / "cg" / "app", memory__max=2 * GB, memory__high=GB, memory__current=0)
    proc = fake_proc(tmp_path, "0::/app\n", [v2_mount(tmp_path / "cg")])
    assert memory.control_group_room(proc) == [GB]


def test_ancestors_count(tmp_path: Path) -> None:
    """A limit on a group further up is honoured although the process's own group has none."""
    group(tmp_path / "cg" / "slice" / "app", memory__max="max", memory__current=5)
    group(tmp_path / "cg" / "slice", memory__max=3 * GB, memory__current=GB)
    proc = fake_proc(tmp_path, "0::/slice/app\n", [v2_mount(tmp_path / "cg")])
    assert memory.control_group_room(proc) == [2 * GB]


def test_v1_room(tmp_path: Path) -> None:
    """A version 1 group is read by its own file names, and its cache with its children's."""
    group(
        tmp_path / "cg" / "app",
        memory__limit_in_bytes=2 * GB,
        memory__usage_in_bytes=GB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {MB}\ntotal_active_file {MB}",
    )
    cgroup = "9:name=systemd:/app\n5:cpuacct,cpu:/\n4:memory:/app\n0::/\n"
    proc = fake_proc(tmp_path, cgroup, [v1_mount(tmp_path / "cg")])
    assert memory.control_group_room(proc) == [GB + 2 * MB]


def test_container_mount_begins_at_its_own_group(tmp_path: Path) -> None:
    """In a container whose mount shows only its own group, that group is found at the mount."""
    group(tmp_path / "c g", memory__limit_in_bytes=GB, memory__usage_in_bytes=0)
    mount = v1_mount(tmp_path / "c g", root="/docker/1f").replace("c g", "c\\040g")
    proc = fake_proc(tmp_path, "4:memory:/docker/1f\n", [mount])
    assert memory.control_group_room(proc) == [GB]


def test_path_outside_the_mount(tmp_path: Path) -> None:
    """A path that the mount does not show (another namespace's) is taken as the mount itself."""
    group(tmp_path / "cg", memory__max=GB, memory__current=0)
    proc = fake_proc(tmp_path, "0::/../../x\n", [v2_mount(tmp_path / "cg", root="/elsewhere")])
    assert memory.control_group_room(proc) == [GB]


def test_no_groups(tmp_path: Path) -> None:
    """Where there are no control groups, as on macOS, nothing limits and nothing fails."""
    assert memory.control_group_room(tmp_path / "absent") == []


def test_available_is_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest room decides, and it never goes below zero."""
    group(tmp_path / "cg", memory__max=GB, memory__current=GB - 5)
    proc = fake_proc(tmp_path, "0::/\n", [v2_mount(tmp_path / "cg")])
    monkeypatch.setattr(memory, "_PROC", proc)
    assert memory.available_memory() == 5
    group(tmp_path / "cg", memory__max=GB, memory__current=2 * GB)
    assert memory.available_memory() == 0


def test_available_here() -> None:
    """On this machine the figure is positive and no more than the memory that is fitted."""
    import psutil

    assert 0 < memory.available_memory() <= psutil.virtual_memory().total


PEAK = "from expert_network import memory; print(memory.peak_rss())"


def test_peak_is_our_own() -> None:
    """A child's peak does not begin at the size of the process that started it."""
    ballast = bytearray(os.urandom(1)) * (300 * MB)
    child = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, check=True, text=True)
    assert memory.peak_rss() > len(ballast)
    assert MB < int(child.stdout) < 200 * MB


def own_memory_group() -> Path | None:
    """A folder in which this process may make memory groups, or None."""
    for folder, files in memory._groups(Path("/proc/self")):
        writable = os.access(folder, os.W_OK) and os.geteuid() == 0
        if writable and (folder / files.limits[0]).exists():
            return folder
    return None


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real memory control group of our own, taken away again."""
    parent = own_memory_group()
    if parent is None:
        pytest.skip("needs root and a writable memory control group")
    folder = parent / f"expert-network-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as problem:
        pytest.skip(f"no memory control group can be made here: {problem}")
    yield folder
    folder.rmdir()


INSIDE = """
import os, sys
from pathlib import Path
from expert_network.memory import available_memory
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = available_memory()
ballast = bytearray(os.urandom(1)) * 50_000_000
print(before, available_memory())
"""


def test_real_group(limited_group: Path) -> None:
    """In a real group of 200 MB a process finds at most that, and less once it took 50 MB."""
    name = "memory.max" if (limited_group / "memory.max").exists() else "memory.limit_in_bytes"
    (limited_group / name).write_text(str(200 * MB))
    command = [sys.executable, "-c", INSIDE, str(limited_group)]
    result = subprocess.run(command, capture_output=True, check=True, text=True)
    before, after = map(int, result.stdout.split())
    assert 100 * MB < before <= 200 * MB
    assert before - after > 45 * MB


def test_a_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the device's free memory counts, and the host's where the device tells nothing."""
    import mlx.core as mx

    told: dict[str, str | int] = {"free_memory": 7}
    monkeypatch.setattr(mx, "device_info", lambda: told)
    assert memory.available_memory("mlx-cuda") == 7
    assert memory.available_memory("mlx-metal") != 7
    told.clear()
    assert memory.available_memory("mlx-cuda") > 7
