"""What a node is told: one frozen dataclass, whose fields are also the command line's options."""

from __future__ import annotations

import os
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expert_network.backend import Kernels

if TYPE_CHECKING:
    from expert_network.net.auth import ClusterKey

LOG_LEVELS = ("debug", "info", "warning", "error")
_FILE = click.Path(path_type=Path)


def _option(help: str, *names: str, **click_args: Any) -> dict[str, Any]:
    """A field's metadata that makes it an option: `names` if not --field-name, and click's own."""
    return {"help": help, "names": names, "click": click_args}


@dataclass(frozen=True)
class NodeConfig:
    """Everything `expert-node` can be told, as the command line has it, checked by click only.

    `key` is the cluster key, which never stands on a command line: it comes from `key_file` or from
    the environment.
    """

    roster: str | None = field(
        metadata=_option(
            "The nodes that share the model: a,b or with weights a=64,b=16, or a TOML file."
        )
    )
    me: str = field(metadata=_option("Which node of the roster this one is.", required=True))
    join: str | None = field(
        default=None,
        metadata=_option(
            "Instead of --roster: nodes of a network that runs, URL,URL; this node takes itself "
            "into it, and out of it when it is stopped.",
        ),
    )
    weight: float = field(
        default=1.0,
        metadata=_option("With --join: this node's weight.", type=click.FloatRange(1e-9, 1e18)),
    )
    url: str | None = field(
        default=None,
        metadata=_option(
            "With --join: how the others reach this node.  [default: from --host and --port]"
        ),
    )
    handover_seconds: float = field(
        default=600.0,
        metadata=_option(
            "With --join: how long a node that is stopped may take to hand its blocks over.",
            type=click.FloatRange(0, 86400),
        ),
    )
    store: str | None = field(
        default=None,
        metadata=_option(
            "The store: a folder, or a name in the models folder. Left out: the only one there.",
            "--store",
            "--model-dir",
        ),
    )
    peers: str | None = field(
        default=None,
        metadata=_option(
            "Nodes to fetch what the store lacks from, such as http://a:8301,http://b:8301: the "
            "manifest, this node's own blocks and the trunk.",
        ),
    )
    manifest_sha256: str | None = field(
        default=None,
        metadata=_option(
            "With --peers: the model digest to fetch.  [default: the one that two peers agree on]"
        ),
    )
    no_trunk: bool = field(
        default=False,
        metadata=_option(
            "With --peers: leave the trunk out; no driver can fetch it from this node then.",
            is_flag=True,
        ),
    )
    host: str = field(default="127.0.0.1", metadata=_option("Address to listen on."))
    port: int = field(
        default=8301,
        metadata=_option("Port to listen on; 0 takes a free one.", type=click.IntRange(0, 65535)),
    )
    key_file: Path | None = field(
        default=None,
        metadata=_option(
            "The file with the cluster key (else EXPERT_NETWORK_KEY); needed to listen on any "
            "address but this machine's own.",
            type=_FILE,
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=_option("Listen for other machines without a key.", is_flag=True),
    )
    replicas: int | None = field(
        default=None,
        metadata=_option(
            "How many nodes hold each block.  [default: 1, or what the roster's file says]",
            type=click.IntRange(1),
        ),
    )
    home: Path | None = field(
        default=None,
        metadata=_option(
            "Where models and caches stand.  [default: the user's data directory]",
            type=_FILE,
            envvar="EXPERT_NETWORK_HOME",
        ),
    )
    kernels: Kernels = field(
        default="auto",
        metadata=_option(
            "What computes: native kernels if they are built and this is a CPU, or MLX's.",
            type=click.Choice(["auto", "native", "mlx"]),
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_option(
            "How many threads native kernels use.  [default: the usable cores]",
            type=click.IntRange(1, 1024),
        ),
    )
    drain_seconds: float = field(
        default=10.0,
        metadata=_option(
            "How long a node that is stopped waits for the dispatches it is computing.",
            type=click.FloatRange(0, 3600),
        ),
    )
    stop_at_eof: bool = field(
        default=False,
        metadata=_option(
            "Stop when standard input closes, as it does when the parent process ends.",
            is_flag=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=_option("How much to say on standard error.", type=click.Choice(LOG_LEVELS)),
    )
    key: ClusterKey | None = field(default=None, repr=False)

    @property
    def peer_urls(self) -> list[str]:
        """The addresses of --peers."""
        return [url.strip() for url in (self.peers or "").split(",") if url.strip()]

    def arguments(self) -> list[str]:
        """The options, defaults left out, that give this config on a command line in any folder."""
        words: list[str] = []
        for option in option_fields():
            value = getattr(self, option.name)
            if value not in (None, option.default):
                words += _words(_names(option)[0], _anywhere(option.name, value))
        return words


def option_fields() -> list[Field[Any]]:
    """The fields of NodeConfig that are options."""
    return [field for field in fields(NodeConfig) if field.metadata]


def options(command: click.Command, without: tuple[str, ...] = ()) -> click.Command:
    """Give `command` the options of a node, but those of the fields in `without`."""
    chosen = [field for field in option_fields() if field.name not in without]
    command.params[:0] = [_click_option(field) for field in chosen]
    return command


def _click_option(option: Field[Any]) -> click.Option:
    extra = dict(option.metadata["click"])
    if not extra.get("required"):
        extra["default"] = default = None if option.default is MISSING else option.default
        # click would print "default: None" for nothing and "False" for an unset flag.
        extra["show_default"] = default not in (None, False)
    return click.Option([*_names(option), option.name], help=option.metadata["help"], **extra)


def _names(option: Field[Any]) -> tuple[str, ...]:
    return option.metadata["names"] or (f"--{option.name.replace('_', '-')}",)


def _words(name: str, value: Any) -> list[str]:
    if value is True:
        return [name]
    # One word, so that a value that begins with a dash is not taken for an option.
    return [f"{name}={value}"]


def _anywhere(name: str, value: Any) -> Any:
    """`value` with relative paths made absolute: a service starts in another folder."""
    is_path = isinstance(value, Path) or (
        isinstance(value, str)
        and ((name == "roster" and (value.endswith(".toml") or "/" in value)) or name == "store")
    )
    return os.path.abspath(os.path.expanduser(value)) if is_path else value
