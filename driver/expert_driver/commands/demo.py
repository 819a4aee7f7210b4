"""`expert-net demo`: try it now, on this machine alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from expert_driver import demo, options
from expert_network import places


@click.command("demo", context_settings=options.CONTEXT)
@click.option("-p", "--prompt", help="Reply to this and end.")
@click.option(
    "--nodes-count",
    type=click.IntRange(1, demo.MOST_NODES),
    default=2,
    show_default=True,
    help="How many nodes to start.",
)
@options.sampling_options(max_tokens=256)
@options.computing_options()
@options.home_option
def command(prompt: str | None, nodes_count: int, home: Path | None, **values: Any) -> None:
    """Start nodes on this machine and answer a prompt through them.

    The model that comes with the package tells little stories. Everything that is started is
    stopped at the end, whatever ends it. Needs no network and leaves nothing behind.
    """
    from expert_network.backend import detect

    computing = options.computing(values)
    detect(computing.kernels, computing.threads)
    sampling = options.sampling(values)
    demo.run(prompt, nodes_count, sampling, computing, os.environ, places.home(home))
