"""Build expert_network.kernels._native with $CC (else cc): hatchling's hook, and a program.

`python hatch_build.py` builds it in place. Where it cannot be built, the hook warns and the package
installs without it. Objects are kept in build/kernels under the hash of what made them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
KERNELS = Path("expert_network/kernels")
MODULE = KERNELS / "_native.abi3.so"

# Contraction would let two loops over the same numbers round differently.
FLAGS = [
    *("-std=gnu11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"),
]

# Each is compiled from the same sources, isa/*.c; which one runs is chosen when it is loaded.
ISAS: dict[str, dict[str, str]] = {
    "x86_64": {
        "portable": "",
        "avx2": "-mavx2 -mfma -mf16c",
        # Vectors are 32 bytes here too: VNNI and twice the registers are what is gained.
        "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni "
        "-mprefer-vector-width=256",
    },
    "aarch64": {"portable": "", "neon": "-march=armv8-a", "dotprod": "-march=armv8.2-a+dotprod"},
}


class CannotBuild(Exception):
    """There is no compiler, or it failed. `str()` says which."""


def build(root: Path = ROOT, extra: tuple[str, ...] = ()) -> Path:
    """Compile what changed and link; the module's path. `extra` are flags for both steps.

    Raises CannotBuild.
    """
    module = root / MODULE
    made = module.with_name(f"{module.name}.{os.getpid()}")
    link(compile_sources(root, extra=extra), made, extra)
    # A process that has the old one loaded keeps it.
    made.replace(module)
    return module


def compile_sources(
    root: Path = ROOT, machine: str = "", extra: tuple[str, ...] = ()
) -> list[Path]:
    """Compile what changed, for this machine or, with a $CC that does, another; all objects.

    Raises CannotBuild.
    """
    compiler, objects = _compiler(), root / "build/kernels"
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(
        (machine or platform.machine()).lower(), machine or platform.machine()
    )
    objects.mkdir(parents=True, exist_ok=True)
    isas = {
        name: flags.split()
        for name, flags in ISAS.get(machine, {"portable": ""}).items()
        if not flags or _takes(compiler, flags.split())
    }
    base = [*FLAGS, *extra, f"-I{sysconfig.get_path('include')}", *_version(root)]
    base += [f"-DHAVE_{name}=1" for name in isas]
    jobs = [(path, base) for path in sorted((root / KERNELS).glob("*.c"))]
    for name, flags in isas.items():
        own = [*base, *flags, f"-DISA_NAME={name}", f"-DISA_{name}=1"]
        jobs += [(path, own) for path in sorted((root / KERNELS / "isa").glob("*.c"))]
    headers = b"".join(path.read_bytes() for path in sorted((root / KERNELS).rglob("*.h")))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_compile, compiler, *job, headers, objects) for job in jobs]
        return [future.result() for future in futures]


def link(objects: list[Path], module: Path, extra: tuple[str, ...] = ()) -> None:
    """Put the module together. Raises CannotBuild."""
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if _darwin() else ["-shared"]
    files = [*map(str, objects), "-o", str(module)]
    _call([*_compiler(), *shared, "-pthread", *extra, *files, "-lm"])


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _compile(
    compiler: list[str], path: Path, flags: list[str], headers: bytes, objects: Path
) -> Path:
    key = repr((compiler, flags, str(path))).encode() + path.read_bytes() + headers
    made = objects / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:20]}.o"
    if not made.exists():
        new = made.with_suffix(f".{os.getpid()}.o")
        _call([*compiler, *flags, "-c", str(path), "-o", str(new)])
        new.replace(made)
    return made


def _call(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"no C compiler: {error}") from error
    if run.returncode:
        raise CannotBuild(f"{shlex.join(command)} failed:\n{run.stderr}")
    if run.stderr:
        print(run.stderr, file=sys.stderr)


def _takes(compiler: list[str], flags: list[str]) -> bool:
    try:
        _call([*compiler, *flags, "-Werror", "-x", "c", "-c", os.devnull, "-o", os.devnull])
    except CannotBuild:
        return False
    return True


def _version(root: Path) -> list[str]:
    text = (root / KERNELS / "__init__.py").read_text(encoding="utf-8")
    number = re.search(r"^VERSION = (\d+)$", text, re.MULTILINE)
    assert number is not None
    return [f"-DKERNELS_VERSION={number[1]}"]


def _darwin() -> bool:
    return sys.platform == "darwin"


def _platform_tag() -> str:
    if _darwin():
        from packaging.tags import platform_tags

        return next(platform_tags())
    return re.sub(r"[^0-9a-zA-Z]", "_", sysconfig.get_platform())


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # the program runs without it
    pass
else:

    class KernelsHook(BuildHookInterface[Any]):
        """Adds the module to a wheel, or puts it beside its sources for an editable install."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build. A failure is a warning, and leaves a wheel without the module."""
            del version
            root = Path(self.root)
            try:
                build(root)
            except (CannotBuild, OSError) as error:
                (root / MODULE).unlink(missing_ok=True)
                self.app.display_warning(
                    f"The CPU kernels could not be built, MLX will compute instead: {error}"
                )
                return
            build_data["artifacts"].append(MODULE.as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_platform_tag()}"


if __name__ == "__main__":
    try:
        print(build(extra=tuple(sys.argv[1:])))
    except CannotBuild as error:
        sys.exit(str(error))
