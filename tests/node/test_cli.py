"""expert-node's command line: every mistake is a sentence and an exit code, before any loading."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expert_network.errors import OutOfMemory
from expert_network.net.auth import ClusterKey
from expert_network.store.manifest import MANIFEST, lay_out
from expert_network.store.reader import Store
from expert_node import cli
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.support.nodes import node_process, run_node
from tests.support.stores import flip, write_store

AB = ["--roster", "a,b", "--me", "a"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A store that can be opened; there is no model behind it."""
    write_store(tmp_path / "store")
    return tmp_path / "store"


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of a command line that fails, run in this process."""
    code = cli.run_cli(list(words))
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    assert " ready on " not in output.out
    return code, output.err


def test_nothing_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word there is help, with the options, and exit code 2."""
    code, text = failed(capsys)
    assert code == 2
    assert "--roster" in text


def test_no_roster(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing option is a usage error."""
    code, text = failed(capsys, "--me", "a")
    assert code == 2
    assert "--roster" in text


@pytest.mark.parametrize(
    ("roster", "me", "words"),
    [
        ("a,b", "c", "node 'c' is not in the roster, which names a, b"),
        ("a,a", "a", "names node 'a' twice"),
        ("a=x", "a", "'x', which is not a number"),
        ("./absent.toml", "a", "./absent.toml cannot be read"),
    ],
)
def test_bad_roster(
    capsys: pytest.CaptureFixture[str], small: Path, roster: str, me: str, words: str
) -> None:
    """A roster that cannot be used, or does not name this node, is explained; exit code 3."""
    code, text = failed(capsys, "--roster", roster, "--me", me, "--store", str(small))
    assert code == 3
    assert words in text


def test_no_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a store the models folder is named; exit code 3."""
    code, text = failed(capsys, *AB, "--home", str(tmp_path))
    assert code == 3
    assert f"{tmp_path}/models: no store stands here" in text


def test_several_stores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With several stores and no --store they are listed; exit code 3."""
    for name in ("one", "two"):
        write_store(tmp_path / "models" / name)
    code, text = failed(capsys, *AB, "--home", str(tmp_path))
    assert code == 3
    assert "one, two" in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_open_to_others_without_a_key(
    capsys: pytest.CaptureFixture[str], small: Path, host: str
) -> None:
    """Any address but this machine's own needs a key or --insecure; exit code 2."""
    code, text = failed(capsys, *AB, "--store", str(small), "--host", host)
    assert code == 2
    assert f"--host {host} lets other machines in" in text
    assert "--key-file" in text and "--insecure" in text


@pytest.mark.parametrize("text", ["", "0123", "not hexadecimal"])
def test_bad_key_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, small: Path, text: str
) -> None:
    """A key file that holds no key is refused by its name; exit code 3."""
    file = tmp_path / "key"
    file.write_text(text)
    code, said = failed(capsys, *AB, "--store", str(small), "--key-file", str(file))
    assert code == 3
    assert str(file) in said


