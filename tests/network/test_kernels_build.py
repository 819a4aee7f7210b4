"""hatch_build.py, which compiles the native kernels; none of these tests compiles them."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

import hatch_build
from expert_network import kernels


def sources(root: Path) -> Path:
    """A checkout with one source, which is not C."""
    folder = root / hatch_build.KERNELS
    (folder / "isa").mkdir(parents=True)
    (folder / "__init__.py").write_text("VERSION = 1\n")
    (folder / "pool.c").write_text("this is not C\n")
    return root


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler it says so, and leaves nothing that could be taken for the module."""
    monkeypatch.setenv("CC", str(tmp_path / "nothing-here"))
    with pytest.raises(hatch_build.CannotBuild, match=r"no C compiler: .*nothing-here"):
        hatch_build.build(sources(tmp_path))
    assert not list((tmp_path / hatch_build.KERNELS).glob("*.so*"))


@pytest.mark.skipif(not kernels.available(), reason=kernels.reason())
def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """Where the compiler fails, what it says about which file is passed on."""
    with pytest.raises(hatch_build.CannotBuild, match=r"pool\.c.* failed:\n(.*\n)*.*error"):
        hatch_build.build(sources(tmp_path))
    assert not list((tmp_path / hatch_build.KERNELS).glob("*.so*"))


def test_flags_that_a_compiler_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction set whose flags the compiler refuses is left out, and the rest is built."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"\ncase "$*" in *-mavx512f*) exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    root = sources(tmp_path / "checkout")
    (root / hatch_build.KERNELS / "isa/table.c").write_text("")
    assert hatch_build.build(root).read_bytes() == b""
    calls = (tmp_path / "cc.log").read_text()
    assert "-DHAVE_avx2=1" in calls
    assert "-DHAVE_avx512=1" not in calls


def test_a_second_build_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not change is not compiled again, and a changed header is compiled anew."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    root, log = sources(tmp_path / "checkout"), tmp_path / "cc.log"

    def compiled() -> int:
        log.unlink(missing_ok=True)
        hatch_build.build(root)
        return sum("pool.c" in line for line in log.read_text().splitlines())

    assert [compiled(), compiled()] == [1, 0]
    (root / hatch_build.KERNELS / "pool.h").write_text("changed\n")
    assert [compiled(), compiled()] == [1, 0]


def test_the_kernels_are_there_where_there_is_a_compiler() -> None:
    """An installation whose build failed in silence, or is older than these sources, is found here:
    the other tests of the kernels are skipped then."""
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]):
        assert kernels.available(), kernels.reason()
