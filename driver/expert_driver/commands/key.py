"""`expert-net key new`: the secret that nodes and drivers of one network share."""

from __future__ import annotations

import os
from pathlib import Path

import click

from expert_driver import options
from expert_network.errors import InputError
from expert_network.net.auth import ClusterKey


@click.group("key", context_settings=options.CONTEXT)
def command() -> None:
    """Make a cluster key."""


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
