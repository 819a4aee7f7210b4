"""A command that test_commandline loads by name."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    click.echo("imported")
