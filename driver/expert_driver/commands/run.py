"""`expert-net STORE`: chat, or the reply to one prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from expert_driver import options
from expert_network import places
from expert_network.backend import detect
from expert_network.errors import StoreError


@click.command("run", context_settings=options.CONTEXT)
@options.store_argument
@options.network_options
@click.option(
    "--hedge",
    is_flag=True,
    help="Ask replicas too for a row that is late, and take what is there first.",
)
@click.option("--chat", is_flag=True, help="Chat; meant at a terminal when there is no -p.")
@click.option("-p", "--prompt", help="Reply to this and end; - reads it from standard input.")
@click.option("--system-prompt", help="What the model is told before the conversation.")
@options.sampling_options(max_tokens=512)
@options.computing_options()
@options.verbose_option
@options.trace_option
def command(
    store: str | None,
    nodes: tuple[str, ...],
    exact: bool,
    wire: str | None,
    key_file: Path | None,
    home: Path | None,
    hedge: bool,
    chat: bool,
    prompt: str | None,
    system_prompt: str | None,
    verbose: bool,
    trace: Path | None,
    **values: Any,
) -> None:
    """Chat with a model, or answer one prompt.

    Without --nodes all experts are computed in this process. With --nodes and no STORE the trunk
    and the tokenizer are fetched from a node, once.
    """
    if chat and prompt is not None:
        raise click.UsageError("--chat and -p exclude each other.")
    computing = options.computing(values)
    detect(computing.kernels, computing.threads)
    if store is not None:
        _look_up(store, places.home(home))
    if prompt is None and not chat and not sys.stdin.isatty():
        prompt = "-"
    question = sys.stdin.read() if prompt == "-" else prompt
    if question is not None and not question.strip():
        raise click.UsageError("the prompt is empty.")
    config = options.network_config(nodes, exact, wire, key_file, home, computing)
    config = replace(config, hedge=hedge)
    # Imported here: all of it imports MLX.
    from expert_driver import talk

    talk.run(store, config, options.sampling(values), question, system_prompt, verbose, trace)


def _look_up(store: str, home: Path) -> None:
    """Raise StoreError before anything is read or loaded if there is no such store."""
    from expert_driver.cli import COMMANDS

    try:
        places.find_store(store, home)
    except StoreError as error:
        if not (close := get_close_matches(store, COMMANDS, 1)):
            raise
        advice = f"{error.advice}; or did you mean `expert-net {close[0]}`"
        raise StoreError(error.path, error.problem, advice) from None
