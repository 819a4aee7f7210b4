"""`expert-net status`: who owns what, and whether it can work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from expert_driver import options, tables
from expert_driver.status import HEADERS, as_json, problems, row, shared
from expert_network.errors import NodeError


@click.command("status", context_settings=options.CONTEXT)
@options.nodes_option(required=True)
@options.key_option
@click.option("--json", "machine", is_flag=True, help="Print JSON, for programs.")
def command(nodes: tuple[str, ...], key_file: Path | None, machine: bool) -> int:
    """Show what each node says of itself, and whether they can work together.

    Exits with 4 when something is wrong.
    """
    from expert_driver import fetching

    found = fetching.statuses(nodes, options.key(key_file))
    wrong = problems(found)
    if machine:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        tables.show(HEADERS, [row(node) for node in found], sys.stdout)
        click.echo()
        for line in shared(found):
            click.echo(line)
        for problem in wrong:
            click.echo(f"problem: {problem}")
        if not wrong:
            click.echo("the nodes agree, and together they own every block")
    return NodeError.exit_code if wrong else 0
