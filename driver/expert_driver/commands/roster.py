"""`expert-net roster`: what another roster would move, and giving it to a network that runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from expert_driver import options, rosters, tables
from expert_driver.dispatch.agreement import describe
from expert_network import places
from expert_network.commandline import progress
from expert_network.errors import NetworkMismatch
from expert_network.net.auth import ClusterKey
from expert_network.store.reader import Store
from expert_network.units import duration, size
from expert_roster.diff import RosterDiff, diff
from expert_roster.roster import Roster

# More layers and experts than any model has; they keep a slip of the finger from taking minutes.
_MOST_LAYERS, _MOST_EXPERTS = 1024, 4096


@dataclass(frozen=True)
class Comparison:
    """Two rosters, the `blocks` they split, what moves, and its bytes by (source, target)."""

    old: Roster
    new: Roster
    blocks: int
    diff: RosterDiff
    sizes: dict[tuple[str, str], int] | None


@click.group("roster", context_settings=options.CONTEXT)
def command() -> None:
    """Compare rosters, lists of named nodes that share one model, or set a network's."""


@command.command("diff")
@click.argument("old")
@click.argument("new")
@click.option("--store", help="The store whose blocks would move; a path or a name.")
@click.option("--layers", type=click.IntRange(1, _MOST_LAYERS), help="MoE layers, without a store.")
@click.option("--experts", type=click.IntRange(1, _MOST_EXPERTS), help="Experts in each of them.")
@click.option("--replicas", type=click.IntRange(1), help="Owners of each block, in both rosters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
@options.home_option
def diff_command(
    old: str,
    new: str,
    store: str | None,
    layers: int | None,
    experts: int | None,
    replicas: int | None,
    as_json: bool,
    home: Path | None,
) -> None:
    """Show what would move if the roster OLD became NEW.

    Each is written as for --roster: names (a,b), names with weights (a=64,b=16), or a TOML file.
    """
    shape, block_bytes = _shape(store, layers, experts, home)
    compared = compare(
        Roster.from_spec(old, _read_text, replicas),
        Roster.from_spec(new, _read_text, replicas),
        shape,
        block_bytes,
    )
    if as_json:
        click.echo(json.dumps(to_json(compared), indent=2))
    else:
        show(compared)


@command.command("set")
@click.argument("new", metavar="ROSTER")
@options.nodes_option(required=True)
@click.option("--replicas", type=click.IntRange(1), help="Owners of each block.  [default: as now]")
@click.option("--dry-run", is_flag=True, help="Show what would move, and change nothing.")
@click.option("--force", is_flag=True, help="Give up what somebody else is setting just now.")
@options.key_option
def set_command(
    new: str,
    nodes: tuple[str, ...],
    replicas: int | None,
    dry_run: bool,
    force: bool,
    key_file: Path | None,
) -> int:
    """Give a network that runs another roster, while it answers.

    ROSTER is written as for --roster. Nodes first fetch what they gain, then all change over
    between two tokens. --nodes needs one node that knows the others, or all of them.
    """
    return asyncio.run(_set(new, nodes, replicas, dry_run, force, options.key(key_file)))


async def _set(
    new: str,
    nodes: tuple[str, ...],
    replicas: int | None,
    dry_run: bool,
    force: bool,
    key: ClusterKey | None,
) -> int:
    network = await rosters.look(nodes, key)
    for sentence in rosters.disagreements(network):
        click.echo(f"note: {sentence}", err=True)
    if network.pending and not (force or dry_run):
        raise NetworkMismatch(
            "somebody else is setting a roster; wait until that is done, or give it up with "
            "--force."
        )
    wanted = _roster(new, replicas, network.roster)
    epoch = network.next_epoch
    plan = await rosters.plan(network, Roster(wanted.nodes, wanted.replicas, epoch), key)
    if plan.new.digest == plan.old.digest and not network.late:
        click.echo(f"the network has this roster already, with epoch {plan.old.epoch}")
        return 0
    show_plan(plan)
    if dry_run:
        return 0
    if network.pending:
        await rosters.give_up_others(network, key)
    with progress() as report:
        await rosters.carry_out(plan, key, report)
    click.echo(f"epoch {epoch} has begun: {describe(plan.new)}")
    return 0


def _roster(spec: str, replicas: int | None, now: Roster) -> Roster:
    """What was written, with as many replicas as `now` where nothing says how many."""
    wanted = Roster.from_spec(spec, _read_text, replicas)
    is_file = spec.endswith(".toml") or "/" in spec
    if replicas is None and not is_file and now.replicas > 1:
        return Roster(wanted.nodes, min(now.replicas, len(wanted.nodes)))
    return wanted


def show_plan(plan: rosters.Plan) -> None:
    """What would move, for people: a line for each node, and all of it in one sentence."""
    numbers = ["blocks", "after", "gains", "fetches", "gives up"]
    rows = []
    for node in plan.diff.nodes:
        gained, lost = plan.sizes[node.name]
        counts = [f"{node.before:,}", f"{node.after:,}", f"{node.fetched:,}"]
        rows.append([node.name, *counts, size(gained), size(lost)])
    tables.show(["node", *numbers], rows, sys.stdout, numbers)
    moved = f"{plan.diff.moved:,} of {plan.diff.total:,} copies of blocks move, {size(plan.bytes)}"
    took = ""
    if plan.rate:
        took = f"; about {duration(plan.seconds)} at {size(plan.rate)}/s, as measured just now"
    click.echo(f"\n{moved}{took}.")
    if plan.gone:
        click.echo(f"{', '.join(plan.gone)} of the old roster did not answer.")


def _read_text(path: str) -> str:
    return Path(path).read_text("utf-8")


def _shape(
    store: str | None, layers: int | None, experts: int | None, home: Path | None
) -> tuple[list[tuple[int, int]], dict[int, int] | None]:
    """What is shared: (layer, number of experts), and the bytes of a block by layer if known."""
    if store is not None and layers is None and experts is None:
        path = places.find_store(store, places.home(home))
        manifest = Store.open_unchecked(path, blocks=False).manifest
        return manifest.shape, {spec.layer: spec.block_bytes for spec in manifest.layers}
    if store is None and layers is not None and experts is not None:
        return [(layer, experts) for layer in range(layers)], None
    raise click.UsageError("Say what is shared: --store STORE, or --layers N and --experts N.")


def compare(
    old: Roster,
    new: Roster,
    shape: Sequence[tuple[int, int]],
    block_bytes: Mapping[int, int] | None,
) -> Comparison:
    """What moves in a model of `shape`, (layer, number of experts), and in bytes if known."""
    result = diff(old, new, shape)
    sizes = None if block_bytes is None else result.pair_bytes(block_bytes)
    return Comparison(old, new, sum(experts for _, experts in shape), result, sizes)


def to_json(compared: Comparison) -> dict[str, Any]:
    """The comparison for machines; "bytes" are there when the size of a block is known."""
    result, sizes = compared.diff, compared.sizes
    moves = [
        {"source": source, "target": target, "copies": copies}
        | ({} if sizes is None else {"bytes": sizes[source, target]})
        for (source, target), copies in result.pairs.items()
    ]
    return {
        "old": compared.old.to_wire() | {"digest": compared.old.digest},
        "new": compared.new.to_wire() | {"digest": compared.new.digest},
        "blocks": compared.blocks,
        "copies": result.total,
        "kept": result.kept,
        "moved": result.moved,
        **({} if sizes is None else {"bytes": sum(sizes.values())}),
        "nodes": [node._asdict() for node in result.nodes],
        "moves": moves,
    }


def show(compared: Comparison) -> None:
    """The comparison for people: the nodes, the moves, and both in one sentence."""
    numbers = ["before", "after", "change", "to fetch"]
    tables.show(["node", *numbers], _node_rows(compared.diff), sys.stdout, numbers)
    if compared.diff.moves:
        click.echo()
        numbers = ["moved", "of all"] if compared.sizes is None else ["moved", "of all", "size"]
        tables.show(["from -> to", *numbers], _move_rows(compared), sys.stdout, numbers)
    click.echo(f"\n{summary(compared)}")


def summary(compared: Comparison) -> str:
    """One sentence, and a second where replicas make copies differ from blocks."""
    result, before, after = compared.diff, compared.old.replicas, compared.new.replicas
    what = "blocks" if before == after == 1 else "copies"
    share = _percent(result.moved, result.total)
    if compared.sizes is not None:
        share += f", {size(sum(compared.sizes.values()))}"
    sentence = f"{result.moved:,} of {result.total:,} {what} move ({share}); {result.kept:,} stay."
    if what == "blocks":
        return sentence
    replicas = f"{after}" if before == after else f"{before} before and {after} after"
    return f"{sentence} A copy is a block at one of its owners; replicas: {replicas}."


def _node_rows(result: RosterDiff) -> Iterator[list[str]]:
    for name, before, after, fetched in result.nodes:
        change = f"{after - before:+,}" if after != before else "0"
        yield [name, f"{before:,}", f"{after:,}", change, f"{fetched:,}"]


def _move_rows(compared: Comparison) -> Iterator[list[str]]:
    for (source, target), copies in compared.diff.pairs.items():
        row = [f"{source} -> {target}", f"{copies:,}", _percent(copies, compared.diff.total)]
        sizes = compared.sizes
        yield row if sizes is None else [*row, size(sizes[source, target])]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
