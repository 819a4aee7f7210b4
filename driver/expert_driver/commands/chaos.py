"""`expert-net chaos`: whether a network gives the right reply when things go wrong on its way."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expert_driver import options, tables
from expert_driver.chaos.schedule import KINDS
from expert_driver.config import Computing
from expert_network.commandline import progress
from expert_network.errors import NodeError
from expert_network.units import duration

if TYPE_CHECKING:
    from expert_driver.chaos.rounds import Report

_HEADERS = ("round", "fault", "node", "token", "layer", "result", "added time")
_NUMBERS = ("round", "token", "layer", "added time")


def _kinds(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
    if unknown := [word for word in words if word not in KINDS]:
        problem = f"{unknown[0]!r} is no fault; there are {', '.join(KINDS)}"
        raise click.BadParameter(problem, ctx, parameter)
    return words


@click.command("chaos", context_settings=options.CONTEXT)
@options.store_argument
@options.nodes_option(required=True)
@click.option(
    "--exact/--sum",
    default=True,
    show_default=True,
    help="Exact replies, or sums, whose last bits may depend on which owner answers.",
)
@options.key_option
@options.home_option
@click.option(
    *("--faults", "kinds"),
    callback=_kinds,
    default=",".join(KINDS),
    show_default=True,
    metavar="KIND,KIND",
    help="What goes wrong.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Replies, with a fault in each.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=48,
    show_default=True,
    help="Length of a reply.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    show_default="a new one, which is printed",
    help="Makes the same faults at the same points again.",
)
@click.option("--json", "machine", is_flag=True, help="Print JSON, for programs.")
def command(
    store: str | None,
    nodes: tuple[str, ...],
    exact: bool,
    key_file: Path | None,
    home: Path | None,
    seed: int | None,
    machine: bool,
    **values: Any,
) -> None:
    """Have things go wrong between this machine and the nodes, and check the replies.

    The same greedy reply is made again and again, through a proxy of this process before each node.
    In each round one fault strikes one node's connection, at the dispatch of one layer of one
    token, both counted from 0: the connection is cut (cut), slow for a token (delay), dripping
    (drip) or silent (half-open), or one bit on it is flipped (corrupt). The nodes themselves are
    left alone, and so are their other drivers.

    The exit code is 4 if any reply failed, or was not the one without the fault.
    """
    # Imported here: it imports MLX.
    from expert_driver.chaos.rounds import Settings, run

    precision = "f32" if exact else "auto"
    config = options.network_config(nodes, exact, None, key_file, home, Computing(precision))
    settings = Settings(seed=secrets.randbits(32) if seed is None else seed, **values)
    with progress(counts="rounds") as shown:
        report = run(store, config, settings, shown)
    if machine:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _show(report)
    if report.failures:
        click.get_current_context().exit(NodeError.exit_code)


def _show(report: Report) -> None:
    tables.show(_HEADERS, _rows(report), sys.stdout, _NUMBERS)
    click.echo()
    for number, one in enumerate(report.rounds, 1):
        if one.error:
            click.echo(f"round {number}: {one.error}")
    right, rounds = len(report.rounds) - report.failures, len(report.rounds)
    click.echo(
        f"{right} of {rounds} replies of {report.settings.tokens} tokens were right; without a "
        f"fault one takes {duration(report.reply_s)}; seed {report.settings.seed}"
    )


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    for number, one in enumerate(report.rounds, 1):
        where = ("" if n is None else str(n) for n in (one.token, one.layer))
        yield str(number), one.fault, one.node, *where, one.result, f"{one.added_s:+.2f} s"
