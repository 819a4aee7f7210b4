"""The command line of `expert-node`: options to a NodeConfig, and on to the daemon or a service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from expert_network import __version__
from expert_network.commandline import DefaultGroup, cluster_key, run_command
from expert_network.net.address import is_loopback, parse_url
from expert_network.store.manifest import is_digest
from expert_node import service
from expert_node.config import NodeConfig, options

KEY_VARIABLE = "EXPERT_NETWORK_KEY"
CONFIG_VARIABLE = "XDG_CONFIG_HOME"
_SETTINGS = {"auto_envvar_prefix": "EXPERT_NODE", "help_option_names": ["-h", "--help"]}
_NOT_OF_A_SERVICE = ("stop_at_eof",)


@click.group(cls=DefaultGroup, default="run", context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="expert-node")
def cli() -> None:
    """Serve one node's part of a mixture-of-experts model.

    Each option can also be given as an environment variable, EXPERT_NODE_ROSTER for --roster.
    """


@click.command(context_settings=_SETTINGS)
def run(**values: Any) -> int:
    """Load this node's blocks and answer drivers.

    Runs until it is stopped: Ctrl-C, SIGTERM, or --stop-at-eof.
    """
    config = _config(values)
    # Before anything that imports mlx: a machine without a backend gets one sentence.
    from expert_network.backend import detect, start_kernels_at_once

    start_kernels_at_once()
    backend = detect(config.kernels, config.threads)
    from expert_node import daemon

    return daemon.run(config, backend)


cli.add_command(options(run))


@cli.group("service")
def service_group() -> None:
    """Keep a node always on.

    As a launchd agent on macOS, as a systemd user unit on Linux.
    """


@click.command("install", context_settings=_SETTINGS)
@click.option("--no-start", is_flag=True, help="Write the file and leave it to you to start it.")
def install(no_start: bool, **values: Any) -> None:
    """Write the service's file and start it, now and at every login."""
    manager = _manager()
    click.echo(manager.install(_service_config(values), start=not no_start))


@click.command("uninstall")
@click.option("--me", required=True, help="The name of the node.", envvar="EXPERT_NODE_ME")
def uninstall(me: str) -> None:
    """Stop the service and remove its file."""
    click.echo(_manager().uninstall(me))


@click.command("print", context_settings=_SETTINGS)
@click.option(
    "--platform",
    type=click.Choice(sorted(service.MANAGERS)),
    help="Which kind of file.  [default: this machine's]",
)
def print_(platform: str | None, **values: Any) -> None:
    """Show the service's file without writing it."""
    click.echo(_manager(platform).render(_service_config(values)), nl=False)


service_group.add_command(options(install, without=_NOT_OF_A_SERVICE))
service_group.add_command(options(print_, without=_NOT_OF_A_SERVICE))
service_group.add_command(uninstall)


def _manager(platform: str | None = None) -> service.ServiceManager:
    """The service manager of that name, or this machine's, for the user at hand."""
    kind = service.MANAGERS[platform] if platform else service.manager_for(sys.platform)
    configured = os.environ.get(CONFIG_VARIABLE)
    return kind(Path.home(), Path(configured) if configured else None)


def _config(values: dict[str, Any]) -> NodeConfig:
    """The config, with the key read. Raises UsageError for an address open to anyone."""
    config = NodeConfig(**values, key=cluster_key(values["key_file"], KEY_VARIABLE))
    if (config.roster is None) == (config.join is None):
        raise click.UsageError(
            "say which nodes share the model with --roster, or take part in a network that runs "
            "with --join URL; one of the two."
        )
    if not (is_loopback(config.host) or config.key or config.insecure):
        raise click.UsageError(
            f"--host {config.host} lets other machines in: give --key-file FILE (made with "
            "`expert-net key new`), or --insecure if anyone who can reach it may use this node."
        )
    _check_peers(config)
    return config


def _check_peers(config: NodeConfig) -> None:
    """Raise UsageError or InputError for peers that are none, and options that need some."""
    for option, value in (
        ("--manifest-sha256", config.manifest_sha256),
        ("--no-trunk", config.no_trunk),
    ):
        if value and not (config.peer_urls or config.join):
            raise click.UsageError(f"{option} says something only together with --peers or --join.")
    if config.peer_urls and config.join:
        raise click.UsageError("--join fetches from the network that it joins; leave --peers out.")
    if config.manifest_sha256 and not is_digest(config.manifest_sha256):
        raise click.UsageError("--manifest-sha256 is 64 hexadecimal digits, as in /status.")
    for url in config.peer_urls:
        parse_url(url)


def _service_config(values: dict[str, Any]) -> NodeConfig:
    """A config that would start, with the store pinned: what is wrong with it is said now."""
    config = _config(values)
    if config.key_file is None and config.key is not None:
        raise click.UsageError(
            f"a service does not see {KEY_VARIABLE}; put the key in a file and give --key-file."
        )
    from expert_node import startup

    if not config.peer_urls:
        startup.read(config)
    return replace(config, store=str(startup.store_path(config)))


def run_cli(words: Sequence[str]) -> int:
    """Run `expert-node` with these arguments; the exit code."""
    if not words and "EXPERT_NODE_ROSTER" in os.environ:
        words = ["run"]  # everything is in the environment, as containers like it
    return run_command(cli, words, "expert-node")


def main() -> NoReturn:
    """Be `expert-node`: run with the process's arguments, and end the process."""
    code = run_cli(sys.argv[1:])
    # Not through the interpreter's own end. A thread that has used MLX runs MLX's destructors when
    # it ends, and these abort the process if they meet an interpreter that is being taken down.
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
