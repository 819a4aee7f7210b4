"""expert_node.config: options to a config and back to a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from expert_node.config import NodeConfig, option_fields, options


def parsed(words: list[str], env: dict[str, str] | None = None) -> NodeConfig:
    """The config that a command line gives."""
    command = options(click.Command("run", callback=lambda **values: NodeConfig(**values)))
    result: Any = command.main(
        words, "run", standalone_mode=False, auto_envvar_prefix="EXPERT_NODE"
    )
    assert isinstance(result, NodeConfig)
    return result


MINIMAL = ["--roster", "a,b", "--me", "a"]


def test_defaults() -> None:
    """Without options the command line and the dataclass agree on every default."""
    assert parsed(MINIMAL) == NodeConfig("a,b", "a")
    assert NodeConfig("a,b", "a").arguments() == ["--roster=a,b", "--me=a"]


def test_model_dir_is_store() -> None:
    """--model-dir is another name of --store."""
    assert parsed([*MINIMAL, "--model-dir", "x"]) == parsed([*MINIMAL, "--store", "x"])


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option has a variable, and the home is the one that both programs share."""
    monkeypatch.setenv("EXPERT_NODE_ROSTER", "a,b")
    monkeypatch.setenv("EXPERT_NODE_ME", "b")
    monkeypatch.setenv("EXPERT_NODE_PORT", "9000")
    monkeypatch.setenv("EXPERT_NETWORK_HOME", "/x")
    assert parsed([]) == NodeConfig("a,b", "b", port=9000, home=Path("/x"))


ALL = NodeConfig(
    roster="/etc/our roster.toml",
    me="-a",
    join="http://a:8301,b",
    weight=2.5,
    url="http://c:1",
    handover_seconds=7.0,
    store="/mnt/big disk/100%/store",
    peers="http://a:8301,b",
    manifest_sha256="0f" * 32,
    no_trunk=True,
    host="::",
    port=0,
    key_file=Path("/k'e\"y"),
    insecure=True,
    replicas=2,
    home=Path("/home/ü"),
    kernels="mlx",
    threads=3,
    drain_seconds=2.5,
    stop_at_eof=True,
    log_level="debug",
)


def test_arguments_round_trip() -> None:
    """Whatever the values are, the arguments give the same config again."""
    assert all(getattr(ALL, field.name) != field.default for field in option_fields())
    assert parsed(ALL.arguments()) == ALL


def test_arguments_do_not_depend_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are written out in full; a roster of names is left alone."""
    monkeypatch.chdir(tmp_path)
    config = NodeConfig("./r.toml", "a", store="s", key_file=Path("k"), home=Path("~/h"))
    words = config.arguments()
    assert words[:3] == [f"--roster={tmp_path}/r.toml", "--me=a", f"--store={tmp_path}/s"]
    assert f"--key-file={tmp_path}/k" in words
    assert f"--home={Path.home()}/h" in words
    assert NodeConfig("a,b", "a").arguments()[0] == "--roster=a,b"


def test_the_key_is_never_shown() -> None:
    """Neither the arguments nor the repr of a config hold the cluster key."""
    from expert_network.net.auth import ClusterKey

    key = ClusterKey.generate()
    config = NodeConfig("a", "a", key=key)
    shown = repr(config) + " ".join(config.arguments())
    assert key.text not in shown
    assert repr(key.secret) not in shown
