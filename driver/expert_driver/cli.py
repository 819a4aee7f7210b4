"""`expert-net`: which commands there are. Each is imported when it is run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from expert_driver import options
from expert_network import __version__
from expert_network.commandline import DefaultGroup, run_command

COMMANDS = {
    "run": "Chat with a model, or answer one prompt (meant when no command is named).",
    "logits": "Write the logits of given token ids to a file.",
    "bench": "Measure how fast a model runs here, and what that is made of.",
    "status": "Show who owns what on a network, and whether it can work.",
    "chaos": "Have things go wrong between here and the nodes, and check the replies.",
    "demo": "Start two nodes on this machine and answer a prompt through them.",
    "key": "Make a cluster key.",
    "roster": "Compare two rosters: what a change would move.",
    "preprocess": "Turn a Hugging Face checkpoint into a store.",
    "download": "Fetch a model and turn it into a store.",
    "models": "List the supported models with their sizes.",
    "verify": "Hash a store again, or blocks in the memories of nodes.",
}


@click.group(
    cls=DefaultGroup,
    default="run",
    lazy={
        name: (f"expert_driver.commands.{name}:command", text) for name, text in COMMANDS.items()
    },
    context_settings=options.CONTEXT,
    subcommand_metavar="[STORE | COMMAND] [OPTIONS]",
)
@click.version_option(__version__, prog_name="expert-net")
def group() -> None:
    """Run a mixture-of-experts model whose experts live on many machines.

    \b
      expert-net STORE --chat               all experts in this process
      expert-net STORE --nodes a,b --chat   experts on nodes, the rest here
      expert-net --nodes a,b --chat         the same, without a copy of the store
      expert-net demo                       try it now, on this machine alone

    \b
    A node is HOST, HOST:PORT or a URL; the port is 8301 unless you say otherwise.

    STORE is a path, or the name of a store in the models folder; write ./demo for a folder that is
    called like a command.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run `expert-net` on `argv` (None: the process's own) and return its exit code."""
    return run_command(group, argv, "expert-net")
