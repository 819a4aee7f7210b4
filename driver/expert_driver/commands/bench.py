"""`expert-net bench`: how fast a model runs here, and what each part of that costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from expert_driver import options
from expert_driver.bench.settings import PARTS, QUICK, Settings
from expert_driver.config import NetworkConfig

#: What --compare takes, and the values that each can have.
COMPARABLE = {"wire": ("bf16", "f16", "f32", "int8"), "precision": ("int8", "f32")}

Comparison = tuple[str, tuple[str, ...]]


def _lengths(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Numbers of tokens with commas between, ascending."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is not a list of lengths", ctx, parameter)
    return tuple(sorted({int(word) for word in words}))


def _compared(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """An option and its values."""
    if value is None:
        return None
    option, _, listed = value.partition("=")
    values = tuple(word.strip() for word in listed.split(",") if word.strip())
    if len(set(values)) < max(2, len(values)) or not set(values) <= set(COMPARABLE.get(option, ())):
        known = " or ".join(f"{name}={','.join(them)}" for name, them in COMPARABLE.items())
        problem = f"{value!r} does not name two values to compare; give some of {known}"
        raise click.BadParameter(problem, ctx, parameter)
    return option, values


def _list(name: str, text: str) -> Callable[[options.Command], options.Command]:
    return click.option(
        name, callback=_lengths, metavar="N,N", show_default="128,512,2048", help=text
    )


def _number(name: str, default: str, text: str) -> Callable[[options.Command], options.Command]:
    return click.option(name, type=click.IntRange(min=1), show_default=default, help=text)


@click.command("bench", context_settings=options.CONTEXT)
@options.store_argument
@options.network_options
@options.computing_options()
@_list("--contexts", "After how many tokens to decode.")
@_list("--prompts", "How many tokens to read.")
@_number("--tokens", "32", "Tokens decoded at each context in each round.")
@_number("--dispatches", "200", "Dispatches of one row that are timed in each round.")
@_number("--rounds", "5", "How often everything is measured.")
@click.option(
    "--only", type=click.Choice(PARTS), multiple=True, help="This part; may be given several times."
)
@click.option(
    *("--compare", "comparison"),
    callback=_compared,
    metavar="OPTION=A,B",
    help="Measure some values of --wire or --precision in turns.",
)
@click.option("--quick", is_flag=True, help="A rough answer: 128 tokens, 3 short rounds.")
@options.trace_option
@click.option("--json", "machine", is_flag=True, help="Print JSON, for programs.")
def command(
    store: str | None,
    nodes: tuple[str, ...],
    exact: bool,
    wire: str | None,
    key_file: Path | None,
    home: Path | None,
    only: tuple[str, ...],
    comparison: Comparison | None,
    quick: bool,
    trace: Path | None,
    machine: bool,
    **values: Any,
) -> None:
    """Measure how fast a model runs here, and what that is made of.

    Without --nodes all experts are in this process, and its kernels are measured against its
    memory. With --nodes, what a dispatch costs besides computing is measured instead.
    """
    computing = options.computing(values)
    given = {name: value for name, value in values.items() if value is not None}
    if only:
        given["parts"] = tuple(part for part in PARTS if part in only)
    settings = replace(QUICK if quick else Settings(), **given)
    config = options.network_config(nodes, exact, wire, key_file, home, computing)
    # Imported here: it imports MLX.
    from expert_driver.bench import running
    from expert_driver.trace import tracing
    from expert_network.commandline import progress

    with progress(counts="tokens") as shown, tracing(trace) as tracer:
        report = running.run(store, _variants(config, comparison), settings, shown, tracer)
    if machine:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        report.show(sys.stdout)


def _variants(config: NetworkConfig, comparison: Comparison | None) -> dict[str, NetworkConfig]:
    """The configs that are measured, by the name of what differs; the first is the base."""
    if comparison is None:
        return {"": config}
    option, values = comparison
    if option == "wire":
        return {value: replace(config, wire=value) for value in values}
    computing = {value: replace(config.computing, precision=value) for value in values}
    return {value: replace(config, computing=computing[value]) for value in values}
