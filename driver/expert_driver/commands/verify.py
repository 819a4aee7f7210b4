"""`expert-net verify`: hash everything in a store again."""

from __future__ import annotations

from pathlib import Path

import click

from expert_driver import options
from expert_network import disk, places
from expert_network.commandline import progress
from expert_network.errors import InputError
from expert_network.store.reader import Store
from expert_network.units import size


@click.command("verify", context_settings=options.CONTEXT)
@click.argument("store")
@options.home_option
@click.pass_context
def command(ctx: click.Context, store: str, home: Path | None) -> None:
    """Hash every file and block of STORE and compare with its manifest.

    Each file or block that differs is named. The exit code is 0 for a sound store, else 3.
    """
    opened = Store.open_unchecked(places.find_store(store, places.home(home)))
    with progress() as report:
        problems = opened.verify(report)
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    manifest = opened.manifest
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        click.echo(f"{opened.path} is damaged: {count}")
        ctx.exit(InputError.exit_code)
    held = sum(len(opened.held(layer)) for layer, _ in manifest.shape)
    part = f" of {manifest.block_count:,}" if held < manifest.block_count else ""
    click.echo(
        f"{opened.path} is sound: {held:,}{part} blocks and {len(manifest.files)} files, "
        f"{size(disk.sizes(opened.path)[1] if part else manifest.total_bytes)}, "
        f"digest {manifest.digest}"
    )
