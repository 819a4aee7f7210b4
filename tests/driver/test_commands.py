"""The commands as a person types them: what they print, what they refuse, and with which code."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from expert_driver import talk
from expert_driver.cli import main
from expert_driver.config import NetworkConfig
from expert_network.store.manifest import MANIFEST, canonical
from tests.driver.fakes import FakeNode
from tests.driver.programs import DEMO_STORE, expert_net
from tests.support.nodes import NodeProcess, node_process, node_processes

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests has stores and keys that are none of ours."""
    monkeypatch.setenv("EXPERT_NETWORK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EXPERT_NETWORK_KEY", raising=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeProcess]]:
    with node_processes("a,b", DEMO_STORE) as nodes:
        yield nodes


def joined(nodes: list[NodeProcess]) -> str:
    return ",".join(node.url for node in nodes)


def run(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


# Usage


def test_help_lists_commands_and_the_options_of_run() -> None:
    """The first help names every command and the options of a plain run, fast."""
    done = expert_net("--help")
    assert done.returncode == 0
    for word in (
        "logits",
        "status",
        "demo",
        "roster",
        "preprocess",
        "--nodes",
        "--chat",
        "--exact",
    ):
        assert word in done.stdout


def test_help_loads_no_model_code() -> None:
    """Help and `models` do not import MLX: they answer at once, and without a backend."""
    script = (
        "import sys; from expert_driver.cli import main; main(['--help'])\n"
        "for name in ('run', 'status', 'demo', 'logits', 'key', 'roster'): main([name, '--help'])\n"
        "sys.exit([m for m in ('mlx', 'mlx_lm', 'transformers', 'rich') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat", "-p", "x"], "exclude each other"),
        (["-p", "  "], "the prompt is empty"),
        (["--nodes", ",", "-p", "x"], "no node is named"),
        (["--nodes", "a,a", "-p", "x"], "named twice"),
        (["--max-tokens", "0", "-p", "x"], "--max-tokens"),
        (["--wire", "int4", "-p", "x"], "--wire"),
        (["logits"], "--ids"),
    ],
)
def test_usage_errors(capsys: Capture, arguments: list[str], words: str) -> None:
    """What cannot be meant is a usage error, exit code 2."""
    code, _, err = run(capsys, *arguments)
    assert code == 2 and words in err


# Stores


def test_no_store_says_how_to_get_one(capsys: Capture) -> None:
    """Without a store and without nodes, the sentence names the command that lists models."""
    code, _, err = run(capsys, "--chat")
    assert code == 3 and "expert-net models" in err


def test_an_unknown_store(capsys: Capture) -> None:
    """A word that is neither a command nor a store says both."""
    code, _, err = run(capsys, "stauts", "-p", "x")
    assert code == 3 and "stauts" in err and "no such folder" in err


