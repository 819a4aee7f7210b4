"""`expert-net logits`: the parity tool, which needs token ids and no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from expert_driver import options
from expert_network.backend import detect


@click.command("logits", context_settings=options.CONTEXT)
@options.store_argument
@click.option(
    "--ids",
    required=True,
    metavar="1,2,3|FILE",
    help="Token ids, or a file of them: .npy, .json, or text with spaces or commas between.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The .npy file to write: float32 (number of ids, vocabulary).",
)
@options.network_options
@options.computing_options("f32")
def command(
    store: str | None,
    ids: str,
    output: Path,
    nodes: tuple[str, ...],
    exact: bool,
    wire: str | None,
    key_file: Path | None,
    home: Path | None,
    **values: Any,
) -> None:
    """Write the logits after each of the given token ids."""
    computing = options.computing(values)
    detect(computing.kernels, computing.threads)
    config = options.network_config(nodes, exact, wire, key_file, home, computing)
    # Imported here: it imports numpy and MLX.
    from expert_driver import parity

    parity.run(store, config, parity.read_ids(ids), output)
