"""`expert-net verify`: hash everything in a store again, or blocks in nodes' memories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

import click

from expert_driver import options
from expert_network import disk, places
from expert_network.commandline import progress
from expert_network.errors import ExpertNetworkError, InputError, NodeError
from expert_network.net.auth import ClusterKey
from expert_network.store.reader import Store
from expert_network.units import size

SAMPLES = 16


@click.command("verify", context_settings=options.CONTEXT)
@options.store_argument
@options.nodes_option()
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=SAMPLES,
    show_default=True,
    help="With --nodes: how many blocks of each node are checked; all if it holds no more.",
)
@options.key_option
@options.home_option
@click.pass_context
def command(
    ctx: click.Context,
    store: str | None,
    nodes: tuple[str, ...],
    samples: int,
    key_file: Path | None,
    home: Path | None,
) -> None:
    """Hash every file and block of STORE and compare with its manifest.

    With --nodes, blocks that are chosen at random are checked where they are used, in the memories
    of nodes: each node proves that it holds the bytes of the manifest. The right bytes come from
    STORE if it is given, else from other nodes.

    Each file or block that differs is named. The exit code is 0 if all is sound and 3 if not; 4 if
    a node could not be asked.
    """
    opened = store and Store.open_unchecked(places.find_store(store, places.home(home)))
    if nodes:
        ctx.exit(_verify_nodes(nodes, samples, options.key(key_file), opened or None))
    if not opened:
        raise click.UsageError("Say what is to be verified: STORE, --nodes URL,URL, or both.")
    with progress() as report:
        problems = opened.verify(report)
    _say(problems)
    manifest = opened.manifest
    if problems:
        click.echo(f"{opened.path} is damaged: {_count(problems)}")
        ctx.exit(InputError.exit_code)
    held = sum(len(opened.held(layer)) for layer, _ in manifest.shape)
    part = f" of {manifest.block_count:,}" if held < manifest.block_count else ""
    click.echo(
        f"{opened.path} is sound: {held:,}{part} blocks and {len(manifest.files)} files, "
        f"{size(disk.sizes(opened.path)[1] if part else manifest.total_bytes)}, "
        f"digest {manifest.digest}"
    )


def _verify_nodes(
    urls: Sequence[str], count: int, key: ClusterKey | None, own: Store | None
) -> int:
    """Spot-check nodes and say what was found; the exit code."""
    from expert_driver import fetching
    from expert_driver.spotcheck import choose, spot_check

    nodes, manifest = fetching.holders(urls, key, own)
    samples = choose(nodes, count, SystemRandom())
    with progress(counts="blocks") as report:
        problems = spot_check(samples, nodes, manifest, key, own, report)
    _say(problems)
    names = ", ".join(node.name for node in nodes)
    if not problems:
        click.echo(
            f"{names}: {len(samples):,} of {sum(len(node.blocks) for node in nodes):,} blocks in "
            f"memory checked, all sound, digest {manifest.digest}"
        )
        return 0
    click.echo(f"{names}: {_count(problems)}")
    found = any(isinstance(problem, InputError) for problem in problems)
    return InputError.exit_code if found else NodeError.exit_code


def _say(problems: Sequence[ExpertNetworkError]) -> None:
    for problem in problems:
        click.echo(f"error: {problem}", err=True)


def _count(problems: Sequence[ExpertNetworkError]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