def test_a_store_can_be_named(capsys: Capture, tmp_path: Path) -> None:
    """A store in the models folder is called by its name, or left out when it is the only one."""
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    (models / "story").symlink_to(DEMO_STORE)
    code, named, _ = run(capsys, "story", "-p", "Hi", "--max-tokens", "3")
    assert code == 0 and named.strip()
    code, alone, err = run(capsys, "-p", "Hi", "--max-tokens", "3")
    assert (code, alone) == (0, named) and "[cut at 3 tokens" in err


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory is a sentence with the shortfall, exit code 5."""
    monkeypatch.setattr("expert_driver.opening.available_memory", lambda _: 1_000_000)
    code, _, err = run(capsys, DEMO_STORE, "-p", "x")
    assert code == 5
    assert "short" in err and "--nodes" in err


def test_a_store_without_a_tokenizer_takes_no_text(capsys: Capture, tmp_path: Path) -> None:
    """Text needs a tokenizer, and the sentence names the command that does not."""
    store = tmp_path / "store"
    shutil.copytree(DEMO_STORE, store)
    data = json.loads((store / MANIFEST).read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        del data["files"][name]
        (store / name).unlink()
    (store / MANIFEST).write_bytes(canonical(data))
    code, _, err = run(capsys, store, "-p", "x")
    assert code == 3 and "no tokenizer" in err and "expert-net logits" in err
    out = tmp_path / "out.npy"
    assert run(capsys, "logits", store, "--ids", "1,2", "-o", out)[0] == 0 and out.exists()


# Nodes that do not fit


def test_exact_refuses_int8(capsys: Capture) -> None:
    """--exact with --precision int8 is refused with a sentence, before anything is loaded."""
    code, _, err = run(capsys, DEMO_STORE, "--exact", "--precision", "int8", "-p", "x")
    assert code == 3 and "--exact is never computed in int8" in err


@pytest.mark.parametrize(
    ("options", "precise"),
    [((), False), (("--exact",), True), (("--precision", "f32"), True)],
)
def test_precision(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], precise: bool
) -> None:
    """Sums are computed in int8 where kernels have it; exact runs, and f32 ones, never are."""
    found: list[NetworkConfig] = []
    monkeypatch.setattr(talk, "run", lambda store, config, *_: found.append(config))
    assert main([str(DEMO_STORE), "-p", "x", "--kernels", "mlx", "--threads", "2", *options]) == 0
    (config,) = found
    assert config.computing.precise(config.exact) == precise
    assert (config.computing.kernels, config.computing.threads) == ("mlx", 2)


def test_exact_refuses_another_wire(capsys: Capture, nodes: list[NodeProcess]) -> None:
    """--exact with a --wire that is not the compute dtype is refused with a sentence."""
    code, _, err = run(
        capsys, DEMO_STORE, "--nodes", joined(nodes), "--exact", "--wire", "bf16", "-p", "x"
    )
    assert code == 3 and "--exact carries rows" in err


def test_a_missing_node_is_named(capsys: Capture, nodes: list[NodeProcess]) -> None:
    """With a node left out, the blocks that nobody owns and their owner are named."""
    code, _, err = run(capsys, DEMO_STORE, "--nodes", nodes[0].url, "-p", "x")
    assert code == 4 and "which is b's" in err and "of 256 blocks" in err


def test_a_node_with_another_model(capsys: Capture) -> None:
    """A node that serves another model than the store is named with both digests."""
    node = FakeNode("a", "a")
    try:
        code, _, err = run(capsys, DEMO_STORE, "--nodes", node.url, "-p", "x")
    finally:
        node.stop()
    assert code == 4 and "another model (aaaaaaaaaaaa)" in err


def said_of(capsys: Capture, url: str) -> str:
    code, out, err = run(capsys, DEMO_STORE, "--nodes", url, "-p", "x")
    assert (code, out) == (4, "")
    return err


def test_an_address_that_refuses(capsys: Capture) -> None:
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "refused the connection" in said_of(capsys, f"http://127.0.0.1:{port}")


def test_an_address_that_hangs(capsys: Capture) -> None:
    """A server that accepts and says nothing is given up after five seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "did not answer within 5 s" in said_of(capsys, url)


