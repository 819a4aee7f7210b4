"""The options that several commands share, and how their values become a config."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import click

from expert_driver.config import Computing, NetworkConfig, Sampling
from expert_network import places
from expert_network.commandline import cluster_key
from expert_network.net.auth import ClusterKey

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
KEY = "EXPERT_NETWORK_KEY"


class Number(click.FloatRange):
    """A range that NaN is not in, though no comparison says so."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def store_argument(command: Command) -> Command:
    return click.argument("store", required=False, metavar="[STORE]")(command)


def home_option(command: Command) -> Command:
    return click.option(
        "--home",
        envvar="EXPERT_NETWORK_HOME",
        type=click.Path(path_type=Path, file_okay=False),
        show_default=str(places.home(None)),
        help="Where the models folder and the cache stand.",
    )(command)


def key_option(command: Command) -> Command:
    return click.option(
        "--key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"File with the cluster key; else the key itself is read from {KEY}.",
    )(command)


def nodes_option(required: bool = False) -> Callable[[Command], Command]:
    return click.option(
        "--nodes",
        required=required,
        callback=_split,
        metavar="URL,URL",
        help="The nodes that hold the experts, such as http://mini:8301,http://studio:8301.",
    )


def network_options(command: Command) -> Command:
    """--nodes, --exact, --wire, --key-file and --home, in this order."""
    exact = click.option(
        "--exact",
        is_flag=True,
        help="Bits identical to the one-process run, for several times the traffic.",
    )
    wire = click.option(
        "--wire",
        type=click.Choice(["bf16", "f16", "f32", "int8"]),
        show_default="bf16, and the compute dtype with --exact",
        help="What rows travel as.",
    )
    for option in (home_option, key_option, wire, exact, nodes_option()):
        command = option(command)
    return command


def sampling_options(max_tokens: int) -> Callable[[Command], Command]:
    """The options of `Sampling`, named as mlx-lm names them."""

    def decorate(command: Command) -> Command:
        for name, kind, default, text in reversed(
            [
                ("--max-tokens", click.IntRange(min=1), max_tokens, "Longest reply, in tokens."),
                (
                    "--temp",
                    Number(min=0, max=1e6),
                    0.0,
                    "0 takes the likeliest token.",
                ),
                (
                    "--top-p",
                    Number(0, 1),
                    1.0,
                    "Sample from this much probability.",
                ),
                ("--top-k", click.IntRange(min=0), 0, "Sample from this many tokens; 0 is all."),
                (
                    "--min-p",
                    Number(0, 1),
                    0.0,
                    "Least chance, of the likeliest's.",
                ),
            ]
        ):
            option = click.option(name, type=kind, default=default, show_default=True, help=text)
            command = option(command)
        for option in (
            click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token."),
            click.option(
                "--seed", type=click.IntRange(0, (1 << 63) - 1), help="Makes sampling repeatable."
            ),
        ):
            command = option(command)
        return command

    return decorate


def computing_options(precision: str = "auto") -> Callable[[Command], Command]:
    """The options of `Computing`."""
    chosen = {
        "auto": "int8 where native kernels run, f32 with --exact",
        "f32": "f32",
    }

    def decorate(command: Command) -> Command:
        for option in (
            click.option(
                "--threads",
                type=click.IntRange(1, 1024),
                show_default="usable cores",
                help="How many threads native kernels use.",
            ),
            click.option(
                "--kernels",
                type=click.Choice(["auto", "native", "mlx"]),
                default="auto",
                show_default="native on a CPU, if they are built",
                help="What computes in this process.",
            ),
            click.option(
                "--precision",
                type=click.Choice(["auto", "int8", "f32"]),
                default=precision,
                show_default=chosen[precision],
                help="Of activations in native kernels, here and on nodes.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def verbose_option(command: Command) -> Command:
    return click.option(
        "-v", "--verbose", is_flag=True, help="Show speed, traffic and shares after each reply."
    )(command)


def trace_option(command: Command) -> Command:
    return click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write what driver and nodes did and when, as Chrome trace events.",
    )(command)


def key(key_file: Path | None) -> ClusterKey | None:
    """The cluster key of --key-file, else of the environment; see commandline.cluster_key."""
    return cluster_key(key_file, KEY)


def network_config(
    nodes: tuple[str, ...],
    exact: bool,
    wire: str | None,
    key_file: Path | None,
    home: Path | None,
    computing: Computing,
) -> NetworkConfig:
    """The config of the network options, with the key read. Raises as Computing.precise does."""
    computing.precise(exact)
    return NetworkConfig(nodes, exact, wire, key(key_file), places.home(home), computing)


def computing(values: dict[str, Any]) -> Computing:
    """Take the values of `computing_options` out of `values`."""
    return Computing(**{name: values.pop(name) for name in Computing.__dataclass_fields__})


def sampling(values: dict[str, Any]) -> Sampling:
    """Take the values of `sampling_options` out of `values`."""
    return Sampling(**{name: values.pop(name) for name in Sampling.__dataclass_fields__})


def _split(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    urls = tuple(url.strip() for url in (value or "").split(",") if url.strip())
    if value is not None and not urls:
        raise click.BadParameter("no node is named", ctx, parameter)
    if len(set(urls)) < len(urls):
        raise click.BadParameter("a node is named twice", ctx, parameter)
    return urls
