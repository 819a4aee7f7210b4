"""`expert-net models`: what can be downloaded by name, and what it takes."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from expert_driver import catalog, options
from expert_driver.catalog import Entry
from expert_network.units import size

_LINE = "{:<20} {:>7} {:>7} {:>9} {:>9} {:>7} {:>9}"


@click.command("models", context_settings=options.CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
def command(as_json: bool) -> None:
    """List the models that `expert-net download NAME` knows.

    The disk holds the whole store once for each machine that keeps all of it, a driver's memory
    holds the trunk, and the nodes' memory together holds the blocks. Any other repo with a
    mixture-of-experts model that mlx-lm supports works too: expert-net download ORG/REPO.
    """
    show(as_json)


def show(as_json: bool) -> None:
    """Print the catalog as a table, or as JSON."""
    if as_json:
        entries = [asdict(entry) | {"blocks": entry.blocks} for entry in catalog.load()]
        click.echo(json.dumps(entries, indent=2))
        return
    click.echo(_LINE.format("name", "total", "active", "disk", "trunk", "blocks", "each"))
    for entry in catalog.load():
        click.echo("\n".join(lines(entry)))


def lines(entry: Entry) -> tuple[str, str]:
    """An entry in two lines, for a terminal of 80 columns."""
    figures = _LINE.format(
        entry.name,
        _billions(entry.total_params),
        _billions(entry.active_params),
        size(entry.disk_bytes),
        size(entry.trunk_bytes),
        f"{entry.blocks:,}",
        size(entry.block_bytes),
    )
    return figures, f"  {entry.repo}" + (f" ({entry.note})" if entry.note else "")


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B"
