"""llama.cpp for the benchmark: its own environment and build, from PyPI's sdist of
llama-cpp-python.

`ready(DIR)` makes DIR/peers once: a virtual environment with gguf, cmake and ninja, the sources,
and a build of the two programs that are measured. Nothing of it enters the project's environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.shapes import Shape

VERSION = "0.3.36"
TARGETS = ("llama-bench", "ggml-rpc-server")

_CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_RPC=ON", "-DGGML_NATIVE=ON"),
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_UI=OFF"),
)


@dataclass(frozen=True)
class Llama:
    """Where its programs are, and a Python that has `gguf`."""

    bin: Path
    python: Path

    def twin(self, shape: Shape, folder: Path) -> Path:
        """The GGUF file of `shape`, written if it is not there."""
        script = Path(__file__).with_name("gguf_twin.py")
        _run(self.python, script, shape.name, "--dir", folder)
        return folder / f"{shape.name}.gguf"

    def version(self) -> str:
        """What llama-bench calls itself."""
        done = subprocess.run(
            [self.bin / "llama-bench", "--version"], capture_output=True, text=True, check=True
        )
        lines = (done.stdout + done.stderr).splitlines()
        return next((line for line in lines if "version" in line), "").strip()


def ready(folder: Path, bin_: Path | None = None) -> Llama:
    """llama.cpp, built under `folder` unless `bin_` names a folder that has its programs."""
    peers = folder / "peers"
    python = _environment(peers / "env", *(() if bin_ else ("cmake", "ninja")))
    return Llama(bin_ or _built(peers, python), python)


def _environment(env: Path, *packages: str) -> Path:
    """The Python of a virtual environment that has gguf and `packages`."""
    python = env / "bin" / "python"
    marks = [env / f".has-{package}" for package in ("gguf", *packages)]
    missing = [mark for mark in marks if not mark.exists()]
    if missing:
        say(f"making {env}")
        if not python.exists():
            _run(sys.executable, "-m", "venv", "--clear", env)
        names = [mark.name.removeprefix(".has-") for mark in missing]
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *names)
        for mark in missing:
            mark.touch()
    return python


def _built(peers: Path, python: Path) -> Path:
    """The build's bin folder; a build that was broken off is gone on with."""
    build = peers / f"build-{VERSION}"
    programs = build / "bin"
    if (build / ".built").exists():
        return programs
    source = _source(peers, python) / "vendor" / "llama.cpp"
    say(f"building llama.cpp in {build}, once; this takes minutes")
    tools = python.parent
    path = os.pathsep.join((str(tools), os.environ.get("PATH", os.defpath)))
    environment = os.environ | {"PATH": path}
    _run(tools / "cmake", "-S", source, "-B", build, *_CMAKE, env=environment)
    _run(tools / "cmake", "--build", build, "--target", *TARGETS, env=environment)
    (build / ".built").touch()
    return programs


def _source(peers: Path, python: Path) -> Path:
    """The unpacked sdist."""
    out = peers / f"llama_cpp_python-{VERSION}"
    if out.exists():
        return out
    say(f"fetching llama-cpp-python {VERSION}")
    wanted = f"llama-cpp-python=={VERSION}"
    only_source = ("--no-deps", "--no-binary", "llama-cpp-python", "--quiet")
    _run(python, "-m", "pip", "download", *only_source, "--dest", peers, wanted)
    archive = next(peers.glob(f"llama_cpp_python-{VERSION}.tar.gz"))
    unpacked = peers / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (unpacked / out.name).rename(out)
    return out


def _run(*words: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command, its output on stderr; raises CalledProcessError."""
    subprocess.run([str(word) for word in words], check=True, stdout=sys.stderr, env=env)


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
