"""`expert-net preprocess`: from a Hugging Face checkpoint to a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from expert_driver import options
from expert_driver.conversion import BITS, GROUP_SIZES, convert
from expert_network import places

Command = TypeVar("Command", bound=Callable[..., Any])


def quantization_options(command: Command) -> Command:
    """--bits and --group-size."""
    bits = click.option(
        "--bits",
        type=click.Choice([str(bits) for bits in BITS]),
        help="Quantize to this many bits a weight; left out, the weights stay as they are.",
    )
    group_size = click.option(
        "--group-size",
        type=click.Choice([str(size) for size in GROUP_SIZES]),
        show_default="64",
        help="Weights that share a scale, with --bits.",
    )
    return bits(group_size(command))


def quantization(bits: str | None, group_size: str | None) -> tuple[int | None, int]:
    """The values of `quantization_options`."""
    if bits is None and group_size is not None:
        raise click.UsageError("--group-size says something only together with --bits.")
    return None if bits is None else int(bits), int(group_size or 64)


@click.command("preprocess", context_settings=options.CONTEXT)
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@quantization_options
@options.home_option
def command(
    src: Path, out: Path, bits: str | None, group_size: str | None, home: Path | None
) -> None:
    """Turn the checkpoint SRC into a store at OUT.

    SRC is a folder with config.json and safetensors files. Memory stays under two layers whatever
    the model's size. A run that was stopped goes on when the same command is given again.
    """
    convert(src, out, *quantization(bits, group_size), places.home(home))