def test_an_address_that_speaks_plain_http(capsys: Capture) -> None:
    """Another web server is told from a node."""

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        said = said_of(capsys, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert "something other than an expert-node listens there" in said


def test_a_url_that_is_none(capsys: Capture) -> None:
    """An address that cannot be one is an input error."""
    code, _, err = run(capsys, DEMO_STORE, "--nodes", "https://a", "-p", "x")
    assert code == 3 and "https:// is not spoken by nodes" in err


# Without a store


def test_the_trunk_is_fetched_once(
    capsys: Capture, nodes: list[NodeProcess], tmp_path: Path
) -> None:
    """Without STORE, trunk and tokenizer come from a node, and the second start uses the copy."""
    arguments = ("--nodes", joined(nodes), "--exact", "-p", "Hi", "--max-tokens", "3")
    local = run(capsys, DEMO_STORE, *arguments)
    first = run(capsys, *arguments)
    second = run(capsys, *arguments)
    assert first[:2] == second[:2] == local[:2] and first[0] == 0
    assert "fetching the trunk and the tokenizer" in first[2]
    assert "fetching" not in second[2]
    (copy,) = (tmp_path / "home" / "cache").iterdir()
    assert not (copy / "bin").exists()
    ids = ("--ids", "1,2", "--nodes", joined(nodes), "--exact")
    for store, out in (((), "fetched.npy"), ((DEMO_STORE,), "local.npy")):
        assert run(capsys, "logits", *store, *ids, "-o", tmp_path / out)[0] == 0
    assert (tmp_path / "fetched.npy").read_bytes() == (tmp_path / "local.npy").read_bytes()


# status


def test_status_of_a_sound_network(capsys: Capture, nodes: list[NodeProcess]) -> None:
    """Every node is a row, and the last line says that they can work."""
    code, out, _ = run(capsys, "status", "--nodes", joined(nodes))
    assert code == 0
    assert out.splitlines()[-1] == "the nodes agree, and together they own every block"
    assert all(f"127.0.0.1:{node.port}" in out for node in nodes) and "124/256" in out


def test_status_of_a_broken_network(capsys: Capture, nodes: list[NodeProcess]) -> None:
    """An unreachable node is a row and a problem, not a crash; exit code 4."""
    code, out, _ = run(capsys, "status", "--nodes", f"{nodes[0].url},http://127.0.0.1:9")
    assert code == 4
    assert "no status" in out and "132 of 256 blocks have no owner here" in out


def test_status_for_programs(capsys: Capture, nodes: list[NodeProcess]) -> None:
    """--json is JSON alone, with the same exit code."""
    code, out, _ = run(capsys, "status", "--json", "--nodes", nodes[0].url)
    found = json.loads(out)
    assert code == 4 and found["nodes"][0]["blocks"] == 124 and len(found["problems"]) == 1


# Keys


def test_key_new_writes_a_secret_once(capsys: Capture, tmp_path: Path) -> None:
    """A key file is its owner's alone and is never overwritten."""
    file = tmp_path / "key"
    assert run(capsys, "key", "new", file)[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert len(bytes.fromhex(text)) == 32
    code, _, err = run(capsys, "key", "new", file)
    assert code == 3 and "never overwritten" in err and file.read_text() == text


def test_a_key_is_rotated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`rotate` puts a new key before the older one, `--finish` leaves it alone; each once."""
    file = str(tmp_path / "key")
    run(capsys, "key", "new", file)
    (old,) = Path(file).read_text().split()
    code, _, err = run(capsys, "key", "rotate", file, "--finish")
    assert code == 3 and "has one key" in err
    assert run(capsys, "key", "rotate", file)[0] == 0
    new, kept = Path(file).read_text().split()
    assert kept == old and new != old
    assert Path(file).stat().st_mode & 0o777 == 0o600
    code, _, err = run(capsys, "key", "rotate", file)
    assert code == 3 and "has two keys already" in err
    assert run(capsys, "key", "rotate", file, "--finish")[0] == 0
    assert Path(file).read_text().split() == [new]


def test_key_new_prints(capsys: Capture) -> None:
    """Without a file the key is printed, another one each time."""
    keys = {run(capsys, "key", "new")[1] for _ in range(2)}
    assert len(keys) == 2 and all(len(bytes.fromhex(key)) == 32 for key in keys)


def test_the_key_opens(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right key lets the driver in, from a file or the environment; no other does."""
    key = tmp_path / "key"
    assert run(capsys, "key", "new", key)[0] == 0
    with node_process("a", "a", DEMO_STORE, "--key-file", str(key)) as node:
        arguments = (DEMO_STORE, "--nodes", node.url, "-p", "Hi", "--max-tokens", "2")
        assert run(capsys, *arguments, "--key-file", key)[0] == 0
        code, _, err = run(capsys, *arguments)
        assert code == 4 and "needs the cluster key" in err
        monkeypatch.setenv("EXPERT_NETWORK_KEY", "ab" * 32)
        code, _, err = run(capsys, *arguments)
        assert code == 4 and "refused the cluster key" in err
        code, out, _ = run(capsys, "status", "--nodes", node.url)
        assert code == 4 and "refused the cluster key" in out
        monkeypatch.setenv("EXPERT_NETWORK_KEY", key.read_text())
        assert run(capsys, *arguments)[0] == 0
        assert run(capsys, "status", "--nodes", node.url)[0] == 0
        key.chmod(0o644)
        code, _, err = run(capsys, *arguments, "--key-file", key)
        assert code == 0 and "can be read by others" in err


@pytest.mark.parametrize("text", ["not hex", "abcd"], ids=["no hex", "short"])
def test_what_is_no_key(capsys: Capture, tmp_path: Path, text: str) -> None:
    """A key file that holds no key is an input error that does not show what it holds."""
    (tmp_path / "key").write_text(text)
    code, _, err = run(
        capsys, DEMO_STORE, "--nodes", "x", "-p", "x", "--key-file", tmp_path / "key"
    )
    assert code == 3 and "expert-net key new" in err and text not in err
