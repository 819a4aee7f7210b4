"""`expert-net download`: from a model's name to a store."""

from __future__ import annotations

import difflib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from expert_driver import catalog, options
from expert_driver.commands.models import show
from expert_driver.commands.preprocess import quantization, quantization_options
from expert_driver.conversion import convert
from expert_network import places
from expert_network.backend import detect
from expert_network.commandline import progress
from expert_network.errors import CheckpointError, ConfigRefused, InputError
from expert_network.store.writer import check_out

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_SOURCE = ".source"  # beside the store, until it is converted


@dataclass(frozen=True)
class Source:
    """What was asked for: a folder on this machine, or else a repo. `name` is the store's."""

    name: str
    repo: str | None = None
    folder: Path | None = None


@click.command("download", context_settings=options.CONTEXT)
@click.argument("model", metavar="NAME|ORG/REPO|PATH|list")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    show_default="the models folder",
    help="Where the store will stand.",
)
@quantization_options
@click.option("--revision", help="Branch, tag or commit of the repo.")
@click.option("--keep-source", is_flag=True, help="Keep the checkpoint beside the store.")
@options.home_option
def command(
    model: str,
    output: Path | None,
    bits: str | None,
    group_size: str | None,
    revision: str | None,
    keep_source: bool,
    home: Path | None,
) -> None:
    """Fetch a model and turn it into a store.

    NAME is one of `expert-net models` (or `download list`), ORG/REPO any repo of the hub with a
    supported model, PATH a checkpoint that is here already. What was fetched is removed when the
    store is whole. A run that was stopped goes on when the same command is given again.
    """
    if model == "list":
        show(as_json=False)
        return
    width, size = quantization(bits, group_size)
    root = places.home(home)
    source = resolve(model)
    out = output or places.models_dir(root) / source.name
    if source.folder is not None:
        convert(source.folder, out, width, size, root)
        return
    assert source.repo is not None
    checkpoint, ours = _fetch(source.repo, revision, out, width, size)
    convert(checkpoint, out, width, size, root)
    if ours and not keep_source:
        shutil.rmtree(checkpoint)
    else:
        click.echo(f"{'source':<12}{checkpoint}")


def resolve(model: str) -> Source:
    """What `model` means: a known name, a folder, or a repo, in this order.

    Raises InputError for a word that is none of them, with the nearest known names.
    """
    entry = catalog.find(model)
    if entry is not None:
        return Source(entry.name, repo=entry.repo)
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, folder=path)
    if _REPO.fullmatch(model):
        return Source(model.rpartition("/")[2], repo=model)
    near = _near(model)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise InputError(
        f"{model} is no folder, no org/repo and none of the names in `expert-net models`.{hint}"
    )


def _near(model: str) -> list[str]:
    """The known names that contain `model`, else those that are spelled like it."""
    names = {entry.name.lower(): entry.name for entry in catalog.load()}
    found = [names[name] for name in names if model.lower() in name]
    return found or [names[name] for name in difflib.get_close_matches(model.lower(), names)]


def _fetch(
    repo: str, revision: str | None, out: Path, bits: int | None, group_size: int
) -> tuple[Path, bool]:
    """The checkpoint's folder, complete, and whether it is ours to remove.

    Its config is looked at before the long part. A copy in the hub's own cache is used in place.
    """
    detect()
    from expert_driver import hub

    check_out(out)
    folder = out.with_name(out.name + _SOURCE)
    snapshot = hub.find(repo, revision, folder)
    if there := hub.cached(snapshot):
        return there, False
    with hub.prepared(snapshot, folder):
        hub.fetch_configs(snapshot, folder)
        _check(repo, folder, bits)
        # A bf16 weight becomes `bits` and its part of a scale and a bias of 16 bits each.
        share = 1.0 if bits is None else (bits + 32 / group_size) / 16
        with progress() as report:
            hub.fetch(snapshot, folder, report, then=int(snapshot.nbytes * share))
    return folder, True


def _check(repo: str, folder: Path, bits: int | None) -> None:
    """Look at the config that was fetched first; if it will not do, leave nothing behind."""
    from expert_network.model.checkpoint import check_config, check_experts

    try:
        config = check_config(folder)
        check_experts(folder, config)
        if bits is not None and "quantization" in config:
            raise CheckpointError(repo, "its weights are quantized already", "leave out --bits")
    except ConfigRefused as error:
        shutil.rmtree(folder)
        raise InputError(
            f"{repo} asks to run code of its own ({error.entry!r} in {error.path.name}), which is "
            "never done here; choose another repo of this model, or download it yourself, remove "
            f"{error.entry!r} there if mlx-lm supports the model without it, and convert that with "
            "`expert-net preprocess`."
        ) from error
    except InputError:
        shutil.rmtree(folder)
        raise
