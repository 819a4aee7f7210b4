"""The kernels for 64-bit Arm, compiled here without Python and run under qemu."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import hatch_build
from tests.network.kernel_cases import Floats, Format, matrix_of, raw, stored, values_of

CC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
INSTALL = "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
MISSING = [tool for tool in (CC, QEMU) if shutil.which(tool) is None]
HERE = platform.machine().lower() in ("aarch64", "arm64")
FULL = bool(os.environ.get("EXPERT_TESTS_FULL"))

# Compiling takes most of the time, and portable C is tested on this machine.
SHORT = ("-O1", "-Wl,--defsym=kernels_portable=kernels_neon")
OPTIONS = () if FULL else SHORT

FUNCTIONS = ["linear", "ffn", "attention", "rms_norm", "softmax", "rope", "form"]
FORMATS = [2, 3, 4, 5, 6, 8]
ELEMENTS = ["float32", "bfloat16", "float16"]


def why_not() -> str:
    """Why nothing can be run; empty if it can. In CI the tools have to be there."""
    if HERE:
        return "the kernels for this processor are tested as they are"
    if MISSING and os.environ.get("CI") != "true":
        return f"no {MISSING[0]}: {INSTALL}"
    return ""


def compile_sources() -> list[Path]:
    """Objects of all sources of the module, for 64-bit Arm; those that did not change are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", CC)
        sets = hatch_build.ISAS["aarch64"]
        if not FULL:
            patch.setitem(
                hatch_build.ISAS,
                "aarch64",
                {name: flags for name, flags in sets.items() if name != "portable"},
            )
        return hatch_build.compile_sources(machine="aarch64", extra=OPTIONS)


def link_module(objects: list[Path], module: Path) -> None:
    """The module that Python would import on such a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", CC)
        hatch_build.link(objects, module, OPTIONS)


def link_harness(objects: list[Path], harness: Path) -> None:
    """kernels_harness.c with those of the objects that it needs, which need no Python."""
    archive, source = harness.with_suffix(".a"), Path(__file__).with_name("kernels_harness.c")
    headers = hatch_build.ROOT / hatch_build.KERNELS
    warnings = ("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
    call("aarch64-linux-gnu-ar", "rcs", archive, *objects)
    inputs = (f"-I{headers}", source, archive, "-lm", "-o", harness)
    call(CC, *warnings, "-static", "-pthread", *OPTIONS, *inputs)


def call(*command: str | Path) -> str:
    """What the command prints."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, (command, run.returncode, run.stderr)
    return run.stdout


Part = float | NDArray[Any] | None


def case(function: str, *parts: Part) -> bytes:
    """One call for the harness. An array that is not there is empty."""
    text = [struct.pack("<d", FUNCTIONS.index(function))]
    for part in parts:
        data = b"" if part is None else part.tobytes() if isinstance(part, np.ndarray) else None
        text.append(struct.pack("<d", part if data is None else len(data)) + (data or b""))
    return b"".join(text)


@dataclass(frozen=True)
class Emulator:
    """Runs cases with one of the instruction sets."""

    harness: Path
    isa: str
    folder: Path

    def __call__(self, cases: list[bytes]) -> list[bytes]:
        """The results in order."""
        there, back = self.folder / "cases", self.folder / "results"
        there.write_bytes(struct.pack("<d", len(cases)) + b"".join(cases))
        call(QEMU, self.harness, self.isa, there, back)
        text, at, results = back.read_bytes(), 0, []
        while at < len(text):
            size = int(struct.unpack_from("<d", text, at)[0])
            results.append(text[at + 8 : at + 8 + size])
            at += 8 + size
        return results

    def floats(self, cases: list[bytes]) -> list[Floats]:
        """The results of functions that give float32."""
        return [np.frombuffer(result, np.float32) for result in self(cases)]


class Weight:
    """A stack of random weights: for this machine's kernels, for the harness, and its values."""

    def __init__(self, form: Format, shape: tuple[int, ...], rng: np.random.Generator) -> None:
        self.form, self.bias = form, rng.normal(size=shape[:-1]).astype(np.float32)
        self.keep(stored(form, shape, rng), shape[-1])

    def keep(self, parts: list[mx.array], cols: int) -> None:
        """Hold these parts."""
        self.parts, self.cols = parts, cols
        self.matrix = matrix_of(self.form, parts, cols, self.bias)
        self.values = values_of(self.form, parts)

    @property
    def case(self) -> list[Part]:
        """The numbers and arrays of a matrix."""
        form, arrays = self.form, [raw(part) for part in self.parts]
        number = {"plain": 7, "mxfp4": 6}.get(form.mode) or FORMATS.index(form.bits)
        element = 3 if form.mode == "mxfp4" else ELEMENTS.index(form.dtype)
        row_bytes = [array.shape[-1] * array.itemsize for array in arrays]
        shape = [self.matrix.count, self.matrix.rows, self.cols, form.group_size]
        sizes = [row_bytes[0], row_bytes[1] if len(arrays) > 1 else 0]
        more = [None] * (3 - len(arrays))
        return [number, element, *shape, *sizes, *arrays, *more, self.bias]
