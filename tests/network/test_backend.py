"""expert_network.backend"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from expert_network import backend, kernels
from expert_network.backend import Backend, detect
from expert_network.errors import BackendMissing


def test_detect_names_what_runs_here() -> None:
    """The backend is that of MLX's default device, with the versions of MLX and mlx-lm."""
    found = detect()
    assert (found.name == "mlx-cpu") == (mx.default_device().type == mx.DeviceType.cpu)
    assert found.version == f"{version('mlx')}-{version('mlx-lm')}"
    assert found.isa


def test_the_numerics_id_has_four_parts() -> None:
    """Backend, kernel, precision and instruction set, each of which can change bits."""
    found = Backend("mlx-cpu", "0.32.4-0.32.2", "avx2")
    assert found.numerics("float32") == "mlx-cpu/switch-0.32.4-0.32.2/float32/avx2"


def test_native_kernels_have_an_id_of_their_own() -> None:
    """It has their version and instruction set, and MLX's version: some layers are left to MLX."""
    found = Backend("mlx-cpu", "0.32.4-0.32.2", "dotprod", native=True)
    assert (
        found.numerics("float32")
        == f"mlx-cpu/native-{kernels.VERSION}-0.32.4-0.32.2/float32/dotprod"
    )
    assert found.computing(precise=True) == "native dotprod, f32"
    assert found.computing(precise=False) == "native dotprod, int8"


def test_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native ones run on a CPU where they were built, unless MLX's are chosen; else it is said."""
    mlx = Backend("mlx-cpu", "1", "avx2")
    monkeypatch.setattr(backend, "_detect_mlx", lambda: mlx)
    assert detect("mlx") == mlx
    if kernels.available():
        assert detect() == detect("native") == Backend("mlx-cpu", "1", kernels.isa(), native=True)
    monkeypatch.setattr(kernels, "reason", lambda: "not built")
    assert detect() == mlx
    with pytest.raises(BackendMissing, match=r"cannot be used \(not built\); leave --kernels out"):
        detect("native")
    monkeypatch.setattr(backend, "_detect_mlx", lambda: Backend("mlx-metal", "1", "gpu"))
    assert not detect().native
    with pytest.raises(BackendMissing, match="for a CPU, and this is mlx-metal"):
        detect("native")


@pytest.mark.skipif(not kernels.available(), reason=kernels.reason())
def test_threads() -> None:
    """As many threads take part in a kernel as were asked for."""
    before = kernels.threads()
    try:
        detect("auto", 1)
        assert kernels.threads() == 1
        detect("auto", 3)
        assert kernels.threads() == 3
    finally:
        kernels.set_threads(before)


def test_the_limit_of_open_files_stays() -> None:
    """A process may not open fewer files for having met mlx-lm, nor fail where it asks for more."""
    code = (
        "import resource as r\n"
        "from expert_network.backend import detect\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (700, 1000))\n"
        "detect()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (700, 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_only_the_cpu_computes_in_another_dtype_than_stored(stored: str) -> None:
    """On CPU everything is computed in float32, on a GPU as stored."""
    assert Backend("mlx-cpu", "1", "avx2").compute_dtype(stored) == "float32"
    assert Backend("mlx-metal", "1", "gpu").compute_dtype(stored) == stored


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="about MLX on CPU")
def test_nothing_is_compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """After detect, mx.compile needs no C++ compiler: there may be none."""
    detect()
    monkeypatch.setenv("PATH", "")
    x = mx.array([1.0, 2.0])
    assert mx.compile(lambda x: mx.exp(x) * 2 + x)(x).tolist() == (mx.exp(x) * 2 + x).tolist()


def _without_mlx(tmp_path: Path, message: str) -> str:
    """What a process says whose `import mlx.core` fails with `message`."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text(f"raise ImportError({message!r})")
    code = (
        "from expert_network.backend import detect\n"
        "from expert_network.errors import BackendMissing\n"
        "try: detect()\n"
        "except BackendMissing as error: print(error)\n"
    )
    root = Path(backend.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(tmp_path), str(root)]}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_without_a_backend_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    """`pip install mlx` alone on Linux has no backend: the sentence names the extras."""
    said = _without_mlx(tmp_path, "libmlx.so: cannot open shared object file")
    assert "libmlx.so" in said and "\n" not in said
    if sys.platform != "darwin":
        assert 'pip install "expert-network[cpu]"' in said and "cuda13" in said


def test_macos_is_told_to_reinstall() -> None:
    """On macOS there is one build of MLX: no extra is named."""
    said = backend._how_to_install("no module named mlx.core", "darwin")
    assert "--force-reinstall mlx" in said and "expert-network[" not in said


def test_a_missing_backend_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModuleNotFoundError becomes BackendMissing, with exit code 1."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delattr("mlx.core", raising=False)
    with pytest.raises(BackendMissing) as caught:
        detect()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("arm64", "", "neon"),
        ("aarch64", "asimd", "neon"),
        ("x86_64", "sse4_2 avx avx2 fma", "avx2"),
        ("x86_64", "avx2 avx512f avx512vl", "avx512"),
        ("x86_64", "sse4_2", "x86"),
        ("AMD64", "", "x86"),
    ],
)
def test_the_instruction_set_is_a_class(machine: str, flags: str, isa: str) -> None:
    """Machines of one class share an id, whatever else their processors can do."""
    assert backend._cpu_isa(machine, frozenset(flags.split())) == isa


def test_kernels_start_at_once_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set for MLX stays."""
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    backend.start_kernels_at_once()
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "1"
    monkeypatch.delenv("MLX_USE_CUDA_GRAPHS")
    backend.start_kernels_at_once()
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "0"
