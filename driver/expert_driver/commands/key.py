"""`expert-net key`: the secret that nodes and drivers of one network share."""

from __future__ import annotations

import os
from pathlib import Path

import click

from expert_driver import options
from expert_network import disk
from expert_network.errors import InputError
from expert_network.net.auth import ClusterKey


@click.group("key", context_settings=options.CONTEXT)
def command() -> None:
    """Make a cluster key, or replace one while the network runs."""


@command.command("new")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
def new(file: Path | None) -> None:
    """Write a new key to FILE, which only you can read, or print it.

    Copy the file to every machine of the network and give it to expert-node and expert-net as
    --key-file. The key itself never travels on a link.
    """
    text = ClusterKey.generate().text
    if file is None:
        click.echo(text)
        return
    write_secret(file, text + "\n")
    click.echo(f"{file}: a new cluster key; copy it to every machine of the network", err=True)


@command.command("rotate")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--finish", is_flag=True, help="Forget the older key, once all have the new one.")
def rotate(file: Path, finish: bool) -> None:
    """Put a new key into FILE beside the one that is there: both are good.

    Copy FILE over those of all machines, in any order: nodes that run read it again within 2
    seconds, and drivers too. When all have it, --finish leaves the new key alone in FILE; copy it
    once more.
    """
    key = ClusterKey.read(file)
    if finish:
        if key.older is None:
            raise InputError(f"{file} has one key; rotate it first, without --finish.")
        made, what = ClusterKey(key.secret), "the new key alone"
    else:
        if key.older is not None:
            raise InputError(
                f"{file} has two keys already; copy it to every machine, then add --finish."
            )
        made, what = key.rotated(), "a new key, and the older one"
    with disk.replacing(file) as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(f"{made.text}\n".encode("ascii"))
    click.echo(f"{file}: {what}; copy it to every machine of the network", err=True)


def write_secret(file: Path, text: str) -> None:
    """Create `file`, for its owner alone. Raises InputError if it exists."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(
            f"{file} exists and is never overwritten; choose another name, or remove it first."
        ) from None
    except OSError as error:
        raise InputError(
            f"{file} cannot be written ({error.strerror}); choose another folder."
        ) from error
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