def test_bad_key_variable(
    capsys: pytest.CaptureFixture[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is the variable, without showing what it holds."""
    monkeypatch.setenv("EXPERT_NETWORK_KEY", "secret?")
    code, text = failed(capsys, *AB, "--store", str(small))
    assert code == 3
    assert "EXPERT_NETWORK_KEY" in text and "secret?" not in text


def test_partition_too_big(
    capsys: pytest.CaptureFixture[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that does not fit is refused before anything is loaded or bound; exit code 5."""
    from expert_node import daemon

    def never(*_: object) -> object:
        raise AssertionError("it went on")

    monkeypatch.setattr(daemon, "available_memory", lambda _: 1000)
    monkeypatch.setattr(daemon, "load_partition", never)
    monkeypatch.setattr(daemon, "listen", never)
    code, text = failed(capsys, *AB, "--store", str(small))
    assert code == OutOfMemory.exit_code == 5
    assert "needs" in text and "short" in text


def write_huge_store(path: Path) -> None:
    """A store of a terabyte, of which nothing is on the disk but its files' lengths."""
    small = write_store(path, layers=(0,), experts=1)
    tensors, size = lay_out([("up_proj.weight", "float32", (1 << 14, 1 << 15))])
    experts = 512
    spec = replace(
        small.layers[0],
        experts=experts,
        tensors=tensors,
        block_bytes=size,
        stride=size,
        sha256=("00" * 32,) * experts,
    )
    os.truncate(path / spec.file, spec.file_bytes)
    (path / MANIFEST).write_bytes(replace(small, layers=(spec,)).to_bytes())


def test_a_terabyte(tmp_path: Path) -> None:
    """Half a terabyte is refused at once, with the real figures of this machine."""
    write_huge_store(tmp_path / "huge")
    result = run_node(*AB, "--port", "0", "--store", str(tmp_path / "huge"))
    assert result.returncode == 5
    assert "the partition of node a" in result.stderr
    assert " GB short; give the node a smaller weight in the roster" in result.stderr
    assert "loading" not in result.stderr


def test_port_in_use(
    capsys: pytest.CaptureFixture[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is taken is found before anything is loaded; exit code 5."""
    from expert_node import daemon

    monkeypatch.setattr(daemon, "load_partition", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = failed(capsys, *AB, "--store", str(small), "--port", port)
    assert code == 5
    assert f"127.0.0.1:{port} is in use by another program" in text


def test_address_of_another_machine(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    """An address that is not this machine's is refused with advice; exit code 3."""
    where = ["--host", "192.0.2.1", "--insecure", "--port", "0"]
    code, text = failed(capsys, *AB, "--store", str(small), *where)
    assert code == 3
    assert "cannot listen on 192.0.2.1:0" in text and "--host" in text


def test_no_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without MLX gets the sentence that says what to install; exit code 1."""
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] in ("mlx", "expert_node")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    from expert_node.cli import run_cli

    code = run_cli(AB)
    assert code == 1
    assert "pip install" in capsys.readouterr().err


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Store:
    """A copy of the shared store, to be damaged."""
    shutil.copytree(store.path, tmp_path / "copy")
    return Store.open(tmp_path / "copy")


def test_corrupt_block(copy: Store) -> None:
    """A node does not start with a flipped byte in a block of its own: file and block; exit 3."""
    mine = int(partition(Roster.parse("a,b"), "a", copy.manifest.shape)[1][0])
    spec = copy.manifest.layer(1)
    flip(copy.path / spec.file, spec.offset(mine) + 100)
    result = run_node(*AB, "--port", "0", "--store", str(copy.path))
    assert result.returncode == 3
    assert spec.file in result.stderr
    assert f"block (1, {mine}) at offset {spec.offset(mine)}" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_corrupt_block_of_another_node(copy: Store) -> None:
    """A flipped byte in a block that it does not own does not concern a node."""
    others = partition(Roster.parse("a,b"), "b", copy.manifest.shape)[1]
    spec = copy.manifest.layer(1)
    flip(copy.path / spec.file, spec.offset(int(others[0])) + 100)
    with node_process("a,b", "a", copy.path) as node:
        assert node.get("/health") == {"status": "ok"}


def test_missing_layer_file(copy: Store) -> None:
    """A layer file that is gone is named; exit code 3."""
    file = copy.path / copy.manifest.layer(0).file
    file.unlink()
    result = run_node(*AB, "--port", "0", "--store", str(copy.path))
    assert result.returncode == 3
    assert f"{file}: the file is missing" in result.stderr


def test_environment_alone(store: Store) -> None:
    """Everything can be given by variables, so that a container needs no arguments."""
    from tests.support.nodes import NodeProcess, python_module

    env = {"ROSTER": "a,b", "ME": "b", "STORE": str(store.path), "PORT": "0"}
    node = NodeProcess(python_module(), {f"EXPERT_NODE_{k}": v for k, v in env.items()})
    try:
        assert "expert-node b ready on " in node.wait_ready().ready_line
    finally:
        node.close()


def test_key_lets_others_in(store: Store, tmp_path: Path) -> None:
    """With a key a node listens on all addresses, and asks each request but /health for it."""
    from urllib.error import HTTPError

    from expert_network.errors import KeyRefused
    from expert_protocol.frames import Reply
    from tests.support.links import dispatch_of, linked

    key = ClusterKey.generate()
    file = tmp_path / "key"
    file.write_text(key.text)
    file.chmod(0o600)
    options = ["--host", "0.0.0.0", "--key-file", str(file)]
    with node_process("a", "a", store.path, *options) as node:
        node.url = node.url.replace("0.0.0.0", "127.0.0.1")
        assert node.get("/health") == {"status": "ok"}
        with pytest.raises(HTTPError) as refused:
            node.get("/status")
        assert refused.value.code == 401
        refused.value.close()
        with pytest.raises(KeyRefused), linked(node.url, store.manifest):
            pass
        with pytest.raises(KeyRefused), linked(node.url, store.manifest, ClusterKey.generate()):
            pass
        with linked(node.url, store.manifest, key) as link:
            rows = np.ones((1, store.manifest.layer(0).hidden), np.float32)
            assert isinstance(link.ask(dispatch_of(0, rows, [[0]])), Reply)
        assert key.text not in node.stderr()


@pytest.mark.parametrize("options", [["--no-trunk"], ["--manifest-sha256", "0f" * 32]])
def test_options_that_need_peers(
    small: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """What says something about fetching only says that it needs --peers."""
    code, text = failed(capsys, *AB, "--store", str(small), *options)
    assert code == 2 and f"{options[0]} says something only together with --peers" in text


def test_peers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """A digest that is none, and an address that is none, are said before anything begins."""
    code, text = failed(capsys, *AB, "--peers", "b", "--manifest-sha256", "x")
    assert code == 2 and "--manifest-sha256 is 64 hexadecimal digits" in text
    code, text = failed(capsys, *AB, "--store", "x", "--peers", "b:8301,https://c")
    assert code == 3 and "https:// is not spoken by nodes" in text


def test_a_service_that_fetches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service may begin with a store that is yet to be fetched; its place is pinned."""
    words = ["service", "print", "--platform", "systemd", *AB, "--home", str(tmp_path)]
    assert cli.run_cli([*words, "--store", "olmoe", "--peers", "b:8301,c:8301"]) == 0
    text = capsys.readouterr().out
    assert f"--store={tmp_path}/models/olmoe" in text and "--peers=b:8301,c:8301" in text
